"""Which rank holds which tokens of packed sequences, from their lengths alone.

The work of attention is the number of visible pairs of a query and a key. ``"balanced"`` cuts the
longest sequences over all ranks, which gives each the same share, and puts every other one whole on
the rank that has least: those cost no communication. It cuts no more of them than balance needs.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from .shards import Run, ranges

# the most that a rank may have to do, over the mean, before more sequences are cut
PAIRS_LIMIT = 1.02
TOKENS_LIMIT = 1.05


class Layout(NamedTuple):
    """The runs of each rank, sorted, none of them empty; and what each rank has to do."""

    runs: tuple[tuple[Run, ...], ...]
    pairs: tuple[int, ...]

    def tokens(self, rank: int) -> int:
        """Return how many tokens a rank holds."""
        return sum(run.end - run.begin for run in self.runs[rank])


def visible_pairs(begin: int, end: int, seqlen: int, left: int, right: int) -> int:
    """Count the keys that queries ``begin`` to ``end`` see; -1 is an unlimited window."""
    count = end - begin
    last = count * seqlen
    if 0 <= right < seqlen:
        # the sum of min(i + right, seqlen - 1) + 1
        bend = min(max(seqlen - 1 - right, begin), end)
        last = _sum(begin, bend) + (right + 1) * (bend - begin) + (end - bend) * seqlen
    first = 0
    if left >= 0:
        bend = min(max(left, begin), end)
        first = _sum(bend, end) - left * (end - bend)
    return last - first


def _sum(begin: int, end: int) -> int:
    return (begin + end - 1) * (end - begin) // 2


@lru_cache(maxsize=256)
def layout_of(
    lengths: tuple[int, ...], group_size: int, left: int, right: int, shard: str
) -> Layout:
    """Distribute sequences of these lengths; kept, so that lengths seen before cost a look-up."""
    work = [visible_pairs(0, n, n, left, right) for n in lengths]
    if shard != "balanced":
        return _distribute(lengths, group_size, left, right, work, range(len(lengths)), shard)
    order = sorted(range(len(lengths)), key=lambda b: (-work[b], b))
    mean = sum(work) / group_size
    tokens = sum(lengths) / group_size
    cut = sum(work[b] > PAIRS_LIMIT * mean for b in order) if group_size > 1 else 0
    best, least = None, float("inf")
    while True:
        found = _distribute(lengths, group_size, left, right, work, order[:cut], "zigzag")
        excess = max(found.pairs) / mean / PAIRS_LIMIT if mean else 0.0
        if tokens:
            most = max(map(found.tokens, range(group_size)))
            excess = max(excess, most / tokens / TOKENS_LIMIT)
        if excess < least:
            best, least = found, excess
        if excess <= 1.0 or cut == len(lengths) or group_size == 1:
            break
        cut = min(cut + max(1, cut // 4), len(lengths))
    return best or found


def _distribute(
    lengths: tuple[int, ...],
    group_size: int,
    left: int,
    right: int,
    work: list[int],
    cut: range | list[int],
    shard: str,
) -> Layout:
    """Cut some sequences over all ranks, and give each of the rest to the rank with least."""
    runs: list[list[Run]] = [[] for _ in range(group_size)]
    pairs, tokens = [0] * group_size, [0] * group_size
    for b in cut:
        for rank in range(group_size):
            for begin, end in ranges(lengths[b], group_size, rank, shard):
                if begin < end:
                    runs[rank].append(Run(b, begin, end))
                    pairs[rank] += visible_pairs(begin, end, lengths[b], left, right)
                    tokens[rank] += end - begin
    whole = set(range(len(lengths))).difference(cut)
    all_pairs, all_tokens = max(sum(work), 1), max(sum(lengths), 1)
    for b in sorted(whole, key=lambda b: (-work[b], b)):
        if not lengths[b]:
            continue
        # of pairs and tokens, what is nearer to its limit
        loads = [
            max((pairs[r] + work[b]) / all_pairs, (tokens[r] + lengths[b]) / all_tokens)
            for r in range(group_size)
        ]
        rank = loads.index(min(loads))
        runs[rank].append(Run(b, 0, lengths[b]))
        pairs[rank] += work[b]
        tokens[rank] += lengths[b]
    return Layout(tuple(tuple(sorted(own)) for own in runs), tuple(pairs))
