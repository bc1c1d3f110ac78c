"""Additions to the same memory in a fixed order, kept by a counter in memory.

The counter holds the number of programs that have added. Program ``n`` waits until the counter is
n, adds, waits until its sums have arrived, and raises the counter by one. A function is called by
one warp, which adds to several places but once per counter; functions with ``WARPS`` are called by
that many warps.

A wait ends only if the awaited programs run or are done. So a program takes its number as it begins
(``take_number``) and waits for lower numbers only: the lowest unfinished program waits for none.
This needs no particular start order of programs and no minimum of multiprocessors.
"""

from .compat import gl, gluon
from .pipeline import barrier_sync


@gluon.jit
def take_number(counter):
    """Return how many programs have begun before this one; ``counter`` is 0 before the first."""
    return gl.atomic_add(counter, 1, sem="relaxed")


@gluon.jit
def await_turn(counter, turn, WARPS: gl.constexpr = 1):
    """Wait until a counter reaches ``turn``; earlier additions are then visible, also to TMA."""
    LANES: gl.constexpr = 32 * WARPS
    lanes = gl.arange(0, LANES, gl.BlockedLayout([1], [32], [WARPS], [0]))  # [LANES]
    gl.inline_asm_elementwise(
        """
        {
            .reg .pred early;
            .reg .b32 count;
            POLL:
            ld.acquire.gpu.global.b32 count, [$1];
            setp.lt.s32 early, count, $2;
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
def ask(counter):
    """Begin to read a counter; return its value, ``[32]``, for ``pass_turn``."""
    lanes = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))  # [32]
    return gl.inline_asm_elementwise(
        "ld.relaxed.gpu.global.b32 $0, [$1];",
        "=r,l",
        [(counter + lanes * 0).to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def pass_turn(counter, count, following, turn):
    """Raise a counter once the warp's TMA additions have arrived, then await the next turn.

    The warp's next additions must wait until the counter ``following`` has reached ``turn``;
    ``count`` is its value as read by ``ask``, and it is read again if that is lower. One fence
    releases these additions and acquires those that precede the next ones.
    """
    lanes = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))  # [32]
    gl.inline_asm_elementwise(
        """
        {
            .reg .pred first, early;
            .reg .b32 now;
            cp.async.bulk.wait_group 0;
            fence.proxy.async.global;
            fence.acq_rel.gpu;
            bar.warp.sync -1;
            setp.eq.s32 first, $5, 0;
            @first red.relaxed.gpu.global.add.u32 [$1], 1;
            mov.b32 now, $2;
            POLL:
            setp.lt.s32 early, now, $4;
            @early ld.acquire.gpu.global.b32 now, [$3];
            @early bra POLL;
            fence.proxy.async.global;
            bar.warp.sync -1;
            mov.b32 $0, 0;
        }
        """,
        "=r,l,r,l,r,r",
        [
            (counter + lanes * 0).to(gl.int64),
            count,
            (following + lanes * 0).to(gl.int64),
            lanes * 0 + turn,
            lanes,
        ],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def raise_counter(counter, WARPS: gl.constexpr):
    """Raise a counter after a barrier at which all adding threads, these among them, have met.

    After that barrier, the first thread's fence releases the additions of all of them.
    """
    lanes = gl.arange(0, 32 * WARPS, gl.BlockedLayout([1], [32], [WARPS], [0]))  # [32 * WARPS]
    gl.inline_asm_elementwise(
        """
        {
            .reg .pred first;
            setp.ne.s32 first, $2, 0;
            @first fence.acq_rel.gpu;
            @first red.relaxed.gpu.global.add.u32 [$1], $2;
            mov.b32 $0, 0;
        }
        """,
        "=r,l,r",
        [(counter + lanes * 0).to(gl.int64), gl.where(lanes == 0, 1, 0)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def end_turn(counter, number, WARPS: gl.constexpr):
    """Meet ``WARPS`` warps at a named barrier after their additions, then raise the counter."""
    barrier_sync(number, 32 * WARPS, WARPS)
    raise_counter(counter, WARPS)


@gluon.jit
def let_next_launch_begin():
    """Allow the next launch to overlap with this one once all programs have called this.

    It overlaps only if launched with programmatic dependent launch, and must itself wait for the
    data that it reads.
    """
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
