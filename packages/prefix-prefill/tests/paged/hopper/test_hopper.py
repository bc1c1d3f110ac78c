"""The kernel for Hopper: what it takes, who serves the rest, and what it builds into."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from prefix_prefill import api
from prefix_prefill._linked.host.forms import Memory
from prefix_prefill._paged import launch as paged_launch
from prefix_prefill._paged.call import ORDINARY, Options, Tensors
from prefix_prefill._paged.hopper import launch as hopper_launch
from prefix_prefill._paged.hopper.launch import as_rows
from prefix_prefill._paged.hopper_tiles import hopper_tile, is_worth_tall, takes_tall
from prefix_prefill._paged.portable.tile_launch import TilePlan
from prefix_prefill._paged.tiles import MAX_ROWS, copied_keys, rows_of_page, takes_hopper
from torch import Tensor

from ..._linked.gpus import absent_gpu, chosen, compiling, counting, recording
from ..._linked.spills import check_builds
from ..._linked.views import VIEWS
from ..._numerics import Problem, check, make_case
from .._aot import Config, launch_attention

HOPPER = "nvidia:sm_90"
HEAD_DIMS = [64, 128, 256]

# ---- what it takes


def call(head_dim: int = 128, dtype: torch.dtype = torch.bfloat16, page: int = 16) -> Tensors:
    def meta(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(*size, dtype=dtype, device="meta")

    q, cache = meta(9, 8, head_dim, dtype=dtype), meta(5, page, 2, head_dim, dtype=dtype)
    small = [meta(2, 3), meta(3), meta(2)]
    return Tensors(q, cache, cache, None, None, *small, *[None] * 10, q, None)


OPTIONS = ORDINARY._replace(softmax_scale=0.1, window_right=0)


@pytest.mark.eager
@pytest.mark.parametrize(
    ("head_dim", "dtype", "page", "taken"),
    [
        (128, torch.bfloat16, 16, True),
        (64, torch.float16, 48, True),
        (256, torch.float16, 1056, True),
        (40, torch.bfloat16, 128, True),
        (32, torch.bfloat16, 16, False),  # half of a tile would be padding
        (264, torch.bfloat16, 16, False),
        (128, torch.float32, 16, False),
        (128, torch.bfloat16, 8, False),  # pieces too small for a copy each
        (128, torch.bfloat16, 24, False),
    ],
)
def test_serves(head_dim, dtype, page, taken):
    x = call(head_dim, dtype, page)
    with absent_gpu(HOPPER):
        assert takes_hopper(x, OPTIONS) == taken
    with absent_gpu("nvidia:sm_80"):
        assert not takes_hopper(x, OPTIONS)


@pytest.mark.eager
@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("page", [1, 16, 24])
def test_serves_fp8_caches_with_any_page(stored, page):
    x = call(page=page)
    cache = torch.empty(5, page, 2, 128, dtype=stored, device="meta")
    one = torch.empty(1, device="meta")
    x = x._replace(k_cache=cache, v_cache=cache, k_descale=one)
    with absent_gpu(HOPPER):
        assert takes_hopper(x, OPTIONS)
        assert takes_hopper(x, OPTIONS._replace(window_left=3))
        # an odd number of rows of 8 bytes
        assert not takes_hopper(x._replace(v_cache=cache[..., 8:]), OPTIONS)


@pytest.mark.eager
@pytest.mark.parametrize("page", [1, 24, 544])
def test_serves_caches_of_integers(page):
    x, scales = call(page=page), torch.empty(5, page, 2, dtype=torch.float16, device="meta")
    for stored, width in ((torch.int8, 128), (torch.uint8, 64)):
        cache = torch.empty(5, page, 2, width, dtype=stored, device="meta")
        y = x._replace(k_cache=cache, v_cache=cache, k_scale_cache=scales, v_scale_cache=scales)
        with absent_gpu(HOPPER):
            assert takes_hopper(y, OPTIONS)
            assert takes_hopper(y, OPTIONS._replace(window_left=0))
            # rows that begin between two accesses
            assert not takes_hopper(y._replace(v_cache=cache[..., 8:]), OPTIONS)
            assert not takes_hopper(y._replace(q=x.q.float(), out=x.q.float()), OPTIONS)


@pytest.mark.eager
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float8_e4m3fn])
def test_serves_new_keys(stored):
    """With windows of as many keys as are copied at once, or more."""
    x = call()
    cache = torch.empty(5, 16, 2, 128, dtype=stored, device="meta")
    new = torch.empty(9, 2, 128, dtype=torch.bfloat16, device="meta")
    x = x._replace(k_cache=cache, v_cache=cache, k=new, v=new)
    with absent_gpu(HOPPER):
        assert takes_hopper(x, OPTIONS)
        assert takes_hopper(x, OPTIONS._replace(decode_from_cache=True))
        assert takes_hopper(x, OPTIONS._replace(window_left=14))
        assert not takes_hopper(x, OPTIONS._replace(window_left=13))


@pytest.mark.eager
def test_leaves_the_rest_to_the_portable_kernel():
    x = call()
    one = torch.empty(1, device="meta")
    with absent_gpu(HOPPER):
        for scale in (0.0, -1.0, 1e-60):
            assert not takes_hopper(x, OPTIONS._replace(softmax_scale=scale))
        for name in ("out_scale", "positions", "tree_mask"):
            assert not takes_hopper(x._replace(**{name: one}), OPTIONS)
        eight = x.k_cache.to(torch.float8_e4m3fn)
        assert not takes_hopper(x._replace(q=x.q.to(eight.dtype), k_cache=eight), OPTIONS)
        assert takes_hopper(x._replace(out=x.q.float()), OPTIONS)
        assert not takes_hopper(x._replace(out=x.q.half()), OPTIONS)
        narrow = x._replace(v_cache=x.v_cache[..., :64], out=x.out[..., :64])
        assert not takes_hopper(narrow, OPTIONS)
        assert not takes_hopper(x, OPTIONS._replace(num_splits=2))
        assert not takes_hopper(x, OPTIONS._replace(window_left=13))
        assert takes_hopper(x, OPTIONS._replace(window_left=14))
        slopes = x._replace(alibi_slopes=one)
        signed = OPTIONS._replace(signed_alibi=True)
        assert takes_hopper(slopes, OPTIONS._replace(window_right=-1))
        assert takes_hopper(slopes, signed)
        assert not takes_hopper(slopes, signed._replace(window_right=-1))
        packed = torch.empty(5, 2, 16, 16, 8, dtype=torch.bfloat16, device="meta")
        assert not takes_hopper(x._replace(k_cache=packed), OPTIONS)
        assert not takes_hopper(x._replace(k_cache=x.k_cache[:0], v_cache=x.v_cache[:0]), OPTIONS)
        on_cpu = x._replace(q=torch.empty_like(x.q, device="cpu"))
        assert not takes_hopper(on_cpu, OPTIONS)


@pytest.mark.eager
@pytest.mark.parametrize(
    ("view", "taken"),
    [
        ("heads_first", True),  # [num_blocks, heads, page, head_dim] in memory
        ("last_dim_strided", False),
        ("odd_token_stride", False),
        ("reversed_memory", False),
    ],
)
def test_a_cache_is_read_where_it_is_or_not_at_all(view, taken):
    cache = VIEWS[view](torch.zeros(5, 16, 2, 64, dtype=torch.bfloat16))
    cache = torch.empty_strided(cache.shape, cache.stride(), dtype=cache.dtype, device="meta")
    plain = call(64)
    for x in (plain._replace(k_cache=cache), plain._replace(v_cache=cache)):
        with absent_gpu(HOPPER):
            assert takes_hopper(x, OPTIONS) == taken


@pytest.mark.eager
def test_keys_and_values_of_one_allocation():
    """As engines have them: side by side, or in turns from page to page."""
    for axis in (0, 1):
        both = torch.zeros(*((2, 5) if axis == 0 else (5, 2)), 16, 3, 64, dtype=torch.bfloat16)
        for cache in both.unbind(axis):
            rows = as_rows(cache)
            assert rows[rows_of_page(cache)].data_ptr() == cache[1].data_ptr()
            assert rows[-1].data_ptr() == cache[4, 15].data_ptr()


@pytest.mark.eager
@pytest.mark.parametrize(
    ("blocks", "page", "stride", "taken"),
    [
        (3, 16, 16, True),
        (3, 16, 24, True),  # further slots between pages
        (1, 16, 5, True),  # of a single page there is no next
        (1, MAX_ROWS, 0, False),
        (2, 16, MAX_ROWS - 17, True),
        (2, 16, MAX_ROWS - 16, False),
    ],
)
def test_rows_of_a_cache_have_numbers_of_32_bits(blocks, page, stride, taken):
    plain = call(64)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        cache = torch.empty_strided(
            (blocks, page, 2, 64), (stride * 128, 128, 64, 1), dtype=dtype, device="meta"
        )
        x = plain._replace(k_cache=plain.k_cache.to(dtype), v_cache=plain.v_cache.to(dtype))
        for one in (x._replace(k_cache=cache), x._replace(v_cache=cache)):
            with absent_gpu(HOPPER):
                assert takes_hopper(one, OPTIONS) == taken


@pytest.mark.eager
@pytest.mark.parametrize(
    ("page", "left", "keys"),
    [
        (16, -1, 16),
        (48, -1, 16),
        (544, -1, 32),
        (1056, -1, 32),
        (128, -1, 128),
        (256, -1, 128),
        (1, -1, 1),
        (256, 127, 128),
        (256, 126, 128),
        (256, 125, 64),
        (16, 0, 2),
        (16, 10**6, 16),
    ],
)
def test_pieces_of_a_page(page, left, keys):
    assert copied_keys(page, left, 128) == keys
    # where a piece ends with the keys, it does not begin with them
    assert left < 0 or keys <= left + 2


@pytest.mark.eager
@pytest.mark.parametrize("is_tall", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_tiles_fit_the_barriers_of_the_hardware(head_dim, is_tall):
    # eight numbers are left to stages, and three to turns; see ``hopper.EMPTY``
    tile = hopper_tile(head_dim, "", is_tall)
    assert tile.stages_k + tile.stages_v <= 8
    assert tile.warpgroups <= 3
    # a lane of the copying warp for each piece of a tile
    assert tile.block_n // 16 <= 32


@pytest.mark.eager
@pytest.mark.parametrize(
    ("tokens", "batch", "packs", "rows", "worth"),
    [
        (8192, 8, 8, 16, True),  # 16 waves of two warpgroups, 11 of three
        (65536, 64, 8, 16, True),
        (4096, 16, 2, 8, False),  # four waves, and three
        (8320, 1, 1, 64, False),  # one, and one
        (33 * 4096, 4096, 8, 16, True),  # 33 tokens each: two tiles, or one
        (32 * 4096, 4096, 8, 16, False),  # 32: one, or one
        (0, 0, 8, 16, False),
    ],
)
def test_three_warpgroups_where_they_save_waves(tokens, batch, packs, rows, worth):
    assert is_worth_tall(tokens, batch, packs, rows, 132) == worth


@pytest.mark.eager
def test_three_warpgroups_have_no_registers_for_features():
    x, one = call(64), torch.empty(1, device="meta")
    assert takes_tall(x, OPTIONS)
    assert takes_tall(call(40), OPTIONS)
    assert not takes_tall(call(80), OPTIONS)
    assert not takes_tall(x, OPTIONS._replace(window_left=5000))
    assert not takes_tall(x, OPTIONS._replace(softcap=1.0))
    assert not takes_tall(x._replace(alibi_slopes=one), OPTIONS)
    eight = x.k_cache.to(torch.float8_e4m3fn)
    assert not takes_tall(x._replace(k_cache=eight), OPTIONS)


@pytest.mark.eager
@pytest.mark.parametrize(
    ("group", "pack", "least"),
    [
        (1, 1, 1),
        (4, 4, 1),
        (64, 64, 1),
        (3, 1, 65),
        (5, 1, 65),
        (7, 1, 65),
        (6, 2, 33),
        (12, 4, 17),
        (80, 16, 5),
        (128, 64, 2),
    ],
)
def test_few_queries_of_a_group_that_is_not_packed_whole(group, pack, least):
    for tile in (hopper_tile(128), hopper_tile(64), hopper_tile(64, "", True)):
        assert tile.pack(group) == pack
        assert tile.least_tokens(group) == least


def test_sequences_are_given_out_by_their_lengths(monkeypatch, device):
    """With a portable tile in place of the kernel for Hopper: each sequence has its results."""

    def stand_in(_x: Tensors, _options: Options, portable: TilePlan, _is_kept: bool) -> TilePlan:
        return portable

    monkeypatch.setattr(paged_launch, "takes_hopper", lambda *_: True)
    monkeypatch.setattr(hopper_launch, "HopperPlan", stand_in)
    monkeypatch.setattr(api, "_known", Memory())
    lengths = ((70, 80), (64, 64), (1, 20), (65, 65), (6, 30), (5, 9))
    problem = Problem(lengths, 3, 1, 16, padding=2)
    check(make_case(problem, torch.bfloat16, device), portable=False)
    check(make_case(problem._replace(lengths=lengths[1:2]), torch.bfloat16, device), portable=False)


# ---- what it builds into


@pytest.mark.aot
@pytest.mark.parametrize(
    "config",
    chosen(
        [
            *(Config(d) for d in HEAD_DIMS),
            Config(128, page=128),
            Config(128, page=48, group=6),
            Config(128, rich=True),
            *(Config(d, dense=True) for d in HEAD_DIMS),
        ],
        [
            Config(64),
            Config(256, page=544, group=1, rich=True),
            Config(128, page=48, dense=True, rich=True),
        ],
    ),
    ids=str,
)
def test_builds(config, tmp_path):
    with compiling(HOPPER, tmp_path) as builds:
        launch_attention(config, hopper=True)
    build = builds[-1]
    assert build.kernel == "prefill_kernel"
    check_builds(HOPPER, config, builds)
    for instruction in ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG"):
        assert instruction in build.sass, instruction
    # of each warpgroup four products and as many waits: the assembler has added none of its own
    assert build.sass.count("WARPGROUP.ARRIVE") == build.sass.count("WARPGROUP.DEPBAR") == 8


@pytest.mark.aot
@pytest.mark.parametrize(
    "config",
    chosen([Config(64), Config(64, dense=True)], [Config(64, "float16", page=64, group=6)]),
    ids=str,
)
def test_builds_of_three_warpgroups(config, tmp_path):
    with compiling(HOPPER, tmp_path) as builds:
        launch_attention(config, 8192, 8, hopper=True)
    build = builds[-1]
    check_builds(HOPPER, f"{config} tall", builds)
    assert build.registers == 128
    assert build.sass.count("WARPGROUP.ARRIVE") == build.sass.count("WARPGROUP.DEPBAR") == 12


@pytest.mark.aot
@pytest.mark.parametrize(
    "config",
    chosen(
        [
            Config(64, cache="float8_e4m3fn"),
            Config(256, "float16", "float8_e5m2", page=1),
            Config(96, cache="float8_e5m2", page=128),
            Config(128, cache="float8_e4m3fn", dense=True),
            *(Config(d, cache="uint8") for d in HEAD_DIMS),
            *(Config(d, "float16", cache="int8", page=1) for d in HEAD_DIMS),
            Config(128, cache="int8", dense=True),
            Config(128, cache="int8", rich=True),
        ],
        [
            Config(128, cache="float8_e4m3fn"),
            Config(128, cache="int8"),
            Config(128, "float16", cache="uint8", dense=True),
        ],
    ),
    ids=str,
)
def test_builds_of_caches_of_fewer_bits(config, tmp_path):
    with compiling(HOPPER, tmp_path) as builds:
        launch_attention(config, hopper=True)
    build = builds[-1]
    assert build.kernel == "prefill_wide_kernel"
    check_builds(HOPPER, config, builds)
    tile = hopper_tile(config.head_dim)
    assert build.registers == tile.registers(tile.wideners)  # at the start
    for instruction in ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG"):
        assert instruction in build.sass, instruction
    assert build.sass.count("WARPGROUP.ARRIVE") == build.sass.count("WARPGROUP.DEPBAR") == 8


@pytest.mark.aot
@pytest.mark.parametrize(
    "config",
    chosen(
        [Config(64, cache="int8"), Config(128, cache="int8")],
        [Config(128, cache="float8_e4m3fn")],
    ),
    ids=str,
)
def test_builds_of_another_number_of_warpgroups_that_widen(config, tmp_path, monkeypatch):
    other = lambda *d: replace(hopper_tile(*d), wideners=3 - hopper_tile(*d).wideners)  # noqa: E731
    monkeypatch.setattr(hopper_launch, "hopper_tile", other)
    with compiling(HOPPER, tmp_path) as builds:
        launch_attention(config, hopper=True)
    build = builds[-1]
    check_builds(HOPPER, f"{config} other wideners", builds)
    assert build.sass.count("WARPGROUP.ARRIVE") == build.sass.count("WARPGROUP.DEPBAR") == 8


@pytest.mark.aot
@pytest.mark.parametrize(("head_dim", "count"), [(64, 2), (128, 1)])
def test_lengths_make_a_variant_for_each_tile(head_dim, count):
    with counting(HOPPER) as variants:
        for tokens in (2049, 4096, 5000, 16_384, 70_001):
            launch_attention(Config(head_dim), tokens, hopper=True)
    (name,) = (name for name in variants if "prefill" in name)
    assert len(variants[name]) == count


@pytest.mark.aot
@pytest.mark.parametrize("tokens", [1, 5, 64, 512, 2048])
def test_few_queries_are_split_by_the_portable_kernel(tokens):
    """As long as the kernel for Hopper would leave much of the GPU idle."""
    with recording(HOPPER) as launches:
        launch_attention(Config(128, splits=0), tokens, 1, tokens, hopper=True)
    last = "prefill_kernel" if tokens >= 512 else "split_merge_kernel"
    assert launches[-1].kernel == last


@pytest.mark.aot
@pytest.mark.parametrize("group", [4, 6, 7])
def test_each_length_has_one_kernel(group):
    """Sequences are given out by their lengths: none is left out, and none is served twice."""
    served = []
    with recording(HOPPER) as launches:
        launch_attention(Config(128, group=group), hopper=True)
    for launch in launches:
        most = launch.options.get("MAX_TOKENS", 2**31 - 1)
        served.append((launch.options["MIN_TOKENS"], most))
    assert launches[-1].kernel == "prefill_kernel"
    assert len(served) == (2 if group == 4 else 3)
    assert served[0][0] == 1
    assert [least - 1 for least, _ in served[1:]] == [most for _, most in served[:-1]]


@pytest.mark.aot
def test_few_queries_of_an_odd_group_have_the_portable_tile():
    """All heads of the group lie side by side in it; and nothing else is launched."""
    with recording(HOPPER) as launches:
        launch_attention(Config(128, group=7), 64, 4, 16, hopper=True)
    assert [launch.kernel for launch in launches] == ["paged_kernel"] * 2
    assert launches[-1].options["MAX_TOKENS"] == 64
    with recording(HOPPER) as launches:
        # longer than announced
        launch_attention(Config(128, group=7), 257, 4, 16, hopper=True)
    assert launches[-1].kernel == "prefill_kernel"


@pytest.mark.aot
@pytest.mark.parametrize("group", chosen([1, 3], [7]))
def test_the_portable_tile_does_not_spill_with_any_group(group, tmp_path):
    with compiling(HOPPER, tmp_path) as builds:
        launch_attention(Config(128, group=group))
    assert [build.spilled for build in builds] == [0, 0]
