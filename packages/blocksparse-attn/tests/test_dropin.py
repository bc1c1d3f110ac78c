"""The names that engines import."""

from __future__ import annotations

import gc

import pytest
import torch
from blocksparse_attn import (
    BlockSparseLayout,
    LocalStridedBlockSparseAttn,
    blocksparse_attn_varlen_func,
    blocksparse_flash_attn_varlen_fwd,
    dropin,
    get_sparse_attn_mask,
)
from blocksparse_attn._linked.host.forms import interpreted

from ._linked.budget import Maker, offsets

pytestmark = pytest.mark.eager


def tensors(device, tokens_q, tokens_k, heads=4, heads_k=2):
    m = Maker(device, torch.float32)
    return (
        m.randn(tokens_q, heads, 16),
        m.randn(tokens_k, heads_k, 16),
        m.randn(tokens_k, heads_k, 16),
    )


def layout(device, homo_head=False):
    return BlockSparseLayout.local_strided(4, 64, 16, 2, 3, homo_head, device=device)


@pytest.mark.parametrize("homo_head", [False, True])
@pytest.mark.parametrize("lengths_q", [(40, 20), (1, 1), (7, 20)], ids=str)
def test_function_is_the_modern_one(lengths_q, homo_head, device):
    q, k, v = tensors(device, sum(lengths_q), 60)
    cu_q, cu_k = offsets(lengths_q, device), offsets([40, 20], device)
    of_heads = layout(device, homo_head)
    # as engines expand one head's
    crow, col = (x[:1].expand(4, -1) if homo_head else x for x in (of_heads.crow, of_heads.col))
    got = blocksparse_flash_attn_varlen_fwd(
        q, k, v, cu_k, cu_q, 0.3, (crow, col), block_size=16, max_seqlen=40
    )
    want = blocksparse_attn_varlen_func(q, k, v, cu_q, cu_k, 40, 40, of_heads, softmax_scale=0.3)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    if lengths_q in ((40, 20), (1, 1)):
        assumed = blocksparse_flash_attn_varlen_fwd(
            q, k, v, cu_k.long(), None, 0.3, [crow.long(), col.long()], block_size=16
        )
        torch.testing.assert_close(assumed, want, rtol=1e-5, atol=1e-6)


def test_query_blocks_of_another_size(device):
    q, k, v = tensors(device, 60, 60)
    cu = offsets([40, 20], device)
    wide = BlockSparseLayout.local_strided(4, 64, (32, 16), 2, 3, device=device)
    got = blocksparse_flash_attn_varlen_fwd(
        q, k, v, cu, cu, None, (wide.crow, wide.col), block_size=16, q_block_size=32
    )
    torch.testing.assert_close(got, blocksparse_attn_varlen_func(q, k, v, cu, cu, 40, 40, wide))


def test_plans_are_kept_while_the_tensors_live(device):
    crow, col = layout(device).crow, layout(device).col
    first = dropin._layout_of(crow, col, (16, 16))
    assert dropin._layout_of(crow, col, (16, 16)) is first
    assert dropin._layout_of(crow, col, (32, 16)) is not first
    col[0, 0] = 1  # written to: another layout
    assert dropin._layout_of(crow, col, (16, 16)) is not first
    known = len(dropin._known)
    del crow, col
    gc.collect()
    assert len(dropin._known) < known


def test_tensors_that_are_written_to_keep_one_layout(device):
    crow, col = layout(device).crow, layout(device).col
    dropin._layout_of(crow, col, (16, 16))
    known = len(dropin._known)
    for _ in range(3):
        crow.add_(0)
        dropin._layout_of(crow, col, (16, 16))
    assert len(dropin._known) == known


@pytest.mark.eager
def test_tensors_of_inference_mode_and_traces(device):
    q, k, v = tensors(device, 60, 60)
    cu = offsets([40, 20], device)
    kept = layout(device)
    want = blocksparse_attn_varlen_func(q, k, v, cu, cu, 64, 64, kept, softmax_scale=1.0)

    def call(sparse):
        return blocksparse_flash_attn_varlen_fwd(q, k, v, cu, cu, 1.0, sparse, block_size=16)

    with torch.inference_mode():
        sparse = kept.crow, kept.col
        assert torch.equal(call(sparse), want)
        sparse[1][0, 0] = 1  # seen, although such tensors count no versions
        assert not torch.equal(call(sparse), want)
    sparse = kept.crow, kept.col
    if not interpreted():  # which is slow
        traced = torch.compile(call, fullgraph=True, backend="aot_eager")
        assert torch.equal(traced(sparse), want)


def test_queries_that_cannot_be_told(device):
    q, k, v = tensors(device, 5, 60)
    cu = offsets([40, 20], device)
    sparse = layout(device).crow, layout(device).col
    message = "cu_seqlens_q must be given unless there are as many queries as sequences, 2, or as"
    with pytest.raises(ValueError, match=message):
        blocksparse_flash_attn_varlen_fwd(q, k, v, cu, None, 1.0, sparse, block_size=16)
    with pytest.raises(TypeError, match=r"sparse_layout must be \(crow, col\), got Tensor"):
        blocksparse_flash_attn_varlen_fwd(q, k, v, cu, cu, 1.0, sparse[0], block_size=16)
    with pytest.raises(TypeError, match=r"q must be a torch.Tensor, got NoneType"):
        blocksparse_flash_attn_varlen_fwd(None, k, v, cu, cu, 1.0, sparse, block_size=16)
    with pytest.raises(ValueError, match="layout must cover the keys, 65, with its rows, got 4"):
        blocksparse_flash_attn_varlen_fwd(
            q, k, v, cu, cu, 1.0, sparse, block_size=16, max_seqlen=65
        )
    module = LocalStridedBlockSparseAttn(4, 64, 2, 3, 16, device=device)
    with pytest.raises(ValueError, match=message):
        module(q, k, v, cu)


@pytest.mark.parametrize("homo_head", [False, True])
def test_module(homo_head, device):
    module = LocalStridedBlockSparseAttn(
        4, 64, 2, 3, 16, device=device, dtype=torch.float32, homo_head=homo_head
    )
    assert module.layout == layout(device, homo_head)
    assert module.head_sliding_step == (0 if homo_head else 1)
    assert [x.shape[0] for x in module.sparse_layout] == [4, 4]
    q, k, v = tensors(device, 60, 60)
    cu = offsets([40, 20], device)
    want = blocksparse_attn_varlen_func(
        q, k, v, cu, cu, 64, 64, layout(device, homo_head), softmax_scale=0.5
    )
    assert torch.equal(module(q, k, v, cu, sm_scale=0.5), want)
    assert torch.equal(module(q, k, v, cu, cu, 0.5), want)
    decode = module(q[:2], k, v, cu)
    assert decode.shape == (2, 4, 16)


def test_module_follows_its_inputs(device):
    module = LocalStridedBlockSparseAttn(4, 64, 2, 3, 16, device="meta")
    module.layout = layout("cpu")
    q, k, v = tensors(device, 60, 60)
    cu = offsets([40, 20], device)
    assert module(q, k, v, cu).device == q.device
    assert module.layout.device.type == device.type


def test_module_of_a_rank(device):
    whole = LocalStridedBlockSparseAttn(4, 64, 2, 3, 16, device=device)
    part = LocalStridedBlockSparseAttn(4, 64, 2, 3, 16, device=device, active_head_range=(2, 4))
    q, k, v = tensors(device, 60, 60, 4, 4)
    cu = offsets([40, 20], device)
    got = part(q[:, 2:], k[:, 2:], v[:, 2:], cu)
    torch.testing.assert_close(got, whole(q, k, v, cu)[:, 2:], rtol=1e-5, atol=1e-6)


def brute(heads, q_len, max_seqlen, side, local, stride, homo):
    blocks = -(-max_seqlen // side)
    step = 0 if homo else max(1, stride // heads)
    mask = torch.zeros(heads, blocks, blocks)
    for h in range(heads):
        for q in range(blocks):
            for k in range(q + 1):
                mask[h, q, k] = q - k < local or (k + h * step + 1) % stride == 0
    return mask


@pytest.mark.parametrize("kind", ["binary", "bias"])
@pytest.mark.parametrize("homo_head", [False, True])
@pytest.mark.parametrize("q_len", [100, 30, 16])
def test_masks(q_len, homo_head, kind, device):
    (crow, col), block_mask, dense = get_sparse_attn_mask(
        3, q_len, 100, torch.float16, device, 16, 2, 3, homo_head, True, kind
    )
    want = brute(3, q_len, 100, 16, 2, 3, homo_head)
    rows = -(-q_len // 16)
    assert block_mask.dtype == torch.float16
    assert torch.equal(block_mask.float().cpu(), want[0] if homo_head else want)
    assert (crow.dtype, col.dtype) == (torch.int64, torch.int64)
    assert crow.shape == (3, rows + 1)
    for h in range(3):
        kept = want[h, -rows:].nonzero()
        assert torch.equal(col[h, : len(kept)].cpu(), kept[:, 1])
        assert (col[h, len(kept) :] == -1).all()
        assert torch.equal(crow[h, 1:].cpu(), want[h, -rows:].sum(1).cumsum(0).long())
    tokens = want.repeat_interleave(16, 1).repeat_interleave(16, 2)[:, :100, :100].tril()
    tokens = tokens[:, -q_len:]
    if kind == "bias":
        tokens = torch.where(tokens.bool(), 0.0, float("-inf"))
    assert torch.equal(dense.float().cpu(), tokens)
    assert get_sparse_attn_mask(3, q_len, 100, torch.float16, device, 16, 2, 3)[2] is None


def test_wrong_mask_type():
    with pytest.raises(ValueError, match="dense_mask_type must be 'binary' or 'bias', got 'x'"):
        get_sparse_attn_mask(1, 16, 16, torch.float32, "cpu", 16, dense_mask_type="x")


def test_offsets_lengths_and_flags_that_mean_nothing():
    """They were truncated, or taken as they are."""
    sparse = layout("cpu").crow, layout("cpu").col
    q, k, v = tensors("cpu", 5, 5)
    cu = offsets([3, 2], "cpu")

    def call(starts_k, starts_q):
        return blocksparse_flash_attn_varlen_fwd(
            q, k, v, starts_k, starts_q, 1.0, sparse, block_size=16
        )

    with pytest.raises(TypeError, match=r"cu_seqlens_q must be a torch.Tensor, got list"):
        call(cu, [0, 3, 5])
    for dtype in (torch.float32, torch.bool):
        with pytest.raises(TypeError, match=r"cu_seqlens_k must be torch.int32 or torch.int64"):
            call(cu.to(dtype), cu)
    assert torch.equal(call(cu.long(), cu.long()), call(cu, cu))
    for q_len, message in ((80, "q_len must be at most max_seqlen, 64"), (-5, "at least 0")):
        with pytest.raises(ValueError, match=f"{message}, got {q_len}"):
            get_sparse_attn_mask(4, q_len, 64, torch.float32, "cpu", 16)
    with pytest.raises(TypeError, match="homo_head must be a bool, got str"):
        LocalStridedBlockSparseAttn(4, 64, 1, 3, 16, device="cpu", homo_head="no")
