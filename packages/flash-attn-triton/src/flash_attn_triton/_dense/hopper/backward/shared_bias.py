"""The gradient of a bias that several sequences, or key heads, share: one stores, the rest add.

Programs that share a bias run side by side (``find_block``), own the same keys and walk the same
queries: all sequences have one length. The program that begins first stores its gradients of scores
by TMA and counts stored tiles in memory. Every other program adds its gradients of a tile once that
tile is stored. So memory need not be cleared first, and sums are still in the L2 cache. One warp
does this, while the warpgroups go on with the next tile.

A second counter, which every program raises as it begins, chooses the program that stores. That
program waits for no program, and the rest wait only for it, which has begun. So every wait ends,
whatever order a GPU starts programs in and however many multiprocessors it has.
"""

from ...._linked.hopper.compat import add_out, copy_out, gl, gluon, hopper, mbarrier, tma
from ...._linked.hopper.gradients import ROWS
from ...._linked.hopper.order import take_number
from ...._linked.hopper.pipeline import await_empty, await_full, barriers
from ..panels import accumulator
from .bias import gradients_of, place_at, place_in_planes
from .blocks import count_turns
from .structures import Order


@gluon.jit
def share_block(block, tensors, numbers, TILE: gl.constexpr):
    """Return the ``Order`` of a program: counters of its block, mbarriers of its buffers."""
    sequences, heads = numbers.sequences_together, numbers.heads_together
    plane = block.sequence // sequences * (numbers.heads_k // heads) + block.head_k // heads
    place = plane * numbers.tiles + block.first_key // TILE.BLOCK_N
    # both warpgroups fill a buffer
    return Order(tensors.counters_ptr + 2 * place, barriers(2, 2), barriers(2, 1))


@gluon.jit
def await_buffer(turn, program, OPTIONS: gl.constexpr):
    """Wait until the buffers of a step's gradients of scores are empty."""
    if OPTIONS.SHARES_DS:
        await_empty(program.order.empty, turn)


@gluon.constexpr_function
def _text_of_raise(left):
    """Return PTX that raises a counter by one once all but ``left`` copies of a warp arrived."""
    return f"""
        {{
            .reg .pred first;
            cp.async.bulk.wait_group {left};
            fence.proxy.async.global;
            bar.warp.sync -1;
            setp.ne.s32 first, $2, 0;
            @first fence.acq_rel.gpu;
            @first red.relaxed.gpu.global.add.u32 [$1], $2;
            mov.b32 $0, 0;
        }}
        """


@gluon.jit
def _say_stored(counter, LEFT: gl.constexpr):
    """Raise a counter once the warp's TMA stores are in memory, except the last ``LEFT`` copies.

    The thread that issued the copies waits for them and fences its proxy. After the barrier, the
    first thread's fence releases them to every thread that acquires the counter.
    """
    TEXT: gl.constexpr = _text_of_raise(LEFT)
    lanes = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))  # [32]
    gl.inline_asm_elementwise(
        TEXT,
        "=r,l,r",
        [(counter + lanes * 0).to(gl.int64), gl.where(lanes == 0, 1, 0)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _await_stored(counter, turn):
    """Wait until the tile of step ``turn`` is stored: until the counter exceeds ``turn``."""
    lanes = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))  # [32]
    gl.inline_asm_elementwise(
        """
        {
            .reg .pred early;
            .reg .b32 count;
            POLL:
            ld.acquire.gpu.global.b32 count, [$1];
            setp.le.s32 early, count, $2;
            @early bra POLL;
            fence.proxy.async.global;
            bar.warp.sync -1;
            mov.b32 $0, 0;
        }
        """,
        "=r,l,r",
        [(counter + lanes * 0).to(gl.int64), lanes * 0 + turn],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def keep_shared(program, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Store the gradients of scores of the block, or add them to those of the first program.

    A tile is signalled as stored after the next store has begun, so that no step waits for it.
    """
    PARTS: gl.constexpr = TILE.BLOCK_N // ROWS
    order, desc, ds_s = program.order, program.maps.ds_desc, program.pipeline.ds_s
    begun = order.counters_ptr
    stored = order.counters_ptr + 1
    steps = count_turns(program.walk, OPTIONS)
    number = take_number(begun)
    for turn in range(steps):
        if number > 0:
            _await_stored(stored, turn)
        await_full(order.full, turn)
        for w in gl.static_range(PARTS):
            where = place_at(turn, w, program, OPTIONS, TILE)
            ds = ds_s.index(turn % 2 * PARTS + w)
            if number == 0:
                copy_out(desc, where, ds)
            else:
                add_out(desc, where, ds)
        if (number == 0) & (turn > 0):
            _say_stored(stored, PARTS)
        tma.store_wait(0)
        mbarrier.arrive(order.empty.index(turn % 2), count=1)
    if (number == 0) & (steps > 0):
        _say_stored(stored, 0)


@gluon.jit
def clear_hidden(W: gl.constexpr, program, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Store zeros where the mask hides whole tiles of ``W``'s keys, at the end of a program.

    Programs that share the bias divide these tiles. They end where the tiles of the walk begin. No
    store may begin before the first row, so ``BiasSum`` clears the rows that do not fill a tile.
    """
    if OPTIONS.CLEARS_DS:
        numbers, block, walk = program.numbers, program.block, program.walk
        steps = count_turns(walk, OPTIONS)
        together = numbers.sequences_together * numbers.heads_together
        own = block.sequence % numbers.sequences_together + block.head_k % numbers.heads_together
        rows = walk.begin * TILE.BLOCK_M + block.ahead_q
        tiles = rows // TILE.BLOCK_M * OPTIONS.GROUP
        # wait for the first buffer
        await_buffer(steps + steps % 2, program, OPTIONS)
        zeros_s = gradients_of(W, program, TILE)  # [ROWS, BLOCK_M]
        zeros_s.store(gl.zeros([ROWS, TILE.BLOCK_M], zeros_s.dtype, accumulator(TILE.BLOCK_M)))
        hopper.fence_async_shared()
        for index in range(own, tiles, together):
            head = block.head_k * OPTIONS.GROUP + index % OPTIONS.GROUP
            row = rows - (index // OPTIONS.GROUP + 1) * TILE.BLOCK_M
            where = place_in_planes(head, row, W, program, OPTIONS)
            copy_out(program.maps.ds_desc, where, program.pipeline.ds_s.index(W))
