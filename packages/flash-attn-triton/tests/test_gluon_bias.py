"""Additive biases in the kernels for Hopper, run on a CPU by ``_gluon``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from flash_attn_triton import _ops
from flash_attn_triton._kernels.hopper import plans

from ._linked.budget import assert_same
from ._numerics import FEATURES, Case, Packed, Shape, check, make_case, make_packed, run
from .test_gluon import PACKED, TILES, caught, forward, reverse

__all__ = ["forward", "reverse"]  # fixtures

pytestmark = pytest.mark.skipif(not _ops.interpreted(), reason="about the interpreter")

BIAS_TILES = {name: replace(tile, stages_b=2) for name, tile in TILES.items()}
BIAS_TILES["single"] = replace(TILES["stages"], stages_b=1)


@pytest.fixture
def biased(monkeypatch, forward):
    """Return a function that has one kernel serve every forward call."""

    def serve(tile, reverse=True):
        monkeypatch.setattr(plans, "hopper_bias_tile", lambda *_: tile)
        return forward(tile, reverse)

    return serve


def with_bias(case: Case, *size: int, dtype: torch.dtype = torch.bfloat16, share: float = 0.0):
    """Return a case with a bias of that size, ``share`` of which is -inf."""
    made = torch.Generator().manual_seed(1)
    bias = torch.randn(size, generator=made, dtype=torch.float32).to(dtype)
    hidden = torch.rand(size, generator=made) < share
    return case.with_inputs(bias=bias.masked_fill(hidden, -torch.inf))


# tile, shape, features, size of the bias, its dtype
CASES = [
    ("plain", Shape(2, 200, 150, 2, 1, 64), (), (1, 2, 200, 150), torch.bfloat16),
    ("stages", Shape(2, 130, 203, 2, 1, 128), ("causal",), (2, 1, 130, 203), torch.bfloat16),
    ("pipeline", Shape(2, 200, 104, 2, 2, 64), ("causal", "sinks"), (2, 2, 200, 104), torch.float32),
    ("share", Shape(2, 150, 140, 2, 1, 64), ("window",), (1, 1, 150, 140), torch.bfloat16),
    ("single", Shape(1, 70, 200, 4, 2, 48), ("window_left", "softcap"), (1, 4, 70, 200), torch.bfloat16),
    ("plain", Shape(2, 3, 150, 4, 1, 64), ("causal", "alibi"), (2, 1, 1, 150), torch.bfloat16),
    ("pipeline", Shape(1, 200, 107, 2, 1, 64), ("window_left",), (1, 2, 1, 107), torch.float32),
]


@pytest.mark.parametrize(("tile", "shape", "features", "size", "dtype"), CASES, ids=str)
def test_forward(tile, shape, features, size, dtype, biased, reverse):
    biased(BIAS_TILES[tile], reverse)
    case = make_case(shape, torch.bfloat16, "cpu", features)
    check(with_bias(case, *size, dtype=dtype), grad=False)


# sequences without queries, padding on both sides, keys ahead of every window
PACKED_CASES = [
    ("pipeline", ("causal",), (4, 2, 150, 104), torch.bfloat16),
    ("stages", ("window",), (1, 2, 150, 104), torch.float32),
    ("plain", ("window_left",), (4, 1, 1, 100), torch.bfloat16),
]


@pytest.mark.parametrize(("tile", "features", "size", "dtype"), PACKED_CASES, ids=str)
def test_forward_of_packed_tensors(tile, features, size, dtype, biased, reverse):
    biased(BIAS_TILES[tile], reverse)
    case = make_packed(PACKED, torch.float16, "cpu", features)
    case = case.with_options(max_seqlen_k=size[3])
    check(with_bias(case, *size, dtype=torch.float16 if dtype is torch.bfloat16 else dtype), grad=False)


HIDING = Shape(1, 140, 170, 2, 1, 64)


def hiding(*features: str) -> Case:
    """A case whose bias hides keys: all of a row's, the first ones, the last ones, and at random."""
    case = make_case(HIDING, torch.bfloat16, "cpu", features)
    case = with_bias(case, 1, 2, 140, 170, share=0.5)
    bias = case.inputs["bias"]
    bias[:, :, 70:90] = -torch.inf
    bias[:, :, 5:9, :130] = -torch.inf
    bias[:, 1, 100:, 30:] = -torch.inf
    return case


@pytest.mark.parametrize("tile", ["plain", "stages", "pipeline"])
@pytest.mark.parametrize("features", [(), ("causal", "softcap"), ("sinks",)], ids="-".join)
def test_keys_that_a_bias_hides(tile, features, biased):
    biased(BIAS_TILES[tile])
    got = check(hiding(*features), grad=False)
    if "sinks" not in features:
        assert not got["out"][:, 70:90].any()
        assert (got["lse"][:, :, 70:90] == -torch.inf).all()
