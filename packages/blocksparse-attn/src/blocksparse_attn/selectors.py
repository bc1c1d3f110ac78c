"""Selectors: functions that choose the blocks of a call from its queries and keys, as a layout.

They run on the device, also in CUDA graphs; the host does not wait. They have no gradient, as they
choose integers. Each row of blocks has one choice, made from all queries of the row.
"""

from __future__ import annotations

from typing import Any

import torch
from attn_common import cdiv
from torch import Tensor

from ._layout.checks import check_block_size, is_top_left
from ._linked.host.arguments import check_count, check_flag, check_scale, check_tensor
from .layout import BlockSparseLayout


@torch.no_grad()
def topk_blocks(
    q: Tensor,
    k: Tensor,
    block_size: int | tuple[int, int],
    top_k: int,
    *,
    local_blocks: int = 1,
    sink_blocks: int = 0,
    causal: bool = True,
    align: str = "bottom-right",
) -> BlockSparseLayout:
    """Keep the ``top_k`` blocks whose mean key has the highest score with a row's mean query.

    This is the gate of MoBA (Lu et al. 2025), for rows of blocks instead of single queries. The
    heads of a group choose together, by the sum of their scores, as in the selection branch of NSA
    (Yuan et al. 2025). The blocks around the diagonal and the first blocks are chosen before all
    other blocks and count towards ``top_k``. ``q`` and ``k`` may come from a separate selector:
    their heads and head dimension need not be those of the attention.

    With ``causal``, the choice of a row depends on all its queries, but on no key after its first
    query.

    Args:
        q: queries, ``[batch, seqlen_q, heads_q, head_dim]``.
        k: keys, ``[batch, seqlen_k, heads_k, head_dim]``; ``heads_q`` is a multiple of ``heads_k``.
        block_size: tokens per block: an int, or ``(q, k)``.
        top_k: number of blocks that a row keeps, at least 1; fewer if the row sees fewer.
        local_blocks: number of blocks back from the diagonal that every row keeps, including those
            that the diagonal crosses; with ``causal`` at least 1. Default: 1.
        sink_blocks: number of first blocks that every row keeps. Default: 0.
        causal: leave out blocks after the diagonal. Default: True.
        align: position of the queries, as in the call. Default: "bottom-right".

    Returns:
        a layout of ``heads_k`` heads; with several sequences, each has its own.

    Raises:
        TypeError: if an argument has a wrong type or dtype.
        ValueError: if a shape or a range is wrong.
    """
    sides, offset, rows = _geometry(q, k, block_size, align)
    check_flag("causal", causal)
    check_count("top_k", top_k, 1)
    check_count("local_blocks", local_blocks, 1 if causal else 0)
    check_count("sink_blocks", sink_blocks, 0)
    queries = _means(q, offset, rows, sides[0])
    # summed over the heads of a group
    queries = queries.view(*queries.shape[:2], k.shape[2], -1, q.shape[3]).sum(3)
    cols = cdiv(k.shape[1], sides[1])
    keys = _means(k, 0, cols, sides[1])
    scores = torch.einsum("brhd,bchd->bhrc", queries, keys)
    row = torch.arange(rows, device=q.device)[:, None]
    col = torch.arange(cols, device=q.device)
    first, last = _diagonal(row, sides)
    # topk ranks NaN above all numbers
    scores = scores.nan_to_num(nan=-torch.inf)
    near = (col > first - local_blocks) & (col <= last)
    scores = scores.masked_fill(near | (col < sink_blocks), torch.inf)
    if causal:
        scores = scores.masked_fill(col > last, -torch.inf)
    best = scores.topk(min(top_k, cols), dim=-1)
    chosen = best.indices.masked_fill(best.values == -torch.inf, -1)
    return _layout_of(chosen, sides, cols)


@torch.no_grad()
def vertical_slash_blocks(
    q: Tensor,
    k: Tensor,
    block_size: int | tuple[int, int],
    num_vertical: int,
    num_slash: int,
    *,
    last_queries: int = 64,
    sink_blocks: int = 1,
    local_blocks: int = 1,
    softmax_scale: float | None = None,
) -> BlockSparseLayout:
    """Keep the columns and diagonals of tokens that the last queries attend to most.

    This is the estimate of MInference (Jiang et al. 2024): causal attention of the last queries
    over all keys, summed per key, and per distance between query and key. Every row then keeps the
    blocks that hold the best keys and distances. Use it for the prefill of long prompts, with
    ``causal=True``.

    Args:
        q: queries, ``[batch, seqlen_q, heads_q, head_dim]``.
        k: keys, ``[batch, seqlen_k, heads_k, head_dim]``; query i stands at ``i + seqlen_k -
            seqlen_q``.
        block_size: tokens per block: an int, or ``(q, k)``.
        num_vertical: number of keys, at least 0.
        num_slash: number of distances, at least 0.
        last_queries: number of queries for the estimate, at least 1; so many rows of scores are
            held in memory. Default: 64.
        sink_blocks: number of first blocks that every row also keeps. Default: 1.
        local_blocks: number of blocks back from the diagonal that every row also keeps, at least 1.
            Default: 1.
        softmax_scale: factor of the scores. Default: ``head_dim ** -0.5``.

    Returns:
        a layout of ``heads_q`` heads; with several sequences, each has its own.

    Raises:
        TypeError: if an argument has a wrong type or dtype.
        ValueError: if a shape or a range is wrong.
    """
    sides, _, rows = _geometry(q, k, block_size, "bottom-right")
    for name, value, least in (
        ("num_vertical", num_vertical, 0),
        ("num_slash", num_slash, 0),
        ("last_queries", last_queries, 1),
        ("sink_blocks", sink_blocks, 0),
        ("local_blocks", local_blocks, 1),
    ):
        check_count(name, value, least)
    scale = (
        q.shape[3] ** -0.5 if softmax_scale is None else check_scale("softmax_scale", softmax_scale)
    )
    tokens, cols = k.shape[1], cdiv(k.shape[1], sides[1])
    vertical, slash = _sums(q[:, -last_queries:], k, scale)
    keys = vertical.topk(min(num_vertical, tokens), dim=-1).indices
    far = slash.topk(min(num_slash, tokens), dim=-1).indices

    row = torch.arange(rows, device=q.device)[:, None]
    first, last = _diagonal(row, sides)
    # a diagonal crosses at most so many blocks of a row
    width = cdiv(sides[0] - 1, sides[1]) + 1
    step = torch.arange(width, device=q.device)
    begin = row[..., None] * sides[0] - far[:, :, None, :, None]
    crossed = torch.div(begin, sides[1], rounding_mode="floor") + step
    end = torch.div(begin + sides[0] - 1, sides[1], rounding_mode="floor")
    crossed = crossed.masked_fill((crossed < 0) | (crossed > end), -1).flatten(3)
    sinks = torch.arange(min(sink_blocks, cols), device=q.device)
    near = first - local_blocks + 1 + torch.arange(local_blocks - 1 + width, device=q.device)
    near = near.masked_fill((near < 0) | (near > last), -1)
    shape = (*far.shape[:2], rows, -1)
    parts = (keys // sides[1])[:, :, None], crossed, sinks, near
    chosen = torch.cat([part.expand(shape) for part in parts], -1)
    chosen = chosen.masked_fill((chosen > last) | (chosen >= cols), -1)
    return _layout_of(chosen, sides, cols)


def _sums(q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Sum the last queries' attention by key and by distance, each [batch, heads, seqlen_k]."""
    (batch, count, heads, _), tokens = q.shape, k.shape[1]
    q = q.float().reshape(batch, count, k.shape[2], -1, q.shape[3])
    scores = torch.einsum("bihgd,bjhd->bhgij", q, k.float()).flatten(1, 2) * scale
    place = torch.arange(count, device=q.device)[:, None] + (tokens - count)
    hidden = torch.arange(tokens, device=q.device) > place
    p = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    # shift the rows against each other, so that each distance is a column: no atomics are needed
    wide = torch.nn.functional.pad(p, (count, 0)).contiguous()
    apart = tokens + count + 1
    shifted = wide.flatten(-2).as_strided(
        (batch, heads, count, tokens + 1),
        (heads * count * (apart - 1), count * (apart - 1), apart, 1),
    )
    return p.sum(2), shifted.sum(2)[..., 1:].flip(-1)


def _geometry(q: Any, k: Any, block_size: Any, align: Any) -> tuple[tuple[int, int], int, int]:
    """Check q and k; return the block size, the first query's position, and the number of rows."""
    for name, x in (("q", q), ("k", k)):
        check_tensor(name, x)
        if x.ndim != 4 or 0 in x.shape:
            raise ValueError(
                f"{name} must be [batch, seqlen, heads, head_dim] with no size of 0, "
                f"got {list(x.shape)}"
            )
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(
            f"k must have the batch and head_dim of q, {q.shape[0]} and {q.shape[3]}, "
            f"got {k.shape[0]} and {k.shape[3]}"
        )
    if q.shape[2] % k.shape[2] != 0:
        raise ValueError(
            f"heads_q must be a multiple of heads_k, got {q.shape[2]} and {k.shape[2]}"
        )
    sides, top_left = check_block_size(block_size), is_top_left(align)
    if top_left:
        return sides, 0, cdiv(q.shape[1], sides[0])
    if q.shape[1] > k.shape[1]:
        raise ValueError(
            f"q must have no more tokens than k, {k.shape[1]}, got {q.shape[1]}; "
            "align='top-left' takes any number"
        )
    return sides, k.shape[1] - q.shape[1], cdiv(k.shape[1], sides[0])


def _means(x: Tensor, offset: int, blocks: int, side: int) -> Tensor:
    """Return the mean of each block of tokens, fp32 ``[batch, blocks, heads, head_dim]``."""
    behind = blocks * side - offset - x.shape[1]
    padded = torch.nn.functional.pad(x.float(), (0, 0, 0, 0, offset, behind))
    place = torch.arange(blocks, device=x.device) * side
    count = (place + side).clamp(max=offset + x.shape[1]) - place.clamp(min=offset)
    sums = padded.reshape(len(x), blocks, side, *x.shape[2:]).sum(2)
    return sums / count.clamp(min=1)[:, None, None]


def _diagonal(row: Tensor, sides: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return the first and the last block that the diagonal crosses in a row."""
    return row * sides[0] // sides[1], ((row + 1) * sides[0] - 1) // sides[1]


def _layout_of(chosen: Tensor, sides: tuple[int, int], cols: int) -> BlockSparseLayout:
    """Make a layout of the columns of each row; for one sequence it has no batch."""
    if chosen.shape[0] == 1:
        chosen = chosen[0]
    return BlockSparseLayout.from_indices(chosen, sides, num_cols=cols)
