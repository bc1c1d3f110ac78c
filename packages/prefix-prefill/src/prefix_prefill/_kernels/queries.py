"""The rows of a tile of queries: which they are, where they stand, what they hold."""

import triton
import triton.language as tl

from .primitives import load_rows
from .structures import Positions, Rows, VectorLayout, Vectors


@triton.jit
def query_rows(place, q_start, head_k, SCHEDULE: tl.constexpr, TILE: tl.constexpr):
    """Return the ``Rows`` of a tile of queries."""
    GROUP: tl.constexpr = SCHEDULE.GROUP
    row = place.tile * SCHEDULE.BLOCK_M + tl.arange(0, SCHEDULE.BLOCK_M)  # [BLOCK_M]
    token = row // GROUP
    in_group = row % GROUP
    is_inside = row < place.seqlen_q * GROUP
    cols = tl.arange(0, TILE.BLOCK_D)  # [BLOCK_D]
    head = head_k * GROUP + in_group
    return Rows(token, q_start + token, head, is_inside, cols)


@triton.jit
def load_queries(rows, q, ROW_LAYOUT: tl.constexpr, TILE: tl.constexpr):
    """Load a tile of queries, ``[BLOCK_M, BLOCK_D]``."""
    LAYOUT: tl.constexpr = VectorLayout(TILE.HEAD_DIM, True, ROW_LAYOUT.ROW_BYTES, 0)
    q_rows = rows.token_64 * q.stride_token + rows.head * q.stride_head
    vectors = Vectors(q.ptr, None, None, None, None)
    return load_rows(vectors, q_rows, rows.is_inside, rows.cols, LAYOUT, TILE, True)


@triton.jit
def positions_of(rows, place, positions_ptr, seqlen_k, SCHEDULE: tl.constexpr):
    """Return the ``Positions`` of a tile's rows: given ones, or the last ones of the keys."""
    BLOCK_M: tl.constexpr = SCHEDULE.BLOCK_M
    GROUP: tl.constexpr = SCHEDULE.GROUP
    if positions_ptr is not None:
        position = tl.load(positions_ptr + rows.token_64, mask=rows.is_inside, other=0)
        first = tl.min(tl.where(rows.is_inside, position, 2147483647), 0)
        last = tl.max(tl.where(rows.is_inside, position, -2147483648), 0)
    else:
        diagonal = seqlen_k - place.seqlen_q
        position = rows.token + diagonal
        first = place.tile * BLOCK_M // GROUP + diagonal
        last_row = tl.minimum(place.tile * BLOCK_M + BLOCK_M, place.seqlen_q * GROUP) - 1
        last = last_row // GROUP + diagonal
    return Positions(position, first, last)


@triton.jit
def slopes_of(rows, sequence, positions_ptr, alibi_slopes_ptr, stride_alibi_b):
    """Return the ALiBi slope of each row, or None.

    They are given by head, by sequence and head, or, with positions, by token and head.
    """
    if alibi_slopes_ptr is not None:
        if positions_ptr is not None:
            of = rows.token_64
        else:
            of = sequence + rows.token * 0
        at = alibi_slopes_ptr + of * stride_alibi_b + rows.head
        slopes = tl.load(at, mask=rows.is_inside, other=0.0)
    else:
        slopes = None
    return slopes


@triton.jit
def tree_of(rows, tree_mask_ptr, scores, OPTIONS: tl.constexpr):
    """Return which new tokens each row sees, a bit for each, or None."""
    if tree_mask_ptr is not None:
        tree = tl.load(tree_mask_ptr + rows.token_64, mask=rows.is_inside, other=0)  # [BLOCK_M]
        if OPTIONS.HAS_LEFT:
            # bits of tokens ahead of a row's window
            ahead = tl.maximum(rows.token - scores.window_left, 0)
            within = tl.full([], -1, tl.int64) << tl.minimum(ahead, 63).to(tl.int64)
            tree = tl.where(ahead < 64, tree & within, 0)
    else:
        tree = None
    return tree


@triton.jit
def branches_of(tree):
    """Return which new tokens some row sees, or None."""
    if tree is not None:
        bit = tl.arange(0, 64).to(tl.int64)  # [64]
        # [BLOCK_M, 64]
        seen = (tree[:, None] >> bit[None, :]).to(tl.int32) & 1
        branches = tl.sum(tl.max(seen, 0).to(tl.int64) << bit, 0)
    else:
        branches = None
    return branches
