"""Which tile of which head and sequence a program owns, and which part of a list it walks.

Tiles of queries are aligned to positions, not to the first query. So a tile never shares a row of
blocks with its neighbour, whichever chunk of a sequence the queries are.
"""

import triton
import triton.language as tl

from ..._linked.portable.primitives import pointer_to
from .primitives import floor_div, lower_bound
from .structures import QueryWalk, Ranges, Rows, Walk, Work

# sequences per step of the search in cu_seqlens
SEARCH_CHUNK = tl.constexpr(128)


@triton.jit
def find_sequence(cu_seqlens_ptr, slot, batch, SIDE: tl.constexpr, SPARE: tl.constexpr):
    """Return the sequence that owns a slot; -1 is padding before the batch, ``batch`` after it.

    Sequence ``b`` owns the slots from ``cu_seqlens[b] // SIDE + SPARE * (b + 1)`` on. It has at
    least as many slots as tiles, and the host can bound the grid without device data. ``SPARE`` is
    1 if the first tile begins with the sequence, 2 if the sequence may begin inside a tile.
    """
    owned = tl.zeros([], tl.int32)
    for first in range(0, batch + 1, SEARCH_CHUNK):
        index = first + tl.arange(0, SEARCH_CHUNK)
        start = tl.load(cu_seqlens_ptr + index, mask=index <= batch, other=0)
        mine = (start // SIDE + SPARE * (index + 1) <= slot) & (index <= batch)
        owned += tl.sum(mine.to(tl.int32), 0)
    return owned - 1


@triton.jit
def extent(cu_seqlens_ptr, sequence, batch, tokens, NEEDS_PADDING: tl.constexpr):
    """Return begin and length of a sequence; sequences -1 and ``batch`` are padding, or empty."""
    if NEEDS_PADDING:
        begin = tl.load(cu_seqlens_ptr + sequence, mask=sequence >= 0, other=0)
        end = tl.load(cu_seqlens_ptr + sequence + 1, mask=sequence < batch, other=tokens)
    else:
        is_real = (sequence >= 0) & (sequence < batch)
        begin = tl.load(cu_seqlens_ptr + sequence, mask=is_real, other=0)
        end = tl.load(cu_seqlens_ptr + sequence + 1, mask=is_real, other=0)
    return begin, end - begin


@triton.jit
def diagonal_of(seqlen_q, seqlen_k, TOP_LEFT: tl.constexpr):
    """Return the position of the first query; the layout's rows begin at position 0."""
    if TOP_LEFT:
        diagonal = seqlen_k * 0
    else:
        diagonal = seqlen_k - seqlen_q
    return diagonal


@triton.jit
def place(pid, batch, units, tiles, span, BALANCE: tl.constexpr):
    """Return ``(index of the tile, sequence, unit)`` of a program, for sequences of one length.

    With ``BALANCE``, for walks of different lengths, consecutive programs take the same tile of
    ``span`` units, as many as the cache holds. Without it, they take the tiles of one unit.
    """
    if BALANCE:
        section = pid // (span * tiles)
        rest = pid % (span * tiles)
        here = tl.maximum(tl.minimum(span, batch * units - section * span), 1)
        index = rest // here
        batch_unit = section * span + rest % here
    else:
        index = pid % tiles
        batch_unit = pid // tiles
    return index, batch_unit // units, batch_unit % units


@triton.jit
def locate_queries(
    pid,
    grid,
    POSITIONS: tl.constexpr,
    IS_SHORT: tl.constexpr,
    BALANCE: tl.constexpr,
    SHORT: tl.constexpr,
    TOP_LEFT: tl.constexpr,
):
    """Return the tile of queries that a program owns.

    Sequences of at most ``SHORT`` queries belong to the short grid, which is
    ``[batch, tiles, units, splits]``. Longer sequences and padding belong to the tall grid.
    """
    q_starts, k_starts, batch, units, tokens_q, tokens_k, tiles, span, splits = grid
    split = tl.zeros([], tl.int32)
    q_start = tl.zeros([], tl.int64)
    k_start = tl.zeros([], tl.int64)
    seqlen_q = tokens_q
    seqlen_k = tokens_k
    is_mine = pid >= 0
    if IS_SHORT:
        split = pid % splits
        unit = pid // splits % units
        index = pid // (splits * units) % tiles
        sequence = pid // (splits * units * tiles)
        if q_starts is not None:
            q_begin, seqlen_q = extent(q_starts, sequence, batch, tokens_q, False)
            k_begin, seqlen_k = extent(k_starts, sequence, batch, tokens_k, False)
            q_start = q_begin.to(tl.int64)
            k_start = k_begin.to(tl.int64)
            is_mine = seqlen_q <= SHORT
    elif q_starts is None:
        index, sequence, unit = place(pid, batch, units, tiles, span, BALANCE)
    else:
        slot = pid // units if BALANCE else pid % tiles
        unit = pid % units if BALANCE else pid // tiles
        sequence = find_sequence(q_starts, slot, batch, POSITIONS, 2)
        # padding before the first and after the last sequence: two extra sequences without keys
        q_begin, seqlen_q = extent(q_starts, sequence, batch, tokens_q, True)
        k_begin, seqlen_k = extent(k_starts, sequence, batch, tokens_k, False)
        index = slot - (q_begin // POSITIONS + 2 * (sequence + 1))
        q_start = q_begin.to(tl.int64)
        k_start = k_begin.to(tl.int64)
        is_mine = (seqlen_q > SHORT) | (sequence < 0) | (sequence >= batch)
    diagonal = diagonal_of(seqlen_q, seqlen_k, TOP_LEFT)
    first_tile = floor_div(diagonal, POSITIONS)
    count = tl.where(seqlen_q > 0, tl.cdiv(diagonal + seqlen_q, POSITIONS) - first_tile, 0)
    if BALANCE and not IS_SHORT:
        index = count - 1 - index  # the last walks are the longest
    is_alive = is_mine & (index >= 0) & (index < count)
    tile = first_tile + index
    return Work(
        tile, is_alive, sequence, unit, split, q_start, k_start, seqlen_q, seqlen_k, diagonal
    )


@triton.jit
def locate_keys(pid, grid, BLOCK_N: tl.constexpr, BALANCE: tl.constexpr, TOP_LEFT: tl.constexpr):
    """Return the tile of keys that a program owns."""
    q_starts, k_starts, batch, heads, tokens_q, tokens_k, tiles, span, _ = grid
    q_start = tl.zeros([], tl.int64)
    k_start = tl.zeros([], tl.int64)
    seqlen_q = tokens_q
    seqlen_k = tokens_k
    if k_starts is None:
        tile, sequence, head = place(pid, batch, heads, tiles, span, BALANCE)
    else:
        slot = pid // heads if BALANCE else pid % tiles
        head = pid % heads if BALANCE else pid // tiles
        sequence = find_sequence(k_starts, slot, batch, BLOCK_N, 1)
        k_begin, seqlen_k = extent(k_starts, sequence, batch, tokens_k, True)
        q_begin, seqlen_q = extent(q_starts, sequence, batch, tokens_q, False)
        tile = slot - (k_begin // BLOCK_N + sequence + 1)
        q_start = q_begin.to(tl.int64)
        k_start = k_begin.to(tl.int64)
    tile = tl.where(tile < tl.cdiv(seqlen_k, BLOCK_N), tile, -1)
    diagonal = diagonal_of(seqlen_q, seqlen_k, TOP_LEFT)
    return Work(
        tile, tile >= 0, sequence, head, head * 0, q_start, k_start, seqlen_q, seqlen_k, diagonal
    )


@triton.jit
def _list_of(work, list_row, is_known, tensors, numbers, OPTIONS: tl.constexpr):
    """Return the begin of a tile's list, the first item that needs a mask, and the end."""
    owner = list_row.to(tl.int64)
    if OPTIONS.PER_HEAD:
        owner += work.unit.to(tl.int64) * numbers.list_rows
    # padding has no keys to walk; it takes the lists of sequence 0
    is_real = (work.sequence >= 0) & (work.sequence < numbers.batch)
    owner += tl.where(is_real, work.sequence, 0).to(tl.int64) * numbers.list_stride
    start = tl.load(tensors.begin_ptr + owner, mask=is_known, other=0)
    end = tl.load(tensors.begin_ptr + owner + 1, mask=is_known, other=0)
    cut = start + tl.load(tensors.whole_ptr + owner, mask=is_known, other=0)
    return start, cut, end


@triton.jit
def key_walk(rows, tensors, numbers, OPTIONS: tl.constexpr):
    """Return the ranges of its list that a tile of queries walks."""
    work = rows.work
    BLOCK_K: tl.constexpr = OPTIONS.BLOCK_K
    # items per step
    PER_STEP: tl.constexpr = OPTIONS.BLOCK_N // BLOCK_K if OPTIONS.BLOCK_N > BLOCK_K else 1
    tile, seqlen_k, items_ptr = work.tile, work.seqlen_k, tensors.items_ptr
    list_row = tl.maximum(tile, 0) * OPTIONS.POSITIONS // OPTIONS.SPAN
    # there are no rows of blocks before position 0 and after the layout's last row
    is_known = (tile >= 0) & (list_row < numbers.list_rows) & (rows.last_position >= 0)
    start, cut, end = _list_of(work, list_row, is_known, tensors, numbers, OPTIONS)
    whole_end = cut
    seen_end = cut
    cut_end = end
    # leave out items after the sequence's end; with a bottom-right causal mask there are few
    if (OPTIONS.TOP_LEFT or not OPTIONS.IS_CAUSAL) and seqlen_k < numbers.extent:
        whole_end = lower_bound(items_ptr, start, cut, seqlen_k // BLOCK_K, 1)
        seen_end = lower_bound(items_ptr, whole_end, cut, tl.cdiv(seqlen_k, BLOCK_K), 1)
        cut_end = lower_bound(items_ptr, cut, end, tl.cdiv(seqlen_k, BLOCK_K), 1)
    whole = (whole_end - start) // PER_STEP * PER_STEP
    rest = start + whole
    return Walk(start, whole, rest, seen_end - rest, cut, cut_end - cut)


@triton.jit
def ranges_of(walk, MASKED: tl.constexpr):
    """Return the ranges of the steps that need a mask, or of those that need none."""
    if MASKED:
        ranges = Ranges(walk.rest, walk.rests, walk.cut, walk.cuts, walk.cut, 0)
    else:
        ranges = Ranges(walk.start, walk.whole, walk.start, walk.cuts * 0, walk.start, 0)
    return ranges


@triton.jit
def rows_of(work, tensors, numbers, OPTIONS: tl.constexpr):
    """Return the ``Rows`` of a tile of queries: row m is position m // HEADS of a head."""
    m = tl.arange(0, OPTIONS.BLOCK_M)  # [BLOCK_M]
    in_group = work.unit % OPTIONS.PACKS * OPTIONS.HEADS + m % OPTIONS.HEADS
    row = work.tile * OPTIONS.POSITIONS + m // OPTIONS.HEADS - work.diagonal
    inside = (row >= 0) & (row < work.seqlen_q) & (in_group < OPTIONS.GROUP)
    head = work.unit // OPTIONS.PACKS * OPTIONS.GROUP + in_group
    # padding has no row in per-sequence tensors
    sequence = tl.maximum(tl.minimum(work.sequence, numbers.batch - 1), 0).to(tl.int64)
    k_ptr, v_ptr = tensors.k_ptr, tensors.v_ptr
    if not OPTIONS.PAGE:
        k_ptr = pointer_to(k_ptr, numbers.k, sequence, work.k_start, 0)
        v_ptr = pointer_to(v_ptr, numbers.v, sequence, work.k_start, 0)
    head_k = (work.unit // OPTIONS.PACKS).to(tl.int64)
    k_ptr += head_k * numbers.k.head
    v_ptr += head_k * numbers.v.head
    table_ptr = k_ptr  # not read without pages, but None could not be returned
    if OPTIONS.PAGE:
        table_ptr = tensors.block_table_ptr + sequence * numbers.table_stride
    positions = row + work.diagonal
    first = work.tile * OPTIONS.POSITIONS
    first_position = tl.maximum(tl.maximum(work.diagonal, 0), first)
    last_position = tl.minimum(work.diagonal + work.seqlen_q, first + OPTIONS.POSITIONS) - 1
    span_start = first // OPTIONS.SPAN * OPTIONS.SPAN
    bits = positions * 0
    if OPTIONS.HEAD_MEMBERS > 1:
        bits = m % OPTIONS.HEADS
    elif OPTIONS.ROW_MEMBERS > 1:
        bits = tl.maximum(positions - span_start, 0) // OPTIONS.BLOCK_Q
    # not read without a token rule, but None could not be returned
    first_key = positions
    last_key = positions
    if tensors.rule_ptr is not None:
        is_there = (positions >= first_position) & (positions <= last_position)
        bounds = tensors.rule_ptr + sequence * numbers.rule_stride + 2 * positions
        first_key = tl.load(bounds, mask=is_there, other=1)
        last_key = tl.load(bounds + 1, mask=is_there, other=0)
    if OPTIONS.TOP_LEFT:
        # under a causal mask, a query after the last key sees what a query at that key sees
        positions = tl.minimum(positions, work.seqlen_k - 1)
    seen = positions, bits, first_position, last_position, span_start, first_key, last_key
    return Rows(work, k_ptr, v_ptr, table_ptr, sequence, row, head, inside, *seen)


@triton.jit
def query_walk(work, tensors, numbers, OPTIONS: tl.constexpr):
    """Return the ranges of its list that a tile of keys walks."""
    items_ptr = tensors.items_ptr
    BLOCK_Q: tl.constexpr = OPTIONS.BLOCK_Q
    PER_STEP: tl.constexpr = OPTIONS.BLOCK_M // BLOCK_Q if OPTIONS.BLOCK_M > BLOCK_Q else 1
    IN_ITEM: tl.constexpr = OPTIONS.GROUP if OPTIONS.PER_HEAD else 1
    # keys per owner of a list
    SPAN: tl.constexpr = OPTIONS.BLOCK_N if OPTIONS.BLOCK_N > OPTIONS.BLOCK_K else OPTIONS.BLOCK_K
    list_row = work.tile * OPTIONS.BLOCK_N // SPAN
    # there are no columns after the layout's last; padding has no queries
    is_known = (list_row < numbers.list_rows) & (work.seqlen_q > 0)
    start, cut, end = _list_of(work, list_row, is_known, tensors, numbers, OPTIONS)
    # rows of blocks that the queries touch, and those that they fill
    first_position = tl.maximum(work.diagonal, 0)
    end_position = work.diagonal + work.seqlen_q
    seen = start
    whole = start
    whole_end = cut
    seen_end = cut
    cut_end = end
    if first_position > 0:
        seen = lower_bound(items_ptr, start, cut, first_position // BLOCK_Q, IN_ITEM)
        whole = lower_bound(items_ptr, seen, cut, tl.cdiv(first_position, BLOCK_Q), IN_ITEM)
        cut = lower_bound(items_ptr, cut, end, first_position // BLOCK_Q, IN_ITEM)
    if end_position < numbers.extent:
        first_behind = tl.cdiv(end_position, BLOCK_Q)
        whole_end = lower_bound(items_ptr, whole, whole_end, end_position // BLOCK_Q, IN_ITEM)
        seen_end = lower_bound(items_ptr, whole_end, seen_end, first_behind, IN_ITEM)
        cut_end = lower_bound(items_ptr, cut, end, first_behind, IN_ITEM)
    # keys after the end need no mask: their gradients are not stored
    count = tl.maximum(whole_end - whole, 0) // PER_STEP * PER_STEP
    return QueryWalk(seen, whole, count, seen_end, cut, cut_end)
