"""All builds of the invariant kernels multiply and sum alike; they fit and hardly spill."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from flash_attn_triton._dense import tiles
from flash_attn_triton._dense.call import ForwardCall
from flash_attn_triton._dense.launch import launch_forward
from flash_attn_triton._linked.host.operators import structured

from .._linked.gpus import GPUS, chosen, compiling, counting
from .._linked.spills import check_builds

pytestmark = pytest.mark.aot

HEADS_Q, HEADS_K = 8, 2
DIMS = [(16, 16), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256)]
PRINCIPAL = [
    ("nvidia:sm_90", (128, 128), "bfloat16"),
    ("amd:gfx942", (64, 64), "float16"),
]
EVERYTHING = list(itertools.product(GPUS, DIMS, ("bfloat16", "float32")))


def launch(dims: tuple[int, int], dtype: str, seqlen: int = 1024, **options: Any) -> None:
    """Run the forward launcher on meta tensors, of one sequence."""
    made = {"keys": 4096, "window": -1, "softcap": 0.0, "packed": False, **options}
    d, dv = dims
    one = () if made["packed"] else (1,)
    q, k, v = (
        torch.empty(*one, n, heads, width, dtype=getattr(torch, dtype), device="meta")
        for n, heads, width in (
            (seqlen, HEADS_Q, d),
            (made["keys"], HEADS_K, d),
            (made["keys"], HEADS_K, dv),
        )
    )
    offsets = torch.empty(2, dtype=torch.int32, device="meta") if made["packed"] else None
    scalars = seqlen, made["keys"], d**-0.5, made["window"], 0, made["softcap"], 0.0
    given = q, k, v, offsets, offsets, *[None] * 10, *scalars, q.dtype, False, True
    launch_forward(structured(ForwardCall, given))


@pytest.fixture
def portable(monkeypatch):
    monkeypatch.setattr(tiles, "HOPPER", False)


@pytest.mark.usefixtures("portable")
@pytest.mark.parametrize(("gpu", "dims", "dtype"), chosen(EVERYTHING, PRINCIPAL), ids=str)
def test_all_builds_compute_alike(gpu, dims, dtype, tmp_path):
    with compiling(gpu, tmp_path) as builds:
        launch(dims, dtype, 4096)
        launch(dims, dtype, 1)  # segments have programs of their own
        launch(dims, dtype, window=500, packed=True)
        launch(dims, dtype, softcap=30.0, packed=True)
    walks = [x for x in builds if x.kernel == "invariant_kernel"]
    assert len(walks) == 4
    assert len({x.products for x in walks}) == 1, [sorted(x.products) for x in walks]
    assert walks[0].products
    check_builds(gpu, f"d{dims[0]}:{dims[1]} {dtype} invariant", builds)


@pytest.mark.parametrize("dims", chosen([(64, 64), (128, 128), (256, 256)], [(128, 128)]), ids=str)
def test_builds_for_hopper(dims, tmp_path):
    with compiling("nvidia:sm_90", tmp_path) as builds:
        launch(dims, "bfloat16", 4096)
    assert [x.kernel for x in builds] == ["invariant_hopper_kernel"]
    check_builds("nvidia:sm_90", f"d{dims[0]}:{dims[1]} invariant", builds)


@pytest.mark.usefixtures("portable")
@pytest.mark.parametrize("gpu", ["nvidia:sm_90", "amd:gfx942"])
def test_lengths_make_two_variants(gpu):
    with counting(gpu) as variants:
        for length in (1, 16, 17, 33, 1024, 48, 2, 100, 4096, 3, 2000):
            launch((128, 128), "bfloat16", length, keys=length)
    assert {kernel: len(keys) for kernel, keys in variants.items()} == {
        "invariant_kernel": 2,
        "invariant_merge_kernel": 1,
    }
