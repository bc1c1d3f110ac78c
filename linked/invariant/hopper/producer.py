"""The producer: takes tiles of queries and fills shared memory with queries, keys and values.

It is one warp that copies by TMA, or four warps that load the keys that TMA cannot copy.
"""

from ...hopper.compat import copy_in, gl, gluon, mbarrier
from ...hopper.pipeline import (
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
    locate,
)
from .consumer import PART, parties
from .gather import gather_keys, gather_values
from .keys import segments_of, tiles_of, within
from .structures import Seen, Work

# lanes of a warp; each holds the page of one piece (one copy) of a tile of keys
LANES = gl.constexpr(32)


@gluon.constexpr_function
def _lanes(warps):
    return gl.BlockedLayout([1], [32], [warps], [0])


@gluon.jit
def _find_sequence(cu_seqlens_ptr, slot, batch, BLOCK: gl.constexpr, WARPS: gl.constexpr):
    """Return the sequence that owns a slot; -1 and ``batch``: padding before and after all.

    Sequence ``b`` owns the slots from ``cu_seqlens[b] // BLOCK + b + 1`` on.
    """
    layout: gl.constexpr = _lanes(WARPS)
    owned = 0
    for first in range(0, batch + 1, SEARCH_CHUNK):
        index = first + gl.arange(0, SEARCH_CHUNK, layout)  # [SEARCH_CHUNK]
        start = gl.load(cu_seqlens_ptr + index, mask=index <= batch, other=0)
        mine = (start // BLOCK + index < slot) & (index <= batch)
        owned += gl.sum(mine.to(gl.int32), 0)
    return owned - 1


@gluon.jit
def _work_of(ticket, inputs, OPTIONS: gl.constexpr, TILE: gl.constexpr, WARPS: gl.constexpr):
    """Return the ``Work`` of a ticket and the start of its keys; a head of -1 means no work.

    Tickets count segments, if these have their own tickets, then packs of heads, then slots;
    sequences own slots by their length. A sequence's last block, which under a causal mask sees
    most keys, comes first.
    """
    BLOCK: gl.constexpr = TILE.WARPGROUPS * (TILE.ROWS // TILE.PACK)
    counts = inputs.counts
    packs, batch = counts.packs, counts.batch
    part = gl.where(counts.parts > 1, ticket % counts.parts, -1)
    place = ticket // counts.parts
    starts = inputs.cu_seqlens_q_ptr
    if starts is None:
        block, sequence, pack = locate(
            place, batch, packs, counts.tiles, counts.span, counts.last, OPTIONS.HAS_RIGHT
        )
        q_start = 0
        len_q = counts.tokens_q
        is_real = ticket < counts.total
        has_queries = is_real
    else:
        slot = place // packs
        pack = place - slot * packs
        sequence = _find_sequence(starts, slot, batch, BLOCK, WARPS)
        is_real = (sequence >= 0) & (sequence < batch)
        q_start = gl.load(starts + sequence, mask=sequence >= 0, other=0)
        q_end = gl.load(starts + sequence + 1, mask=sequence < batch, other=counts.tokens_q)
        len_q = q_end - q_start
        first = gl.where(sequence < 0, 0, q_start // BLOCK + sequence + 1)
        block = gl.cdiv(len_q, BLOCK) - 1 - (slot - first)
        has_queries = block >= 0
    len_k = counts.tokens_k
    k_start = 0
    if inputs.cu_seqlens_k_ptr is not None:
        k_start = gl.load(inputs.cu_seqlens_k_ptr + sequence, mask=is_real, other=0)
        len_k = gl.load(inputs.cu_seqlens_k_ptr + sequence + 1, mask=is_real, other=0) - k_start
    if inputs.seqlens_k_ptr is not None:
        len_k = gl.load(inputs.seqlens_k_ptr + sequence, mask=is_real, other=0)
    len_k = gl.where(is_real, len_k, 0)
    work = Work(pack * TILE.PACK, sequence, block * BLOCK, q_start, len_q, len_k, part)
    first, last = segments_of(tiles_of(work, inputs.scores, OPTIONS, TILE), part, TILE)
    has_queries &= first < last
    head = gl.where(has_queries & (ticket < counts.total), work.head, -1)
    return Work(head, sequence, work.first_row, q_start, len_q, len_k, part), k_start


@gluon.jit
def _next_work(ticket, inputs, OPTIONS: gl.constexpr, TILE: gl.constexpr, WARPS: gl.constexpr):
    """Return the next ticket with queries, this one included, its ``Work`` and its keys' start."""
    work, k_start = _work_of(ticket, inputs, OPTIONS, TILE, WARPS)
    while (work.head < 0) & (ticket < inputs.counts.total):
        ticket = _next_ticket(inputs)
        work, k_start = _work_of(ticket, inputs, OPTIONS, TILE, WARPS)
    return ticket, work, k_start


@gluon.jit
def _next_ticket(inputs):
    """Take a ticket from the tile counter; a program's first ticket is its own number."""
    return gl.num_programs(0) + gl.atomic_add(inputs.ticket_ptr, 1, sem="relaxed")


@gluon.jit
def _announce(index, work, count, pipeline):
    """Announce the next tile of queries to the consumers; ``index`` counts the fields."""
    slot = count % SLOTS
    mbarrier.wait(pipeline.tile_empty.index(slot), (count // SLOTS & 1) ^ 1)
    fields = gl.where(index == FIRST_ROW, work.first_row, work.head)
    fields = gl.where(index == SEQUENCE, work.sequence, fields)
    fields = gl.where(index == Q_START, work.q_start, fields)
    fields = gl.where(index == LEN_Q, work.len_q, fields)
    fields = gl.where(index == LEN_K, work.len_k, fields)
    fields = gl.where(index == PART, work.part, fields)
    pipeline.fields_s.index(slot).store(fields)
    mbarrier.arrive(pipeline.tile_full.index(slot), count=1)


@gluon.jit
def _copy_queries(work, count, inputs, pipeline, TILE: gl.constexpr):
    """Copy a tile of queries, one box per warpgroup."""
    RAGGED: gl.constexpr = inputs.cu_seqlens_q_ptr is not None
    for w in gl.static_range(TILE.WARPGROUPS):
        row = work.first_row + w * (TILE.ROWS // TILE.PACK)
        where = coordinates(work.sequence, work.head, work.q_start, work.len_q, row, RAGGED)
        mbarrier.wait(pipeline.q_empty.index(w), (count & 1) ^ 1)
        mbarrier.expect(pipeline.q_full.index(w), inputs.q_desc.block_type.nbytes)
        copy_in(inputs.q_desc, where, pipeline.q_full.index(w), pipeline.q_s.index(w))


@gluon.jit
def _look_up(tile, seen, inputs, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Return the pages of a tile's pieces, one per lane; pieces without visible keys have 0."""
    index = gl.arange(0, LANES, gl.BlockedLayout([1], [32], [1], [0]))  # [LANES]
    pages = index
    if OPTIONS.PAGE > 0:
        key = tile * TILE.BLOCK_N + index * OPTIONS.PIECE
        is_wanted = (index < TILE.BLOCK_N // OPTIONS.PIECE) & (key < seen.last)
        is_wanted &= key + OPTIONS.PIECE > seen.first
        table = inputs.places.table
        entries = inputs.block_table_ptr + seen.sequence.to(gl.int64) * table.sequence
        entries += (key // OPTIONS.PAGE).to(gl.int64) * table.page
        pages = gl.load(entries, mask=is_wanted, other=0).to(gl.int32)
    return pages


@gluon.jit
def _copy_keys(
    tile,
    pages,
    desc,
    page_rows,
    seen,
    full,
    memory,
    OPTIONS: gl.constexpr,
    TILE: gl.constexpr,
):
    """Copy a tile of one head; keys outside of ``[first, last)`` become zeros.

    The map has rows, with ``page_rows`` from one page or sequence to the next. A piece ends where
    the keys end (see ``coordinates``), or begins where they begin: rows below 0 are zeros, too. So
    hidden keys are not read, and a piece without keys needs no page.
    """
    PIECES: gl.constexpr = TILE.BLOCK_N // OPTIONS.PIECE
    index = gl.arange(0, LANES, pages.type.layout)  # [LANES]
    mbarrier.expect(full, desc.block_type.nbytes * PIECES)
    for i in gl.static_range(PIECES):
        key = tile * TILE.BLOCK_N + i * OPTIONS.PIECE
        if OPTIONS.PAGE > 0:
            row = gl.sum(gl.where(index == i, pages, 0), 0) * page_rows + key % OPTIONS.PAGE
        else:
            row = seen.sequence * page_rows + seen.start + key
        size = gl.maximum(gl.minimum(seen.last - key, OPTIONS.PIECE), 0)
        x, y, _, start, _ = coordinates(0, seen.head, row, size, 0, True)
        if OPTIONS.HAS_LEFT:
            before = gl.maximum(gl.minimum(seen.first - key, OPTIONS.PIECE), 0)
            x = gl.where(before > 0, 0, RAGGED_ROWS)
            y = gl.where(before > 0, row + before, y)
            start = gl.where(before > 0, -before, start)
        where = (x, y, seen.head, start, 0)
        copy_in(desc, where, full, memory.slice(i * OPTIONS.PIECE, OPTIONS.PIECE, 3))


@gluon.jit
def _copy_tile(
    work,
    k_start,
    count,
    turn,
    turn_v,
    inputs,
    pipeline,
    OPTIONS: gl.constexpr,
    TILE: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Copy a tile of queries, then its keys and values; return the tiles copied so far of both."""
    PARTIES: gl.constexpr = parties(OPTIONS, TILE)
    tiles = tiles_of(work, inputs.scores, OPTIONS, TILE)
    first, last = segments_of(tiles, work.part, TILE)
    begin = 0
    if OPTIONS.HAS_LEFT:
        begin = gl.maximum(work.first_row + work.len_k - work.len_q - inputs.scores.window_left, 0)
    context = work.len_k
    if inputs.new_k_ptr is not None:
        context = gl.maximum(work.len_k - work.len_q, 0)
        if OPTIONS.DECODE_FROM_CACHE:
            context = gl.where(work.len_q == 1, work.len_k, context)
        k_start = work.q_start
    seen = Seen(work.sequence, work.head // OPTIONS.GROUP, k_start, context, begin, work.len_k)
    for segment in range(first, last):
        part = within(tiles, segment, TILE)
        steps = part.high - part.low
        pages_v = gl.full([LANES], 0, gl.int32, _lanes(WARPS))
        for step in range(steps + 1):
            # keys are one tile ahead of values; look up their pages before waiting for a free stage
            pages = pages_v
            if step < steps:
                tile = part.high - 1 - step
                if OPTIONS.PIECE > 0:
                    pages = _look_up(tile, seen, inputs, OPTIONS, TILE)
                stage = turn % TILE.STAGES_K
                if turn >= TILE.STAGES_K:
                    barrier_sync(EMPTY + stage, PARTIES, WARPS)
                full, k_s = pipeline.k_full.index(stage), pipeline.k_s.index(stage)
                if OPTIONS.PIECE > 0:
                    rows, desc = inputs.places.page_rows_k, inputs.k_desc
                    _copy_keys(tile, pages, desc, rows, seen, full, k_s, OPTIONS, TILE)
                else:
                    gather_keys(tile, seen, inputs, full, k_s, OPTIONS, TILE)
                turn += 1
            if step == 0:
                if segment == first:
                    _copy_queries(work, count, inputs, pipeline, TILE)
            else:
                stage = turn_v % TILE.STAGES_V
                if turn_v >= TILE.STAGES_V:
                    barrier_sync(EMPTY + TILE.STAGES_K + stage, PARTIES, WARPS)
                tile = part.high - step
                full, v_s = pipeline.v_full.index(stage), pipeline.v_s.index(stage)
                if OPTIONS.PIECE > 0:
                    rows, desc = inputs.places.page_rows_v, inputs.v_desc
                    _copy_keys(tile, pages_v, desc, rows, seen, full, v_s, OPTIONS, TILE)
                else:
                    gather_values(tile, seen, inputs, full, v_s, OPTIONS, TILE)
                turn_v += 1
            pages_v = pages
    return turn, turn_v


@gluon.jit
def produce(inputs, pipeline, OPTIONS: gl.constexpr, TILE: gl.constexpr, WARPS: gl.constexpr):
    """Copy tiles of queries, keys and values into shared memory until no ticket is left."""
    PARTIES: gl.constexpr = parties(OPTIONS, TILE)
    STAGES_V: gl.constexpr = TILE.STAGES_V
    index = gl.arange(0, FIELDS, _lanes(WARPS))  # [FIELDS]
    count = 0  # number of tiles of queries so far
    turn = 0  # number of tiles of keys so far
    turn_v = 0  # number of tiles of values so far
    total = inputs.counts.total
    ticket, work, k_start = _next_work(gl.program_id(0), inputs, OPTIONS, TILE, WARPS)
    while ticket < total:
        _announce(index, work, count, pipeline)
        turn, turn_v = _copy_tile(
            work, k_start, count, turn, turn_v, inputs, pipeline, OPTIONS, TILE, WARPS
        )
        count += 1
        ticket, work, k_start = _next_work(_next_ticket(inputs), inputs, OPTIONS, TILE, WARPS)
    _announce(index, Work(-1, -1, -1, -1, -1, -1, -1), count, pipeline)
    # meet the consumers' last arrivals, so that no barrier stays incomplete
    for back in gl.static_range(TILE.STAGES_K):
        if turn > back:
            barrier_sync(EMPTY + (turn - 1 - back) % TILE.STAGES_K, PARTIES, WARPS)
    for back in gl.static_range(STAGES_V):
        if turn_v > back:
            barrier_sync(EMPTY + TILE.STAGES_K + (turn_v - 1 - back) % STAGES_V, PARTIES, WARPS)
    if ticket == total + gl.num_programs(0) - 1:
        # the last program to ask resets the counter for the next launch
        gl.atomic_xchg(inputs.ticket_ptr, 0, sem="relaxed")
