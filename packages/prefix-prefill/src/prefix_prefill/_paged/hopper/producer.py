"""The producer warp: it takes tiles of queries and copies queries, keys and values by TMA."""

from ..._linked.hopper.compat import copy_in, gl, gluon, mbarrier
from ..._linked.hopper.pipeline import (
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
)
from .structures import Walk, Work
from .tiles import seen_of, tile_of, tiles_of

# lanes of the warp; each holds the page number of one piece of a tile of keys
LANES = gl.constexpr(32)


@gluon.jit
def _find_sequence(sequences, slot, BLOCK: gl.constexpr, WARPS: gl.constexpr):
    """Return the sequence that owns a slot; -1 is padding before the first, ``batch`` after all.

    Sequence ``b`` owns the slots from ``cu_seqlens[b] // BLOCK + b + 1`` on. With several warps
    each searches all sequences, because sums over warps would go through shared memory.
    """
    EACH: gl.constexpr = 1 if WARPS == 1 else SEARCH_CHUNK // 32
    layout: gl.constexpr = gl.BlockedLayout([EACH], [32], [WARPS], [0])
    batch = sequences.batch
    owned = 0
    for first in range(0, batch + 1, SEARCH_CHUNK):
        index = first + gl.arange(0, SEARCH_CHUNK, layout)  # [SEARCH_CHUNK]
        start = gl.load(sequences.cu_seqlens_q_ptr + index, mask=index <= batch, other=0)
        mine = (start // BLOCK + index < slot) & (index <= batch)
        owned += gl.sum(mine.to(gl.int32), 0)
    return owned - 1


@gluon.jit
def _locate(ticket, tickets, sequences, TILE: gl.constexpr):
    """Return the ``Work`` of a tile number (ticket); a first row below 0: there is no such tile.

    Tile numbers count packs of heads first, then slots. A sequence owns slots in proportion to its
    length, and its last block comes first, because under a causal mask it sees the most keys.
    """
    BLOCK: gl.constexpr = TILE.WARPGROUPS * (TILE.ROWS // TILE.PACK)
    slot = ticket // tickets.packs
    sequence = _find_sequence(sequences, slot, BLOCK, TILE.WARPS)
    is_real = (sequence >= 0) & (sequence < sequences.batch)
    q_start = gl.load(sequences.cu_seqlens_q_ptr + sequence, mask=is_real, other=0)
    q_end = gl.load(sequences.cu_seqlens_q_ptr + sequence + 1, mask=is_real, other=0)
    len_k = gl.load(sequences.seqlens_k_ptr + sequence, mask=is_real, other=0)
    len_q = q_end - q_start
    block = gl.cdiv(len_q, BLOCK) - 1 - (slot - (q_start // BLOCK + sequence + 1))
    block = gl.where(is_real & (len_q >= TILE.MIN_TOKENS), block, -1)
    return Work(ticket, block * BLOCK, sequence, q_start, len_q, len_k)


@gluon.jit
def next_ticket(tickets):
    """Take a tile number from the counter; the first one of a program is its program id."""
    return gl.num_programs(0) + gl.atomic_add(tickets.ptr, 1, sem="relaxed")


@gluon.jit
def _settle(work, tickets, sequences, TILE: gl.constexpr):
    """Return ``work``, or if it has no queries the next ``Work`` from the counter that has."""
    while (work.first_row < 0) & (work.ticket < tickets.total):
        work = _locate(next_ticket(tickets), tickets, sequences, TILE)
    return work


@gluon.jit
def next_tile(ticket, tickets, sequences, TILE: gl.constexpr):
    """Return the ``Work`` of a ticket, or of the next one from the counter that has queries."""
    return _settle(_locate(ticket, tickets, sequences, TILE), tickets, sequences, TILE)


@gluon.jit
def look_up(pages, stride_page, tile, seen, TILE: gl.constexpr):
    """Return the page numbers of a tile's pieces, one per lane; pieces without keys read none."""
    index = gl.arange(0, LANES, gl.BlockedLayout([1], [32], [1], [0]))  # [LANES]
    key = tile * TILE.BLOCK_N + index * TILE.PIECE
    is_wanted = (index < TILE.BLOCK_N // TILE.PIECE) & (key < seen.last)
    is_wanted &= key + TILE.PIECE > seen.first
    entries = pages + (key // TILE.PAGE).to(gl.int64) * stride_page
    found = gl.load(entries, mask=is_wanted, other=0)
    return found.to(gl.int32)


@gluon.jit
def _copy_piece(key, row, desc, seen, full, memory, HAS_LEFT: gl.constexpr, PIECE: gl.constexpr):
    """Copy the piece that begins at ``key``; keys outside of ``[first, last)`` become zeros.

    The tensor map has one row per slot. Its bounds cut a piece at the last key (see
    ``coordinates``) or at the first one: rows below 0 read as zeros, too. So keys that no row sees
    are not read.
    """
    size = gl.maximum(gl.minimum(seen.last - key, PIECE), 0)
    x, y, _, start, _ = coordinates(0, seen.head, row, size, 0, True)
    if HAS_LEFT:
        before = gl.maximum(gl.minimum(seen.first - key, PIECE), 0)
        x = gl.where(before > 0, 0, RAGGED_ROWS)
        y = gl.where(before > 0, row + before, y)
        start = gl.where(before > 0, -before, start)
    copy_in(desc, (x, y, seen.head, start, 0), full, memory)


@gluon.jit
def _copy_pages(
    begin, pages, cache, seen, full, memory, HAS_LEFT: gl.constexpr, TILE: gl.constexpr
):
    """Copy the tile of one head that begins at key ``begin``, piece by piece."""
    PIECES: gl.constexpr = TILE.BLOCK_N // TILE.PIECE
    index = gl.arange(0, LANES, pages.type.layout)  # [LANES]
    mbarrier.expect(full, cache.desc.block_type.nbytes * PIECES)
    for i in gl.static_range(PIECES):
        key = begin + i * TILE.PIECE
        row = gl.sum(gl.where(index == i, pages, 0), 0) * cache.page_rows + key % TILE.PAGE
        target = memory.slice(i * TILE.PIECE, TILE.PIECE, 3)
        _copy_piece(key, row, cache.desc, seen, full, target, HAS_LEFT, TILE.PIECE)


@gluon.jit
def copy_new(number, q_start, desc, seen, full, memory, HAS_LEFT: gl.constexpr, TILE: gl.constexpr):
    """Copy a tile of new keys or values of one head; ``number`` counts the tiles of new keys."""
    PIECES: gl.constexpr = TILE.BLOCK_N // TILE.NEW_PIECE
    mbarrier.expect(full, desc.block_type.nbytes * PIECES)
    for i in gl.static_range(PIECES):
        key = number * TILE.BLOCK_N + i * TILE.NEW_PIECE
        target = memory.slice(i * TILE.NEW_PIECE, TILE.NEW_PIECE, 3)
        _copy_piece(key, q_start + key, desc, seen, full, target, HAS_LEFT, TILE.NEW_PIECE)


@gluon.jit
def announce(index, work, head, count, pipeline):
    """Announce the next tile of queries to the consumers; ``index`` is ``arange(FIELDS)``."""
    slot = count % SLOTS
    mbarrier.wait(pipeline.tile_empty.index(slot), (count // SLOTS & 1) ^ 1)
    fields = gl.where(index == FIRST_ROW, work.first_row, head)
    fields = gl.where(index == SEQUENCE, work.sequence, fields)
    fields = gl.where(index == Q_START, work.q_start, fields)
    fields = gl.where(index == LEN_Q, work.len_q, fields)
    fields = gl.where(index == LEN_K, work.len_k, fields)
    pipeline.fields_s.index(slot).store(fields)
    mbarrier.arrive(pipeline.tile_full.index(slot), count=1)


@gluon.jit
def announce_the_end(index, count, pipeline):
    """Announce to the consumers that no tile of queries is left."""
    slot = count % SLOTS
    mbarrier.wait(pipeline.tile_empty.index(slot), (count // SLOTS & 1) ^ 1)
    pipeline.fields_s.index(slot).store(index * 0 - 1)
    mbarrier.arrive(pipeline.tile_full.index(slot), count=1)


@gluon.jit
def copy_queries(work, head, count, q_desc, pipeline, TILE: gl.constexpr):
    """Copy tile of queries number ``count``: one buffer for each warpgroup."""
    for w in gl.static_range(TILE.WARPGROUPS):
        row = work.first_row + w * (TILE.ROWS // TILE.PACK)
        where = coordinates(work.sequence, head, work.q_start, work.len_q, row, True)
        buffer = count % TILE.BUFFERS_Q * TILE.WARPGROUPS + w
        full = pipeline.q_full.index(buffer)
        mbarrier.wait(pipeline.q_empty.index(buffer), (count // TILE.BUFFERS_Q & 1) ^ 1)
        mbarrier.expect(full, q_desc.block_type.nbytes)
        copy_in(q_desc, where, full, pipeline.q_s.index(buffer))


@gluon.jit
def _copy_half(
    tile,
    pages,
    turn,
    walk,
    inputs,
    pipeline,
    IS_V: gl.constexpr,
    OPTIONS: gl.constexpr,
    TILE: gl.constexpr,
):
    """Copy a tile of keys or values as soon as its stage is free."""
    if IS_V:
        cache, new_desc, full, memory = inputs.v, inputs.new_v_desc, pipeline.v_full, pipeline.v_s
    else:
        cache, new_desc, full, memory = inputs.k, inputs.new_k_desc, pipeline.k_full, pipeline.k_s
    STAGES: gl.constexpr = TILE.STAGES_V if IS_V else TILE.STAGES_K
    FREE: gl.constexpr = EMPTY + TILE.STAGES_K if IS_V else EMPTY
    stage = turn % STAGES
    if turn >= STAGES:
        barrier_sync(FREE + stage, TILE.PARTIES, 1)
    full, memory = full.index(stage), memory.index(stage)
    number = tile - walk.tiles.new
    if OPTIONS.HAS_NEW and number >= 0:
        seen = walk.new_seen
        copy_new(number, walk.q_start, new_desc, seen, full, memory, OPTIONS.HAS_LEFT, TILE)
    else:
        begin = tile * TILE.BLOCK_N + walk.tiles.shift
        _copy_pages(begin, pages, cache, walk.seen, full, memory, OPTIONS.HAS_LEFT, TILE)


@gluon.jit
def _copy_tile(
    index, work, count, turn, turn_v, inputs, pipeline, OPTIONS: gl.constexpr, TILE: gl.constexpr
):
    """Copy a tile of queries, and the keys and values that it sees, in the order of their use.

    Return the running counts of tiles of keys and of values, and the ``Work`` of the next ticket,
    which is located while the last stage of values is still in use.
    """
    tiles = tiles_of(work.first_row, work.len_q, work.len_k, inputs.scores, OPTIONS, TILE)
    head = work.ticket % inputs.tickets.packs * TILE.PACK
    announce(index, work, head, count, pipeline)
    first = 0
    if OPTIONS.HAS_LEFT:
        first = gl.maximum(work.first_row + work.len_k - work.len_q - inputs.scores.window_left, 0)
    seen, new_seen = seen_of(head // TILE.GROUP, first, work.len_k, tiles, OPTIONS)
    walk = Walk(tiles, seen, new_seen, work.q_start)
    table = inputs.table
    entries = table.ptr + work.sequence.to(gl.int64) * table.stride_sequence
    pages_v = gl.zeros([LANES], gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
    steps = tiles.high - tiles.low
    for step in range(steps):
        # keys are one tile ahead of values; page numbers are read before the stage is free
        tile = tile_of(step, tiles, OPTIONS)
        pages = look_up(entries, table.stride_page, tile, seen, TILE)
        _copy_half(tile, pages, turn, walk, inputs, pipeline, False, OPTIONS, TILE)
        turn += 1
        if step == 0:
            copy_queries(work, head, count, inputs.q_desc, pipeline, TILE)
        else:
            tile_v = tile_of(step - 1, tiles, OPTIONS)
            _copy_half(tile_v, pages_v, turn_v, walk, inputs, pipeline, True, OPTIONS, TILE)
            turn_v += 1
        pages_v = pages
    # with a window, the registers for the next tile are not free yet
    EARLY: gl.constexpr = not OPTIONS.HAS_LEFT
    tickets, sequences = inputs.tickets, inputs.sequences
    if EARLY:
        following = _locate(next_ticket(tickets), tickets, sequences, TILE)
    last = tile_of(steps - 1, tiles, OPTIONS)
    _copy_half(last, pages_v, turn_v, walk, inputs, pipeline, True, OPTIONS, TILE)
    if not EARLY:
        following = _locate(next_ticket(tickets), tickets, sequences, TILE)
    return turn, turn_v + 1, following


@gluon.jit
def drain(
    turn,
    FIRST: gl.constexpr,
    STAGES: gl.constexpr,
    PARTIES: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Wait until the consumers are done with all ``turn`` tiles, so that no arrival is left."""
    for back in gl.static_range(STAGES):
        if turn > back:
            barrier_sync(FIRST + (turn - 1 - back) % STAGES, PARTIES, WARPS)


@gluon.jit
def make_ready(work, tickets):
    """Reset the tile counter for the next launch, in the program that took the last number."""
    if work.ticket == tickets.total + gl.num_programs(0) - 1:
        gl.atomic_xchg(tickets.ptr, 0, sem="relaxed")


@gluon.jit
def leave(work, turn, turn_v, tickets, TILE: gl.constexpr):
    """Wait for the consumers, then reset the counter: see ``drain`` and ``make_ready``."""
    drain(turn, EMPTY, TILE.STAGES_K, TILE.PARTIES, TILE.WARPS)
    drain(turn_v, EMPTY + TILE.STAGES_K, TILE.STAGES_V, TILE.PARTIES, TILE.WARPS)
    make_ready(work, tickets)


@gluon.jit
def produce(inputs, pipeline, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Copy tiles of queries, keys and values into shared memory until no ticket is left."""
    index = gl.arange(0, FIELDS, gl.BlockedLayout([1], [32], [1], [0]))  # [FIELDS]
    count = 0  # tiles of queries
    turn = 0  # tiles of keys
    turn_v = 0  # tiles of values
    tickets, sequences = inputs.tickets, inputs.sequences
    work = next_tile(gl.program_id(0), tickets, sequences, TILE)
    while work.ticket < tickets.total:
        turn, turn_v, work = _copy_tile(
            index, work, count, turn, turn_v, inputs, pipeline, OPTIONS, TILE
        )
        count += 1
        work = _settle(work, tickets, sequences, TILE)
    announce_the_end(index, count, pipeline)
    leave(work, turn, turn_v, tickets, TILE)
