"""Which rank holds which tokens of packed sequences, from their lengths alone.

The work of attention is the number of visible pairs of a query and a key. ``"balanced"`` assigns
sequences from the longest to the shortest, each to the least loaded ranks and to as few as balance
allows: mostly one rank, without communication, and several for a sequence that is too much for one.
If the result exceeds the limits, the longest sequences are cut over all ranks.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from .shards import Run, merged, ranges

# the largest load of a rank relative to the mean before more sequences are cut
PAIRS_LIMIT = 1.02
TOKENS_LIMIT = 1.05


class Layout(NamedTuple):
    """The sorted, non-empty runs of each rank, and its number of visible pairs."""

    runs: tuple[tuple[Run, ...], ...]
    pairs: tuple[int, ...]

    def tokens(self, rank: int) -> int:
        """Return how many tokens a rank holds."""
        return sum(run.end - run.begin for run in self.runs[rank])


def visible_pairs(begin: int, end: int, seqlen: int, left: int, right: int) -> int:
    """Count the visible pairs of queries ``begin`` to ``end``; -1 is an unlimited window."""
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
    """Distribute sequences of these lengths; cached by lengths."""
    work = [visible_pairs(0, n, n, left, right) for n in lengths]
    if shard != "balanced":
        return _distribute(lengths, group_size, left, right, work, range(len(lengths)), shard)
    found = _spread(lengths, group_size, left, right, work)
    least = _excess(found, work, lengths)
    if least <= 1.0:
        return found
    order = sorted(range(len(lengths)), key=lambda b: (-work[b], b))
    mean = sum(work) / group_size
    cut = sum(work[b] > PAIRS_LIMIT * mean for b in order) if group_size > 1 else 0
    best = found
    while True:
        found = _distribute(lengths, group_size, left, right, work, order[:cut], "zigzag")
        excess = _excess(found, work, lengths)
        if excess < least:
            best, least = found, excess
        if excess <= 1.0 or cut == len(lengths) or group_size == 1:
            return best
        cut = min(cut + max(1, cut // 4), len(lengths))


def _excess(found: Layout, work: list[int], lengths: tuple[int, ...]) -> float:
    """Return the largest load of a rank relative to the limits."""
    ranks = len(found.runs)
    pairs = ranks * max(found.pairs) / max(sum(work), 1) / PAIRS_LIMIT
    tokens = ranks * max(map(found.tokens, range(ranks))) / max(sum(lengths), 1) / TOKENS_LIMIT
    return max(pairs, tokens)


def _spread(
    lengths: tuple[int, ...], group_size: int, left: int, right: int, work: list[int]
) -> Layout:
    """Give each sequence to as few of the least loaded ranks as the limits allow."""
    runs: list[list[Run]] = [[] for _ in range(group_size)]
    pairs, tokens = [0] * group_size, [0] * group_size
    most_pairs = PAIRS_LIMIT * sum(work) / group_size
    most_tokens = TOKENS_LIMIT * sum(lengths) / group_size

    def load(rank: int, more_pairs: int, more_tokens: int) -> float:
        """Return pairs or tokens relative to their limit, whichever is larger."""
        of_pairs = (pairs[rank] + more_pairs) / max(most_pairs, 1)
        return max(of_pairs, (tokens[rank] + more_tokens) / max(most_tokens, 1))

    for b in sorted(range(len(lengths)), key=lambda b: (-work[b], b)):
        if not lengths[b]:
            continue
        order = sorted(range(group_size), key=lambda rank: (load(rank, 0, 0), rank))
        best: tuple[float, list[tuple[int, list[Run], int, int]]] = (float("inf"), [])
        for several in range(1, group_size + 1):
            shares = []
            for part, rank in enumerate(order[:several]):
                # on one rank, adjacent parts are one run
                own = merged(Run(b, *ends) for ends in ranges(lengths[b], several, part, "zigzag"))
                own = [run for run in own if run.begin < run.end]
                more = sum(visible_pairs(*run[1:], lengths[b], left, right) for run in own)
                shares.append((rank, own, more, sum(run.end - run.begin for run in own)))
            highest = max(load(rank, more, count) for rank, _, more, count in shares)
            if highest < best[0]:
                best = highest, shares
            if highest <= 1.0:
                break
        for rank, own, more, count in best[1]:
            runs[rank] += own
            pairs[rank] += more
            tokens[rank] += count
    return Layout(tuple(tuple(sorted(own)) for own in runs), tuple(pairs))


def _distribute(
    lengths: tuple[int, ...],
    group_size: int,
    left: int,
    right: int,
    work: list[int],
    cut: range | list[int],
    shard: str,
) -> Layout:
    """Cut some sequences over all ranks, and give each other one to the least loaded rank."""
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
        # the larger share of pairs or tokens
        loads = [
            max((pairs[r] + work[b]) / all_pairs, (tokens[r] + lengths[b]) / all_tokens)
            for r in range(group_size)
        ]
        rank = loads.index(min(loads))
        runs[rank].append(Run(b, 0, lengths[b]))
        pairs[rank] += work[b]
        tokens[rank] += lengths[b]
    return Layout(tuple(tuple(sorted(own)) for own in runs), tuple(pairs))
