"""Helpers of gluon backward tests that other tests use too."""

from __future__ import annotations

import pytest
import torch
from flash_attn_triton import api
from flash_attn_triton._dense.hopper_tiles import HopperBackwardTile
from flash_attn_triton._linked.host.forms import Memory

from ._gluon import TILES

KINDS = {
    # either warpgroup has half of the rows of dq, or of its columns
    "rows": HopperBackwardTile(128, 3, 2),
    "columns": HopperBackwardTile(64, 2, 2),
    "softcap": HopperBackwardTile(64, 3, 3),
    "wide": HopperBackwardTile(64, 2, 2, block_n=64),
    "apart": HopperBackwardTile(64, 2, 2, is_apart=True),
}


kinds = pytest.mark.parametrize("tile", ["rows", "columns", "wide", "apart"])


@pytest.fixture
def backward(monkeypatch, forward):
    """Return a function that has one kernel serve every backward call."""
    from flash_attn_triton._dense import launch as dense_launch
    from flash_attn_triton._dense.hopper.backward import launch as hopper_launch
    from flash_attn_triton._dense.portable import backward_launch

    from ..._linked.gluon import Kernel

    monkeypatch.setattr(backward_launch, "takes_hopper_backward", lambda *_: True)
    real = hopper_launch.backward_kernel
    kernels = []

    def serve(tile, reverse=True, features=(), shares=1):
        if "dropout" in features and {"window", "window_left"} & set(features):
            # not for the forward's kernel
            monkeypatch.setattr(dense_launch, "takes_hopper_forward", lambda *_: False)
            monkeypatch.setattr(api, "_known", Memory())
        else:
            forward(TILES["plain"], reverse)
        kernels.append(Kernel(real, reverse))
        monkeypatch.setattr(hopper_launch, "hopper_backward_tile", lambda *_: tile)
        monkeypatch.setattr(hopper_launch, "possible_shares", lambda *_: [shares])
        monkeypatch.setattr(hopper_launch, "backward_kernel", kernels[-1])
        return kernels[-1]

    yield serve
    assert all(kernel.launches for kernel in kernels)


USED = torch.tensor([37, 0, 90, 0], dtype=torch.int32)
