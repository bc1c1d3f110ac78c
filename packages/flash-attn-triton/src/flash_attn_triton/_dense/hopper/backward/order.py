"""The bitwise repeatable backward on Hopper: parts of dq are added in the order of their keys.

A tile of queries receives the part of the first block of keys that it sees, then the part of the
second block, and so on. This order depends only on the call's mask and the sequence's lengths. One
warp for each half of dq waits for its place in the order and adds, while the warpgroups go on with
the next tile.

All programs walk the queries from the last to the first. Under a causal mask all blocks of keys see
the last tile, so a program that starts later arrives later, and after the first tile no program
waits. With a left window, blocks with later keys begin at later tiles, and reach each tile after
the blocks before them. Neighbouring programs belong to different heads (``span``), so that few
blocks of one head begin together.

A program walks all query heads of a group at once, tile by tile. If it walked them one after the
other, each head would begin again with the last tile, and the blocks that a causal mask makes
shorter would all wait there.
"""

from ...._linked.hopper.compat import gl, gluon, mbarrier, tma
from ...._linked.hopper.order import ask, await_turn, pass_turn
from ..panels import (
    add_panels,
    own_panels,
    panels_in_rows,
    rows_before,
    splits_by_panel,
    stage_panels,
)


@gluon.jit
def tile_at(step, first, end, OPTIONS: gl.constexpr):
    """Return the tile of queries of a step of the walk over ``[first, end)``; see ``head_at``."""
    if OPTIONS.ORDERED:
        tile = end - 1 - step // OPTIONS.GROUP
    else:
        tile = first + step
    return tile


@gluon.jit
def head_at(turn, head_k, steps, OPTIONS: gl.constexpr):
    """Return the query head of a program's step, and the number of the step in its walk.

    Each head has a walk of ``steps`` steps; with ordered additions all heads share one walk.
    """
    head = head_k * OPTIONS.GROUP
    step = turn
    if OPTIONS.GROUP > 1:
        if OPTIONS.ORDERED:
            head += turn % OPTIONS.GROUP
        else:
            head += turn // steps
            step = turn % steps
    return head, step


@gluon.jit
def turn_at(tile, first_key, diagonal, numbers, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Return how many blocks of keys add to a tile of queries before the block at ``first_key``."""
    first_block = 0
    if OPTIONS.HAS_LEFT:
        first_seen = gl.maximum(tile * TILE.BLOCK_M + diagonal - numbers.window_left, 0)
        first_block = first_seen // TILE.BLOCK_N
    return first_key // TILE.BLOCK_N - first_block


@gluon.jit
def _find_tile(step, W: gl.constexpr, program, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Return ``(place, counter, turn)`` of the half of dq that a warpgroup makes in a step.

    ``place`` is the tile's index in the sequence's sums, ``counter`` the address of the half's
    counter, and ``turn`` the value that the counter has to reach.
    """
    block, walk, numbers = program.block, program.walk, program.numbers
    head, step = head_at(step, block.head_k, walk.end - walk.begin, OPTIONS)
    tile = tile_at(step, walk.begin, walk.end, OPTIONS)
    place = head * numbers.tiles_q + tile
    turn = turn_at(tile, block.first_key, block.diagonal, numbers, OPTIONS, TILE)
    return place, program.order.counters_ptr + (2 * place + W), turn


@gluon.jit
def _await_first(W: gl.constexpr, program, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Wait until the first half of dq may be added, if there is one; return how many there are."""
    steps = (program.walk.end - program.walk.begin) * OPTIONS.GROUP
    if steps > 0:
        _place, counter, turn = _find_tile(0, W, program, OPTIONS, TILE)
        await_turn(counter, turn)
    return steps


@gluon.jit
def _find_next(step, steps, W: gl.constexpr, program, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Return counter and ``turn`` of the next step's half; for the last step, its own."""
    step = gl.minimum(step + 1, steps - 1)
    _place, counter, turn = _find_tile(step, W, program, OPTIONS, TILE)
    return counter, turn


@gluon.jit
def hand_over(values, step, program, W: gl.constexpr, TILE: gl.constexpr):
    """Give warpgroup ``W``'s half of dq to the warp that adds it; only the parity of step counts.

    The half is stored once the half before it has been read.
    """
    rows = panels_in_rows(values)
    mbarrier.wait(program.order.empty.index(W), (step & 1) ^ 1)
    NUMBER: gl.constexpr = 0 if splits_by_panel(TILE) else W
    stage_panels(rows, own_panels(program.dq_s, W, TILE), NUMBER)
    mbarrier.arrive(program.order.full.index(W), count=1)


@gluon.jit
def add_in_order(W: gl.constexpr, program, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Add warpgroup ``W``'s halves of dq to the sums in memory, in the order of keys."""
    # in rows of the maps
    ROWS_DQ: gl.constexpr = TILE.BLOCK_M * (TILE.HEAD_DIM + TILE.NARROW) // 32
    order = program.order
    buffers = own_panels(program.dq_s, W, TILE)
    sums = own_panels(program.maps.sums, W, TILE)
    NUMBER: gl.constexpr = 0 if splits_by_panel(TILE) else W
    steps = _await_first(W, program, OPTIONS, TILE)
    for step in range(steps):
        place, counter, _turn = _find_tile(step, W, program, OPTIONS, TILE)
        mbarrier.wait(order.full.index(W), step & 1)
        row = program.dq_at + (place * ROWS_DQ + rows_before(TILE, W))
        add_panels(sums, row, buffers, NUMBER)
        following, turn = _find_next(step, steps, W, program, OPTIONS, TILE)
        # read the next counter while the additions are in flight
        count = ask(following)
        tma.store_wait(0)
        mbarrier.arrive(order.empty.index(W), count=1)
        pass_turn(counter, count, following, turn)


@gluon.jit
def begin_turn(step, program, W: gl.constexpr, OPTIONS: gl.constexpr):
    """Wait until warpgroup ``W`` may add its half of dq of a step, above head dim 128."""
    if OPTIONS.ORDERED:
        mbarrier.wait(program.order.empty.index(W), step & 1)


@gluon.jit
def say_added(program, W: gl.constexpr, OPTIONS: gl.constexpr):
    """Signal: warpgroup ``W`` has added its half."""
    if OPTIONS.ORDERED:
        mbarrier.arrive(program.order.full.index(W), count=1)


@gluon.jit
def pass_turns(W: gl.constexpr, program, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Let warpgroup ``W`` add its halves of dq in the order of keys, above head dim 128.

    There its threads add: ``empty`` signals that they may add, ``full`` that they have added.
    """
    order = program.order
    steps = _await_first(W, program, OPTIONS, TILE)
    for step in range(steps):
        _place, counter, _turn = _find_tile(step, W, program, OPTIONS, TILE)
        mbarrier.arrive(order.empty.index(W), count=1)
        following, turn = _find_next(step, steps, W, program, OPTIONS, TILE)
        mbarrier.wait(order.full.index(W), step & 1)
        pass_turn(counter, ask(following), following, turn)
