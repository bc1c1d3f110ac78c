"""Which tile of queries is next, and which steps it walks.

Only the copying warp computes this; it sends the result to the warpgroups through shared memory.
Tiles are aligned to positions, as in ``portable/schedule.py``. A list has whole items, then items
that need a mask. A *step* is as many items as make a tile of keys. The walk goes from the list's
end to its begin, so steps with a mask come first, and the first step may have fewer items.
"""

from ...._linked.hopper.compat import gl, gluon
from ...._linked.hopper.pipeline import SEARCH_CHUNK
from ...._linked.hopper.pipeline import locate as locate_dense
from ..structures import QueryTile, Walk

# three counts of a list in one integer, as digits to this base: whole items first
COUNTED = gl.constexpr(2**21)
# a block after the end of every sequence, for which the TMA gives zeros
NO_BLOCK = gl.constexpr(2**22)
# size of the numbers that describe a tile of queries, as ``Announced``, and the index of its head
FIELDS = gl.constexpr(16)
HEAD = gl.constexpr(0)


@gluon.jit
def floor_div(x, DIVISOR: gl.constexpr):
    """Divide and round down, also for negative numbers."""
    return gl.where(x >= 0, x // DIVISOR, -((DIVISOR - 1 - x) // DIVISOR))


@gluon.jit
def diagonal_of(len_q, len_k, TOP_LEFT: gl.constexpr):
    """Return the position of the first query; the layout's rows begin at position 0."""
    if TOP_LEFT:
        diagonal = len_k * 0
    else:
        diagonal = len_k - len_q
    return diagonal


@gluon.jit
def pick(values, NUMBER: gl.constexpr):
    """Return one element of a small tensor of which every thread holds all elements."""
    index = gl.arange(0, values.shape[0], values.type.layout)  # [values.shape[0]]
    return gl.sum(gl.where(index == NUMBER, values, 0), 0)


@gluon.jit
def find_sequence(cu_seqlens_ptr, slot, batch, SIDE: gl.constexpr):
    """Return the sequence that owns a slot; -1 is padding before the batch, ``batch`` after it.

    Sequence ``b`` owns the slots from ``cu_seqlens[b] // SIDE + 2 * (b + 1)`` on.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    owned = 0
    for first in range(0, batch + 1, SEARCH_CHUNK):
        index = first + gl.arange(0, SEARCH_CHUNK, layout)
        start = gl.load(cu_seqlens_ptr + index, mask=index <= batch, other=0)
        mine = (start // SIDE + 2 * (index + 1) <= slot) & (index <= batch)
        owned += gl.sum(mine.to(gl.int32), 0)
    return owned - 1


@gluon.jit
def locate(ticket, units, tensors, numbers, OPTIONS: gl.constexpr):
    """Return the tile of queries with the number ``ticket``, and whether it holds queries.

    Under a causal mask the longest walks start first, within ``numbers.span`` units, as many as the
    cache holds. The last span has ``numbers.last`` units, up to twice as many, to avoid a small
    rest. Sequences of at most ``OPTIONS.SHORT`` queries belong to another kernel.
    """
    POSITIONS: gl.constexpr = 2 * OPTIONS.ROWS // OPTIONS.HEADS
    BALANCE: gl.constexpr = OPTIONS.IS_CAUSAL
    batch, tiles = numbers.batch, numbers.tiles
    q_start = 0
    k_start = 0
    len_q = numbers.tokens_q
    len_k = numbers.tokens_k
    is_mine = ticket >= 0
    if tensors.cu_seqlens_q_ptr is None:
        place = ticket, batch, units, tiles, numbers.span, numbers.last
        index, sequence, unit = locate_dense(*place, BALANCE)
    else:
        q_starts, k_starts = tensors.cu_seqlens_q_ptr, tensors.cu_seqlens_k_ptr
        slot = ticket // units if BALANCE else ticket % tiles
        unit = ticket % units if BALANCE else ticket // tiles
        sequence = find_sequence(q_starts, slot, batch, POSITIONS)
        # padding before the first and after the last sequence: two extra sequences without keys
        is_real = (sequence >= 0) & (sequence < batch)
        q_start = gl.load(q_starts + sequence, mask=sequence >= 0, other=0)
        q_end = gl.load(q_starts + sequence + 1, mask=sequence < batch, other=numbers.tokens_q)
        k_start = gl.load(k_starts + sequence, mask=is_real, other=0)
        k_end = gl.load(k_starts + sequence + 1, mask=is_real, other=0)
        index = slot - (q_start // POSITIONS + 2 * (sequence + 1))
        len_q = q_end - q_start
        len_k = k_end - k_start
        is_mine = (len_q > OPTIONS.SHORT) | (sequence < 0) | (sequence >= batch)
    diagonal = diagonal_of(len_q, len_k, OPTIONS.TOP_LEFT)
    first_tile = floor_div(diagonal, POSITIONS)
    count = gl.where(len_q > 0, gl.cdiv(diagonal + len_q, POSITIONS) - first_tile, 0)
    if BALANCE and tensors.cu_seqlens_q_ptr is not None:
        index = count - 1 - index  # the last walks are the longest
    is_alive = is_mine & (index >= 0) & (index < count)
    index += first_tile
    tile = QueryTile(ticket, index, sequence, unit, q_start, k_start, len_q, len_k, diagonal)
    return tile, is_alive


@gluon.jit
def lower_bound(items_ptr, first, last, limit):
    """Return the first index from ``first`` to ``last`` whose item is at least ``limit``."""
    while first < last:
        middle = (first + last) // 2
        is_below = gl.load(items_ptr + middle) < limit
        first = gl.where(is_below, middle + 1, first)
        last = gl.where(is_below, last, middle)
    return first


@gluon.jit
def survey(tile, tensors, numbers, OPTIONS: gl.constexpr):
    """Return the walk of a tile of queries; it is empty after the last tile."""
    POSITIONS: gl.constexpr = 2 * OPTIONS.ROWS // OPTIONS.HEADS
    PER_STEP: gl.constexpr = OPTIONS.BLOCK_N // OPTIONS.BLOCK_K
    items_ptr = tensors.items_ptr
    is_there = tile.ticket < numbers.total
    row = tile.index * POSITIONS // OPTIONS.SPAN
    is_known = is_there & (tile.index >= 0) & (row < numbers.list_rows)
    owner = row.to(gl.int64)
    if OPTIONS.PER_HEAD:
        owner += tile.unit.to(gl.int64) * numbers.list_rows
    # padding has no keys to walk; it takes the lists of sequence 0
    is_real = (tile.sequence >= 0) & (tile.sequence < numbers.batch)
    owner += gl.where(is_real, tile.sequence, 0).to(gl.int64) * numbers.list_stride
    first = gl.load(tensors.begin_ptr + owner, mask=is_known, other=0).to(gl.int32)
    end = gl.load(tensors.begin_ptr + owner + 1, mask=is_known, other=0).to(gl.int32)
    counts = gl.load(tensors.whole_ptr + owner, mask=is_known, other=0)
    whole = counts % COUNTED if OPTIONS.HALVES else counts
    cut = first + whole.to(gl.int32)
    inside = cut
    seen = cut
    # leave out items after the sequence's end; under a causal mask none of them is whole
    if not OPTIONS.IS_CAUSAL:  # noqa: SIM102  (a constant, then a number)
        if tile.len_k < numbers.extent_k:
            inside = lower_bound(items_ptr, first, cut, tile.len_k // OPTIONS.BLOCK_K)
            seen = lower_bound(items_ptr, inside, cut, gl.cdiv(tile.len_k, OPTIONS.BLOCK_K))
            end = lower_bound(items_ptr, cut, end, gl.cdiv(tile.len_k, OPTIONS.BLOCK_K))
    count = seen - first + (end - cut)
    none = count * 0
    halves, alone_0, alone_1, odd = none, none, none, none
    if OPTIONS.HALVES:
        HALF: gl.constexpr = PER_STEP // 2
        alone_1 = (counts // COUNTED % COUNTED).to(gl.int32)
        alone_0 = (counts // COUNTED // COUNTED).to(gl.int32)
        shared = count - alone_0 - alone_1
        odd = gl.where(shared % PER_STEP <= HALF, shared % PER_STEP, 0)
        halves = gl.cdiv(gl.maximum(alone_0, alone_1) + odd, HALF)
        steps = gl.cdiv(shared - odd, PER_STEP)
        # half steps must be followed by a whole step
        is_worth_it = (steps > 0) & (2 * steps + halves < 2 * gl.cdiv(count, PER_STEP))
        halves = gl.where(is_worth_it, halves, 0)
        count = gl.where(is_worth_it, shared - odd, count)
    steps = gl.maximum(gl.cdiv(count, PER_STEP), 1)
    whole = gl.minimum((inside - first) // PER_STEP, steps - 1)
    alone_at = end - alone_0 - alone_1
    return Walk(first, seen - first, cut, count, whole, halves, alone_at, alone_0, alone_1, odd)


@gluon.jit
def steps_of(walk, OPTIONS: gl.constexpr):
    """Return the number of whole steps of a walk: at least one."""
    return gl.maximum(gl.cdiv(walk.count, OPTIONS.BLOCK_N // OPTIONS.BLOCK_K), 1)


@gluon.jit
def places(walk, step, lane):
    """Return the indices of a step's items in the list, and which of them exist."""
    place = step * lane.shape[0] + lane  # [PER_STEP]
    at = gl.where(place < walk.seen, walk.first + place, walk.cut - walk.seen + place)
    return at, (place >= 0) & (place < walk.count)


@gluon.jit
def half_places(walk, step, lane, half, HALF: gl.constexpr):
    """Return the indices of a half step's items in the list, and which of them exist.

    Lane ``i`` takes the ``i``-th item of warpgroup ``half``.
    """
    alone = gl.where(half == 0, walk.alone_0, walk.alone_1)
    at = walk.alone_at + gl.where(half == 0, walk.alone_1, 0)
    place = step * HALF + lane
    behind = place - alone
    shared = walk.count + behind
    shared = gl.where(shared < walk.seen, walk.first + shared, walk.cut - walk.seen + shared)
    return gl.where(behind < 0, at + place, shared), behind < walk.odd


@gluon.jit
def members_alive(tile, POSITIONS: gl.constexpr, OPTIONS: gl.constexpr):
    """Return a bit per row of blocks of the list's owner: whether the tile has queries in it."""
    start = tile.index * POSITIONS // OPTIONS.SPAN * OPTIONS.SPAN
    first = gl.maximum(gl.maximum(tile.diagonal, 0), tile.index * POSITIONS)
    last = gl.minimum(tile.diagonal + tile.len_q, (tile.index + 1) * POSITIONS) - 1
    # tiles before position 0 do not use the result
    low = gl.maximum(first - start, 0) // OPTIONS.BLOCK_Q
    high = gl.maximum(last - start, 0) // OPTIONS.BLOCK_Q
    return (2 << high) - (1 << low)
