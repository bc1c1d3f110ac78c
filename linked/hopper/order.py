"""Turns: whoever adds to the same memory does so in a fixed order, told by a counter in memory.

The counter says how many have added. Whoever comes ``n``-th waits until it has reached n, adds,
waits until the sums have arrived, and raises it by one. All functions are for a single warp.

A wait ends only if those ahead run or are done. So programs take their numbers as they begin
(``take_number``), and a program waits for lower numbers alone: the lowest that is not done waits
for nobody. No order in which a GPU starts programs, and no number of multiprocessors, is relied on.
"""

from .compat import gl, gluon


@gluon.jit
def take_number(counter):
    """Return how many programs have begun before this one; ``counter`` is 0 before the first."""
    return gl.atomic_add(counter, 1, sem="relaxed")


@gluon.jit
def await_turn(counter, turn):
    """Wait until a counter in memory has reached ``turn``.

    What was added before it was raised is there then, for TMA, too.
    """
    lanes = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))  # [32]
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
def end_turn(counter):
    """Raise a counter in memory once all that the warp added by TMA has arrived there."""
    lanes = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))  # [32]
    gl.inline_asm_elementwise(
        """
        {
            .reg .pred first;
            cp.async.bulk.wait_group 0;
            fence.proxy.async.global;
            bar.warp.sync -1;
            setp.eq.s32 first, $2, 0;
            @first red.release.gpu.global.add.u32 [$1], 1;
            mov.b32 $0, 0;
        }
        """,
        "=r,l,r",
        [(counter + lanes * 0).to(gl.int64), lanes],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
