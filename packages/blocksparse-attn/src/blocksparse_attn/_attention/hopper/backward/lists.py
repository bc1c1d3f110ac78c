"""How a program of the Hopper backward reads its lists: see ``Pairs`` in ``_layout/lists.py``."""

from ...._linked.hopper.compat import gl, gluon
from ...._linked.hopper.gradients import ROWS
from ..queries.schedule import NO_BLOCK, diagonal_of
from ..structures import Item, Keys, Program, Steps

# an item is the head's index in its group, times this, plus the row of blocks
HEAD = gl.constexpr(1 << 16)
# no part of a list has more items
MOST = gl.constexpr(256)
# a bit per piece of a block, shifted by this factor if other programs own the piece as well
OTHERS = gl.constexpr(16)


@gluon.jit
def find_program(pid, programs, tensors, numbers, OPTIONS: gl.constexpr):
    """Return the sequence and key head that a program works on.

    The programs of one sequence are consecutive. If all heads share the lists, the programs of
    ``numbers.span`` heads are interleaved.
    """
    if OPTIONS.PER_HEAD:
        index = pid % programs
        sequence = pid // programs
        owner_ptr = tensors.owners_ptr + index * (1 + 2 * ROWS // OPTIONS.PIECE)
        head_k = gl.maximum(gl.load(owner_ptr), 0)
    else:
        sequence = pid // (programs * numbers.heads_k)
        place = pid % (programs * numbers.heads_k)
        first = place // (programs * numbers.span) * numbers.span
        heads_here = gl.minimum(numbers.span, numbers.heads_k - first)
        place -= first * programs
        index = place // heads_here
        head_k = first + place % heads_here
    start = 0
    len_q = numbers.tokens_q
    len_k = numbers.tokens_k
    if tensors.cu_seqlens_ptr is not None:
        start = gl.load(tensors.cu_seqlens_ptr + sequence)
        len_q = gl.load(tensors.cu_seqlens_ptr + sequence + 1) - start
        len_k = len_q
    diagonal = diagonal_of(len_q, len_k, OPTIONS.TOP_LEFT)
    low = gl.maximum(diagonal, 0) // ROWS
    high = gl.minimum(gl.cdiv(diagonal + len_q, ROWS), numbers.rows)
    return Program(index, low, high, sequence, head_k, start, len_q, len_k, diagonal)


@gluon.jit
def owned_by(program, tensors, PIECE: gl.constexpr):
    """Return the pointer to the indices of a program's pieces of keys."""
    return tensors.owners_ptr + program.index * (1 + 2 * (ROWS // PIECE)) + 1


@gluon.jit
def find_block(owned_ptr, parts_ptr, len_k, alone, PIECE: gl.constexpr):
    """Return a block's last piece, its ownership bits, and how many items see only this block.

    No program owns pieces after the sequence's end.
    """
    last = -1
    mine = 0
    has_any = last >= 0
    for i in gl.static_range(ROWS // PIECE):
        piece = gl.load(owned_ptr + i)
        is_there = (piece >= 0) & (piece * PIECE < len_k)
        parts = gl.load(parts_ptr + piece, mask=is_there, other=0).to(gl.int32)
        mine += gl.where(parts > 1, OTHERS, parts) << i
        last = gl.maximum(last, piece)
        has_any |= is_there
    return gl.where(has_any, last, NO_BLOCK), mine, gl.where(has_any, alone, 0)


@gluon.jit
def find_kept(owned_ptr, len_k, PIECE: gl.constexpr):
    """Return the bits of the pieces of keys that lie in the sequence."""
    SIDE: gl.constexpr = ROWS // PIECE
    kept = 0
    for i in gl.static_range(2 * SIDE):
        piece = gl.load(owned_ptr + i)
        mine = gl.where((piece >= 0) & (piece * PIECE < len_k), 2**SIDE - 1, 0)
        kept |= mine << (i // SIDE * 16 + i % SIDE * SIDE)
    return kept


@gluon.jit
def find_seen(first, count, start, end, tensors, PIECE: gl.constexpr):
    """Return a bit for each piece of keys that some query of these items sees.

    The sequence's queries stand at the positions from ``start`` to ``end - 1``.
    """
    SIDE: gl.constexpr = ROWS // PIECE
    lane = gl.arange(0, MOST, gl.BlockedLayout([1], [32], [4], [0]))  # [MOST]
    row = gl.load(tensors.items_ptr + first + lane, mask=lane < count, other=0) % HEAD * ROWS
    bits = gl.load(tensors.bits_ptr + first + lane, mask=lane < count, other=0)
    seen = 0
    for half in gl.static_range(2):
        for i in gl.static_range(SIDE):
            sees = lane * 0
            for j in gl.static_range(SIDE):
                is_there = (row + (j + 1) * PIECE > start) & (row + j * PIECE < end)
                sees += gl.where(is_there, (bits >> (16 * half + i * SIDE + j)) & 1, 0)
            seen += gl.where(gl.max(sees, 0) > 0, 1 << (half * SIDE + i), 0)
    return seen


@gluon.jit
def find_items(place, program, tensors, numbers):
    """Return the first item of a part of a list, and the number of its items.

    Rows before ``program.low`` and from ``program.high`` on, at either end of the part, hold no
    query of the sequence and are left out.
    """
    low, high = program.low, program.high
    first = gl.load(tensors.begin_ptr + place).to(gl.int32)
    count = gl.load(tensors.begin_ptr + place + 1).to(gl.int32) - first
    if (low > 0) | (high < numbers.rows):
        lane = gl.arange(0, MOST, gl.BlockedLayout([1], [32], [4], [0]))  # [MOST]
        row = gl.load(tensors.items_ptr + first + lane, mask=lane < count, other=-1) % HEAD
        is_there = (lane < count) & (row >= low) & (row < high)
        ahead = MOST - gl.max(gl.where(is_there, MOST - lane, 0), 0)
        count = gl.maximum(gl.max(gl.where(is_there, lane + 1, 0), 0) - ahead, 0)
        first += ahead
    return first, count


@gluon.jit
def count_turns(steps, alone, OPTIONS: gl.constexpr):
    """Return the number of blocks of queries that both warpgroups multiply, and the total."""
    TURNS: gl.constexpr = 1 if OPTIONS.PER_HEAD else OPTIONS.GROUP
    both = (steps.whole + steps.partial) * TURNS
    return both, both + 2 * TURNS * alone


@gluon.jit
def find_item(turn, total, work, tensors, OPTIONS: gl.constexpr):
    """Return the block of queries of step ``turn``, and its head's index in the group.

    If the list has no item or the sequence does not have the block, the block is ``NO_BLOCK``.
    """
    TURNS: gl.constexpr = 1 if OPTIONS.PER_HEAD else OPTIONS.GROUP
    steps, program = work.steps, work.program
    wholes = steps.whole * TURNS
    both = wholes + steps.partial * TURNS
    is_whole = turn < wholes
    is_both = turn < both
    place = turn - gl.where(is_whole, 0, gl.where(is_both, wholes, both))
    is_second = ~is_both & (place % 2 == 1)
    place = gl.where(is_both, place, place // 2)
    alone = gl.maximum(steps.alone_0, steps.alone_1)
    round_ = place * 0
    if TURNS > 1:
        in_part = gl.where(is_whole, steps.whole, gl.where(is_both, steps.partial, alone))
        round_ = place // gl.maximum(in_part, 1)
        place -= round_ * in_part
    first = gl.where(is_second, steps.alone_1_at, steps.alone_0_at)
    first = gl.where(is_both, gl.where(is_whole, steps.whole_at, steps.partial_at), first)
    count = gl.where(is_second, steps.alone_1, steps.alone_0)
    has_item = (turn < total) & (is_both | (place < count))
    item = gl.load(tensors.items_ptr + first + place, mask=has_item, other=-1)
    block = item % HEAD
    is_there = (item >= 0) & (block >= program.low) & (block < program.high)
    bits = item * 0
    if OPTIONS.PIECE < ROWS:
        bits = gl.load(tensors.bits_ptr + first + place, mask=is_there, other=0)
    block = gl.where(is_there, block, NO_BLOCK)
    return Item(block, gl.maximum(item, 0) // HEAD + round_, is_there, bits)


@gluon.jit
def find_keys(program, tensors, numbers, OPTIONS: gl.constexpr):
    """Return a program's two blocks of keys, and the four parts of its list."""
    len_k = program.len_k
    place = program.index * 4
    whole_at, whole = find_items(place, program, tensors, numbers)
    partial_at, partial = find_items(place + 1, program, tensors, numbers)
    alone_0_at, alone_0 = find_items(place + 2, program, tensors, numbers)
    alone_1_at, alone_1 = find_items(place + 3, program, tensors, numbers)
    owner = program.head_k * numbers.list_pieces if OPTIONS.PER_HEAD else program.head_k * 0
    owned_ptr = owned_by(program, tensors, OPTIONS.PIECE)
    other_ptr = owned_ptr + ROWS // OPTIONS.PIECE
    parts_ptr = tensors.parts_ptr + owner
    block_0, mine_0, alone_0 = find_block(owned_ptr, parts_ptr, len_k, alone_0, OPTIONS.PIECE)
    block_1, mine_1, alone_1 = find_block(other_ptr, parts_ptr, len_k, alone_1, OPTIONS.PIECE)
    # without keys in the sequence there is nothing to walk: the rows may be fully masked
    is_there = gl.minimum(block_0, block_1) < NO_BLOCK
    whole = gl.where(is_there, whole, 0)
    partial = gl.where(is_there, partial, 0)
    if not OPTIONS.IS_CAUSAL:
        # there is no diagonal: the loop with a mask hides keys after the sequence's end
        is_cut = ((gl.maximum(block_0, block_1) + 1) * OPTIONS.PIECE > len_k) & (whole > 0)
        end = gl.where(partial > 0, partial_at + partial, whole_at + whole)
        partial = gl.where(is_cut, end - whole_at, partial)
        partial_at = gl.where(is_cut, whole_at, partial_at)
        whole = gl.where(is_cut, 0, whole)
    # NO_BLOCK: copy zeros for keys that no query of the program sees
    seen_0 = gl.where(whole + partial + alone_0 > 0, block_0, NO_BLOCK)
    seen_1 = gl.where(whole + partial + alone_1 > 0, block_1, NO_BLOCK)
    seen = -1
    kept = -1
    if OPTIONS.PIECE < ROWS:
        if not OPTIONS.IS_CAUSAL:
            kept = find_kept(owned_ptr, len_k, OPTIONS.PIECE)
        start = gl.maximum(program.diagonal, 0)
        end = program.diagonal + program.len_q
        if (start > 0) | (end < numbers.rows * ROWS):
            seen = find_seen(whole_at, whole, start, end, tensors, OPTIONS.PIECE)
            seen |= find_seen(partial_at, partial, start, end, tensors, OPTIONS.PIECE)
            seen |= find_seen(alone_0_at, alone_0, start, end, tensors, OPTIONS.PIECE)
            seen |= find_seen(alone_1_at, alone_1, start, end, tensors, OPTIONS.PIECE)
    alone = gl.maximum(alone_0, alone_1)
    steps = Steps(
        whole_at, whole, partial_at, partial, alone, alone_0_at, alone_0, alone_1_at, alone_1
    )
    return Keys(mine_0, block_0, mine_1, block_1, seen_0, seen_1, seen, kept), steps
