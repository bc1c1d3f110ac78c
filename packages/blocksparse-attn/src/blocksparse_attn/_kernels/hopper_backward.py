"""Backward pass on Hopper: one warp reads the lists and copies, two warpgroups multiply.

A program owns two blocks of 64 keys, one a warpgroup, and walks lists of blocks of queries: first
those that see both, then those that see one; see ``_pairs.py``. Scores are transposed ([keys,
queries]), so that probabilities and their gradients go from the accumulators into the products of
dv and dk as they lie. The product of dq needs those of all keys that a query sees: within a program
they meet in shared memory. What programs have in common, all of dq, and dk and dv where several own
a block, is added in fp32 to sums in memory, in the order of the accumulators' registers, out of
which ``hopper_backward_round`` brings it.
"""

from .gluon_compat import copy_in, gl, gluon, hopper, mbarrier, tma
from .hopper import EMPTY, LOG2E, barrier_sync, barriers, coordinates
from .hopper_backward_steps import (
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
from .hopper_gradients import ROWS, add_to_memory, write
from .hopper_schedule import NO_BLOCK, floor_div

INF = gl.constexpr(float("inf"))
# an item is the head in its group, times this, and the row of blocks
HEAD = gl.constexpr(1 << 16)
# more than a part of a list has items
MOST = gl.constexpr(256)


@gluon.jit
def find_program(
    pid, programs, owners_ptr, cu_seqlens_ptr, heads_k, span, tokens_q, tokens_k,
    PER_HEAD: gl.constexpr,
):  # fmt: skip
    """Return ``(program, sequence, head_k, start, len_q, len_k)`` for a place in the grid.

    All programs of a sequence come first, and of ``span`` heads if the lists are for all heads.
    """
    if PER_HEAD:
        program = pid % programs
        sequence = pid // programs
        head_k = gl.maximum(gl.load(owners_ptr + program * 3), 0)
    else:
        sequence = pid // (programs * heads_k)
        place = pid % (programs * heads_k)
        first = place // (programs * span) * span
        heads_here = gl.minimum(span, heads_k - first)
        place -= first * programs
        program = place // heads_here
        head_k = first + place % heads_here
    start = 0
    len_q = tokens_q
    len_k = tokens_k
    if cu_seqlens_ptr is not None:
        start = gl.load(cu_seqlens_ptr + sequence)
        len_q = gl.load(cu_seqlens_ptr + sequence + 1) - start
        len_k = len_q
    return program, sequence, head_k, start, len_q, len_k


@gluon.jit
def find_block(owned_ptr, parts_ptr, len_k, alone):
    """Return a block of keys, how many programs own it, and the items that see it alone.

    One that the sequence has not is nobody's.
    """
    block = gl.load(owned_ptr)
    is_there = (block >= 0) & (block * ROWS < len_k)
    parts = gl.load(parts_ptr + block, mask=is_there, other=0).to(gl.int32)
    return gl.where(is_there, block, NO_BLOCK), parts, gl.where(is_there, alone, 0)


@gluon.jit
def find_items(begin_ptr, items_ptr, place, low, high, rows):
    """Return where a part of a list is, and how many items it has.

    What the sequence has not at either end, rows ahead of ``low`` or from ``high`` on, is left out.
    """
    first = gl.load(begin_ptr + place).to(gl.int32)
    count = gl.load(begin_ptr + place + 1).to(gl.int32) - first
    if (low > 0) | (high < rows):
        lane = gl.arange(0, MOST, gl.BlockedLayout([1], [32], [4], [0]))
        row = gl.load(items_ptr + first + lane, mask=lane < count, other=-1) % HEAD
        is_there = (lane < count) & (row >= low) & (row < high)
        ahead = MOST - gl.max(gl.where(is_there, MOST - lane, 0), 0)
        count = gl.maximum(gl.max(gl.where(is_there, lane + 1, 0), 0) - ahead, 0)
        first += ahead
    return first, count


@gluon.jit
def _item(
    items_ptr, turn, total, whole_at, whole, partial_at, partial, alone_0_at, alone_0, alone_1_at,
    alone_1, low, high, TURNS: gl.constexpr,
):  # fmt: skip
    """Return ``(block, head, is_there)``: a block of queries, and its head in the group.

    Where the walk wants an item, or the sequence has not the block, it is ``NO_BLOCK``.
    """
    wholes = whole * TURNS
    both = wholes + partial * TURNS
    is_whole = turn < wholes
    is_both = turn < both
    place = turn - gl.where(is_whole, 0, gl.where(is_both, wholes, both))
    is_second = ~is_both & (place % 2 == 1)
    place = gl.where(is_both, place, place // 2)
    alone = gl.maximum(alone_0, alone_1)
    round_ = place * 0
    if TURNS > 1:
        steps = gl.where(is_whole, whole, gl.where(is_both, partial, alone))
        round_ = place // gl.maximum(steps, 1)
        place -= round_ * steps
    first = gl.where(is_second, alone_1_at, alone_0_at)
    first = gl.where(is_both, gl.where(is_whole, whole_at, partial_at), first)
    count = gl.where(is_second, alone_1, alone_0)
    has_item = (turn < total) & (is_both | (place < count))
    item = gl.load(items_ptr + first + place, mask=has_item, other=-1)
    block = item % HEAD
    is_there = (item >= 0) & (block >= low) & (block < high)
    return gl.where(is_there, block, NO_BLOCK), gl.maximum(item, 0) // HEAD + round_, is_there


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
    q_full, k_full, v_full, dout_full, lse2_ptr, delta_ptr, items_ptr,
    whole_at, whole, partial_at, partial, alone_0_at, alone_0, alone_1_at, alone_1,
    block_0, block_1, low, high, sequence, head_k, start, len_q, len_k, row_at, row_pitch,
    sums_at, sums_pitch,
    GROUP: gl.constexpr, IS_CAUSAL: gl.constexpr, PER_HEAD: gl.constexpr, RAGGED: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the keys and values, then blocks of queries and of what belongs to them."""
    TURNS: gl.constexpr = 1 if PER_HEAD else GROUP
    field = gl.arange(0, STEP_FIELDS, gl.BlockedLayout([1], [32], [1], [0]))
    both = (whole + partial) * TURNS
    total = both + 2 * TURNS * gl.maximum(alone_0, alone_1)
    diagonal = len_k - len_q
    first_head = head_k * GROUP
    keys_0 = coordinates(sequence, head_k, start, len_k, block_0 * ROWS, RAGGED)
    keys_1 = coordinates(sequence, head_k, start, len_k, block_1 * ROWS, RAGGED)
    if total > 0:
        mbarrier.expect(k_full, 2 * k_desc.block_type.nbytes)
        copy_in(k_desc, keys_0, k_full, k_s.index(0))
        copy_in(k_desc, keys_1, k_full, k_s.index(1))
    block, head, is_there = _item(
        items_ptr, 0, total, whole_at, whole, partial_at, partial, alone_0_at, alone_0, alone_1_at,
        alone_1, low, high, TURNS,
    )  # fmt: skip
    lse2, delta = _numbers(
        lse2_ptr, delta_ptr, row_at, first_head + head, row_pitch, block * ROWS - diagonal, len_q
    )
    for turn in range(total):
        # what the next turn needs comes while this one waits for room
        next_block, next_head, next_there = _item(
            items_ptr, turn + 1, total, whole_at, whole, partial_at, partial, alone_0_at, alone_0,
            alone_1_at, alone_1, low, high, TURNS,
        )  # fmt: skip
        fields = gl.where(is_there, sums_at + (first_head + head) * sums_pitch + block, -1)
        fields += field * 0
        if IS_CAUSAL:
            fields = gl.where(field == REACH, gl.where(block == block_0, 0, ROWS), fields)
            fields = gl.where(field == REACH + 1, gl.where(block == block_1, 0, ROWS), fields)
        else:
            fields = gl.where(field == REACH, len_k - 1 - block_0 * ROWS, fields)
            fields = gl.where(field == REACH + 1, len_k - 1 - block_1 * ROWS, fields)
        fields = gl.where(field == SLOPE, 1 if IS_CAUSAL else 0, fields)
        where = coordinates(
            sequence, first_head + head, start, len_q, block * ROWS - diagonal, RAGGED
        )
        stage = turn % STAGES
        if turn >= STAGES:
            _wait_for_room(EMPTY + stage, turn - STAGES < both)
        mbarrier.expect(q_full.index(stage), q_desc.block_type.nbytes)
        copy_in(q_desc, where, q_full.index(stage), q_s.index(stage))
        lse2_s.index(stage).store(lse2)
        fields_s.index(stage).store(fields)
        mbarrier.arrive(q_full.index(stage), count=1)
        if turn == 0:
            mbarrier.expect(v_full, 2 * v_desc.block_type.nbytes)
            copy_in(v_desc, keys_0, v_full, v_s.index(0))
            copy_in(v_desc, keys_1, v_full, v_s.index(1))
        mbarrier.expect(dout_full.index(stage), dout_desc.block_type.nbytes)
        copy_in(dout_desc, where, dout_full.index(stage), dout_s.index(stage))
        delta_s.index(stage).store(-delta)
        mbarrier.arrive(dout_full.index(stage), count=1)
        block = next_block
        head = next_head
        is_there = next_there
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
    W: gl.constexpr, dk_desc, dv_desc, q_s, k_s, v_s, dout_s, ds_s, lse2_s, delta_s, fields_s,
    q_full, k_full, v_full, dout_full, dq_ptr, dk_ptr, dv_ptr, scale, whole, partial, alone,
    parts, block, sequence, head_k, start, len_k,
    TURNS: gl.constexpr, RAGGED: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Make dk and dv of warpgroup ``W``'s block of keys, and what goes to dq."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    K: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    V: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM_V, 16])
    factor = scale * LOG2E
    both = (whole + partial) * TURNS
    total = both + 2 * TURNS * alone
    dk = gl.zeros([ROWS, HEAD_DIM], gl.float32, K)
    dv = gl.zeros([ROWS, HEAD_DIM_V], gl.float32, V)
    s = gl.zeros([ROWS, ROWS], gl.float32, S)
    turn = gl.where(both > 0, 0, W)
    mbarrier.wait(k_full, 0, pred=total > 0)
    mbarrier.wait(q_full.index(turn), 0, pred=total > 0)
    k = k_s.index(W).reshape([ROWS, HEAD_DIM])
    q_t = q_s.index(turn).reshape([ROWS, HEAD_DIM]).permute((1, 0))
    s = hopper.warpgroup_mma(k, q_t, s, use_acc=False, is_async=True)
    s = hopper.warpgroup_mma_wait(0, deps=(s,))
    mbarrier.wait(v_full, 0, pred=total > 0)
    turn = turn * 0
    # no sums
    last = turn - 1
    # dq is one step behind
    say_made(turn + 1, W)
    dk, dv, s, last, turn = walk(
        dk, dv, s, last, turn, both, total, whole * TURNS, dq_ptr, q_s, k_s, v_s, dout_s, ds_s,
        lse2_s, delta_s, fields_s, q_full, dout_full, factor, W, False, HEAD_DIM, HEAD_DIM_V,
        STAGES,
    )  # fmt: skip
    dk, dv, s, last, turn = walk(
        dk, dv, s, last, turn, both, total, partial * TURNS, dq_ptr, q_s, k_s, v_s, dout_s, ds_s,
        lse2_s, delta_s, fields_s, q_full, dout_full, factor, W, True, HEAD_DIM, HEAD_DIM_V,
        STAGES,
    )  # fmt: skip
    await_made(turn + 1, W)
    dq = multiply_dq(ds_s, k_s, turn + 1, 0, W, HEAD_DIM)
    dq = hopper.warpgroup_mma_wait(0, deps=(dq,))
    add_dq(dq_ptr, last, dq, W, HEAD_DIM)
    dk, dv = walk_apart(
        dk, dv, s, turn, total, alone * TURNS, dq_ptr, q_s, k_s, v_s, dout_s, ds_s, lse2_s, delta_s,
        fields_s, q_full, dout_full, factor, W, HEAD_DIM, HEAD_DIM_V, STAGES,
    )  # fmt: skip
    # the memory of keys and values is free: the warpgroups have met since they last shared it
    if parts == 1:
        where = coordinates(sequence, head_k, start, len_k, block * ROWS, RAGGED)
        write(dv, dv_desc, v_s.index(W), where, HEAD_DIM_V)
        write(dk * scale, dk_desc, k_s.index(W), where, HEAD_DIM)
        tma.store_wait(0)
    elif (parts > 1) & (total > 0):
        add_to_memory(dv_ptr + block.to(gl.int64) * (ROWS * HEAD_DIM_V), dv)
        add_to_memory(dk_ptr + block.to(gl.int64) * (ROWS * HEAD_DIM), dk)


NUMBERS = (
    "programs", "heads_k", "span", "tokens_q", "tokens_k", "tiles_q", "tiles_k", "rows",
    "list_blocks",
)  # fmt: skip
POINTERS = ("begin_ptr", "parts_ptr", "items_ptr", "owners_ptr", "cu_seqlens_ptr")


@gluon.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def hopper_backward_kernel(
    q_desc, k_desc, v_desc, dout_desc, dk_desc, dv_desc, dq_ptr, dk_ptr, dv_ptr, lse2_ptr,
    delta_ptr, begin_ptr, parts_ptr, items_ptr, owners_ptr, cu_seqlens_ptr,
    scale, programs, heads_k, span, tokens_q, tokens_k, tiles_q, tiles_k, rows, list_blocks,
    GROUP: gl.constexpr,  # query heads per key head
    IS_CAUSAL: gl.constexpr,
    PER_HEAD: gl.constexpr,  # lists of each key head, or one for all
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Write a program's blocks of dk and dv, or add to their sums, and to those of dq."""
    dtype: gl.constexpr = q_desc.dtype
    RAGGED: gl.constexpr = cu_seqlens_ptr is not None
    TURNS: gl.constexpr = 1 if PER_HEAD else GROUP
    program, sequence, head_k, start, len_q, len_k = find_program(
        gl.program_id(0), programs, owners_ptr, cu_seqlens_ptr, heads_k, span, tokens_q, tokens_k,
        PER_HEAD,
    )  # fmt: skip
    # rows of blocks in which the sequence has queries
    low = gl.maximum(len_k - len_q, 0) // ROWS
    high = gl.minimum(gl.cdiv(len_k, ROWS), rows)
    whole_at, whole = find_items(begin_ptr, items_ptr, program * 4, low, high, rows)
    partial_at, partial = find_items(begin_ptr, items_ptr, program * 4 + 1, low, high, rows)
    alone_0_at, alone_0 = find_items(begin_ptr, items_ptr, program * 4 + 2, low, high, rows)
    alone_1_at, alone_1 = find_items(begin_ptr, items_ptr, program * 4 + 3, low, high, rows)
    owner = head_k * list_blocks if PER_HEAD else head_k * 0
    block_0, parts_0, alone_0 = find_block(
        owners_ptr + program * 3 + 1, parts_ptr + owner, len_k, alone_0
    )
    block_1, parts_1, alone_1 = find_block(
        owners_ptr + program * 3 + 2, parts_ptr + owner, len_k, alone_1
    )
    # nobody's keys: their rows may see no key at all
    is_there = gl.minimum(block_0, block_1) < NO_BLOCK
    whole = gl.where(is_there, whole, 0)
    partial = gl.where(is_there, partial, 0)
    if not IS_CAUSAL:
        # there is no diagonal: the loop with a mask hides what lies behind the end
        is_cut = (gl.maximum(block_0, block_1) + 1) * ROWS > len_k
        partial_at = gl.where(is_cut, whole_at, partial_at)
        partial = gl.where(is_cut, whole, partial)
        whole = gl.where(is_cut, 0, whole)
    # zeros for keys that no query of the program sees
    seen_0 = gl.where(whole + partial + alone_0 > 0, block_0, NO_BLOCK)
    seen_1 = gl.where(whole + partial + alone_1 > 0, block_1, NO_BLOCK)
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
    dk_ptr += keys_at.to(gl.int64) * (ROWS * HEAD_DIM)
    dv_ptr += keys_at.to(gl.int64) * (ROWS * HEAD_DIM_V)
    q_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 1, ROWS, HEAD_DIM], q_desc.layout)
    dout_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 1, ROWS, HEAD_DIM_V], dout_desc.layout)
    k_s = gl.allocate_shared_memory(dtype, [2, 1, 1, 1, ROWS, HEAD_DIM], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [2, 1, 1, 1, ROWS, HEAD_DIM_V], v_desc.layout)
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, ROWS], dtype)
    ds_s = gl.allocate_shared_memory(dtype, [4, ROWS, ROWS], tile)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse2_s = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], plain)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], plain)
    fields_s = gl.allocate_shared_memory(gl.int32, [STAGES, STEP_FIELDS], plain)
    # the copies, and the row numbers that arrive by hand
    q_full = barriers(STAGES, 2)
    dout_full = barriers(STAGES, 2)
    k_full = barriers(1, 1)
    v_full = barriers(1, 1)
    hopper.fence_async_shared()
    gl.static_assert(EMPTY + STAGES <= MADE, "stages outnumber the barriers")
    gl.warp_specialize(
        [
            (_consume, (
                0, dk_desc, dv_desc, q_s, k_s, v_s, dout_s, ds_s, lse2_s, delta_s, fields_s, q_full,
                k_full.index(0), v_full.index(0), dout_full, dq_ptr, dk_ptr, dv_ptr, scale, whole,
                partial, alone, parts_0, block_0, sequence, head_k, start, len_k,
                TURNS, RAGGED, HEAD_DIM, HEAD_DIM_V, STAGES,
            )),
            (_consume, (
                1, dk_desc, dv_desc, q_s, k_s, v_s, dout_s, ds_s, lse2_s, delta_s, fields_s, q_full,
                k_full.index(0), v_full.index(0), dout_full, dq_ptr, dk_ptr, dv_ptr, scale, whole,
                partial, alone, parts_1, block_1, sequence, head_k, start, len_k,
                TURNS, RAGGED, HEAD_DIM, HEAD_DIM_V, STAGES,
            )),
            (_produce, (
                q_desc, k_desc, v_desc, dout_desc, q_s, k_s, v_s, dout_s, lse2_s, delta_s, fields_s,
                q_full, k_full.index(0), v_full.index(0), dout_full, lse2_ptr, delta_ptr, items_ptr,
                whole_at, whole, partial_at, partial, alone_0_at, alone_0, alone_1_at, alone_1,
                seen_0, seen_1, low, high, sequence, head_k, start, len_q, len_k, row_at, tokens_q,
                sums_at, tiles_q, GROUP, IS_CAUSAL, PER_HEAD, RAGGED, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
