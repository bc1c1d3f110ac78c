"""All builds of the invariant kernel multiply and sum alike; they fit and hardly spill."""

from __future__ import annotations

import itertools

import pytest

from .._linked.gpus import GPUS, chosen, compiling
from .._linked.spills import check_builds
from ._aot import Config, launch_attention, launch_decode

pytestmark = pytest.mark.aot

PRINCIPAL = [("nvidia:sm_90", 128, "bfloat16"), ("amd:gfx942", 64, "float16")]
EVERYTHING = list(itertools.product(GPUS, (16, 64, 96, 128, 256), ("bfloat16", "float32")))
FP8 = {"nvidia:sm_90": "float8_e4m3fn", "nvidia:sm_100": "float8_e4m3fn"}
FP8 |= {"amd:gfx942": "float8_e4m3fnuz", "amd:gfx950": "float8_e4m3fn"}


@pytest.mark.parametrize(("gpu", "head_dim", "dtype"), chosen(EVERYTHING, PRINCIPAL), ids=str)
def test_all_builds_compute_alike(gpu, head_dim, dtype, tmp_path):
    config = Config(head_dim, dtype, invariant=True)
    with compiling(gpu, tmp_path) as builds:
        launch_attention(config)
        launch_decode(Config(head_dim, dtype, invariant=True, page=48, rich=True), batch=8)
        for dropin in (False, True):
            new = {"dense": True, "packed": True, "dropin": dropin}
            launch_attention(Config(head_dim, dtype, invariant=True, **new))
        if gpu in FP8 and dtype != "float32":
            launch_attention(Config(head_dim, dtype, FP8[gpu], invariant=True))
    walks = [x for x in builds if x.kernel == "invariant_kernel"]
    assert len(walks) == len(builds) - 1 >= 4
    assert len({x.products for x in walks}) == 1, [sorted(x.products) for x in walks]
    check_builds(gpu, f"d{head_dim} {dtype} invariant", builds)


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"),
    chosen([(64, 0), (128, 0), (256, 0), (64, 128), (256, 64), (192, 128)], [(128, 0)]),
    ids=str,
)
def test_builds_for_hopper(head_dim, head_dim_v, tmp_path):
    """Keys that are copied, and those that are loaded: of 8 bits, and beside a cache."""
    widths = {"head_dim": head_dim, "head_dim_v": head_dim_v}
    with compiling("nvidia:sm_90", tmp_path) as builds:
        for config in (
            Config(**widths, invariant=True, page=32),
            Config(**widths, cache="float8_e4m3fn", invariant=True),
            Config(**widths, invariant=True, dense=True, dropin=True),
        ):
            launch_attention(config, hopper=True)
    assert [x.kernel for x in builds] == ["invariant_hopper_kernel"] * 3
    check_builds("nvidia:sm_90", f"d{head_dim}:{head_dim_v or head_dim} invariant", builds)
