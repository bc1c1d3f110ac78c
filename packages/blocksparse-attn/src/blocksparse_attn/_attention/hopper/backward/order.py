"""The order in which programs add to dk and dv of one piece of keys, so that results repeat.

Programs add one after the other, in the order of the layout's list. A counter per piece, in memory,
holds how many have added. A program counts the owners of the piece before it in the list, and waits
until the counter has reached that number.

The waits cannot deadlock. A program does not take its number from the grid: it takes the next
number when it begins (``take_number``), so all programs with lower numbers are running or done.
Within a sequence and key head, programs are numbered as in the list (``find_program``), so a
program waits only for lower numbers; its second warpgroup also waits for its first if both own a
piece. It waits at its end, where only the addition is left, so it holds up no other warp. Hence the
first warpgroup of the lowest unfinished number waits for nothing, and the second only for the
first. That program finishes, and by induction all do, however many programs the GPU runs at a time
and in whatever order it starts them.

A program with many owners before it waits for their additions, not for their walks: programs that
are neighbours in a list have walks of similar length.
"""

from ...._linked.hopper.compat import gl, gluon
from ...._linked.hopper.gradients import ROWS
from ...._linked.hopper.order import await_turn, end_turn
from ...._linked.hopper.pipeline import TURN
from .lists import owned_by

# programs of a list that one step of the count reads
TOGETHER = gl.constexpr(128)


@gluon.jit
def first_tile_of_keys(program, tensors, numbers):
    """Return the index of the first tile of 64 keys of a program's sequence and head."""
    if tensors.cu_seqlens_ptr is not None:
        first = program.head_k * numbers.tiles_k + program.start // ROWS + program.sequence + 1
    else:
        first = (program.sequence * numbers.heads_k + program.head_k) * numbers.tiles_k
    return first


@gluon.jit
def turn_of(piece, W: gl.constexpr, program, tensors, PIECE: gl.constexpr):
    """Return how many warpgroups before this one in its list own a piece of keys."""
    SIDE: gl.constexpr = ROWS // PIECE
    WIDTH: gl.constexpr = 1 + 2 * SIDE
    # each warp holds all values, so the sums need no shared memory
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
        # lists are stored one after the other
        more = gl.sum(gl.where(mine, 1, 0), 0) == TOGETHER
        first = gl.where(more, first - TOGETHER, 0)
    return turn


@gluon.jit
def _piece_at(i, W: gl.constexpr, program, tensors, PIECE: gl.constexpr):
    """Return the ``i``-th piece of warpgroup ``W``, and whether it lies in the sequence."""
    piece = gl.load(owned_by(program, tensors, PIECE) + W * (ROWS // PIECE) + i)
    return piece, (piece >= 0) & (piece * PIECE < program.len_k)


@gluon.jit
def _counter_of(piece, program, tensors, numbers, PIECE: gl.constexpr):
    """Return the pointer to a piece's counter; counter 0 is for ``take_number``."""
    first = first_tile_of_keys(program, tensors, numbers).to(gl.int64) * (ROWS // PIECE)
    return tensors.counters_ptr + 1 + first + piece


@gluon.jit
def await_pieces(W: gl.constexpr, program, tensors, numbers, OPTIONS: gl.constexpr):
    """Wait until a warpgroup may add to its pieces; without ``MAKES_DQ`` only."""
    if not OPTIONS.MAKES_DQ:
        for i in gl.static_range(ROWS // OPTIONS.PIECE):
            piece, is_there = _piece_at(i, W, program, tensors, OPTIONS.PIECE)
            if is_there:
                turn = turn_of(piece, W, program, tensors, OPTIONS.PIECE)
                await_turn(_counter_of(piece, program, tensors, numbers, OPTIONS.PIECE), turn, 4)


@gluon.jit
def pass_pieces(W: gl.constexpr, program, tensors, numbers, OPTIONS: gl.constexpr):
    """Signal that a warpgroup has added to its pieces."""
    if not OPTIONS.MAKES_DQ:
        for i in gl.static_range(ROWS // OPTIONS.PIECE):
            piece, is_there = _piece_at(i, W, program, tensors, OPTIONS.PIECE)
            if is_there:
                counter = _counter_of(piece, program, tensors, numbers, OPTIONS.PIECE)
                end_turn(counter, TURN + 1 + W, 4)
