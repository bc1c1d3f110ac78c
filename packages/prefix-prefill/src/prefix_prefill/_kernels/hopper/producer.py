"""The warp that copies: which tile of queries is next, and its queries, and pages of its keys."""

from ._linked.compat import copy_in, gl, gluon, mbarrier
from ._linked.pipeline import (
    EMPTY,
    FIELDS,
    FIRST_ROW,
    LEN_K,
    LEN_Q,
    Q_START,
    RAGGED_ROWS,
    SEARCH_CHUNK,
    SEQUENCE,
    SLOTS,
    barrier_sync,
    coordinates,
    key_tiles,
)

# lanes of the warp; each holds the page of one piece of a tile of keys
LANES = gl.constexpr(32)
# threads that meet where a stage becomes free: those of two warpgroups, and this warp
PARTIES = gl.constexpr(2 * 128 + 32)


@gluon.jit
def _find_sequence(cu_seqlens_ptr, slot, batch, BLOCK: gl.constexpr):
    """Return the sequence that owns a slot; -1 and ``batch`` mean padding ahead and behind.

    Sequence ``b`` owns the slots from ``cu_seqlens[b] // BLOCK + b + 1`` on.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    owned = 0
    for first in range(0, batch + 1, SEARCH_CHUNK):
        index = first + gl.arange(0, SEARCH_CHUNK, layout)
        start = gl.load(cu_seqlens_ptr + index, mask=index <= batch, other=0)
        mine = (start // BLOCK + index < slot) & (index <= batch)
        owned += gl.sum(mine.to(gl.int32), 0)
    return owned - 1


@gluon.jit
def _locate(
    ticket, cu_seqlens_q_ptr, batch, packs, BLOCK: gl.constexpr, MIN_TOKENS: gl.constexpr
):  # fmt: skip
    """Return ``(block, sequence, q_start, len_q)`` of a ticket; a block below 0 is none.

    Tickets count packs of heads, then slots; sequences own slots by their length. Of a sequence the
    last block starts first, which under a causal mask sees the most keys.
    """
    slot = ticket // packs
    sequence = _find_sequence(cu_seqlens_q_ptr, slot, batch, BLOCK)
    is_real = (sequence >= 0) & (sequence < batch)
    q_start = gl.load(cu_seqlens_q_ptr + sequence, mask=is_real, other=0)
    q_end = gl.load(cu_seqlens_q_ptr + sequence + 1, mask=is_real, other=0)
    len_q = q_end - q_start
    block = gl.cdiv(len_q, BLOCK) - 1 - (slot - (q_start // BLOCK + sequence + 1))
    block = gl.where(is_real & (len_q >= MIN_TOKENS), block, -1)
    return block, sequence, q_start, len_q


@gluon.jit
def _next_tile(
    ticket, total, ticket_ptr, cu_seqlens_q_ptr, seqlens_k_ptr, batch, packs,
    BLOCK: gl.constexpr, MIN_TOKENS: gl.constexpr,
):  # fmt: skip
    """Return the first ticket from this one on that holds queries, and what it holds."""
    block, sequence, q_start, len_q = _locate(
        ticket, cu_seqlens_q_ptr, batch, packs, BLOCK, MIN_TOKENS
    )
    while (block < 0) & (ticket < total):
        ticket = gl.num_programs(0) + gl.atomic_add(ticket_ptr, 1, sem="relaxed")
        block, sequence, q_start, len_q = _locate(
            ticket, cu_seqlens_q_ptr, batch, packs, BLOCK, MIN_TOKENS
        )
    len_k = gl.load(seqlens_k_ptr + sequence, mask=(block >= 0) & (ticket < total), other=0)
    return ticket, block * BLOCK, sequence, q_start, len_q, len_k


@gluon.jit
def _look_up(
    table, stride_table, tile, first, last,
    PAGE: gl.constexpr, PIECE: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Return the pages of a tile's pieces, one a lane; only those with keys inside are read."""
    index = gl.arange(0, LANES, gl.BlockedLayout([1], [32], [1], [0]))
    key = tile * BLOCK_N + index * PIECE
    is_wanted = (index < BLOCK_N // PIECE) & (key < last) & (key + PIECE > first)
    pages = gl.load(table + (key // PAGE).to(gl.int64) * stride_table, mask=is_wanted, other=0)
    return pages.to(gl.int32)


@gluon.jit
def _copy_pages(
    desc, pages, page_rows, tile, first, last, head, full, memory,
    PAGE: gl.constexpr, PIECE: gl.constexpr, BLOCK_N: gl.constexpr, HAS_LEFT: gl.constexpr,
):  # fmt: skip
    """Copy a tile of one head from its pages; keys outside of ``[first, last)`` become zeros.

    The map is one of rows, ``page_rows`` from one page to the next. It ends a piece where the keys
    end (see ``coordinates``), or begins it where they begin: rows below 0 read as zeros, too. So
    what is not seen is not read, and a piece without keys has no page.
    """
    index = gl.arange(0, LANES, pages.type.layout)
    mbarrier.expect(full, desc.block_type.nbytes * (BLOCK_N // PIECE))
    for i in gl.static_range(BLOCK_N // PIECE):
        key = tile * BLOCK_N + i * PIECE
        row = gl.sum(gl.where(index == i, pages, 0), 0) * page_rows + key % PAGE
        size = gl.maximum(gl.minimum(last - key, PIECE), 0)
        x, y, _, start, _ = coordinates(0, head, row, size, 0, True)
        if HAS_LEFT:
            before = gl.maximum(gl.minimum(first - key, PIECE), 0)
            x = gl.where(before > 0, 0, RAGGED_ROWS)
            y = gl.where(before > 0, row + before, y)
            start = gl.where(before > 0, -before, start)
        copy_in(desc, (x, y, head, start, 0), full, memory.slice(i * PIECE, PIECE, 3))


@gluon.jit
def produce(
    q_desc, k_desc, v_desc, q_s, k_s, v_s, fields_s, q_full, q_empty, k_full, v_full,
    tile_full, tile_empty, ticket_ptr, block_table_ptr, cu_seqlens_q_ptr, seqlens_k_ptr,
    window_left, window_right, batch, packs, total, page_rows_k, page_rows_v,
    stride_table_b, stride_table_p,
    GROUP: gl.constexpr, PACK: gl.constexpr, PAGE: gl.constexpr, PIECE: gl.constexpr,
    MIN_TOKENS: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES_K: gl.constexpr, STAGES_V: gl.constexpr,
):  # fmt: skip
    """Copy tiles of queries, keys and values into shared memory, in the order of their use."""
    TOKENS: gl.constexpr = ROWS // PACK  # of a warpgroup
    index = gl.arange(0, FIELDS, gl.BlockedLayout([1], [32], [1], [0]))
    count = 0  # tiles of queries
    turn = 0  # tiles of keys
    turn_v = 0  # tiles of values
    ticket, first_row, sequence, q_start, len_q, len_k = _next_tile(
        gl.program_id(0), total, ticket_ptr, cu_seqlens_q_ptr, seqlens_k_ptr, batch, packs,
        2 * TOKENS, MIN_TOKENS,
    )  # fmt: skip
    while ticket < total:
        low, _, _, high = key_tiles(
            first_row, len_q, len_k, window_left, window_right, HAS_LEFT, HAS_RIGHT,
            2 * TOKENS, BLOCK_N,
        )  # fmt: skip
        head = ticket % packs * PACK
        slot = count % SLOTS
        mbarrier.wait(tile_empty.index(slot), (count // SLOTS & 1) ^ 1)
        fields = gl.where(index == FIRST_ROW, first_row, head)
        fields = gl.where(index == SEQUENCE, sequence, fields)
        fields = gl.where(index == Q_START, q_start, fields)
        fields = gl.where(index == LEN_Q, len_q, fields)
        fields = gl.where(index == LEN_K, len_k, fields)
        fields_s.index(slot).store(fields)
        mbarrier.arrive(tile_full.index(slot), count=1)

        head_k = head // GROUP
        first = 0
        if HAS_LEFT:
            first = gl.maximum(first_row + len_k - len_q - window_left, 0)
        table = block_table_ptr + sequence.to(gl.int64) * stride_table_b
        pages_v = gl.zeros([LANES], gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
        steps = high - low
        for step in range(steps + 1):
            # keys one tile ahead of values; their pages are looked up before there is room
            pages = pages_v
            if step < steps:
                tile = high - 1 - step
                pages = _look_up(table, stride_table_p, tile, first, len_k, PAGE, PIECE, BLOCK_N)
                stage = turn % STAGES_K
                if turn >= STAGES_K:
                    barrier_sync(EMPTY + stage, PARTIES, 1)
                _copy_pages(
                    k_desc, pages, page_rows_k, tile, first, len_k, head_k, k_full.index(stage),
                    k_s.index(stage), PAGE, PIECE, BLOCK_N, HAS_LEFT,
                )  # fmt: skip
                turn += 1
            if step == 0:
                for w in gl.static_range(2):
                    row = first_row + w * TOKENS
                    where = coordinates(sequence, head, q_start, len_q, row, True)
                    mbarrier.wait(q_empty.index(w), (count & 1) ^ 1)
                    mbarrier.expect(q_full.index(w), q_desc.block_type.nbytes)
                    copy_in(q_desc, where, q_full.index(w), q_s.index(w))
            else:
                stage = turn_v % STAGES_V
                if turn_v >= STAGES_V:
                    barrier_sync(EMPTY + STAGES_K + stage, PARTIES, 1)
                _copy_pages(
                    v_desc, pages_v, page_rows_v, high - step, first, len_k, head_k,
                    v_full.index(stage), v_s.index(stage), PAGE, PIECE, BLOCK_N, HAS_LEFT,
                )  # fmt: skip
                turn_v += 1
            pages_v = pages
        count += 1
        ticket = gl.num_programs(0) + gl.atomic_add(ticket_ptr, 1, sem="relaxed")
        ticket, first_row, sequence, q_start, len_q, len_k = _next_tile(
            ticket, total, ticket_ptr, cu_seqlens_q_ptr, seqlens_k_ptr, batch, packs,
            2 * TOKENS, MIN_TOKENS,
        )  # fmt: skip
    slot = count % SLOTS
    mbarrier.wait(tile_empty.index(slot), (count // SLOTS & 1) ^ 1)
    fields_s.index(slot).store(index * 0 - 1)
    mbarrier.arrive(tile_full.index(slot), count=1)
    # nobody may be left at a barrier
    for back in gl.static_range(STAGES_K):
        if turn > back:
            barrier_sync(EMPTY + (turn - 1 - back) % STAGES_K, PARTIES, 1)
    for back in gl.static_range(STAGES_V):
        if turn_v > back:
            barrier_sync(EMPTY + STAGES_K + (turn_v - 1 - back) % STAGES_V, PARTIES, 1)
    if ticket == total + gl.num_programs(0) - 1:
        # the last to ask: ready for the next launch
        gl.atomic_xchg(ticket_ptr, 0, sem="relaxed")
