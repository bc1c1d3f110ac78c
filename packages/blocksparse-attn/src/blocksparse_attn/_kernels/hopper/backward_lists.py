"""What a program of the Hopper backward reads of its lists: see ``_pairs.py``, which makes them."""

from ._linked.compat import gl, gluon
from ._linked.gradients import ROWS
from .schedule import NO_BLOCK

# an item is the head in its group, times this, and the row of blocks
HEAD = gl.constexpr(1 << 16)
# more than a part of a list has items
MOST = gl.constexpr(256)


@gluon.jit
def find_program(
    pid, programs, owners_ptr, cu_seqlens_ptr, heads_k, span, tokens_q, tokens_k,
    PER_HEAD: gl.constexpr, PIECE: gl.constexpr,
):  # fmt: skip
    """Return ``(program, sequence, head_k, start, len_q, len_k)`` for a place in the grid.

    All programs of a sequence come first, and of ``span`` heads if the lists are for all heads.
    """
    if PER_HEAD:
        program = pid % programs
        sequence = pid // programs
        head_k = gl.maximum(gl.load(owners_ptr + program * (1 + 2 * ROWS // PIECE)), 0)
    else:
        sequence = pid // (programs * heads_k)
        place = pid % (programs * heads_k)
        first = place // (programs * span) * span
        heads_here = gl.minimum(span, heads_k - first)
        place -= first * programs
        program = place // heads_here
        head_k = first + place % heads_here
    start = 0
    len_q = tokens_q
    len_k = tokens_k
    if cu_seqlens_ptr is not None:
        start = gl.load(cu_seqlens_ptr + sequence)
        len_q = gl.load(cu_seqlens_ptr + sequence + 1) - start
        len_k = len_q
    return program, sequence, head_k, start, len_q, len_k


@gluon.jit
def find_block(owned_ptr, parts_ptr, len_k, alone, PIECE: gl.constexpr):
    """Return a block's last piece, how many programs own it, and the items that see it alone.

    One that the sequence has not is nobody's; of several pieces, all are added to sums.
    """
    last = gl.load(owned_ptr)
    is_there = (last >= 0) & (last * PIECE < len_k)
    parts = last * 0 + 2
    if PIECE == ROWS:
        parts = gl.load(parts_ptr + last, mask=is_there, other=0).to(gl.int32)
    for i in gl.static_range(1, ROWS // PIECE):
        piece = gl.load(owned_ptr + i)
        is_there |= (piece >= 0) & (piece * PIECE < len_k)
        last = gl.maximum(last, piece)
    return gl.where(is_there, last, NO_BLOCK), parts, gl.where(is_there, alone, 0)


@gluon.jit
def find_kept(owned_ptr, len_k, PIECE: gl.constexpr):
    """Return the bits of the pieces of keys that the sequence has."""
    SIDE: gl.constexpr = ROWS // PIECE
    kept = 0
    for i in gl.static_range(2 * SIDE):
        piece = gl.load(owned_ptr + i)
        mine = gl.where((piece >= 0) & (piece * PIECE < len_k), 2**SIDE - 1, 0)
        kept |= mine << (i // SIDE * 16 + i % SIDE * SIDE)
    return kept


@gluon.jit
def find_seen(items_ptr, bits_ptr, first, count, start, len_k, PIECE: gl.constexpr):
    """Return a bit for each piece of keys that some query sees, of these items' that there are.

    Queries stand at ``start`` to ``len_k``.
    """
    SIDE: gl.constexpr = ROWS // PIECE
    lane = gl.arange(0, MOST, gl.BlockedLayout([1], [32], [4], [0]))
    row = gl.load(items_ptr + first + lane, mask=lane < count, other=0) % HEAD * ROWS
    bits = gl.load(bits_ptr + first + lane, mask=lane < count, other=0)
    seen = 0
    for half in gl.static_range(2):
        for i in gl.static_range(SIDE):
            sees = lane * 0
            for j in gl.static_range(SIDE):
                is_there = (row + (j + 1) * PIECE > start) & (row + j * PIECE < len_k)
                sees += gl.where(is_there, (bits >> (16 * half + i * SIDE + j)) & 1, 0)
            seen += gl.where(gl.max(sees, 0) > 0, 1 << (half * SIDE + i), 0)
    return seen


@gluon.jit
def find_items(begin_ptr, items_ptr, place, low, high, rows):
    """Return where a part of a list is, and how many items it has.

    What the sequence has not at either end, rows ahead of ``low`` or from ``high`` on, is left out.
    """
    first = gl.load(begin_ptr + place).to(gl.int32)
    count = gl.load(begin_ptr + place + 1).to(gl.int32) - first
    if (low > 0) | (high < rows):
        lane = gl.arange(0, MOST, gl.BlockedLayout([1], [32], [4], [0]))
        row = gl.load(items_ptr + first + lane, mask=lane < count, other=-1) % HEAD
        is_there = (lane < count) & (row >= low) & (row < high)
        ahead = MOST - gl.max(gl.where(is_there, MOST - lane, 0), 0)
        count = gl.maximum(gl.max(gl.where(is_there, lane + 1, 0), 0) - ahead, 0)
        first += ahead
    return first, count


@gluon.jit
def find_item(
    items_ptr, bits_ptr, turn, total, whole_at, whole, partial_at, partial, alone_0_at, alone_0,
    alone_1_at, alone_1, low, high, TURNS: gl.constexpr, PIECE: gl.constexpr,
):  # fmt: skip
    """Return ``(block, head, is_there, bits)`` of a block of queries and its head in the group.

    Where the walk wants an item, or the sequence has not the block, it is ``NO_BLOCK``.
    """
    wholes = whole * TURNS
    both = wholes + partial * TURNS
    is_whole = turn < wholes
    is_both = turn < both
    place = turn - gl.where(is_whole, 0, gl.where(is_both, wholes, both))
    is_second = ~is_both & (place % 2 == 1)
    place = gl.where(is_both, place, place // 2)
    alone = gl.maximum(alone_0, alone_1)
    round_ = place * 0
    if TURNS > 1:
        steps = gl.where(is_whole, whole, gl.where(is_both, partial, alone))
        round_ = place // gl.maximum(steps, 1)
        place -= round_ * steps
    first = gl.where(is_second, alone_1_at, alone_0_at)
    first = gl.where(is_both, gl.where(is_whole, whole_at, partial_at), first)
    count = gl.where(is_second, alone_1, alone_0)
    has_item = (turn < total) & (is_both | (place < count))
    item = gl.load(items_ptr + first + place, mask=has_item, other=-1)
    block = item % HEAD
    is_there = (item >= 0) & (block >= low) & (block < high)
    bits = item * 0
    if PIECE < ROWS:
        bits = gl.load(bits_ptr + first + place, mask=is_there, other=0)
    block = gl.where(is_there, block, NO_BLOCK)
    return block, gl.maximum(item, 0) // HEAD + round_, is_there, bits
