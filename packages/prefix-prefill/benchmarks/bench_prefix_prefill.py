"""Benchmark of prefix-prefill beside its rivals: check first, then time, in turns.

    python benchmarks/bench_prefix_prefill.py --json h200.json --plot h200.png
    python benchmarks/bench_prefix_prefill.py --cases decode,write --providers ours,fa3
    python benchmarks/bench_prefix_prefill.py --from-json h200.json --markdown
    python benchmarks/bench_prefix_prefill.py --bounds        both bounds of each case
    python benchmarks/bench_prefix_prefill.py --dry-run       tiny, on the CPU

Prefill is told in TFLOP/s, 4 H D for each pair of a query and a key that it sees; decoding in GB/s
of keys and values, and as a share of the same run's copy bandwidth (bytes read plus written).
FlashAttention-3 runs where a module ``fa3`` is on the path, FlashInfer and vLLM where they are
installed.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cases import WRITES, Problem, select
from providers import PROVIDERS, UnsupportedError, judge, make_inputs
from report import bounds, draw, markdown, show

Row = dict[str, Any]

# below this a launch costs more than the work, and only a CUDA graph shows the work
GRAPH_BELOW_MS = 0.05
COPY_BYTES = 4 * 2**30


class Timer:
    """Median time of one call in milliseconds."""

    def __init__(self, device: str, warmup: float, rep: float) -> None:
        self.device, self.warmup, self.rep = device, warmup, rep

    def __call__(self, run: Callable[[], Any]) -> float:
        if self.device == "cpu":
            start = time.perf_counter()
            run()
            return (time.perf_counter() - start) * 1e3
        from triton.testing import do_bench, do_bench_cudagraph

        # clears the second-level cache before every run
        took = do_bench(run, warmup=self.warmup, rep=self.rep, return_mode="median")
        if took < GRAPH_BELOW_MS:
            took = do_bench_cudagraph(run, rep=self.rep, return_mode="median")
        return float(took)


def copy_gbps(timer: Timer) -> float | None:
    """Measure the bandwidth of a device-to-device copy, bytes read plus written."""
    if timer.device == "cpu":
        return None
    source = torch.randn(COPY_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    return 2.0 * COPY_BYTES / timer(lambda: target.copy_(source)) / 1e6


def measure(problem: Problem, names: list[str], timer: Timer, rounds: int) -> list[Row]:
    """Check every provider, then time those that are right, in turns."""
    inputs = make_inputs(problem, timer.device)
    rows: dict[str, Row] = {}
    runs: dict[str, Callable[[], Any]] = {}
    for name in names:
        row: Row = {"case": problem.name, "family": problem.family, "provider": name}
        try:
            run = PROVIDERS[name].prepare(problem, inputs)
            right, error = judge(problem, inputs, run())
        except UnsupportedError as reason:
            row |= {"status": "skipped", "message": str(reason)}
        except Exception as reason:  # a rival that fails is told of, and the rest goes on
            first = (str(reason).splitlines() or [""])[0]
            row |= {"status": "failed", "message": f"{type(reason).__name__}: {first}"}
        else:
            row |= {"status": "ok" if right else "wrong", "error": error}
            if right:
                runs[name] = run
        rows[name] = row
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(timer(run))
    for name, took in times.items():
        ms = statistics.median(took)
        rows[name] |= {"ms": ms, "tflops": problem.flops / ms / 1e9}
        rows[name]["gbps"] = problem.bytes / ms / 1e6
    return list(rows.values())


def measure_writes(timer: Timer, tokens: int) -> Row:
    """Time the writing of new keys and values into a cache."""
    from prefix_prefill import reshape_and_cache

    device, heads_k, head_dim, page = timer.device, 8, 128, 16
    tokens = tokens if device == "cuda" else 32
    blocks = 4 * tokens // page
    caches = [
        torch.zeros(blocks, page, heads_k, head_dim, device=device, dtype=torch.bfloat16)
        for _ in "kv"
    ]
    new = [
        torch.randn(tokens, heads_k, head_dim, device=device, dtype=torch.bfloat16) for _ in "kv"
    ]
    slots = torch.randperm(blocks * page, device=device)[:tokens]
    ms = timer(lambda: reshape_and_cache(new[0], new[1], caches[0], caches[1], slots))
    right = torch.equal(caches[0].flatten(0, 1)[slots], new[0])
    right &= torch.equal(caches[1].flatten(0, 1)[slots], new[1])
    moved = 4.0 * new[0].numel() * 2
    return {
        "case": f"write-{tokens}",
        "family": "write",
        "provider": "ours",
        "ms": ms,
        "status": "ok" if right else "wrong",
        "gbps": moved / ms / 1e6,
    }


def host_microseconds(timer: Timer) -> Row:
    """Measure the CPU time of one warm call of decoding, the launch included."""
    problem = Problem("host", "host", ((1, 63),) * 8)
    inputs = make_inputs(problem, timer.device)
    run = PROVIDERS["ours-unsplit"].prepare(problem, inputs)
    took = []
    for i in range(400 if timer.device == "cuda" else 5):
        start = time.perf_counter_ns()
        run()
        took.append(time.perf_counter_ns() - start)
        if timer.device == "cuda" and i % 20 == 19:
            # never let the launch queue fill: the host would wait for the device
            torch.cuda.synchronize()
    middle = statistics.median(took[len(took) // 4 :]) / 1e3
    return {"case": "host", "family": "host", "provider": "ours", "status": "ok", "us": middle}


def describe(device: str) -> Row:
    """Return what the numbers depend on: machine, versions, date."""
    import prefix_prefill
    import triton

    found: Row = {
        "device": platform.machine(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "prefix_prefill": prefix_prefill.__version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"device": properties.name, "cuda": torch.version.cuda}
    return found


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    names = ",".join(PROVIDERS)
    add("--cases", default="", help="comma-separated parts of case names, 'write' and 'host' too")
    add("--providers", default=names, help=f"comma-separated; default: {names}")
    add("--warmup", type=float, default=20.0, help="milliseconds before each measurement")
    add("--rep", type=float, default=60.0, help="milliseconds of each measurement")
    add("--rounds", type=int, default=3, help="turns that the providers of a case take")
    add("--json", type=Path, help="write all numbers there")
    add("--plot", type=Path, help="draw them there")
    add("--from-json", type=Path, help="measure nothing: report and plot this file")
    add("--markdown", action="store_true", help="print the tables of README and NOTES, too")
    add("--bounds", action="store_true", help="print both bounds of each case, as Markdown")
    add("--dry-run", action="store_true", help="tiny problems on the CPU, to try the script")
    return parser.parse_args()


def run(arguments: argparse.Namespace) -> Row:
    """Measure what the arguments ask for."""
    device = "cpu" if arguments.dry_run else "cuda"
    # the check is fp32, not TF32
    torch.set_float32_matmul_precision("highest")
    timer = Timer(device, arguments.warmup, arguments.rep)
    parts = [part for part in arguments.cases.split(",") if part]
    names = []
    for name in arguments.providers.split(","):
        reason = PROVIDERS[name].unavailable(device)
        if reason is None:
            names.append(name)
        else:
            print(f"provider {name} skipped: {reason}")
    results: Row = {"machine": describe(device), "copy_gbps": copy_gbps(timer), "results": []}
    rounds = 1 if arguments.dry_run else arguments.rounds
    for problem in select(parts):
        small = problem.shrunk() if arguments.dry_run else problem
        results["results"] += measure(small, names, timer, rounds)
        done = [row for row in results["results"] if row["case"] == problem.name]
        text = "  ".join(
            f"{row['provider']} {row['ms']:.3f} ms"
            if "ms" in row
            else f"{row['provider']} {row['status']}"
            for row in done
        )
        print(f"{problem.name}: {text}", flush=True)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        if arguments.json:  # a run that is cut short leaves what it has
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    if not parts or "write" in parts:
        results["results"] += [measure_writes(timer, tokens) for tokens in WRITES]
    if not parts or "host" in parts:
        results["results"].append(host_microseconds(timer))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return results


def main() -> int:
    arguments = parse_arguments()
    if arguments.bounds:
        print(bounds())
        return 0
    if arguments.from_json:
        results = json.loads(arguments.from_json.read_text())
    elif not arguments.dry_run and not torch.cuda.is_available():
        print("no CUDA device; --dry-run tries the script on a CPU", file=sys.stderr)
        return 2
    else:
        results = run(arguments)
    show(results)
    if arguments.markdown:
        print(*markdown(results), sep="\n\n")
    if arguments.plot:
        draw(results, arguments.plot)
    mine = [row for row in results["results"] if row["provider"].startswith("ours")]
    return 0 if all(row["status"] == "ok" for row in mine) else 1


if __name__ == "__main__":
    sys.exit(main())
