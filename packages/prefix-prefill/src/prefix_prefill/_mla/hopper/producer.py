"""The rows and keys of a program, and the producer warp, which copies pages by TMA."""

from ..._linked.hopper.compat import copy_in, gl, gluon, mbarrier
from ..._linked.hopper.pipeline import EMPTY, SEARCH_CHUNK, TURN, barrier_sync, coordinates
from . import arguments
from .structures import Work

HALF = gl.constexpr(arguments.HALF)


@gluon.jit
def _find_sequence(cu_seqlens_q_ptr, slot, batch, TILE: gl.constexpr):
    """Return the sequence that owns a slot: see ``find_sequence`` in the portable kernel."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    owned = 0
    for first in range(0, batch + 1, SEARCH_CHUNK):
        index = first + gl.arange(0, SEARCH_CHUNK, layout)  # [SEARCH_CHUNK]
        start = gl.load(cu_seqlens_q_ptr + index, mask=index <= batch, other=0)
        mine = (start * TILE.GROUP // TILE.ROWS + index < slot) & (index <= batch)
        owned += gl.sum(mine.to(gl.int32), 0)
    # sums go through shared memory, which Triton may reuse without a barrier
    barrier_sync(TURN + 2, 128, 4)
    return owned - 1


@gluon.jit
def work_of(program, tensors, numbers, TILE: gl.constexpr):
    """Return a program's ``Work`` (see ``locate``); all warps call it before barriers are made."""
    cu_seqlens_q_ptr, batch, splits = tensors.cu_seqlens_q_ptr, numbers.batch, numbers.splits
    split, unit = program % splits, program // splits
    if TILE.TILES > 0:
        sequence = unit // TILE.TILES
    else:
        sequence = _find_sequence(cu_seqlens_q_ptr, unit, batch, TILE)
    is_real = (sequence >= 0) & (sequence < batch)
    q_start = gl.load(cu_seqlens_q_ptr + sequence, mask=is_real, other=0)
    q_end = gl.load(cu_seqlens_q_ptr + sequence + 1, mask=is_real, other=0)
    len_k = gl.load(tensors.seqlens_k_ptr + sequence, mask=is_real, other=0)
    len_q = q_end - q_start
    tiles = gl.cdiv(len_q * TILE.GROUP, TILE.ROWS)
    if TILE.TILES > 0:
        tile = unit % TILE.TILES
    else:
        # the last tile sees the most keys under a causal mask, and starts first
        tile = tiles - 1 - (unit - (q_start * TILE.GROUP // TILE.ROWS + sequence + 1))
    has_rows = is_real & (tile >= 0) & (tile < tiles)
    # a program without rows has len_q 0 below, so no row of it is inside
    row = gl.where(has_rows, tile * TILE.ROWS, 0)
    last, whole = len_k, len_k
    if TILE.CAUSAL:
        diagonal = len_k - len_q
        last_row = gl.minimum(row + TILE.ROWS, len_q * TILE.GROUP) - 1
        last = gl.minimum(len_k, last_row // TILE.GROUP + diagonal + 1)
        whole = gl.minimum(len_k, row // TILE.GROUP + diagonal + 1)
    last = gl.where(has_rows, gl.maximum(last, 0), 0)
    key_tiles = gl.cdiv(last, TILE.BLOCK_N)
    most = gl.cdiv(key_tiles, splits)
    begin = gl.minimum(split * most, key_tiles)
    end = gl.minimum(begin + most, key_tiles)
    len_q = gl.where(has_rows, len_q, 0)
    return Work(row, sequence, q_start, len_q, len_k, begin, end, last, whole)


@gluon.jit
def _rows_of(tile, last, entries, inputs, TILE: gl.constexpr):
    """Return the first row of each piece of a tile in the cache's tensor map."""
    PIECES: gl.constexpr = TILE.BLOCK_N // TILE.PIECE
    rows = ()
    for i in gl.static_range(PIECES):
        key = tile * TILE.BLOCK_N + i * TILE.PIECE
        entry = entries + (key // TILE.PAGE).to(gl.int64) * inputs.table.page
        page = gl.load(entry, mask=key < last, other=0).to(gl.int32)
        rows += (page * inputs.page_rows + key % TILE.PAGE,)
    return rows


@gluon.jit
def _copy_columns(tile, rows, last, desc, full, memory, COLUMN: gl.constexpr, TILE: gl.constexpr):
    """Copy columns of a tile, whose pieces begin at ``rows``; keys from ``last`` on are zeros."""
    PIECES: gl.constexpr = TILE.BLOCK_N // TILE.PIECE
    for i in gl.static_range(PIECES):
        size = gl.maximum(gl.minimum(last - (tile * TILE.BLOCK_N + i * TILE.PIECE), TILE.PIECE), 0)
        x, y, head, start, _ = coordinates(0, 0, rows[i], size, 0, True)
        where = (x, y, head, start, COLUMN)
        copy_in(desc, where, full, memory.slice(i * TILE.PIECE, TILE.PIECE, 3))


@gluon.jit
def leave(steps, WARPS: gl.constexpr, TILE: gl.constexpr):
    """Wait until all stages are free, so that no arrival is left at a barrier."""
    for back in gl.static_range(TILE.STAGES):
        if steps > back:
            stage = (steps - 1 - back) % TILE.STAGES
            barrier_sync(EMPTY + 2 * stage, TILE.PARTIES, WARPS)
            barrier_sync(EMPTY + 2 * stage + 1, TILE.PARTIES, WARPS)


@gluon.jit
def produce(work, inputs, pipeline, TILE: gl.constexpr):
    """Copy tiles of keys into shared memory from the last to the first, half by half."""
    PIECES: gl.constexpr = TILE.BLOCK_N // TILE.PIECE
    half, rest = inputs.maps.half_desc, inputs.maps.rest_desc
    entries = inputs.table_ptr + work.sequence.to(gl.int64) * inputs.table.sequence
    last = work.last
    steps = work.end - work.begin
    for step in range(steps):
        tile = work.end - 1 - step
        # page numbers are read before the stage is free
        rows = _rows_of(tile, last, entries, inputs, TILE)
        stage = step % TILE.STAGES
        full = pipeline.low_full.index(stage)
        if step >= TILE.STAGES:
            barrier_sync(EMPTY + 2 * stage, TILE.PARTIES, 1)
        mbarrier.expect(full, half.block_type.nbytes * PIECES)
        _copy_columns(tile, rows, last, half, full, pipeline.k_s.index(2 * stage), 0, TILE)
        full = pipeline.high_full.index(stage)
        if step >= TILE.STAGES:
            barrier_sync(EMPTY + 2 * stage + 1, TILE.PARTIES, 1)
        mbarrier.expect(full, (half.block_type.nbytes + rest.block_type.nbytes) * PIECES)
        k_s, rest_s = pipeline.k_s.index(2 * stage + 1), pipeline.k_rest_s.index(stage)
        _copy_columns(tile, rows, last, half, full, k_s, HALF, TILE)
        _copy_columns(tile, rows, last, rest, full, rest_s, 2 * HALF, TILE)
    leave(steps, 1, TILE)
