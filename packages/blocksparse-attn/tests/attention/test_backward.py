"""Gradients against float64 autograd."""

from __future__ import annotations

import pytest
import torch

from .._linked.budget import DTYPES, assert_no_worse_than_eager
from .._numerics import (
    BLOCKS,
    PATTERNS,
    Shape,
    check,
    incoming,
    make_case,
    pairs,
    run,
    run_eager,
    run_oracle,
)
from ._forward import LARGE, SMALL

causal = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_gradients_match_reference(shape, device):
    check(make_case(shape, torch.float32, device))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [SMALL[2], SMALL[7]], ids=str)
def test_gradients_in_half_precision(shape, dtype, device):
    check(make_case(shape, dtype, device))


@pytest.mark.parametrize("block", BLOCKS[::3], ids=str)
@causal
def test_gradients_of_block_sizes(block, causal, device):
    shape = Shape(1, 50, 70, 1, 1, 16)
    check(make_case(shape, torch.float32, device, block=block, causal=causal))


@pytest.mark.parametrize("pattern", PATTERNS)
@causal
def test_gradients_of_patterns(pattern, causal, device):
    shape = Shape(1, 40, 50, 1, 1, 16)
    check(make_case(shape, torch.float32, device, pattern, (32, 16), spare=2, causal=causal))


@pytest.mark.parametrize("shared", [False, True], ids=["per_head", "shared"])
@pytest.mark.parametrize("heads", [(4, 1), (3, 1), (2, 2)], ids=str)
def test_gradients_of_a_group(heads, shared, device):
    check(make_case(Shape(1, 37, 37, *heads, 16), torch.float32, device, shared=shared))


@pytest.mark.parametrize("shared", [False, True], ids=["per_head", "shared"])
@pytest.mark.parametrize("seqlens", [(1, 40), (9, 70), (20, 45), (70, 40)], ids=str)
def test_gradients_of_chunks(seqlens, shared, device):
    shape = Shape(1, *seqlens, 2, 1, 16)
    check(make_case(shape, torch.float32, device, "local", shared=shared, spare=1))


@pytest.mark.parametrize("shared", [False, True], ids=["per_head", "shared"])
def test_gradients_of_a_chunk_that_enters_a_block_in_its_midst(shared, device):
    shape = Shape(1, 9, 70, 2, 1, 16)
    check(make_case(shape, torch.float32, device, "all", shared=shared))


@pytest.mark.device
@pytest.mark.parametrize(
    ("shape", "block", "dtype", "alike", "causal"),
    pairs(LARGE, [(64, 64), (16, 32), (128, 16), (32, 128)], DTYPES, [True, False], [True, False]),
    ids=str,
)
def test_gradients_match_reference_at_length(shape, block, dtype, alike, causal, device):
    check(make_case(shape, dtype, device, block=block, causal=causal, alike=alike))


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk"])
def test_gradients_asked_for_one_by_one(wanted, device):
    case = make_case(Shape(1, 9, 18, 1, 1, 16), torch.float32, device)
    want = run(case)
    leaves = {n: t.detach().requires_grad_(n in wanted) for n, t in case.inputs.items()}
    out, lse = case.with_inputs(**leaves)()
    names = [n for n in leaves if n in wanted]
    grads = torch.autograd.grad((out, lse), [leaves[n] for n in names], incoming(out, lse))
    for name, grad in zip(names, grads, strict=True):
        assert torch.equal(grad, want[f"d{name}"]), name


@pytest.mark.parametrize("which", ["out", "lse"])
def test_gradient_through_one_output_alone(which, device):
    case = make_case(Shape(1, 9, 18, 1, 1, 16), torch.float32, device)

    def gradients(inputs, function):
        leaves = {n: t.detach().requires_grad_() for n, t in inputs.items()}
        out, lse = function(**leaves, **case.options, return_lse=True)
        dout, dlse = incoming(out, lse)
        chosen, grad = (out, dout) if which == "out" else (lse, dlse)
        grads = torch.autograd.grad(chosen, list(leaves.values()), grad, allow_unused=True)
        return {
            n: torch.zeros_like(t) if g is None else g
            for (n, t), g in zip(leaves.items(), grads, strict=True)
        }

    wide = {n: t.double() for n, t in case.inputs.items()}
    got, eager = gradients(case.inputs, case.function), gradients(case.inputs, case.reference)
    oracle = gradients(wide, case.reference)
    for name, value in got.items():
        assert_no_worse_than_eager(f"d{name}", value, eager[name], oracle[name], 3.0)


def test_wrong_gradients_would_show(device):
    """The budget is tight enough to see a missing scale, or a term of the softmax."""
    case = make_case(Shape(1, 33, 33, 1, 1, 16), torch.bfloat16, device)
    oracle = run_oracle(case)
    eager = run_eager(case, oracle)
    for name in ("out", "dq", "dk", "dv"):
        with pytest.raises(AssertionError):
            assert_no_worse_than_eager(name, oracle[name] * 1.05, eager[name], oracle[name], 3.0)
