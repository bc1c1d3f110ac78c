"""Kernels that make lists of a layout: mark the kept blocks as bits, count them, write the items.

Bits replace a sort: they come out in order, and repeated columns are one bit. One bit per block of
the grid is little compared with the tensors that attention reads. A *line* is the bits of one
member of an owner: a row of blocks with one bit per column, or a column with one bit per item.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..._linked.launch.entries import entry
from .arguments import BitNumbers, BitOptions, BitTensors, ListNumbers, ListOptions, ListTensors

# as in ``_layout/lists.py``
COUNTED = tl.constexpr(1 << 21)


@triton.jit
def _row_of(slot, crow_ptr, rows, steps):
    """Return the row that an entry of ``col`` belongs to; -1 before the first row."""
    low = slot * 0
    high = low + rows + 1
    for _ in range(steps):
        middle = (low + high) // 2
        is_open = low < high
        begin = tl.load(crow_ptr + middle, mask=is_open, other=0)
        is_behind = is_open & (begin <= slot)
        high = tl.where(is_open & (begin > slot), middle, high)
        low = tl.where(is_behind, middle + 1, low)
    return low - 1


@entry(triton.jit)
def bit_kernel(tensors: BitTensors, numbers: BitNumbers, OPTIONS: BitOptions):
    """``bits[line, item] = 1`` of all kept blocks; a program reads ``BLOCK`` entries of one head.

    Each piece of a block has its own bit.
    """
    nnz, rows, pieces = numbers.nnz, numbers.rows, numbers.pieces
    head = tl.program_id(0) // numbers.chunks
    first = tl.program_id(0) % numbers.chunks * OPTIONS.BLOCK
    slot = first + tl.arange(0, OPTIONS.BLOCK)  # [BLOCK]
    head_64 = head.to(tl.int64)
    row = _row_of(slot, tensors.crow_ptr + head_64 * (rows + 1), rows, numbers.steps)
    valid = (slot < nnz) & (row >= 0) & (row < rows)
    col = tl.load(tensors.col_ptr + head_64 * nnz + slot, mask=valid, other=-1)
    valid &= (col >= 0) & (col < numbers.cols)
    for part_q in range(pieces.in_q):
        line_q = row * pieces.in_q + part_q
        for part_k in range(pieces.in_k):
            line_k = col * pieces.in_k + part_k
            kept = valid
            if OPTIONS.IS_CAUSAL:
                end_q = (line_q + 1).to(tl.int64) * pieces.tokens_q
                kept &= line_k.to(tl.int64) * pieces.tokens_k < end_q
            if OPTIONS.BY_KEY:
                line = line_k
                item = line_q // pieces.side * numbers.group + head % numbers.group
                bit = item.to(tl.int64) * pieces.side + line_q % pieces.side
            else:
                line = line_q
                bit = line_k.to(tl.int64)
            line += head // numbers.group * numbers.lines
            at = line.to(tl.int64) * numbers.words + bit // 32
            one = tl.full([OPTIONS.BLOCK], 1, tl.int32) << (bit % 32).to(tl.int32)
            tl.atomic_or(tensors.bits_ptr + at, one, mask=kept, sem="relaxed")


@triton.jit
def _is_in_rule(tile, item, tensors, numbers, OPTIONS: tl.constexpr):
    """Say in which items the token rule hides nothing from an owner."""
    if OPTIONS.BY_KEY:
        row = item // numbers.group
        first = item * 0 + tile * numbers.span
        last = first + numbers.span - 1
        return _is_between(first, last, row, item < numbers.items, tensors.common_ptr)
    first = item * numbers.block
    last = first + numbers.block - 1
    ROWS: tl.constexpr = 1 if OPTIONS.IS_PACKED else OPTIONS.MEMBERS
    is_whole = item >= 0
    for i in tl.static_range(ROWS):
        row = tile * ROWS + i
        is_whole &= _is_between(first, last, row, row < numbers.lines, tensors.common_ptr)
    return is_whole


@triton.jit
def _is_between(first, last, row, is_there, common_ptr):
    """Say whether all rows of a row of blocks see the keys from ``first`` to ``last``."""
    low = tl.load(common_ptr + 2 * row, mask=is_there, other=1)
    high = tl.load(common_ptr + 2 * row + 1, mask=is_there, other=0)
    return (first >= low) & (last <= high)


@triton.jit
def _look_up(owner, chunk, tensors, numbers, OPTIONS: tl.constexpr):
    """Return which members of an owner see each item of a chunk, and which items need no mask.

    Both are ``[OPTIONS.BLOCK]``: member bits, which are 0 if no member sees the item, and booleans.
    """
    tile = owner % numbers.owners
    index = owner // numbers.owners
    item = chunk * OPTIONS.BLOCK + tl.arange(0, OPTIONS.BLOCK)  # [BLOCK]
    word = tensors.bits_ptr + item // 32
    if OPTIONS.IS_PACKED:  # members are heads
        first = index % numbers.packs * OPTIONS.MEMBERS
        held = tl.minimum(numbers.group - first, OPTIONS.MEMBERS)
        line = (index // numbers.packs * numbers.group + first) * numbers.lines + tile
        apart = numbers.lines
        there = tl.minimum(held, numbers.heads - index // numbers.packs * numbers.group - first)
        there = tl.where(tile < numbers.lines, there, 0)
    else:
        first = tile * OPTIONS.MEMBERS
        held = first * 0 + OPTIONS.MEMBERS
        line = index * numbers.lines + first
        apart = held * 0 + 1
        there = numbers.lines - first
    seen = tl.zeros([OPTIONS.BLOCK], tl.int32)
    for member in tl.static_range(OPTIONS.MEMBERS):
        at = (line + member * apart).to(tl.int64) * numbers.words
        end = tl.where(there > member, numbers.items, 0)
        bits = tl.load(word + at, mask=item < end, other=0)
        seen |= (bits >> item % 32 & 1) << member
    is_whole = seen == (tl.full([], 1, tl.int32) << held) - 1
    if OPTIONS.IS_CAUSAL:
        # whole items do not touch the diagonal: before the first position, or after the last key
        if OPTIONS.BY_KEY:
            last = (tile + 1).to(tl.int64) * numbers.span - 1
            is_whole &= item >= tl.cdiv(last, numbers.block) * numbers.group
        else:
            is_whole &= item < (tile.to(tl.int64) * numbers.span + 1) // numbers.block
    if tensors.common_ptr is not None:
        is_whole &= _is_in_rule(tile, item, tensors, numbers, OPTIONS)
    return seen, is_whole & (seen != 0)


@entry(triton.jit)
def list_kernel(tensors: ListTensors, numbers: ListNumbers, OPTIONS: ListOptions):
    """``counts[owner, c] = len(items of chunk c)``; with ``WRITES``, write the items to ``ends``.

    ``counts`` is [owners of all lists, parts, chunks]. The first part is the items that need no
    mask; the rest is one part, or three with ``HALVES``.
    """
    PARTS: tl.constexpr = 4 if OPTIONS.HALVES else 2
    chunks = numbers.chunks
    owner = tl.program_id(0) // chunks
    chunk = tl.program_id(0) % chunks
    seen, is_whole = _look_up(owner, chunk, tensors, numbers, OPTIONS)
    part = tl.where(is_whole, 0, 1)
    if OPTIONS.HALVES:
        FIRST: tl.constexpr = (1 << OPTIONS.MEMBERS // 2) - 1
        part = tl.where((seen & FIRST) == 0, 2, part)
        part = tl.where(seen <= FIRST, 3, part)
    part = tl.where(seen != 0, part, PARTS)
    place = owner.to(tl.int64) * PARTS * chunks + chunk
    if not OPTIONS.WRITES:
        for i in tl.static_range(PARTS):
            tl.store(tensors.counts_ptr + place + i * chunks, tl.sum((part == i).to(tl.int32), 0))
    else:
        target = part.to(tl.int64)
        for i in tl.static_range(PARTS):
            start = tl.load(tensors.ends_ptr + place + i * chunks)
            mine = part == i
            target = tl.where(mine, start + tl.cumsum(mine.to(tl.int32), 0) - 1, target)
        if chunk == 0:
            start = tl.load(tensors.ends_ptr + place)
            tl.store(tensors.begin_ptr + owner, start)
            second = tl.load(tensors.ends_ptr + place + chunks)
            counts = second - start
            if OPTIONS.HALVES:
                second = tl.load(tensors.ends_ptr + place + 2 * chunks)
                first = tl.load(tensors.ends_ptr + place + 3 * chunks)
                end = tl.load(tensors.ends_ptr + place + 4 * chunks)
                counts += ((end - first) * COUNTED + (first - second)) * COUNTED
            tl.store(tensors.whole_ptr + owner, counts)
        item = chunk * OPTIONS.BLOCK + tl.arange(0, OPTIONS.BLOCK)  # [BLOCK]
        tl.store(tensors.items_ptr + target, item, mask=seen != 0)
        tl.store(tensors.members_ptr + target, seen, mask=seen != 0)
        # all programs together set unused elements to 0
        programs = tl.num_programs(0)
        total = tl.load(tensors.ends_ptr + programs.to(tl.int64) * PARTS)
        if tl.program_id(0) == 0:
            tl.store(tensors.begin_ptr + programs // chunks, total)
        nothing = tl.zeros([OPTIONS.BLOCK], tl.int32)
        first = total + tl.program_id(0).to(tl.int64) * OPTIONS.BLOCK
        for at in range(first, numbers.bound, programs.to(tl.int64) * OPTIONS.BLOCK):
            rest = at + tl.arange(0, OPTIONS.BLOCK)
            tl.store(tensors.items_ptr + rest, nothing, mask=rest < numbers.bound)
            tl.store(tensors.members_ptr + rest, nothing, mask=rest < numbers.bound)
