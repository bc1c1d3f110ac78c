"""How the work of the Hopper backward is cut into programs, so that few key heads fill a GPU.

All times are in steps: a step is one tile of queries and one block of keys, 2.1 us on an H200 at
head dim 128. ``benchmarks/NOTES.md`` has the measurements behind the constants.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from attn_common import cdiv

from ...hopper_tiles import HopperBackwardTile
from ...portable.form import L2_BYTES, Form

# what a program costs beside its steps; and what it costs to add dk and dv of a block to memory
BEGIN, ADD = 1, 2
# bytes that are moved in a step's time
STEP_BYTES = 7.4e6
# bytes moved for each fp32 sum of dk or dv: it is cleared, read, and written in half precision
SUM_BYTES = 10
# programs of unequal length drift apart from head to head, and share less in the L2 cache: what
# each doubling of the bytes that they walk costs, from so many bytes on
DRIFT, DRIFT_BYTES = 0.06, 2 * L2_BYTES
# a finer cut is taken if it costs at most so much
TIE = 1.02
# packed calls, whose lengths the host does not know, have two cuts beside none: the finest, and one
# for so many programs a block of keys, which trees always have. With ordered additions heads alone
# decide, for so many
PACKED_SHARES, ORDERED_SHARES = 8, 4


class Grid(NamedTuple):
    """The blocks of keys of a launch, and the tiles of queries that walk over them."""

    planes: int  # sequences times key heads
    group: int  # query heads of a key head
    blocks: int  # of keys of a sequence
    longest: int  # tiles of queries that see a block: most, and in the mean
    mean: float
    side_by_side: int  # planes whose blocks begin together, the longest first
    is_packed: bool  # sequences are of other lengths than the mean
    head_bytes: int  # of a query head, read and written
    sums: int  # numbers of dk and dv


def divisors(group: int) -> list[int]:
    """Return the numbers of programs among which a group's heads can be shared out."""
    return [shares for shares in range(1, group + 1) if group % shares == 0]


def least_shares(form: Form, programs: int) -> int:
    """Return the fewest shares for which a block of keys of all heads has so many programs."""
    fitting = (shares for shares in divisors(form.group) if form.heads_k * shares >= programs)
    return next(fitting, form.group)


def possible_shares(form: Form, ordered: bool) -> list[int]:
    """Return the shares that calls with a signature may have: each is a compilation."""
    if ordered:
        return [least_shares(form, ORDERED_SHARES)]
    if form.is_packed:
        return sorted({1, least_shares(form, PACKED_SHARES), form.group})
    return divisors(form.group)


def choose_shares(
    choices: list[int],
    form: Form,
    tile: HopperBackwardTile,
    sequences: int,
    tokens: tuple[int, int],
    window: tuple[int, int],
    processors: int,
) -> int:
    """Return how many programs share the query heads of a key head.

    ``tokens`` are the queries and keys of each sequence; a window of -1 has no bound.
    """
    if len(choices) == 1:
        return choices[0]
    planes = sequences * form.heads_k
    longest, mean = seen_tiles(tokens, window, tile)
    grid = Grid(
        planes=planes,
        group=form.group,
        blocks=cdiv(tokens[1], tile.block_n),
        longest=longest,
        mean=mean,
        side_by_side=form.heads_k if form.is_packed else planes,
        is_packed=form.is_packed,
        head_bytes=form.walked_bytes(tokens[0]),
        sums=planes * tokens[1] * (form.head_dim + form.head_dim_v),
    )
    times = {shares: predict(grid, processors, shares) for shares in choices}
    least = min(times.values())
    return max(shares for shares, time in times.items() if time <= least * TIE)


def predict(grid: Grid, processors: int, shares: int) -> float:
    """Return the steps that a launch takes.

    Programs of equal length run in rounds. Others begin with the longest: processors share the sum,
    but the longest program bounds it, and planes that do not fill the processors leave some idle
    while their last programs run. Of packed sequences without a mask any program may be the last.
    """
    walked = grid.group // shares
    extra, more = (BEGIN, 0.0) if shares == 1 else (BEGIN + ADD, grid.sums * SUM_BYTES / STEP_BYTES)
    longest, mean = walked * grid.longest + extra, walked * grid.mean + extra
    programs = grid.planes * shares * grid.blocks
    is_equal = grid.longest == grid.mean
    if is_equal and not grid.is_packed:
        return cdiv(programs, processors) * longest + more
    together = min(grid.planes, grid.side_by_side) * shares * grid.blocks
    idle = max(0.5 if is_equal else 0.0, 1 - together / processors) * longest
    walked_bytes = filling_planes(grid.blocks, processors) * walked * grid.head_bytes
    drift = 1 + DRIFT * math.log2(max(1, walked_bytes / DRIFT_BYTES))
    return drift * max(longest, programs * mean / processors + idle) + more


def filling_planes(blocks: int, processors: int) -> int:
    """Return how many planes fill the processors with their blocks: a power of two, rounded down.

    If fewer began together, processors would be idle at the end, while the last planes' longest
    programs run.
    """
    return 1 << max(0, int(math.log2(max(1, processors / max(1, blocks)))))


def seen_tiles(
    tokens: tuple[int, int], window: tuple[int, int], tile: HopperBackwardTile
) -> tuple[int, float]:
    """Return how many tiles of queries see a block of keys: at most, and in the mean."""
    tokens_q, tokens_k = tokens
    left, right = window
    if right >= 0:
        # queries before the first that sees a key are cut
        tokens_q = min(tokens_q, tokens_k + right)
    tiles = cdiv(tokens_q, tile.block_m)
    if (left < 0 and right < 0) or tokens_q == 0 or tokens_k == 0:
        return tiles, tiles
    if left >= 0 and right >= 0:
        width = min(tiles, cdiv(left + right + tile.block_n, tile.block_m))
        return width, width * min(1.0, (tokens_q + left) / tokens_k)
    # one corner of the scores is hidden
    side = min(tokens_q, tokens_k)
    return tiles, tiles * (1 - side * side / (2 * tokens_q * tokens_k))
