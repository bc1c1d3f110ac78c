"""Kernels compile for every supported GPU, fit its shared memory and do not spill; no GPU needed.

What differs most by default, every shipped configuration with ``ATTN_AOT=all``. With
``ATTN_AOT_REPORT`` set to a path, one line per build is appended there.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import pytest

from .._linked.gpus import GPUS, chosen, compiling, recording
from .._numerics import only_portable
from ._aot import Config, launch_backward, launch_forward

pytestmark = pytest.mark.aot

FORWARD, BACKWARD, KERNEL = "forward", "backward", "attention_kernel"

# "GPU configuration pass", as a pattern: the most that may be spilled, and why that is accepted
SPILLS: dict[str, tuple[int, str]] = {
    "nvidia:sm_90 d*-bfloat16-* dkdv": (
        896,
        "tiles of the dense pass; several small blocks of queries a step hold an address each",
    ),
    "nvidia:sm_90 d128-bfloat16-* dq": (128, "tiles of the dense pass; not tuned yet"),
    "nvidia:sm_90 d128-bfloat16-* forward": (
        96,
        "several small blocks of keys a step hold an address each",
    ),
    "nvidia:sm_90 d256-bfloat16-* forward": (416, "tiles of 128 rows; not tuned yet"),
    "nvidia:sm_90 d96-bfloat16-* forward": (240, "tiles of 128 columns, some masked"),
    "nvidia:sm_90 d96-bfloat16-* dq": (128, "tiles of 128 columns, some masked"),
    "nvidia:sm_90 d64-float32-* *": (176, "three TF32 products hold both halves of operands"),
    "nvidia:sm_90 d128-float32-* *": (256, "three TF32 products hold both halves of operands"),
    "nvidia:sm_80 d128-bfloat16-* dkdv": (264, "no such GPU to tune on"),
    "nvidia:* d128-bfloat16-*ruled *": (
        320,
        "which keys some row sees comes ahead of their loads, from the mask of the whole tile",
    ),
    "amd:gfx1100 *": (848, "its matrix instructions want operands twice; no such GPU to tune on"),
}


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
def test_builds(gpu, way, config, tmp_path, record_property):
    """The portable kernels; see ``test_hopper.py`` for the other."""
    with only_portable(), compiling(gpu, tmp_path) as builds:
        (launch_forward if way == FORWARD else launch_backward)(config)
    assert builds
    if report := os.environ.get("ATTN_AOT_REPORT"):
        with Path(report).open("a") as file:
            file.writelines(f"{gpu} {way} {config} {build}\n" for build in builds)
    for build in builds:
        record_property(build.kernel, str(build))
        assert build.shared <= GPUS[gpu].shared_limit, build
    # the kernel over tiles of scores makes one of these at a time
    passes = iter([FORWARD, "merge"] if way == FORWARD else ["dkdv", "dq"])
    named = [(next(passes) if b.kernel == KERNEL else b.kernel, b) for b in builds]
    spilled = [build for name, build in named if build.spilled > accepted(gpu, config, name)]
    assert not spilled, ", ".join(map(str, spilled))


def accepted(gpu: str, config: Config, kernel: str) -> int:
    """Return how much this build may spill."""
    name = f"{gpu} {config} {kernel}"
    return max((most for key, (most, _) in SPILLS.items() if fnmatch(name, key)), default=0)


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
