"""Helpers of gluon bias tests that other tests use too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from flash_attn_triton._dense.hopper import bias_launch
from flash_attn_triton._dense.hopper.backward import launch as hopper_launch
from flash_attn_triton._dense.hopper.forward import launch as forward_launch
from flash_attn_triton._dense.hopper_tiles import HopperBackwardTile

from ..._numerics import Case, Shape, make_case
from ._gluon import TILES

HALF, FULL = torch.bfloat16, torch.float32


FORWARD = {name: replace(tile, stages_b=2) for name, tile in TILES.items()}


BACKWARD = {
    "rows": HopperBackwardTile(128, 3, 2, stages_b=1),
    "columns": HopperBackwardTile(64, 2, 2, stages_b=2),
    "wide": HopperBackwardTile(64, 2, 1, block_n=64, stages_b=1),
}


@pytest.fixture
def biased(monkeypatch, forward):
    """Return a function that has one kernel serve every forward call."""

    def serve(tile, reverse=True):
        monkeypatch.setattr(forward_launch, "hopper_bias_tile", lambda *_: FORWARD[tile])
        return forward(FORWARD[tile], reverse)

    return serve


@pytest.fixture
def gradients(monkeypatch, biased, backward):
    """Return a function that has one kernel serve every backward call."""

    real = bias_launch.BiasSum.new_gradients

    def unset(self, dbias):
        """Memory that is not set to zero may hold anything."""
        ds = real(self, dbias.fill_(torch.nan))
        return ds if ds is dbias else ds.fill_(torch.nan)

    monkeypatch.setattr(bias_launch.BiasSum, "new_gradients", unset)

    def serve(tile, reverse=True):
        monkeypatch.setattr(forward_launch, "hopper_bias_tile", lambda *_: FORWARD["plain"])
        monkeypatch.setattr(hopper_launch, "hopper_backward_bias_tile", lambda *_: BACKWARD[tile])
        return backward(BACKWARD[tile], reverse)

    return serve


def with_bias(case: Case, *size: int, dtype: torch.dtype = HALF, share: float = 0.0) -> Case:
    """Return a case with a bias of that size, ``share`` of which is -inf."""
    made = torch.Generator().manual_seed(1)
    bias = torch.randn(size, generator=made).to(dtype)
    return case.with_inputs(
        bias=bias.masked_fill(torch.rand(size, generator=made) < share, -torch.inf)
    )


def hiding(*features: str) -> Case:
    """A case whose bias hides keys: all of some rows, the first, the last, and at random."""
    case = with_bias(
        make_case(Shape(1, 100, 130, 2, 1, 64), torch.bfloat16, "cpu", features),
        *(1, 2, 100, 130),
        share=0.5,
    )
    bias = case.inputs["bias"]
    bias[:, :, 70:80] = -torch.inf
    bias[:, :, 5:9, :100] = -torch.inf
    bias[:, 1, 85:, 30:] = -torch.inf
    return case


def in_order(batch: int = 1, keys: int = 260) -> Case:
    """A case whose dq is added up in order, with a gradient of its bias."""
    case = make_case(Shape(batch, 200, keys, 2, 1, 64), torch.bfloat16, "cpu", ("causal",))
    return with_bias(case, 1, 2, 200, keys).with_options(deterministic=True)
