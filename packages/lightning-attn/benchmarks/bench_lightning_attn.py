"""Benchmark of lightning-attn beside its rivals: check first, then time, in turns.

    python benchmarks/bench_lightning_attn.py --json h200.json --plot h200.png
    python benchmarks/bench_lightning_attn.py --cases grid --providers ours,fla
    python benchmarks/bench_lightning_attn.py --from-json h200.json --plot h200.png
    python benchmarks/bench_lightning_attn.py --bounds
    python benchmarks/bench_lightning_attn.py --dry-run              tiny, on the CPU

The floor of a pass is its inputs read once and its outputs written once, at the copy bandwidth of
the same run. flash-linear-attention runs where ``fla`` is on the path; OpenNLPLab's package, which
has this one's import name, where OPENNLPLAB_LIGHTNING_ATTN names the folder it lies in.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import platform
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cases import DECODE, LONG, PROBLEMS, DecodeProblem, Problem
from providers import PROVIDERS, UnsupportedError, copies_of, reference
from torch import Tensor

Row = dict[str, Any]
# largest relative error (Frobenius) of a whole tensor
TOLERANCE = 1.5e-2
COPY_BYTES = 4 * 2**30


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--cases", default="", help="comma-separated substrings of case or family names")
    add("--providers", default=",".join(PROVIDERS))
    add("--warmup", type=float, default=20.0, help="milliseconds before each measurement")
    add("--rep", type=float, default=60.0, help="milliseconds of each measurement")
    add("--rounds", type=int, default=3, help="turns that the providers of a case take")
    add("--json", type=Path, help="write all numbers there")
    add("--plot", type=Path, help="draw the grid and the crossover there")
    add("--from-json", type=Path, help="measure nothing: report and plot this file")
    add("--bounds", action="store_true", help="print both bounds of each case, as Markdown")
    add("--dry-run", action="store_true", help="tiny problems on the CPU, to try the script")
    return parser.parse_args()


def describe(device: str) -> Row:
    """Return what the numbers depend on: machine, versions, date."""
    from importlib.metadata import PackageNotFoundError, version

    found: Row = {
        "device": platform.machine(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    for name in ("triton", "lightning-attn", "flash-linear-attention"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"device": properties.name, "multiprocessors": properties.multi_processor_count}
    return found


class Timer:
    """Median time of a call in milliseconds; one wall-clock call on a CPU."""

    def __init__(self, device: str, warmup: float, rep: float) -> None:
        self.device, self.warmup, self.rep = device, warmup, rep

    def __call__(self, run: Callable[[], Any], graph: bool = False) -> float:
        if self.device == "cpu":
            import time

            start = time.perf_counter()
            run()
            return (time.perf_counter() - start) * 1e3
        from triton.testing import do_bench, do_bench_cudagraph

        if graph:
            return float(do_bench_cudagraph(run, rep=self.rep, return_mode="median"))
        # clears the second-level cache before every run
        return float(do_bench(run, warmup=self.warmup, rep=self.rep, return_mode="median"))


def copy_gbps(timer: Timer) -> float:
    """Return bytes read plus written per second of a device-to-device copy, in GB/s."""
    size = COPY_BYTES if timer.device == "cuda" else 2**20
    source = torch.empty(size // 4, device=timer.device)
    target = torch.empty_like(source)
    return 2.0 * size / timer(lambda: target.copy_(source)) / 1e6


def make(problem: Problem, device: str) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Draw ``([q, k, v], dout, decay, cu_seqlens)``."""
    from lightning_attn import build_slopes

    generator = torch.Generator(device=device).manual_seed(0)
    leading = (problem.tokens,) if problem.packed else (problem.batch, problem.tokens)

    def draw() -> Tensor:
        shape = (*leading, problem.heads, problem.d)
        return torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)

    ends = [sum(problem.lengths[:i]) for i in range(problem.batch + 1)]
    starts = torch.tensor(ends, dtype=torch.int32, device=device)
    return [draw(), draw(), draw()], draw(), build_slopes(problem.heads).to(device), starts


def passes_of(function: Any, inputs: list[Tensor], dout: Tensor) -> dict[str, Callable[[], Any]]:
    """Return a call for each pass; the graph of the backward is kept."""
    with torch.no_grad():
        plain = copies_of(inputs, False)
    leaves = copies_of(inputs, True)
    kept: dict[str, Tensor] = {}

    def forward() -> Tensor:
        with torch.no_grad():
            return function(*plain)

    def backward() -> tuple[Tensor, ...]:
        if "out" not in kept:
            kept["out"] = function(*leaves)
        return torch.autograd.grad(kept["out"], leaves, dout, retain_graph=True)

    def train() -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(*leaves), leaves, dout)

    return {"fwd": forward, "bwd": backward, "train": train}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    difference = actual.detach().reshape(expected.shape).float() - expected
    return float(difference.norm() / expected.norm())


def measure(problem: Problem, names: list[str], timer: Timer, rounds: int) -> list[Row]:
    """Check, then time, every provider on one problem."""
    inputs, dout, decay, starts = make(problem, timer.device)
    needs_grad = "bwd" in problem.passes
    expected = reference(problem, inputs, dout if needs_grad else None, decay)
    rows: list[Row] = []
    ready: dict[str, dict[str, Callable[[], Any]]] = {}
    for name in names:
        row: Row = {"provider": name, "status": "ok"}
        try:
            calls = passes_of(PROVIDERS[name](problem, decay, starts), inputs, dout)
            results = [calls["fwd"](), *(calls["bwd"]() if needs_grad else ())]
            errors = [relative_error(a, b) for a, b in zip(results, expected, strict=True)]
            row["errors"] = errors
            # written so that NaN fails
            if not all(error <= TOLERANCE for error in errors):
                row["status"] = "wrong"
            ready[name] = calls
        except (UnsupportedError, ImportError) as reason:
            row |= {"status": "skipped", "message": str(reason)}
        except Exception as error:  # a rival's failure is a result, not an end
            row |= {"status": "failed", "message": f"{type(error).__name__}: {error}"[:300]}
        if row["status"] not in ("ok", "skipped"):
            print(f"  {problem.name}: {name} is {row['status']}: {row}", flush=True)
        for one in problem.passes:
            case = f"{problem.name}-{one}"
            base = {"case": case, "pass": one, "family": problem.family, "heads": problem.heads}
            base |= {"tokens": problem.tokens, "schedule": problem.schedule}
            rows.append({**base, **row, "rounds_ms": []})
    del expected
    for one in problem.passes:
        timed = [row for row in rows if row["pass"] == one and row["status"] == "ok"]
        for turn in range(rounds):
            # nobody always runs after the same neighbour
            for row in timed[turn % len(timed) :] + timed[: turn % len(timed)] if timed else []:
                row["rounds_ms"].append(timer(ready[row["provider"]][one]))
        for row in timed:
            row["ms"] = statistics.median(row["rounds_ms"])
    return rows


def measure_decode(problem: DecodeProblem, timer: Timer) -> Row:
    """Time a decoding step as replays of a CUDA graph."""
    from lightning_attn import (
        build_slopes,
        lightning_attention_decode_reference,
        lightning_attn_decode,
    )

    b, h, d, n = problem.batch, problem.heads, problem.d, problem.new_tokens
    device = timer.device
    q, k, v = (torch.randn(b, n, h, d, device=device, dtype=torch.bfloat16) for _ in range(3))
    cache = torch.randn(b, h, d, d, device=device)
    slots = torch.arange(b, dtype=torch.int32, device=device)
    decay, out = build_slopes(h).to(device), torch.empty_like(v)
    few = min(b, 4)
    mine, theirs = cache[:few].clone(), cache[:few].double()
    given = [t[:few] for t in (q, k, v)]
    got = lightning_attn_decode(*given, mine, decay, slots[:few])
    want = lightning_attention_decode_reference(
        *(t.double() for t in given), theirs, decay, slots[:few]
    )
    right = relative_error(got, want.float()) <= TOLERANCE
    ms = timer(
        lambda: lightning_attn_decode(q, k, v, cache, decay, slots, out=out),
        graph=device == "cuda",
    )
    status = "ok" if right else "wrong"
    return {"case": problem.name, "status": status, "ms": ms, "gbps": problem.bytes / ms / 1e6}


def measure_memory(device: str) -> Row:
    """Run a million tokens forward, and return the peak memory beyond inputs and output."""
    if device == "cpu":
        return {}
    from lightning_attn import lightning_attn_func

    inputs, _, decay, _ = make(LONG, device)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    found: Row = {"case": LONG.name, "tokens": LONG.tokens}
    for schedule in ("sequential", "parallel"):
        torch.cuda.reset_peak_memory_stats()
        out, _ = lightning_attn_func(*inputs, decay, schedule=schedule)
        torch.cuda.synchronize()
        extra = torch.cuda.max_memory_allocated() - before - out.numel() * out.element_size()
        found[f"{schedule}_extra_bytes"] = extra
        del out
    return found


def table(results: Row) -> str:
    """Return a row per case: each provider's time, and ours over the floor."""
    bandwidth = results["copy_gbps"]
    names = [n for n in PROVIDERS if any(r["provider"] == n for r in results["results"])]
    lines = ["| case | floor ms | " + " | ".join(f"{n} ms" for n in names) + " | ours / floor |"]
    lines.append("|---" * (len(names) + 3) + "|")
    known = {problem.name: problem for problem in PROBLEMS}
    cases = dict.fromkeys(row["case"] for row in results["results"])
    for case in cases:
        rows = {r["provider"]: r for r in results["results"] if r["case"] == case}
        name, _, one = case.rpartition("-")
        floor = known[name].bytes(one) / bandwidth / 1e6
        cells = [f"{rows[n]['ms']:.3f}" if "ms" in rows.get(n, {}) else "" for n in names]
        ratio = f"{rows['ours']['ms'] / floor:.2f}" if "ms" in rows.get("ours", {}) else ""
        lines.append(f"| {case} | {floor:.3f} | " + " | ".join(cells) + f" | {ratio} |")
    for row in results["decode"]:
        share = row["gbps"] / bandwidth
        lines.append(f"\n{row['case']}: {row['ms'] * 1e3:.1f} µs, {share:.2f} of copy bandwidth")
    if results["memory"]:
        lines.append(f"\n{results['memory']}")
    return "\n".join(lines)


def bounds() -> str:
    """Return both bounds of each case: bytes at 4.3 TB/s, products at 700 TFLOP/s."""
    lines = [
        "| case | GB | at 4.3 TB/s, ms | GFLOP | at 700 TFLOP/s, ms |",
        "|---|---|---|---|---|",
    ]
    for problem in PROBLEMS:
        for one in problem.passes:
            size, work = problem.bytes(one), problem.flops(one)
            lines.append(
                f"| {problem.name}-{one} | {size / 1e9:.3f} | {size / 4.3e9:.3f} "
                f"| {work / 1e9:.1f} | {work / 7e11:.3f} |"
            )
    return "\n".join(lines)


def draw(results: Row, path: Path) -> None:
    """Draw the grid as bars, and the crossover as lines."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 4, figsize=(18, 4))
    for axis, one in zip(axes, ("fwd", "bwd", "train"), strict=False):
        rows = [r for r in results["results"] if r["family"] == "grid" and r["pass"] == one]
        names = list(dict.fromkeys(r["provider"] for r in rows if "ms" in r))
        cases = list(dict.fromkeys(r["case"] for r in rows))
        for place, name in enumerate(names):
            times = {r["case"]: r["ms"] for r in rows if r["provider"] == name and "ms" in r}
            at = [i + 0.8 * place / len(names) for i, c in enumerate(cases) if c in times]
            heights = [times[c] for c in cases if c in times]
            axis.bar(at, heights, 0.75 / len(names), label=name)
        labels = [c.rpartition("-")[0].replace("-d128", "") for c in cases]
        axis.set_xticks(range(len(cases)), labels, rotation=30, fontsize=7)
        axis.set_yscale("log")
        axis.set_title(f"{one}, ms")
        if names:
            axis.legend(fontsize=7)
    for schedule in ("sequential", "parallel"):
        rows = [r for r in results["results"] if r.get("schedule") == schedule and "ms" in r]
        for tokens in sorted({r["tokens"] for r in rows}):
            part = [(r["heads"], r["ms"]) for r in rows if r["tokens"] == tokens]
            axes[3].plot(*zip(*sorted(part), strict=True), label=f"{schedule}, {tokens} tokens")
    axes[3].set(title="one sequence, ms by heads", xscale="log", yscale="log")
    if axes[3].lines:
        axes[3].legend(fontsize=7)
    figure.suptitle(f"{results['machine']['device']}, {results['machine']['date']}, bf16")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def run(arguments: argparse.Namespace) -> Row:
    """Measure what the arguments ask for."""
    device = "cpu" if arguments.dry_run else "cuda"
    # the reference is fp32, not TF32
    torch.set_float32_matmul_precision("highest")
    timer = Timer(device, arguments.warmup, arguments.rep)
    parts = [part for part in arguments.cases.split(",") if part]
    names = [name for name in arguments.providers.split(",") if name]

    def wanted(*texts: str) -> bool:
        return not parts or any(part in text for part in parts for text in texts)

    results: Row = {"machine": describe(device), "copy_gbps": copy_gbps(timer), "results": []}
    results |= {"decode": [], "memory": {}}
    print(results["machine"], f"copy {results['copy_gbps']:.0f} GB/s", flush=True)
    for problem in PROBLEMS:
        if not wanted(problem.name, problem.family):
            continue
        chosen = [n for n in names if problem.family != "crossover" or n == "ours"]
        small = problem.shrunk() if arguments.dry_run else problem
        results["results"] += measure(small, chosen, timer, arguments.rounds)
        for row in results["results"][-len(chosen) * len(problem.passes) :]:
            shown = f"{row['ms']:.3f} ms" if "ms" in row else row["status"]
            print(f"{row['case']} {row['provider']}: {shown}", flush=True)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    for decode in DECODE:
        if wanted(decode.name, "decode"):
            results["decode"].append(
                measure_decode(decode.shrunk() if arguments.dry_run else decode, timer)
            )
    if wanted("memory"):
        results["memory"] = measure_memory(device)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return results


def main() -> int:
    arguments = parse_arguments()
    if arguments.bounds:
        print(bounds())
        return 0
    if arguments.from_json is not None:
        results = json.loads(arguments.from_json.read_text())
    elif not arguments.dry_run and not torch.cuda.is_available():
        print("no CUDA device; --dry-run tries the script on a CPU", file=sys.stderr)
        return 2
    else:
        results = run(arguments)
    print("\n" + table(results))
    if arguments.plot is not None:
        draw(results, arguments.plot)
    mine = [row for row in results["results"] if row["provider"] == "ours"] + results["decode"]
    return 0 if all(row["status"] in ("ok", "skipped") for row in mine) else 1


if __name__ == "__main__":
    sys.exit(main())
