"""Few key heads: the query heads of a group are shared out among several programs.

A program that walks all query heads of a group leaves processors idle if there are fewer blocks of
keys than processors, or so few that the longest walk decides. So ``SHARES`` programs own the same
block, each with its share of the query heads. Every one adds its part of dk and dv in fp32 to sums
in memory, in the order of the accumulators' registers, and ``round_kernel`` writes the gradients.
With ordered additions each part has a place of its own, and that kernel adds them up.
"""

from ....._linked.hopper.compat import gl, gluon
from ....._linked.hopper.gradients import ROWS
from ...panels import add_by_threads, write_panels
from ..blocks import count_turns, gradient_coordinates


@gluon.jit
def hand_in(
    gradient,
    descs,
    sums_ptr,
    buffers,
    number,
    program,
    OPTIONS: gl.constexpr,
    TILE: gl.constexpr,
):
    """Write 64 rows of dk or dv, or if programs share the block add them to the sums.

    ``number`` counts the block's rows in steps of 64; the gradient is written through ``buffers``.
    """
    if OPTIONS.SHARES > 1:
        # a slot without a block has no place
        if count_turns(program.walk, OPTIONS) > 0:
            NARROW: gl.constexpr = gradient[1].shape[1] if len(gradient) > 1 else 0
            SIZE: gl.constexpr = ROWS * (gradient[0].shape[1] + NARROW)
            place = program.block.sums_at * (TILE.BLOCK_N // ROWS) + number
            add_by_threads(gradient, sums_ptr + place * SIZE)
    else:
        where = gradient_coordinates(program.block.first_key + number * ROWS, program, OPTIONS)
        write_panels(gradient, descs, where, buffers, number)
