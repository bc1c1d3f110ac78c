"""The widening warpgroups: one brings keys and one values, or one brings both.

Each reads words of a tile into registers, two parts ahead, and page numbers one part earlier. The
first also takes tile numbers from the counter, copies queries, and reads scales per token.
"""

from ..._linked.hopper.compat import gl, gluon, hopper, mbarrier
from ..._linked.hopper.pipeline import EMPTY, FIELDS, TURN, barrier_sync, opaque
from .consumer import receive
from .producer import (
    announce,
    announce_the_end,
    copy_new,
    copy_queries,
    drain,
    make_ready,
    next_ticket,
    next_tile,
)
from .scales import put_scales, read_scales
from .structures import Announced, Half, Words
from .tiles import seen_of, tile_of, tiles_of
from .widening import widened

# named barriers of the warpgroup that brings keys, and of the one that brings values
WRITTEN = gl.constexpr(TURN.value + 2)
WRITTEN_VALUES = gl.constexpr(15)

# words of a part, read at once: 16 per thread; with two wideners, half as many
WORDS = gl.constexpr(2048)


@gluon.constexpr_function
def _numbers_of_word(stored):
    """Return how many numbers a word of 32 bits holds; a byte of uint8 holds two int4."""
    return 8 if stored == gl.uint8 else 4


@gluon.constexpr_function
def _count_parts(block_n, words, wideners):
    """Return the number of parts of a tile of ``block_n`` rows of ``words`` words."""
    return max(2, block_n * words * wideners // WORDS)


@gluon.constexpr_function
def _behind(part, parts, sides):
    """Return the offset of a part from the step's tile, in parts.

    A step brings one tile of each side (keys, values). Its parts count from 0; larger numbers are
    parts of the next step, whose tile is one tile earlier.
    """
    return part % parts - part // (parts * sides) * parts


@gluon.constexpr_function
def _piece_of(page, rows):
    """Return how many of a warp's ``rows`` neighbouring rows always lie in one page."""
    return min(page & -page, rows)


@gluon.constexpr_function
def _layout_of(units, piece, words, numbers):
    """Return the layout of a part, ``[units, piece, words]``: a warp holds neighbouring rows.

    A thread reads four words. A quarter of a warp, whose stores to shared memory go in one pass,
    covers two or four rows, because the numbers of one row take only every second or fourth of the
    16-byte chunks that the 128-byte swizzle permutes.
    """
    rows = units * piece

    def row(n):
        return [n // piece, n % piece, 0]

    in_row = max(words // 4, 1)
    both = min(in_row, 16 // numbers)  # lanes that share 128 bytes of a row
    lanes, at = [[0, 0, 4 << n] for n in range(both.bit_length() - 1)], 1
    while len(lanes) < 3:
        lanes.append(row(at))
        at *= 2
    lanes += [[0, 0, 4 * n] for n in (both, 2 * both, 4 * both, 8 * both) if n < in_row]
    while len(lanes) < 5:
        lanes.append(row(at))
        at *= 2
    registers = [[0, 0, 1], [0, 0, 2]]
    while at < rows // 4:
        registers.append(row(at))
        at *= 2
    warps = [row(rows // 4), row(rows // 2)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [units, piece, words])


@gluon.constexpr_function
def _log2(n):
    """Return the logarithm of a power of two, and -1 of any other number."""
    return n.bit_length() - 1 if n & (n - 1) == 0 else -1


@gluon.jit
def _page_of(unit, UNITS: gl.constexpr):
    """Return the page of a unit and its index in the page; a page has ``UNITS`` units.

    Units before the first may get any page, so a shift replaces the division where it can.
    """
    SHIFT: gl.constexpr = _log2(UNITS)
    if SHIFT >= 0:
        page, place = unit >> SHIFT, unit & (UNITS - 1)
    else:
        page, place = unit // UNITS, unit % UNITS
    return page, place


@gluon.jit
def _look_up(first, seen, entries, stride_page, LAYOUT: gl.constexpr, TILE: gl.constexpr):
    """Return the page of each unit from ``first`` on, ``[units]``; units without keys read none."""
    UNITS: gl.constexpr = LAYOUT.shape[0]
    PIECE: gl.constexpr = LAYOUT.shape[1]
    layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))
    unit = first + gl.arange(0, UNITS, layout)  # [UNITS]
    is_wanted = (unit * PIECE < seen.last) & (unit * PIECE + PIECE > seen.first)
    number, _ = _page_of(unit, TILE.PAGE // PIECE)
    entry = entries + number.to(gl.int64) * stride_page
    return gl.load(entry, mask=is_wanted, other=0).to(gl.int32)


@gluon.jit
def _read(first, pages, cache, seen, LAYOUT: gl.constexpr, TILE: gl.constexpr):
    """Read units from ``first`` on, ``[units, piece, words]``; keys that no row sees are zeros."""
    UNITS: gl.constexpr = LAYOUT.shape[0]
    PIECE: gl.constexpr = LAYOUT.shape[1]
    WIDTH: gl.constexpr = LAYOUT.shape[2]
    rows: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    unit = first + gl.arange(0, UNITS, gl.SliceLayout(1, rows))  # [UNITS]
    place = gl.arange(0, PIECE, gl.SliceLayout(0, rows))  # [PIECE]
    # [WIDTH]
    cols = gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    _, inside = _page_of(unit, TILE.PAGE // PIECE)
    row = (pages * cache.page_rows + inside * PIECE)[:, None] + place[None, :]  # [UNITS, PIECE]
    at = cache.ptr + (row.to(gl.int64) * cache.stride_slot)[:, :, None]
    at = gl.multiple_of(at, [16, 16, 16]) + cols[None, None, :]
    key = (unit * PIECE)[:, None] + place[None, :]  # [UNITS, PIECE]
    mask = ((key >= seen.first) & (key < seen.last))[:, :, None]
    if TILE.WIDTH < TILE.HEAD_DIM:
        mask = mask & (cols < TILE.WIDTH * WIDTH // TILE.HEAD_DIM)[None, None, :]
    # keys are read once, so they bypass L1, which keeps the page table
    return gl.load(at, mask=mask, other=0, cache_modifier=".cg")


@gluon.jit
def _put(words, memory, part: gl.constexpr, STORED: gl.constexpr, TILE: gl.constexpr):
    """Store a part of a tile in shared memory, in 16 bits."""
    COUNT: gl.constexpr = words.shape[0] * words.shape[1]
    tile = widened(gl.reshape(words, [COUNT, words.shape[2]]), STORED, memory.dtype)
    memory = memory.reshape([TILE.BLOCK_N, TILE.HEAD_DIM])
    memory.slice(part * COUNT, COUNT, 0).store(tile)


@gluon.jit
def _words_of(cache, head):
    """Return the cache of one head in words of 32 bits."""
    ptr = cache.ptr + head.to(gl.int64) * cache.strides.head
    ptr = ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    return Words(ptr, cache.page_rows, cache.strides.slot // 4)


@gluon.jit
def _wait(half, turn, TILE: gl.constexpr):
    """Wait until a stage is free; return it."""
    stage = turn % half.stages
    if turn >= half.stages:
        barrier_sync(half.empty + stage, TILE.PARTIES, 4)
    return stage


@gluon.jit
def _bring_new(
    work, turn, tiles, seen, halves, SIDES: gl.constexpr, OPTIONS: gl.constexpr, TILE: gl.constexpr
):
    """Copy new keys or values by TMA, tile by tile; return the running count of tiles."""
    LEFT: gl.constexpr = OPTIONS.HAS_LEFT
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    for step in range(tiles.cached, tiles.high - tiles.low):
        number = tile_of(step, tiles, OPTIONS) - tiles.new
        for side in gl.static_range(SIDES):
            half = halves[side]
            stage = _wait(half, turn, TILE)
            if half.scales_s is not None:
                # new keys and values have no scale
                ones = gl.full([TILE.BLOCK_N], 1.0, gl.float32, layout)
                put_scales(ones, ones, stage, half.scales_s)
                barrier_sync(half.written, 128, 4)
            full, memory = half.full.index(stage), half.memory.index(stage)
            copy_new(number, work.q_start, half.new_desc, seen, full, memory, LEFT, TILE)
        turn += 1
    return turn


@gluon.jit
def _bring(
    work, turn, halves, inputs, SIDES: gl.constexpr, OPTIONS: gl.constexpr, TILE: gl.constexpr
):
    """Bring the keys, values or both that a tile of queries sees; return the count of tiles."""
    N: gl.constexpr = TILE.BLOCK_N
    STORED: gl.constexpr = halves[0].cache.ptr.dtype.element_ty
    NUMBERS: gl.constexpr = _numbers_of_word(STORED)
    WIDTH: gl.constexpr = TILE.HEAD_DIM // NUMBERS
    PARTS: gl.constexpr = _count_parts(N, WIDTH, TILE.WIDENERS)
    COUNT: gl.constexpr = N // PARTS
    PIECE: gl.constexpr = _piece_of(TILE.PAGE, COUNT // 4)
    UNITS: gl.constexpr = COUNT // PIECE  # units of a part
    LAYOUT: gl.constexpr = _layout_of(UNITS, PIECE, WIDTH, NUMBERS)
    HAS_SCALES: gl.constexpr = halves[0].scales_s is not None
    tiles = tiles_of(work.first_row, work.len_q, work.len_k, inputs.scores, OPTIONS, TILE)
    head_k = work.head // TILE.GROUP
    # reads run past the first tile, where no key is visible, so they read nothing
    first = 0
    if OPTIONS.HAS_LEFT:
        first = gl.maximum(work.first_row + work.len_k - work.len_q - inputs.scores.window_left, 0)
    seen, new_seen = seen_of(head_k, first, work.len_k, tiles, OPTIONS)
    table = inputs.table
    entries = table.ptr + work.sequence.to(gl.int64) * table.stride_sequence
    stride_page = table.stride_page
    caches = _words_of(halves[0].cache, head_k), _words_of(halves[SIDES - 1].cache, head_k)
    steps = tiles.high - tiles.low
    if OPTIONS.HAS_NEW:
        steps = tiles.cached
    last = tiles.new - 1
    unit = last * (N // PIECE)
    pages = _look_up(unit, seen, entries, stride_page, LAYOUT, TILE)
    even = _read(unit, pages, caches[0], seen, LAYOUT, TILE)
    pages = _look_up(unit + UNITS, seen, entries, stride_page, LAYOUT, TILE)
    odd = _read(unit + UNITS, pages, caches[0], seen, LAYOUT, TILE)
    finds = unit + _behind(2, PARTS, SIDES) * UNITS
    pages = _look_up(finds, seen, entries, stride_page, LAYOUT, TILE)
    if HAS_SCALES:
        k_scale, v_scale = read_scales(last * N, inputs, seen, entries, TILE)
    for step in range(steps):
        unit = (last - step) * (N // PIECE)
        if PIECE < COUNT // 4:
            # keeps LLVM from holding a pointer into the page table for each row of a step
            unit = opaque(unit)
        for pair in gl.static_range(SIDES * PARTS // 2):
            half = halves[2 * pair // PARTS]
            if 2 * pair % PARTS == 0:
                stage = _wait(half, turn, TILE)
            if HAS_SCALES and pair == 0:
                put_scales(k_scale, v_scale, stage, half.scales_s)
                k_scale, v_scale = read_scales((last - step - 1) * N, inputs, seen, entries, TILE)
            memory = half.memory.index(stage)
            # while a part is stored, the next two are read, and page numbers after them
            reads = unit + _behind(2 * pair + 2, PARTS, SIDES) * UNITS
            finds = unit + _behind(2 * pair + 4, PARTS, SIDES) * UNITS
            cache = caches[(2 * pair + 2) // PARTS % SIDES]
            _put(even, memory, 2 * pair % PARTS, STORED, TILE)
            even = _read(reads, pages, cache, seen, LAYOUT, TILE)
            pages = _look_up(reads + UNITS, seen, entries, stride_page, LAYOUT, TILE)
            _put(odd, memory, 2 * pair % PARTS + 1, STORED, TILE)
            if (2 * pair + 2) % PARTS == 0:
                # one thread arrives for the warpgroup
                hopper.fence_async_shared()
                barrier_sync(half.written, 128, 4)
                mbarrier.arrive(half.full.index(stage), count=1)
            odd = _read(reads + UNITS, pages, cache, seen, LAYOUT, TILE)
            pages = _look_up(finds, seen, entries, stride_page, LAYOUT, TILE)
        turn += 1
    if OPTIONS.HAS_NEW:
        turn = _bring_new(work, turn, tiles, new_seen, halves, SIDES, OPTIONS, TILE)
    return turn


@gluon.jit
def bring_first(inputs, pipeline, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Bring queries and keys (with one widener also values) until no ticket is left."""
    SIDES: gl.constexpr = 3 - TILE.WIDENERS
    index = gl.arange(0, FIELDS, gl.BlockedLayout([1], [32], [4], [0]))  # [FIELDS]
    count = 0  # tiles of queries
    turn = 0  # tiles of keys
    tickets, sequences = inputs.tickets, inputs.sequences
    full, memory, scales_s = pipeline.k_full, pipeline.k_s, inputs.scales_s
    keys = Half(inputs.k, inputs.new_k_desc, full, memory, scales_s, EMPTY, TILE.STAGES_K, WRITTEN)
    full, memory, empty = pipeline.v_full, pipeline.v_s, EMPTY + TILE.STAGES_K
    values = Half(inputs.v, inputs.new_v_desc, full, memory, None, empty, TILE.STAGES_V, WRITTEN)
    work = next_tile(gl.program_id(0), tickets, sequences, TILE)
    while work.ticket < tickets.total:
        head = work.ticket % tickets.packs * TILE.PACK
        announce(index, work, head, count, pipeline)
        copy_queries(work, head, count, inputs.q_desc, pipeline, TILE)
        told = Announced(head, work.sequence, work.first_row, work.q_start, work.len_q, work.len_k)
        turn = _bring(told, turn, (keys, values), inputs, SIDES, OPTIONS, TILE)
        count += 1
        work = next_tile(next_ticket(tickets), tickets, sequences, TILE)
    announce_the_end(index, count, pipeline)
    drain(turn, EMPTY, TILE.STAGES_K, TILE.PARTIES, 4)
    if SIDES == 2:
        drain(turn, EMPTY + TILE.STAGES_K, TILE.STAGES_V, TILE.PARTIES, 4)
    make_ready(work, tickets)


@gluon.jit
def bring_values(inputs, pipeline, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Bring the values of every tile of queries that the first warpgroup announces."""
    count = 0  # tiles of queries
    turn = 0  # tiles of values
    full, memory, empty = pipeline.v_full, pipeline.v_s, EMPTY + TILE.STAGES_K
    values = Half(
        inputs.v, inputs.new_v_desc, full, memory, None, empty, TILE.STAGES_V, WRITTEN_VALUES
    )
    work = receive(pipeline, count)
    while work.head >= 0:
        turn = _bring(work, turn, (values, values), inputs, 1, OPTIONS, TILE)
        count += 1
        work = receive(pipeline, count)
    drain(turn, EMPTY + TILE.STAGES_K, TILE.STAGES_V, TILE.PARTIES, 4)
