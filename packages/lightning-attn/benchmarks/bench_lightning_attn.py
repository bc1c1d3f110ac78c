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
from alone import (
    TOLERANCE,
    Row,
    Timer,
    copy_gbps,
    make,
    measure_decode,
    measure_first_call,
    measure_host,
    measure_memory,
    relative_error,
)
from cases import DECODE, PROBLEMS, Problem
from providers import PROVIDERS, UnsupportedError, copies_of, reference
from torch import Tensor

# passes shorter than this are timed as replays of a CUDA graph, in ms
SHORT = 0.05


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
    add("--from-json", type=Path, nargs="+", help="measure nothing: report and plot these files")
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
        # the schedules are compared without the host's time
        graph = problem.family == "crossover" or problem.bytes(one) / 4.3e9 < SHORT
        graph = graph and timer.device == "cuda"
        timed = [row for row in rows if row["pass"] == one and row["status"] == "ok"]
        for turn in range(rounds):
            # nobody always runs after the same neighbour
            for row in timed[turn % len(timed) :] + timed[: turn % len(timed)] if timed else []:
                try:
                    row["rounds_ms"].append(timer(ready[row["provider"]][one], graph))
                except Exception as error:  # not every rival can be captured into a graph
                    row |= {"status": "failed", "message": f"{type(error).__name__}: {error}"[:300]}
        for row in timed:
            if row["status"] == "ok":
                row["ms"] = statistics.median(row["rounds_ms"])
    return rows


def table(results: Row) -> str:
    """Return a row per case: each provider's time, and ours over the floor."""
    bandwidth = results["copy_gbps"]
    names = [n for n in PROVIDERS if any(r["provider"] == n for r in results["results"])]
    lines = [
        "| case | floor ms | "
        + " | ".join(f"{n} ms" for n in names)
        + " | ours / floor | ours / fla |"
    ]
    lines.append("|---" * (len(names) + 4) + "|")
    known = {problem.name: problem for problem in PROBLEMS}
    cases = dict.fromkeys(row["case"] for row in results["results"])
    for case in cases:
        rows = {r["provider"]: r for r in results["results"] if r["case"] == case}
        name, _, one = case.rpartition("-")
        floor = known[name].bytes(one) / bandwidth / 1e6
        cells = [f"{rows[n]['ms']:.3f}" if "ms" in rows.get(n, {}) else "" for n in names]
        ratio = f"{rows['ours']['ms'] / floor:.2f}" if "ms" in rows.get("ours", {}) else ""
        both = [rows[n]["ms"] for n in ("ours", "fla") if "ms" in rows.get(n, {})]
        share = f"{both[0] / both[1]:.2f}" if len(both) == 2 else ""
        lines.append(f"| {case} | {floor:.3f} | " + " | ".join(cells) + f" | {ratio} | {share} |")
    for row in results["decode"]:
        share = row["gbps"] / bandwidth
        lines.append(f"\n{row['case']}: {row['ms'] * 1e3:.1f} µs, {share:.2f} of copy bandwidth")
    for part in ("memory", "host"):
        if results[part]:
            lines.append(f"\n{results[part]}")
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
    results |= {"decode": [], "memory": {}, "host": {}}
    print(results["machine"], f"copy {results['copy_gbps']:.0f} GB/s", flush=True)
    for decode in DECODE:
        if wanted(decode.name, "decode"):
            results["decode"].append(
                measure_decode(decode.shrunk() if arguments.dry_run else decode, timer)
            )
    if wanted("memory"):
        results["memory"] = measure_memory(device)
    if wanted("host"):
        results["host"] = measure_host(device)
    if "first" in parts:  # when asked for alone: it compiles all anew
        results["host"]["first_call_s"] = measure_first_call()
    for problem in PROBLEMS:
        if not wanted(problem.name, problem.family):
            continue
        chosen = [n for n in names if problem.family == "grid" or n == "ours"]
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
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return results


def read(paths: list[Path]) -> Row:
    """Return the results of the first file, with cases that later ones have in their stead."""
    results, *others = (json.loads(path.read_text()) for path in paths)
    for other in others:
        new = {row["case"] for row in other["results"]}
        kept = [row for row in results["results"] if row["case"] not in new]
        results["results"] = kept + other["results"]
    return results


def main() -> int:
    arguments = parse_arguments()
    if arguments.bounds:
        print(bounds())
        return 0
    if arguments.from_json is not None:
        results = read(arguments.from_json)
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
