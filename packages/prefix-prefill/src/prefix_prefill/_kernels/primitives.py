"""Pieces of the attention kernel: loads through a page table, logits, masks, ranges of keys.

Scores are kept in base 2 ("logits" below are natural scores times log2(e)), because the hardware
exponential is ``exp2``.
"""

import triton
import triton.language as tl

from ._linked.primitives import LOG2E, tanh
from .structures import KeyRange, Walk


@triton.jit
def look_up(table_base, stride_table, begin, is_wanted, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the pages of a tile's keys, one for all if no tile crosses pages of this size.

    Entries are read where ``is_wanted``: of every key, or of the tile if it has one page.
    """
    lane = tl.arange(0, BLOCK)  # [BLOCK]
    if PAGE == 0:
        pages = 0  # dense: nothing to look up
    elif PAGE % BLOCK == 0:  # every tile has one page
        pages = tl.load(table_base + (begin // PAGE).to(tl.int64) * stride_table, mask=is_wanted)
    else:
        if BLOCK % PAGE == 0:  # what depends on the lane is the same in every step
            entries = table_base + (begin // PAGE).to(tl.int64) * stride_table
            entries += (lane // PAGE).to(tl.int64) * stride_table
        else:
            entries = table_base + ((begin + lane) // PAGE).to(tl.int64) * stride_table
        pages = tl.load(entries, mask=is_wanted, other=0)  # [BLOCK]
    return pages


@triton.jit
def is_looked_up(
    begin,
    step,
    steps,
    first,
    last,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Say which entries a step reads: none that holds only keys outside of ``[first, last)``."""
    lane = tl.arange(0, BLOCK)  # [BLOCK]
    if PAGE > 0 and PAGE % BLOCK == 0:
        wanted = step < steps  # every tile has one page, and keys inside
    elif MASKED:
        wanted = (begin + lane >= first) & (begin + lane < last)
    else:
        wanted = lane < (steps - step) * BLOCK  # all, or behind the last step none
    return wanted


@triton.jit
def rows_of(pages, begin, stride_page, stride_slot, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Return where a tile's keys begin, relative to their head: in their pages, or dense (PAGE 0).

    As much of it as can be is the same in every step, or for the whole tile.
    """
    lane = tl.arange(0, BLOCK)  # [BLOCK]
    if PAGE == 0:
        rows = begin.to(tl.int64) * stride_slot + lane.to(tl.int64) * stride_slot
    elif PAGE % BLOCK == 0:
        rows = pages.to(tl.int64) * stride_page + (begin % PAGE).to(tl.int64) * stride_slot
        rows += lane.to(tl.int64) * stride_slot
    elif BLOCK % PAGE == 0:
        rows = pages.to(tl.int64) * stride_page + (lane % PAGE).to(tl.int64) * stride_slot
    else:
        slots = (begin + lane) % PAGE
        rows = pages.to(tl.int64) * stride_page + slots.to(tl.int64) * stride_slot
    return rows


@triton.jit
def load_rows(
    base,
    rows,
    inside,
    cols,
    stride_step,
    stride_inner,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    RUN: tl.constexpr,
    UNIT: tl.constexpr,
    BYTES: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Load rows x cols of vectors that begin at ``rows``; where not ``inside``, give 0.

    A vector is cut into runs of ``RUN`` numbers, ``stride_step`` apart. Every run begins on a
    multiple of ``BYTES``, and has no gaps if ``UNIT``: the launcher sees to both.
    """
    # columns first: their part of an address is the same in every step
    place = (cols % RUN if RUN < WIDTH else cols).to(tl.int64)  # [BLOCK_WIDTH]
    if not UNIT:
        place *= stride_inner
    if RUN < WIDTH:
        place += (cols // RUN).to(tl.int64) * stride_step
    pointers = (base + place)[None, :] + rows[:, None]  # [BLOCK, BLOCK_WIDTH]
    if UNIT:
        pointers = tl.multiple_of(pointers, [BYTES, BYTES])
    if MASKED:
        tile = tl.load(pointers, mask=inside[:, None] & (cols < WIDTH)[None, :], other=0.0)
    elif WIDTH != BLOCK_WIDTH:
        tile = tl.load(pointers, mask=(cols < WIDTH)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)  # whole tile inside: no mask needed
    return tile


@triton.jit
def load_columns(
    base,
    rows,
    inside,
    cols,
    stride_inner,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    RUN: tl.constexpr,
    BYTES: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Load the same tile where neighbouring rows lie next to each other, in runs of ``RUN``."""
    # a run is within a page, and begins on a multiple of BYTES: the launcher sees to it
    rows = tl.max_contiguous(rows, [RUN])
    # [BLOCK, BLOCK_WIDTH]
    pointers = base + rows[:, None] + cols.to(tl.int64)[None, :] * stride_inner
    pointers = tl.multiple_of(tl.max_contiguous(pointers, [RUN, 1]), [BYTES, BYTES])
    if MASKED:
        tile = tl.load(pointers, mask=inside[:, None] & (cols < WIDTH)[None, :], other=0.0)
    elif WIDTH != BLOCK_WIDTH:
        tile = tl.load(pointers, mask=(cols < WIDTH)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)  # whole tile inside: no mask needed
    return tile


@triton.jit
def matched(x, other):
    """Widen ``x`` to the dtype in which it is multiplied with ``other``; nothing is rounded."""
    if x.dtype.primitive_bitwidth == 8 and x.dtype != other.dtype:
        if other.dtype.primitive_bitwidth == 8:  # the two formats of 8 bits
            x = x.to(tl.bfloat16)
        else:
            x = x.to(other.dtype)
    return x


@triton.jit
def logits_of(products, queries, keys, scores, OPTIONS: tl.constexpr):
    """Turn raw products into base-2 logits: scale, softcap, ALiBi, in that order."""
    if OPTIONS.HAS_SOFTCAP:
        logits = tanh(products * (scores.scale / scores.softcap)) * (scores.softcap * LOG2E)
    else:
        logits = products * (scores.scale * LOG2E)  # [BLOCK_M, BLOCK_N]
    if queries.slopes is not None:
        distance = (keys[None, :] - queries.position[:, None]).to(tl.float32)  # [BLOCK_M, BLOCK_N]
        if not OPTIONS.SIGNED_ALIBI:
            distance = -tl.abs(distance)
        logits += distance * (queries.slopes * LOG2E)[:, None]
    return logits


@triton.jit
def is_visible(position, keys, last, scores, OPTIONS: tl.constexpr):
    """Return which keys each row sees; its window hangs on ``position``."""
    visible = (keys < last)[None, :] & (position == position)[:, None]  # [BLOCK_M, BLOCK_N]
    if OPTIONS.HAS_RIGHT:
        visible &= keys[None, :] <= position[:, None] + scores.window_right
    if OPTIONS.HAS_LEFT:
        visible &= keys[None, :] >= position[:, None] - scores.window_left
    return visible


@triton.jit
def key_range(first_position, last_position, seqlen_k, scores, OPTIONS: tl.constexpr):
    """Return the ``KeyRange`` that rows at positions from the first to the last see."""
    first = 0
    last = seqlen_k
    full_first = 0
    full_last = seqlen_k
    if OPTIONS.HAS_LEFT:
        first = tl.maximum(first, first_position - scores.window_left)
        full_first = tl.maximum(full_first, last_position - scores.window_left)
    if OPTIONS.HAS_RIGHT:
        last = tl.maximum(tl.minimum(last, last_position + scores.window_right + 1), 0)
        end = tl.minimum(full_last, first_position + scores.window_right + 1)
        full_last = tl.maximum(end, 0)
    return KeyRange(tl.minimum(first, last), last, full_first, full_last)


@triton.jit
def cut_range(seen, begin, end, BLOCK_N: tl.constexpr):
    """Cut a ``KeyRange`` to the tiles from ``begin`` to ``end``: return them as a ``Walk``.

    Tiles from ``start`` up to ``full_start`` and from ``full_end`` to ``last`` need a mask, those
    between do not. ``step_start`` walks them.
    """
    first = tl.maximum(seen.first, begin * BLOCK_N)
    last = tl.maximum(tl.minimum(seen.last, end * BLOCK_N), first)
    start = first // BLOCK_N * BLOCK_N
    full_end = tl.minimum(seen.full_last, last) // BLOCK_N * BLOCK_N
    full_start = tl.cdiv(tl.minimum(tl.maximum(seen.full_first, first), last), BLOCK_N) * BLOCK_N
    full_end = tl.maximum(full_end, full_start)
    if first >= last:  # nothing, wherever in a tile that is
        start = tl.cdiv(last, BLOCK_N) * BLOCK_N
        full_start = start
        full_end = start
    return Walk(first, last, start, full_start, full_end)
