"""Fixtures: kernels for Hopper, run on a CPU by ``_linked.gluon``, serve calls."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from prefix_prefill import api
from prefix_prefill._linked.host.forms import Memory
from prefix_prefill._paged.hopper_tiles import hopper_tile


@pytest.fixture(params=[True, False], ids=["copies_first", "copies_last"])
def reverse(request):
    """Which partition goes ahead of the others as far as the barriers let it."""
    return request.param


@pytest.fixture
def serve(monkeypatch):
    """Return a function that has one kernel serve what it may of a call, in two programs."""
    from prefix_prefill._paged import launch as paged_launch
    from prefix_prefill._paged.hopper import launch as hopper_launch
    from prefix_prefill._paged.portable import tile_launch as tile_plan

    from ..._linked.gluon import Kernel

    real = {
        name: getattr(hopper_launch, name) for name in ("prefill_kernel", "prefill_wide_kernel")
    }
    ticket = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(paged_launch, "takes_hopper", lambda *_: True)
    monkeypatch.setattr(tile_plan, "count_processors", lambda _: 2)
    for name in ("new_ticket", "kept_ticket"):
        monkeypatch.setattr(hopper_launch, name, lambda _: ticket)
    kernels = []

    def serve(reverse=True, block_n=32, name="prefill_kernel", wideners=1, is_tall=False):
        monkeypatch.setattr(api, "_known", Memory())
        monkeypatch.setattr(hopper_launch, "is_worth_tall", lambda *_: is_tall)
        other = {"block_n": block_n, "wideners": wideners}
        monkeypatch.setattr(
            hopper_launch, "hopper_tile", lambda *d: replace(hopper_tile(*d), **other)
        )
        kernels.append(Kernel(real[name], reverse))
        monkeypatch.setattr(hopper_launch, name, kernels[-1])
        return kernels[-1]

    yield serve
    assert all(kernel.launches for kernel in kernels)
    assert not ticket.any() or any(kernel.faults for kernel in kernels)
