"""Which tile of queries is next, and which steps it walks: known to the copying warp alone.

It tells the others in shared memory. Tiles are aligned to positions, as in ``schedule.py``. A list
has two parts, whole items and then those that need a mask; a *step* is as many items as make a tile
of keys, and the walk goes from the list's end to its begin. So the steps with a mask come first,
and an item that is wanting to fill one is missing there.
"""

from ._linked.compat import gl, gluon
from ._linked.pipeline import SEARCH_CHUNK

# a block behind the end of every sequence, where the copy engine finds zeros
NO_BLOCK = gl.constexpr(2**22)
# the numbers that describe a tile of queries
FIELDS = gl.constexpr(16)
FIRST_ROW = gl.constexpr(0)
HEAD = gl.constexpr(1)
SEQUENCE = gl.constexpr(2)
Q_START = gl.constexpr(3)
LEN_Q = gl.constexpr(4)
LEN_K = gl.constexpr(5)
FIRST = gl.constexpr(6)
SEEN = gl.constexpr(7)
CUT = gl.constexpr(8)
COUNT = gl.constexpr(9)
WHOLE = gl.constexpr(10)


@gluon.jit
def floor_div(x, DIVISOR: gl.constexpr):
    """Divide, rounding down for negative numbers too."""
    return gl.where(x >= 0, x // DIVISOR, -((DIVISOR - 1 - x) // DIVISOR))


@gluon.jit
def pick(values, NUMBER: gl.constexpr):
    """Return one of a few numbers of which every thread holds all."""
    index = gl.arange(0, values.shape[0], values.type.layout)
    return gl.sum(gl.where(index == NUMBER, values, 0), 0)


@gluon.jit
def find_sequence(cu_seqlens_ptr, slot, batch, SIDE: gl.constexpr):
    """Return the sequence that owns a slot; -1 and ``batch`` mean padding ahead and behind.

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
def locate(
    ticket, cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, units, tokens_q, tokens_k, tiles, span, last,
    POSITIONS: gl.constexpr, BALANCE: gl.constexpr, SHORT: gl.constexpr,
):  # fmt: skip
    """Return ``(tile, is_alive, sequence, unit, q_start, k_start, len_q, len_k)`` of a ticket.

    Tiles count from position 0. ``BALANCE`` starts the longest walks first, within as many units
    (``span``) as the cache holds; the ``last`` units are up to twice as many, so that there is no
    small rest. Sequences of at most ``SHORT`` queries belong to another kernel.
    """
    q_start = 0
    k_start = 0
    len_q = tokens_q
    len_k = tokens_k
    is_mine = ticket >= 0
    if cu_seqlens_q_ptr is None:
        if BALANCE:
            first = ticket // (span * tiles) * span
            here = span
            if first >= batch * units - last:
                first = batch * units - last
                here = last
            place = ticket - first * tiles
            index = place // here
            batch_unit = first + place % here
        else:
            index = ticket % tiles
            batch_unit = ticket // tiles
        sequence = batch_unit // units
        unit = batch_unit % units
    else:
        slot = ticket // units if BALANCE else ticket % tiles
        unit = ticket % units if BALANCE else ticket // tiles
        sequence = find_sequence(cu_seqlens_q_ptr, slot, batch, POSITIONS)
        # tokens around the sequences are two more sequences, which face nothing
        is_real = (sequence >= 0) & (sequence < batch)
        q_start = gl.load(cu_seqlens_q_ptr + sequence, mask=sequence >= 0, other=0)
        q_end = gl.load(cu_seqlens_q_ptr + sequence + 1, mask=sequence < batch, other=tokens_q)
        k_start = gl.load(cu_seqlens_k_ptr + sequence, mask=is_real, other=0)
        k_end = gl.load(cu_seqlens_k_ptr + sequence + 1, mask=is_real, other=0)
        index = slot - (q_start // POSITIONS + 2 * (sequence + 1))
        len_q = q_end - q_start
        len_k = k_end - k_start
        is_mine = (len_q > SHORT) | (sequence < 0) | (sequence >= batch)
    first_tile = floor_div(len_k - len_q, POSITIONS)
    count = gl.where(len_q > 0, gl.cdiv(len_k, POSITIONS) - first_tile, 0)
    if BALANCE:
        index = count - 1 - index  # the last are the longest
    is_alive = is_mine & (index >= 0) & (index < count)
    return first_tile + index, is_alive, sequence, unit, q_start, k_start, len_q, len_k


@gluon.jit
def lower_bound(items_ptr, first, last, limit):
    """Return the first place from ``first`` to ``last`` whose item is not below a limit."""
    while first < last:
        middle = (first + last) // 2
        is_below = gl.load(items_ptr + middle) < limit
        first = gl.where(is_below, middle + 1, first)
        last = gl.where(is_below, last, middle)
    return first


@gluon.jit
def survey(
    begin_ptr, whole_ptr, items_ptr, unit, tile, is_alive, list_rows, len_k, extent_k,
    POSITIONS: gl.constexpr, SPAN: gl.constexpr, BLOCK_K: gl.constexpr, PER_STEP: gl.constexpr,
    IS_CAUSAL: gl.constexpr, PER_HEAD: gl.constexpr,
):  # fmt: skip
    """Return ``(first, seen, cut, count, whole)``: a tile's items, and its steps without a mask.

    The items are ``seen`` from place ``first`` of the list on, and the rest from ``cut`` on.
    """
    row = tile * POSITIONS // SPAN
    is_known = is_alive & (tile >= 0) & (row < list_rows)
    owner = row.to(gl.int64)
    if PER_HEAD:
        owner += unit.to(gl.int64) * list_rows
    first = gl.load(begin_ptr + owner, mask=is_known, other=0).to(gl.int32)
    end = gl.load(begin_ptr + owner + 1, mask=is_known, other=0).to(gl.int32)
    cut = first + gl.load(whole_ptr + owner, mask=is_known, other=0).to(gl.int32)
    inside = cut
    seen = cut
    # items right of the sequence's end; under a causal mask none is whole
    if not IS_CAUSAL:  # noqa: SIM102  (a constant, then a number)
        if len_k < extent_k:
            inside = lower_bound(items_ptr, first, cut, len_k // BLOCK_K)
            seen = lower_bound(items_ptr, inside, cut, gl.cdiv(len_k, BLOCK_K))
            end = lower_bound(items_ptr, cut, end, gl.cdiv(len_k, BLOCK_K))
    count = seen - first + (end - cut)
    steps = gl.maximum(gl.cdiv(count, PER_STEP), 1)
    return first, seen - first, cut, count, gl.minimum((inside - first) // PER_STEP, steps - 1)


@gluon.jit
def places(first, seen, cut, count, step, lane, PER_STEP: gl.constexpr):
    """Return where in the list the items of a step are, and which of them there are."""
    place = step * PER_STEP + lane
    at = gl.where(place < seen, first + place, cut - seen + place)
    return at, (place >= 0) & (place < count)


@gluon.jit
def members_alive(
    tile, len_q, len_k, POSITIONS: gl.constexpr, SPAN: gl.constexpr, BLOCK_Q: gl.constexpr
):
    """Return a bit for each row of blocks of a list's owner in which the tile has queries."""
    start = tile * POSITIONS // SPAN * SPAN
    first = gl.maximum(gl.maximum(len_k - len_q, 0), tile * POSITIONS)
    last = gl.minimum(len_k, (tile + 1) * POSITIONS) - 1
    # of tiles ahead of position 0 nothing is asked
    low = gl.maximum(first - start, 0) // BLOCK_Q
    high = gl.maximum(last - start, 0) // BLOCK_Q
    return (2 << high) - (1 << low)
