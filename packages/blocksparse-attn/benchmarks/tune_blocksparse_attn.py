"""Time tiles that the tables might hold: one kernel's is changed, all others stay.

    python benchmarks/tune_blocksparse_attn.py --kernels tall,dkdv --json tiles.json

Tiles are written ``queries x keys x warps x stages``. Every tile's result is compared with that of
the table's own before it is timed. Processes compile first, as many as there are cores. The tables
are those of the portable kernels: on Hopper, another serves the forward of most calls.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from blocksparse_attn import BlockSparseLayout, blocksparse_attn_func
from blocksparse_attn._attention import tiles
from blocksparse_attn._attention.tiles import Tile
from timing import measure

TABLES = {
    "tall": "_TALL",
    "low": "_LOW",
    "short": "_SHORT",
    "dkdv": "_BACKWARD_DKDV",
    "dq": "_BACKWARD_DQ",
}
TILES: dict[str, list[tuple[int, int, int, int]]] = {
    "tall": [
        (128, 64, 8, 4), (128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 2),
        (64, 64, 4, 3), (64, 64, 4, 4), (32, 64, 4, 3), (64, 128, 4, 2),
    ],
    "short": [
        (16, 64, 4, 4), (16, 64, 2, 3), (16, 64, 2, 5), (16, 128, 4, 3), (16, 128, 8, 3),
        (16, 32, 4, 5), (16, 32, 2, 6),
    ],
    "dkdv": [
        (64, 64, 4, 3), (128, 64, 8, 2), (64, 128, 8, 2), (32, 64, 4, 3), (32, 64, 4, 2),
        (32, 32, 4, 3), (64, 32, 4, 3),
    ],
    "dq": [
        (128, 128, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (32, 64, 4, 2), (64, 32, 4, 3),
    ],
}  # fmt: skip
ALL = ("tall", "dkdv", "dq")
tiles.HOPPER = False


class Case(NamedTuple):
    """A local and strided pattern, and the kernels that are of interest there."""

    name: str
    kernels: tuple[str, ...]
    tokens: int
    batch: int
    block: int
    local: int
    stride: int
    shared: bool = False


CASES = [
    Case("strided-8k", ALL, 8192, 1, 64, 16, 8),
    Case("strided-32k", ALL, 32768, 1, 64, 16, 8),
    Case("shared-8k", ALL, 8192, 1, 64, 16, 8, True),
    Case("dense-8k", ALL, 8192, 1, 64, 128, 1, True),
    Case("block128-8k", ALL, 8192, 1, 128, 8, 8),
    Case("block32-8k", ALL, 8192, 1, 32, 32, 8),
    Case("block16-8k", ALL, 8192, 1, 16, 64, 8),
    Case("decode-16-8", ("short",), 8192, 32, 64, 16, 8),
    Case("decode-8-16", ("short",), 8192, 32, 64, 8, 16),
]


def use(kernel: str, tile: tuple[int, int, int, int] | None, saved: dict[str, Any]) -> None:
    """Put a tile into a table, for all head dimensions; None puts the table back."""
    table = getattr(tiles, TABLES[kernel])
    table["hopper"] = saved[kernel] if tile is None else ((256, Tile(*tile)),)
    for cached in (
        tiles.tall_shape,
        tiles.backward_dq_shape,
        tiles.short_shape,
        tiles.backward_dkdv_tile,
    ):
        cached.cache_clear()


def runner(case: Case, backward: bool) -> Callable[[], Any]:
    """Return what is timed."""
    tokens, batch = case.tokens, case.batch
    generator = torch.Generator(device="cuda").manual_seed(0)

    def draw(count: int, heads: int) -> torch.Tensor:
        shape = (batch, count, heads, 128)
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    layout = BlockSparseLayout.local_strided(32, tokens, *case[4:], device="cuda")
    q, k, v = draw(1 if batch > 1 else tokens, 32), draw(tokens, 8), draw(tokens, 8)
    if not backward:
        return lambda: (blocksparse_attn_func(q, k, v, layout),)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = blocksparse_attn_func(*leaves, layout)
    dout = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def attempt(job: tuple[str, Any, Any], rep: float | None, want: Any = None) -> Any:
    """Run, compare and time one tile; a process that compiles has no ``rep``."""
    kernel, tile, case = job
    saved = {
        name: getattr(tiles, table)["hopper"]
        for name, table in TABLES.items()
        if "hopper" in getattr(tiles, table)
    }
    use(kernel, tile, saved) if tile else None
    try:
        run = runner(case, kernel in ("dkdv", "dq"))
        torch.manual_seed(0)
        results = run()
        torch.cuda.synchronize()
        if rep is None:
            return None
        worst = 0.0
        for got, exact in zip(results, want or results, strict=True):
            worst = max(worst, ((got - exact).float().norm() / exact.float().norm()).item())
        times = [measure(run, "cuda", rep) for _ in range(3)]
        return statistics.median(times), worst, results
    except Exception as error:  # a tile that does not fit is a result
        return f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"
    finally:
        use(kernel, None, saved)


def compile_only(job: tuple[str, Any, Any]) -> None:
    attempt(job, None)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernels", default=",".join(TILES))
    parser.add_argument("--cases", default="", help="comma-separated parts of names; default: all")
    parser.add_argument("--rep", type=float, default=20.0, help="milliseconds a measurement")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    parts = [part for part in arguments.cases.split(",") if part]
    jobs = [
        (kernel, tile, case)
        for case in CASES
        if not parts or any(part in case.name for part in parts)
        for kernel in arguments.kernels.split(",")
        if kernel in case.kernels
        for tile in (None, *TILES[kernel])
    ]
    # one case of each kind of build
    builds = {
        (kernel, tile, case.block, case.shared): (kernel, tile, case)
        for kernel, tile, case in reversed(jobs)
    }
    with multiprocessing.get_context("spawn").Pool(min(14, os.cpu_count() or 1)) as pool:
        pool.map(compile_only, list(builds.values()), chunksize=1)
    rows, want = [], None
    for kernel, tile, case in jobs:
        if tile is None:
            want = None
        outcome = attempt((kernel, tile, case), arguments.rep, want)
        shown = "table" if tile is None else "x".join(map(str, tile))
        row: dict[str, Any] = {"case": case.name, "kernel": kernel, "tile": shown}
        if isinstance(outcome, str):
            row["failed"] = outcome
        else:
            row["ms"], row["error"], results = outcome
            want = results if tile is None else want
        rows.append(row)
        print(*row.values(), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
