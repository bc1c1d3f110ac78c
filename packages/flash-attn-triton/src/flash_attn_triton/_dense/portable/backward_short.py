"""All gradients of short sequences in one launch: three would take the host longer than the GPU.

Some programs own a block of keys and walk the queries, as in :mod:`.backward_dkdv`; the rest own a
block of queries and walk the keys, as in :mod:`.backward_dq`. Both make the two numbers per row
that :mod:`.backward_rows` makes for longer sequences. Walks have few steps, and all are masked.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..._linked.launch.entries import entry
from ..._linked.portable.mask import Mask, Walk, key_range, query_range
from ..._linked.portable.primitives import INF, pointer_to
from .arguments import Options, ShortNumbers, ShortTensors, Tile
from .backward_dkdv import dkdv_walk
from .backward_dq import dq_walk
from .primitives import load_row, load_tile, row_numbers, store_rows
from .structures import Head, Keys, Queries, Scores


@triton.jit
def _masked(walk):
    """Return the walk with a mask for all tiles."""
    return Walk(walk.first, walk.last, walk.start, walk.start, walk.start)


@triton.jit
def _write_dkdv(place, x, numbers, scores, OPTIONS: tl.constexpr, TILE: tl.constexpr):
    """Write dk and dv of block ``place`` of keys, numbered over all sequences and heads."""
    heads_k = numbers.heads_q // OPTIONS.GROUP
    tokens_k = numbers.tokens_k
    tiles = tl.cdiv(tokens_k, TILE.BLOCK_N)
    first_key = place % tiles * TILE.BLOCK_N
    head_k = place // tiles % heads_k
    sequence = (place // tiles // heads_k).to(tl.int64)
    keys = first_key + tl.arange(0, TILE.BLOCK_N)  # [BLOCK_N]
    k_base = pointer_to(x.k_ptr, numbers.k, sequence, 0, head_k.to(tl.int64))
    v_base = pointer_to(x.v_ptr, numbers.v, sequence, 0, head_k.to(tl.int64))
    # [BLOCK_N, BLOCK_D], [BLOCK_N, BLOCK_DV]
    k = load_tile(k_base, keys, numbers.k.token, 0, tokens_k, TILE.HEAD_DIM, TILE.BLOCK_D, True)
    v = load_tile(v_base, keys, numbers.v.token, 0, tokens_k, TILE.HEAD_DIM_V, TILE.BLOCK_DV, True)
    row_at = sequence * numbers.heads_q * numbers.tokens_q
    dlse_ptr = x.dlse_ptr
    if x.dlse_ptr is not None:
        dlse_ptr += row_at
    queries = Queries(
        x.q_ptr + sequence * numbers.q.batch,
        x.dout_ptr + sequence * numbers.dout.batch,
        x.lse_ptr + row_at,
        dlse_ptr,
        x.out_ptr + row_at * TILE.HEAD_DIM_V,
        numbers.q,
        numbers.dout,
        numbers.tokens_q,
        None,
        None,
        0,
        0,
        head_k,
        numbers.heads_q,
    )
    walk = _masked(
        query_range(first_key, first_key + TILE.BLOCK_N - 1, scores.mask, OPTIONS, TILE.BLOCK_M)
    )
    dk = tl.zeros([TILE.BLOCK_N, TILE.BLOCK_D], tl.float32)  # [BLOCK_N, BLOCK_D]
    dv = tl.zeros([TILE.BLOCK_N, TILE.BLOCK_DV], tl.float32)  # [BLOCK_N, BLOCK_DV]
    dk, dv = dkdv_walk(dk, dv, k, v, keys, queries, walk, scores, True, OPTIONS, TILE)
    # contiguous: [batch, tokens, heads_k, width]
    row = (sequence * tokens_k + keys) * heads_k + head_k  # [BLOCK_N]
    inside = keys < tokens_k
    store_rows(x.dk_ptr, row, dk * scores.scale, inside, TILE.HEAD_DIM, TILE.BLOCK_D)
    store_rows(x.dv_ptr, row, dv, inside, TILE.HEAD_DIM_V, TILE.BLOCK_DV)


@triton.jit
def _write_dq(place, x, numbers, scores, OPTIONS: tl.constexpr, TILE: tl.constexpr):
    """Write dq of block ``place`` of queries, numbered over all sequences and heads."""
    heads, tokens_q = numbers.heads_q, numbers.tokens_q
    tiles = tl.cdiv(tokens_q, TILE.BLOCK_M)
    first_row = place % tiles * TILE.BLOCK_M
    head = place // tiles % heads
    sequence = (place // tiles // heads).to(tl.int64)
    head_64 = head.to(tl.int64)
    head_k_64 = head_64 // OPTIONS.GROUP
    rows = first_row + tl.arange(0, TILE.BLOCK_M)  # [BLOCK_M]
    q_base = pointer_to(x.q_ptr, numbers.q, sequence, 0, head_64)
    dout_base = pointer_to(x.dout_ptr, numbers.dout, sequence, 0, head_64)
    # out and dq are contiguous: [batch, tokens, heads_q, width]
    out_base = x.out_ptr + (sequence * tokens_q * heads + head) * TILE.HEAD_DIM_V
    row = (sequence * tokens_q + rows) * heads + head  # [BLOCK_M]
    # [BLOCK_M, BLOCK_D], [BLOCK_M, BLOCK_DV], [BLOCK_M, BLOCK_DV]
    q = load_tile(q_base, rows, numbers.q.token, 0, tokens_q, TILE.HEAD_DIM, TILE.BLOCK_D, True)
    dout = load_tile(
        dout_base, rows, numbers.dout.token, 0, tokens_q, TILE.HEAD_DIM_V, TILE.BLOCK_DV, True
    )
    out = load_tile(
        out_base, rows, heads * TILE.HEAD_DIM_V, 0, tokens_q, TILE.HEAD_DIM_V, TILE.BLOCK_DV, True
    )
    row_at = (sequence * heads + head) * tokens_q
    lse = load_row(x.lse_ptr + row_at, rows, tokens_q, INF, True)  # [BLOCK_M]
    dlse = None
    if x.dlse_ptr is not None:
        dlse = load_row(x.dlse_ptr + row_at, rows, tokens_q, 0.0, True)  # [BLOCK_M]
    lse2, delta = row_numbers(out, dout, lse, dlse)
    last_row = tl.minimum(first_row + TILE.BLOCK_M, tokens_q) - 1
    walk = _masked(key_range(first_row, last_row, scores.mask, OPTIONS, TILE.BLOCK_N))
    keys = Keys(
        pointer_to(x.k_ptr, numbers.k, sequence, 0, head_k_64),
        pointer_to(x.v_ptr, numbers.v, sequence, 0, head_k_64),
        numbers.k.token,
        numbers.v.token,
    )
    queries = q, dout, lse2, delta
    own = Head(None, None, None)
    dq = tl.zeros([TILE.BLOCK_M, TILE.BLOCK_D], tl.float32)  # [BLOCK_M, BLOCK_D]
    dq = dq_walk(dq, queries, rows, keys, walk, scores, own, True, OPTIONS, TILE)
    inside = rows < tokens_q
    store_rows(x.dq_ptr, row, dq * scores.scale, inside, TILE.HEAD_DIM, TILE.BLOCK_D)


@entry(triton.jit)
def short_kernel(tensors: ShortTensors, numbers: ShortNumbers, OPTIONS: Options, TILE: Tile):
    """``dv = p^T dout``, ``dk = scale * ds^T q`` and ``dq = scale * ds k``.

    ``p = exp(s - lse)`` and ``ds = p * (dout v^T - delta)``, with ``delta = sum(out * dout) -
    dlse``. One program writes a block of keys of one key head, or a block of queries of one query
    head.
    """
    tokens_q, tokens_k = numbers.tokens_q, numbers.tokens_k
    diagonal = tokens_k - tokens_q
    mask = Mask(tokens_q, tokens_k, diagonal, numbers.window_left, numbers.window_right)
    scores = Scores(numbers.scale, numbers, mask, None, None)
    place = tl.program_id(0)
    # programs that own keys have more work: they begin first
    if place < numbers.key_programs:
        _write_dkdv(place, tensors, numbers, scores, OPTIONS, TILE)
    else:
        _write_dq(place - numbers.key_programs, tensors, numbers, scores, OPTIONS, TILE)
