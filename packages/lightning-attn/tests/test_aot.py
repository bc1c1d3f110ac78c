"""Kernels compile for every supported GPU, fit its shared memory and do not spill; no GPU needed.

The principal configurations by default, every shipped one with ``ATTN_AOT=all``. With
``ATTN_AOT_REPORT`` set to a path, one line per build is appended there.
"""

from __future__ import annotations

import itertools
import os
from fnmatch import fnmatch
from pathlib import Path

import pytest

from ._aot import LAUNCHERS, Config, launch_decode, launch_forward
from ._gpus import GPUS, compiling, recording

pytestmark = pytest.mark.aot

PARALLEL = "parallel"
OLDER = "no such GPU to tune on"

# "GPU configuration kernel", as a pattern: the most that may be spilled, and why that is accepted
SPILLS: dict[str, tuple[int, str]] = {
    "nvidia:sm_90 d*-bfloat16-* _walk_kernel": (
        256,
        "none with Triton 3.6; a tile of half the columns has none with any, but multiplies q and "
        "k twice as often",
    ),
    "nvidia:sm_90 d*-float32-* _walk_kernel": (
        400,
        "three TF32 products hold both halves of their operands",
    ),
    "nvidia:sm_90 * _decay_gradient_kernel": (400, "two states at once; runs on request only"),
    "nvidia:sm_80 *": (400, OLDER),
    "nvidia:sm_100 *": (600, OLDER),
    "amd:gfx1100 *": (656, f"its matrix instructions want operands twice; {OLDER}"),
}


def principal() -> list[tuple[str, str, Config]]:
    """About fifty builds: one common size on every GPU, the rest on one GPU of each kind."""
    chosen = [(gpu, way, Config(128)) for gpu in GPUS for way in ("forward", "decode")]
    chosen += [(gpu, "backward", Config(128)) for gpu in ("nvidia:sm_90", "amd:gfx942")]
    chosen += [(gpu, "forward", Config(128, schedule=PARALLEL)) for gpu in ("nvidia:sm_90",)]
    for gpu in ("nvidia:sm_80", "nvidia:sm_90", "amd:gfx942"):
        chosen += [(gpu, "forward", Config(64)), (gpu, "forward", Config(256))]
        chosen += [
            (gpu, "forward", Config(128, "float16")),
            (gpu, "forward", Config(128, "float32")),
        ]
    chosen += [("nvidia:sm_90", "cached", Config(128, packed=True))]
    chosen += [("amd:gfx942", "cached", Config(128, packed=True, schedule=PARALLEL))]
    chosen += [("nvidia:sm_90", "decay", Config(128)), ("amd:gfx942", "decay", Config(64))]
    chosen += [("nvidia:sm_90", "forward", Config(96, e=80))]
    chosen += [("amd:gfx1100", "forward", Config(64, "float16"))]
    return chosen + [("nvidia:sm_90", "decode", Config(256, "float32", packed=True))]


def everything() -> list[tuple[str, str, Config]]:
    dims = [(16, None), (32, None), (64, None), (96, 80), (128, None), (192, 64), (256, None)]
    forms = [(False, "sequential"), (True, "sequential"), (False, PARALLEL), (True, PARALLEL)]
    chosen = []
    for gpu, (d, e), dtype in itertools.product(GPUS, dims, ("bfloat16", "float16", "float32")):
        for packed, schedule in forms:
            config = Config(d, dtype, e, packed, schedule)
            chosen += [(gpu, way, config) for way in ("forward", "backward")]
        chosen += [(gpu, "cached", Config(d, dtype, e, True))]
        chosen += [(gpu, "decay", Config(d, dtype, e)), (gpu, "decode", Config(d, dtype, e))]
    return chosen


CASES = everything() if os.environ.get("ATTN_AOT") == "all" else principal()


@pytest.mark.parametrize(("gpu", "way", "config"), CASES, ids=str)
def test_compiles_fits_and_does_not_spill(gpu, way, config, tmp_path, record_property):
    with compiling(gpu, tmp_path) as builds:
        LAUNCHERS[way](config)
    assert builds
    if report := os.environ.get("ATTN_AOT_REPORT"):
        with Path(report).open("a") as file:
            file.writelines(f"{gpu} {way} {config} {build}\n" for build in builds)
    for build in builds:
        record_property(build.kernel, str(build))
        assert build.shared <= GPUS[gpu].shared_limit, build
    spilled = [build for build in builds if build.spilled > accepted(gpu, config, build.kernel)]
    assert not spilled, ", ".join(map(str, spilled))


def accepted(gpu: str, config: Config, kernel: str) -> int:
    """Return how much this build may spill."""
    name = f"{gpu} {config} {kernel}"
    return max((most for key, (most, _) in SPILLS.items() if fnmatch(name, key)), default=0)


@pytest.mark.parametrize("gpu", ["nvidia:sm_90", "amd:gfx942"])
def test_no_program_without_work(gpu):
    """A program per sequence, head and slice of columns: not one more."""
    for config, sequences in ((Config(128), 2), (Config(96, e=80), 2)):
        with recording(gpu) as launches:
            launch_forward(config)
        (launch,) = launches
        columns = -(-config.width // launch.options["BLOCK_E"])
        assert launch.grid == (sequences * 4 * columns,)


def test_nothing_is_launched_for_nothing():
    with recording("nvidia:sm_90") as launches:
        launch_decode(Config(128), 1)
    assert len(launches) == 1


@pytest.mark.parametrize("gpu", ["nvidia:sm_80", "nvidia:sm_90", "amd:gfx942"])
def test_dimensions_are_padded_to_the_next_power_of_two_at_most(gpu):
    for d in (16, 48, 64, 80, 96, 112, 128, 192, 256):
        with recording(gpu) as launches:
            launch_forward(Config(d))
        (launch,) = launches
        assert launch.options["BLOCK_D"] == 2 ** (d - 1).bit_length()
        assert launch.options["BLOCK_E"] <= 2 ** (d - 1).bit_length()


def test_auto_goes_by_segments_where_programs_are_few():
    from attn_common import Platform
    from lightning_attn._configs import use_segments, walk_tile

    tile = walk_tile(Platform.parse("nvidia:sm_90"), 128, 128, "bf16")
    assert not use_segments("auto", tile, 128, heads=64, batch=1, tokens=2**20)
    assert use_segments("auto", tile, 128, heads=4, batch=1, tokens=2**20)
    assert not use_segments("auto", tile, 128, heads=4, batch=1, tokens=1000)
    # many short sequences
    assert not use_segments("auto", tile, 128, heads=1, batch=20, tokens=20 * 1000)
    for schedule, wanted in (("sequential", False), ("parallel", True)):
        assert use_segments(schedule, tile, 128, heads=1, batch=1, tokens=2**20) is wanted
