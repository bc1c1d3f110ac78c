"""What it costs that parts of dq are added in a fixed order: a model of the Hopper backward.

No GPU is needed. A multiprocessor runs one program at a time, and programs begin in the order of
their numbers. A step, one tile of queries, takes one unit of time. A program adds a tile's part of
dq after the step, once the block of keys before it has added its own and the latency has passed;
meanwhile it computes one step more. Printed are the speeds of the ordered kernel over those of the
unordered one, which begins its programs in another order.

    python benchmarks/order_model.py --latency 0.5 --noise 0.1
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

BLOCK_N = 128  # keys of a program
L2_BYTES = 32 * 2**20
STARTUP = 1.2  # steps until the first one is done, and after the last one
FINISH = 0.8
LAG = 0.6  # of the product of dq behind its step
READ = 0.2  # until memory is free from which dq is added


class Call(NamedTuple):
    """Lengths of the sequences of a call, and its heads and mask."""

    lengths: tuple[int, ...]
    heads_k: int
    head_dim: int
    is_causal: bool
    group: int = 1
    window_left: int | None = None

    @property
    def block_m(self) -> int:
        return 128 if self.head_dim <= 64 else 64

    def walk(self, length: int, block: int) -> range:
        """Return the tiles of queries that see a block of keys."""
        first, last = block * BLOCK_N, min((block + 1) * BLOCK_N, length) - 1
        begin, end = 0, -(-length // self.block_m)
        if self.is_causal:
            begin = first // self.block_m
        if self.window_left is not None:
            end = min(end, (last + self.window_left) // self.block_m + 1)
        return range(begin, end)

    def span(self) -> int:
        """Return how many heads fit into the cache, as ``span_sums``."""
        head = max(self.lengths) * self.group * 12 * self.head_dim
        return 1 << max(1, (L2_BYTES // head).bit_length() - 1)


def programs(call: Call, span: int) -> Iterator[tuple[int, int, int]]:
    """Yield ``(head of all, length, block)`` in the order in which programs begin.

    Of sequences of one length, ``span`` heads are walked together; packed ones come one by one.
    """
    if len(set(call.lengths)) > 1:
        for i, length in enumerate(call.lengths):
            for block in range(-(-length // BLOCK_N)):
                for head in range(call.heads_k):
                    yield i * call.heads_k + head, length, block
        return
    length, heads = call.lengths[0], len(call.lengths) * call.heads_k
    for first in range(0, heads, span):
        for block in range(-(-length // BLOCK_N)):
            for head in range(first, min(first + span, heads)):
                yield head, length, block


def simulate(
    call: Call,
    span: int,
    *,
    is_ordered: bool,
    latency: float = 0.5,
    noise: float = 0.0,
    processors: int = 132,
) -> float:
    """Return the time of a launch, in steps. Programs wait for earlier ones alone."""
    rng = random.Random(0)
    free = [0.0] * processors
    added: dict[tuple[int, int, int], float] = defaultdict(lambda: float("-inf"))
    for head, length, block in programs(call, span):
        now = heapq.heappop(free) + STARTUP
        done = float("-inf")  # the last addition
        # tile by tile, for all query heads of the group
        for tile in reversed(call.walk(length, block)):
            for member in range(call.group):
                now += 1 + (rng.expovariate(1 / noise) - noise if noise else 0.0)
                # the memory must be free again by the time that the product is there
                now = max(now, done + READ - LAG)
                done = now + LAG
                if is_ordered:
                    key = head, member, tile
                    done = added[key] = max(done, added[key] + latency)
        heapq.heappush(free, max(now, done) + FINISH)
    return max(free)


def efficiency(call: Call, span: int, latency: float, noise: float) -> float:
    """Return the speed of the ordered kernel, over that of the unordered one."""
    is_mixed = len(set(call.lengths)) > 1
    unordered = call.span() if call.is_causal or is_mixed else 1
    fast = simulate(call, unordered, is_ordered=False, noise=noise)
    span = max(span, call.span())
    return fast / simulate(call, span, is_ordered=True, latency=latency, noise=noise)


def cases() -> Iterator[tuple[str, Call]]:
    """Yield the calls of the table."""
    for head_dim in (64, 128):
        for is_causal in (False, True):
            for length in (1024, 4096, 8192, 16384):
                mask = "causal" if is_causal else "full"
                lengths = (length,) * (16384 // length)
                call = Call(lengths, 2048 // head_dim, head_dim, is_causal)
                yield f"d {head_dim}, {mask}, {len(lengths)} x {length}", call
    mixed = (8192, 4096, 2048, 1024, 512, 512)
    yield "d 128, causal, 32:8 heads, packed 8192 to 512", Call(mixed, 8, 128, True, 4)
    yield "d 128, causal, window 1024, 2 x 8192", Call((8192,) * 2, 16, 128, True, 1, 1024)
    for heads in (1, 2, 4, 8):
        for is_causal in (False, True):
            mask = "causal" if is_causal else "full"
            yield f"d 128, {mask}, {heads} heads, 1 x 8192", Call((8192,), heads, 128, is_causal)
    yield "d 128, causal, 8 heads, 1 x 1024", Call((1024,), 8, 128, True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--latency", type=float, default=0.5, help="of a turn, in steps")
    parser.add_argument("--noise", type=float, default=0.0, help="of a step, in steps")
    parser.add_argument("--spans", type=int, nargs="+", default=[4, 8, 16, 32])
    given = parser.parse_args()
    print("| call |", " | ".join(f"span {n}" for n in given.spans), "|")
    print("|---" * (1 + len(given.spans)) + "|")
    for name, call in cases():
        found = [efficiency(call, span, given.latency, given.noise) for span in given.spans]
        print(f"| {name} |", " | ".join(f"{x:.2f}" for x in found), "|", flush=True)


if __name__ == "__main__":
    main()
