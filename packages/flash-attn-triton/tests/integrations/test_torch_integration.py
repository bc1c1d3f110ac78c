"""PyTorch's flash attention operators, replaced: numerics, layouts, what is refused.

The operators have no CPU kernels of their own, so registering ours under the CPU's key runs the
whole path, from the dispatcher through autograd, without a GPU.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from attn_common import detect, fp8_dtype
from flash_attn_triton import (
    attention_reference,
    flash_attn_func,
    flash_attn_varlen_func,
    varlen_attention_reference,
)
from torch import Tensor

from .._linked.budget import Maker, offsets
from ._torch_integration import compare, heads_first, overrides

__all__ = ["overrides"]  # fixtures

aten = torch.ops.aten


@pytest.mark.eager
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("layout", ["tokens first", "heads first"])
def test_sdpa_operator_matches_reference_and_keeps_layouts(device, overrides, layout, is_causal):
    m = Maker(device, torch.float32)
    q, k, v = m.randn(2, 19, 4, 16), m.randn(2, 23, 2, 16), m.randn(2, 23, 2, 16)
    if layout == "heads first":
        q, k, v = heads_first(*(t.contiguous() for t in heads_first(q, k, v)))
    strides = []

    def run(*inputs: Tensor) -> Tensor:
        query, key, value = heads_first(*inputs)
        out, lse, cu_q, cu_k, max_q, max_k, *_ = aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, is_causal, scale=0.3
        )
        assert (cu_q, cu_k, max_q, max_k) == (None, None, 19, 23)
        assert lse.shape == (2, 4, 19)
        strides.append(out.stride() == torch.empty_like(query).stride())
        return out.transpose(1, 2)

    def reference(*inputs: Tensor) -> Tensor:
        # lengths differ: the operator aligns to the bottom right
        return attention_reference(*inputs, causal=is_causal, softmax_scale=0.3)

    compare(run, reference, [q, k, v])
    assert strides == [True]


@pytest.mark.eager
def test_gradients_of_sdpa_operator_are_laid_out_like_the_inputs(device, overrides):
    m = Maker(device, torch.float32)
    leaves = [m.randn(1, 2, 5, 8).requires_grad_() for _ in range(3)]
    out, lse, _, _, max_q, max_k, seed, unused, _ = aten._scaled_dot_product_flash_attention(
        *leaves
    )
    q, k, v = (t.detach() for t in leaves)
    grads = aten._scaled_dot_product_flash_attention_backward(
        torch.ones_like(q),
        q,
        k,
        v,
        out.detach(),
        lse,
        None,
        None,
        max_q,
        max_k,
        0.0,
        False,
        seed,
        unused,
    )
    assert [g.stride() for g in grads] == [t.stride() for t in (q, k, v)]
    for grad, want in zip(grads, torch.autograd.grad(out.sum(), leaves), strict=True):
        assert torch.equal(grad, want)


@pytest.mark.eager
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (2, 4)])
def test_varlen_attn_matches_reference(device, overrides, window):
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    # torch 2.11 serves one key head per query head alone
    has_gqa = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters
    heads_k = 2 if has_gqa else 4
    gqa = {"enable_gqa": True} if has_gqa else {}
    m = Maker(device, torch.float32)
    q, k, v = m.randn(20, 4, 16), m.randn(26, heads_k, 16), m.randn(26, heads_k, 16)
    ends = offsets((7, 0, 13), device), offsets((9, 3, 14), device), 13, 14

    def run(*inputs: Tensor) -> Tensor:
        out, lse = varlen.varlen_attn(
            *inputs,
            *ends,
            window_size=window,
            return_aux=varlen.AuxRequest(lse=True),
            **gqa,
        )
        assert lse.shape == (4, 20)
        return out

    def reference(*inputs: Tensor) -> Tensor:
        return varlen_attention_reference(*inputs, *ends, window_size=window)

    compare(run, reference, [q, k, v])


@pytest.mark.eager
@pytest.mark.skipif(
    not hasattr(aten, "_flash_attention_forward_no_dropout_inplace"),
    reason="this torch has no such operator",
)
def test_forward_into_a_given_output_and_used_keys(device, overrides):
    m = Maker(device, torch.float32)
    q, k, v = m.randn(2, 4, 16), m.randn(12, 4, 16), m.randn(12, 4, 16)
    ends = offsets((1, 1), device), offsets((6, 6), device), 1, 6
    used = torch.tensor([3, 6], dtype=torch.int32, device=device)
    out = torch.empty_like(q)
    lse = aten._flash_attention_forward_no_dropout_inplace(
        out, q, k, v, *ends, 0.0, True, False, seqused_k=used
    )
    want, want_lse = varlen_attention_reference(
        q, k, v, *ends, causal=True, seqused_k=used, return_lse=True
    )
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)


@pytest.mark.eager
def test_dropout_is_the_same_in_backward_and_follows_the_generator(device, overrides):
    m = Maker(device, torch.float32)
    q, k, v = (m.randn(1, 2, 24, 16).requires_grad_() for _ in range(3))

    def run() -> Tensor:
        torch.manual_seed(3)
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.5)[0]

    out = run()
    assert torch.equal(out, run())
    assert not torch.equal(out, aten._scaled_dot_product_flash_attention(q, k, v, 0.5)[0])
    # linear in v: the gradient must see the mask that the output saw
    dout = m.randn(*out.shape)
    (dv,) = torch.autograd.grad(out, v, dout)
    torch.testing.assert_close((dv * v).sum(), (out * dout).sum())


@pytest.mark.eager
@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((None, None, 4, 4, 0.0, False, True), {}),
        ((None, None, 4, 4, 0.0, False, False), {"seqused_k": torch.zeros(1).int()}),
    ],
    ids=["debug mask", "seqused without lengths"],
)
def test_what_is_not_offered_raises(device, overrides, arguments, options):
    known = {a.name for a in aten._flash_attention_forward.default._schema.arguments}
    if not known.issuperset(options):
        pytest.skip(f"this torch's operator does not take {', '.join(options)}")
    q = torch.zeros(1, 4, 2, 8, device=device)
    options = {name: value.to(device) for name, value in options.items()}
    with pytest.raises(NotImplementedError, match="as PyTorch's flash attention: no"):
        aten._flash_attention_forward(q, q, q, *arguments, **options)


@pytest.mark.eager
def test_paged_keys_name_who_serves_them(device, overrides):
    known = {a.name for a in aten._flash_attention_forward.default._schema.arguments}
    if "block_table" not in known:
        pytest.skip("this torch's operator takes no block_table")
    q, pages = torch.zeros(4, 2, 8, device=device), torch.zeros(3, 16, 2, 8, device=device)
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    ends, used = offsets((4,), device), torch.ones(1, dtype=torch.int32, device=device)
    who = r"call prefix_prefill\.integrations\.torch\.register\(\)"
    with pytest.raises(NotImplementedError, match=who):
        aten._flash_attention_forward(
            q, pages, pages, ends, None, 4, 16, 0.0, False, False, seqused_k=used, block_table=table
        )


@pytest.mark.eager
@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_queries_with_keys_of_fixed_length(device, overrides, is_causal):
    m = Maker(device, torch.float32)
    q, k, v = m.randn(6, 4, 16), m.randn(2, 9, 2, 16), m.randn(2, 9, 2, 16)
    ends, used = offsets((1, 5), device), torch.tensor([4, 9], dtype=torch.int32, device=device)
    got, got_lse, *_ = aten._flash_attention_forward(
        q, k, v, ends, None, 5, 9, 0.0, is_causal, False, seqused_k=used
    )
    packed = k.flatten(0, 1), v.flatten(0, 1), ends, offsets((9, 9), device), 5, 9
    options = {"causal": is_causal, "seqused_k": used, "return_lse": True}
    want, want_lse = varlen_attention_reference(q, *packed, **options)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(got_lse, want_lse)
    with pytest.raises(NotImplementedError, match="no gradient with cum_seq_k=None"):
        aten._flash_attention_forward(q.requires_grad_(), k, v, ends, None, 5, 9, 0.0, False, False)


def quantized(m: Maker, shape: tuple[int, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """FP8 tensors, heads first, and their descales ``[batch, heads]``."""
    dtype = getattr(torch, fp8_dtype(detect(m.device)))
    tensors = [(m.randn(*shape) * 8).to(dtype) for _ in "qkv"]
    return tensors, [m.uniform(*shape[:2], low=0.1, high=0.2) for _ in "qkv"]


@pytest.mark.eager
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_quantized_overloads_match_what_the_package_computes(device, overrides, packed, is_causal):
    if not detect(device).supports_fp8:
        pytest.skip("no FP8 on this GPU")
    inputs, descales = quantized(Maker(device, torch.float32), (2, 4, 24, 16))
    tokens = heads_first(*inputs)
    names = dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
    if packed:
        flat = [t.flatten(0, 1) for t in tokens]
        ends = offsets((24, 24), device), offsets((24, 24), device), 24, 24
        got, lse, *_ = aten._flash_attention_forward.quantized(
            *flat, *ends, 0.0, is_causal, False, *descales
        )
        want, want_lse = flash_attn_varlen_func(
            *flat, *ends, causal=is_causal, return_lse=True, **names
        )
    else:
        got, lse, *_ = aten._scaled_dot_product_flash_attention.quantized(
            *inputs, *descales, 0.0, is_causal
        )
        want, want_lse = flash_attn_func(*tokens, causal=is_causal, return_lse=True, **names)
        want = want.transpose(1, 2)
        assert got.stride() == inputs[0].stride()
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, want)
    assert torch.equal(lse, want_lse)
    exact = [t.double() * x[..., None, None] for t, x in zip(inputs, descales, strict=True)]
    oracle = attention_reference(*heads_first(*exact), causal=is_causal)
    error = (got.unflatten(0, (2, 24)) if packed else got.transpose(1, 2)).double() - oracle
    assert error.abs().max() < 0.1 * oracle.abs().max()


@pytest.mark.eager
@pytest.mark.parametrize(
    ("position", "wrong", "message"),
    [
        (0, torch.ones(2, 4, dtype=torch.float64), "q_descale must be torch.float32"),
        (1, torch.ones(4), r"k_descale must have one element or shape \[2, 4\], got \[4\]"),
    ],
)
def test_wrong_descales_raise(device, overrides, position, wrong, message):
    if not detect(device).supports_fp8:
        pytest.skip("no FP8 on this GPU")
    inputs, descales = quantized(Maker(device, torch.float32), (2, 4, 24, 16))
    descales[position] = wrong.to(device)
    operator = aten._scaled_dot_product_flash_attention.quantized
    with pytest.raises((TypeError, ValueError), match=message):
        operator(*inputs, *descales)
    with pytest.raises(NotImplementedError, match=r"no q_descale for inputs of torch\.float16"):
        operator(*(t.half() for t in inputs), torch.ones(1, device=device), None, None)


@pytest.mark.eager
@pytest.mark.parametrize("name", ["seqused_k", "alibi_slopes"])
@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_gradient_without_what_the_backward_is_told_raises(device, overrides, name, wanted):
    ends = offsets((4,), device), offsets((4,), device), 4, 4
    option = {
        "seqused_k": torch.ones(1, dtype=torch.int32, device=device),
        "alibi_slopes": torch.ones(2, device=device),
    }[name]
    inputs = [torch.zeros(4, 2, 8, device=device) for _ in "qkv"]
    inputs[wanted].requires_grad_()

    def run() -> Tensor:
        return aten._flash_attention_forward(*inputs, *ends, 0.0, False, False, **{name: option})[0]

    with pytest.raises(NotImplementedError, match=f"no gradient with {name}"):
        run()
    with torch.no_grad():
        assert run().shape == (4, 2, 8)
