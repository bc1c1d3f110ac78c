"""Kernels compile for every supported GPU, fit its shared memory and do not spill; no GPU needed.

What differs most by default, every shipped configuration with ``ATTN_AOT=all``.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from .._linked.gpus import GPUS, chosen, compiling, recording
from .._linked.spills import check_builds
from .._numerics import only_portable
from ._aot import Config, launch_backward, launch_forward

pytestmark = pytest.mark.aot

FORWARD, BACKWARD, KERNEL = "forward", "backward", "attention_kernel"


def principal() -> list[tuple[str, str, Config]]:
    """Each kernel on a GPU of either vendor: tiles of whole blocks, of small ones, and of pages."""
    hopper, amd = "nvidia:sm_90", "amd:gfx942"
    short = Config(128, short=True, packed=True, page=16)
    return [
        *((hopper, FORWARD, config) for config in (Config(128), short)),
        (hopper, BACKWARD, Config(128, block=(16, 32))),
        (amd, FORWARD, Config(128, block=(16, 16))),
        (amd, BACKWARD, Config(128)),
        ("nvidia:sm_80", FORWARD, Config(128)),
        ("nvidia:sm_80", BACKWARD, Config(64, causal=False, packed=True, ruled=True)),
    ]


def everything() -> list[tuple[str, str, Config]]:
    dims = [(16, None), (64, None), (96, None), (128, None), (192, 128), (256, None)]
    configs = [
        Config(d, dtype, dv, block, causal, shared)
        for (d, dv), dtype, block, causal, shared in itertools.product(
            dims,
            ("bfloat16", "float32"),
            ((64, 64), (16, 16), (128, 32)),
            (True, False),
            (True, False),
        )
    ]
    configs += [replace(c, alike=True) for c in configs if c.causal and not c.shared]
    short = [
        Config(d, dtype, short=True, packed=True, page=page, shared=shared)
        for d, dtype, page, shared in itertools.product(
            (64, 128, 256), ("bfloat16", "float32"), (0, 16), (True, False)
        )
    ]
    # blocks of two sizes below those of a tile, and rows of unequal dimensions
    configs += [Config(128, block=(16, 32)), Config(128, block=(128, 128), shared=True)]
    configs += [Config(256, causal=False, packed=True)]
    configs += [Config(128, ruled=True), Config(64, causal=False, packed=True, ruled=True)]
    ways = list(itertools.product(configs, (FORWARD, BACKWARD)))
    ways += [(config, FORWARD) for config in short]
    return [(gpu, way, config) for gpu in GPUS for config, way in ways]


@pytest.mark.parametrize(("gpu", "way", "config"), chosen(everything(), principal()), ids=str)
def test_builds(gpu, way, config, tmp_path):
    """The portable kernels; see ``test_hopper.py`` for the other."""
    with only_portable(), compiling(gpu, tmp_path) as builds:
        (launch_forward if way == FORWARD else launch_backward)(config)
    assert builds
    # the kernel over tiles of scores makes one of these at a time
    passes = iter([FORWARD, "merge"] if way == FORWARD else ["dkdv", "dq"])
    named = [replace(b, kernel=next(passes)) if b.kernel == KERNEL else b for b in builds]
    check_builds(gpu, f"{way} {config}", named)


@pytest.mark.parametrize("seqlen", [128, 1024, 1025, 1])
@pytest.mark.parametrize("launch", [launch_forward, launch_backward])
def test_no_program_without_a_tile(launch, seqlen):
    """Whole tiles of queries or keys: not one program more."""
    with only_portable(), recording("nvidia:sm_90") as launches:
        launch(Config(128), seqlen)
    tiled = [x for x in launches if "BLOCK_M" in x.options]
    assert tiled
    for name, (grid,), options in tiled:
        by_key = options["BY_KEY"]
        block, heads = (options["BLOCK_N"], 2) if by_key else (options["BLOCK_M"], 8)
        assert grid == -(-seqlen // block) * heads * 2, name


@pytest.mark.parametrize("launch", [launch_forward, launch_backward])
def test_nothing_is_launched_for_nothing(launch):
    with recording("nvidia:sm_90") as launches:
        launch(Config(128), 0)
    assert not launches


@pytest.mark.parametrize("gpu", ["nvidia:sm_80", "nvidia:sm_90", "amd:gfx942"])
def test_head_dims_are_padded_to_the_next_power_of_two_at_most(gpu):
    for head_dim in (16, 24, 40, 64, 72, 80, 96, 112, 128, 192, 256):
        with recording(gpu) as launches:
            launch_forward(Config(head_dim))
        (launch,) = launches
        if launch.kernel == "hopper_query_kernel":
            assert launch.options["HEAD_DIM"] == (64 if head_dim <= 64 else 128)
        else:
            assert launch.options["BLOCK_D"] <= 2 ** (head_dim - 1).bit_length()


def test_heads_of_one_pattern_fill_a_portable_tile():
    """128 rows of one row of blocks: two heads of 64 queries, four of 32; of 16 these make 64."""
    for side, heads, rows in ((128, 1, 128), (64, 2, 128), (32, 4, 128), (16, 4, 64)):
        with only_portable(), recording("nvidia:sm_90") as launches:
            launch_forward(Config(128, shared=True, block=(side, 64)))
        (launch,) = launches
        assert launch.options["BLOCK_M"] == rows
        assert launch.options["HEADS"] == heads


def test_rows_that_differ_take_a_low_tile():
    rows = {}
    for alike in (False, True):
        with only_portable(), recording("nvidia:sm_90") as launches:
            launch_forward(Config(128, alike=alike))
        rows[alike] = launches[0].options["BLOCK_M"]
    assert rows == {False: 64, True: 128}


def test_decode_packs_all_heads_of_a_group():
    with recording("nvidia:sm_90") as launches:
        launch_forward(Config(128, short=True, packed=True))
    forward, merge = launches
    assert (forward.options["HEADS"], forward.options["HEAD_MEMBERS"]) == (4, 4)
    assert forward.grid[0] == merge.grid[0] * 4
