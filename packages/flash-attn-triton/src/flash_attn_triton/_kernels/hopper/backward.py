"""Backward pass on Hopper: one warp copies, two warpgroups multiply.

A program owns a block of keys, of which every warpgroup has 64, and walks the queries that see it.
Above head dim 128 it owns 64 keys, and the warpgroups divide the work as ``hopper_backward_wide``
says. Scores are transposed ([keys, queries]), so that probabilities and their gradients go from the
accumulators into the products of dv and dk as they lie. The product of dq needs those of all keys
of the block: they meet in shared memory. What a block contributes to dq is added in fp32 to a
buffer in memory, in the order of the accumulators' registers, out of which ``hopper_backward_dq``
brings it: by the copy engine, or above head dim 128 by the threads.
"""

from ._linked.compat import copy_in, gl, gluon, hopper, mbarrier, tma
from ._linked.gradients import ROWS, send, write
from ._linked.pipeline import EMPTY, SEARCH_CHUNK, TURN, barrier_sync, barriers, coordinates
from .backward_steps import MADE, PARTIES, await_made, multiply_dq, say_made, walk
from .backward_wide import GIVEN, consume_gradients, consume_scores

INF = gl.constexpr(float("inf"))


@gluon.jit
def locate_keys(
    pid, cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, heads_k, tokens_q, tokens_k, tiles, span,
    BALANCE: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Return ``(block, sequence, head, q_start, k_start, len_q, len_k)`` of a block of keys.

    Under a causal mask the first blocks walk furthest: ``BALANCE`` starts them first, within as
    many heads (``span``) as the cache holds. For packed tensors ``tiles`` counts slots, and a slot
    without a block gives -1.
    """
    if cu_seqlens_k_ptr is None:
        if BALANCE:
            section = pid // (span * tiles)
            place = pid % (span * tiles)
            heads_here = gl.minimum(span, batch * heads_k - section * span)
            block = place // heads_here
            batch_head = section * span + place % heads_here
        else:
            block = pid % tiles
            batch_head = pid // tiles
        sequence = batch_head // heads_k
        head = batch_head % heads_k
        q_start = 0
        k_start = 0
        len_q = tokens_q
        len_k = tokens_k
    else:
        slot = pid // heads_k if BALANCE else pid % tiles
        head = pid % heads_k if BALANCE else pid // tiles
        # as ``schedule.find_sequence``, for a whole warpgroup
        sequence = -1
        for first in range(0, batch + 1, SEARCH_CHUNK):
            index = first + gl.arange(0, SEARCH_CHUNK, gl.BlockedLayout([1], [32], [4], [0]))
            start = gl.load(cu_seqlens_k_ptr + index, mask=index <= batch, other=0)
            mine = (start // BLOCK_N + index < slot) & (index <= batch)
            sequence += gl.sum(mine.to(gl.int32), 0)
        # tokens around the sequences are two more sequences, which face nothing
        is_real = (sequence >= 0) & (sequence < batch)
        k_start = gl.load(cu_seqlens_k_ptr + sequence, mask=sequence >= 0, other=0)
        k_end = gl.load(cu_seqlens_k_ptr + sequence + 1, mask=sequence < batch, other=tokens_k)
        q_start = gl.load(cu_seqlens_q_ptr + sequence, mask=is_real, other=0)
        q_end = gl.load(cu_seqlens_q_ptr + sequence + 1, mask=is_real, other=0)
        block = slot - (k_start // BLOCK_N + sequence + 1)
        len_q = q_end - q_start
        len_k = k_end - k_start
        block = gl.where(block * BLOCK_N < len_k, block, -1)
    return block, sequence, head, q_start, k_start, len_q, len_k


@gluon.jit
def query_tiles(
    first_key, diagonal, len_q, len_k, window_left, window_right,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Return ``(begin, whole, part, end)`` in tiles of queries: what sees a block of keys.

    Tiles from ``begin`` up to ``end`` see some key of it, those from ``whole`` up to ``part`` all.
    """
    last_key = first_key + BLOCK_N - 1
    begin = 0
    whole = 0
    end = gl.cdiv(len_q, BLOCK_M)
    part = end
    if HAS_RIGHT:
        begin = gl.maximum(first_key - diagonal - window_right, 0) // BLOCK_M
        whole = gl.cdiv(gl.maximum(last_key - diagonal - window_right, 0), BLOCK_M)
    if HAS_LEFT:
        last = gl.minimum(last_key, len_k - 1) - diagonal + window_left + 1
        end = gl.minimum(end, gl.cdiv(gl.maximum(last, 0), BLOCK_M))
        part = gl.maximum(first_key - diagonal + window_left + 1, 0) // BLOCK_M
    # no key, no query: a block ahead of the seen ones, or a slot without a block
    end = gl.where(first_key < len_k, end, 0)
    begin = gl.minimum(begin, end)
    whole = gl.minimum(gl.maximum(whole, begin), end)
    if last_key >= len_k:
        whole = end
    part = gl.minimum(gl.maximum(part, whole), end)
    return begin, whole, part, end


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, dout_desc, q_s, k_s, v_s, dout_s, lse2_s, delta_s,
    q_full, k_full, v_full, dout_full, lse2_ptr, delta_ptr,
    sequence, head_k, first_key, q_start, k_start, len_q, len_k, row_at, row_pitch, begin, end,
    GROUP: gl.constexpr, RAGGED: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES_Q: gl.constexpr, STAGES_O: gl.constexpr,
):  # fmt: skip
    """Copy the block's keys and values, then tiles of queries and of what belongs to them."""
    index = gl.arange(0, BLOCK_M, gl.BlockedLayout([BLOCK_M // 32], [32], [1], [0]))
    PARTS: gl.constexpr = BLOCK_N // ROWS
    mbarrier.expect(k_full, PARTS * k_desc.block_type.nbytes)
    mbarrier.expect(v_full, PARTS * v_desc.block_type.nbytes)
    for w in gl.static_range(PARTS):
        where = coordinates(sequence, head_k, k_start, len_k, first_key + w * ROWS, RAGGED)
        copy_in(k_desc, where, k_full, k_s.index(w))
    steps = end - begin
    for turn in range(steps * GROUP):
        head = head_k * GROUP
        tile = begin + turn
        if GROUP > 1:
            head += turn // steps
            tile = begin + turn % steps
        row = tile * BLOCK_M
        inside = row + index < len_q
        rows_at = row_at + head.to(gl.int64) * row_pitch + row
        # beyond the end an exponential is 0, as it is in a row that sees no key
        lse2 = gl.load(lse2_ptr + rows_at + index, mask=inside, other=INF)
        delta = gl.load(delta_ptr + rows_at + index, mask=inside, other=0.0)
        where = coordinates(sequence, head, q_start, len_q, row, RAGGED)
        stage = turn % STAGES_Q
        if turn >= STAGES_Q:
            barrier_sync(EMPTY + stage, PARTIES, 1)
        mbarrier.expect(q_full.index(stage), q_desc.block_type.nbytes)
        copy_in(q_desc, where, q_full.index(stage), q_s.index(stage))
        lse2_s.index(stage).store(lse2)
        mbarrier.arrive(q_full.index(stage), count=1)
        if turn == 0:
            for w in gl.static_range(PARTS):
                mine = coordinates(sequence, head_k, k_start, len_k, first_key + w * ROWS, RAGGED)
                copy_in(v_desc, mine, v_full, v_s.index(w))
        stage = turn % STAGES_O
        if turn >= STAGES_O:
            barrier_sync(EMPTY + STAGES_Q + stage, PARTIES, 1)
        mbarrier.expect(dout_full.index(stage), dout_desc.block_type.nbytes)
        copy_in(dout_desc, where, dout_full.index(stage), dout_s.index(stage))
        delta_s.index(stage).store(-delta)
        mbarrier.arrive(dout_full.index(stage), count=1)
    # nobody may be left at a barrier
    total = steps * GROUP
    for back in gl.static_range(STAGES_Q):
        if total > back:
            barrier_sync(EMPTY + (total - 1 - back) % STAGES_Q, PARTIES, 1)
    for back in gl.static_range(STAGES_O):
        if total > back:
            barrier_sync(EMPTY + STAGES_Q + (total - 1 - back) % STAGES_O, PARTIES, 1)


@gluon.jit
def _consume(
    W: gl.constexpr, dk_desc, dv_desc, sums, dq_s, q_s, k_s, v_s, dout_s, ds_s, lse2_s, delta_s,
    q_full, k_full, v_full, dout_full, dq_row, scale, softcap, window_left, window_right,
    sequence, head_k, first_key, k_start, diagonal, len_q, len_k, dq_pitch,
    begin, whole, part, end,
    GROUP: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, RAGGED: gl.constexpr, BLOCK_M: gl.constexpr,
    HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, STAGES_Q: gl.constexpr,
    STAGES_O: gl.constexpr,
):  # fmt: skip
    """Compute warpgroup ``W``'s 64 rows of dk and dv, and its half of what goes to dq."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    K: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    V: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM_V, 16])
    steps = end - begin
    total = steps * GROUP
    dk = gl.zeros([ROWS, HEAD_DIM], gl.float32, K)
    dv = gl.zeros([ROWS, HEAD_DIM_V], gl.float32, V)
    s = gl.zeros([ROWS, BLOCK_M], gl.float32, S)
    mbarrier.wait(k_full, 0)
    mbarrier.wait(q_full.index(0), 0, pred=total > 0)
    k = k_s.index(W).reshape([ROWS, HEAD_DIM])
    q_t = q_s.index(0).reshape([BLOCK_M, HEAD_DIM]).permute((1, 0))
    s = hopper.warpgroup_mma(k, q_t, s, use_acc=False, is_async=True)
    s = hopper.warpgroup_mma_wait(0, deps=(s,))
    mbarrier.wait(v_full, 0, pred=total > 0)
    turn = 0
    # the warpgroups' halves of a tile of dq lie one behind the other
    dq_row += head_k * GROUP * dq_pitch + W * (BLOCK_M * HEAD_DIM // 64)
    last = dq_row
    # dq is one step behind
    say_made(turn + 1, W)
    for _member in range(GROUP):
        dk, dv, s, last, turn = walk(
            dk, dv, s, last, turn, total, begin, whole - begin,
            sums, dq_row + begin * (BLOCK_M * HEAD_DIM // 32), dq_s,
            q_s, k_s, v_s, dout_s, ds_s, lse2_s, delta_s, q_full, dout_full,
            first_key, diagonal, len_k, scale, softcap, window_left, window_right,
            W, True, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, BLOCK_M, HEAD_DIM, HEAD_DIM_V,
            STAGES_Q, STAGES_O,
        )  # fmt: skip
        dk, dv, s, last, turn = walk(
            dk, dv, s, last, turn, total, whole, part - whole,
            sums, dq_row + whole * (BLOCK_M * HEAD_DIM // 32), dq_s,
            q_s, k_s, v_s, dout_s, ds_s, lse2_s, delta_s, q_full, dout_full,
            first_key, diagonal, len_k, scale, softcap, window_left, window_right,
            W, False, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, BLOCK_M, HEAD_DIM, HEAD_DIM_V,
            STAGES_Q, STAGES_O,
        )  # fmt: skip
        if HAS_LEFT:
            dk, dv, s, last, turn = walk(
                dk, dv, s, last, turn, total, part, end - part,
                sums, dq_row + part * (BLOCK_M * HEAD_DIM // 32), dq_s,
                q_s, k_s, v_s, dout_s, ds_s, lse2_s, delta_s, q_full, dout_full,
                first_key, diagonal, len_k, scale, softcap, window_left, window_right,
                W, True, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, BLOCK_M, HEAD_DIM, HEAD_DIM_V,
                STAGES_Q, STAGES_O,
            )  # fmt: skip
        dq_row += dq_pitch
    await_made(turn + 1, W)
    dq = multiply_dq(ds_s, k_s, turn + 1, 0, W, BLOCK_M, HEAD_DIM)
    dq = hopper.warpgroup_mma_wait(0, deps=(dq,))
    if total > 0:
        send(sums, last, dq_s.index(W), dq)
    where = coordinates(sequence, head_k, k_start, len_k, first_key + W * ROWS, RAGGED)
    # its values no warpgroup shares; its keys the other one may still be multiplying
    write(dv, dv_desc, v_s.index(W), where, HEAD_DIM_V)
    barrier_sync(TURN, 256, 4)
    write(dk * scale, dk_desc, k_s.index(W), where, HEAD_DIM)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=[
    "scale", "softcap", "window_left", "window_right", "batch", "heads_k", "tokens_q", "tokens_k",
    "tiles", "tiles_q", "span",
], do_not_specialize_on_alignment=["cu_seqlens_q_ptr", "cu_seqlens_k_ptr"])  # fmt: skip
def backward_kernel(
    q_desc, k_desc, v_desc, dout_desc, dk_desc, dv_desc,
    sums,  # of dq: a map, or above head dim 128 a pointer
    lse2_ptr, delta_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, scale, softcap, window_left, window_right,
    batch, heads_k, tokens_q, tokens_k, tiles, tiles_q, span,
    GROUP: gl.constexpr,  # query heads per key head
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
    RAGGED: gl.constexpr,  # form of the tensor maps; see ``coordinates``
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    QUARTERS: gl.constexpr,  # of the columns, those that are no padding
    QUARTERS_V: gl.constexpr,
    STAGES_Q: gl.constexpr,
    STAGES_O: gl.constexpr,
):  # fmt: skip
    """Write one block of dk and dv of one key head, and add its part to dq."""
    dtype: gl.constexpr = q_desc.dtype
    block, sequence, head_k, q_start, k_start, len_q, len_k = locate_keys(
        gl.program_id(0), cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, heads_k, tokens_q, tokens_k,
        tiles, span, HAS_RIGHT, BLOCK_N,
    )  # fmt: skip
    owner = gl.maximum(gl.minimum(sequence, batch - 1), 0).to(gl.int64)
    heads_q = heads_k * GROUP
    if cu_seqlens_q_ptr is None:
        row_at = owner * heads_q * tokens_q
        dq_at = owner * heads_q * tiles_q
    else:
        row_at = owner * 0 + q_start
        dq_at = owner * 0 + (q_start // BLOCK_M + sequence + 1)
    shift = 0
    if HAS_RIGHT:
        # queries ahead of the first one that sees a key: as if there were none
        shift = gl.minimum(gl.maximum(len_q - len_k - window_right, 0), len_q)
        q_start += shift
        row_at += shift
        len_q -= shift
    if HAS_LEFT:
        # likewise keys ahead of the first one that a query sees
        unseen = gl.minimum(gl.maximum(len_k - len_q - window_left, 0), len_k)
        k_start += unseen
        len_k -= unseen
    diagonal = len_k - len_q
    # a slot without a block: beyond the end, where nothing is read or written
    first_key = gl.where(block < 0, gl.cdiv(len_k, BLOCK_N), block) * BLOCK_N
    begin, whole, part, end = query_tiles(
        first_key, diagonal, len_q, len_k, window_left, window_right, HAS_LEFT, HAS_RIGHT, BLOCK_M,
        BLOCK_N,
    )  # fmt: skip
    q_s = gl.allocate_shared_memory(dtype, [STAGES_Q, 1, 1, 1, BLOCK_M, HEAD_DIM], q_desc.layout)
    dout_s = gl.allocate_shared_memory(
        dtype, [STAGES_O, 1, 1, 1, BLOCK_M, HEAD_DIM_V], dout_desc.layout
    )
    parts: gl.constexpr = BLOCK_N // ROWS
    k_s = gl.allocate_shared_memory(dtype, [parts, 1, 1, 1, ROWS, HEAD_DIM], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [parts, 1, 1, 1, ROWS, HEAD_DIM_V], v_desc.layout)
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_M], dtype)
    ds_s = gl.allocate_shared_memory(dtype, [2 * parts, ROWS, BLOCK_M], tile)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse2_s = gl.allocate_shared_memory(gl.float32, [STAGES_Q, BLOCK_M], plain)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES_O, BLOCK_M], plain)
    # the copies, and the row numbers that arrive by hand
    q_full = barriers(STAGES_Q, 2)
    dout_full = barriers(STAGES_O, 2)
    k_full = barriers(1, 1)
    v_full = barriers(1, 1)
    hopper.fence_async_shared()
    if BLOCK_N == ROWS:
        dq_ptr = sums + dq_at * (BLOCK_M * HEAD_DIM)
        dq_pitch = tiles_q.to(gl.int64) * (BLOCK_M * HEAD_DIM)
        gl.static_assert(EMPTY + STAGES_Q + STAGES_O <= GIVEN, "stages outnumber the barriers")
        p_s = gl.allocate_shared_memory(dtype, [2, ROWS, BLOCK_M], tile)
        gl.warp_specialize(
            [
                (consume_scores, (
                    dv_desc, q_s, k_s, v_s, dout_s, p_s, ds_s, lse2_s, q_full, k_full.index(0),
                    dout_full, dq_ptr, scale, softcap, window_left, window_right, sequence, head_k,
                    first_key, k_start, diagonal, len_k, dq_pitch, begin, whole, part, end,
                    GROUP, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, RAGGED, BLOCK_M, HEAD_DIM, HEAD_DIM_V,
                    QUARTERS, STAGES_Q, STAGES_O,
                )),
                (consume_gradients, (
                    dk_desc, q_s, k_s, v_s, dout_s, p_s, ds_s, delta_s, k_full.index(0),
                    v_full.index(0), dout_full, dq_ptr, scale, sequence, head_k, first_key, k_start,
                    len_k, dq_pitch, begin, end,
                    GROUP, RAGGED, BLOCK_M, HEAD_DIM, HEAD_DIM_V,
                    QUARTERS, QUARTERS_V, STAGES_Q, STAGES_O,
                )),
                (_produce, (
                    q_desc, k_desc, v_desc, dout_desc, q_s, k_s, v_s, dout_s, lse2_s, delta_s,
                    q_full, k_full.index(0), v_full.index(0), dout_full, lse2_ptr, delta_ptr,
                    sequence, head_k, first_key, q_start, k_start, len_q, len_k, row_at, tokens_q,
                    begin, end, GROUP, RAGGED, BLOCK_M, BLOCK_N, STAGES_Q, STAGES_O,
                )),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        gl.static_assert(EMPTY + STAGES_Q + STAGES_O <= MADE + 8, "stages outnumber the barriers")
        # in rows of the map
        dq_row = (dq_at * (BLOCK_M * HEAD_DIM // 32)).to(gl.int32)
        dq_pitch = tiles_q * (BLOCK_M * HEAD_DIM // 32)
        dq_s = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M * HEAD_DIM // 64, 32], sums.layout)
        gl.warp_specialize(
            [
                (_consume, (
                    0, dk_desc, dv_desc, sums, dq_s, q_s, k_s, v_s, dout_s, ds_s, lse2_s, delta_s,
                    q_full, k_full.index(0), v_full.index(0), dout_full, dq_row, scale, softcap,
                    window_left, window_right, sequence, head_k, first_key, k_start, diagonal,
                    len_q, len_k, dq_pitch, begin, whole, part, end,
                    GROUP, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, RAGGED, BLOCK_M, HEAD_DIM, HEAD_DIM_V,
                    STAGES_Q, STAGES_O,
                )),
                (_consume, (
                    1, dk_desc, dv_desc, sums, dq_s, q_s, k_s, v_s, dout_s, ds_s, lse2_s, delta_s,
                    q_full, k_full.index(0), v_full.index(0), dout_full, dq_row, scale, softcap,
                    window_left, window_right, sequence, head_k, first_key, k_start, diagonal,
                    len_q, len_k, dq_pitch, begin, whole, part, end,
                    GROUP, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, RAGGED, BLOCK_M, HEAD_DIM, HEAD_DIM_V,
                    STAGES_Q, STAGES_O,
                )),
                (_produce, (
                    q_desc, k_desc, v_desc, dout_desc, q_s, k_s, v_s, dout_s, lse2_s, delta_s,
                    q_full, k_full.index(0), v_full.index(0), dout_full, lse2_ptr, delta_ptr,
                    sequence, head_k, first_key, q_start, k_start, len_q, len_k, row_at, tokens_q,
                    begin, end, GROUP, RAGGED, BLOCK_M, BLOCK_N, STAGES_Q, STAGES_O,
                )),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
