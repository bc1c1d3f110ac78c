"""Helpers of gluon tests that other tests use too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from flash_attn_triton import api
from flash_attn_triton._dense.hopper_tiles import (
    HopperTile,
)
from flash_attn_triton._linked.host.forms import Memory

from ..._numerics import Case, Packed, check

# as the tiles that serve calls, but for the keys of a step: short sequences are to have many
TILES = {
    "plain": HopperTile(3, 32, 2, 2, lag=True),
    "stages": HopperTile(2, 32, 3, 2),
    "pipeline": HopperTile(2, 32, 2, 2, buffers_q=2, pipeline=True),
    "long": HopperTile(3, 32, 2, 2, buffers_q=2, pipeline=True),
    "share": HopperTile(2, 32, 2, 3, share=True, lag=True),
}


PACKED = Packed((70, 0, 150, 1), (100, 40, 90, 33), 2, 1, 48, padding=70)


@pytest.fixture(params=[True, False], ids=["copies_first", "copies_last"])
def reverse(request):
    """Which partition goes ahead of the others as far as the barriers let it."""
    return request.param


@pytest.fixture
def forward(monkeypatch):
    """Return a function that has one kernel serve every forward call, in two programs."""
    from flash_attn_triton._dense import launch as dense_launch
    from flash_attn_triton._dense.hopper.forward import launch as forward_launch

    from ..._linked.gluon import Kernel

    real = forward_launch.forward_kernel
    ticket = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(dense_launch, "takes_hopper_forward", lambda *_: True)
    monkeypatch.setattr(forward_launch, "multiprocessors", lambda _: 2)
    for name in ("new_ticket", "kept_ticket"):
        monkeypatch.setattr(forward_launch, name, lambda _: ticket)
    kernels = []

    def serve(tile, reverse=True):
        monkeypatch.setattr(api, "_known", Memory())
        kernels.append(Kernel(real, reverse))
        monkeypatch.setattr(forward_launch, "hopper_tile", lambda *_: tile)
        monkeypatch.setattr(forward_launch, "hopper_panel_tile", lambda *_: tile)
        monkeypatch.setattr(forward_launch, "forward_kernel", kernels[-1])
        return kernels[-1]

    yield serve
    assert all(kernel.launches for kernel in kernels)
    assert not ticket.any() or any(kernel.faults for kernel in kernels)


WAIT_K = "await_full(pipeline.k_full, turn)"


ARRIVE_V = "barrier_arrive(EMPTY + TILE.STAGES_K + stage_v, PARTIES, 4)"


def caught(serve: Callable[[bool], None], case: Case, grad: bool = False) -> bool:
    """Say whether either order of the partitions shows what is wrong."""
    for reverse in (True, False):
        serve(reverse)
        try:
            check(case, grad=grad)
        except (AssertionError, RuntimeError):
            return True
    return False
