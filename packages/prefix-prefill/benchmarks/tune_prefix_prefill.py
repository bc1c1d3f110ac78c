"""Time tiles, and numbers of splits, that the tables do not have; the tables are edited by hand.

    python benchmarks/tune_prefix_prefill.py --long 128,64,8,3 128,128,8,2
    python benchmarks/tune_prefix_prefill.py --short 16,64,4,3 16,128,4,2 --splits 0,1,2,4
    python benchmarks/tune_prefix_prefill.py --cases decode --rep 1   compiles, for the next run

A tile is rows, keys, warps, stages. Every one is checked before it is timed. Tiles for many queries
are tried on prefill, those for few, with each number of splits, on decoding.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from cases import Problem, select
from prefix_prefill import api, paged_attn_func
from prefix_prefill._paged import launch, tiles
from providers import Expected, Inputs, judge, make_inputs, reference
from timing import Timer, copy_gbps

CASES = (
    "prefill-8x1024+7168",
    "prefill-8x512+4096",
    "prefill-1x2048+14336",
    "prefill-4x1024+0",
    "decode-64x8192",
    "decode-1x65536",
    "decode-256x2048",
)


@contextlib.contextmanager
def overridden(lookup: str, tile: tiles.Tile | None) -> Iterator[None]:
    """Let launches of the portable kernels have a tile in place of that of the table."""
    before, hopper = getattr(launch, lookup), tiles.HOPPER
    tiles.HOPPER = False
    if tile is not None:
        setattr(launch, lookup, lambda *_: tile)
    # plans of earlier calls hold the tile of their time
    api._known = type(api._known)()
    try:
        yield
    finally:
        setattr(launch, lookup, before)
        tiles.HOPPER = hopper
        api._known = type(api._known)()


def attempt(
    problem: Problem, x: Inputs, expected: list[Expected], splits: int, timer: Timer
) -> dict[str, Any]:
    """Check one way to compute a problem, and time it."""

    def run() -> Any:
        return paged_attn_func(
            x.q,
            x.k_cache,
            x.v_cache,
            x.table,
            x.starts,
            x.lengths,
            problem.max_new,
            problem.max_keys,
            num_splits=splits,
        )

    try:
        right, error = judge(expected, run())
    except Exception as reason:  # too large, or does not compile: the others go on
        return {"status": f"{type(reason).__name__}: {str(reason)[:80]}"}
    if not right:
        return {"status": "wrong", "error": error}
    ms = timer(run)
    rates = {"tflops": problem.flops / ms / 1e9, "gbps": problem.bytes / ms / 1e6}
    return {"status": "ok", "ms": ms, **rates}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--long", nargs="*", default=[], help="tiles for many queries")
    add("--short", nargs="*", default=[], help="tiles for few queries")
    add("--splits", default="0", help="comma-separated; 0 is by load")
    add("--cases", default="", help="comma-separated parts of names")
    add("--warmup", type=float, default=10.0, help="milliseconds")
    add("--rep", type=float, default=40.0, help="milliseconds")
    add("--json", type=Path, help="write all numbers there")
    arguments = parser.parse_args()
    timer = Timer("cuda", arguments.warmup, arguments.rep)
    copy = copy_gbps(timer)
    print(f"copy {copy:.0f} GB/s")
    parts = [part for part in arguments.cases.split(",") if part]
    rows = []
    for problem in select(list(CASES)):
        if problem.name not in CASES or (parts and not any(p in problem.name for p in parts)):
            continue
        is_long = problem.family == "prefill"
        x = make_inputs(problem, "cuda")
        expected = reference(problem, x)
        for text in ["", *(arguments.long if is_long else arguments.short)]:
            tile = tiles.Tile(*map(int, text.split(","))) if text else None
            for splits in map(int, ["0"] if is_long else arguments.splits.split(",")):
                with overridden("long_tile" if is_long else "short_tile", tile):
                    row = attempt(problem, x, expected, splits, timer)
                rows.append({"case": problem.name, "tile": text, "splits": splits, **row})
                shown = row["status"]
                if shown == "ok":
                    shown = f"{row['ms']:.4f} ms {row['tflops']:6.1f} TFLOP/s"
                    shown += f" {row['gbps']:6.0f} GB/s {row['gbps'] / copy:.3f}"
                print(f"{problem.name:<22}{text or 'table':<14}{splits:<4}{shown}", flush=True)
        del x
        torch.cuda.empty_cache()
    if arguments.json:
        arguments.json.write_text(json.dumps({"copy_gbps": copy, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
