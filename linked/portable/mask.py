"""The mask of a window, and the walks over tiles that it leaves.

The queries of a sequence see the keys of a window around their own place. The sequence's last query
stands at its last key: query ``i`` at key ``i + seqlen_k - seqlen_q``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Mask(NamedTuple):
    """Which keys the queries of a sequence see.

    The constants ``HAS_LEFT`` and ``HAS_RIGHT`` tell whether the window has these ends.
    """

    seqlen_q: Any
    seqlen_k: Any
    diagonal: Any  # query i stands at key i + diagonal
    left: Any  # keys before the query's own that it sees
    right: Any  # keys after the query's own that it sees


class Walk(NamedTuple):
    """The tokens ``[first, last)`` of the other side that a block sees, in tiles.

    Tiles ``[start, full_start)`` and ``[full_end, last)`` need a mask; tiles between them are seen
    whole. ``step_start`` walks them.
    """

    first: Any
    last: Any
    start: Any
    full_start: Any
    full_end: Any


@triton.jit
def is_visible(rows, cols, end, mask, OPTIONS: tl.constexpr):
    """Tell which keys ``cols`` before ``end`` the queries ``rows`` see; the two broadcast."""
    # no row is negative: this gives the result both of its dimensions
    visible = (cols < end) & (rows >= 0)
    if OPTIONS.HAS_RIGHT:
        visible &= cols <= rows + mask.diagonal + mask.right
    if OPTIONS.HAS_LEFT:
        visible &= cols >= rows + mask.diagonal - mask.left
    return visible


@triton.jit
def seen_keys(first_row, last_row, mask, OPTIONS: tl.constexpr):
    """Return ``(first, last, full_first, full_last)`` of queries ``first_row..last_row``.

    Some of them see keys of ``[first, last)``, all of them see ``[full_first, full_last)``.
    """
    first = 0
    last = mask.seqlen_k
    full_first = 0
    full_last = mask.seqlen_k
    if OPTIONS.HAS_LEFT:
        first = tl.maximum(first, first_row + mask.diagonal - mask.left)
        full_first = tl.maximum(full_first, last_row + mask.diagonal - mask.left)
    if OPTIONS.HAS_RIGHT:
        last = tl.maximum(tl.minimum(last, last_row + mask.diagonal + mask.right + 1), 0)
        full_last = tl.minimum(full_last, first_row + mask.diagonal + mask.right + 1)
        full_last = tl.maximum(full_last, 0)
    return first, last, full_first, full_last


@triton.jit
def key_range(first_row, last_row, mask, OPTIONS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the ``Walk`` over the keys that the queries ``first_row..last_row`` see."""
    first, last, full_first, full_last = seen_keys(first_row, last_row, mask, OPTIONS)
    return walk_over(first, last, full_first, full_last, BLOCK)


@triton.jit
def query_range(first_key, last_key, mask, OPTIONS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the ``Walk`` over the queries that see the keys ``first_key..last_key``.

    The mirror image of ``key_range``; for a tile of keys that exceeds the end, no tile is whole.
    """
    first = 0
    last = mask.seqlen_q
    full_first = 0
    full_last = mask.seqlen_q
    if OPTIONS.HAS_RIGHT:
        first = tl.maximum(first, first_key - mask.diagonal - mask.right)
        full_first = tl.maximum(full_first, last_key - mask.diagonal - mask.right)
    if OPTIONS.HAS_LEFT:
        last = tl.maximum(tl.minimum(last, last_key - mask.diagonal + mask.left + 1), 0)
        full_last = tl.minimum(full_last, first_key - mask.diagonal + mask.left + 1)
        full_last = tl.maximum(full_last, 0)
    if last_key >= mask.seqlen_k:
        full_last = 0
    return walk_over(first, last, full_first, full_last, BLOCK)


@triton.jit
def walk_over(first, last, full_first, full_last, BLOCK: tl.constexpr):
    """Return the ``Walk`` over tokens ``[first, last)``; every row of the block sees the full."""
    start = first // BLOCK * BLOCK
    full_end = full_last // BLOCK * BLOCK
    full_start = tl.cdiv(tl.minimum(full_first, last), BLOCK) * BLOCK
    full_start = tl.maximum(full_start, start)
    return Walk(first, last, start, full_start, tl.maximum(full_end, full_start))


@triton.jit
def count_steps(walk, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Return the number of tiles of a walk that need a mask, or that need none."""
    if MASKED:
        steps = (walk.full_start - walk.start) // BLOCK
        steps += tl.cdiv(tl.maximum(walk.last - walk.full_end, 0), BLOCK)
    else:
        steps = (walk.full_end - walk.full_start) // BLOCK
    return steps


@triton.jit
def step_start(step, walk, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Return the start of a step's tile; masked steps take both ends of the walk in one loop."""
    if MASKED:
        before = (walk.full_start - walk.start) // BLOCK
        is_before = step < before
        begin = walk.start + step * BLOCK
        begin = tl.where(is_before, begin, walk.full_end + (step - before) * BLOCK)
    else:
        begin = walk.full_start + step * BLOCK
    return begin
