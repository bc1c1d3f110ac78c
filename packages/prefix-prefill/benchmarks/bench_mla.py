"""Benchmark of multi-head latent attention: check first, then time, in turns.

    python benchmarks/bench_mla.py --json api.json
    python benchmarks/bench_mla.py --cases 128 --providers ours,portable
    python benchmarks/bench_mla.py --dry-run        tiny, on the CPU

A case is told in TFLOP/s, 2 (576 + 512) H for each pair of a query and a key that it sees; in GB/s
of the cache, read once; and as a share of the same run's copy bandwidth (bytes read plus written).
FlashMLA runs where it is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from bench_prefix_prefill import describe
from prefix_prefill import mla_attn_func
from prefix_prefill._linked.host.forms import Memory
from prefix_prefill._mla import api
from prefix_prefill._paged import tiles
from timing import Timer, copy_gbps

Row = dict[str, Any]
Run = Callable[[], torch.Tensor]

HEAD_DIM, HEAD_DIM_V = 576, 512
# of DeepSeek's models, whose heads had 128 + 64 columns before the projections were absorbed
SCALE = 192**-0.5
# relative error (Frobenius) of the sequences that are looked at
TOLERANCE = 1e-2


@dataclass(frozen=True)
class Problem:
    """One call: sequences with so many new tokens, and keys, each."""

    name: str
    batch: int
    new: int
    keys: int
    heads: int
    page: int = 64
    cache: torch.dtype = torch.bfloat16

    @property
    def flops(self) -> float:
        pairs = self.batch * (self.new * (self.keys - self.new) + self.new * (self.new + 1) / 2)
        return 2.0 * (HEAD_DIM + HEAD_DIM_V) * self.heads * pairs

    @property
    def bytes(self) -> float:
        return float(self.batch * self.keys * HEAD_DIM * self.cache.itemsize)


FP8 = torch.float8_e4m3fn
PROBLEMS = (
    Problem("decode-h128-64x8192", 64, 1, 8192, 128),
    Problem("decode-h16-64x8192", 64, 1, 8192, 16),
    Problem("decode-h128-1x65536", 1, 1, 65536, 128),
    Problem("decode-h16-1x65536", 1, 1, 65536, 16),
    Problem("decode-h16-256x2048", 256, 1, 2048, 16),
    Problem("drafts-h128-32x2+8192", 32, 2, 8192, 128),
    Problem("prefill-h128-4x512+3584", 4, 512, 4096, 128),
    Problem("decode-h128-64x8192-p16", 64, 1, 8192, 128, page=16),
    Problem("decode-h128-64x8192-fp8", 64, 1, 8192, 128, cache=FP8),
    Problem("decode-h16-64x8192-fp8", 64, 1, 8192, 16, cache=FP8),
)


@dataclass
class Inputs:
    q: torch.Tensor
    cache: torch.Tensor
    table: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor


def make_inputs(problem: Problem, device: str) -> Inputs:
    """Draw normal operands, and pages in no order."""
    generator = torch.Generator(device=device).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)

    pages = -(-problem.keys // problem.page)
    order = torch.randperm(problem.batch * pages, device=device, generator=generator)
    counts = torch.arange(problem.batch + 1, dtype=torch.int32, device=device)
    return Inputs(
        draw(problem.batch * problem.new, problem.heads, HEAD_DIM),
        draw(problem.batch * pages, problem.page, HEAD_DIM).to(problem.cache),
        order.int().view(problem.batch, pages),
        counts * problem.new,
        torch.full((problem.batch,), problem.keys, dtype=torch.int32, device=device),
    )


def error_of(problem: Problem, x: Inputs, out: torch.Tensor) -> float:
    """Return the relative error of the first and the last sequence, beside fp32 attention."""
    wrong = right = 0.0
    for b in {0, problem.batch - 1}:
        pages = x.table[b].long()
        keys = (
            x.cache.view(torch.uint8)[pages].view(problem.cache)
            if problem.cache == FP8
            else (x.cache[pages])
        )
        keys = keys.float().flatten(0, 1)[: problem.keys]
        rows = slice(b * problem.new, (b + 1) * problem.new)
        s = torch.einsum("thd,kd->thk", x.q[rows].float(), keys) * SCALE
        key = torch.arange(problem.keys, device=s.device)
        last = torch.arange(problem.new, device=s.device) + problem.keys - problem.new
        s = s.masked_fill_((key > last[:, None])[:, None], -math.inf)
        want = torch.einsum("thk,kd->thd", s.softmax(-1), keys[:, :HEAD_DIM_V])
        wrong += (out[rows].float() - want).square().sum().item()
        right += want.square().sum().item()
    return math.sqrt(wrong / right)


# ---- what is measured


def ours(problem: Problem, x: Inputs) -> Run:
    return lambda: mla_attn_func(
        x.q, x.cache, x.table, x.starts, x.lengths, problem.new, problem.keys, softmax_scale=SCALE
    )


_portable_calls: Memory[Any] = Memory()


@contextlib.contextmanager
def portable_kernels() -> Iterator[None]:
    before = tiles.HOPPER, api._known
    tiles.HOPPER, api._known = False, _portable_calls
    try:
        yield
    finally:
        tiles.HOPPER, api._known = before


def portable(problem: Problem, x: Inputs) -> Run:
    run = ours(problem, x)

    def portable() -> torch.Tensor:
        with portable_kernels():
            return run()

    return portable


def flashmla(problem: Problem, x: Inputs) -> Run:
    from flash_mla import flash_mla_with_kvcache, get_mla_metadata

    if problem.page != 64 or problem.cache != torch.bfloat16:
        raise NotImplementedError("pages of 64 in bf16 alone")
    q = x.q.view(problem.batch, problem.new, problem.heads, HEAD_DIM)
    plan = get_mla_metadata(x.lengths, problem.new * problem.heads, 1)
    given = q, x.cache[:, :, None], x.table, x.lengths, HEAD_DIM_V, *plan
    return lambda: flash_mla_with_kvcache(*given, softmax_scale=SCALE, causal=True)[0].flatten(0, 1)


PROVIDERS = {"ours": ours, "portable": portable, "flashmla": flashmla}


def measure(problem: Problem, names: list[str], timer: Timer, rounds: int) -> list[Row]:
    """Check every provider, then time those that are right, in turns."""
    x = make_inputs(problem, timer.device)
    rows, runs = [], []
    for name in names:
        row: Row = {"case": problem.name, "provider": name}
        rows.append(row)
        try:
            run = PROVIDERS[name](problem, x)
            row["error"] = error_of(problem, x, run())
        except Exception as reason:  # a rival may be absent, or fail in any way
            first = (str(reason).splitlines() or [""])[0]
            row |= {"status": "skipped", "message": f"{type(reason).__name__}: {first}"}
            continue
        # NaN passes no comparison
        row["status"] = "ok" if row["error"] <= TOLERANCE else "wrong"
        if row["status"] == "ok":
            runs.append((row, run, []))
    for _ in range(rounds):
        for _, run, times in runs:
            times.append(timer(run))
    for row, _, times in runs:
        ms = statistics.median(times)
        row |= {"ms": ms, "tflops": problem.flops / ms / 1e9, "gbps": problem.bytes / ms / 1e6}
    return rows


def tell(row: Row, copy: float | None) -> str:
    """Return a line of the table."""
    text = f"{row['case']:28} {row['provider']:9} "
    if "ms" not in row:
        return text + f"{row['status']} {row.get('message', row.get('error', ''))}"
    text += f"{row['ms']:9.3f} ms {row['tflops']:7.1f} TFLOP/s {row['gbps']:7.0f} GB/s"
    return text + (f" {row['gbps'] / copy:5.2f} of copy" if copy else "")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--cases", default="", help="comma-separated parts of case names")
    add("--providers", default=",".join(PROVIDERS), help="comma-separated")
    add("--rounds", type=int, default=3, help="turns that the providers of a case take")
    add("--rep", type=float, default=60.0, help="milliseconds of each measurement")
    add("--json", type=Path, help="write all numbers there")
    add("--dry-run", action="store_true", help="tiny problems on the CPU, to try the script")
    arguments = parser.parse_args()
    device = "cpu" if arguments.dry_run else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device; --dry-run tries the script on a CPU", file=sys.stderr)
        return 2
    # the check is fp32, not TF32
    torch.set_float32_matmul_precision("highest")
    timer = Timer(device, 20.0, arguments.rep)
    parts = [part for part in arguments.cases.split(",") if part]
    copy = copy_gbps(timer)
    results: Row = {"machine": describe(device), "copy_gbps": copy, "results": []}
    print(results["machine"], f"copy {copy} GB/s")
    for problem in PROBLEMS:
        if parts and not any(part in problem.name for part in parts):
            continue
        if arguments.dry_run:
            problem = replace(problem, batch=2, new=min(problem.new, 3), keys=70, heads=4)
        rows = measure(problem, arguments.providers.split(","), timer, arguments.rounds)
        print(*(tell(row, copy) for row in rows), sep="\n", flush=True)
        results["results"] += rows
        if arguments.json:  # a run that is cut short leaves what it has
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    mine = [row for row in results["results"] if row["provider"] == "ours"]
    return 0 if all(row["status"] == "ok" for row in mine) else 1


if __name__ == "__main__":
    sys.exit(main())
