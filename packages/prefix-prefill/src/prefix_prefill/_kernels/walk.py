"""The walk over the keys of a source: the online softmax of FlashAttention-2 (Dao, 2023)."""

import triton
import triton.language as tl

from ._linked.primitives import LOG2E, NEG_INF, count_steps, dot, dot_add, step_start
from .primitives import (
    is_looked_up,
    is_on_branch,
    is_visible,
    load_rows,
    logits_of,
    look_up,
    matched,
    rows_of,
)
from .structures import Softmax


@triton.jit
def start_softmax(
    rows, split, sinks_ptr, OPTIONS: tl.constexpr, SCHEDULE: tl.constexpr, TILE: tl.constexpr
):
    """Return the ``Softmax`` of a tile that has seen no key, but its sinks."""
    m_i = tl.full([SCHEDULE.BLOCK_M], NEG_INF, tl.float32)
    l_i = tl.zeros([SCHEDULE.BLOCK_M], tl.float32)
    if sinks_ptr is not None:
        # a sink is a first key without a value; one of the splits alone counts it
        sink = tl.load(sinks_ptr + rows.head, mask=rows.is_inside, other=NEG_INF)
        sink = sink.to(tl.float32) * LOG2E
        m_i = tl.where(split == 0, sink, NEG_INF)
        l_i = tl.where(m_i == NEG_INF, 0.0, 1.0 * (1 << OPTIONS.SHIFT))
    acc = tl.zeros([SCHEDULE.BLOCK_M, TILE.BLOCK_D], tl.float32)
    return Softmax(acc, l_i, m_i)


@triton.jit
def finish_softmax(softmax, v_descale, SHIFT: tl.constexpr):
    """Return the output of each row, and its log-sum-exp in base 2."""
    # rows that saw no key: output 0, lse -inf
    l_i = softmax.l_i
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    out = softmax.acc * (v_descale / l_safe)[:, None]  # [BLOCK_M, BLOCK_D]
    return out, tl.where(l_i == 0.0, NEG_INF, softmax.m_i + tl.log2(l_safe) - SHIFT)


@triton.jit
def _next_tile(
    step, steps, walk, table, PAGE: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr
):
    """Return where the tile of a step begins, and the pages of its keys."""
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    begin = step_start(step, walk.start, walk.full_start, walk.full_end, BLOCK_N, MASKED)
    is_wanted = is_looked_up(begin, step, steps, walk, PAGE, BLOCK_N, MASKED)
    return begin, look_up(table, begin, is_wanted, PAGE, BLOCK_N)


@triton.jit
def _attend(
    softmax,
    queries,
    source,
    walk,
    scores,
    LAYOUT: tl.constexpr,
    OPTIONS: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Fold keys of one source into the running softmax of a tile: masked tiles, or whole ones."""
    PAGE: tl.constexpr = LAYOUT.PAGE
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    acc, l_i, m_i = softmax.acc, softmax.l_i, softmax.m_i
    cols = tl.arange(0, TILE.BLOCK_D)  # [BLOCK_D]
    lane = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    steps = count_steps(walk.start, walk.full_start, walk.full_end, walk.last, BLOCK_N, MASKED)
    # pages are looked up a step ahead: else their loads would take a stage of the pipeline
    next_begin, next_pages = _next_tile(0, steps, walk, source.table, PAGE, TILE, MASKED)
    for step in tl.range(0, steps):
        begin, pages = next_begin, next_pages
        next_begin, next_pages = _next_tile(step + 1, steps, walk, source.table, PAGE, TILE, MASKED)
        keys = begin + lane  # [BLOCK_N]
        inside = (keys >= walk.first) & (keys < walk.last)
        if MASKED and queries.tree is not None:
            # branches that no row is on lie between keys that are seen, and may hold NaN
            inside &= is_on_branch(queries, keys)
        k_rows = rows_of(pages, begin, source.k, PAGE, BLOCK_N)
        # [BLOCK_N, BLOCK_D]
        k = load_rows(source.k, k_rows, inside, cols, LAYOUT.K, TILE, MASKED)
        k = matched(k, queries.q)
        # [BLOCK_M, BLOCK_N]
        s = dot(matched(queries.q, k), tl.trans(k), TILE.PRECISION, TILE.UPCAST)
        if OPTIONS.FOLD and not MASKED:
            # the scale goes into the exponential's multiply-add; it is positive, so max commutes
            factor = scores.scale * LOG2E
        else:
            factor = 1.0
            s = logits_of(s, queries, keys, scores, OPTIONS)
        if MASKED:
            visible = is_visible(queries, keys, walk.last, scores, OPTIONS)
            s = tl.where(visible, s, NEG_INF)
        m_new = tl.maximum(m_i, tl.max(s, 1) * factor)  # [BLOCK_M]
        if MASKED:
            # a row that has seen no key yet keeps a finite pivot: -inf - -inf is NaN
            pivot = tl.where(m_new == NEG_INF, 0.0, m_new)
        else:
            pivot = m_new
        p = tl.exp2(s * factor - (pivot - OPTIONS.SHIFT)[:, None])  # [BLOCK_M, BLOCK_N]
        alpha = tl.exp2(m_i - pivot)
        l_i = l_i * alpha + tl.sum(p, 1)
        if LAYOUT.V_AS_K:
            v_rows = k_rows
        else:
            v_rows = rows_of(pages, begin, source.v, PAGE, BLOCK_N)
        # [BLOCK_N, BLOCK_D]
        v = load_rows(source.v, v_rows, inside, cols, LAYOUT.V, TILE, MASKED)
        # [BLOCK_M, BLOCK_D]
        acc = dot_add(acc * alpha[:, None], p, matched(v, queries.q), TILE.PRECISION, TILE.UPCAST)
        m_i = m_new
    return Softmax(acc, l_i, m_i)


@triton.jit
def attend_to_all(
    softmax,
    queries,
    source,
    walk,
    scores,
    LAYOUT: tl.constexpr,
    OPTIONS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Fold keys of one source into the running softmax: whole tiles, then those to be masked."""
    for masked in tl.static_range(2):
        softmax = _attend(
            softmax, queries, source, walk, scores, LAYOUT, OPTIONS, TILE, masked == 1
        )
    return softmax
