"""Fixtures: kernels for Hopper, run on a CPU by ``_linked.gluon``, serve calls."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from prefix_prefill import api
from prefix_prefill._hopper_configs import hopper_tile
from prefix_prefill._linked.host.forms import Memory


@pytest.fixture(params=[True, False], ids=["copies_first", "copies_last"])
def reverse(request):
    """Which partition goes ahead of the others as far as the barriers let it."""
    return request.param


@pytest.fixture
def serve(monkeypatch):
    """Return a function that has one kernel serve what it may of a call, in two programs."""
    from prefix_prefill._kernels import plans, tile_plan
    from prefix_prefill._kernels.hopper import plans as hopper_plans

    from ._linked.gluon import Kernel

    real = {name: getattr(hopper_plans, name) for name in ("prefill_kernel", "prefill_wide_kernel")}
    ticket = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(plans, "takes_hopper", lambda *_: True)
    monkeypatch.setattr(tile_plan, "count_processors", lambda _: 2)
    for name in ("new_ticket", "kept_ticket"):
        monkeypatch.setattr(hopper_plans, name, lambda _: ticket)
    kernels = []

    def serve(reverse=True, block_n=32, name="prefill_kernel", wideners=1, is_tall=False):
        monkeypatch.setattr(api, "_known", Memory())
        monkeypatch.setattr(hopper_plans, "is_worth_tall", lambda *_: is_tall)
        other = {"block_n": block_n, "wideners": wideners}
        monkeypatch.setattr(
            hopper_plans, "hopper_tile", lambda *d: replace(hopper_tile(*d), **other)
        )
        kernels.append(Kernel(real[name], reverse))
        monkeypatch.setattr(hopper_plans, name, kernels[-1])
        return kernels[-1]

    yield serve
    assert all(kernel.launches for kernel in kernels)
    assert not ticket.any() or any(kernel.faults for kernel in kernels)
