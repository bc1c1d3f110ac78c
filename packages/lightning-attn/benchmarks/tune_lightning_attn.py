"""Time candidate tiles of the walk on the shapes of the table, each checked first.

    python benchmarks/tune_lightning_attn.py --json tuning.json
    python benchmarks/tune_lightning_attn.py --cases b1-t8192-h96 --schedules sequential

Kernels are compiled first, side by side, each candidate in a process of its own: one that reads out
of range ends that process alone, and is left out. The best goes into ``_configs.py`` by hand.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from bench_lightning_attn import TOLERANCE, Timer, copy_gbps, describe, make, relative_error
from cases import GRID
from lightning_attn._configs import Tile
from providers import reference
from torch import Tensor

CANDIDATES = [
    Tile(64, columns, warps, stages, terms=2, segment=segment)
    for (columns, warps), stages, segment in itertools.product(
        [(64, 4), (64, 8), (128, 8)], (2, 3, 4), (1024, 4096)
    )
]
SCHEDULES = ("sequential", "parallel")
Call = Callable[[], Any]


def calls(
    tile: Tile, inputs: list[Tensor], dout: Tensor, decay: Tensor, schedule: str
) -> tuple[Call, Call]:
    """Return the forward and the backward pass, by operators: they keep no plan of a call."""
    from lightning_attn import _ops
    from lightning_attn._kernels import walk

    walk.tile_of = lambda *_: tile
    q, k, v = inputs
    options = 1.0, schedule

    def forward() -> Tensor:
        return _ops.forward(q, k, v, decay, None, None, *options, False)[0]

    def backward() -> tuple[Tensor, ...]:
        dq = _ops.read_gradient(dout, k, v, decay, None, None, *options)
        return dq, *_ops.write_gradients(dout, q, k, v, decay, None, None, *options, False)[:2]

    return forward, backward


def compile_and_check(tile: Tile, schedule: str) -> str:
    """Return why a candidate cannot be used, or nothing."""
    problem = GRID[2]
    inputs, dout, decay, _ = make(problem, "cuda")
    want = reference(problem, inputs, dout, decay)
    try:
        forward, backward = calls(tile, inputs, dout, decay, schedule)
        for _ in range(2):  # the second call goes another way
            got = [forward(), *backward()]
            torch.cuda.synchronize()
            errors = [relative_error(a, b) for a, b in zip(got, want, strict=True)]
    except Exception as failure:  # too large a tile, or worse
        return type(failure).__name__
    # written so that NaN fails
    return "" if all(error <= TOLERANCE for error in errors) else f"errors {errors}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default="", help="substring of case names")
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("--json", type=Path, help="write all numbers there")
    arguments = parser.parse_args()
    jobs = list(itertools.product(CANDIDATES, arguments.schedules.split(",")))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn, max_tasks_per_child=1) as pool:
        reasons = list(pool.map(compile_and_check, *zip(*jobs, strict=True)))
    timer = Timer("cuda", 5.0, 20.0)
    found = describe("cuda") | {"copy_gbps": copy_gbps(timer), "results": []}
    for problem in GRID:
        if arguments.cases not in problem.name:
            continue
        inputs, dout, decay, _ = make(problem, "cuda")
        lines = []
        for (tile, schedule), reason in zip(jobs, reasons, strict=True):
            row = {"case": problem.name, "tile": str(tile), "schedule": schedule}
            if reason:
                row["reason"] = reason
            else:
                forward, backward = calls(tile, inputs, dout, decay, schedule)
                times = {"fwd": timer(forward), "bwd": timer(backward)}
                row |= times
                lines.append((times["fwd"], f"{times} {schedule} {tile}"))
            found["results"].append(row)
        print(problem.name, *(f"\n  {line}" for _, line in sorted(lines)), flush=True)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
