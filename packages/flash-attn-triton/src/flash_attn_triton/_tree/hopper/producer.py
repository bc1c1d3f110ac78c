"""The producer warp of the forward over a tree: only it follows the path from a segment up."""

from ..._dense.hopper.forward.producer import (
    announce,
    copy_queries,
    copy_values,
    drain,
    fields_of,
    find_block,
    take_ticket,
)
from ..._dense.hopper.forward.structures import Search, Task
from ..._dense.hopper.panels import copy_tile
from ..._linked.hopper.compat import gl, gluon
from ..._linked.hopper.pipeline import EMPTY, FIELDS, await_readers, coordinates, key_tiles
from .path import parent_of, run_of
from .structures import Counted, Run


@gluon.jit
def count_above(segment, parents_ptr, program, TILE: gl.constexpr):
    """Count the tiles of keys of the segments above this one."""
    tails = 0
    wholes = 0
    above = parent_of(segment, program.numbers.batch, parents_ptr)
    while above >= 0:
        run = run_of(above, program.numbers.batch, program.tensors.cu_seqlens_q_ptr)
        tails += gl.where(run.length % TILE.BLOCK_N > 0, 1, 0)
        wholes += run.length // TILE.BLOCK_N
        above = parent_of(above, program.numbers.batch, parents_ptr)
    return Counted(tails, wholes)


@gluon.jit
def next_block(ticket, total, search, parents_ptr, program, TILE: gl.constexpr):
    """Return the number of blocks, the advanced ``Search``, the ``Task`` and its ``Counted``.

    The last segments are the deepest, and their last blocks have the longest walks: they come
    first. Padding before and after the segments counts as two more segments, which see no key.
    """
    BLOCK_M: gl.constexpr = TILE.WARPGROUPS * TILE.ROWS
    numbers, starts = program.numbers, program.tensors.cu_seqlens_q_ptr
    segments = numbers.batch
    slot = ticket // numbers.heads_q
    head = ticket - slot * numbers.heads_q
    segment, place, search, blocks = find_block(slot, search, program, BLOCK_M, True)
    # the host only knows an upper bound of the number of blocks
    total = gl.where(slot < blocks, total, blocks * numbers.heads_q)
    is_real = (segment >= 0) & (segment < segments)
    start = gl.load(starts + segment, mask=is_real | (segment == segments), other=0)
    end = gl.load(starts + segment + 1, mask=is_real | (segment == -1), other=numbers.tokens_q)
    length = end - start
    len_k = gl.where(is_real, length, 0)
    first_row = (gl.cdiv(length, BLOCK_M) - 1 - place) * BLOCK_M
    task = Task(first_row, segment, head, start, start, length, len_k)
    above = count_above(segment, parents_ptr, program, TILE)
    return total, search, task, above


@gluon.jit
def _copy_keys(where, keys, turn, program, TILE: gl.constexpr):
    """Copy a tile of keys, and store ``keys``, ``[1]``, its number of keys, in ``tails_s``."""
    PARTIES: gl.constexpr = 128 * TILE.WARPGROUPS + 32
    pipeline = program.pipeline
    stage = turn % TILE.STAGES_K
    await_readers(turn, EMPTY, TILE.STAGES_K, PARTIES)
    program.tails_s.index(stage).store(keys)
    copy_tile(program.maps.k_descs, where, pipeline.k_full.index(stage), pipeline.k_s, stage)


@gluon.jit
def produce(program, parents_ptr, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Copy queries, keys and values by TMA into shared memory, in the order of their use.

    Two sweeps go up the path: the first for tiles that need a mask, the second for whole tiles. So
    one loop of the consumers takes the whole tiles of all segments. ``tails_s`` holds, for each
    tile, the number of its segment's keys from the tile's first key on.
    """
    BLOCK_M: gl.constexpr = TILE.WARPGROUPS * TILE.ROWS
    BLOCK_N: gl.constexpr = TILE.BLOCK_N
    STAGES_K: gl.constexpr = TILE.STAGES_K
    STAGES_V: gl.constexpr = TILE.STAGES_V
    PARTIES: gl.constexpr = 128 * TILE.WARPGROUPS + 32
    index = gl.arange(0, FIELDS, gl.BlockedLayout([1], [32], [1], [0]))  # [FIELDS]
    zero = gl.arange(0, 1, gl.BlockedLayout([1], [32], [1], [0]))  # [1]
    segments = program.numbers.batch
    total = program.numbers.total  # blocks of queries, of all programs
    count = 0  # blocks of queries
    turn = 0  # tiles of keys
    turn_v = 0  # tiles of values
    ticket = gl.program_id(0)
    total, search, task, above = next_block(ticket, total, Search(0, 0), parents_ptr, program, TILE)
    while ticket < total:
        _, _, right, high = key_tiles(
            task.first_row, task.len_q, task.len_k, 0, 0, False, True, BLOCK_M, BLOCK_N
        )
        numbers = fields_of(task) + (above.tails, above.wholes + right)
        announce(numbers, index, count, program.pipeline)
        head_k = task.head // OPTIONS.GROUP
        is_first = True
        # the tile whose values come next. They begin as constants: if they began as the block's
        # own values, the compiler would take the loop's first assignment for no change
        last_start = 0
        last_length = 0
        last_row = 0
        for sweep in range(2):
            run = Run(task.sequence, task.k_start, task.len_k)
            low = gl.where(sweep == 0, right, 0)
            stop = gl.where(sweep == 0, high, right)
            is_on_path = True
            while is_on_path:
                for step in range(stop - low):
                    row = (stop - 1 - step) * BLOCK_N
                    where = coordinates(0, head_k, run.start, run.length, row, True)
                    keys = zero + (run.length - row)  # [1]
                    _copy_keys(where, keys, turn, program, TILE)
                    turn += 1
                    if is_first:
                        for w in gl.static_range(TILE.WARPGROUPS):
                            buffer = count % TILE.BUFFERS_Q * TILE.WARPGROUPS + w
                            at = task.first_row + w * TILE.ROWS
                            where = coordinates(0, task.head, task.q_start, task.len_q, at, True)
                            copy_queries(where, buffer, count, program, TILE)
                        if TILE.PIPELINE:
                            # the atomic runs while the first keys arrive
                            ticket = take_ticket(program)
                    else:
                        # values are copied one tile after their keys
                        where = coordinates(0, head_k, last_start, last_length, last_row, True)
                        copy_values(where, turn_v, program, TILE)
                        turn_v += 1
                    is_first = False
                    last_start = run.start
                    last_length = run.length
                    last_row = row
                above_it = parent_of(run.segment, segments, parents_ptr)
                is_on_path = above_it >= 0
                run = run_of(above_it, segments, program.tensors.cu_seqlens_q_ptr)
                low = gl.where(sweep == 0, run.length // BLOCK_N, 0)
                stop = gl.where(sweep == 0, gl.cdiv(run.length, BLOCK_N), run.length // BLOCK_N)
        where = coordinates(0, head_k, last_start, last_length, last_row, True)
        copy_values(where, turn_v, program, TILE)
        turn_v += 1
        count += 1
        if not TILE.PIPELINE:
            ticket = take_ticket(program)
        total, search, task, above = next_block(ticket, total, search, parents_ptr, program, TILE)
    announce((-1, -1, -1, -1, -1, -1, 0, 0), index, count, program.pipeline)
    if TILE.PIPELINE:  # noqa: SIM102  (a constant, then a number)
        if count > 0:
            # PIPELINE issues one product after the last tile: the TMA fills an out-of-range box
            # with zeros for it
            where = coordinates(0, 0, 0, 0, 0, True)
            _copy_keys(where, zero, turn, program, TILE)
            turn += 1
            for w in gl.static_range(TILE.WARPGROUPS):
                buffer = count % TILE.BUFFERS_Q * TILE.WARPGROUPS + w
                copy_queries(where, buffer, count, program, TILE)
    drain(turn, EMPTY, STAGES_K, PARTIES)
    drain(turn_v, EMPTY + STAGES_K, STAGES_V, PARTIES)
    if ticket == total + gl.num_programs(0) - 1:
        # this program took the last number of all: reset the counter for the next launch
        gl.atomic_xchg(program.tensors.ticket_ptr, 0, sem="relaxed")
