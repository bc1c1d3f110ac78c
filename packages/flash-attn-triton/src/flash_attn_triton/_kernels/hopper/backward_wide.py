"""Backward pass on Hopper for heads wider than 128: what the two multiplying warpgroups do.

A program owns 64 keys, whose dk and dv fill the registers of a warpgroup each. The first makes the
probabilities and dv, the second their gradients and dk; each hands what it made to the other
through shared memory, and multiplies half of the columns of dq. So one of them computes while the
other's products run, and the factors of dk and dv never leave their registers.
"""

from ._linked.compat import gl, gluon, hopper, mbarrier, tma
from ._linked.gradients import ROWS, add_to_memory, write
from ._linked.pipeline import EMPTY, TURN, barrier_arrive, barrier_sync, coordinates
from .backward_steps import PARTIES, probabilities

# hardware barriers, one for either buffer: probabilities, and their gradients, are there
GIVEN = gl.constexpr(12)
READY = gl.constexpr(14)


@gluon.jit
def _inner(a, b, start, QUARTERS: gl.constexpr, use_acc: gl.constexpr):
    """Multiply rows of two tiles, but for a fourth quarter of padding: in 5 - QUARTERS products."""
    WIDTH: gl.constexpr = a.shape[1] // 4
    if QUARTERS > 3:
        return hopper.warpgroup_mma(a, b.permute((1, 0)), start, use_acc=use_acc, is_async=True)
    b_t = b.slice(0, 2 * WIDTH, 1).permute((1, 0))
    s = hopper.warpgroup_mma(a.slice(0, 2 * WIDTH, 1), b_t, start, use_acc=use_acc, is_async=True)
    b_t = b.slice(2 * WIDTH, WIDTH, 1).permute((1, 0))
    return hopper.warpgroup_mma(a.slice(2 * WIDTH, WIDTH, 1), b_t, s, is_async=True)


@gluon.jit
def _walk_scores(
    dv, s, turn, total, first_tile, tiles, dq_ptr,
    q_s, k_s, dout_s, p_s, ds_s, lse2_s, q_full, dout_full,
    first_key, diagonal, len_k, scale, softcap, window_left, window_right,
    MASKED: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, BLOCK_M: gl.constexpr, HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr, QUARTERS: gl.constexpr, STAGES_Q: gl.constexpr,
    STAGES_O: gl.constexpr,
):  # fmt: skip
    """Add what so many tiles of queries contribute; ``s`` holds the scores of the next one."""
    S: gl.constexpr = s.type.layout
    V: gl.constexpr = dv.type.layout
    WIDTH: gl.constexpr = HEAD_DIM // 4
    Q: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    dtype: gl.constexpr = q_s.dtype
    zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, S)
    zeros_q = gl.zeros([BLOCK_M, WIDTH], gl.float32, Q)
    for step in range(tiles):
        # 0, but not for the compiler: what it can take out of the loop, it holds in registers
        none = turn >> 30
        k = k_s.index(none).reshape([ROWS, HEAD_DIM])
        stage = turn % STAGES_Q
        stage_o = turn % STAGES_O
        buffer = turn % 2
        dout = dout_s.index(stage_o).reshape([BLOCK_M, HEAD_DIM_V])
        lse2 = lse2_s.index(stage).load(gl.SliceLayout(0, S))
        p, weight = probabilities(
            s, lse2, first_key, (first_tile + step) * BLOCK_M + diagonal, len_k,
            scale, softcap, window_left, window_right, MASKED, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP,
        )  # fmt: skip
        p_s.index(buffer).store(weight.to(dtype))
        hopper.fence_async_shared()
        barrier_arrive(GIVEN + buffer, 256, 4)
        barrier_arrive(EMPTY + stage, PARTIES, 4)
        p = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, V, 2))
        mbarrier.wait(dout_full.index(stage_o), turn // STAGES_O & 1)
        dv = hopper.warpgroup_mma(p, dout, dv, is_async=True)
        barrier_sync(READY + buffer, 256, 4)
        ds_t = ds_s.index(buffer).permute((1, 0))
        dq = hopper.warpgroup_mma(ds_t, k.slice(0, WIDTH, 1), zeros_q, use_acc=False, is_async=True)
        dv = hopper.warpgroup_mma_wait(1, deps=(dv,))
        barrier_arrive(EMPTY + STAGES_Q + stage_o, PARTIES, 4)
        more = hopper.warpgroup_mma(
            ds_t, k.slice(WIDTH, WIDTH, 1), zeros_q, use_acc=False, is_async=True
        )
        dq = hopper.warpgroup_mma_wait(1, deps=(dq,))
        add_to_memory(dq_ptr, dq)
        turn += 1
        following = turn % STAGES_Q
        # behind the last tile: scores of whatever lies there, which nobody reads
        mbarrier.wait(q_full.index(following), turn // STAGES_Q & 1, pred=turn < total)
        q = q_s.index(following).reshape([BLOCK_M, HEAD_DIM])
        s = _inner(k, q, zeros, QUARTERS, False)
        more = hopper.warpgroup_mma_wait(5 - QUARTERS, deps=(more,))
        add_to_memory(dq_ptr + BLOCK_M * WIDTH, more)
        dq_ptr += BLOCK_M * HEAD_DIM
        # in flight over the loop's back edge, it would keep ptxas from overlapping anything
        s = hopper.warpgroup_mma_wait(0, deps=(s,))
    return dv, s, turn


@gluon.jit
def consume_scores(
    dv_desc, q_s, k_s, v_s, dout_s, p_s, ds_s, lse2_s, q_full, k_full, dout_full, dq_ptr,
    scale, softcap, window_left, window_right, sequence, head_k, first_key, k_start, diagonal,
    len_k, dq_pitch, begin, whole, part, end,
    GROUP: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, RAGGED: gl.constexpr, BLOCK_M: gl.constexpr,
    HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, QUARTERS: gl.constexpr,
    STAGES_Q: gl.constexpr, STAGES_O: gl.constexpr,
):  # fmt: skip
    """Compute the block's probabilities and dv, and the left half of what goes to dq."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    V: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM_V, 16])
    total = (end - begin) * GROUP
    dv = gl.zeros([ROWS, HEAD_DIM_V], gl.float32, V)
    s = gl.zeros([ROWS, BLOCK_M], gl.float32, S)
    mbarrier.wait(k_full, 0)
    mbarrier.wait(q_full.index(0), 0, pred=total > 0)
    k = k_s.index(0).reshape([ROWS, HEAD_DIM])
    s = _inner(k, q_s.index(0).reshape([BLOCK_M, HEAD_DIM]), s, QUARTERS, False)
    s = hopper.warpgroup_mma_wait(0, deps=(s,))
    turn = 0
    dq_ptr += head_k.to(gl.int64) * GROUP * dq_pitch
    for _member in range(GROUP):
        dv, s, turn = _walk_scores(
            dv, s, turn, total, begin, whole - begin,
            dq_ptr + begin.to(gl.int64) * (BLOCK_M * HEAD_DIM),
            q_s, k_s, dout_s, p_s, ds_s, lse2_s, q_full, dout_full,
            first_key, diagonal, len_k, scale, softcap, window_left, window_right,
            True, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, BLOCK_M, HEAD_DIM, HEAD_DIM_V,
            QUARTERS, STAGES_Q, STAGES_O,
        )  # fmt: skip
        dv, s, turn = _walk_scores(
            dv, s, turn, total, whole, part - whole,
            dq_ptr + whole.to(gl.int64) * (BLOCK_M * HEAD_DIM),
            q_s, k_s, dout_s, p_s, ds_s, lse2_s, q_full, dout_full,
            first_key, diagonal, len_k, scale, softcap, window_left, window_right,
            False, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, BLOCK_M, HEAD_DIM, HEAD_DIM_V,
            QUARTERS, STAGES_Q, STAGES_O,
        )  # fmt: skip
        if HAS_LEFT:
            dv, s, turn = _walk_scores(
                dv, s, turn, total, part, end - part,
                dq_ptr + part.to(gl.int64) * (BLOCK_M * HEAD_DIM),
                q_s, k_s, dout_s, p_s, ds_s, lse2_s, q_full, dout_full,
                first_key, diagonal, len_k, scale, softcap, window_left, window_right,
                True, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, BLOCK_M, HEAD_DIM, HEAD_DIM_V,
                QUARTERS, STAGES_Q, STAGES_O,
            )  # fmt: skip
        dq_ptr += dq_pitch
    # the other warpgroup may still be multiplying the values
    barrier_sync(TURN, 256, 4)
    where = coordinates(sequence, head_k, k_start, len_k, first_key, RAGGED)
    write(dv, dv_desc, v_s.index(0), where, HEAD_DIM_V)
    tma.store_wait(0)


@gluon.jit
def consume_gradients(
    dk_desc, q_s, k_s, v_s, dout_s, p_s, ds_s, delta_s, k_full, v_full, dout_full, dq_ptr, scale,
    sequence, head_k, first_key, k_start, len_k, dq_pitch, begin, end,
    GROUP: gl.constexpr, RAGGED: gl.constexpr, BLOCK_M: gl.constexpr, HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr, QUARTERS: gl.constexpr, QUARTERS_V: gl.constexpr,
    STAGES_Q: gl.constexpr, STAGES_O: gl.constexpr,
):  # fmt: skip
    """Compute the gradients of the block's scores and dk, and the right half for dq."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    K: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    WIDTH: gl.constexpr = HEAD_DIM // 4
    Q: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    dtype: gl.constexpr = q_s.dtype
    steps = end - begin
    total = steps * GROUP
    dk = gl.zeros([ROWS, HEAD_DIM], gl.float32, K)
    zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, S)
    zeros_q = gl.zeros([BLOCK_M, WIDTH], gl.float32, Q)
    mbarrier.wait(k_full, 0)
    mbarrier.wait(v_full, 0, pred=total > 0)
    mbarrier.wait(dout_full.index(0), 0, pred=total > 0)
    v = v_s.index(0).reshape([ROWS, HEAD_DIM_V])
    dout = dout_s.index(0).reshape([BLOCK_M, HEAD_DIM_V])
    # dp - delta, from a start at -delta
    delta = delta_s.index(0).load(gl.SliceLayout(0, S))
    dp = _inner(v, dout, delta[None, :] - zeros, QUARTERS_V, True)
    dp = hopper.warpgroup_mma_wait(0, deps=(dp,))
    turn = 0
    dq_ptr += head_k.to(gl.int64) * GROUP * dq_pitch + 2 * BLOCK_M * WIDTH
    for _member in range(GROUP):
        address = dq_ptr + begin.to(gl.int64) * (BLOCK_M * HEAD_DIM)
        for _step in range(steps):
            none = turn >> 30
            k = k_s.index(none).reshape([ROWS, HEAD_DIM])
            v = v_s.index(none).reshape([ROWS, HEAD_DIM_V])
            stage = turn % STAGES_Q
            buffer = turn % 2
            q = q_s.index(stage).reshape([BLOCK_M, HEAD_DIM])
            barrier_arrive(EMPTY + STAGES_Q + turn % STAGES_O, PARTIES, 4)
            barrier_sync(GIVEN + buffer, 256, 4)
            weight = p_s.index(buffer).load(S)
            ds = (weight.to(gl.float32) * dp).to(dtype)
            ds_s.index(buffer).store(ds)
            hopper.fence_async_shared()
            barrier_arrive(READY + buffer, 256, 4)
            barrier_sync(TURN + 1, 128, 4)
            ds_k = gl.convert_layout(ds, gl.DotOperandLayout(0, K, 2))
            dk = hopper.warpgroup_mma(ds_k, q, dk, is_async=True)
            ds_t = ds_s.index(buffer).permute((1, 0))
            dq = hopper.warpgroup_mma(
                ds_t, k.slice(2 * WIDTH, WIDTH, 1), zeros_q, use_acc=False, is_async=True
            )
            dk = hopper.warpgroup_mma_wait(1, deps=(dk,))
            barrier_arrive(EMPTY + stage, PARTIES, 4)
            if QUARTERS > 3:
                more = hopper.warpgroup_mma(
                    ds_t, k.slice(3 * WIDTH, WIDTH, 1), zeros_q, use_acc=False, is_async=True
                )
                dq = hopper.warpgroup_mma_wait(1, deps=(dq,))
                add_to_memory(address, dq)
            turn += 1
            stage_o = turn % STAGES_O
            mbarrier.wait(dout_full.index(stage_o), turn // STAGES_O & 1, pred=turn < total)
            dout = dout_s.index(stage_o).reshape([BLOCK_M, HEAD_DIM_V])
            delta = delta_s.index(stage_o).load(gl.SliceLayout(0, S))
            dp = _inner(v, dout, delta[None, :] - zeros, QUARTERS_V, True)
            if QUARTERS > 3:
                more = hopper.warpgroup_mma_wait(5 - QUARTERS_V, deps=(more,))
                add_to_memory(address + BLOCK_M * WIDTH, more)
            else:
                dq = hopper.warpgroup_mma_wait(5 - QUARTERS_V, deps=(dq,))
                add_to_memory(address, dq)
            address += BLOCK_M * HEAD_DIM
            dp = hopper.warpgroup_mma_wait(0, deps=(dp,))
        dq_ptr += dq_pitch
    # the other warpgroup may still be multiplying the keys
    barrier_sync(TURN, 256, 4)
    where = coordinates(sequence, head_k, k_start, len_k, first_key, RAGGED)
    write(dk * scale, dk_desc, k_s.index(0), where, HEAD_DIM)
    tma.store_wait(0)
