"""An order for what several programs add to dk and dv of one piece of keys, so that it repeats.

They add one after the other, in the order in which the layout's list has them. A counter for each
piece, in memory, says how many have added. A program looks up how many of its list come before it
and own the piece, too, and waits until the counter has reached that.

No wait is for ever. Programs do not work on the place in the list that the grid gives them: each
takes the next number as it begins (``take_number``), so that whatever has a lower number runs or is
done. Of one sequence and key head, programs are numbered as the list has them (``find_program``):
a program waits for lower numbers alone, but for its second warpgroup, which waits for the first if
both own a piece. And it waits at its end, where all that is left to do is to add: no other warp of
it is held up. So the first warpgroup of the lowest number that is not done waits for nobody, and
the second for nobody but it. That program gets done, and by induction all do, however many programs
the GPU runs at a time and in whatever order it starts them.

A program of the highest turn waits for one addition after the other, not for walks, as the programs
of a list are put side by side in the order of their lengths.
"""

from ...._linked.hopper.compat import gl, gluon
from ...._linked.hopper.gradients import ROWS
from ...._linked.hopper.order import await_turn, end_turn
from ...._linked.hopper.pipeline import TURN
from .lists import owned_by

# programs of a list that are looked at together
TOGETHER = gl.constexpr(128)


@gluon.jit
def first_tile_of_keys(program, tensors, numbers):
    """Return the first tile of 64 keys of a program's sequence and head, in sums of all."""
    if tensors.cu_seqlens_ptr is not None:
        first = program.head_k * numbers.tiles_k + program.start // ROWS + program.sequence + 1
    else:
        first = (program.sequence * numbers.heads_k + program.head_k) * numbers.tiles_k
    return first


@gluon.jit
def turn_of(piece, W: gl.constexpr, program, tensors, PIECE: gl.constexpr):
    """Return how many warpgroups ahead of one in its list own a piece of keys."""
    SIDE: gl.constexpr = ROWS // PIECE
    WIDTH: gl.constexpr = 1 + 2 * SIDE
    # each warp holds all of them, and they add up without shared memory
    lane = gl.arange(0, TOGETHER, gl.BlockedLayout([4], [32], [4], [0]))  # [TOGETHER]
    of_list = gl.load(tensors.owners_ptr + program.index * WIDTH)
    first = program.index
    turn = program.index * 0
    if W == 1:
        owned_ptr = owned_by(program, tensors, PIECE)
        for i in gl.static_range(SIDE):
            turn += gl.where(gl.load(owned_ptr + i) == piece, 1, 0)
    while first > 0:
        at = first - 1 - lane
        there = at >= 0
        owner_ptr = tensors.owners_ptr + at * WIDTH
        mine = there & (gl.load(owner_ptr, mask=there, other=-2) == of_list)
        for i in gl.static_range(1, WIDTH):
            owned = gl.load(owner_ptr + i, mask=mine, other=-1)
            turn += gl.sum(gl.where(owned == piece, 1, 0), 0)
        # lists lie one behind the other
        more = gl.sum(gl.where(mine, 1, 0), 0) == TOGETHER
        first = gl.where(more, first - TOGETHER, 0)
    return turn


@gluon.jit
def _piece_at(i, W: gl.constexpr, program, tensors, PIECE: gl.constexpr):
    """Return the ``i``-th piece of warpgroup ``W``, and whether the sequence has it."""
    piece = gl.load(owned_by(program, tensors, PIECE) + W * (ROWS // PIECE) + i)
    return piece, (piece >= 0) & (piece * PIECE < program.len_k)


@gluon.jit
def _counter_of(piece, program, tensors, numbers, PIECE: gl.constexpr):
    """Return the counter of a piece; the first one counts programs."""
    first = first_tile_of_keys(program, tensors, numbers).to(gl.int64) * (ROWS // PIECE)
    return tensors.counters_ptr + 1 + first + piece


@gluon.jit
def await_pieces(W: gl.constexpr, program, tensors, numbers, OPTIONS: gl.constexpr):
    """Wait until it is a warpgroup's turn to add to its pieces, if there is an order."""
    PIECE: gl.constexpr = OPTIONS.PIECE
    if not OPTIONS.MAKES_DQ:
        for i in gl.static_range(ROWS // PIECE):
            piece, is_there = _piece_at(i, W, program, tensors, PIECE)
            if is_there:
                turn = turn_of(piece, W, program, tensors, PIECE)
                await_turn(_counter_of(piece, program, tensors, numbers, PIECE), turn, 4)


@gluon.jit
def pass_pieces(W: gl.constexpr, program, tensors, numbers, OPTIONS: gl.constexpr):
    """Say that a warpgroup has added to its pieces."""
    PIECE: gl.constexpr = OPTIONS.PIECE
    if not OPTIONS.MAKES_DQ:
        for i in gl.static_range(ROWS // PIECE):
            piece, is_there = _piece_at(i, W, program, tensors, PIECE)
            if is_there:
                counter = _counter_of(piece, program, tensors, numbers, PIECE)
                end_turn(counter, TURN + 1 + W, 4)
