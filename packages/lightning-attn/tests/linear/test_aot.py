"""Kernels compile for every supported GPU, fit its shared memory and do not spill; no GPU needed.

What differs most by default, every shipped configuration with ``ATTN_AOT=all``.
"""

from __future__ import annotations

import itertools
import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
from triton.runtime.jit import KernelInterface

from .._linked.gpus import GPUS, absent_gpu, chosen, compiling, recording
from .._linked.spills import check_builds
from .._numerics import only_portable
from ._aot import LAUNCHERS, Config, launch_decode, launch_forward

pytestmark = pytest.mark.aot

PARALLEL = "parallel"
HOPPER = "nvidia:sm_90"
OLDER = "no such GPU to tune on"


def principal() -> list[tuple[str, str, Config]]:
    """Each kernel on a GPU of either vendor; see below for the walks of Hopper, one by one."""
    hopper, amd = "nvidia:sm_90", "amd:gfx942"
    return [
        (hopper, "forward", Config(128, portable=True)),
        (hopper, "backward", Config(128)),
        (hopper, "decode", Config(256, "float32", packed=True)),
        (amd, "cached", Config(128, packed=True, schedule=PARALLEL)),
        (amd, "decay", Config(64)),
        (amd, "decode", Config(128)),
        (hopper, "sharded", Config(128, packed=True, schedule=PARALLEL)),
        ("nvidia:sm_80", "forward", Config(128, "float32")),
    ]


def everything() -> list[tuple[str, str, Config]]:
    dims = [(16, None), (32, None), (64, None), (96, 80), (128, None), (192, 64), (256, None)]
    forms = [(False, "sequential"), (True, "sequential"), (False, PARALLEL), (True, PARALLEL)]
    cases = []
    for gpu, (d, e), dtype in itertools.product(GPUS, dims, ("bfloat16", "float16", "float32")):
        for packed, schedule in forms:
            config = Config(d, dtype, e, packed, schedule)
            cases += [(gpu, way, config) for way in ("forward", "backward")]
        wide = Config(d, dtype, e, heads=96)
        kinds = [wide]
        if dtype == "bfloat16":
            # what the kernel for Hopper has taken over
            kinds += [replace(wide, portable=True), Config(d, dtype, e, portable=True)]
        cases += list(itertools.product([gpu], ("forward", "backward"), kinds)) * (gpu == HOPPER)
        cases += [(gpu, "cached", Config(d, dtype, e, True))]
        cases += [(gpu, "decay", Config(d, dtype, e)), (gpu, "decode", Config(d, dtype, e))]
        cases += [(gpu, "sharded", Config(d, dtype, e, True, PARALLEL))]
    return cases


@pytest.mark.parametrize(("gpu", "way", "config"), chosen(everything(), principal()), ids=str)
def test_compiles_fits_and_does_not_spill(gpu, way, config, tmp_path):
    with compiling(gpu, tmp_path) as builds, only_portable() if config.portable else nullcontext():
        LAUNCHERS[way](config)
    assert builds
    check_builds(gpu, f"{way} {config}", builds)


@pytest.mark.parametrize(
    ("path", "way"),
    chosen(
        [("hopper", "forward"), ("portable", "backward")],
        [("hopper", "backward"), ("portable", "forward")],
    ),
)
def test_the_state_is_no_accumulator_of_tensor_cores(path, way, monkeypatch):
    """They cut sums off: what is added to the state has an accumulator of its own."""
    sources = []

    def launcher(kernel, grid):
        def launch(*arguments, **options):
            sources.append(kernel.warmup(*arguments, grid=grid, **options).asm["ttgir"])

        return launch

    with absent_gpu("nvidia:sm_90"), only_portable() if path == "portable" else nullcontext():
        monkeypatch.setattr(KernelInterface, "__getitem__", launcher)
        LAUNCHERS[way](Config(128))
    for source in sources:
        sums = re.findall(r"warp_group_dot %\w+, %\w+, %([a-z]+)", source)
        # nothing yet, what was read of the state, the other term of the values
        if path == "portable":
            assert set(sums) <= {"cst", "out", "written"}
            assert sums.count("cst") == 3
        else:
            assert set(sums) <= {"cst", "zeros", "out", "scores", "written"}
            # scores and out of each warpgroup, and the two halves of what is written
            assert sums.count("cst") + sums.count("zeros") == 4


@pytest.mark.parametrize("gpu", ["nvidia:sm_90", "amd:gfx942"])
def test_no_program_without_work(gpu):
    """A program per sequence, head and slice of columns: not one more."""
    for config, sequences in ((Config(128), 2), (Config(96, e=80), 2)):
        with recording(gpu) as launches:
            launch_forward(config)
        (launch,) = launches
        wide = launch.options.get("BLOCK_E") or 64 * launch.options["WARPGROUPS"]
        columns = -(-config.width // wide)
        assert launch.grid == (sequences * 4 * columns,)


def test_nothing_is_launched_for_nothing():
    with recording("nvidia:sm_90") as launches:
        launch_decode(Config(128), 1)
    assert len(launches) == 1


@pytest.mark.parametrize("gpu", ["nvidia:sm_80", "nvidia:sm_90", "amd:gfx942"])
def test_dimensions_are_padded_to_the_next_power_of_two_at_most(gpu):
    for d in (16, 48, 64, 80, 96, 112, 128, 192, 256):
        with recording(gpu) as launches, only_portable():
            launch_forward(Config(d))
        (launch,) = launches
        assert launch.options["BLOCK_D"] == 2 ** (d - 1).bit_length()
        assert launch.options["BLOCK_E"] <= 2 ** (d - 1).bit_length()


def test_auto_goes_by_segments_where_programs_are_few():
    from attn_common import Platform
    from lightning_attn._linear.tiles import plan_walk, walk_tile

    tile = walk_tile(Platform.parse("nvidia:sm_90"), 128, 128, "bf16")

    def plan(heads, batch, tokens, schedule="auto"):
        found = plan_walk(schedule, tile, 128, heads, batch, batch * tokens)
        return found.segmented, found.tile.block_e, found.size

    assert plan(64, 1, 2**20) == (False, 64, 1024)
    # programs of all columns, once those of some columns do not run at the same time
    assert plan(64, 2, 2**20) == plan(96, 1, 2**20) == (False, 128, 1024)
    # as many segments as there is place for, of whole chunks
    assert plan(16, 2, 16384) == (True, 128, 4096)
    assert plan(4, 1, 10_000) == (True, 128, 320)
    assert plan(4, 1, 1000) == (True, 64, 256)
    assert not plan(4, 1, 256)[0]
    # many short sequences
    assert not plan(1, 20, 200)[0]
    for schedule, wanted in (("sequential", False), ("parallel", True)):
        for batch in (1, 2, 500):  # the batch changes nothing
            assert plan(1, batch, 2**20, schedule) == (wanted, 64, 1024)
            assert plan(96, batch, 2**20, schedule) == (wanted, 128, 1024)
