"""The kernel for Hopper: what it takes, what it builds into, and its numbers on a GPU."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st
from prefix_prefill import context_attention_fwd
from prefix_prefill._call import Options, Tensors
from prefix_prefill._configs import copied_keys, hopper_tile, rows_of_page, takes_hopper
from prefix_prefill._kernels import hopper_prefill
from prefix_prefill._kernels.hopper_prefill import HopperTiled, rows_of_cache
from torch import Tensor

from ._aot import Config, launch_attention
from ._budget import assert_same
from ._gpus import GPUS, absent_gpu, compiling, counting, recording
from ._numerics import Case, Problem, check, make_case, run
from ._views import VIEWS
from .test_property import BATCHES, apart, bounded

HOPPER = "nvidia:sm_90"
HEAD_DIMS = [64, 128, 256]
IS_OLD = triton.__version__.startswith("3.6.")


def hopper(case: Case, judge: Any = run) -> dict[str, Tensor]:
    """Run a case, or check it, and see that the kernel had a part in it."""
    served = []
    prefill = HopperTiled.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            HopperTiled, "run", lambda *arguments: (served.append(1), prefill(*arguments))
        )
        got = judge(case.with_options(num_splits=1))
    assert served
    return got


def check_hopper(case: Case) -> dict[str, Tensor]:
    return hopper(case, functools.partial(check, portable=False))


# ---- what it takes


def call(head_dim: int = 128, dtype: torch.dtype = torch.bfloat16, page: int = 16) -> Tensors:
    def meta(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(*size, dtype=dtype, device="meta")

    q, cache = meta(9, 8, head_dim, dtype=dtype), meta(5, page, 2, head_dim, dtype=dtype)
    small = [meta(2, 3), meta(3), meta(2)]
    return Tensors(q, cache, cache, None, None, *small, *[None] * 7, q, None)


OPTIONS = Options(0.1, -1, 0, 0.0)


@pytest.mark.eager
@pytest.mark.parametrize(
    ("head_dim", "dtype", "page", "taken"),
    [
        (128, torch.bfloat16, 16, True),
        (64, torch.float16, 48, True),
        (256, torch.float16, 1056, True),
        (40, torch.bfloat16, 128, True),
        (32, torch.bfloat16, 16, False),  # half of a tile would be padding
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
def test_leaves_the_rest_to_the_portable_kernel():
    x = call()
    one = torch.empty(1, device="meta")
    with absent_gpu(HOPPER):
        for scale in (0.0, -1.0, 1e-60):
            assert not takes_hopper(x, OPTIONS._replace(softmax_scale=scale))
        for name in ("out_scale", "positions"):
            assert not takes_hopper(x._replace(**{name: one}), OPTIONS)
        assert not takes_hopper(x._replace(k=x.q, v=x.q), OPTIONS)
        assert not takes_hopper(x._replace(out=x.q.float()), OPTIONS)
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
            rows = rows_of_cache(cache)
            assert rows[rows_of_page(cache)].data_ptr() == cache[1].data_ptr()
            assert rows[-1].data_ptr() == cache[4, 15].data_ptr()


@pytest.mark.eager
@pytest.mark.parametrize(
    ("page", "left", "keys"),
    [(16, -1, 16), (48, -1, 16), (544, -1, 32), (1056, -1, 32), (128, -1, 128), (256, -1, 128),
     (1, -1, 1), (256, 127, 128), (256, 126, 128), (256, 125, 64), (16, 0, 2), (16, 10**6, 16)],
)  # fmt: skip
def test_pieces_of_a_page(page, left, keys):
    assert copied_keys(page, left, 128) == keys
    # where a piece ends with the keys, it does not begin with them
    assert left < 0 or keys <= left + 2


@pytest.mark.eager
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_tiles_fit_the_barriers_of_the_hardware(head_dim):
    # eight numbers are left to stages; see ``hopper.EMPTY``
    tile = hopper_tile(head_dim)
    assert tile.stages_k + tile.stages_v <= 8
    # a lane of the copying warp for each piece of a tile
    assert tile.block_n // 16 <= 32


# ---- what it builds into

# Bytes that may be spilled with Triton 3.6 and with later ones: numbers of the copying warp, which
# has 24 registers, and of the walk between tiles of queries.
SPILLS = (24, 120)


@pytest.mark.aot
@pytest.mark.parametrize(
    "config",
    [
        *(Config(d) for d in HEAD_DIMS),
        Config(128, page=128),
        Config(128, page=48, group=6),
        Config(128, rich=True),
        Config(256, page=544, group=1, rich=True),
    ],
    ids=str,
)
def test_builds(config, tmp_path):
    with compiling(HOPPER, tmp_path) as builds:
        launch_attention(config, hopper=True)
    build = builds[-1]
    assert build.kernel == "prefill_kernel"
    assert build.shared <= GPUS[HOPPER].shared_limit, build
    assert not build.unset, build
    assert build.spilled <= SPILLS[not IS_OLD], build
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    command = [str(tool), "-c", str(tmp_path / f"{build.kernel}.cubin")]
    sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for instruction in ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG"):
        assert instruction in sass, instruction
    # of each warpgroup four products and as many waits: the assembler has added none of its own
    assert sass.count("WARPGROUP.ARRIVE") == sass.count("WARPGROUP.DEPBAR") == 8


@pytest.mark.aot
def test_lengths_make_one_variant():
    with counting(HOPPER) as variants:
        for tokens in (2049, 4096, 5000, 16_384, 70_001):
            launch_attention(Config(64), tokens, hopper=True)
    (name,) = (name for name in variants if "prefill" in name)
    assert len(variants[name]) == 1


@pytest.mark.aot
@pytest.mark.parametrize("tokens", [1, 5, 64, 512, 2048])
def test_few_queries_are_split_by_the_portable_kernel(tokens):
    """As long as the kernel for Hopper would leave much of the GPU idle."""
    with recording(HOPPER) as launches:
        launch_attention(Config(128, splits=0), tokens, 1, tokens, hopper=True)
    last = "prefill_kernel" if tokens >= 512 else "_split_merge_kernel"
    assert launches[-1].kernel == last


# ---- numbers

LENGTHS = ((300, 900), (1, 2000), (0, 5), (17, 17), (130, 1300), (64, 0))
FEATURES = [
    (), ("full",), ("softcap",), ("alibi",), ("alibi_batch", "full"), ("sinks",),
    ("sinks", "alibi", "softcap"),
]  # fmt: skip


@pytest.mark.device
@pytest.mark.parametrize(
    ("head_dim", "page"),
    [(128, page) for page in (16, 32, 48, 64, 128, 256, 544, 1056)]
    + [(d, page) for d in (64, 256) for page in (16, 544)],
)
def test_pages(head_dim, page, device):
    problem = Problem(LENGTHS, 8, 2, head_dim, page, padding=7)
    check_hopper(make_case(problem, torch.bfloat16, device))


@pytest.mark.device
@pytest.mark.parametrize("heads", [(1, 1), (6, 1), (7, 1), (12, 4), (16, 2), (128, 1)], ids=str)
@pytest.mark.parametrize("head_dim", [40, 96, 192])
def test_groups(head_dim, heads, device):
    problem = Problem(((150, 500), (20, 40)), *heads, head_dim)
    check_hopper(make_case(problem, torch.float16, device, ["alibi"]))


@pytest.mark.device
@pytest.mark.parametrize("names", FEATURES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 256])
def test_features(head_dim, names, device):
    check_hopper(make_case(Problem(LENGTHS, 8, 2, head_dim, 48), torch.bfloat16, device, names))


@pytest.mark.device
@pytest.mark.parametrize("names", [(), ("full", "sinks", "alibi")], ids=str)
@pytest.mark.parametrize("window", [(14, -1), (100, -1), (500, 500), (126, 3)], ids=str)
@pytest.mark.parametrize(("head_dim", "page"), [(128, 256), (256, 48)])
def test_windows(head_dim, page, window, names, device):
    case = make_case(Problem(LENGTHS, 8, 2, head_dim, page), torch.bfloat16, device, names)
    check_hopper(case.with_options(window_size=window))


@pytest.mark.device
@pytest.mark.parametrize("page", [16, 128])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_poison(head_dim, page, device):
    """NaN before the first window and past the end, pages that are gone, NaN around queries."""
    problem = Problem(((300, 900), (1, 2000), (700, 790)), 8, 2, head_dim, page, padding=50)
    case = make_case(problem, torch.bfloat16, device).with_options(window_size=(100, 0))
    want = check_hopper(case)
    bad = {name: t.clone() for name, t in case.inputs.items()}
    bad["q"][1001:] = float("nan")
    table = case.options["block_table"].clone()
    for b, (queries, keys) in enumerate(problem.lengths):
        unseen = max(0, keys - queries - 100)
        for name in ("k_cache", "v_cache"):
            for key in range(unseen):
                bad[name][table[b, key // page], key % page] = float("nan")
    for b, (queries, keys) in enumerate(problem.lengths):
        table[b, : max(0, keys - queries - 100) // page] = 2**30
        table[b, -(-keys // page) :] = -(2**30)
    assert_same(hopper(case.with_inputs(**bad).with_options(block_table=table)), want)
    inside = {name: VIEWS["inside"](t) for name, t in case.inputs.items() if name == "q"}
    assert_same(hopper(case.with_inputs(**inside)), want)


@pytest.mark.device
@pytest.mark.parametrize("view", sorted(VIEWS))
def test_views(view, device):
    """Queries and outputs that the copy engine refuses are copied; a cache never is."""
    case = make_case(Problem(LENGTHS, 8, 2, 128), torch.bfloat16, device)
    want = hopper(case)
    q = VIEWS[view](case.inputs["q"])
    assert_same(hopper(case.with_inputs(q=q)), want)
    out = torch.full_like(q, 7.0)
    hopper(case.with_options(out=out))
    assert torch.equal(out, want["out"])
    caches = {name: VIEWS["heads_first"](case.inputs[name]) for name in ("k_cache", "v_cache")}
    assert_same(hopper(case.with_inputs(**caches)), want)
    for axis in (0, 1):
        both = torch.stack([case.inputs["k_cache"], case.inputs["v_cache"]], axis)
        k_cache, v_cache = both.unbind(axis)
        assert_same(hopper(case.with_inputs(k_cache=k_cache, v_cache=v_cache)), want)


@pytest.mark.device
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_tables(dtype, device):
    case = make_case(Problem(LENGTHS, 8, 2, 128), torch.bfloat16, device)
    table = case.options["block_table"].to(dtype)
    strided = torch.stack([table, table - 1], 2)[..., 0]
    assert_same(hopper(case.with_options(block_table=strided)), hopper(case))


@pytest.mark.device
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_repeats_and_independence(head_dim, device):
    problem = Problem(((700, 1500),) * 7, 8, 2, head_dim)
    case = make_case(problem, torch.bfloat16, device)
    want = hopper(case)
    differing = torch.zeros((), dtype=torch.int64, device=device)
    unsplit = case.with_options(num_splits=1)
    for _ in range(300):
        got = unsplit()
        differing += sum((got[name] != want[name]).sum() for name in want)
    assert not differing
    options = {
        **case.options,
        "block_table": case.options["block_table"][2:3],
        "cu_seqlens_q": case.options["cu_seqlens_q"][:2],
        "seqlens_k": case.options["seqlens_k"][:1],
    }
    rows = slice(1400, 2100)
    alone = hopper(Case({**case.inputs, "q": case.inputs["q"][rows]}, options))
    assert torch.equal(alone["out"], want["out"][rows])
    assert torch.equal(alone["lse"], want["lse"][:, rows])


@pytest.mark.device
def test_rows_that_are_left_alone(device):
    """Those of padding and, if asked for, of decoding sequences."""
    problem = Problem(((1, 90), (50, 200), (1, 70)), 8, 2, 64, padding=9)
    case = make_case(problem, torch.float16, device)
    inputs, options = case.inputs, case.options
    out, one = torch.full_like(inputs["q"], 7.0), torch.ones(1, device=device)
    context_attention_fwd(
        inputs["q"], None, None, out, "auto", inputs["k_cache"], inputs["v_cache"],
        options["block_table"], options["cu_seqlens_q"], options["seqlens_k"], 200, 50, one, one,
        skip_decode=True,
    )  # fmt: skip
    assert (out[[0, *range(51, 61)]] == 7.0).all()
    assert torch.equal(out[1:51], hopper(case)["out"][1:51])


@pytest.mark.device
def test_graphs_do_not_share_a_counter(device):
    """Two graphs that were captured on one stream may run at once."""
    case = make_case(Problem(((900, 2000),) * 4, 8, 2, 128), torch.bfloat16, device)
    want = hopper(case)
    graphs, results = [torch.cuda.CUDAGraph() for _ in range(2)], []
    for graph in graphs:
        with torch.cuda.graph(graph):
            results.append(hopper(case))
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(20):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for got in results:
        assert_same(got, want)
    assert all(int(t) == 0 for t in hopper_prefill._tickets.values())


LENGTH = st.tuples(st.integers(0, 300), st.sampled_from([0, 1, 15, 16, 100, 128, 333, 1000]))


@pytest.mark.device
@bounded
@given(
    batches=st.tuples(*[st.lists(LENGTH, min_size=1, max_size=5)] * BATCHES),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2), (6, 2), (7, 1), (16, 2)]),
    head_dim=st.sampled_from([40, 64, 80, 128, 256]),
    page=st.sampled_from([16, 32, 48, 128, 272]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    names=st.sampled_from(FEATURES),
    window=st.tuples(*[st.one_of(st.just(-1), st.integers(0, 400))] * 2),
    padding=st.sampled_from([0, 1, 200]),
    seed=st.integers(0, 2**32),
)  # fmt: skip
def test_any_prefill(batches, heads, head_dim, page, dtype, names, window, padding, seed, device):
    """Both kernels, on what either may serve."""
    for drawn in batches:
        lengths = tuple((queries, queries + context) for queries, context in drawn)
        problem = Problem(lengths, *heads, head_dim, page, padding=padding)
        case = make_case(problem, dtype, device, names, seed)
        apart(check, case.with_options(window_size=window, num_splits=1))
