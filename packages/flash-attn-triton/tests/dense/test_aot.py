"""Kernels compile for every supported GPU, fit its shared memory and do not spill; no GPU needed.

What differs most by default, every shipped configuration with ``ATTN_AOT=all``.
"""

from __future__ import annotations

import itertools
import math

import pytest

from .._linked.gpus import GPUS, chosen, compiling, recording
from .._linked.spills import check_builds
from ._aot import BATCH, Config, launch_backward, launch_forward

pytestmark = pytest.mark.aot

FORWARD, BACKWARD = "forward", "backward"
FP8 = {"nvidia:sm_90": "float8_e4m3fn", "nvidia:sm_100": "float8_e4m3fn"}
FP8 |= {"amd:gfx942": "float8_e4m3fnuz", "amd:gfx950": "float8_e4m3fn"}


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
        (hopper, BACKWARD, Config(128, spans=1)),
        (amd, FORWARD, Config(128, rich=True, spans=2)),
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
    spans = (Config(128, spans=1), Config(64, rich=True, spans=2), Config(256, spans=2))
    return [*cases, *itertools.product(GPUS, (FORWARD, BACKWARD), (*odd, *spans))]


@pytest.mark.parametrize(("gpu", "way", "config"), chosen(everything(), principal()), ids=str)
def test_compiles_fits_and_does_not_spill(gpu, way, config, tmp_path):
    with compiling(gpu, tmp_path) as builds:
        (launch_forward if way == FORWARD else launch_backward)(config)
    assert builds
    check_builds(gpu, f"{way} {config}", builds)


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
