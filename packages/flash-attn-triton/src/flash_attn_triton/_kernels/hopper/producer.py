"""The warp that copies: which tile of queries is next, and its queries, keys and values."""

from ._linked.compat import copy_in, gl, gluon, mbarrier
from ._linked.pipeline import (
    EMPTY,
    FIELDS,
    FIRST_ROW,
    LEN_K,
    LEN_Q,
    Q_START,
    SEQUENCE,
    SLOTS,
    barrier_sync,
    coordinates,
    key_tiles,
    locate,
)

# sequences that are looked at together
WARP = gl.constexpr(32)


@gluon.jit
def _sum(a, b):
    return a + b


@gluon.jit
def _block_ends(cu_seqlens_ptr, first, before, batch, tokens, BLOCK: gl.constexpr):
    """Count the blocks up to the end of each of some sequences; the first is the padding ahead."""
    index = first + gl.arange(0, WARP, gl.BlockedLayout([1], [32], [1], [0]))
    is_sequence = (index > 0) & (index <= batch + 1)
    start = gl.load(cu_seqlens_ptr + (index - 1), mask=is_sequence, other=0)
    end = gl.load(cu_seqlens_ptr + index, mask=index <= batch, other=tokens)
    blocks = gl.where(index <= batch + 1, (end - start + BLOCK - 1) // BLOCK, 0)
    return before + gl.associative_scan(blocks, 0, _sum)


@gluon.jit
def _find_block(
    place, first, before, cu_seqlens_ptr, batch, tokens, BLOCK: gl.constexpr
):  # fmt: skip
    """Return ``(sequence, block, first, before, blocks)``: what a place holds, and of all places.

    Blocks of all sequences are numbered through, without gaps. Sequence -1 is the padding ahead of
    them, ``batch`` that behind, and what comes after has no block. A search goes on where the last
    one ended, at ``first``, which so many blocks are ``before``: places never become less.
    """
    ends = _block_ends(cu_seqlens_ptr, first, before, batch, tokens, BLOCK)
    blocks = gl.max(ends, 0)
    while (blocks <= place) & (first + WARP < batch + 2):
        first += WARP
        before = blocks
        ends = _block_ends(cu_seqlens_ptr, first, before, batch, tokens, BLOCK)
        blocks = gl.max(ends, 0)
    is_past = ends <= place
    sequence = first - 1 + gl.sum(is_past.to(gl.int32), 0)
    block = place - gl.maximum(before, gl.max(gl.where(is_past, ends, 0), 0))
    return sequence, block, first, before, blocks


@gluon.jit
def next_tile(
    ticket, total, first, before, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_k_ptr,
    window_left, batch, packs, tokens_q, tokens_k, tiles, span, last,
    PACK: gl.constexpr, HAS_LEFT: gl.constexpr, BALANCE: gl.constexpr, BLOCK_M: gl.constexpr,
    UNIT: gl.constexpr,
):  # fmt: skip
    """Return what a ticket holds, how many there are, and where the next search begins."""
    if cu_seqlens_q_ptr is None:
        block, sequence, head = locate(ticket, batch, packs, tiles, span, last, BALANCE)
        q_start = 0
        k_start = 0
        len_q = tokens_q
        len_k = tokens_k
        is_real = ticket < total
    else:
        place = ticket // packs
        head = ticket - place * packs
        sequence, block, first, before, blocks = _find_block(
            place, first, before, cu_seqlens_q_ptr, batch, tokens_q, BLOCK_M
        )
        # there are fewer tickets than the host could tell
        total = gl.where(place < blocks, total, blocks * packs)
        is_real = (sequence >= 0) & (sequence < batch)
        q_start = gl.load(cu_seqlens_q_ptr + sequence, mask=is_real | (sequence == batch), other=0)
        q_end = gl.load(cu_seqlens_q_ptr + sequence + 1, mask=sequence < batch, other=tokens_q)
        k_start = gl.load(cu_seqlens_k_ptr + sequence, mask=is_real, other=0)
        k_end = gl.load(cu_seqlens_k_ptr + sequence + 1, mask=is_real, other=0)
        len_q = q_end - q_start
        len_k = k_end - k_start
        if BALANCE:
            block = gl.cdiv(len_q, BLOCK_M) - 1 - block
    if seqused_k_ptr is not None:
        len_k = gl.load(seqused_k_ptr + sequence, mask=is_real, other=0)
    if HAS_LEFT:
        # keys before the first row's window: as if there were none, in units of so many
        unseen = gl.maximum(len_k - len_q - window_left, 0) // UNIT * UNIT
        k_start += unseen
        len_k -= unseen
    first_row = block * BLOCK_M
    head *= PACK
    return total, first, before, first_row, sequence, head, q_start, k_start, len_q, len_k


@gluon.jit
def first_tile(sequence, k_start, tokens_k, BLOCK_N: gl.constexpr, RAGGED: gl.constexpr):
    """Return where a sequence's tiles begin in transposed values; see ``hopper_values.py``."""
    if RAGGED:
        first = k_start // BLOCK_N + sequence
    else:
        first = k_start // BLOCK_N + sequence * gl.cdiv(tokens_k, BLOCK_N)
    return first


@gluon.jit
def produce(
    q_desc, k_desc, v_desc, q_s, k_s, v_s, fields_s, q_full, q_empty, k_full, v_full,
    tile_full, tile_empty, ticket_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_k_ptr,
    window_left, window_right, batch, heads_q, tokens_q, tokens_k, tiles, span, last, total,
    GROUP: gl.constexpr, PACK: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    RAGGED: gl.constexpr, WARPGROUPS: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr,
    BUFFERS_Q: gl.constexpr, STAGES_K: gl.constexpr, STAGES_V: gl.constexpr, PIPELINE: gl.constexpr,
):  # fmt: skip
    """Copy tiles of queries, keys and values into shared memory, in the order of their use."""
    TOKENS: gl.constexpr = ROWS // PACK
    BLOCK_M: gl.constexpr = WARPGROUPS * TOKENS
    PARTIES: gl.constexpr = 128 * WARPGROUPS + 32
    # FP8 values come from whole tiles; see ``hopper_values.py``
    TRANSPOSED: gl.constexpr = v_desc.dtype.primitive_bitwidth == 8
    UNIT: gl.constexpr = BLOCK_N if TRANSPOSED else 1
    index = gl.arange(0, FIELDS, gl.BlockedLayout([1], [32], [1], [0]))
    count = 0  # tiles of queries
    turn = 0  # tiles of keys
    turn_v = 0  # tiles of values
    packs = heads_q // PACK
    ticket = gl.program_id(0)
    first = 0  # where the search for a block begins: a sequence, and the blocks ahead of it
    before = 0
    total, first, before, first_row, sequence, head, q_start, k_start, len_q, len_k = next_tile(
        ticket, total, first, before, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_k_ptr,
        window_left, batch, packs, tokens_q, tokens_k, tiles, span, last,
        PACK, HAS_LEFT, HAS_RIGHT, BLOCK_M, UNIT,
    )  # fmt: skip
    while ticket < total:
        low, _, _, high = key_tiles(
            first_row, len_q, len_k, window_left, window_right, HAS_LEFT, HAS_RIGHT,
            BLOCK_M, BLOCK_N,
        )  # fmt: skip
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
        steps = high - low
        for step in range(steps + 1):
            # keys one tile ahead of values
            if step < steps:
                row = (high - 1 - step) * BLOCK_N
                where = coordinates(sequence, head_k, k_start, len_k, row, RAGGED)
                stage = turn % STAGES_K
                if turn >= STAGES_K:
                    barrier_sync(EMPTY + stage, PARTIES, 1)
                mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
                copy_in(k_desc, where, k_full.index(stage), k_s.index(stage))
                turn += 1
            if step == 0:
                for w in gl.static_range(WARPGROUPS):
                    buffer = count % BUFFERS_Q * WARPGROUPS + w
                    row = first_row + w * TOKENS
                    where = coordinates(sequence, head, q_start, len_q, row, RAGGED)
                    mbarrier.wait(q_empty.index(buffer), (count // BUFFERS_Q & 1) ^ 1)
                    mbarrier.expect(q_full.index(buffer), q_desc.block_type.nbytes)
                    copy_in(q_desc, where, q_full.index(buffer), q_s.index(buffer))
                if PIPELINE:
                    # its answer comes while the first keys do
                    ticket = gl.num_programs(0) + gl.atomic_add(ticket_ptr, 1, sem="relaxed")
            else:
                row = (high - step) * BLOCK_N
                if TRANSPOSED:
                    tile = first_tile(sequence, k_start, tokens_k, BLOCK_N, RAGGED) + high - step
                    where = (0, tile, head_k, 0, 0)
                else:
                    where = coordinates(sequence, head_k, k_start, len_k, row, RAGGED)
                stage = turn_v % STAGES_V
                if turn_v >= STAGES_V:
                    barrier_sync(EMPTY + STAGES_K + stage, PARTIES, 1)
                mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
                copy_in(v_desc, where, v_full.index(stage), v_s.index(stage))
                turn_v += 1
        count += 1
        if not PIPELINE:
            ticket = gl.num_programs(0) + gl.atomic_add(ticket_ptr, 1, sem="relaxed")
        total, first, before, first_row, sequence, head, q_start, k_start, len_q, len_k = next_tile(
            ticket, total, first, before, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_k_ptr,
            window_left, batch, packs, tokens_q, tokens_k, tiles, span, last,
            PACK, HAS_LEFT, HAS_RIGHT, BLOCK_M, UNIT,
        )  # fmt: skip
    slot = count % SLOTS
    mbarrier.wait(tile_empty.index(slot), (count // SLOTS & 1) ^ 1)
    fields_s.index(slot).store(index * 0 - 1)
    mbarrier.arrive(tile_full.index(slot), count=1)
    if PIPELINE:  # noqa: SIM102  (a constant, then a number)
        if count > 0:
            # what the last product runs beside: rows past every end, so zeros
            where = coordinates(0, 0, 0, 0, tokens_k, RAGGED)
            stage = turn % STAGES_K
            if turn >= STAGES_K:
                barrier_sync(EMPTY + stage, PARTIES, 1)
            mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
            copy_in(k_desc, where, k_full.index(stage), k_s.index(stage))
            turn += 1
            for w in gl.static_range(WARPGROUPS):
                buffer = count % BUFFERS_Q * WARPGROUPS + w
                where = coordinates(0, 0, 0, 0, tokens_q, RAGGED)
                mbarrier.wait(q_empty.index(buffer), (count // BUFFERS_Q & 1) ^ 1)
                mbarrier.expect(q_full.index(buffer), q_desc.block_type.nbytes)
                copy_in(q_desc, where, q_full.index(buffer), q_s.index(buffer))
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
