"""How the Hopper backward pairs blocks of keys: which items see each block, and in which order.

The *cells* of a block and an item are one bit per pair of pieces: whether the item's piece sees the
block's piece. They are 0 if the item does not see the block.
"""

import triton
import triton.language as tl

from . import arguments

RANKED = tl.constexpr(arguments.RANKED)


@triton.jit
def _field(piece, item, inside, tensors, numbers, SIDE: tl.constexpr):
    """Return bits of the items' pieces that see one piece of keys, ``[BLOCK]``."""
    bit = item * SIDE
    line = tensors.bits_ptr + piece.to(tl.int64) * numbers.words
    word = tl.load(line + bit // 32, mask=inside, other=0)
    return (word >> bit % 32) & ((1 << SIDE) - 1)


@triton.jit
def _is_apart(block, item, inside, tensors, numbers, SIDE: tl.constexpr):
    """Say which items see at most half of the pieces of a block of neighbours, ``[BLOCK]``."""
    lines = item * 0
    for slot in tl.static_range(SIDE):
        field = _field(block * SIDE + slot, item, inside, tensors, numbers, SIDE)
        lines += (field != 0).to(tl.int32)
    return 2 * lines <= SIDE


@triton.jit
def _cells(block, item, inside, tensors, numbers, SIDE: tl.constexpr):
    """Return the cells of a block, ``[BLOCK]``."""
    if SIDE == 1:
        return _field(block, item, inside, tensors, numbers, SIDE)
    at = tensors.cells_ptr + block.to(tl.int64) * numbers.items
    return tl.load(at + item, mask=inside, other=0)


@triton.jit
def _neighbour(block):
    return block + 1 - block % 2 * 2


@triton.jit
def _is_moved(block, tensors, numbers):
    """Return 1 if the items that see a block without its neighbour move to a further owner."""
    other = _neighbour(block)
    mine = tl.load(tensors.alone_ptr + block)
    others = tl.load(tensors.alone_ptr + other)
    is_alike = tl.load(tensors.alike_ptr + tl.load(tensors.rank_ptr + block) // 2) != 0
    other_is = tl.load(tensors.alike_ptr + tl.load(tensors.rank_ptr + other) // 2) != 0
    # if one of two neighbours moves, the other has no list to walk at the same time
    left = tl.where((others > numbers.kept) & other_is, 0, others)
    is_moved = (mine > numbers.kept) & (is_alike | (mine - left > numbers.kept))
    return tl.where(is_moved, 1, 0)


@triton.jit
def owned(owner, half: tl.constexpr, tensors, numbers):
    """Return one of the two blocks of an owner, and whether items of it were moved."""
    is_further = owner >= numbers.pairs
    at = tl.where(is_further, 2 * (owner - numbers.pairs) + half, 0)
    block = tl.where(is_further, tl.load(tensors.order_ptr + at), 2 * owner + half)
    return block, _is_moved(block, tensors, numbers)


@triton.jit
def owns(owner, moved, numbers):
    """Say whether an owner owns the block; a further owner does only if items were moved."""
    return (owner < numbers.pairs) | (moved != 0)


@triton.jit
def walked(owner, half: tl.constexpr, item, inside, tensors, numbers, SIDE: tl.constexpr):
    """Return the cells that an owner walks, of one of its two blocks, ``[BLOCK]``."""
    block, moved = owned(owner, half, tensors, numbers)
    is_further = tl.where(owner >= numbers.pairs, 1, 0)
    alone = tl.where(moved == is_further, -1, 0)
    shared = is_further - 1
    mine = _cells(block, item, inside, tensors, numbers, SIDE)
    other = _cells(_neighbour(block), item, inside, tensors, numbers, SIDE)
    return mine & tl.where(other == 0, alone, shared)


@triton.jit
def find_apart(pid, tensors, numbers, OPTIONS: tl.constexpr):
    """Count for each piece the items that see it and at most half of its block."""
    for slot in tl.static_range(OPTIONS.SIDE):
        count = tl.zeros([OPTIONS.BLOCK], tl.int32)
        last = tl.zeros([OPTIONS.BLOCK], tl.int32)
        for begin in range(0, numbers.items, OPTIONS.BLOCK):
            item = begin + tl.arange(0, OPTIONS.BLOCK)
            inside = item < numbers.items
            field = _field(pid * OPTIONS.SIDE + slot, item, inside, tensors, numbers, OPTIONS.SIDE)
            found = (field != 0) & _is_apart(pid, item, inside, tensors, numbers, OPTIONS.SIDE)
            count += found.to(tl.int32)
            last = tl.maximum(last, tl.where(found, item + 1, 0))
        tl.store(tensors.alone_ptr + pid * OPTIONS.SIDE + slot, tl.sum(count, 0))
        tl.store(tensors.last_ptr + pid * OPTIONS.SIDE + slot, tl.max(last, 0))


@triton.jit
def put_in_order(pid, tensors, numbers, OPTIONS: tl.constexpr):
    """Sort a list's blocks: those that many items see alone come first, by the last such item.

    The rank of a block is the number of blocks before it; there are few blocks.
    """
    ROWS: tl.constexpr = RANKED
    COLS: tl.constexpr = 128
    chunks = tl.cdiv(numbers.sorted, ROWS)
    base = pid // chunks * numbers.sorted
    place = pid % chunks * ROWS + tl.arange(0, ROWS)  # [ROWS]
    inside = place < numbers.sorted
    count = tl.load(tensors.alone_ptr + base + place, mask=inside, other=0)
    last = tl.load(tensors.last_ptr + base + place, mask=inside, other=0)
    key = tl.where(count > numbers.kept, 0, numbers.items + 1) + last
    rank = tl.zeros([ROWS], tl.int32)
    for begin in range(0, numbers.sorted, COLS):
        other = begin + tl.arange(0, COLS)  # [COLS]
        there = other < numbers.sorted
        counts = tl.load(tensors.alone_ptr + base + other, mask=there, other=0)
        others = tl.load(tensors.last_ptr + base + other, mask=there, other=0)
        others += tl.where(counts > numbers.kept, 0, numbers.items + 1)
        others = tl.where(there, others, 2 * numbers.items + 3)
        is_ahead = others[None, :] < key[:, None]
        is_tie = (others[None, :] == key[:, None]) & (other[None, :] < place[:, None])
        rank += tl.sum((is_ahead | is_tie).to(tl.int32), 1)
    tl.store(tensors.rank_ptr + base + place, base + rank, mask=inside)
    tl.store(tensors.order_ptr + base + rank, base + place, mask=inside)


@triton.jit
def fill_cells(pid, tensors, numbers, OPTIONS: tl.constexpr):
    """Write the cells of a block of neighbouring pieces, or of pieces from any position."""
    SIDE: tl.constexpr = OPTIONS.SIDE
    half = numbers.in_blocks // 2
    index = pid // numbers.in_blocks
    local = pid % numbers.in_blocks
    is_gathered = tl.where(local >= half, 1, 0)
    at = tensors.cells_ptr + pid.to(tl.int64) * numbers.items
    highest = is_gathered * 0 - 1
    for slot in tl.static_range(SIDE):
        place = index * numbers.in_list + local % half * SIDE + slot
        piece = tl.where(is_gathered != 0, tl.load(tensors.order_ptr + place), place)
        is_many = tl.load(tensors.alone_ptr + piece) > numbers.kept
        # masks for items that see at most half of a block, and for all other items
        apart = tl.where(is_many, 0 - is_gathered, is_gathered - 1)
        rest = is_gathered - 1
        used = tl.zeros([OPTIONS.BLOCK], tl.int32)
        for begin in range(0, numbers.items, OPTIONS.BLOCK):
            item = begin + tl.arange(0, OPTIONS.BLOCK)
            inside = item < numbers.items
            is_apart = _is_apart(piece // SIDE, item, inside, tensors, numbers, SIDE)
            field = _field(piece, item, inside, tensors, numbers, SIDE)
            field &= tl.where(is_apart, apart, rest)
            used |= field
            cells = field << slot * SIDE
            if slot > 0:
                cells |= tl.load(at + item, mask=inside, other=0)
            tl.store(at + item, cells, mask=inside)
        named = tl.where(tl.max(used, 0) > 0, piece % numbers.in_list, -1)
        tl.store(tensors.pieces_ptr + pid * SIDE + slot, named)
        highest = tl.maximum(highest, named)
    tl.store(tensors.lasts_ptr + pid, tl.where(highest < 0, -1, highest // SIDE))


@triton.jit
def find_alone(pid, tensors, numbers, OPTIONS: tl.constexpr):
    """Count for two neighbours the items that see one without the other."""
    for half in tl.static_range(2):
        block = 2 * pid + half
        count = tl.zeros([OPTIONS.BLOCK], tl.int32)
        last = tl.zeros([OPTIONS.BLOCK], tl.int32)
        used = tl.zeros([OPTIONS.BLOCK], tl.int32)
        for begin in range(0, numbers.items, OPTIONS.BLOCK):
            item = begin + tl.arange(0, OPTIONS.BLOCK)
            inside = item < numbers.items
            mine = _cells(block, item, inside, tensors, numbers, OPTIONS.SIDE)
            other = _cells(_neighbour(block), item, inside, tensors, numbers, OPTIONS.SIDE)
            found = (mine != 0) & (other == 0)
            count += found.to(tl.int32)
            last = tl.maximum(last, tl.where(found, item + 1, 0))
            used |= mine
        tl.store(tensors.alone_ptr + block, tl.sum(count, 0))
        tl.store(tensors.last_ptr + block, tl.max(last, 0))
        if OPTIONS.SIDE == 1:
            named = tl.where(tl.max(used, 0) > 0, block % numbers.in_list, -1)
            tl.store(tensors.pieces_ptr + block, named)
            tl.store(tensors.lasts_ptr + block, named)


@triton.jit
def compare(pid, tensors, numbers, OPTIONS: tl.constexpr):
    """Say whether mostly the same items see two blocks alone that are consecutive in the order."""
    balance = tl.zeros([OPTIONS.BLOCK], tl.int32)
    first = tl.load(tensors.order_ptr + 2 * pid)
    second = tl.load(tensors.order_ptr + 2 * pid + 1)
    is_first = tl.where(tl.load(tensors.alone_ptr + first) > numbers.kept, -1, 0)
    is_second = tl.where(tl.load(tensors.alone_ptr + second) > numbers.kept, -1, 0)
    for begin in range(0, numbers.items, OPTIONS.BLOCK):
        item = begin + tl.arange(0, OPTIONS.BLOCK)
        inside = item < numbers.items
        one = _cells(first, item, inside, tensors, numbers, OPTIONS.SIDE) & is_first
        two = _cells(second, item, inside, tensors, numbers, OPTIONS.SIDE) & is_second
        beside = _cells(_neighbour(first), item, inside, tensors, numbers, OPTIONS.SIDE)
        one = tl.where(beside == 0, one, 0)
        beside = _cells(_neighbour(second), item, inside, tensors, numbers, OPTIONS.SIDE)
        two = tl.where(beside == 0, two, 0)
        either = tl.where((one | two) != 0, -1, 0)
        balance += tl.where((one != 0) & (two != 0), 2, either)
    tl.store(tensors.alike_ptr + pid, tl.where(tl.sum(balance, 0) >= 0, 1, 0))
