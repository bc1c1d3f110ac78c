"""Kernels of the installed wheels against torch and against each other, interpreted on the CPU."""

import sys

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

flash_attn_triton = pytest.importorskip("flash_attn_triton")
blocksparse_attn = pytest.importorskip("blocksparse_attn")


@pytest.fixture(scope="module", autouse=True)
def kernels_are_interpreted():
    yield
    # imported by the first call of a kernel, and by nothing else
    assert "triton" in sys.modules
    assert sys.modules["triton"].knobs.runtime.interpret


def make(*shape, seed, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(batch, seqlen_q, seqlen_k, heads_q, heads_k, head_dim):
    return (
        make(batch, seqlen_q, heads_q, head_dim, seed=1),
        make(batch, seqlen_k, heads_k, head_dim, seed=2),
        make(batch, seqlen_k, heads_k, head_dim, seed=3),
    )


def sdpa(q, k, v, causal):
    """Torch's attention in our layout, its mask aligned to the bottom right."""
    rows, columns = q.shape[1], k.shape[1]
    mask = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows) if causal else None
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2)


def assert_as_good_as(eager, got, want):
    """Hold an error to twice that of eager code in the same dtype, plus two units of rounding."""
    finite = torch.isfinite(want)
    assert torch.equal(got.double()[~finite], want[~finite])
    budget = 2 * (eager.double() - want)[finite].abs().max()
    budget += 2 * torch.finfo(got.dtype).eps * want[finite].abs().max()
    assert (got.double() - want)[finite].abs().max() <= budget


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", [(2, 33, 33, 4, 4, 32), (1, 17, 40, 4, 2, 24)], ids=str)
def test_flash_attn_agrees_with_torch(shape, causal):
    inputs = qkv(*shape)
    grad = make(*inputs[0].shape, seed=4)

    def run(function, dtype):
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in inputs]
        out = function(*leaves, causal=causal)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype))]

    want = run(sdpa, torch.float64)
    eager = run(sdpa, torch.float32)
    got = run(flash_attn_triton.flash_attn_func, torch.float32)
    for results in zip(eager, got, want, strict=True):
        assert_as_good_as(*results)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_the_reference_agrees_with_torch_in_float64(causal):
    inputs = [t.double() for t in qkv(2, 19, 31, 4, 2, 16)]
    got = flash_attn_triton.attention_reference(*inputs, causal=causal)
    want = sdpa(*inputs, causal)
    rounding = torch.finfo(torch.float64).eps * inputs[1].shape[1]
    torch.testing.assert_close(got, want, rtol=0, atol=rounding * want.abs().max().item())


@pytest.mark.parametrize("split", [0, 1, 20, 40])
def test_two_halves_merge_to_the_whole(split):
    q, k, v = qkv(2, 21, 40, 4, 2, 32)
    attend = flash_attn_triton.flash_attn_func
    halves = [
        attend(q, k[:, s], v[:, s], return_lse=True) for s in (slice(split), slice(split, 40))
    ]
    merged = flash_attn_triton.merge_attn_states(*halves[0], *halves[1])
    whole = attend(q, k, v, return_lse=True)
    reference = flash_attn_triton.attention_reference
    exact = reference(*(t.double() for t in (q, k, v)), return_lse=True)
    for eager, got, want in zip(whole, merged, exact, strict=True):
        assert_as_good_as(eager, got, want)


def test_packed_sequences_agree_with_fixed_ones():
    q, k, v = qkv(3, 18, 18, 4, 2, 32)
    bounds = torch.arange(0, 4 * 18, 18, dtype=torch.int32)
    packed = [t.flatten(0, 1) for t in (q, k, v)]
    got = flash_attn_triton.flash_attn_varlen_func(*packed, bounds, bounds, 18, 18, causal=True)
    want = sdpa(*(t.double() for t in (q, k, v)), True).flatten(0, 1)
    assert_as_good_as(sdpa(q, k, v, True).flatten(0, 1), got, want)


def test_a_layout_of_all_blocks_is_dense_attention():
    q, k, v = qkv(2, 40, 70, 4, 2, 24)
    layout = blocksparse_attn.BlockSparseLayout.from_dense(
        torch.ones(3, 5, dtype=torch.bool), (32, 16)
    )
    for causal in (False, True):
        got = blocksparse_attn.blocksparse_attn_func(
            q, k, v, layout, causal=causal, return_lse=True
        )
        like = flash_attn_triton.flash_attn_func(q, k, v, causal=causal, return_lse=True)
        exact = flash_attn_triton.attention_reference(
            *(t.double() for t in (q, k, v)), causal=causal, return_lse=True
        )
        for mine, sibling, want in zip(got, like, exact, strict=True):
            assert_as_good_as(sibling, mine, want)


def test_two_layouts_of_disjoint_blocks_merge_to_the_dense_whole():
    q, k, v = qkv(1, 48, 48, 4, 2, 16)
    some = torch.rand(4, 3, 3, generator=torch.Generator().manual_seed(0)) < 0.5
    parts = [
        blocksparse_attn.blocksparse_attn_func(
            q, k, v, blocksparse_attn.BlockSparseLayout.from_dense(kept, 16), return_lse=True
        )
        for kept in (some, ~some)
    ]
    merged = flash_attn_triton.merge_attn_states(*parts[0], *parts[1])
    whole = flash_attn_triton.flash_attn_func(q, k, v, causal=True, return_lse=True)
    exact = flash_attn_triton.attention_reference(
        *(t.double() for t in (q, k, v)), causal=True, return_lse=True
    )
    for mine, sibling, want in zip(merged, whole, exact, strict=True):
        assert_as_good_as(sibling, mine, want)


def test_gradients_over_all_blocks_are_dense_gradients():
    inputs = qkv(1, 33, 33, 4, 2, 16)
    layout = blocksparse_attn.BlockSparseLayout.from_dense(torch.ones(3, 3, dtype=torch.bool), 16)
    dout = make(1, 33, 4, 16, seed=4)

    def grads(call, dtype):
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in inputs]
        return torch.autograd.grad(call(*leaves), leaves, dout.to(dtype))

    got = grads(lambda *x: blocksparse_attn.blocksparse_attn_func(*x, layout), torch.float32)
    like = grads(lambda *x: flash_attn_triton.flash_attn_func(*x, causal=True), torch.float32)
    exact = grads(lambda *x: flash_attn_triton.attention_reference(*x, causal=True), torch.float64)
    for mine, sibling, want in zip(got, like, exact, strict=True):
        assert_as_good_as(sibling, mine, want)
