"""Sweeps of tiles on the GPU at hand: every one is checked before it is timed.

The tables are edited by hand. Each candidate is first compiled and compared in a process of its
own, many side by side: one that fails, hangs or crashes is reported and never timed. Those that are
right are then timed one after another, the table's own first.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .cases import split
from .children import apart, first_line
from .providers import replaced
from .report import geometric_mean
from .results import commit_of, describe
from .timing import Timer, ceilings

Row = dict[str, Any]
Tile = dict[str, Any]


@dataclass
class Trial:
    """One kernel on one problem, with the tile that is in place.

    Attributes:
        run: The call that is timed.
        judge: Tells of its results whether they are right, and their error.
        flops: Floating-point operations of the call.
    """

    run: Callable[[], Any]
    judge: Callable[[Any], tuple[bool, Any]]
    flops: float


def product(**fields: tuple[Any, ...]) -> list[Tile]:
    """Return every tile whose fields have these values."""
    return [
        dict(zip(fields, values, strict=True)) for values in itertools.product(*fields.values())
    ]


class Tuner:
    """What a package tries; all but ``main`` is its own to set.

    Attributes:
        package: Import name.
        tiles: Candidates of each kernel.
        problems: What each kernel is timed on, and the small ones that candidates are tried on
            first: pairs, by kernel.
    """

    package: str
    tiles: dict[str, list[Tile]]
    problems: dict[str, list[tuple[Any, Any]]]

    def __init__(self, about: str, script: str) -> None:
        self.about, self.script = about, script

    def trial(self, kernel: str, problem: Any, device: str) -> Trial:
        """Prepare a kernel on a problem, within ``use``."""
        raise NotImplementedError

    def use(self, kernel: str, tile: Tile | None) -> contextlib.AbstractContextManager[None]:
        """Put a tile in the place of the table's own; None leaves that."""
        raise NotImplementedError

    def tried(self, kernel: str, problem: Any, tile: Tile | None, device: str) -> Row:
        """Run a tile once; return what came of it."""
        torch.set_float32_matmul_precision("highest")
        try:
            with self.use(kernel, tile):
                trial = self.trial(kernel, problem, device)
                right, error = trial.judge(trial.run())
        except Exception as failure:  # too large, or it does not compile: the others go on
            return {"status": first_line(failure)}
        return {"status": "ok" if right else "wrong", "error": error}

    def timed(self, kernel: str, problem: Any, tile: Tile | None, timer: Timer) -> Row:
        """Check a tile on a problem, and time it."""
        row = self.tried(kernel, problem, tile, timer.device)
        if row["status"] != "ok":
            return row
        with self.use(kernel, tile):
            trial = self.trial(kernel, problem, timer.device)
            ms = timer(trial.run)
        return {**row, "ms": ms, "tflops": trial.flops / ms / 1e9}

    def sweep(self, kernel: str, arguments: argparse.Namespace, timer: Timer) -> Iterator[Row]:
        """Yield a row for each tile on each problem."""
        parts = split(arguments.cases)
        fixed = dict(one.split("=") for one in arguments.set)
        tiles = self.tiles[kernel]
        if fixed:
            fields = {name: tuple(dict.fromkeys(t[name] for t in tiles)) for name in tiles[0]}
            fields |= {name: tuple(map(int, x.split(","))) for name, x in fixed.items()}
            tiles = product(**fields)
        for problem, small in self.problems[kernel]:
            if parts and not any(part in problem.name for part in parts):
                continue
            problem = small if arguments.dry_run else problem
            fit = [None, *tiles[: 2 if arguments.dry_run else None]]
            jobs = [(kernel, small, tile, timer.device) for tile in fit]
            with ThreadPoolExecutor(arguments.jobs) as pool:
                first = pool.map(lambda job: apart(self.tried, job, arguments.timeout), jobs)
            for tile, found in zip(fit, first, strict=True):
                row = {"status": found} if isinstance(found, str) else found
                if row["status"] == "ok":
                    row = self.timed(kernel, problem, tile, timer)
                yield {"case": problem.name, "kernel": kernel, "tile": shown(tile), **row}

    def main(self) -> int:
        """Do what the command line asks for; return the exit status."""
        parser = argparse.ArgumentParser(
            description=self.about, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        add = parser.add_argument
        add("--kernels", default=",".join(self.tiles), help=f"of {','.join(self.tiles)}")
        add("--cases", default="", help="comma-separated parts of names; default: all")
        add("--set", action="append", default=[], metavar="FIELD=V,V", help="a field's values")
        add("--jobs", type=int, default=max(1, (os.cpu_count() or 1) - 2), help="processes")
        add("--timeout", type=float, default=180.0, help="seconds to compile and check one")
        add("--warmup", type=float, default=10.0, help="milliseconds")
        add("--rep", type=float, default=40.0, help="milliseconds of each measurement")
        add("--json", type=Path, help="write all numbers there")
        add("--dry-run", action="store_true", help="tiny, on the CPU; wants TRITON_INTERPRET=1")
        arguments = parser.parse_args()
        if not arguments.dry_run and not torch.cuda.is_available():
            print("no CUDA device; --dry-run tries the script on a CPU", file=sys.stderr)
            return 2
        timer = Timer("cpu" if arguments.dry_run else "cuda", arguments.warmup, arguments.rep)
        machine = describe(self.package, timer.device, commit_of(Path(self.script).parent))
        found: Row = {"machine": machine, **ceilings(timer), "rows": []}
        began = time.monotonic()
        for kernel in split(arguments.kernels):
            rows = []
            for row in self.sweep(kernel, arguments, timer):
                rows.append(row)
                print(*row.values(), flush=True)
                found["rows"].append(row)
                if arguments.json is not None:
                    arguments.json.write_text(json.dumps(found, indent=1) + "\n")
            print(
                f"{kernel}: {time.monotonic() - began:.0f} s; speed / the table's\n{ranked(rows)}"
            )
        return 0


def shown(tile: Tile | None) -> str:
    """Return a tile as text."""
    return "table" if tile is None else " ".join(f"{name}={x}" for name, x in tile.items())


def ranked(rows: list[Row]) -> str:
    """Return tiles by their speed over the table's own: the mean over the cases of a kernel."""
    times = {(row["case"], row["tile"]): row["ms"] for row in rows if "ms" in row}
    speeds: dict[str, list[float]] = {}
    for (case, tile), ms in times.items():
        if (case, "table") in times:
            speeds.setdefault(tile, []).append(times[case, "table"] / ms)
    means = {tile: geometric_mean(found) for tile, found in speeds.items()}
    best = sorted(means, key=means.__getitem__, reverse=True)
    return "\n".join(f"  {means[tile]:.3f} {tile}, {len(speeds[tile])} cases" for tile in best)


@contextlib.contextmanager
def looked_up(
    package: str, lookups: dict[str, Callable[..., Any]], *places: tuple[Any, str, Any]
) -> Iterator[None]:
    """Let functions of a package return something else, wherever it has imported them.

    Args:
        package: Import name.
        lookups: By the name of a function: what makes another result of its own.
        places: Further names of modules, with their values within.

    Raises:
        RuntimeError: none of them was called, so that nothing was tried.
    """
    asked: list[str] = []
    every = [*places]
    for name, change in lookups.items():
        modules = [m for n, m in list(sys.modules.items()) if n.split(".")[0] == package]
        holders = [module for module in modules if callable(vars(module).get(name))]
        original = vars(holders[0])[name]

        def instead(*args: Any, name=name, change=change, original=original, **kwargs: Any) -> Any:
            asked.append(name)
            return change(original(*args, **kwargs))

        every += [(holder, name, instead) for holder in holders]
    with replaced(*every):
        yield
        if lookups and not asked:
            raise RuntimeError(f"{' and '.join(lookups)} was not called: the tile was not tried")
