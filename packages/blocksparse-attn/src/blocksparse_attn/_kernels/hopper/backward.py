"""Backward pass on Hopper: one warp reads the lists and copies, two warpgroups multiply.

A program owns two blocks of 64 keys, one a warpgroup, and walks lists of blocks of queries: first
those that see both, then those that see one; see ``_pairs.py``. Scores are transposed ([keys,
queries]), so that probabilities and their gradients go from the accumulators into the products of
dv and dk as they lie. The product of dq needs those of all keys that a query sees: within a program
they meet in shared memory. What programs have in common, all of dq, and dk and dv where several own
a block, is added in fp32 to sums in memory, in the order of the accumulators' registers, out of
which ``hopper_backward_round`` brings it.
"""

from ._linked.compat import gl, gluon, hopper, mbarrier, tma
from ._linked.gradients import ROWS, add_to_memory, write
from ._linked.pipeline import EMPTY, LOG2E, barrier_sync, barriers, coordinates
from .backward_lists import find_block, find_item, find_items, find_kept, find_program, find_seen
from .backward_pieces import add_pieces, copy_keys, copy_queries, key_positions, tiles
from .backward_steps import (
    BITS,
    BOTH,
    EITHER,
    MADE,
    REACH,
    SLOPE,
    STEP_FIELDS,
    add_dq,
    await_made,
    multiply_dq,
    say_made,
    walk,
    walk_apart,
)
from .schedule import NO_BLOCK, floor_div

INF = gl.constexpr(float("inf"))


@gluon.jit
def _numbers(lse2_ptr, delta_ptr, row_at, head, row_pitch, row, len_q):
    """Load the numbers of a block of rows."""
    index = gl.arange(0, ROWS, gl.BlockedLayout([ROWS // 32], [32], [1], [0]))
    inside = (row + index >= 0) & (row + index < len_q)
    at = row_at + head.to(gl.int64) * row_pitch + row
    # beyond the end an exponential is 0, as it is in a row that sees no key
    lse2 = gl.load(lse2_ptr + at + index, mask=inside, other=INF)
    delta = gl.load(delta_ptr + at + index, mask=inside, other=0.0)
    return lse2, delta


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, dout_desc, q_s, k_s, v_s, dout_s, lse2_s, delta_s, fields_s,
    q_full, k_full, v_full, dout_full, lse2_ptr, delta_ptr, items_ptr, bits_ptr, owned_ptr,
    whole_at, whole, partial_at, partial, alone_0_at, alone_0, alone_1_at, alone_1,
    block_0, block_1, seen, kept, low, high, sequence, head_k, start, len_q, len_k, row_at,
    row_pitch, sums_at, sums_pitch,
    GROUP: gl.constexpr, IS_CAUSAL: gl.constexpr, PER_HEAD: gl.constexpr, RAGGED: gl.constexpr,
    PIECE: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the keys and values, then blocks of queries and of what belongs to them."""
    TURNS: gl.constexpr = 1 if PER_HEAD else GROUP
    field = gl.arange(0, STEP_FIELDS, gl.BlockedLayout([1], [32], [1], [0]))
    both = (whole + partial) * TURNS
    total = both + 2 * TURNS * gl.maximum(alone_0, alone_1)
    diagonal = len_k - len_q
    first_head = head_k * GROUP
    if total > 0:
        copy_keys(
            k_desc, k_s, k_full, owned_ptr, block_0, block_1, seen, sequence, head_k, start, len_k,
            RAGGED, PIECE, HEAD_DIM,
        )  # fmt: skip
    block, head, is_there, bits = find_item(
        items_ptr, bits_ptr, 0, total, whole_at, whole, partial_at, partial, alone_0_at, alone_0,
        alone_1_at, alone_1, low, high, TURNS, PIECE,
    )  # fmt: skip
    lse2, delta = _numbers(
        lse2_ptr, delta_ptr, row_at, first_head + head, row_pitch, block * ROWS - diagonal, len_q
    )
    for turn in range(total):
        # what the next turn needs comes while this one waits for room
        next_block, next_head, next_there, next_bits = find_item(
            items_ptr, bits_ptr, turn + 1, total, whole_at, whole, partial_at, partial, alone_0_at,
            alone_0, alone_1_at, alone_1, low, high, TURNS, PIECE,
        )  # fmt: skip
        fields = gl.where(is_there, sums_at + (first_head + head) * sums_pitch + block, -1)
        fields += field * 0
        if PIECE < ROWS:
            last_key = block * ROWS if IS_CAUSAL else len_k - 1
            fields = gl.where(field == REACH, last_key, fields)
            fields = gl.where(field == BITS, bits, fields)
        elif IS_CAUSAL:
            fields = gl.where(field == REACH, gl.where(block == block_0, 0, ROWS), fields)
            fields = gl.where(field == REACH + 1, gl.where(block == block_1, 0, ROWS), fields)
        else:
            fields = gl.where(field == REACH, len_k - 1 - block_0 * ROWS, fields)
            fields = gl.where(field == REACH + 1, len_k - 1 - block_1 * ROWS, fields)
        fields = gl.where(field == SLOPE, 1 if IS_CAUSAL else 0, fields)
        # who sees nothing but what lies behind the end sees nothing
        bits &= kept
        stage = turn % STAGES
        if turn >= STAGES:
            _wait_for_room(EMPTY + stage, turn - STAGES < both)
        copy_queries(
            q_desc, q_s, q_full.index(stage), stage, block, bits, diagonal, sequence,
            first_head + head, start, len_q, RAGGED, PIECE, HEAD_DIM,
        )  # fmt: skip
        lse2_s.index(stage).store(lse2)
        fields_s.index(stage).store(fields)
        mbarrier.arrive(q_full.index(stage), count=1)
        if turn == 0:
            copy_keys(
                v_desc, v_s, v_full, owned_ptr, block_0, block_1, seen, sequence, head_k, start,
                len_k, RAGGED, PIECE, HEAD_DIM_V,
            )  # fmt: skip
        copy_queries(
            dout_desc, dout_s, dout_full.index(stage), stage, block, bits, diagonal, sequence,
            first_head + head, start, len_q, RAGGED, PIECE, HEAD_DIM_V,
        )  # fmt: skip
        delta_s.index(stage).store(-delta)
        mbarrier.arrive(dout_full.index(stage), count=1)
        block = next_block
        head = next_head
        is_there = next_there
        bits = next_bits
        lse2, delta = _numbers(
            lse2_ptr, delta_ptr, row_at, first_head + head, row_pitch, block * ROWS - diagonal,
            len_q,
        )  # fmt: skip
    # nobody may be left at a barrier
    for back in gl.static_range(STAGES):
        last = total - 1 - back
        if last >= 0:
            _wait_for_room(EMPTY + last % STAGES, last < both)


@gluon.jit
def _wait_for_room(number, is_both):
    """Wait until both warpgroups, or the one whose it was, have read a stage."""
    if is_both:
        barrier_sync(number, BOTH, 1)
    else:
        barrier_sync(number, EITHER, 1)


@gluon.jit
def _consume(
    W: gl.constexpr, dk_desc, dv_desc, owned_ptr, q_s, k_s, v_s, dout_s, ds_s, lse2_s, delta_s,
    fields_s, q_full, k_full, v_full, dout_full, dq_ptr, dk_ptr, dv_ptr, scale, whole, partial,
    alone, parts, block, sequence, head_k, start, len_k,
    TURNS: gl.constexpr, RAGGED: gl.constexpr, PIECE: gl.constexpr, HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Make dk and dv of warpgroup ``W``'s block of keys, and what goes to dq."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    K: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    V: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM_V, 16])
    factor = scale * LOG2E
    owned_ptr += W * (ROWS // PIECE)
    # as places in a block, or in the sequence
    positions = gl.arange(0, ROWS, gl.SliceLayout(1, S))
    if PIECE < ROWS:
        positions = key_positions(owned_ptr, gl.SliceLayout(1, S), PIECE)
    is_walked = whole + partial + alone > 0
    both = (whole + partial) * TURNS
    total = both + 2 * TURNS * alone
    dk = gl.zeros([ROWS, HEAD_DIM], gl.float32, K)
    dv = gl.zeros([ROWS, HEAD_DIM_V], gl.float32, V)
    s = gl.zeros([ROWS, ROWS], gl.float32, S)
    turn = gl.where(both > 0, 0, W)
    mbarrier.wait(k_full, 0, pred=is_walked)
    mbarrier.wait(q_full.index(turn), 0, pred=is_walked)
    k = k_s.index(W).reshape([ROWS, HEAD_DIM])
    q_t = q_s.index(turn).reshape([ROWS, HEAD_DIM]).permute((1, 0))
    s = hopper.warpgroup_mma(k, q_t, s, use_acc=False, is_async=True)
    s = hopper.warpgroup_mma_wait(0, deps=(s,))
    mbarrier.wait(v_full, 0, pred=is_walked)
    turn = turn * 0
    # no sums
    last = turn - 1
    # dq is one step behind
    say_made(turn + 1, W)
    dk, dv, s, last, turn = walk(
        dk, dv, s, last, turn, both, total, whole * TURNS, dq_ptr, q_s, k_s, v_s, dout_s, ds_s,
        lse2_s, delta_s, fields_s, q_full, dout_full, positions, factor, W, False, PIECE,
        HEAD_DIM, HEAD_DIM_V, STAGES,
    )  # fmt: skip
    dk, dv, s, last, turn = walk(
        dk, dv, s, last, turn, both, total, partial * TURNS, dq_ptr, q_s, k_s, v_s, dout_s, ds_s,
        lse2_s, delta_s, fields_s, q_full, dout_full, positions, factor, W, True, PIECE,
        HEAD_DIM, HEAD_DIM_V, STAGES,
    )  # fmt: skip
    await_made(turn + 1, W)
    dq = multiply_dq(ds_s, k_s, turn + 1, 0, W, HEAD_DIM)
    dq = hopper.warpgroup_mma_wait(0, deps=(dq,))
    add_dq(dq_ptr, last, dq, W, HEAD_DIM)
    dk, dv = walk_apart(
        dk, dv, s, turn, total, alone * TURNS, dq_ptr, q_s, k_s, v_s, dout_s, ds_s, lse2_s, delta_s,
        fields_s, q_full, dout_full, positions, factor, W, PIECE, HEAD_DIM, HEAD_DIM_V, STAGES,
    )  # fmt: skip
    if PIECE < ROWS:
        if is_walked:
            add_pieces(dv_ptr, owned_ptr, len_k, dv, PIECE)
            add_pieces(dk_ptr, owned_ptr, len_k, dk, PIECE)
    # the memory of keys and values is free: the warpgroups have met since they last shared it
    elif parts == 1:
        where = coordinates(sequence, head_k, start, len_k, block * ROWS, RAGGED)
        write(dv, dv_desc, v_s.index(W), where, HEAD_DIM_V)
        write(dk * scale, dk_desc, k_s.index(W), where, HEAD_DIM)
        tma.store_wait(0)
    elif (parts > 1) & is_walked:
        add_to_memory(dv_ptr + block.to(gl.int64) * (ROWS * HEAD_DIM_V), dv)
        add_to_memory(dk_ptr + block.to(gl.int64) * (ROWS * HEAD_DIM), dk)


NUMBERS = (
    "batch", "heads_k", "span", "tokens_q", "tokens_k", "tiles_q", "tiles_k", "rows",
    "list_pieces",
)  # fmt: skip
POINTERS = (
    "begin_ptr", "parts_ptr", "items_ptr", "owners_ptr", "real_ptr", "bits_ptr", "cu_seqlens_ptr",
)  # fmt: skip


@gluon.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def hopper_backward_kernel(
    q_desc, k_desc, v_desc, dout_desc, dk_desc, dv_desc, dq_ptr, dk_ptr, dv_ptr, lse2_ptr,
    delta_ptr, begin_ptr, parts_ptr, items_ptr, owners_ptr, real_ptr, bits_ptr,
    cu_seqlens_ptr,
    scale, batch, heads_k, span, tokens_q, tokens_k, tiles_q, tiles_k, rows, list_pieces,
    GROUP: gl.constexpr,  # query heads per key head
    IS_CAUSAL: gl.constexpr,
    PER_HEAD: gl.constexpr,  # lists of each key head, or one for all
    PIECE: gl.constexpr,  # tokens of the layout's blocks, up to 64
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Write a program's blocks of dk and dv, or add to their sums, and to those of dq."""
    dtype: gl.constexpr = q_desc.dtype
    RAGGED: gl.constexpr = cu_seqlens_ptr is not None
    TURNS: gl.constexpr = 1 if PER_HEAD else GROUP
    SIDE: gl.constexpr = ROWS // PIECE
    gl.static_assert(EMPTY + STAGES <= MADE, "stages outnumber the barriers")
    programs = gl.load(real_ptr)
    there = programs * batch
    if not PER_HEAD:
        there *= heads_k
    pid = gl.program_id(0)
    # the host knows a bound alone
    if pid < there:
        program, sequence, head_k, start, len_q, len_k = find_program(
            pid, programs, owners_ptr, cu_seqlens_ptr, heads_k, span, tokens_q, tokens_k, PER_HEAD,
            PIECE,
        )  # fmt: skip
        # rows of blocks in which the sequence has queries
        low = gl.maximum(len_k - len_q, 0) // ROWS
        high = gl.minimum(gl.cdiv(len_k, ROWS), rows)
        whole_at, whole = find_items(begin_ptr, items_ptr, program * 4, low, high, rows)
        partial_at, partial = find_items(begin_ptr, items_ptr, program * 4 + 1, low, high, rows)
        alone_0_at, alone_0 = find_items(begin_ptr, items_ptr, program * 4 + 2, low, high, rows)
        alone_1_at, alone_1 = find_items(begin_ptr, items_ptr, program * 4 + 3, low, high, rows)
        owner = head_k * list_pieces if PER_HEAD else head_k * 0
        owned_ptr = owners_ptr + program * (1 + 2 * SIDE) + 1
        block_0, parts_0, alone_0 = find_block(owned_ptr, parts_ptr + owner, len_k, alone_0, PIECE)
        block_1, parts_1, alone_1 = find_block(
            owned_ptr + SIDE, parts_ptr + owner, len_k, alone_1, PIECE
        )
        # nobody's keys: their rows may see no key at all
        is_there = gl.minimum(block_0, block_1) < NO_BLOCK
        whole = gl.where(is_there, whole, 0)
        partial = gl.where(is_there, partial, 0)
        if not IS_CAUSAL:
            # there is no diagonal: the loop with a mask hides what lies behind the end
            is_cut = ((gl.maximum(block_0, block_1) + 1) * PIECE > len_k) & (whole > 0)
            end = gl.where(partial > 0, partial_at + partial, whole_at + whole)
            partial = gl.where(is_cut, end - whole_at, partial)
            partial_at = gl.where(is_cut, whole_at, partial_at)
            whole = gl.where(is_cut, 0, whole)
        # zeros for keys that no query of the program sees
        seen_0 = gl.where(whole + partial + alone_0 > 0, block_0, NO_BLOCK)
        seen_1 = gl.where(whole + partial + alone_1 > 0, block_1, NO_BLOCK)
        seen = -1
        kept = -1
        if PIECE < ROWS:
            if not IS_CAUSAL:
                kept = find_kept(owned_ptr, len_k, PIECE)
            ahead = gl.maximum(len_k - len_q, 0)
            if (ahead > 0) | (len_k < rows * ROWS):
                seen = find_seen(items_ptr, bits_ptr, whole_at, whole, ahead, len_k, PIECE)
                seen |= find_seen(items_ptr, bits_ptr, partial_at, partial, ahead, len_k, PIECE)
                seen |= find_seen(items_ptr, bits_ptr, alone_0_at, alone_0, ahead, len_k, PIECE)
                seen |= find_seen(items_ptr, bits_ptr, alone_1_at, alone_1, ahead, len_k, PIECE)
        alone = gl.maximum(alone_0, alone_1)
        heads_q = heads_k * GROUP
        # where rows and sums of the sequence begin
        first_tile = floor_div(len_k - len_q, ROWS)
        if RAGGED:
            row_at = start.to(gl.int64)
            sums_at = start // ROWS + 2 * (sequence + 1) - first_tile
            keys_at = head_k * tiles_k + start // ROWS + sequence + 1
        else:
            row_at = sequence.to(gl.int64) * heads_q * tokens_q
            sums_at = sequence * heads_q * tiles_q - first_tile
            keys_at = (sequence * heads_k + head_k) * tiles_k
        dk_at = dk_ptr + keys_at.to(gl.int64) * (ROWS * HEAD_DIM)
        dv_at = dv_ptr + keys_at.to(gl.int64) * (ROWS * HEAD_DIM_V)
        q_s = tiles(STAGES, q_desc, PIECE, HEAD_DIM)
        dout_s = tiles(STAGES, dout_desc, PIECE, HEAD_DIM_V)
        k_s = tiles(2, k_desc, PIECE, HEAD_DIM)
        v_s = tiles(2, v_desc, PIECE, HEAD_DIM_V)
        tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, ROWS], dtype)
        ds_s = gl.allocate_shared_memory(dtype, [4, ROWS, ROWS], tile)
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        lse2_s = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], plain)
        delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], plain)
        fields_s = gl.allocate_shared_memory(gl.int32, [STAGES, STEP_FIELDS], plain)
        # the copies, and the row numbers that arrive by hand. All warps meet over them, as they
        # must: Triton hands numbers to the partitions where reductions leave theirs, and nothing
        # else keeps a warp from writing what a later one has still to read
        q_full = barriers(STAGES, 2)
        dout_full = barriers(STAGES, 2)
        k_full = barriers(1, 1)
        v_full = barriers(1, 1)
        hopper.fence_async_shared()
        gl.warp_specialize(
            [
                (_consume, (
                    0, dk_desc, dv_desc, owned_ptr, q_s, k_s, v_s, dout_s, ds_s, lse2_s, delta_s,
                    fields_s, q_full, k_full.index(0), v_full.index(0), dout_full, dq_ptr, dk_at,
                    dv_at, scale, whole, partial, alone, parts_0, block_0, sequence, head_k, start,
                    len_k, TURNS, RAGGED, PIECE, HEAD_DIM, HEAD_DIM_V, STAGES,
                )),
                (_consume, (
                    1, dk_desc, dv_desc, owned_ptr, q_s, k_s, v_s, dout_s, ds_s, lse2_s, delta_s,
                    fields_s, q_full, k_full.index(0), v_full.index(0), dout_full, dq_ptr, dk_at,
                    dv_at, scale, whole, partial, alone, parts_1, block_1, sequence, head_k, start,
                    len_k, TURNS, RAGGED, PIECE, HEAD_DIM, HEAD_DIM_V, STAGES,
                )),
                (_produce, (
                    q_desc, k_desc, v_desc, dout_desc, q_s, k_s, v_s, dout_s, lse2_s, delta_s,
                    fields_s, q_full, k_full.index(0), v_full.index(0), dout_full, lse2_ptr,
                    delta_ptr, items_ptr, bits_ptr, owned_ptr, whole_at, whole, partial_at,
                    partial, alone_0_at, alone_0, alone_1_at, alone_1, seen_0, seen_1, seen, kept,
                    low, high, sequence, head_k, start, len_q, len_k, row_at, tokens_q, sums_at,
                    tiles_q, GROUP, IS_CAUSAL, PER_HEAD, RAGGED, PIECE, HEAD_DIM, HEAD_DIM_V,
                    STAGES,
                )),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
