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
from typing import Any, NamedTuple

import torch
from alone import TOLERANCE, Timer, copy_gbps, make, relative_error
from bench_lightning_attn import describe
from cases import GRID
from lightning_attn._linear.tiles import HopperTile, Tile
from providers import reference
from torch import Tensor


class Candidate(NamedTuple):
    """A tile, and how the kernel for Hopper divides it; without, the portable one runs."""

    tile: Tile
    hopper: HopperTile | None = None


CANDIDATES = [
    Candidate(Tile(64, columns, warps, stages, terms=2, segment=segment))
    for (columns, warps), stages, segment in itertools.product(
        [(64, 4), (128, 8)], (2, 3), (1024, 4096)
    )
] + [
    Candidate(
        Tile(64, 64 * warpgroups, 4 * warpgroups, 3, terms=2, segment=segment),
        HopperTile(warpgroups, stages),
    )
    for (warpgroups, stages), segment in itertools.product(
        [(1, 3), (1, 5), (2, 3), (2, 4)], (1024, 4096)
    )
]
SCHEDULES = ("sequential", "parallel")
Call = Callable[[], Any]


def calls(
    candidate: Candidate, inputs: list[Tensor], dout: Tensor, decay: Tensor, schedule: str
) -> tuple[Call, Call]:
    """Return the forward and the backward pass, by operators: they keep no plan of a call."""
    from lightning_attn._linear import ops, tiles
    from lightning_attn._linear.hopper import launch
    from lightning_attn._linear.portable import walk_launch
    from lightning_attn._linked.host.forms import Memory

    # what was planned for another candidate
    walk_launch._walks = Memory()
    walk_launch.tile_of = lambda *_: candidate.tile
    launch.hopper_tile = lambda *_: candidate.hopper
    tiles.HOPPER = candidate.hopper is not None
    q, k, v = inputs
    options = 1.0, schedule

    def forward() -> Tensor:
        return ops.forward(q, k, v, decay, None, None, *options, False)[0]

    def backward() -> tuple[Tensor, ...]:
        dq = ops.read_gradient(dout, k, v, decay, None, None, *options)
        return dq, *ops.write_gradients(dout, q, k, v, decay, None, None, *options, False)[:2]

    return forward, backward


def compile_and_check(candidate: Candidate, schedule: str) -> str:
    """Return why a candidate cannot be used, or nothing."""
    problem = GRID[2]
    inputs, dout, decay, _ = make(problem, "cuda")
    want = reference(problem, inputs, dout, decay)
    try:
        forward, backward = calls(candidate, inputs, dout, decay, schedule)
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
        for (candidate, schedule), reason in zip(jobs, reasons, strict=True):
            row = {"case": problem.name, "tile": str(candidate), "schedule": schedule}
            if reason:
                row["reason"] = reason
            else:
                forward, backward = calls(candidate, inputs, dout, decay, schedule)
                times = {"fwd": timer(forward), "bwd": timer(backward)}
                row |= times
                lines.append((times["fwd"], f"{times} {schedule} {candidate}"))
            found["results"].append(row)
        print(problem.name, *(f"\n  {line}" for _, line in sorted(lines)), flush=True)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
