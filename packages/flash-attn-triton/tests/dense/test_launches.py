"""What plans keep for their launches: calls of one form that differ get what is theirs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from flash_attn_triton import api, flash_attn_func, flash_attn_varlen_func
from flash_attn_triton._dense import ops
from flash_attn_triton._linked.host.forms import Memory
from flash_attn_triton._linked.launch import runtime
from flash_attn_triton._linked.launch.runtime import MAX_INT32, Launch, Ready
from flash_attn_triton._linked.launch.shipped.folders import NO_PROFILER

interpreted = pytest.mark.skipif(not ops.interpreted(), reason="a GPU's calls are the same ones")


@pytest.mark.eager
def test_kept_numbers_are_not_looked_up_again(monkeypatch):
    launched, looked_up = [], []
    kernel = SimpleNamespace(function=None, packed_metadata=None)

    def look_up(self, variant, *_):
        looked_up.append(variant)

        def run(*arguments):
            launched.append((variant, arguments[-2:]))

        self._ready[variant] = Ready(kernel, 0, (), run, lambda _: 0, NO_PROFILER)
        return self._ready[variant]

    monkeypatch.setattr(Launch, "_look_up", look_up)
    monkeypatch.setattr(runtime, "current_device", lambda: 0)
    variants = []
    variant_of = runtime.variant_of
    monkeypatch.setattr(runtime, "variant_of", lambda *x: variants.append(x[1]) or variant_of(*x))
    launch = Launch(SimpleNamespace(), {})
    few, others, many = (2, 3), (4, 3), (2, MAX_INT32 + 1)
    order = [few, few, others, few, many, many, few]
    for numbers in order:
        launch(1, (torch.empty(1),), numbers)
    assert [got for _, got in launched] == order
    assert [variant for variant, _ in launched] == [
        (False, True) if numbers is many else False for numbers in order
    ]
    assert looked_up == [False, (False, True)]
    assert variants == [few, others, few, many, few]


def leaves_of(*sizes):
    return [torch.randn(size, dtype=torch.float16).requires_grad_() for size in sizes]


def in_another_order(x):
    """Return the tensor with heads ahead of tokens in memory."""
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)


@interpreted
def test_packed_calls_of_one_form_have_their_own_numbers(monkeypatch):
    known = Memory()
    monkeypatch.setattr(api, "_known", known)
    calls = []
    for lengths, change in [
        ((5, 11), lambda x: x),
        ((30, 4), lambda x: x),
        ((5, 11), in_another_order),
        ((30, 4), lambda x: x),
    ]:
        starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        leaves = leaves_of(*[(sum(lengths), heads, 16) for heads in (2, 1, 1)])
        dout = change(torch.randn(sum(lengths), 2, 16, dtype=torch.float16))
        calls.append((leaves, starts, dout))

    def run(leaves, starts, dout):
        out = flash_attn_varlen_func(*leaves, starts, starts, 30, 30, causal=True)
        return out, *torch.autograd.grad(out, leaves, dout)

    got = [run(*call) for call in calls]
    assert len(known._known) == 1
    for call, results in zip(calls, got, strict=True):
        known.clear()
        assert all(map(torch.equal, results, run(*call)))


@interpreted
def test_gradients_with_other_strides_have_their_own_numbers(monkeypatch):
    monkeypatch.setattr(api, "_known", Memory())
    *leaves, bias = leaves_of((2, 20, 2, 16), (2, 33, 1, 16), (2, 33, 1, 16), (1, 2, 20, 33))
    dout = torch.randn(2, 20, 2, 16, dtype=torch.float16)
    grads = [
        torch.autograd.grad(flash_attn_func(*leaves, bias=bias), [*leaves, bias], x)
        for x in (dout, in_another_order(dout), dout)
    ]
    for got in grads[1:]:
        assert all(map(torch.equal, got, grads[0]))
