"""The definition, against torch where torch can say it, and the eager derivative against it."""

from __future__ import annotations

import math

import pytest
import torch
from blocksparse_attn import blocksparse_attention_reference, blocksparse_varlen_attention_reference
from blocksparse_attn._attention import ops
from blocksparse_attn._attention.call import Bounds, Options, Tensors
from blocksparse_attn._attention.eager import attention_backward
from blocksparse_attn._attention.reference import visible_keys
from torch.nn.functional import scaled_dot_product_attention

from .._numerics import PATTERNS, Packed, Shape, incoming, layout_of, make_case, make_packed, paged

pytestmark = pytest.mark.eager

CPU = "cpu"


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("pattern", ["all", "local", "random"])
@pytest.mark.parametrize("seqlens", [(50, 50), (20, 50), (70, 50)], ids=str)
def test_visible_keys_token_by_token(seqlens, pattern, causal):
    layout = layout_of(pattern, (16, 32), 50, 2, CPU)
    dense = layout.to_dense()
    got = visible_keys(dense, (16, 32), *seqlens, causal)
    for h in range(2):
        for i in range(seqlens[0]):
            position = i + seqlens[1] - seqlens[0]
            for j in range(seqlens[1]):
                want = position >= 0 and bool(dense[h, position // 16, j // 32])
                assert got[h, i, j] == (want and not (causal and j > position))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_agrees_with_torch(pattern, causal):
    case = make_case(Shape(2, 40, 50, 4, 2, 16), torch.float64, CPU, pattern, (16, 32))
    layout = case.options["layout"]
    out, lse = blocksparse_attention_reference(
        **case.inputs, layout=layout, causal=causal, return_lse=True
    )
    mask = visible_keys(layout.to_dense(), layout.block_size, 40, 50, causal)
    q, k, v = (x.transpose(1, 2) for x in case.inputs.values())
    want = scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2)
    # torch has NaN, or 0, where a row sees nothing
    empty = (~mask.any(-1)).transpose(0, 1)
    want = want.masked_fill(empty[..., None], 0.0)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    scores = torch.einsum("bhid,bhjd->bhij", q, k.repeat_interleave(2, 1)) * 16**-0.5
    exact = scores.masked_fill(~mask, -math.inf).logsumexp(-1)
    torch.testing.assert_close(lse, exact, rtol=1e-12, atol=1e-12)


def test_dense_causal_is_the_densest():
    case = make_case(Shape(1, 50, 50, 2, 2, 16), torch.float64, CPU, "all")
    got = blocksparse_attention_reference(**case.inputs, **case.options)
    x = (t.transpose(1, 2) for t in case.inputs.values())
    want = scaled_dot_product_attention(*x, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seqlens", [(20, 33), (33, 20), (5, 0), (0, 5)], ids=str)
def test_eager_derivative_is_autograds(seqlens):
    case = make_case(Shape(1, *seqlens, 4, 2, 8, 12), torch.float32, CPU, block=(16, 32))
    layout = case.options["layout"]
    leaves = [t.requires_grad_() for t in case.inputs.values()]
    out, lse = case.reference(*leaves, layout, return_lse=True)
    dout, dlse = incoming(out, lse)
    want = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    options = Options(8**-0.5, True, 1, False)
    x = Tensors(*(t.detach() for t in leaves))
    call = ops._call_of(x, layout, Bounds(*seqlens), options)
    got = attention_backward(x, call, dout, lse.detach(), dlse)
    for mine, exact in zip(got, want, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-4, atol=1e-5)


def test_pages_are_the_packed_keys():
    case = make_packed(Packed((9, 1), (21, 33), 2, 1, 8), torch.float64, CPU)
    other = paged(case, 5)
    got, want = (
        blocksparse_varlen_attention_reference(**c.inputs, **c.options) for c in (other, case)
    )
    assert torch.equal(got, want)


def test_autocast_does_not_round_the_products():
    case = make_case(Shape(1, 20, 20, 2, 1, 8), torch.float32, CPU)
    want = case.reference(**case.inputs, **case.options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = case.reference(**case.inputs, **case.options)
        mine = case(num_splits=1)[0]
    assert torch.equal(got, want)
    torch.testing.assert_close(mine, want, rtol=1e-4, atol=1e-5)


def test_wrong_references():
    case = make_case(Shape(1, 4, 4, 2, 1, 8), torch.float32, CPU)
    with pytest.raises(TypeError, match=r"q must be of a float dtype, got torch.int64"):
        case.reference(**{**case.inputs, "q": case.inputs["q"].long()}, **case.options)
    with pytest.raises(ValueError, match=r"q must be \[batch, seqlen_q, heads_q, head_dim\]"):
        case.reference(**{**case.inputs, "q": case.inputs["q"][0]}, **case.options)
