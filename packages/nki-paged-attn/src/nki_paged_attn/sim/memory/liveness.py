"""Room on the chip by live ranges: a tile needs room from its first use to its last.

A kernel may keep references to tiles longer than it uses them, as AWS's tutorials do; AWS's
compiler then gives the room to other tiles.
"""

from __future__ import annotations

from collections import defaultdict, deque

from ..trace import Tile, Trace


def place(trace: Trace, rooms: dict[str, int]) -> bool:
    """Give tiles room by live ranges; set the trace's reuses and peaks.

    Args:
        rooms: bytes a partition of SBUF, and banks of PSUM.

    Returns:
        whether everything fits.
    """
    first, last = _ranges(trace)
    begins, ends = defaultdict(list), defaultdict(list)
    live: dict[tuple[int, str], int] = defaultdict(int)
    for storage, tile in trace.tiles.items():
        if storage in first:
            begins[first[storage]].append(storage)
            ends[last[storage]].append(storage)
        else:
            # no instruction uses it, so nothing ends its range
            live[tile.program, tile.region] += tile.need
    freed: dict[tuple[int, str], deque[int]] = defaultdict(deque)
    pooled: dict[tuple[int, str], int] = defaultdict(int)
    peaks = dict.fromkeys(rooms, 0)
    trace.reuses.clear()
    for number in range(len(trace.instructions)):
        for storage in begins[number]:
            tile = trace.tiles[storage]
            where, room = (tile.program, tile.region), rooms[tile.region]
            if live[where] + tile.need > room:
                return False
            taken = []
            # fresh room first, then what was freed longest ago
            while live[where] + pooled[where] + tile.need > room:
                old = freed[where].popleft()
                pooled[where] -= trace.tiles[old].need
                taken.append(old)
            if taken:
                trace.reuses[storage] = tuple(taken)
            live[where] += tile.need
            peaks[tile.region] = max(peaks[tile.region], live[where])
        for storage in ends[number]:
            tile = trace.tiles[storage]
            where = tile.program, tile.region
            live[where] -= tile.need
            freed[where].append(storage)
            pooled[where] += tile.need
    trace.sbuf_peak, trace.psum_peak = peaks["sbuf"], peaks["psum"]
    return all(live[p, r] <= rooms[r] for p, r in live)


def _ranges(trace: Trace) -> tuple[dict[int, int], dict[int, int]]:
    """Return the numbers of the first and the last instruction that use each tile."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    tiles: dict[int, Tile] = trace.tiles
    for number, i in enumerate(trace.instructions):
        for storage, *_ in (*i.reads, *i.writes):
            if storage in tiles:
                first.setdefault(storage, number)
                last[storage] = number
    return first, last
