"""The loop over the keys of a source: the online softmax of FlashAttention-2 (Dao, 2023)."""

import triton
import triton.language as tl

from ..._cache.kernels.words import slices_of
from ..._linked.portable.mask import count_steps, step_start
from ..._linked.portable.primitives import LOG2E, NEG_INF, dot, dot_add
from .in_order import load_keys, load_values
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

# largest weight in fp16: it fits, and is far from denormals
_LARGEST_WEIGHT = tl.constexpr(32768.0)


@triton.jit
def start_softmax(
    rows, split, sinks_ptr, OPTIONS: tl.constexpr, SCHEDULE: tl.constexpr, TILE: tl.constexpr
):
    """Return the ``Softmax`` of a tile before its first key; it holds the sinks."""
    SLICES: tl.constexpr = OPTIONS.CACHE.SLICES
    m_i = tl.full([SCHEDULE.BLOCK_M], NEG_INF, tl.float32)
    l_i = tl.zeros([SCHEDULE.BLOCK_M], tl.float32)
    if sinks_ptr is not None:
        # a sink acts as a first key without a value; only the first split counts it
        sink = tl.load(sinks_ptr + rows.head, mask=rows.is_inside, other=NEG_INF)
        sink = sink.to(tl.float32) * LOG2E
        m_i = tl.where(split == 0, sink, NEG_INF)
        l_i = tl.where(m_i == NEG_INF, 0.0, 1.0 * (1 << OPTIONS.SHIFT))
    zeros = tl.zeros([SCHEDULE.BLOCK_M, TILE.BLOCK_DV // SLICES], tl.float32)
    if SLICES == 1:
        acc = (zeros,)
    elif SLICES == 2:
        acc = zeros, zeros
    else:
        acc = zeros, zeros, zeros, zeros
    return Softmax(acc, l_i, m_i)


@triton.jit
def finish_softmax(softmax, v_descale, SHIFT: tl.constexpr):
    """Return the output of each row, and its log-sum-exp in base 2, of a joined softmax."""
    # fully masked rows: output 0, lse -inf
    l_i = softmax.l_i
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    out = softmax.acc[0] * (v_descale / l_safe)[:, None]  # [BLOCK_M, BLOCK_DV]
    return out, tl.where(l_i == 0.0, NEG_INF, softmax.m_i + tl.log2(l_safe) - SHIFT)


@triton.jit
def _next_tile(
    step, steps, walk, table, LAYOUT: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr
):
    """Return the first key of a step's tile, and the page numbers for its keys and values."""
    PAGE: tl.constexpr = LAYOUT.PAGE
    begin = step_start(step, walk, TILE.BLOCK_N, MASKED)
    is_wanted = is_looked_up(begin, step, steps, walk, PAGE, TILE.BLOCK_N, MASKED)
    pages = look_up(table, begin, is_wanted, PAGE, TILE.BLOCK_N)
    pages_v = pages
    if LAYOUT.IN_ORDER and not MASKED:
        EACH: tl.constexpr = LAYOUT.V.SLOT_RUN
        is_wanted = is_looked_up(begin, step, steps, walk, PAGE, TILE.BLOCK_N, MASKED, EACH)
        pages_v = look_up(table, begin, is_wanted, PAGE, TILE.BLOCK_N, EACH)
    return begin, pages, pages_v


@triton.jit
def _scales_of(source, pages, begin, left, walk, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the scales of a tile's keys and values; zeros if no tile is ``left``."""
    lane = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    wanted = (begin + lane >= walk.first) & (begin + lane < walk.last)
    wanted &= lane < left * BLOCK_N
    k_rows = rows_of(pages, begin, source.k_scales, PAGE, BLOCK_N)
    v_rows = rows_of(pages, begin, source.v_scales, PAGE, BLOCK_N)
    k_scale = tl.load(source.k_scales.base + k_rows, mask=wanted, other=0.0).to(tl.float32)
    v_scale = tl.load(source.v_scales.base + v_rows, mask=wanted, other=0.0).to(tl.float32)
    return k_scale, v_scale


@triton.jit
def _parted(scale):
    """Return scales, and how far the zero points in their lowest bits are below 8."""
    bits = scale.to(tl.int32, bitcast=True)
    return (bits & -16).to(tl.float32, bitcast=True), (8 - (bits & 15)).to(tl.float32)


@triton.jit
def _signed(words):
    """Turn codes of 4 bits from 0 to 15 into those of two's complement that are 8 less."""
    EACH: tl.constexpr = -30584 if words.dtype == tl.int16 else 136
    return words ^ tl.full([], EACH, words.dtype)


@triton.jit
def _total(slices):
    """Return the sum of each row, ``[BLOCK_M]``."""
    total = tl.sum(slices[0].to(tl.float32), 1)
    for i in tl.static_range(1, len(slices)):
        total += tl.sum(slices[i].to(tl.float32), 1)
    return total


@triton.jit
def _moved(acc, by):
    """Return slices of an accumulator with a number of each row added."""
    if len(acc) == 2:
        acc = acc[0] + by[:, None], acc[1] + by[:, None]
    else:
        acc = acc[0] + by[:, None], acc[1] + by[:, None], acc[2] + by[:, None], acc[3] + by[:, None]
    return acc


@triton.jit
def _multiply(q, k, TILE: tl.constexpr):
    """Return ``q @ k.T``, ``[BLOCK_M, BLOCK_N]``, of slices."""
    s = dot(q[0], tl.trans(k[0]), TILE.PRECISION, TILE.UPCAST)  # [BLOCK_M, BLOCK_N]
    for i in tl.static_range(1, len(q)):
        s = dot_add(s, q[i], tl.trans(k[i]), TILE.PRECISION, TILE.UPCAST)
    return s


@triton.jit
def _accumulate(acc, alpha, p, v, TILE: tl.constexpr):
    """Return ``acc * alpha + p @ v`` of one slice, ``[BLOCK_M, BLOCK_DV // SLICES]``."""
    return dot_add(acc * alpha[:, None], p, v, TILE.PRECISION, TILE.UPCAST)


@triton.jit
def _accumulate_scaled(acc, alpha, p, v, unit, TILE: tl.constexpr):
    """Return ``acc * alpha + p @ v * unit`` of one slice."""
    return acc * alpha[:, None] + dot(p.to(v.dtype), v, TILE.PRECISION, TILE.UPCAST) * unit


@triton.jit
def _add_values(acc, alpha, p, v, scale, TILE: tl.constexpr):
    """Return ``acc * alpha + (p * scale) @ v`` of slices; ``scale`` is per key, or None."""
    if scale is not None and v[0].dtype == tl.float16:
        # normalised by the largest scale, because weights could overflow or vanish in fp16
        unit = tl.max(scale, 0)
        unit = tl.where(unit > 0, unit, 1.0) / _LARGEST_WEIGHT
        p *= (scale / unit)[None, :]
        if len(acc) == 1:
            acc = (_accumulate_scaled(acc[0], alpha, p, v[0], unit, TILE),)
        elif len(acc) == 2:
            acc = (
                _accumulate_scaled(acc[0], alpha, p, v[0], unit, TILE),
                _accumulate_scaled(acc[1], alpha, p, v[1], unit, TILE),
            )
        else:
            acc = (
                _accumulate_scaled(acc[0], alpha, p, v[0], unit, TILE),
                _accumulate_scaled(acc[1], alpha, p, v[1], unit, TILE),
                _accumulate_scaled(acc[2], alpha, p, v[2], unit, TILE),
                _accumulate_scaled(acc[3], alpha, p, v[3], unit, TILE),
            )
    else:
        if scale is not None:
            p *= scale[None, :]
        if len(acc) == 1:
            acc = (_accumulate(acc[0], alpha, p, v[0], TILE),)
        elif len(acc) == 2:
            acc = (
                _accumulate(acc[0], alpha, p, v[0], TILE),
                _accumulate(acc[1], alpha, p, v[1], TILE),
            )
        else:
            acc = (
                _accumulate(acc[0], alpha, p, v[0], TILE),
                _accumulate(acc[1], alpha, p, v[1], TILE),
                _accumulate(acc[2], alpha, p, v[2], TILE),
                _accumulate(acc[3], alpha, p, v[3], TILE),
            )
    return acc


@triton.jit
def _attend(
    softmax,
    queries,
    source,
    walk,
    problem,
    LAYOUT: tl.constexpr,
    OPTIONS: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Fold keys of one source into the running softmax: either masked tiles or whole tiles."""
    PAGE: tl.constexpr = LAYOUT.PAGE
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    SLICES: tl.constexpr = LAYOUT.SLICES
    K: tl.constexpr = LAYOUT.K
    V: tl.constexpr = LAYOUT.V
    K_WORDS: tl.constexpr = LAYOUT.K_WORDS
    V_WORDS: tl.constexpr = LAYOUT.V_WORDS
    WIDE: tl.constexpr = queries.q[0].dtype
    STORED: tl.constexpr = problem.tensors.k_cache_ptr.dtype.element_ty
    # fp16 holds all numbers of 8 bits; bf16 holds scaled weights of any size, and integers
    IS_INT: tl.constexpr = tl.int8 == STORED or tl.uint8 == STORED
    NARROW: tl.constexpr = tl.bfloat16 if LAYOUT.SCALED and IS_INT else tl.float16
    Q: tl.constexpr = problem.tensors.q_ptr.dtype.element_ty
    WEIGHTS: tl.constexpr = Q if tl.float32 == Q or tl.float16 == Q else NARROW
    scores = problem.numbers.scores
    acc, l_i, m_i = softmax.acc, softmax.l_i, softmax.m_i
    cols = tl.arange(0, K_WORDS.BLOCK_D)  # [BLOCK_D // SLICES]
    cols_v = tl.arange(0, V_WORDS.BLOCK_D)  # [BLOCK_DV // SLICES]
    lane = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    steps = count_steps(walk, BLOCK_N, MASKED)
    # page numbers are read one step ahead; otherwise their loads take a pipeline stage
    next_begin, next_pages, next_pages_v = _next_tile(
        0, steps, walk, source.table, LAYOUT, TILE, MASKED
    )
    if LAYOUT.SCALED:
        next_scales = _scales_of(source, next_pages, next_begin, steps, walk, PAGE, BLOCK_N)
    if LAYOUT.ZERO_POINTS:
        q_total = _total(queries.q)  # [BLOCK_M]
    for step in tl.range(0, steps):
        begin, pages, pages_v = next_begin, next_pages, next_pages_v
        next_begin, next_pages, next_pages_v = _next_tile(
            step + 1, steps, walk, source.table, LAYOUT, TILE, MASKED
        )
        if LAYOUT.SCALED:
            scales = next_scales
            next_scales = _scales_of(
                source, next_pages, next_begin, steps - step - 1, walk, PAGE, BLOCK_N
            )
        keys = begin + lane  # [BLOCK_N]
        inside = (keys >= walk.first) & (keys < walk.last)
        if MASKED and queries.tree is not None:
            # keys of branches that no row sees lie between visible keys and may be NaN
            inside &= is_on_branch(queries, keys)
        k_rows = rows_of(pages, begin, source.k, PAGE, BLOCK_N)
        # s: [BLOCK_M, BLOCK_N], k: [BLOCK_N, BLOCK_D // SLICES]
        if LAYOUT.IN_ORDER:
            k = load_keys(source.k, k_rows, inside, K, K_WORDS, MASKED)
            k = matched(k, queries.q[0])  # [BLOCK_D, BLOCK_N]
            s = dot(matched(queries.q[0], k), k, TILE.PRECISION, TILE.UPCAST)
        elif SLICES == 1:
            k = load_rows(source.k, k_rows, inside, cols, K, K_WORDS, MASKED)
            k = matched(k, queries.q[0])
            s = _multiply((matched(queries.q[0], k),), (k,), TILE)
        else:
            k = load_rows(source.k, k_rows, inside, cols, K, K_WORDS, MASKED)
            if LAYOUT.ZERO_POINTS:
                k = _signed(k)
            s = _multiply(queries.q, slices_of(k, WIDE, STORED, SLICES, TILE.PTX), TILE)
        if LAYOUT.ZERO_POINTS:
            k_scale, k_below = _parted(scales[0])  # [BLOCK_N]
            v_scale, v_below = _parted(scales[1])
            s += q_total[:, None] * k_below[None, :]
        elif LAYOUT.SCALED:
            k_scale, v_scale = scales
        else:
            v_scale = None
        if LAYOUT.SCALED:
            s *= k_scale[None, :]
        if OPTIONS.FOLD and not MASKED:
            # the scale goes into the multiply-add of exp2; it is positive, so max commutes with it
            factor = source.scale * LOG2E
            if queries.unit is not None:
                factor *= queries.unit  # [BLOCK_M]
        else:
            factor = 1.0
            if queries.unit is not None:
                s *= queries.unit[:, None]
            s = logits_of(s, queries, keys, source.scale, scores.softcap, OPTIONS)
        if MASKED:
            visible = is_visible(queries, keys, walk.last, scores, OPTIONS)
            s = tl.where(visible, s, NEG_INF)
        m_new = tl.maximum(m_i, tl.max(s, 1) * factor)  # [BLOCK_M]
        if MASKED:
            # a row without keys so far needs a finite pivot: -inf - -inf is NaN
            pivot = tl.where(m_new == NEG_INF, 0.0, m_new)
        else:
            pivot = m_new
        if OPTIONS.FOLD and not MASKED and queries.unit is not None:
            s *= factor[:, None]
        else:
            s *= factor
        p = tl.exp2(s - (pivot - OPTIONS.SHIFT)[:, None])  # [BLOCK_M, BLOCK_N]
        alpha = tl.exp2(m_i - pivot)
        l_i = l_i * alpha + tl.sum(p, 1)
        # v: [BLOCK_N, BLOCK_DV // SLICES]
        if LAYOUT.IN_ORDER and not MASKED:
            EACH: tl.constexpr = LAYOUT.V.SLOT_RUN
            v_rows = rows_of(pages_v, begin, source.v, PAGE, BLOCK_N, EACH)
            v = load_values(source.v, v_rows, V, V_WORDS)
        else:
            v_rows = k_rows if LAYOUT.V_AS_K else rows_of(pages, begin, source.v, PAGE, BLOCK_N)
            v = load_rows(source.v, v_rows, inside, cols_v, V, V_WORDS, MASKED)
        if SLICES == 1:
            v = (matched(v, queries.q[0]),)
        else:
            if LAYOUT.ZERO_POINTS:
                v = _signed(v)
            v = slices_of(v, WEIGHTS, STORED, SLICES, TILE.PTX)
        acc = _add_values(acc, alpha, p, v, v_scale, TILE)
        if LAYOUT.ZERO_POINTS:
            acc = _moved(acc, tl.sum(p * (v_scale * v_below)[None, :], 1))
        m_i = m_new
    return Softmax(acc, l_i, m_i)


@triton.jit
def attend_to_all(
    softmax,
    queries,
    source,
    walk,
    problem,
    LAYOUT: tl.constexpr,
    OPTIONS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Fold keys of one source into the running softmax: whole tiles, then masked tiles."""
    for masked in tl.static_range(2):
        softmax = _attend(
            softmax, queries, source, walk, problem, LAYOUT, OPTIONS, TILE, masked == 1
        )
    return softmax
