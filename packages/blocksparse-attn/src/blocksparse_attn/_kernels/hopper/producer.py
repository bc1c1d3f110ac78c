"""The warp that copies: which tile of queries is next, and its queries, keys and values."""

from ._linked.compat import copy_in, gl, gluon, mbarrier
from ._linked.pipeline import EMPTY, SLOTS, barrier_sync, coordinates
from .schedule import (
    COUNT,
    CUT,
    FIELDS,
    FIRST,
    FIRST_ROW,
    LEN_K,
    LEN_Q,
    NO_BLOCK,
    Q_START,
    SEEN,
    SEQUENCE,
    WHOLE,
    locate,
    members_alive,
    pick,
    places,
    survey,
)


@gluon.jit
def next_tile(
    ticket, total, ticket_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, units, tokens_q,
    tokens_k, tiles, span, last,
    POSITIONS: gl.constexpr, BALANCE: gl.constexpr, SHORT: gl.constexpr,
):  # fmt: skip
    """Return the first ticket from this one on that holds queries, and what it holds."""
    tile, is_alive, sequence, unit, q_start, k_start, len_q, len_k = locate(
        ticket, cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, units, tokens_q, tokens_k, tiles, span,
        last, POSITIONS, BALANCE, SHORT,
    )  # fmt: skip
    if cu_seqlens_q_ptr is not None:
        while (not is_alive) & (ticket < total):
            ticket = gl.num_programs(0) + gl.atomic_add(ticket_ptr, 1, sem="relaxed")
            tile, is_alive, sequence, unit, q_start, k_start, len_q, len_k = locate(
                ticket, cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, units, tokens_q, tokens_k,
                tiles, span, last, POSITIONS, BALANCE, SHORT,
            )  # fmt: skip
    return ticket, tile, sequence, unit, q_start, k_start, len_q, len_k


@gluon.jit
def fetch(
    items_ptr, members_ptr, alive, first, seen, cut, count, step,
    PER_STEP: gl.constexpr, ROW_MEMBERS: gl.constexpr,
):  # fmt: skip
    """Load the key blocks of a step; one that no row of the tile sees gives ``NO_BLOCK``."""
    lane = gl.arange(0, PER_STEP, gl.BlockedLayout([PER_STEP], [32], [1], [0]))
    at, there = places(first, seen, cut, count, step, lane, PER_STEP)
    items = gl.load(items_ptr + at, mask=there, other=NO_BLOCK)
    if ROW_MEMBERS > 1:
        members = gl.load(members_ptr + at, mask=there, other=0)
        items = gl.where((members & alive) != 0, items, NO_BLOCK)
    return items


@gluon.jit
def copy_blocks(
    desc, where, items, full, boxes_s, stage, BLOCK_K: gl.constexpr, PER_STEP: gl.constexpr,
    WIDTH: gl.constexpr,
):  # fmt: skip
    """Copy the blocks of a step into one tile of keys, or of values, panel by panel."""
    PANELS: gl.constexpr = WIDTH // 64
    x, sequence, head, row, _ = where
    mbarrier.expect(full.index(stage), desc.block_type.nbytes * (PANELS * PER_STEP))
    for i in gl.static_range(PER_STEP):
        first = row + pick(items, i) * BLOCK_K
        for panel in gl.static_range(PANELS):
            copy_in(
                desc, (x, sequence, head, first, panel * 64), full.index(stage),
                boxes_s.index((stage * PANELS + panel) * PER_STEP + i),
            )  # fmt: skip


@gluon.jit
def produce(
    q_desc, k_desc, v_desc, q_s, k_s, v_s, fields_s, q_full, q_empty, k_full, v_full,
    tile_full, tile_empty, ticket_ptr, begin_ptr, whole_ptr, items_ptr, members_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, heads_q, tokens_q, tokens_k, tiles, span, last,
    total, list_rows, extent_k,
    GROUP: gl.constexpr, HEADS: gl.constexpr, SPAN: gl.constexpr, ROW_MEMBERS: gl.constexpr,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, IS_CAUSAL: gl.constexpr, PER_HEAD: gl.constexpr,
    SHORT: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr, STAGES_K: gl.constexpr, STAGES_V: gl.constexpr,
):  # fmt: skip
    """Copy tiles of queries, keys and values into shared memory, in the order of their use."""
    PARTIES: gl.constexpr = 2 * 128 + 32
    POSITIONS: gl.constexpr = 2 * ROWS // HEADS
    PER_STEP: gl.constexpr = BLOCK_N // BLOCK_K
    RAGGED: gl.constexpr = cu_seqlens_q_ptr is not None
    units = heads_q // HEADS
    index = gl.arange(0, FIELDS, gl.BlockedLayout([1], [32], [1], [0]))
    count = 0  # tiles of queries
    turn = 0  # tiles of keys
    turn_v = 0  # tiles of values
    ticket, tile, sequence, unit, q_start, k_start, len_q, len_k = next_tile(
        gl.program_id(0), total, ticket_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, units,
        tokens_q, tokens_k, tiles, span, last, POSITIONS, IS_CAUSAL, SHORT,
    )  # fmt: skip
    first, seen, cut, blocks, whole = survey(
        begin_ptr, whole_ptr, items_ptr, unit, tile, ticket < total, list_rows, len_k, extent_k,
        POSITIONS, SPAN, BLOCK_K, PER_STEP, IS_CAUSAL, PER_HEAD,
    )  # fmt: skip
    while ticket < total:
        head = unit * HEADS
        first_row = tile * POSITIONS - (len_k - len_q)
        slot = count % SLOTS
        mbarrier.wait(tile_empty.index(slot), (count // SLOTS & 1) ^ 1)
        fields = gl.where(index == FIRST_ROW, first_row, head)
        fields = gl.where(index == SEQUENCE, sequence, fields)
        fields = gl.where(index == Q_START, q_start, fields)
        fields = gl.where(index == LEN_Q, len_q, fields)
        fields = gl.where(index == LEN_K, len_k, fields)
        fields = gl.where(index == FIRST, first, fields)
        fields = gl.where(index == SEEN, seen, fields)
        fields = gl.where(index == CUT, cut, fields)
        fields = gl.where(index == COUNT, blocks, fields)
        fields = gl.where(index == WHOLE, whole, fields)
        fields_s.index(slot).store(fields)
        mbarrier.arrive(tile_full.index(slot), count=1)

        where = coordinates(sequence, head // GROUP, k_start, len_k, 0, RAGGED)
        alive = members_alive(tile, len_q, len_k, POSITIONS, SPAN, BLOCK_Q)
        steps = gl.maximum(gl.cdiv(blocks, PER_STEP), 1)
        items = fetch(
            items_ptr, members_ptr, alive, first, seen, cut, blocks, steps - 1,
            PER_STEP, ROW_MEMBERS,
        )  # fmt: skip
        before = items * 0  # another value: one variable it would be to Triton, if it were the same
        for step in range(steps):
            # the entries of the next step come while this one's keys wait for room
            coming = fetch(
                items_ptr, members_ptr, alive, first, seen, cut, blocks, steps - 2 - step,
                PER_STEP, ROW_MEMBERS,
            )  # fmt: skip
            stage = turn % STAGES_K
            if turn >= STAGES_K:
                barrier_sync(EMPTY + stage, PARTIES, 1)
            copy_blocks(k_desc, where, items, k_full, k_s, stage, BLOCK_K, PER_STEP, HEAD_DIM)
            turn += 1
            if step == 0:
                for w in gl.static_range(2):
                    # packed queries are one sequence here: what is another's is not written
                    owner = 0 if RAGGED else sequence
                    if HEADS == 1:
                        at = (0, owner, head, q_start + first_row + w * ROWS, 0)
                    else:
                        at = (0, owner, head + w, q_start + first_row, 0)
                    mbarrier.wait(q_empty.index(w), (count & 1) ^ 1)
                    mbarrier.expect(q_full.index(w), q_desc.block_type.nbytes)
                    copy_in(q_desc, at, q_full.index(w), q_s.index(w))
                # its answer comes while the keys do
                ticket = gl.num_programs(0) + gl.atomic_add(ticket_ptr, 1, sem="relaxed")
            else:
                # values one step behind the keys
                stage = turn_v % STAGES_V
                if turn_v >= STAGES_V:
                    barrier_sync(EMPTY + STAGES_K + stage, PARTIES, 1)
                copy_blocks(
                    v_desc, where, before, v_full, v_s, stage, BLOCK_K, PER_STEP, HEAD_DIM_V
                )
                turn_v += 1
            before = items
            items = coming
        count += 1
        # what the next tile walks is looked up while the last values wait for room
        ticket, tile, sequence, unit, q_start, k_start, len_q, len_k = next_tile(
            ticket, total, ticket_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, units, tokens_q,
            tokens_k, tiles, span, last, POSITIONS, IS_CAUSAL, SHORT,
        )  # fmt: skip
        first, seen, cut, blocks, whole = survey(
            begin_ptr, whole_ptr, items_ptr, unit, tile, ticket < total, list_rows, len_k, extent_k,
            POSITIONS, SPAN, BLOCK_K, PER_STEP, IS_CAUSAL, PER_HEAD,
        )  # fmt: skip
        stage = turn_v % STAGES_V
        if turn_v >= STAGES_V:
            barrier_sync(EMPTY + STAGES_K + stage, PARTIES, 1)
        copy_blocks(v_desc, where, before, v_full, v_s, stage, BLOCK_K, PER_STEP, HEAD_DIM_V)
        turn_v += 1
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
