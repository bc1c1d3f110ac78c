"""Calls within torch.compile: no graph breaks, one compilation for all lengths, the same errors."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from flash_attn_triton import flash_attn_func, flash_attn_varlen_func
from flash_attn_triton._linked.host.forms import interpreted
from torch import Tensor

from .._numerics import Packed, Shape, make_case, make_packed

SHAPE = Shape(2, 9, 13, 4, 2, 16, 8)

traced_alike = pytest.mark.skipif(
    interpreted(), reason="tracing sees the operators alone, and the interpreter is slow"
)


@pytest.fixture
def compiled():
    """A compiler that refuses graph breaks."""
    # else the limit on recompilation is shared between tests
    torch.compiler.reset()

    def compile(function):
        return torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")

    with warnings.catch_warnings():
        # dynamo makes an instance of an autograd function, against PyTorch's own advice
        warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
        yield compile
    torch.compiler.reset()


def loss_of(out: Tensor, lse: Tensor) -> Tensor:
    return out.sin().sum() + lse.masked_fill(lse == -math.inf, 0.0).sin().sum()


@traced_alike
@pytest.mark.eager
def test_forward_mode_raises_in_a_compiled_function(device, compiled):
    x = torch.randn(1, 2, 1, 4, device=device)
    fast = torch.compile(
        lambda x: torch.func.jvp(lambda q: flash_attn_func(q, q, q), (x,), (x,)), backend="eager"
    )
    with pytest.raises(NotImplementedError, match="forward-mode differentiation"):
        fast(x)


@traced_alike
@pytest.mark.eager
def test_fixed_form_compiles_once_for_all_lengths(device, compiled):
    def function(q, k, v, bias, sinks, slopes):
        return loss_of(
            *flash_attn_func(
                q,
                k,
                v,
                causal=True,
                window_size=(9, -1),
                softcap=2.0,
                bias=bias,
                sinks=sinks,
                alibi_slopes=slopes,
                return_lse=True,
            )
        )

    fast = compiled(function)
    slopes = torch.rand(6, device=device)
    for batch, seqlen_q, seqlen_k in ((3, 10, 12), (5, 7, 30), (4, 30, 9)):
        shape = Shape(batch, seqlen_q, seqlen_k, 6, 2, 16)
        case = make_case(shape, torch.float32, device, ["bias", "sinks"])
        inputs = [[t.clone().requires_grad_() for t in case.inputs.values()] for _ in range(2)]
        with torch._dynamo.config.patch(error_on_recompile=batch != 3):
            losses = fast(*inputs[0], slopes), function(*inputs[1], slopes)
        torch.testing.assert_close(*losses)
        grads = (torch.autograd.grad(x, y) for x, y in zip(losses, inputs, strict=True))
        for got, want in zip(*grads, strict=True):
            torch.testing.assert_close(got, want)


@traced_alike
@pytest.mark.eager
def test_packed_form_compiles_once_for_all_lengths(device, compiled):
    def function(q, k, v, cu_seqlens, max_seqlen):
        return loss_of(
            *flash_attn_varlen_func(
                q,
                k,
                v,
                cu_seqlens,
                cu_seqlens,
                max_seqlen,
                max_seqlen,
                causal=True,
                return_lse=True,
            )
        )

    fast = compiled(function)
    for lengths in ((5, 6, 2), (9, 3, 4, 10), (20, 7)):
        case = make_packed(Packed(lengths, lengths, 6, 2, 16), torch.float32, device)
        inputs = [[t.clone().requires_grad_() for t in case.inputs.values()] for _ in range(2)]
        rest = case.options["cu_seqlens_q"], max(lengths)
        with torch._dynamo.config.patch(error_on_recompile=lengths != (5, 6, 2)):
            losses = fast(*inputs[0], *rest), function(*inputs[1], *rest)
        grads = (torch.autograd.grad(x, y) for x, y in zip(losses, inputs, strict=True))
        for got, want in zip(*grads, strict=True):
            torch.testing.assert_close(got, want)


@traced_alike
@pytest.mark.eager
def test_dropout_and_its_probabilities_compile(device, compiled):
    fast = compiled(lambda q, k, v: flash_attn_func(q, k, v, 0.5, return_attn_probs=True))
    case = make_case(SHAPE, torch.float32, device)
    leaves = [t.requires_grad_() for t in case.inputs.values()]
    out, lse, marked = fast(*leaves)
    kept = 2 * marked.clamp(min=0.0)
    v = leaves[2].repeat_interleave(2, dim=2)
    torch.testing.assert_close(out, torch.einsum("bhij,bjhe->bihe", kept, v), rtol=1e-4, atol=1e-5)
    assert lse.requires_grad
    # the backward pass sees the forward's draw
    (dv,) = torch.autograd.grad(out.sum(), leaves[2])
    want = kept.sum(2).unflatten(1, (2, 2)).sum(2).transpose(1, 2)[..., None].expand_as(dv)
    torch.testing.assert_close(dv, want, rtol=1e-4, atol=1e-5)


@pytest.mark.eager
def test_one_tensor_as_all_three_compiles(device, compiled):
    fast = compiled(lambda x: flash_attn_func(x, x, x, causal=True).sin().sum())
    x = make_case(SHAPE, torch.float32, device).inputs["k"].requires_grad_()
    (want,) = torch.autograd.grad(flash_attn_func(x, x, x, causal=True).sin().sum(), x)
    torch.testing.assert_close(torch.autograd.grad(fast(x), x), (want,))


@pytest.mark.eager
def test_wrong_calls_fail_under_compile_too(device, compiled):
    fast = compiled(lambda q, k: flash_attn_func(q, k, k))
    q = torch.zeros(2, 5, 4, 16, device=device)
    with pytest.raises(Exception, match="heads_q must be a positive multiple of heads_k"):
        fast(q, q[:, :, :3])


@pytest.mark.eager
def test_fp8_compiles(compiled):
    scale = torch.ones(1)
    fast = compiled(
        lambda q, k, v: flash_attn_func(
            q, k, v, q_descale=scale, out_dtype=torch.float8_e4m3fn, out_scale=scale
        )
    )
    case = make_case(SHAPE, torch.float32, "cpu")
    out = fast(*(t.to(torch.float8_e4m3fn) for t in case.inputs.values()))
    assert out.dtype == torch.float8_e4m3fn
