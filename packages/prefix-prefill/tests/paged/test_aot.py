"""Kernels compile for every supported GPU, fit its shared memory and do not spill; no GPU needed.

What differs most by default, every shipped configuration with ``ATTN_AOT=all``.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from prefix_prefill._paged.tiles import choose_splits

from .._linked.gpus import GPUS, chosen, compiling, recording
from .._linked.spills import check_builds
from ._aot import (
    Config,
    launch_append,
    launch_attention,
    launch_cache,
    launch_decode,
    launch_merge,
    launch_mla,
    launch_mla_write,
    launch_rows,
)

pytestmark = pytest.mark.aot

MIXED, DECODE, CACHE, MERGE = "mixed", "decode", "cache", "merge"
APPEND, ROWS = "append", "rows"
MLA, MLA_WRITE = "mla", "mla_write"
LAUNCHERS = {
    MIXED: launch_attention,
    DECODE: launch_decode,
    CACHE: launch_cache,
    MERGE: launch_merge,
    APPEND: launch_append,
    ROWS: launch_rows,
    MLA: launch_mla,
    MLA_WRITE: launch_mla_write,
}
FP8 = {"nvidia:sm_90": "float8_e4m3fn", "nvidia:sm_100": "float8_e4m3fn"}
FP8 |= {"amd:gfx942": "float8_e4m3fnuz", "amd:gfx950": "float8_e4m3fn"}


# rows of 40 bytes: read in less than 16 at once
NARROW = Config(40, "float16", FP8["nvidia:sm_90"], page=7, group=2, dense=True, head_dim_v=16)


def principal() -> list[tuple[str, str, Config]]:
    """Each kernel on a GPU of either vendor, with every feature at once and with none."""
    hopper, amd = "nvidia:sm_90", "amd:gfx942"
    both = [
        (gpu, way, config)
        for gpu in (hopper, amd)
        for way, config in (
            (MIXED, Config(128, packed=True, dense=True, rich=True)),
            (DECODE, Config(128, cache=FP8[gpu], packed=True)),
            (CACHE, Config(128, packed=True)),
        )
    ]
    return [
        *both,
        (hopper, MIXED, Config(128)),
        (hopper, MIXED, Config(128, dense=True)),
        (hopper, MERGE, Config(128)),
        (hopper, MIXED, Config(128, tree=True)),
        (hopper, ROWS, Config(128)),
        (amd, APPEND, Config(128)),
        (hopper, APPEND, Config(128, cache="uint8")),
        (hopper, DECODE, Config(256, splits=4)),
        (hopper, MIXED, Config(128, cache="uint8", of_vllm=True)),
        (hopper, DECODE, Config(128, "float16", FP8[hopper], of_vllm=True)),
        (hopper, CACHE, Config(128, cache="uint8", of_vllm=True)),
        (amd, CACHE, Config(128, cache=FP8[amd], of_vllm=True)),
        (hopper, DECODE, Config(128, cache="uint8")),
        ("nvidia:sm_80", DECODE, Config(128, "float32")),
        (hopper, MIXED, Config(64, head_dim_v=128)),
        (hopper, MIXED, NARROW),
        (hopper, DECODE, Config(96, cache="uint8", head_dim_v=40, splits=4)),
        (amd, MIXED, Config(192, dense=True, rich=True, head_dim_v=128)),
        (amd, APPEND, Config(96, cache="int8", head_dim_v=40)),
        (hopper, CACHE, Config(192, packed=True, head_dim_v=128)),
        (hopper, MLA, Config(576, cache=FP8[hopper], page=64, group=128)),
        (amd, MLA, Config(576, group=16, splits=4)),
        (hopper, MLA_WRITE, Config(576, cache=FP8[hopper])),
    ]


def everything() -> list[tuple[str, str, Config]]:
    kinds = [{}, {"dense": True}, {"packed": True}, {"packed": True, "dense": True, "rich": True}]
    configs = [
        Config(d, dtype, **kind)
        for d, dtype, kind in itertools.product(
            (16, 64, 96, 128, 256), ("bfloat16", "float32"), kinds
        )
    ]
    configs += [Config(128, page=page) for page in (1, 7, 544)]
    configs += [Config(128, group=group) for group in (1, 5, 64)]
    cases = list(itertools.product(GPUS, (MIXED,), configs))
    cases += [(gpu, DECODE, Config(d, splits=4)) for gpu in GPUS for d in (64, 128, 256)]
    cases += [(gpu, CACHE, Config(128, packed=p)) for gpu in GPUS for p in (False, True)]
    cases += [(gpu, MERGE, Config(128)) for gpu in GPUS]
    for (gpu, dtype), d, p in itertools.product(FP8.items(), (64, 128, 256), (False, True)):
        cases += [
            (gpu, MIXED, Config(d, cache=dtype, packed=p, dense=p)),
            (gpu, MIXED, Config(d, dtype, dtype, packed=p)),
            (gpu, CACHE, Config(d, cache=dtype, packed=p)),
        ]
    for gpu, d in itertools.product(GPUS, (64, 128, 256)):
        cases += [(gpu, MIXED, Config(d, tree=True)), (gpu, ROWS, Config(d))]
        cases += [(gpu, APPEND, Config(d, packed=p)) for p in (False, True)]
    cases += [(gpu, MIXED, Config(128, "float32", dense=True, tree=True)) for gpu in GPUS]
    for gpu, cache in itertools.product(GPUS, ("int8", "uint8")):
        cases += [(gpu, way, Config(128, cache=cache)) for way in (MIXED, CACHE, APPEND)]
    for (gpu, dtype), d in itertools.product(FP8.items(), (64, 128)):
        formats = [Config(d, cache=cache, of_vllm=True) for cache in ("int8", "uint8", dtype)]
        cases += [(gpu, way, x) for way in (MIXED, DECODE, CACHE) for x in formats]
    for d, cache in itertools.product((16, 64, 256), ("int8", "uint8")):
        cases += [("nvidia:sm_90", MIXED, Config(d, cache=cache))]
    for gpu, dtype in itertools.product(GPUS, ("bfloat16", "float32")):
        cases += [(gpu, MLA, Config(576, dtype, page=64, group=h, splits=4)) for h in (16, 128)]
        cases += [(gpu, MLA_WRITE, Config(576, dtype))]
    cases += [(gpu, MLA, Config(576, cache=dtype, group=16)) for gpu, dtype in FP8.items()]
    cases += [(gpu, MIXED, Config(512, t)) for gpu in GPUS for t in ("bfloat16", "float32")]
    own = [
        Config(64, head_dim_v=128),
        Config(192, head_dim_v=128),
        Config(96, packed=True, head_dim_v=40),
        Config(320, rich=True, head_dim_v=64),
        Config(64, head_dim_v=512),
        Config(64, "float32", dense=True, head_dim_v=128),
        Config(192, "float32", dense=True, head_dim_v=128),
        Config(96, "float32", packed=True, dense=True, head_dim_v=40),
        Config(320, "float32", head_dim_v=64),
        Config(64, "float32", dense=True, head_dim_v=512),
    ]
    cases += list(itertools.product(GPUS, (MIXED,), own))
    cases += [("nvidia:sm_90", MIXED, NARROW)]
    for gpu in GPUS:
        cases += [(gpu, way, Config(192, head_dim_v=128)) for way in (CACHE, APPEND, ROWS)]
        cases += [
            (gpu, DECODE, Config(192, cache=cache, splits=4, head_dim_v=128))
            for cache in ("", "int8", "uint8")
        ]
    # a page of a token each, and dtypes and splits that the rest leaves out
    cases += [(gpu, DECODE, Config(80, "float16", page=1)) for gpu in GPUS]
    cases += [(gpu, DECODE, Config(64, group=1)) for gpu in GPUS]
    cases += [(gpu, DECODE, Config(128, "float32")) for gpu in GPUS]
    for gpu, dtype in FP8.items():
        cases += [
            (gpu, DECODE, Config(128, cache=dtype, packed=True)),
            (gpu, DECODE, Config(128, dtype, dtype)),
            (gpu, MIXED, Config(16, dtype, dtype)),
        ]
    return cases


@pytest.mark.parametrize(("gpu", "way", "config"), chosen(everything(), principal()), ids=str)
def test_compiles_fits_and_does_not_spill(gpu, way, config, tmp_path):
    with compiling(gpu, tmp_path) as builds:
        LAUNCHERS[way](config)
    assert builds
    check_builds(gpu, f"{way} {config}", builds)


@pytest.mark.parametrize(("tokens", "batch"), [(2048, 4), (64, 64), (1, 1), (1000, 3)])
def test_the_grid_holds_little_but_live_tiles(tokens, batch):
    """Slots of long sequences: one more a sequence than tiles, not one for each of the longest."""
    with recording("nvidia:sm_90") as launches:
        launch_attention(Config(128), tokens, batch, max_q=tokens)
    for kernel, grid, options in launches:
        assert kernel == "paged_kernel"
        heads_k = 8
        rows = tokens * 4 // options["BLOCK_M"]
        units = batch * options["TILES"] if options["TILES"] else rows + batch + 2
        fills = -(-tokens // options["FILL_TOKENS"]) if options["FILL_TOKENS"] else 0
        assert math.prod(grid) == (units + fills) * heads_k
    assert [options["TILES"] for *_, options in launches] == ([1, 0] if tokens > 4 else [1])


def test_decoding_launches_nothing_for_long_sequences():
    with recording("nvidia:sm_90") as launches:
        launch_decode(Config(128))
    assert len(launches) == 1


def test_one_sequence_fills_the_gpu_by_splits():
    with recording("nvidia:sm_90") as launches:
        launch_attention(Config(128, splits=0), 1, 1, 1)
    assert [launch.kernel for launch in launches] == ["paged_kernel", "split_merge_kernel"]
    # 8 heads, and as many splits as fill 132 processors twice, less a tenth
    assert 8 * 29 <= math.prod(launches[0].grid) <= 8 * 34


@pytest.mark.parametrize(
    ("units", "steps", "splits"),
    [
        (2048, 64, 1),  # nearly eight waves of programs, two for each of 132 processors
        (264, 64, 1),  # one whole wave
        (384, 64, 2),  # one and a half: three waves of half the length take less than two
        (8, 64, 16),  # as many as have four steps each
        (8, 7, 1),
        (0, 64, 1),
    ],
)
def test_splits_fill_the_last_wave(units, steps, splits):
    assert choose_splits(units, True, steps, 1, 132) == splits


@pytest.mark.parametrize(("units", "splits"), [(40, 3), (100, 1), (200, 1)])
def test_long_tiles_are_split_within_a_wave(units, splits):
    assert choose_splits(units, False, 72, 1, 132) == splits


def test_splits_keep_to_their_scratch_memory():
    assert choose_splits(8, True, 512, 2**26, 132) <= 4


def test_nothing_is_launched_for_nothing():
    with recording("nvidia:sm_90") as launches:
        launch_attention(Config(128), 0, 4, 0)
        launch_cache(Config(128), 0)
        launch_merge(Config(128), 0)
    assert not launches


@pytest.mark.parametrize("gpu", ["nvidia:sm_80", "nvidia:sm_90", "amd:gfx942"])
def test_head_dims_are_padded_to_the_next_power_of_two_at_most(gpu):
    for head_dim in (16, 24, 40, 64, 72, 80, 96, 112, 128, 192, 256):
        with recording(gpu) as launches:
            launch_attention(Config(head_dim))
        for launch in launches:
            assert launch.options["BLOCK_D"] <= 2 ** (head_dim - 1).bit_length()


@pytest.mark.parametrize("group", [1, 2, 3, 4, 8, 16, 20, 64, 128])
def test_the_short_tile_packs_the_group(group):
    with recording("nvidia:sm_90") as launches:
        launch_decode(Config(128, group=group))
    rows = launches[0].options["BLOCK_M"] * launches[0].options["TILES"]
    assert group <= rows
    assert rows <= max(16, 2 * group)


@pytest.mark.parametrize(("gpu", "in_order"), [("nvidia:sm_90", True), ("amd:gfx942", False)])
def test_a_packed_cache_is_read_as_it_lies(gpu, in_order):
    """By short tiles: what lanes read lies side by side, in whole lines of the caches."""
    with recording(gpu) as launches:
        launch_decode(Config(128, packed=True))
        launch_decode(Config(128))
        launch_attention(Config(128, packed=True))
    flags = [launch.options["IN_ORDER"] for launch in launches]
    assert flags == [in_order, False, in_order, False]


def test_scratch_comes_from_torch_alone(monkeypatch):
    """Partial results are tensors of the call: a graph captures their memory with it."""
    made = []
    plain = torch.Tensor.new_empty

    def new_empty(self, *size, **options):
        made.append(size)
        return plain(self, *size, **options)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    with recording("nvidia:sm_90"):
        launch_decode(Config(128, splits=4), 2)
        launch_decode(Config(128, splits=1), 2)
    assert made == [((2 * 8 * 4 * 16, 128),), ((2 * 8 * 4 * 16,),)]
