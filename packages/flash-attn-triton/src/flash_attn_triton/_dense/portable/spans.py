"""Spans: the keys that each query sees, as one or two ranges, and the walks that they leave.

Their ends are data of the device. So a block of queries finds its tiles of keys from the spans of
its rows, and a block of keys finds its tiles of queries in a table of such findings.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..._linked.portable.mask import Walk, walk_over

# tiles of queries that one step of a search in the table reads
TILES = tl.constexpr(128)
# numbers of a ``Hull``
HULL = tl.constexpr(4)


class Span(NamedTuple):
    """One span of each row, shaped like the rows. The spans of rows are a tuple of one or two."""

    start: Any
    end: Any


class Hull(NamedTuple):
    """What a block of rows sees by spans of one index: some row ``[first, last)``, every row full.

    An empty hull is ``[0, 0)``.
    """

    first: Any
    last: Any
    full_first: Any
    full_last: Any


@triton.jit
def load_spans(spans_ptr, rows, seqlen_q, seqlen_k, COUNT: tl.constexpr):
    """Load the ``COUNT`` spans of rows, cut to the keys there are; rows past the end see none."""
    at = spans_ptr + rows * (2 * COUNT)
    inside = rows < seqlen_q
    spans = (_load_span(at, inside, seqlen_k),)
    if COUNT == 2:
        spans = (spans[0], _load_span(at + 2, inside, seqlen_k))
    return spans


@triton.jit
def _load_span(at, inside, seqlen_k):
    start = tl.load(at, mask=inside, other=0)
    end = tl.load(at + 1, mask=inside, other=0)
    start = tl.minimum(tl.maximum(start, 0), seqlen_k)
    return Span(start, tl.minimum(tl.maximum(end, 0), seqlen_k))


@triton.jit
def is_in_spans(cols, spans):
    """Tell which keys ``cols`` lie in the spans of rows; the two broadcast."""
    inside = (cols >= spans[0].start) & (cols < spans[0].end)
    if len(spans) == 2:
        inside |= (cols >= spans[1].start) & (cols < spans[1].end)
    return inside


@triton.jit
def sees_any(spans):
    """Tell which rows see a key."""
    seen = spans[0].start < spans[0].end
    if len(spans) == 2:
        seen |= spans[1].start < spans[1].end
    return seen


@triton.jit
def spans_down(spans):
    """Return the spans of rows that run down a tile."""
    turned = (Span(spans[0].start[:, None], spans[0].end[:, None]),)
    if len(spans) == 2:
        turned = (turned[0], Span(spans[1].start[:, None], spans[1].end[:, None]))
    return turned


@triton.jit
def spans_along(spans):
    """Return the spans of rows that run along a tile."""
    turned = (Span(spans[0].start[None, :], spans[0].end[None, :]),)
    if len(spans) == 2:
        turned = (turned[0], Span(spans[1].start[None, :], spans[1].end[None, :]))
    return turned


@triton.jit
def hulls_of(spans, rows, seqlen_q, seqlen_k):
    """Return the ``Hull`` of each span of a block of rows.

    Full ranges that meet become one, which both hulls then have.
    """
    inside = rows < seqlen_q
    a = _hull_of(spans[0], inside, seqlen_k)
    hulls = (a,)
    if len(spans) == 2:
        b = _hull_of(spans[1], inside, seqlen_k)
        first = tl.minimum(a.full_first, b.full_first)
        last = tl.maximum(a.full_last, b.full_last)
        meet = tl.maximum(a.full_first, b.full_first) <= tl.minimum(a.full_last, b.full_last)
        meet &= (a.full_first < a.full_last) & (b.full_first < b.full_last)
        hulls = (_with_full(a, meet, first, last), _with_full(b, meet, first, last))
    return hulls


@triton.jit
def _hull_of(span, inside, seqlen_k):
    start, end = span
    seen = start < end
    last = _greatest(tl.where(seen, end, 0))
    first = tl.minimum(-_greatest(tl.where(seen, -start, -seqlen_k)), last)
    full_first = _greatest(tl.where(inside, start, 0))
    full_last = tl.minimum(-_greatest(tl.where(inside, -end, -seqlen_k)), last)
    return Hull(first, last, full_first, full_last)


@triton.jit
def _greatest(numbers):
    """Return the greatest of some numbers.

    In 64 bits: those of 32 bits reduce into uniform registers, of which the ptxas of Triton 3.6
    for sm_100 read some that it had not set.
    """
    return tl.max(numbers.to(tl.int64), 0).to(tl.int32)


@triton.jit
def _with_full(hull, condition, first, last):
    first = tl.where(condition, first, hull.full_first)
    return Hull(hull.first, hull.last, first, tl.where(condition, last, hull.full_last))


@triton.jit
def span_walk(hulls, PART: tl.constexpr, BLOCK: tl.constexpr):
    """Return walk ``PART`` of the keys in the hulls of a block of queries; no tile is in two walks.

    With one hull there is one walk. Of two hulls, walk 0 is the lower one up to the tile in which
    the higher one begins, and walk 1 the rest.
    """
    first, last, full_first, full_last = hulls[0]
    if len(hulls) == 2:
        a, b = hulls
        # an empty hull follows the other
        a_first, a_last = _or_after(a, b.last)
        b_first, b_last = _or_after(b, a.last)
        is_a = a_first <= b_first
        last = tl.where(is_a, a_last, b_last)
        full_first = tl.where(is_a, a.full_first, b.full_first)
        full_last = tl.where(is_a, a.full_last, b.full_last)
        first = tl.minimum(a_first, b_first)
        begin = tl.maximum(a_first, b_first)
        cut = begin // BLOCK * BLOCK
        if PART == 0:
            last = tl.minimum(last, cut)
        else:
            is_apart = last <= cut
            first = tl.where(is_apart, begin, tl.maximum(cut, first))
            last = tl.maximum(tl.where(is_apart, 0, last), tl.where(is_a, b_last, a_last))
            # the longer of the two full ranges
            low, high = tl.maximum(full_first, cut), full_last
            full_first = tl.where(is_a, b.full_first, a.full_first)
            full_last = tl.where(is_a, b.full_last, a.full_last)
            is_lower = high - low > full_last - full_first
            full_first = tl.where(is_lower, low, full_first)
            full_last = tl.where(is_lower, high, full_last)
    return walk_over(first, last, full_first, tl.minimum(full_last, last), BLOCK)


@triton.jit
def _or_after(hull, end):
    """Return the ends of a hull, or, if it is empty, ``end`` twice."""
    is_empty = hull.first >= hull.last
    return tl.where(is_empty, end, hull.first), tl.where(is_empty, end, hull.last)


@triton.jit
def store_hulls(table_ptr, slot, hulls):
    """Store the hulls of a block of queries as entry ``slot`` of the table."""
    at = table_ptr + slot * (len(hulls) * HULL)
    _store_hull(at, hulls[0])
    if len(hulls) == 2:
        _store_hull(at + HULL, hulls[1])


@triton.jit
def _store_hull(at, hull):
    tl.store(at, hull.first)
    tl.store(at + 1, hull.last)
    tl.store(at + 2, hull.full_first)
    tl.store(at + 3, hull.full_last)


@triton.jit
def run_of_tiles(
    table_ptr,
    begin,
    tiles,
    first_key,
    seqlen_q,
    MASKED: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return the next tiles ``[start, end)`` of queries that see a tile of keys, from ``begin`` on.

    ``MASKED`` asks for those of which some rows see some keys, else for those that see it whole. If
    there is none, ``start`` is at least ``tiles``. ``table_ptr`` is that of the sequence.
    """
    start = tiles
    at = begin
    while (start >= tiles) & (at < tiles):
        index = at + tl.arange(0, TILES)
        found = _is_of_kind(
            table_ptr, index, tiles, first_key, seqlen_q, MASKED, COUNT, BLOCK_M, BLOCK_N
        )
        start = tl.min(tl.where(found, index, tiles), 0)
        at += TILES
    end = tiles
    at = start
    while (end >= tiles) & (at < tiles):
        index = at + tl.arange(0, TILES)
        found = _is_of_kind(
            table_ptr, index, tiles, first_key, seqlen_q, MASKED, COUNT, BLOCK_M, BLOCK_N
        )
        end = tl.min(tl.where(found, tiles, index), 0)
        at += TILES
    return start, tl.minimum(end, tiles)


@triton.jit
def _is_of_kind(
    table_ptr,
    index,
    tiles,
    first_key,
    seqlen_q,
    MASKED: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Tell which tiles of queries see a tile of keys whole, or, if ``MASKED``, in part."""
    seen = index < 0
    whole = seen
    last_key = first_key + BLOCK_N
    for i in tl.static_range(COUNT):
        at = table_ptr + index * (COUNT * HULL) + i * HULL
        first = tl.load(at, mask=index < tiles, other=0)
        last = tl.load(at + 1, mask=index < tiles, other=0)
        seen |= (first < last_key) & (last > first_key)
        full_first = tl.load(at + 2, mask=index < tiles, other=0)
        full_last = tl.load(at + 3, mask=index < tiles, other=0)
        whole |= (full_first <= first_key) & (full_last >= last_key)
    # rows past the end call for a mask as they are loaded
    whole &= (index + 1) * BLOCK_M <= seqlen_q
    if MASKED:
        whole = seen & (whole == 0)
    return whole


@triton.jit
def walk_of_run(start, end, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """Return the ``Walk`` over the tiles ``[start, end)``, which all need a mask, or none does."""
    first, last = start * BLOCK, end * BLOCK
    full_first = last if MASKED else first
    return Walk(first, last, first, full_first, last)
