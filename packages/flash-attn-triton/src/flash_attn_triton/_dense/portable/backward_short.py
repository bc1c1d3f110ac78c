"""All gradients of short sequences in one launch: three would take the host longer than the GPU.

Some programs own a block of keys and walk the queries, as in :mod:`.backward_dkdv`; the rest own a
block of queries and walk the keys, as in :mod:`.backward_dq`. Both make the two numbers per row
that :mod:`.backward_rows` makes for longer sequences. Walks have few steps, and all are masked.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..._linked.portable.primitives import INF
from .backward_dkdv import dkdv_walk
from .backward_dq import dq_walk
from .primitives import key_range, load_row, load_tile, query_range, row_numbers, store_rows
from .structures import (
    SHORT_FOREIGN,
    Head,
    Keys,
    Options,
    Queries,
    Scores,
    ShortNumbers,
    ShortTensors,
    Tile,
    Walk,
)


@triton.jit
def _masked(walk):
    """Return the walk with a mask for all tiles."""
    return Walk(walk.first, walk.last, walk.start, walk.start, walk.start)


@triton.jit
def _write_dkdv(
    place, x, numbers, scores, OPTIONS: tl.constexpr, TILE: tl.constexpr, SETTLE: tl.constexpr
):
    """Write dk and dv of block ``place`` of keys, numbered over all sequences and heads."""
    heads_k = numbers.heads_q // OPTIONS.GROUP
    tiles = tl.cdiv(numbers.tokens_k, TILE.BLOCK_N)
    first_key = place % tiles * TILE.BLOCK_N
    head_k = place // tiles % heads_k
    sequence = (place // tiles // heads_k).to(tl.int64)
    head_k_64 = head_k.to(tl.int64)
    keys = first_key + tl.arange(0, TILE.BLOCK_N)  # [BLOCK_N]
    k = load_tile(
        x.k_ptr + sequence * numbers.stride_kb + head_k_64 * numbers.stride_kh,
        keys,
        numbers.stride_ks,
        0,
        numbers.tokens_k,
        tl.arange(0, TILE.BLOCK_D),
        TILE.HEAD_DIM,
        TILE.BLOCK_D,
        True,
    )  # [BLOCK_N, BLOCK_D]
    v = load_tile(
        x.v_ptr + sequence * numbers.stride_vb + head_k_64 * numbers.stride_vh,
        keys,
        numbers.stride_vs,
        0,
        numbers.tokens_k,
        tl.arange(0, TILE.BLOCK_DV),
        TILE.HEAD_DIM_V,
        TILE.BLOCK_DV,
        True,
    )  # [BLOCK_N, BLOCK_DV]
    row_at = sequence * numbers.heads_q * numbers.tokens_q
    dlse_ptr = x.dlse_ptr
    if x.dlse_ptr is not None:
        dlse_ptr += row_at
    queries = Queries(
        x.q_ptr + sequence * numbers.stride_qb,
        x.dout_ptr + sequence * numbers.stride_dob,
        x.lse_ptr + row_at,
        dlse_ptr,
        None,
        None,
        numbers.stride_qs,
        numbers.stride_qh,
        numbers.stride_dos,
        numbers.stride_doh,
        numbers.tokens_q,
        0,
        0,
        head_k,
        numbers.heads_q,
        x.out_ptr + row_at * TILE.HEAD_DIM_V,
    )
    walk = _masked(
        query_range(first_key, first_key + TILE.BLOCK_N - 1, scores, OPTIONS, TILE.BLOCK_M)
    )
    dk = tl.zeros([TILE.BLOCK_N, TILE.BLOCK_D], tl.float32)  # [BLOCK_N, BLOCK_D]
    dv = tl.zeros([TILE.BLOCK_N, TILE.BLOCK_DV], tl.float32)  # [BLOCK_N, BLOCK_DV]
    dk, dv = dkdv_walk(dk, dv, k, v, keys, queries, walk, scores, True, OPTIONS, TILE, SETTLE)
    # contiguous: [batch, tokens, heads_k, width]
    row = (sequence * numbers.tokens_k + keys) * heads_k + head_k  # [BLOCK_N]
    inside = keys < numbers.tokens_k
    store_rows(x.dk_ptr, row, dk * scores.scale, inside, TILE.HEAD_DIM, TILE.BLOCK_D)
    store_rows(x.dv_ptr, row, dv, inside, TILE.HEAD_DIM_V, TILE.BLOCK_DV)


@triton.jit
def _write_dq(place, x, numbers, scores, OPTIONS: tl.constexpr, TILE: tl.constexpr):
    """Write dq of block ``place`` of queries, numbered over all sequences and heads."""
    tiles = tl.cdiv(numbers.tokens_q, TILE.BLOCK_M)
    first_row = place % tiles * TILE.BLOCK_M
    head = place // tiles % numbers.heads_q
    sequence = (place // tiles // numbers.heads_q).to(tl.int64)
    head_64 = head.to(tl.int64)
    head_k_64 = head_64 // OPTIONS.GROUP
    rows = first_row + tl.arange(0, TILE.BLOCK_M)  # [BLOCK_M]
    cols_dv = tl.arange(0, TILE.BLOCK_DV)  # [BLOCK_DV]
    q = load_tile(
        x.q_ptr + sequence * numbers.stride_qb + head_64 * numbers.stride_qh,
        rows,
        numbers.stride_qs,
        0,
        numbers.tokens_q,
        tl.arange(0, TILE.BLOCK_D),
        TILE.HEAD_DIM,
        TILE.BLOCK_D,
        True,
    )  # [BLOCK_M, BLOCK_D]
    dout = load_tile(
        x.dout_ptr + sequence * numbers.stride_dob + head_64 * numbers.stride_doh,
        rows,
        numbers.stride_dos,
        0,
        numbers.tokens_q,
        cols_dv,
        TILE.HEAD_DIM_V,
        TILE.BLOCK_DV,
        True,
    )  # [BLOCK_M, BLOCK_DV]
    # out and dq are contiguous: [batch, tokens, heads_q, width]
    row = (sequence * numbers.tokens_q + rows) * numbers.heads_q + head  # [BLOCK_M]
    out = load_tile(
        x.out_ptr + (sequence * numbers.tokens_q * numbers.heads_q + head) * TILE.HEAD_DIM_V,
        rows,
        numbers.heads_q * TILE.HEAD_DIM_V,
        0,
        numbers.tokens_q,
        cols_dv,
        TILE.HEAD_DIM_V,
        TILE.BLOCK_DV,
        True,
    )  # [BLOCK_M, BLOCK_DV]
    row_at = (sequence * numbers.heads_q + head) * numbers.tokens_q
    lse = load_row(x.lse_ptr + row_at, rows, numbers.tokens_q, INF, True)  # [BLOCK_M]
    dlse = None
    if x.dlse_ptr is not None:
        dlse = load_row(x.dlse_ptr + row_at, rows, numbers.tokens_q, 0.0, True)  # [BLOCK_M]
    lse2, delta = row_numbers(out, dout, lse, dlse)
    last_row = tl.minimum(first_row + TILE.BLOCK_M, numbers.tokens_q) - 1
    walk = _masked(key_range(first_row, last_row, scores, OPTIONS, TILE.BLOCK_N))
    keys = Keys(
        x.k_ptr + sequence * numbers.stride_kb + head_k_64 * numbers.stride_kh,
        x.v_ptr + sequence * numbers.stride_vb + head_k_64 * numbers.stride_vh,
        numbers.stride_ks,
        numbers.stride_vs,
    )
    queries = q, dout, lse2, delta
    own = Head(None, None, None)
    dq = tl.zeros([TILE.BLOCK_M, TILE.BLOCK_D], tl.float32)  # [BLOCK_M, BLOCK_D]
    dq = dq_walk(dq, queries, rows, keys, walk, scores, own, True, OPTIONS, TILE)
    inside = rows < numbers.tokens_q
    store_rows(x.dq_ptr, row, dq * scores.scale, inside, TILE.HEAD_DIM, TILE.BLOCK_D)


@triton.jit(
    do_not_specialize=ShortNumbers._fields,
    do_not_specialize_on_alignment=SHORT_FOREIGN,
)
def short_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    out_ptr,
    lse_ptr,
    dlse_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    scale,
    softcap,
    window_left,
    window_right,
    heads_q,
    tokens_q,
    tokens_k,
    key_programs,
    stride_dob,
    stride_dos,
    stride_doh,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_vb,
    stride_vs,
    stride_vh,
    GROUP: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BIAS_BYTES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    SETTLE: tl.constexpr,  # wait for the products at the end of each step of dk and dv
):
    """``dv = p^T dout``, ``dk = scale * ds^T q`` and ``dq = scale * ds k``.

    ``p = exp(s - lse)`` and ``ds = p * (dout v^T - delta)``, with ``delta = sum(out * dout) -
    dlse``. One program writes a block of keys of one key head, or a block of queries of one query
    head. The parameters are the fields of ``ShortTensors``, ``ShortNumbers``, ``Options`` and
    ``Tile``, and ``SETTLE``.
    """
    OPTIONS: tl.constexpr = Options(GROUP, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, BIAS_BYTES)
    TILE: tl.constexpr = Tile(
        HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, PRECISION, UPCAST
    )
    x = ShortTensors(
        q_ptr, k_ptr, v_ptr, dout_ptr, out_ptr, lse_ptr, dlse_ptr, dq_ptr, dk_ptr, dv_ptr
    )
    numbers = ShortNumbers(
        scale,
        softcap,
        window_left,
        window_right,
        heads_q,
        tokens_q,
        tokens_k,
        key_programs,
        stride_dob,
        stride_dos,
        stride_doh,
        stride_qb,
        stride_qs,
        stride_qh,
        stride_kb,
        stride_ks,
        stride_kh,
        stride_vb,
        stride_vs,
        stride_vh,
    )
    diagonal = tokens_k - tokens_q
    scores = Scores(
        scale, softcap, 0, 0, diagonal, tokens_q, tokens_k, window_left, window_right, None, 0, 1.0
    )
    place = tl.program_id(0)
    # programs that own keys have more work: they begin first
    if place < key_programs:
        _write_dkdv(place, x, numbers, scores, OPTIONS, TILE, SETTLE)
    else:
        _write_dq(place - key_programs, x, numbers, scores, OPTIONS, TILE)
