"""Backward pass on Hopper: one warp reads the lists and copies, two warpgroups multiply.

A program owns two blocks of 64 keys, one per warpgroup, and walks lists of blocks of queries: first
the blocks that see both, then those that see one (``Pairs`` in ``_layout/lists.py``). Scores are
transposed ([keys, queries]), so that the products of dv and dk take the probabilities and their
gradients from the accumulators without a change of layout. The product of dq needs the gradients of
both warpgroups, which exchange them in shared memory. Where programs share a gradient (all of dq,
and dk and dv of a block that several own), they add in fp32 to sums in memory. The sums are in the
order of the accumulators' registers; ``row_kernel`` turns them into rows.
"""

from __future__ import annotations

from ...._linked.hopper.compat import gl, gluon, hopper, mbarrier, tma
from ...._linked.hopper.gradients import ROWS
from ...._linked.hopper.order import let_next_launch_begin, take_number
from ...._linked.hopper.pipeline import EMPTY, LOG2E, TURN, barrier_sync, barriers
from ...._linked.launch.entries import entry
from ..arguments import BackwardNumbers, BackwardOptions, BackwardTensors
from ..queries.schedule import floor_div
from ..structures import BackwardPipeline, Gradients, Mine, Origin, Work
from .lists import OTHERS, count_turns, find_keys, find_program, owned_by
from .order import await_pieces, first_tile_of_keys, pass_pieces
from .pieces import add_block, key_positions, tiles, write_block
from .producer import produce
from .steps import (
    MADE,
    STEP_FIELDS,
    add_dq,
    await_made,
    multiply_dq,
    say_made,
    walk,
    walk_apart,
)


@gluon.jit
def _begin(both, is_walked, W: gl.constexpr, pipeline, OPTIONS: gl.constexpr):
    """Return gradients that are 0, and the scores of the first step."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    K: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OPTIONS.HEAD_DIM, 16])
    V: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OPTIONS.HEAD_DIM_V, 16])
    dk = gl.zeros([ROWS, OPTIONS.HEAD_DIM], gl.float32, K)  # [ROWS, HEAD_DIM]
    dv = gl.zeros([ROWS, OPTIONS.HEAD_DIM_V], gl.float32, V)  # [ROWS, HEAD_DIM_V]
    s = gl.zeros([ROWS, ROWS], gl.float32, S)  # [ROWS, ROWS]: keys, queries
    turn = gl.where(both > 0, 0, W)
    mbarrier.wait(pipeline.k_full, 0, pred=is_walked)
    mbarrier.wait(pipeline.q_full.index(turn), 0, pred=is_walked)
    k = pipeline.k_s.index(W).reshape([ROWS, OPTIONS.HEAD_DIM])
    q_t = pipeline.q_s.index(turn).reshape([ROWS, OPTIONS.HEAD_DIM]).permute((1, 0))
    s = hopper.warpgroup_mma(k, q_t, s, use_acc=False, is_async=True)
    s = hopper.warpgroup_mma_wait(0, deps=(s,))
    mbarrier.wait(pipeline.v_full, 0, pred=is_walked)
    turn = turn * 0
    # last = -1: no step's dq is pending
    return Gradients(dk, dv, s, turn - 1, turn)


@gluon.jit
def _consume(W: gl.constexpr, tensors, numbers, work, pipeline, OPTIONS: gl.constexpr):
    """Make dk and dv of warpgroup ``W``'s block of keys, and its contributions to dq."""
    TURNS: gl.constexpr = 1 if OPTIONS.PER_HEAD else OPTIONS.GROUP
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    steps = work.steps
    # positions in the block, or with pieces in the sequence
    positions = gl.arange(0, ROWS, gl.SliceLayout(1, S))  # [ROWS]
    if OPTIONS.PIECE < ROWS:
        owned_ptr = work.owned_ptr + W * (ROWS // OPTIONS.PIECE)
        positions = key_positions(owned_ptr, gl.SliceLayout(1, S), OPTIONS.PIECE)
    is_walked = steps.whole + steps.partial + steps.alone > 0
    both, total = count_turns(steps, steps.alone, OPTIONS)
    mine = Mine(positions, numbers.scale * LOG2E, tensors.dq_ptr, both, total)
    gradients = _begin(both, is_walked, W, pipeline, OPTIONS)
    if OPTIONS.MAKES_DQ:
        # the product of dq runs one step late
        say_made(gradients.turn + 1, W)
    gradients = walk(gradients, steps.whole * TURNS, mine, W, False, pipeline, OPTIONS)
    gradients = walk(gradients, steps.partial * TURNS, mine, W, True, pipeline, OPTIONS)
    turn = gradients.turn
    if OPTIONS.MAKES_DQ:
        await_made(turn + 1, W)
        dq = multiply_dq(pipeline.ds_s, pipeline.k_s, turn + 1, 0, W, OPTIONS.HEAD_DIM)
        dq = hopper.warpgroup_mma_wait(0, deps=(dq,))
        add_dq(tensors.dq_ptr, gradients.last, dq, W, OPTIONS.HEAD_DIM)
    dk, dv = walk_apart(gradients, steps.alone * TURNS, mine, W, pipeline, OPTIONS)
    if OPTIONS.MAKES_DQ:
        # after the barrier, one thread arrives for all threads of the warpgroup
        barrier_sync(TURN + 1 + W, 128, 4)
        mbarrier.arrive(pipeline.dq_added, count=1)
    _leave(dk, dv, is_walked, W, work, tensors, numbers, pipeline, OPTIONS)


@gluon.jit
def _leave(
    dk, dv, is_walked, W: gl.constexpr, work, tensors, numbers, pipeline, OPTIONS: gl.constexpr
):
    """Write the pieces of dk and dv that no other program owns, and add the rest to the sums."""
    PIECE: gl.constexpr = OPTIONS.PIECE
    keys, program = work.keys, work.program
    mine = keys.mine_0 if W == 0 else keys.mine_1
    # the memory of keys and values is free: a barrier has followed the last shared use
    if mine % OTHERS != 0:
        write_block(dv, tensors.dv_desc, pipeline.v_s, W, work, tensors, PIECE)
        write_block(dk * numbers.scale, tensors.dk_desc, pipeline.k_s, W, work, tensors, PIECE)
        tma.store_wait(0)
    if mine >= OTHERS:
        await_pieces(W, program, tensors, numbers, OPTIONS)
        if is_walked:
            first = first_tile_of_keys(program, tensors, numbers).to(gl.int64) * ROWS
            dv_ptr = tensors.dv_ptr + first * OPTIONS.HEAD_DIM_V
            dk_ptr = tensors.dk_ptr + first * OPTIONS.HEAD_DIM
            add_block(dv_ptr, dv, W, work, tensors, PIECE)
            add_block(dk_ptr, dk, W, work, tensors, PIECE)
        pass_pieces(W, program, tensors, numbers, OPTIONS)


@gluon.jit
def _find_origin(program, tensors, numbers, OPTIONS: gl.constexpr):
    """Return the offsets of a sequence's row numbers and of its sums of dq."""
    sequence, start = program.sequence, program.start
    heads_q = numbers.heads_k * OPTIONS.GROUP
    first_tile = floor_div(program.diagonal, ROWS)
    if tensors.cu_seqlens_ptr is not None:
        row_at = start.to(gl.int64)
        sums_at = start // ROWS + 2 * (sequence + 1) - first_tile
    else:
        row_at = sequence.to(gl.int64) * heads_q * numbers.tokens_q
        sums_at = sequence * heads_q * numbers.tiles_q - first_tile
    return Origin(row_at, numbers.tokens_q, sums_at, numbers.tiles_q)


@gluon.jit
def _allocate(tensors, OPTIONS: gl.constexpr):
    """Allocate a program's shared memory and its barriers."""
    dtype: gl.constexpr = tensors.q_desc.dtype
    q_s = tiles(OPTIONS.STAGES, tensors.q_desc, OPTIONS.PIECE, OPTIONS.HEAD_DIM)
    dout_s = tiles(OPTIONS.STAGES, tensors.dout_desc, OPTIONS.PIECE, OPTIONS.HEAD_DIM_V)
    k_s = tiles(2, tensors.k_desc, OPTIONS.PIECE, OPTIONS.HEAD_DIM)
    v_s = tiles(2, tensors.v_desc, OPTIONS.PIECE, OPTIONS.HEAD_DIM_V)
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, ROWS], dtype)
    ds_s = gl.allocate_shared_memory(dtype, [4, ROWS, ROWS], tile)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse2_s = gl.allocate_shared_memory(gl.float32, [OPTIONS.STAGES, ROWS], plain)
    delta_s = gl.allocate_shared_memory(gl.float32, [OPTIONS.STAGES, ROWS], plain)
    fields_s = gl.allocate_shared_memory(gl.int32, [OPTIONS.STAGES, STEP_FIELDS], plain)
    # each of these two counts the copy and the row numbers' arrival. Making barriers synchronises
    # all warps, which is needed: Triton passes captured values to the partitions through the shared
    # memory of reductions, and a fast warp could overwrite what a slow one has yet to read
    q_full = barriers(OPTIONS.STAGES, 2)
    dout_full = barriers(OPTIONS.STAGES, 2)
    k_full = barriers(1, 1).index(0)
    v_full = barriers(1, 1).index(0)
    dq_added = barriers(1, 2).index(0)
    hopper.fence_async_shared()
    return BackwardPipeline(
        q_s,
        k_s,
        v_s,
        dout_s,
        ds_s,
        lse2_s,
        delta_s,
        fields_s,
        q_full,
        k_full,
        v_full,
        dout_full,
        dq_added,
    )


@entry(gluon.jit)
def hopper_backward_kernel(
    tensors: BackwardTensors, numbers: BackwardNumbers, OPTIONS: BackwardOptions
):
    """``ds = p (dout v^T - delta)``, ``dq = scale ds k``, ``dk = scale ds^T q``, ``dv = p^T dout``.

    ``p = exp(scale q k^T - lse)`` over the kept blocks. The kernel is warp-specialised. A program
    writes its blocks of dk and dv or adds to their sums, and adds to the sums of dq. Without
    ``MAKES_DQ`` it makes no dq, and programs add to a sum in the order of their list: ``order.py``.
    """
    gl.static_assert(EMPTY + OPTIONS.STAGES <= MADE, "stages outnumber the barriers")
    programs = gl.load(tensors.real_ptr)
    if OPTIONS.MAKES_DQ:
        let_next_launch_begin()
    there = programs * numbers.batch
    if not OPTIONS.PER_HEAD:
        there *= numbers.heads_k
    pid = gl.program_id(0)
    if not OPTIONS.MAKES_DQ:
        pid = take_number(tensors.counters_ptr)
    # the host only knows an upper bound of the number of programs
    if pid < there:
        program = find_program(pid, programs, tensors, numbers, OPTIONS)
        keys, steps = find_keys(program, tensors, numbers, OPTIONS)
        origin = _find_origin(program, tensors, numbers, OPTIONS)
        work = Work(owned_by(program, tensors, OPTIONS.PIECE), steps, keys, program, origin)
        pipeline = _allocate(tensors, OPTIONS)
        gl.warp_specialize(
            [
                (_consume, (0, tensors, numbers, work, pipeline, OPTIONS)),
                (_consume, (1, tensors, numbers, work, pipeline, OPTIONS)),
                (produce, (tensors, numbers, work, pipeline, OPTIONS)),
            ],
            [4, 1],
            [240, 24],
        )
