"""Predict context parallelism: count work and bytes of the real tables, divide by measured rates.

    python benchmarks/parallel_model.py

Prints the tables of ``docs/context-parallelism.md``. Counts are exact: they are those of the tables
by which ranks compute and send. Rates are constants below.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from flash_attn_triton._linked.parallel.cut import Layout
from flash_attn_triton._linked.parallel.layout import visible_pairs
from flash_attn_triton._parallel.shards import Product, Table
from flash_attn_triton.distributed import ShardPlan

HEADS_Q, HEADS_K, HEAD_DIM, ITEM = 32, 8, 128, 2
# of one H200: products of either pass, copies, NVLink one way, a rank's share of 8 x 400 Gb/s
FORWARD, BACKWARD = 650e12, 530e12
COPY, NVLINK, NETWORK = 4.27e12, 300e9, 45e9
# from one kernel to the next, a message on its way, and what waits for one to begin
LAUNCH, LATENCY, HEAD_START = 6e-6, 25e-6, 16e-6
CAUSAL = (-1, 0)
MIX = (8192, 4096, 2048, 1024, 512, 512)


class Counts(NamedTuple):
    """What one rank does: pairs by product, rows that arrive or are sent, rows that are merged."""

    local: list[int]
    steps: list[list[int]]
    arriving: list[int]
    sent: list[int]
    merged: int
    tokens: int


def pairs_of(product: Product) -> int:
    """Count the visible pairs of a product."""
    left, right = product.window
    lengths = product._lengths
    return sum(visible_pairs(k - q, k, k, left, right) if q and k else 0 for q, k in lengths)


def counts_of(lengths: tuple[int, ...], ranks: int, rank: int, rule: str) -> Counts:
    """Count one rank's work under a causal mask."""
    table = Table(Layout(lengths, ranks, CAUSAL, rule, rank))
    products = [*table.local, *(one for step in table.steps for one in step.products)]
    rows = sum(one.rows[1] - one.rows[0] for one in products)
    return Counts(
        [pairs_of(one) for one in table.local],
        [[pairs_of(one) for one in step.products] for step in table.steps],
        [step.receives for step in table.steps],
        [step.sends.count for step in table.steps],
        rows + table.tokens if len(products) > 1 else 0,
        table.tokens,
    )


def seconds(counts: Counts, link: float, backward: bool) -> float:
    """Predict a pass of one rank."""
    rate, factor = (BACKWARD, 2.5) if backward else (FORWARD, 1.0)
    flops = 4 * HEAD_DIM * HEADS_Q * factor
    row_q, row_k = HEADS_Q * HEAD_DIM * ITEM, 2 * HEADS_K * HEAD_DIM * ITEM
    # keys that a step needs travel while the products before it run
    time = sum(counts.local) * flops / rate + LAUNCH
    ready = 0.0
    for products, rows, sent in zip(counts.steps, counts.arriving, counts.sent, strict=True):
        ready += LATENCY + rows * row_k / link
        time = max(time, ready) + sum(products) * flops / rate + LAUNCH
        time += 2 * sent * row_k / COPY
        if backward:  # the message of gradients, delta, the sums of dq in fp32 and their rounding
            time += 2 * rows * row_k / COPY
            time += counts.merged / (1 + len(counts.steps)) * 5 * row_q / COPY
    # a forward merges where it writes, beside products
    merge, last = counts.merged * row_q / COPY if backward else 0.0, 0.0
    moved = max(counts.arriving[-1], counts.sent[-1]) if counts.arriving else 0
    if backward and moved:  # dq is merged while the last gradients are on their way back
        merge += HEAD_START
        last = LATENCY + moved * row_k / link
    time += max(merge, last)
    if backward and any(counts.sent):
        time += (2 * counts.tokens + sum(counts.sent)) * row_k / COPY
    return time


def share(lengths: tuple[int, ...], ranks: int, rule: str, link: float, backward: bool) -> float:
    """Return the share of one GPU's speed: all tokens, 1 / ranks of the heads."""
    rate, factor = (BACKWARD, 2.5) if backward else (FORWARD, 1.0)
    pairs = sum(visible_pairs(0, n, n, *CAUSAL) for n in lengths)
    alone = pairs * 4 * HEAD_DIM * HEADS_Q * factor / ranks / rate + LAUNCH
    slowest = max(
        seconds(counts_of(lengths, ranks, rank, rule), link, backward) for rank in range(ranks)
    )
    return alone / slowest


def lengths_of(kind: str, count: int = 400) -> list[int]:
    """Return one of three distributions of lengths."""
    drawn = random.Random(kind)
    if kind == "log-normal":
        return [max(1, int(drawn.lognormvariate(6.5, 1.2))) for _ in range(count)]
    short = [drawn.randint(1, 300) for _ in range(count)]
    return short if kind == "all short" else [200_000, *short]


def main() -> None:
    print("| GPUs | tokens a GPU | link | dense forward | backward | packed forward | backward |")
    print("|---|---|---|---:|---:|---:|---:|")
    for name, link, several in (("NVLink", NVLINK, (2, 4)), ("8 x 400 Gb/s", NETWORK, (8, 16))):
        for ranks in several:
            for tokens in (8192, 32768):
                whole = ranks * tokens
                mix = MIX * (whole // sum(MIX))
                found = [
                    share(lengths, ranks, rule, link, backward)
                    for lengths, rule in (((whole,), "zigzag"), (mix, "balanced"))
                    for backward in (False, True)
                ]
                cells = " | ".join(f"{x:.2f}" for x in found)
                print(f"| {ranks} | {tokens} | {name} | {cells} |")
    print("\n| lengths | ranks | pairs: most / mean | tokens: most / mean | rows sent / tokens |")
    print("|---|---|---:|---:|---:|")
    for kind in ("log-normal", "all short", "one giant"):
        lengths = lengths_of(kind)
        offsets = [sum(lengths[:b]) for b in range(len(lengths) + 1)]
        for ranks in (4, 8):
            plan = ShardPlan(offsets, ranks, causal=True)
            pairs, tokens = plan.layout.pairs, [plan.tokens(rank) for rank in range(ranks)]
            sent = sum(
                sum(counts_of(tuple(lengths), ranks, rank, "balanced").arriving)
                for rank in range(ranks)
            )
            cells = (max(x) * ranks / sum(x) for x in (pairs, tokens))
            balance = " | ".join(f"{x:.3f}" for x in cells)
            print(f"| {kind} | {ranks} | {balance} | {sent / sum(lengths):.2f} |")


if __name__ == "__main__":
    main()
