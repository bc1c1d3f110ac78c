"""The producer warp: it finds the next block of queries and copies q, k and v by TMA."""

from ...._linked.hopper.compat import gl, gluon, mbarrier
from ...._linked.hopper.pipeline import (
    EMPTY,
    FIELDS,
    announce,
    await_readers,
    coordinates,
    drain,
    locate,
)
from ..panels import copy_tile
from .bias import copy_bias
from .structures import Search, Task
from .walk import tiles_of

# fields of a tree's announcement after those of a ``Block``
TAILS = gl.constexpr(6)
WHOLES = gl.constexpr(7)
# sequences that one step of a search reads
WARP = gl.constexpr(32)


@gluon.jit
def _sum(a, b):
    return a + b


@gluon.jit
def _block_ends(search, program, BLOCK: gl.constexpr, FROM_END: gl.constexpr):
    """Return the number of blocks up to the end of each of ``WARP`` sequences: ``[WARP]``.

    Number 0 is the padding before the first sequence, or after the last one with ``FROM_END``.
    """
    cu_seqlens_ptr = program.tensors.cu_seqlens_q_ptr
    batch, tokens = program.numbers.batch, program.numbers.tokens_q
    number = search.first + gl.arange(0, WARP, gl.BlockedLayout([1], [32], [1], [0]))  # [WARP]
    index = number
    if FROM_END:
        index = batch + 1 - number
    is_sequence = (index > 0) & (index <= batch + 1)
    start = gl.load(cu_seqlens_ptr + (index - 1), mask=is_sequence, other=0)
    if FROM_END:
        end = gl.load(cu_seqlens_ptr + index, mask=(index >= 0) & (index <= batch), other=tokens)
        blocks = gl.where(index >= 0, (end - start + BLOCK - 1) // BLOCK, 0)
    else:
        end = gl.load(cu_seqlens_ptr + index, mask=index <= batch, other=tokens)
        blocks = gl.where(index <= batch + 1, (end - start + BLOCK - 1) // BLOCK, 0)
    return search.before + gl.associative_scan(blocks, 0, _sum)


@gluon.jit
def find_block(place, search, program, BLOCK: gl.constexpr, FROM_END: gl.constexpr = False):
    """Locate global block ``place``: return ``(sequence, block, search, blocks)``.

    Blocks are numbered through all sequences without gaps. Sequence -1 is the padding before the
    first sequence, and ``batch`` the padding after the last one. A place of ``blocks`` or more has
    no block. Places grow from call to call, so the next search begins at the returned ``Search``.
    ``FROM_END`` numbers the sequences from the last to the first, but not the blocks within one.
    """
    batch = program.numbers.batch
    first, before = search
    ends = _block_ends(search, program, BLOCK, FROM_END)  # [WARP]
    blocks = gl.max(ends, 0)
    while (blocks <= place) & (first + WARP < batch + 2):
        first += WARP
        before = blocks
        ends = _block_ends(Search(first, before), program, BLOCK, FROM_END)
        blocks = gl.max(ends, 0)
    is_past = ends <= place
    sequence = first - 1 + gl.sum(is_past.to(gl.int32), 0)
    if FROM_END:
        sequence = batch - 1 - sequence
    block = place - gl.maximum(before, gl.max(gl.where(is_past, ends, 0), 0))
    return sequence, block, Search(first, before), blocks


@gluon.jit
def next_tile(
    ticket, total, search, UNIT: gl.constexpr, program, OPTIONS: gl.constexpr, TILE: gl.constexpr
):
    """Return the number of blocks, the advanced ``Search`` and the ``Task`` of block ``ticket``.

    Keys before the first row's window are left out, in multiples of ``UNIT``.
    """
    BALANCE: gl.constexpr = OPTIONS.HAS_RIGHT
    BLOCK_M: gl.constexpr = TILE.WARPGROUPS * (TILE.ROWS // OPTIONS.PACK)
    tensors, numbers = program.tensors, program.numbers
    batch, packs = numbers.batch, numbers.heads_q // OPTIONS.PACK
    if tensors.cu_seqlens_q_ptr is None:
        if OPTIONS.BIAS_HEADS and not OPTIONS.BIAS_BATCH:
            # sequences that share a bias are neighbours
            place, head, sequence = locate(
                ticket, packs, batch, numbers.tiles, numbers.span, numbers.last, BALANCE
            )
        else:
            place, sequence, head = locate(
                ticket, batch, packs, numbers.tiles, numbers.span, numbers.last, BALANCE
            )
        q_start = 0
        k_start = 0
        len_q = numbers.tokens_q
        len_k = numbers.tokens_k
        is_real = ticket < total
    else:
        slot = ticket // packs
        head = ticket - slot * packs
        sequence, place, search, blocks = find_block(slot, search, program, BLOCK_M)
        # the host only knows an upper bound of the number of blocks
        total = gl.where(slot < blocks, total, blocks * packs)
        is_real = (sequence >= 0) & (sequence < batch)
        starts_q = tensors.cu_seqlens_q_ptr
        q_start = gl.load(starts_q + sequence, mask=is_real | (sequence == batch), other=0)
        q_end = gl.load(starts_q + sequence + 1, mask=sequence < batch, other=numbers.tokens_q)
        starts_k = tensors.cu_seqlens_k_ptr
        k_start = gl.load(starts_k + sequence, mask=is_real, other=0)
        k_end = gl.load(starts_k + sequence + 1, mask=is_real, other=0)
        len_q = q_end - q_start
        len_k = k_end - k_start
        if BALANCE:
            place = gl.cdiv(len_q, BLOCK_M) - 1 - place
    if tensors.seqused_k_ptr is not None:
        len_k = gl.load(tensors.seqused_k_ptr + sequence, mask=is_real, other=0)
    if OPTIONS.HAS_LEFT:
        unseen = gl.maximum(len_k - len_q - numbers.window_left, 0) // UNIT * UNIT
        k_start += unseen
        len_k -= unseen
    first_row = place * BLOCK_M
    head *= OPTIONS.PACK
    task = Task(first_row, sequence, head, q_start, k_start, len_q, len_k)
    return total, search, task


@gluon.jit
def first_tile(sequence, k_start, tokens_k, BLOCK_N: gl.constexpr, RAGGED: gl.constexpr):
    """Return the index of a sequence's first tile of transposed values; see ``values.py``."""
    if RAGGED:
        first = k_start // BLOCK_N + sequence
    else:
        first = k_start // BLOCK_N + sequence * gl.cdiv(tokens_k, BLOCK_N)
    return first


@gluon.jit
def fields_of(task):
    """Return what the producer announces of a block of queries, in the order of the fields."""
    return task.first_row, task.head, task.sequence, task.q_start, task.len_q, task.len_k


@gluon.jit
def copy_queries(where, buffer, count, program, TILE: gl.constexpr):
    """Copy a warpgroup's rows of a block of queries once their buffer is empty."""
    pipeline = program.pipeline
    mbarrier.wait(pipeline.q_empty.index(buffer), (count // TILE.BUFFERS_Q & 1) ^ 1)
    copy_tile(program.maps.q_descs, where, pipeline.q_full.index(buffer), pipeline.q_s, buffer)


@gluon.jit
def copy_keys(where, turn, program, TILE: gl.constexpr):
    """Copy a tile of keys once its stage is empty.

    Consumers arrive at named barrier ``EMPTY + stage`` when they have read the stage.
    """
    PARTIES: gl.constexpr = 128 * TILE.WARPGROUPS + 32
    pipeline = program.pipeline
    stage = turn % TILE.STAGES_K
    await_readers(turn, EMPTY, TILE.STAGES_K, PARTIES)
    copy_tile(program.maps.k_descs, where, pipeline.k_full.index(stage), pipeline.k_s, stage)


@gluon.jit
def copy_values(where, turn, program, TILE: gl.constexpr):
    """Copy a tile of values once its stage is empty."""
    PARTIES: gl.constexpr = 128 * TILE.WARPGROUPS + 32
    pipeline = program.pipeline
    stage = turn % TILE.STAGES_V
    await_readers(turn, EMPTY + TILE.STAGES_K, TILE.STAGES_V, PARTIES)
    copy_tile(program.maps.v_descs, where, pipeline.v_full.index(stage), pipeline.v_s, stage)


@gluon.jit
def produce(program, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Copy queries, keys and values by TMA into shared memory, in the order of their use."""
    BLOCK_N: gl.constexpr = TILE.BLOCK_N
    STAGES_K: gl.constexpr = TILE.STAGES_K
    STAGES_V: gl.constexpr = TILE.STAGES_V
    RAGGED: gl.constexpr = OPTIONS.RAGGED
    TOKENS: gl.constexpr = TILE.ROWS // OPTIONS.PACK
    PARTIES: gl.constexpr = 128 * TILE.WARPGROUPS + 32
    EMPTY_V: gl.constexpr = EMPTY + STAGES_K
    # FP8 values come from whole tiles; see ``values.py``
    TRANSPOSED: gl.constexpr = program.maps.v_descs[0].dtype.primitive_bitwidth == 8
    UNIT: gl.constexpr = BLOCK_N if TRANSPOSED else 1
    index = gl.arange(0, FIELDS, gl.BlockedLayout([1], [32], [1], [0]))  # [FIELDS]
    total = program.numbers.total  # blocks of queries, of all programs
    count = 0  # blocks of queries
    turn = 0  # tiles of keys
    turn_v = 0  # tiles of values
    ticket = gl.program_id(0)
    total, search, task = next_tile(ticket, total, Search(0, 0), UNIT, program, OPTIONS, TILE)
    while ticket < total:
        low, _, _, high = tiles_of(
            task, task.first_row, TILE.WARPGROUPS * TOKENS, program, OPTIONS, TILE
        )
        announce(fields_of(task), index, count, program.pipeline)
        head_k = task.head // OPTIONS.GROUP
        steps = high - low
        for step in range(steps + 1):
            # keys are copied one tile before their values
            if step < steps:
                row = (high - 1 - step) * BLOCK_N
                where = coordinates(task.sequence, head_k, task.k_start, task.len_k, row, RAGGED)
                copy_keys(where, turn, program, TILE)
                if program.bias is not None:
                    key = (high - 1 - step) * BLOCK_N
                    copy_bias(task, key, turn, program, OPTIONS, TILE)
                turn += 1
            if step == 0:
                for w in gl.static_range(TILE.WARPGROUPS):
                    buffer = count % TILE.BUFFERS_Q * TILE.WARPGROUPS + w
                    row = task.first_row + w * TOKENS
                    where = coordinates(
                        task.sequence, task.head, task.q_start, task.len_q, row, RAGGED
                    )
                    copy_queries(where, buffer, count, program, TILE)
                if TILE.PIPELINE:
                    # the atomic runs while the first keys arrive
                    ticket = take_ticket(program)
            else:
                row = (high - step) * BLOCK_N
                if TRANSPOSED:
                    tile = first_tile(
                        task.sequence, task.k_start, program.numbers.tokens_k, BLOCK_N, RAGGED
                    )
                    where = (0, tile + high - step, head_k, 0, 0)
                else:
                    where = coordinates(
                        task.sequence, head_k, task.k_start, task.len_k, row, RAGGED
                    )
                copy_values(where, turn_v, program, TILE)
                turn_v += 1
        count += 1
        if not TILE.PIPELINE:
            ticket = take_ticket(program)
        total, search, task = next_tile(ticket, total, search, UNIT, program, OPTIONS, TILE)
    announce((-1, -1), index, count, program.pipeline)
    if TILE.PIPELINE:  # noqa: SIM102  (a constant, then a number)
        if count > 0:
            # PIPELINE issues one product after the last tile: the TMA fills an out-of-range box
            # with zeros for it
            where = coordinates(0, 0, 0, 0, program.numbers.tokens_k, RAGGED)
            copy_keys(where, turn, program, TILE)
            if program.bias is not None:
                none = Task(0, 0, 0, 0, 0, 0, 0)
                copy_bias(none, 0, turn, program, OPTIONS, TILE)
            turn += 1
            for w in gl.static_range(TILE.WARPGROUPS):
                buffer = count % TILE.BUFFERS_Q * TILE.WARPGROUPS + w
                where = coordinates(0, 0, 0, 0, program.numbers.tokens_q, RAGGED)
                copy_queries(where, buffer, count, program, TILE)
    drain(turn, EMPTY, STAGES_K, PARTIES)
    drain(turn_v, EMPTY_V, STAGES_V, PARTIES)
    if program.bias is not None:
        drain(turn, EMPTY_V + STAGES_V, TILE.STAGES_B, PARTIES)
    if ticket == total + gl.num_programs(0) - 1:
        # this program took the last number of all: reset the counter for the next launch
        gl.atomic_xchg(program.tensors.ticket_ptr, 0, sem="relaxed")


@gluon.jit
def take_ticket(program):
    """Take the next block from the tile counter. A program's first block is its own number."""
    return gl.num_programs(0) + gl.atomic_add(program.tensors.ticket_ptr, 1, sem="relaxed")
