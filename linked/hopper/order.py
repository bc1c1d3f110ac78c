"""Turns: whoever adds to the same memory does so in a fixed order, told by a counter in memory.

The counter says how many have added. Whoever comes ``n``-th waits until it has reached n, adds,
waits until the sums have arrived, and raises it by one. All functions are for a single warp, which
adds here and there, and never twice with the same counter, or, where they take ``WARPS`` or are
told so, for several.

A wait ends only if those ahead run or are done. So programs take their numbers as they begin
(``take_number``), and a program waits for lower numbers alone: the lowest that is not done waits
for nobody. No order in which a GPU starts programs, and no number of multiprocessors, is relied on.
"""

from .compat import gl, gluon
from .pipeline import barrier_sync


@gluon.jit
def take_number(counter):
    """Return how many programs have begun before this one; ``counter`` is 0 before the first."""
    return gl.atomic_add(counter, 1, sem="relaxed")


@gluon.jit
def await_turn(counter, turn, WARPS: gl.constexpr = 1):
    """Wait until a counter in memory has reached ``turn``.

    What was added before it was raised is there then, for TMA, too.
    """
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
    """Begin to read a counter; return what it says, ``[32]``, for ``pass_turn``."""
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
    """Raise a counter once all that the warp added by TMA has arrived, then await the next turn.

    The warp's next additions want the counter ``following`` to have reached ``turn``. It is read
    again if it was not that far when it was asked for its ``count``. One fence releases these
    additions and acquires what comes before the next.
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
    """Raise a counter once threads that met at a barrier, among them these, have added.

    Behind the barrier, the first thread's fence releases what all of them added.
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
    """Raise a counter once so many warps, which meet at a named barrier, have added."""
    barrier_sync(number, 32 * WARPS, WARPS)
    raise_counter(counter, WARPS)


@gluon.jit
def let_next_launch_begin():
    """Say that the next launch may begin beside this one, as soon as all programs have said so.

    It does if it is launched for that (programmatic dependent launch), and has to wait for what it
    reads itself.
    """
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
