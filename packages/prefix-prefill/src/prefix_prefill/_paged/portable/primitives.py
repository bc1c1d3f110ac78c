"""Functions of the attention kernel: loads through a page table, logits, masks, ranges of keys.

Scores are kept in base 2 ("logits" below are natural scores times log2(e)), because the hardware
exponential is ``exp2``.
"""

import triton
import triton.language as tl

from ..._linked.portable.mask import Mask, Walk, seen_keys
from ..._linked.portable.primitives import LOG2E, tanh
from .structures import KeyRange


@triton.jit
def head_of(ptr, stride, head, LAYOUT: tl.constexpr):
    """Return the pointer to one head of a cache, in words if it is read in words."""
    if LAYOUT.WORD_BITS == 16:
        ptr = ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    return ptr + head * stride


@triton.jit
def offsets_of(rows, strides):
    """Return the offset of each row of a tile in a tensor with a row per token and query head."""
    return rows.token_64 * strides.token + rows.head * strides.head


@triton.jit
def _lanes_of(BLOCK: tl.constexpr, EACH: tl.constexpr):
    """Return the first key of each run of ``EACH`` keys of a tile, ``[BLOCK // EACH]``."""
    return tl.arange(0, BLOCK // EACH) * EACH


@triton.jit
def look_up(
    table, begin, is_wanted, PAGE: tl.constexpr, BLOCK: tl.constexpr, EACH: tl.constexpr = 1
):
    """Return the page number of every run of ``EACH`` keys, or one if no tile crosses pages.

    Only entries with ``is_wanted`` are read.
    """
    lane = _lanes_of(BLOCK, EACH)  # [BLOCK // EACH]
    if PAGE == 0:
        pages = 0  # dense: nothing to look up
    elif PAGE % BLOCK == 0:  # every tile has one page
        pages = tl.load(table.base + (begin // PAGE).to(tl.int64) * table.stride, mask=is_wanted)
    else:
        if BLOCK % PAGE == 0:  # the term with `lane` is the same in every step
            entries = table.base + (begin // PAGE).to(tl.int64) * table.stride
            entries += (lane // PAGE).to(tl.int64) * table.stride
        else:
            entries = table.base + ((begin + lane) // PAGE).to(tl.int64) * table.stride
        pages = tl.load(entries, mask=is_wanted, other=0)  # [BLOCK // EACH]
    return pages


@triton.jit
def is_looked_up(
    begin,
    step,
    steps,
    walk,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
    EACH: tl.constexpr = 1,
):
    """Return which entries of the page table a step reads: only entries with keys of the walk."""
    lane = _lanes_of(BLOCK, EACH)  # [BLOCK // EACH]
    if PAGE > 0 and PAGE % BLOCK == 0:
        wanted = step < steps  # every tile has one page, and keys of the walk
    elif MASKED:
        wanted = (begin + lane >= walk.first) & (begin + lane < walk.last)
    else:
        wanted = lane < (steps - step) * BLOCK  # all, but none after the last step
    return wanted


@triton.jit
def rows_of(pages, begin, vectors, PAGE: tl.constexpr, BLOCK: tl.constexpr, EACH: tl.constexpr = 1):
    """Return the offset of every run of ``EACH`` keys in its head, in pages or dense (PAGE 0).

    The sums are ordered so that most terms are the same in every step or for the whole tile.
    """
    lane = _lanes_of(BLOCK, EACH)  # [BLOCK // EACH]
    stride_page, stride_slot = vectors.stride_page, vectors.stride_slot
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
def _pointers_along_runs(vectors, rows, cols, LAYOUT: tl.constexpr, COLUMNS: tl.constexpr):
    """Return pointers to rows x cols of vectors.

    The launcher guarantees that every run begins on a multiple of ``BYTES``, and that it has no
    gaps if ``UNIT``.
    """
    RUN: tl.constexpr = LAYOUT.RUN
    BYTES: tl.constexpr = LAYOUT.BYTES
    # columns first: their term is the same in every step
    place = (cols % RUN if RUN < COLUMNS.HEAD_DIM else cols).to(tl.int64)  # [BLOCK_D]
    if not LAYOUT.UNIT:
        place *= vectors.stride_number
    if RUN < COLUMNS.HEAD_DIM:
        place += (cols // RUN).to(tl.int64) * vectors.stride_run
    pointers = (vectors.base + place)[None, :] + rows[:, None]  # [BLOCK, BLOCK_D]
    if LAYOUT.UNIT:
        pointers = tl.multiple_of(pointers, [BYTES, BYTES])
    return pointers


@triton.jit
def _pointers_along_slots(vectors, rows, cols, LAYOUT: tl.constexpr):
    """Return pointers to rows x cols of vectors; ``SLOT_RUN`` neighbouring rows are contiguous."""
    RUN: tl.constexpr = LAYOUT.SLOT_RUN
    BYTES: tl.constexpr = LAYOUT.BYTES
    # the launcher guarantees that a run is within a page and begins on a multiple of BYTES
    rows = tl.max_contiguous(rows, [RUN])
    # [BLOCK, BLOCK_D]
    pointers = vectors.base + rows[:, None] + cols.to(tl.int64)[None, :] * vectors.stride_number
    return tl.multiple_of(tl.max_contiguous(pointers, [RUN, 1]), [BYTES, BYTES])


@triton.jit
def load_rows(
    vectors, rows, inside, cols, LAYOUT: tl.constexpr, COLUMNS: tl.constexpr, MASKED: tl.constexpr
):
    """Load rows x cols of vectors; with ``MASKED``, rows that are not ``inside`` are 0."""
    if LAYOUT.SLOT_RUN > 0:
        pointers = _pointers_along_slots(vectors, rows, cols, LAYOUT)
    else:
        pointers = _pointers_along_runs(vectors, rows, cols, LAYOUT, COLUMNS)
    if MASKED:
        tile = tl.load(
            pointers, mask=inside[:, None] & (cols < COLUMNS.HEAD_DIM)[None, :], other=0.0
        )
    elif COLUMNS.HEAD_DIM != COLUMNS.BLOCK_D:
        tile = tl.load(pointers, mask=(cols < COLUMNS.HEAD_DIM)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def matched(x, other):
    """Widen ``x`` to the dtype in which it is multiplied by ``other``; nothing is rounded."""
    if x.dtype.primitive_bitwidth == 8 and x.dtype != other.dtype:
        if other.dtype.primitive_bitwidth == 8:  # two different FP8 formats
            x = x.to(tl.bfloat16)
        else:
            x = x.to(other.dtype)
    return x


@triton.jit
def logits_of(products, queries, keys, scale, softcap, OPTIONS: tl.constexpr):
    """Turn raw products into base-2 logits: scale, softcap, ALiBi, in that order."""
    if OPTIONS.HAS_SOFTCAP:
        logits = tanh(products * (scale / softcap)) * (softcap * LOG2E)
    else:
        logits = products * (scale * LOG2E)  # [BLOCK_M, BLOCK_N]
    if queries.slopes is not None:
        distance = (keys[None, :] - queries.position[:, None]).to(tl.float32)  # [BLOCK_M, BLOCK_N]
        if not OPTIONS.SIGNED_ALIBI:
            distance = -tl.abs(distance)
        logits += distance * (queries.slopes * LOG2E)[:, None]
    return logits


@triton.jit
def is_visible(queries, keys, last, scores, OPTIONS: tl.constexpr):
    """Return which keys each row sees, ``[BLOCK_M, BLOCK_N]``."""
    position = queries.position
    visible = (keys < last)[None, :] & (position == position)[:, None]  # [BLOCK_M, BLOCK_N]
    if OPTIONS.HAS_RIGHT:
        visible &= keys[None, :] <= position[:, None] + scores.window_right
    if OPTIONS.HAS_LEFT:
        visible &= keys[None, :] >= position[:, None] - scores.window_left
    if queries.tree is not None:
        new = keys - queries.first_new  # [BLOCK_N]
        low, high = queries.tree.to(tl.int32), (queries.tree >> 32).to(tl.int32)  # [BLOCK_M]
        # [BLOCK_M, BLOCK_N]; int64 would take twice the registers
        word = tl.where((new < 32)[None, :], low[:, None], high[:, None])
        bit = word >> (tl.maximum(new, 0) & 31)[None, :] & 1
        visible &= (new < 0)[None, :] | (bit != 0)
    return visible


@triton.jit
def is_on_branch(queries, keys):
    """Return which keys some row of a tree sees, without the bounds of the walk, ``[BLOCK_N]``."""
    new = keys - queries.first_new  # [BLOCK_N]
    bits = queries.branches >> tl.minimum(tl.maximum(new, 0), 63).to(tl.int64)
    return (new < 0) | ((bits & 1) != 0)


@triton.jit
def key_range(positions, first_new, begin, end, problem, OPTIONS: tl.constexpr):
    """Return the ``KeyRange`` of a tile's rows in a source: keys ``[begin, end)`` of the sequence.

    It counts from ``begin``. With a tree all keys from ``first_new`` on need a mask.
    """
    scores = problem.numbers.scores
    first_position, last_position = positions.first - begin, positions.last - begin
    mask = Mask(None, end - begin, 0, scores.window_left, scores.window_right)
    first, last, full_first, full_last = seen_keys(first_position, last_position, mask, OPTIONS)
    if problem.tensors.tree_mask_ptr is not None:
        full_last = tl.minimum(full_last, tl.maximum(first_new - begin, 0))
    return KeyRange(tl.minimum(first, last), last, full_first, full_last)


@triton.jit
def cut_range(seen, begin, end, BLOCK_N: tl.constexpr):
    """Cut a ``KeyRange`` to the tiles ``[begin, end)``; return them as a ``Walk``."""
    first = tl.maximum(seen.first, begin * BLOCK_N)
    last = tl.maximum(tl.minimum(seen.last, end * BLOCK_N), first)
    start = first // BLOCK_N * BLOCK_N
    full_end = tl.minimum(seen.full_last, last) // BLOCK_N * BLOCK_N
    full_start = tl.cdiv(tl.minimum(tl.maximum(seen.full_first, first), last), BLOCK_N) * BLOCK_N
    full_end = tl.maximum(full_end, full_start)
    if first >= last:  # no tiles, even if `first` is inside a tile
        start = tl.cdiv(last, BLOCK_N) * BLOCK_N
        full_start = start
        full_end = start
    return Walk(first, last, start, full_start, full_end)


@triton.jit
def tiles_of(seen, BLOCK_N: tl.constexpr):
    """Return the first tile of a ``KeyRange``, and how many tiles there are."""
    begin = seen.first // BLOCK_N
    return begin, tl.where(seen.first < seen.last, tl.cdiv(seen.last, BLOCK_N) - begin, 0)
