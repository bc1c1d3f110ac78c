"""Sums of dq that programs set to 0 for later ones, where each key head has lists of its own.

Before the first programs all sums would have to be cleared in a launch that memory bounds. Programs
have memory's time to spare while they wait for their first copies. So those of a *section*, one key
head of one sequence, clear the sums of a section that comes ``ahead`` sections later, each its
share, and only the first sections' are cleared before. A counter of each section says how many
warpgroups have cleared, and a program waits for that before it adds.

No wait is for ever: programs take their numbers as they begin (see ``backward_turns``), and those
of earlier sections, for which a program waits, have lower ones.
"""

from ._linked.compat import gl, gluon
from ._linked.order import await_turn, end_turn
from ._linked.pipeline import TURN

# numbers that a warpgroup sets to 0 at a time
UNIT = gl.constexpr(2048)


@gluon.jit
def _section_of(program, numbers):
    return program.sequence * numbers.heads_k + program.head_k


@gluon.jit
def _programs_of(section, tensors, numbers):
    """Return the first program of a section's list, and the first behind."""
    bounds_ptr = tensors.real_ptr + 1 + section % numbers.heads_k
    return gl.load(bounds_ptr), gl.load(bounds_ptr + 1)


@gluon.jit
def clear_ahead(W: gl.constexpr, program, tensors, numbers):
    """Set every so manieth unit of a later section's sums to 0, a warpgroup's share."""
    section = _section_of(program, numbers)
    target = section + numbers.ahead
    if target < numbers.sections:
        first, end = _programs_of(section, tensors, numbers)
        layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
        index = gl.arange(0, UNIT, layout)  # [UNIT]
        zeros = gl.zeros([UNIT], gl.float32, layout)  # [UNIT]
        for unit in range(2 * (program.index - first) + W, numbers.units, 2 * (end - first)):
            at = (target * numbers.units + unit).to(gl.int64) * UNIT
            gl.store(tensors.dq_ptr + at + index, zeros)


@gluon.jit
def say_cleared(W: gl.constexpr, program, tensors, numbers):
    """Say that a warpgroup has cleared its share."""
    target = _section_of(program, numbers) + numbers.ahead
    if target < numbers.sections:
        end_turn(tensors.counters_ptr + 1 + target, TURN + 1 + W, 4)


@gluon.jit
def await_cleared(program, tensors, numbers):
    """Wait until the sums of a program's section are 0."""
    section = _section_of(program, numbers)
    if section >= numbers.ahead:
        first, end = _programs_of(section - numbers.ahead, tensors, numbers)
        await_turn(tensors.counters_ptr + 1 + section, 2 * (end - first), 4)
