"""The invariant kernel for Hopper, run on a CPU by ``_linked.gluon``: dense keys, fixed and packed.

Tiles of 32 keys and segments of two tiles: short sequences are to have many. In fp16, because what
merges segments is a Triton kernel, whose interpreter does not round to bf16.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from flash_attn_triton import api, flash_attn_func
from flash_attn_triton._dense import ops
from flash_attn_triton._linked.host.forms import Memory

from ..._numerics import Packed, Shape, check, make_case, make_packed
from .._invariant import Sequence, assert_chunks_are_the_same, invariant

pytestmark = pytest.mark.skipif(not ops.interpreted(), reason="about the interpreter")


@pytest.fixture
def processors(monkeypatch):
    """Have the kernel for Hopper serve calls; return how many programs it has, in a list."""
    from flash_attn_triton._linked.invariant import plans
    from flash_attn_triton._linked.invariant.hopper import plans as hopper_plans

    from ..._linked.gluon import Kernel

    real, ticket = hopper_plans.hopper_tile, torch.zeros(1, dtype=torch.int32)
    kernel, number = Kernel(hopper_plans.invariant_hopper_kernel), [1]
    monkeypatch.setattr(api, "_known", Memory())
    monkeypatch.setattr(plans, "takes_hopper", lambda *_: True)
    monkeypatch.setattr(hopper_plans, "multiprocessors", lambda _: number[0])
    monkeypatch.setattr(hopper_plans, "invariant_hopper_kernel", kernel)
    monkeypatch.setattr(
        hopper_plans, "hopper_tile", lambda width: replace(real(width), block_n=32, segment=2)
    )
    for name in ("new_ticket", "kept_ticket"):
        monkeypatch.setattr(hopper_plans, name, lambda _: ticket)
    yield number
    assert kernel.launches
    assert not ticket.any()


@pytest.mark.parametrize("features", [("causal", "sinks"), ("window", "softcap")], ids=str)
def test_matches_reference(features, processors):
    shape = Shape(2, 20, 150, 4, 2, 24, 40)
    check(invariant(make_case(shape, torch.float16, "cpu", features)), grad=False)


def test_packed_matches_reference(processors):
    shape = Packed((17, 0, 65), (70, 0, 20), 2, 1, 16, padding=5)
    check(invariant(make_packed(shape, torch.float16, "cpu", ("causal",))), grad=False)


@pytest.mark.parametrize("window", [-1, 50, 5])
def test_chunks_in_any_batch_have_the_bits_of_the_whole(window, processors):
    s = Sequence(140, torch.float16, "cpu", 1, window_size=(window, 0))
    chunks = [(s, 139, 140), (s, 0, 67), (s, 67, 68), (s, 68, 139)]
    assert_chunks_are_the_same(chunks, padding=3)


def test_segments_with_tickets_of_their_own_give_the_same_bits(processors):
    options = {"sinks": torch.tensor([0.5, -1.0]), "window_size": (130, 0)}
    s = Sequence(200, torch.float16, "cpu", 1, **options)
    processors[0] = 64
    inputs = (x[None] for x in (s.q[190:], s.k, s.v))
    out, lse = flash_attn_func(*inputs, **s.options, invariant=True, return_lse=True)
    assert torch.equal(out[0], s.out[190:])
    assert torch.equal(lse[0], s.lse[:, 190:])


def test_keys_that_nobody_sees_may_hold_anything(processors):
    s = Sequence(90, torch.float16, "cpu", 1, window_size=(20, 0))
    k, v = s.k.clone(), s.v.clone()
    k[:40], v[:40] = float("nan"), float("inf")
    out = flash_attn_func(s.q[None, 60:], k[None], v[None], invariant=True, **s.options)
    assert torch.equal(out[0], s.out[60:])
