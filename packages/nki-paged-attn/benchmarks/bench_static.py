"""Engine cycles, bytes and peaks of this kernel and of the old algorithm, from traces.

    python benchmarks/bench_static.py [--write]

Nothing is measured: both kernels run on the simulator without computing, and the cost model adds up
what they log. ``--write`` replaces ``results/static.json``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from nki_paged_attn import trace_form
from nki_paged_attn._paged.masks import tokens_per_partition
from nki_paged_attn.sim import ArraySpec, Trace, cost, find_target, load, simulate
from nki_paged_attn.sim.dtypes import NUMPY

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "static.json"
LARGE, P = 2048, 128
GROUP, HEAD_DIM, BLOCK_SIZE = 8, 128, 32
DTYPE = "bfloat16"
TARGET = "trn2"

# name: new tokens and contexts of the sequences; one KV head, whose figures the others repeat
CASES = {
    "prefill 2k": ([2048], [0]),
    "prefill 8k": ([8192], [0]),
    "chunk 512 on 32k": ([512], [32768]),
    "decode 32 x 8k": ([1] * 32, [8192] * 32),
}

# where decode's gates hold: as many sequences as make 4096 cached tokens, and four sequences
RANGE_GROUPS = (1, 2, 4, 8, 16)
RANGE_CONTEXTS = (32, 64, 128, 256, 512, 1024, 2048)
SHORT_CONTEXTS = (1, 4, 8, 16, 20, 33, 100, 130, 1000)


def lower_bound(queries: list[int], contexts: list[int], group: int, head_dim: int) -> int:
    """Return the least bytes of a KV head: keys, values, queries and outputs once."""
    new = sum(queries)
    return 2 * head_dim * (2 * (sum(contexts) + new) + 2 * new * group)


def trace_new(
    queries: list[int],
    contexts: list[int],
    *,
    group: int = GROUP,
    kv_heads: int = 1,
    head_dim: int = HEAD_DIM,
    block_size: int = BLOCK_SIZE,
    target: str = TARGET,
) -> Trace:
    """Log this kernel."""
    return trace_form(
        queries,
        contexts,
        heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=DTYPE,
        target=target,
    )


def trace_old(
    queries: list[int],
    contexts: list[int],
    *,
    group: int = GROUP,
    head_dim: int = HEAD_DIM,
    block_size: int = BLOCK_SIZE,
    target: str = TARGET,
) -> Trace:
    """Log the old algorithm; in an SBUF without an end, because its accumulators may not fit."""
    kernel = load(HERE / "old_plan.py").old_plan_kernel
    kind = NUMPY[DTYPE]
    seq = P
    while seq < sum(queries):  # as its callers padded
        seq *= 2
    blocks = sum(-(-c // block_size) for c in contexts)
    context = -(-blocks * block_size // LARGE) * LARGE
    tokens = tokens_per_partition(LARGE, block_size)
    roomy = dataclasses.replace(find_target(target), sbuf_bytes=2**40)
    run = simulate(kernel, roomy, strict=False, execute=False)
    run(
        ArraySpec((group, head_dim, seq), kind),
        ArraySpec((1, head_dim, seq), kind),
        ArraySpec((1, seq, head_dim), kind),
        ArraySpec((2, max(blocks, 1), 1, block_size, head_dim), kind),
        np.zeros((P, max(1, context // (P * tokens))), np.int32),
        ArraySpec((seq, context + seq), np.dtype(np.int32)),
        tokens,
        head_dim**-0.5,
        DTYPE,
    )
    return run.trace


def figures(trace: Trace, bound: int) -> dict[str, object]:
    """Return what the table shows of a trace."""
    found = cost(trace)
    room = find_target(trace.target).sbuf_bytes
    return {
        "instructions": found.instructions,
        "cycles": found.cycles,
        "dma_bytes": found.dma_bytes,
        "dma_bytes_over_bound": round(found.dma_bytes / bound, 3),
        "bound": found.bound,
        "bound_us": round(max(found.times.values()) / 1e3, 1),
        "schedule_us": round(found.makespan / 1e3, 1),
        "busy": round(found.busy[found.bound], 3),
        "sbuf_bytes_per_partition": found.sbuf_peak,
        "fits_sbuf": found.sbuf_peak <= room,
        "psum_banks": found.psum_peak,
    }


def fewer_cycles(contexts: list[int], group: int) -> float:
    """Return TensorE cycles of the old plan over those of this one, for decodes."""
    batch = ([1] * len(contexts), contexts)
    new, old = (cost(trace(*batch, group=group)) for trace in (trace_new, trace_old))
    return round(old.cycles["tensor"] / new.cycles["tensor"], 2)


def bytes_over_bound(context: int) -> float:
    """Return bytes over the least possible of four decodes on blocks of 16."""
    batch = ([1] * 4, [context] * 4)
    moved = trace_new(*batch, block_size=16).dma_bytes()
    return round(moved / lower_bound(*batch, GROUP, HEAD_DIM), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"replace {RESULTS.name}")
    arguments = parser.parse_args()
    setting = {
        "target": TARGET,
        "dtype": DTYPE,
        "query heads of the KV head": GROUP,
        "head_dim": HEAD_DIM,
        "block_size": BLOCK_SIZE,
    }
    report: dict[str, Any] = {"computed, not measured": setting}
    head = ("case", "plan", "tensor", "vector", "scalar", "DMA bytes", "/bound", "bound by", "busy")
    print(" | ".join((*head, "SBUF B", "banks")))
    for name, (queries, contexts) in CASES.items():
        bound = lower_bound(queries, contexts, GROUP, HEAD_DIM)
        rows = {}
        for plan, trace in (("new", trace_new), ("old", trace_old)):
            row = rows[plan] = figures(trace(queries, contexts), bound)
            cycles = row["cycles"]
            shown = [
                name,
                plan,
                *(cycles[e] for e in ("tensor", "vector", "scalar")),
                row["dma_bytes"],
                row["dma_bytes_over_bound"],
                row["bound"],
                row["busy"],
                row["sbuf_bytes_per_partition"],
                row["psum_banks"],
            ]
            print(" | ".join(map(str, shown)), flush=True)
        report[name] = rows
    print("\ndecode: TensorE cycles of the old plan over those of the new, by cached tokens")
    report["decode cycles"] = {}
    for group in RANGE_GROUPS:
        row = {c: fewer_cycles([c] * (4096 // c), group) for c in RANGE_CONTEXTS}
        report["decode cycles"][group] = row
        print(f"{group} heads:", row, flush=True)
    report["decode cycles, four of 128 and 8 heads"] = fewer_cycles([128] * 4, GROUP)
    report["decode bytes"] = {c: bytes_over_bound(c) for c in SHORT_CONTEXTS}
    print("bytes over the least possible:", report["decode bytes"])
    if arguments.write:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
