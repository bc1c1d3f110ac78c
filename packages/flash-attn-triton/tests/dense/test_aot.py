"""Kernels compile for every supported GPU, fit its shared memory and do not spill; no GPU needed.

What differs most by default, every shipped configuration with ``ATTN_AOT=all``. With
``ATTN_AOT_REPORT`` set to a path, one line per build is appended there.
"""

from __future__ import annotations

import itertools
import math
import os
from fnmatch import fnmatch
from pathlib import Path

import pytest

from .._linked.gpus import GPUS, chosen, compiling, recording
from ._aot import BATCH, Config, launch_backward, launch_forward

pytestmark = pytest.mark.aot

FORWARD, BACKWARD = "forward", "backward"
FP8 = {"nvidia:sm_90": "float8_e4m3fn", "nvidia:sm_100": "float8_e4m3fn"}
FP8 |= {"amd:gfx942": "float8_e4m3fnuz", "amd:gfx950": "float8_e4m3fn"}

# "GPU configuration kernel", as a pattern: the most that may be spilled, and why that is accepted.
# Arithmetic does not give these numbers, they are a compiler's choice: what builds show, rounded up
# to 64 bytes (AMD: registers, as they are), for more to be noticed. "[cf]*" is without features.
FASTEST = "the fastest of the tiles measured on an H200"
UNTUNED = "no such GPU to tune on"
RICH = "every feature at once, on the tile that is fastest without"
SPILLS: dict[str, tuple[int, str]] = {
    "nvidia:sm_90 d*-bfloat16-[cf]* dkdv_kernel": (320, f"{FASTEST}; plain loops have none"),
    "nvidia:sm_90 d256-bfloat16-[cf]* forward_kernel": (128, FASTEST),
    "nvidia:sm_90 d[13][26]-bfloat16-rich dkdv_kernel": (192, RICH),
    "nvidia:sm_90 d64-bfloat16-rich dkdv_kernel": (640, RICH),
    "nvidia:sm_90 d96-bfloat16-rich dkdv_kernel": (1216, RICH),
    "nvidia:sm_90 d128-bfloat16-rich dkdv_kernel": (1216, RICH),
    "nvidia:sm_90 d192:128-bfloat16-rich dkdv_kernel": (1152, RICH),
    "nvidia:sm_90 d256-bfloat16-rich dkdv_kernel": (1536, RICH),
    "nvidia:sm_90 d64-bfloat16-rich dq_kernel": (64, RICH),
    "nvidia:sm_90 d96-bfloat16-rich dq_kernel": (128, RICH),
    "nvidia:sm_90 d128-bfloat16-rich dq_kernel": (128, RICH),
    "nvidia:sm_90 d192:128-bfloat16-rich dq_kernel": (320, RICH),
    "nvidia:sm_90 d256-bfloat16-rich dq_kernel": (192, RICH),
    "nvidia:sm_90 d*-bfloat16-rich bias_gradient_kernel": (64, RICH),
    "nvidia:sm_90 d256-bfloat16-rich forward_kernel": (256, RICH),
    # short sums of FP8 products need a second accumulator
    "nvidia:sm_90 d*-float8_e4m3fn-* forward_kernel": (64, "an accumulator more than bf16"),
    "nvidia:sm_90 d192:128-float8_e4m3fn-* forward_kernel": (192, "likewise, and a wider one"),
    "nvidia:sm_90 d256-float8_e4m3fn-* forward_kernel": (512, "likewise, and the widest"),
    # three TF32 products hold both halves of their operands
    "nvidia:* d*-float32-[cf]* *": (256, "twice the operands"),
    "nvidia:sm_100 d256-float32-[cf]* dkdv_kernel": (320, f"likewise, and the widest; {UNTUNED}"),
    "nvidia:* d*-float32-rich *": (512, "twice the operands, and every feature at once"),
    "nvidia:sm_80 d*-bfloat16-[cf]* dkdv_kernel": (64, f"some versions of Triton; {UNTUNED}"),
    "nvidia:sm_80 d*-bfloat16-rich *": (384, f"{RICH}; {UNTUNED}"),
    "nvidia:sm_100 d*-bfloat16-* *": (64, UNTUNED),
    "amd:gfx90a d*-rich *": (3, f"every feature at once; {UNTUNED}"),
    "amd:gfx942 d*-bfloat16-* dkdv_kernel": (1, UNTUNED),
    "amd:gfx942 d128-bfloat16-rich forward_kernel": (96, f"{RICH}; {UNTUNED}"),
    "amd:gfx950 d32-bfloat16-rich forward_kernel": (6, f"every feature at once; {UNTUNED}"),
    "amd:gfx950 d64-float32-rich dkdv_kernel": (1, f"every feature at once; {UNTUNED}"),
    "amd:gfx1100 *": (725, f"its matrix instructions want operands twice; {UNTUNED}"),
    "amd:gfx1100 d192:128-float32-rich dq_kernel": (806, f"likewise, and wide; {UNTUNED}"),
    "amd:gfx1100 d256-*": (1190, f"likewise, and the widest; {UNTUNED}"),
}


def principal() -> list[tuple[str, str, Config]]:
    """Each kernel on a GPU of either vendor, with every feature at once and with none."""
    hopper, amd = "nvidia:sm_90", "amd:gfx942"
    return [
        (hopper, FORWARD, Config(128)),
        (hopper, BACKWARD, Config(128)),
        (hopper, BACKWARD, Config(64, rich=True)),
        (hopper, FORWARD, Config(128, FP8[hopper])),
        # rows that are no whole accesses
        (hopper, FORWARD, Config(33, "float16", 1)),
        (amd, FORWARD, Config(128, rich=True)),
        (amd, BACKWARD, Config(256, causal=False)),
        ("nvidia:sm_80", FORWARD, Config(128)),
    ]


def everything() -> list[tuple[str, str, Config]]:
    dims = [(16, None), (32, None), (64, None), (96, None), (128, None), (192, 128), (256, None)]
    configs = [
        Config(d, dtype, dv, causal, rich)
        for (d, dv), dtype, (causal, rich) in itertools.product(
            dims, ("bfloat16", "float32"), ((True, False), (False, False), (True, True))
        )
    ]
    cases = list(itertools.product(GPUS, (FORWARD, BACKWARD), configs))
    for (gpu, dtype), (d, dv) in itertools.product(FP8.items(), dims):
        cases += [(gpu, FORWARD, Config(d, dtype, dv, rich=rich)) for rich in (False, True)]
    # rows that are no whole accesses, and padded ones
    odd = (Config(33, "float16", 1), Config(80, "float16"))
    return [*cases, *itertools.product(GPUS, (FORWARD, BACKWARD), odd)]


@pytest.mark.parametrize(("gpu", "way", "config"), chosen(everything(), principal()), ids=str)
def test_compiles_fits_and_does_not_spill(gpu, way, config, tmp_path, record_property):
    with compiling(gpu, tmp_path) as builds:
        (launch_forward if way == FORWARD else launch_backward)(config)
    assert builds
    if report := os.environ.get("ATTN_AOT_REPORT"):
        with Path(report).open("a") as file:
            file.writelines(f"{gpu} {way} {config} {build}\n" for build in builds)
    for build in builds:
        record_property(build.kernel, str(build))
        assert build.shared <= GPUS[gpu].shared_limit, build
        assert not build.unset, build
    spilled = [build for build in builds if build.spilled > accepted(gpu, config, build.kernel)]
    assert not spilled, ", ".join(map(str, spilled))


def accepted(gpu: str, config: Config, kernel: str) -> int:
    """Return how much this build may spill."""
    name = f"{gpu} {config} {kernel}"
    return max((most for key, (most, _) in SPILLS.items() if fnmatch(name, key)), default=0)


@pytest.mark.parametrize("seqlen", [128, 1024, 1025, 1])
@pytest.mark.parametrize("launch", [launch_forward, launch_backward])
def test_no_program_without_a_tile(launch, seqlen):
    """Whole tiles of queries or keys: not one program more."""
    with recording("nvidia:sm_90") as launches:
        launch(Config(128), seqlen)
    tiled = [x for x in launches if "BLOCK_M" in x.options]
    assert tiled
    for name, grid, options in tiled:
        by_key = "dkdv" in name
        block, heads = (options["BLOCK_N"], 2) if by_key else (options["BLOCK_M"], 8)
        assert math.prod(grid) == -(-seqlen // block) * heads * BATCH, name


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
        assert launch.options["BLOCK_D"] <= 2 ** (head_dim - 1).bit_length()
        assert launch.options["BLOCK_DV"] <= 2 ** (head_dim - 1).bit_length()
