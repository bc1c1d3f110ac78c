"""merge_attn_states: two halves of the keys give what all of them give."""

from __future__ import annotations

import math

import pytest
import torch
from flash_attn_triton import (
    attention_reference,
    flash_attn_func,
    flash_attn_varlen_func,
    merge_attn_states,
)

from .._linked.budget import DTYPES, Maker
from .._numerics import Packed, Shape, make_case, make_packed

SHAPE = Shape(2, 9, 21, 4, 2, 16)


@pytest.mark.eager
@pytest.mark.parametrize("split", [0, 1, 10, 21])
@pytest.mark.parametrize("sinks", [False, True])
def test_halves_merge_into_the_whole(split, sinks, device):
    case = make_case(SHAPE, torch.float32, device, ["sinks"] if sinks else [])
    q, k, v = (case.inputs[name] for name in ("q", "k", "v"))
    # the sink counts once
    first = flash_attn_func(
        q, k[:, :split], v[:, :split], return_lse=True, sinks=case.inputs.get("sinks")
    )
    second = flash_attn_func(q, k[:, split:], v[:, split:], return_lse=True)
    whole = attention_reference(**case.inputs, return_lse=True)
    torch.testing.assert_close(merge_attn_states(*first, *second), whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(merge_attn_states(*second, *first), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.eager
def test_packed_halves_merge(device):
    case = make_packed(Packed((3, 5), (4, 6), 4, 2, 16, padding=2), torch.float32, device)
    out, lse = flash_attn_varlen_func(**case.inputs, **case.options, return_lse=True)
    merged_out, merged_lse = merge_attn_states(out, lse, out, lse)
    torch.testing.assert_close(merged_out, out)
    torch.testing.assert_close(merged_lse[:, :8], lse[:, :8] + math.log(2))
    assert (merged_lse[:, 8:] == -math.inf).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("empty", [-math.inf, math.inf])
def test_an_empty_side_changes_no_bit(empty, dtype):
    m = Maker("cpu", dtype)
    out, lse = m.randn(2, 5, 3, 8), m.randn(2, 3, 5, dtype=torch.float32)
    garbage = torch.full_like(out, math.nan)
    nothing = torch.full_like(lse, empty)
    for merged in (
        merge_attn_states(out, lse, garbage, nothing),
        merge_attn_states(garbage, nothing, out, lse),
    ):
        assert torch.equal(merged[0], out)
        assert torch.equal(merged[1], lse)
    both = merge_attn_states(garbage, nothing, garbage, nothing)
    assert torch.equal(both[0], torch.zeros_like(out))
    assert torch.equal(both[1], torch.full_like(lse, -math.inf))


def test_output_has_the_dtype_of_the_first():
    m = Maker("cpu", torch.float16)
    out, lse = m.randn(5, 3, 8), m.randn(3, 5, dtype=torch.float32)
    merged, merged_lse = merge_attn_states(out, lse, out.float(), lse)
    assert merged.dtype == torch.float16
    assert merged_lse.dtype == torch.float32


def test_far_apart_magnitudes_do_not_overflow():
    out = torch.ones(1, 2, 3, 4)
    low, high = torch.full((1, 3, 2), -1e5), torch.full((1, 3, 2), 1e5)
    merged, lse = merge_attn_states(out, low, 2 * out, high)
    assert torch.equal(merged, 2 * out)
    assert torch.equal(lse, high)


def test_gradients_are_those_of_finite_differences():
    m = Maker("cpu", torch.float64)
    tensors = [m.randn(3, 2, 4), m.randn(2, 3), m.randn(3, 2, 4), m.randn(2, 3)]
    assert torch.autograd.gradcheck(merge_attn_states, [t.requires_grad_() for t in tensors])


def test_gradients_at_empty_rows_are_zero():
    m = Maker("cpu", torch.float32)
    lse_a, lse_b = m.randn(2, 4), m.randn(2, 4)
    lse_a[:, :2] = -math.inf
    lse_b[:, 1:3] = -math.inf
    out_a, out_b = m.randn(4, 2, 8), m.randn(4, 2, 8)
    out_a[:2] = math.nan
    leaves = [t.requires_grad_() for t in (out_a, lse_a, out_b, lse_b)]
    results = merge_attn_states(*leaves)
    grads = torch.autograd.grad(results, leaves, [torch.ones_like(t) for t in results])
    for grad in grads:
        assert grad.isfinite().all()
    assert not grads[0][:2].any()
    assert not grads[1][:, :2].any()
    assert not grads[2][1:3].any()
    assert not grads[3][:, 1:3].any()
    assert torch.equal(grads[1][:, 2], torch.ones(2))


def test_compiles():
    torch.compiler.reset()
    m = Maker("cpu", torch.float32)
    function = torch.compile(merge_attn_states, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 7):
        tensors = [m.randn(rows, 2, 8), m.randn(2, rows), m.randn(rows, 2, 8), m.randn(2, rows)]
        leaves = [t.requires_grad_() for t in tensors]
        got, want = function(*leaves), merge_attn_states(*leaves)
        torch.testing.assert_close(got, want)
        ones = [torch.ones_like(t) for t in got]
        torch.testing.assert_close(
            torch.autograd.grad(got, leaves, ones), torch.autograd.grad(want, leaves, ones)
        )
    torch.compiler.reset()


OUT, LSE = torch.zeros(2, 5, 3, 8), torch.zeros(2, 3, 5)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({0: [1]}, TypeError, "out_a must be a torch.Tensor, got list"),
        ({1: None}, TypeError, "lse_a must be a torch.Tensor, got NoneType"),
        ({1: LSE.half()}, TypeError, "lse_a must be torch.float32 or torch.float64, got torch.flo"),
        ({3: LSE.double()}, TypeError, "lse_b must have the dtype of lse_a, torch.float32, got"),
        ({2: OUT.int()}, TypeError, "out_b must have a float dtype, got torch.int32"),
        ({2: OUT.to("meta")}, ValueError, "out_b must be on the device of out_a, cpu, got meta"),
        ({0: OUT[0, 0]}, ValueError, "out_a must be [batch, seqlen, heads, head_dim] or [tokens, "),
        ({2: OUT[0]}, ValueError, "out_b must have the shape of out_a, [2, 5, 3, 8], got [5, 3, 8"),
        ({1: LSE.mT}, ValueError, "lse_a must be [2, 3, 5], got [2, 5, 3]"),
        ({3: LSE[0]}, ValueError, "lse_b must be [2, 3, 5], got [3, 5]"),
    ],
    ids=str,
)
def test_message(changes, error, message):
    arguments = [OUT, LSE, OUT, LSE]
    for position, value in changes.items():
        arguments[position] = value
    with pytest.raises(error) as caught:
        merge_attn_states(*arguments)
    assert str(caught.value).startswith(message)
