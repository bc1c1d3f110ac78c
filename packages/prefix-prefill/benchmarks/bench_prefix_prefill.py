"""Benchmark of prefix-prefill beside its rivals: check first, then time, in turns.

    python benchmarks/bench_prefix_prefill.py --json h200.json --plot h200.png
    python benchmarks/bench_prefix_prefill.py --cases decode,write --providers ours,fa3
    python benchmarks/bench_prefix_prefill.py --from-json h200.json --markdown
    python benchmarks/bench_prefix_prefill.py --bounds        both bounds of each case
    python benchmarks/bench_prefix_prefill.py --dry-run       tiny, on the CPU

Prefill is told in TFLOP/s, 2 H (D + Dv) for each pair of a query and a key that it sees; decoding
in GB/s of keys, values and their scales, and as a share of the same run's copy bandwidth (bytes
read plus written). ``ms`` is the time of a call before which the second-level cache was emptied, by
writing to 256 MB; what of that is still to be written back is part of it. Where it is below 250 us,
``ms_graph`` is the time of a call in a CUDA graph of many, over sets of inputs that together exceed
that cache. FlashAttention-3 runs where a module ``fa3`` is on the path, FlashInfer and vLLM where
they are installed. Kernels compile first, in processes side by side; ``--budget`` counts from then.
"""

from __future__ import annotations

import argparse
import datetime
import functools
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
from ahead import call_once, jobs_of_machine, precompile
from cases import WRITES, Problem, select
from providers import PROVIDERS, UnsupportedError, judge, make_inputs, reference
from report import bounds, draw, markdown, show
from timing import Timer, copy_gbps, host_microseconds

Row = dict[str, Any]
Runs = dict[str, Callable[[], Any]]

# seconds after which no problem is begun
BUDGET_S = 150.0


def measure(problem: Problem, names: list[str], timer: Timer, rounds: int) -> list[Row]:
    """Check every provider, then time those that are right, in turns."""
    inputs = make_inputs(problem, timer.device)
    expected = reference(problem, inputs)
    rows: dict[str, Row] = {}
    runs: Runs = {}
    for name in names:
        row: Row = {"case": problem.name, "family": problem.family, "provider": name}
        try:
            run = PROVIDERS[name].prepare(problem, inputs)
            right, error = judge(expected, run())
        except UnsupportedError as reason:
            row |= {"status": "skipped", "message": str(reason)}
        except Exception as reason:  # a rival that fails is told of, and the rest goes on
            row |= {"status": "failed", "message": _first_line(reason)}
        else:
            row |= {"status": "ok" if right else "wrong", "error": error}
            if right:
                runs[name] = run
        rows[name] = row
    del expected
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(timer(run, graph=False))
    for name, took in times.items():
        ms = statistics.median(took)
        rows[name] |= {"ms": ms, "tflops": problem.flops / ms / 1e9}
        rows[name]["gbps"] = problem.bytes / ms / 1e6
    if runs and timer.is_short(min(rows[name]["ms"] for name in runs)):
        # a rival that is a little slower has a graph, too
        runs = {name: run for name, run in runs.items() if timer.is_short(rows[name]["ms"] / 2)}
        for name, ms in measure_in_graphs(problem, runs, timer, rounds).items():
            rows[name]["ms_graph"] = ms
    return list(rows.values())


def measure_in_graphs(problem: Problem, runs: Runs, timer: Timer, rounds: int) -> dict[str, float]:
    """Time a short problem over sets of inputs that exceed the second-level cache."""
    seeds = range(1, timer.sets(problem.all_bytes))
    more = [make_inputs(problem, timer.device, seed) for seed in seeds]
    graphs: dict[str, Callable[[], float]] = {}
    for name, run in runs.items():
        try:
            others = [PROVIDERS[name].prepare(problem, inputs) for inputs in more]
            graphs[name] = timer.captured([run, *others])
        except Exception as reason:  # not every rival can be captured
            print(f"  {problem.name}: no graph of {name}: {_first_line(reason)}", flush=True)
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, replay in graphs.items():
            times[name].append(replay())
    return {name: statistics.median(took) for name, took in times.items()}


def guarded(case: str, family: str, work: Callable[[], list[Row]]) -> list[Row]:
    """Return the rows of a case; if it fails, a row that says so, and the rest goes on."""
    try:
        return work()
    except Exception as reason:
        row: Row = {"case": case, "family": family, "provider": "ours", "status": "failed"}
        return [{**row, "message": _first_line(reason)}]


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def measure_writes(timer: Timer, tokens: int) -> list[Row]:
    """Time the writing of new keys and values into a cache."""
    from prefix_prefill import reshape_and_cache

    device, heads_k, head_dim, page = timer.device, 8, 128, 16
    case = f"write-{tokens}"
    tokens = tokens if device == "cuda" else 32
    blocks = 4 * tokens // page
    moved = 4.0 * tokens * heads_k * head_dim * 2

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, heads_k, head_dim, device=device, dtype=torch.bfloat16)

    sets = []
    for _ in range(timer.sets(moved)):
        caches = [torch.zeros_like(draw(blocks, page)) for _ in "kv"]
        slots = torch.randperm(blocks * page, device=device)[:tokens]
        sets.append([draw(tokens), draw(tokens), *caches, slots])
    runs = [functools.partial(reshape_and_cache, *one) for one in sets]
    ms = timer(runs[0])
    new, caches, slots = sets[0][:2], sets[0][2:4], sets[0][4]
    right = all(torch.equal(c.flatten(0, 1)[slots], n) for c, n in zip(caches, new, strict=True))
    row: Row = {"case": case, "family": "write", "provider": "ours"}
    row |= {"status": "ok" if right else "wrong", "ms": ms, "gbps": moved / ms / 1e6}
    return [{**row, "ms_graph": timer.captured(runs)()}]


def measure_host(timer: Timer) -> list[Row]:
    """Measure the CPU time of one warm call of decoding, the launch included."""
    problem = Problem("host", "host", ((1, 63),) * 8)
    inputs = make_inputs(problem, timer.device)
    run = PROVIDERS["ours-unsplit"].prepare(problem, inputs)
    us = host_microseconds(run, timer.device)
    return [{"case": "host", "family": "host", "provider": "ours", "status": "ok", "us": us}]


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
    jobs = jobs_of_machine()
    add("--jobs", type=int, default=jobs, help="processes that compile ahead; 0: none")
    add("--budget", type=float, default=BUDGET_S, help="seconds after which nothing is begun")
    add("--json", type=Path, help="write all numbers there")
    add("--plot", type=Path, help="draw them there")
    add("--from-json", type=Path, help="measure nothing: report and plot this file")
    add("--markdown", action="store_true", help="print the tables of README and NOTES, too")
    add("--bounds", action="store_true", help="print both bounds of each case, as Markdown")
    add("--dry-run", action="store_true", help="tiny problems on the CPU, to try the script")
    add("--compile", help=argparse.SUPPRESS)
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
    problems = select(parts)
    if device == "cuda" and arguments.jobs > 0 and len(problems) > 1:
        began = time.monotonic()
        compiled = [name for name in names if PROVIDERS[name].compiles]
        for line in precompile(problems, compiled, arguments.jobs):
            print(line)
        print(f"compiled ahead in {time.monotonic() - began:.0f} s", flush=True)
    began = time.monotonic()
    rounds = 1 if arguments.dry_run else arguments.rounds
    results: Row = {"machine": describe(device), "copy_gbps": copy_gbps(timer), "results": []}
    results["settings"] = {
        "warmup_ms": arguments.warmup,
        "rep_ms": arguments.rep,
        "rounds": rounds,
        "ms": "each call after the second-level cache was emptied",
        "ms_graph": "calls in one CUDA graph, over sets of inputs that exceed that cache",
    }

    def keep(rows: list[Row]) -> None:
        results["results"] += rows
        if arguments.json:  # a run that is cut short leaves what it has
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")

    # short, and in need of a machine that does nothing else
    if not parts or "host" in parts:
        keep(guarded("host", "host", functools.partial(measure_host, timer)))
    if not parts or "write" in parts:
        for tokens in WRITES:
            work = functools.partial(measure_writes, timer, tokens)
            keep(guarded(f"write-{tokens}", "write", work))
    for problem in problems:
        if time.monotonic() - began > arguments.budget:
            print(f"out of time: {problem.name} and what follows is not measured")
            break
        small = problem.shrunk() if arguments.dry_run else problem
        work = functools.partial(measure, small, names, timer, rounds)
        rows = guarded(problem.name, problem.family, work)
        keep(rows)
        text = "  ".join(
            f"{row['provider']} {row['ms']:.3f} ms"
            if "ms" in row
            else f"{row['provider']} {row['status']}"
            for row in rows
            if row["status"] != "skipped"
        )
        print(f"[{time.monotonic() - began:4.0f} s] {problem.name}: {text}", flush=True)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    return results


def main() -> int:
    arguments = parse_arguments()
    if arguments.compile is not None:
        call_once(arguments.compile.split(";"), arguments.providers.split(","))
        return 0
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
    return 0 if all(row["status"] in ("ok", "skipped") for row in mine) else 1


if __name__ == "__main__":
    sys.exit(main())
