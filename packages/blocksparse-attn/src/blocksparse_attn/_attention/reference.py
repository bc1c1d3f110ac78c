"""Reference of block-sparse attention: eager PyTorch, any float dtype, differentiable by autograd.

The kernels' tests compare with it. It holds the whole score matrix, ``O(seqlen_q * seqlen_k)``
memory, and shares no code with the kernels. It computes float64 inputs in float64 and all other
dtypes in float32, and rounds only the output to the input's dtype.
"""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .._linked.host.arguments import as_int32, as_length, check_cu_seqlens, check_readable
from .._linked.host.results import returns_lse
from ..layout import BlockSparseLayout
from .call import Bounds, Options, Tensors
from .checks import (
    check_block_table,
    check_cover,
    check_is_layout,
    check_layout,
    check_options,
    check_reference,
    check_values,
)


@returns_lse
def blocksparse_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockSparseLayout,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    num_splits: int = 0,
    return_lse: bool = False,
    align: str = "bottom-right",
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute what :func:`blocksparse_attn_func` computes, in eager PyTorch.

    The arguments are those of :func:`blocksparse_attn_func`, but ``q``, ``k`` and ``v`` may have
    any float dtype, including float64; the log-sum-exp is float64 for float64 inputs.
    """
    check_reference(q, k, v, 4)
    check_is_layout(layout)
    causal = layout._causal_of(causal)
    options = check_options(q, softmax_scale, causal, num_splits, return_lse, align)
    batch, seqlen_q, heads_q, _ = q.shape
    check_layout(layout, q, k, batch)
    rows = layout.num_rows, layout.block_size[0]
    check_cover(*rows, k, Bounds(seqlen_q, k.shape[1]), options.top_left)
    packed = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    places = sequences(starts_of(q), starts_of(k))
    out, lse = packed_attention(*packed, places, None, layout, options)
    out = out.view(batch, seqlen_q, heads_q, v.shape[-1]).to(q.dtype)
    lse = lse.view(heads_q, batch, seqlen_q).transpose(0, 1).contiguous()
    return (out, lse) if return_lse else out


@returns_lse
def blocksparse_varlen_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    layout: BlockSparseLayout,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    num_splits: int = 0,
    return_lse: bool = False,
    block_table: Tensor | None = None,
    align: str = "bottom-right",
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute what :func:`blocksparse_attn_varlen_func` computes, in a loop over the sequences.

    The arguments are those of :func:`blocksparse_attn_varlen_func`; dtypes and results are as in
    :func:`blocksparse_attention_reference`. The host reads the offsets and the page numbers.
    """
    check_reference(q, k, v, 3, block_table is not None)
    check_is_layout(layout)
    causal = layout._causal_of(causal)
    options = check_options(q, softmax_scale, causal, num_splits, return_lse, align)
    cu_seqlens_q, cu_seqlens_k = as_int32(cu_seqlens_q), as_int32(cu_seqlens_k)
    batch = check_cu_seqlens(cu_seqlens_q, cu_seqlens_k, q)
    check_readable(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    if block_table is not None:
        check_block_table(q.detach(), k.detach(), v.detach(), batch, block_table)
        check_readable(block_table=block_table)
    check_layout(layout, q, k, batch)
    bounds = Bounds(
        as_length("max_seqlen_q", max_seqlen_q), as_length("max_seqlen_k", max_seqlen_k)
    )
    rows = layout.num_rows, layout.block_size[0]
    check_cover(*rows, k, bounds, options.top_left, block_table)
    check_values(Tensors(q, k, v, cu_seqlens_q, cu_seqlens_k, block_table), bounds)
    places = sequences(cu_seqlens_q.tolist(), cu_seqlens_k.tolist())
    out, lse = packed_attention(q, k, v, places, block_table, layout, options)
    out = out.to(q.dtype)
    return (out, lse) if return_lse else out


def visible_keys(
    dense: Tensor,
    block_size: tuple[int, int],
    seqlen_q: int,
    seqlen_k: int,
    causal: bool,
    top_left: bool = False,
    rule: Tensor | None = None,
) -> Tensor:
    """Return which key each query sees, bool ``[heads, seqlen_q, seqlen_k]``.

    Args:
        dense: mask of blocks, ``[heads, rows, cols]``.
        block_size: tokens per block of queries and per block of keys.
        seqlen_q: number of queries; query i stands at the position ``i + seqlen_k - seqlen_q``.
        seqlen_k: number of keys.
        causal: hide keys after a query's position.
        top_left: query i stands at the position i instead.
        rule: first and last key that each position sees, ``[positions, 2]``. Default: None (all).
    """
    position = torch.arange(seqlen_q, device=dense.device)
    if not top_left:
        position = position + (seqlen_k - seqlen_q)
    key = torch.arange(seqlen_k, device=dense.device)
    return visible_at(position, key, dense, block_size, causal, rule)


def visible_at(
    position: Tensor,
    key: Tensor,
    dense: Tensor,
    block_size: tuple[int, int],
    causal: bool,
    rule: Tensor | None = None,
) -> Tensor:
    """Return which keys the queries at given positions see, ``[heads, positions, keys]``."""
    heads, rows, cols = dense.shape
    row = torch.div(position, block_size[0], rounding_mode="floor")
    col = key // block_size[1]
    known = ((row >= 0) & (row < rows))[:, None] & (col < cols)
    if not rows or not cols:
        return known.expand(heads, *known.shape)
    kept = dense[:, row.clamp(0, rows - 1)][:, :, col.clamp(max=cols - 1)] & known
    if rule is not None:
        low, high = rule[position.clamp(0, len(rule) - 1)].unbind(-1)
        kept &= (key >= low[:, None]) & (key <= high[:, None])
    return kept & (key <= position[:, None]) if causal else kept


def sequence_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dense: Tensor,
    block_size: tuple[int, int],
    rule: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """Attend within one sequence; both results are in the dtype of the computation."""
    # autocast would round the products below to 16 bits
    with torch.autocast(q.device.type, enabled=False):
        heads_q, group = q.shape[1], q.shape[1] // k.shape[1]
        form = block_size, q.shape[0], k.shape[0], options.causal, options.top_left
        visible = visible_keys(dense, *form, rule).expand(heads_q, -1, -1)
        q, k, v = (x.to(compute_dtype(x)) for x in (q, k, v))
        q, k, v = hide_unseen(q, k, v, visible)
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("ihd,jhd->hij", q, k) * options.softmax_scale
        p, lse = softmax(scores.masked_fill(~visible, -math.inf))
        return torch.einsum("hij,jhe->ihe", p, v), lse


def softmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the softmax and log-sum-exp of rows of scores; 0 and -inf if all scores are -inf."""
    # the pivot must be finite even for a fully masked row; its value does not change the result
    top = torch.nn.functional.pad(scores.detach(), (0, int(scores.shape[-1] == 0)), value=-math.inf)
    top = top.amax(-1, keepdim=True)
    top = top.masked_fill(top == -math.inf, 0.0)
    p = torch.exp(scores - top)
    total = p.sum(-1, keepdim=True)
    empty = total == 0
    safe = total.masked_fill(empty, 1.0)
    return p / safe, (safe.log() + top).masked_fill(empty, -math.inf)[..., 0]


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    places: list[tuple[slice, slice]],
    block_table: Tensor | None,
    layout: BlockSparseLayout,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """Attend within packed sequences, one by one; padding gets output 0 and LSE -inf."""
    dtype, dense = compute_dtype(q), layout._for_heads(q.shape[1]).to_dense()
    out = q.new_zeros((*q.shape[:2], v.shape[-1]), dtype=dtype)
    lse = q.new_full((q.shape[1], q.shape[0]), -math.inf, dtype=dtype)
    for b, (rows, keys) in enumerate(places):
        one_k, one_v = (of_sequence(x, keys, b, block_table) for x in (k, v))
        seen = own_blocks(dense, b), layout.block_size, own_rule(layout._rule, b)
        out[rows], lse[:, rows] = sequence_attention(q[rows], one_k, one_v, *seen, options)
    return out, lse


def own_blocks(dense: Tensor, b: int) -> Tensor:
    """Return the mask of blocks of one sequence."""
    return dense[b] if dense.ndim == 4 else dense


def own_rule(rule: Tensor | None, b: int) -> Tensor | None:
    """Return the token rule of one sequence, ``[positions, 2]``."""
    return None if rule is None else rule[b if len(rule) > 1 else 0]


def starts_of(x: Tensor) -> list[int]:
    """Return the offsets of sequences of one length."""
    return [b * x.shape[1] for b in range(x.shape[0] + 1)]


def sequences(starts_q: Sequence[int], starts_k: Sequence[int]) -> list[tuple[slice, slice]]:
    """Return the slices of queries and of keys of each sequence."""
    pairs = zip(itertools.pairwise(starts_q), itertools.pairwise(starts_k), strict=True)
    return [(slice(*rows), slice(*keys)) for rows, keys in pairs]


def of_sequence(x: Tensor, keys: slice, b: int, block_table: Tensor | None) -> Tensor:
    """Return the keys or values of one sequence, ``[seqlen_k, heads_k, head_dim]``."""
    if block_table is None:
        return x[keys]
    key = torch.arange(keys.stop - keys.start, device=x.device)
    return x[block_table[b, key // x.shape[1]].long(), key % x.shape[1]]


def hide_unseen(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Set fully masked queries and unseen keys to 0: they may hold NaN, and ``0 * NaN`` is NaN."""
    heads_q, heads_k = q.shape[1], k.shape[1]
    sees = visible.any(2).transpose(0, 1)[..., None]  # [seqlen_q, heads_q, 1]
    seen = visible.any(1).view(heads_k, heads_q // heads_k, -1).any(1).transpose(0, 1)[..., None]
    return q.masked_fill(~sees, 0.0), k.masked_fill(~seen, 0.0), v.masked_fill(~seen, 0.0)


def compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
