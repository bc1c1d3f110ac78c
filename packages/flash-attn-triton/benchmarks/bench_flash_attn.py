"""Benchmark of flash-attn-triton beside its rivals: check first, then time, in turns.

    python benchmarks/bench_flash_attn.py --quick                      the gate's cases
    python benchmarks/bench_flash_attn.py --json h200.json --plot h200.png
    python benchmarks/bench_flash_attn.py --cases packed,host --providers ours,fa3
    python benchmarks/bench_flash_attn.py --from-json h200.json --plot h200.png
    python benchmarks/bench_flash_attn.py --bounds                     both bounds of each case
    python benchmarks/bench_flash_attn.py --dry-run                    tiny, on the CPU

TFLOP/s by the usual count: forward 4 B H Sq Sk D, halved when causal; backward 2.5 times that.
FlashAttention-3 runs where a module ``fa3`` is on the path (see ``providers.Fa3``).
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

# the compiles run in processes of their own here (see precompile); read when torch is imported
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import plot
import report
import torch
from cases import Problem, select
from checks import Inputs, judge, make_inputs, reference
from children import first_call, precompile, run_child
from providers import LABELS, PROVIDERS, Prepared, UnsupportedError
from timing import Timer, ceilings, host_microseconds, synchronize

Row = dict[str, Any]

# all of one size, small enough for the launch to be all there is
HOST_PROBLEM = Problem("host", "host", (128,), 16, 16, 128, True)
HOST_PACKED = Problem("host-packed", "host", (64, 64), 16, 16, 128, True, packed=True)


def parse_arguments() -> argparse.Namespace:
    names = ",".join(PROVIDERS)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--cases", default="", help="comma-separated substrings of case names; default: all")
    add("--providers", default=names, help=f"comma-separated; default: {names}")
    add("--quick", action="store_true", help="only the gate's cases: d128, 4k and 16k")
    add("--warmup", type=float, default=20.0, help="milliseconds before each measurement")
    add("--rep", type=float, default=60.0, help="milliseconds of each measurement")
    add("--rounds", type=int, default=3, help="turns that the providers of a case take")
    jobs = max(1, (os.cpu_count() or 1) - 4)
    add("--jobs", type=int, default=jobs, help="processes that compile ahead; 0: none")
    add("--json", type=Path, help="write all numbers there")
    add("--plot", type=Path, help="draw <stem>-forward.png and <stem>-backward.png there")
    add("--from-json", type=Path, help="measure nothing: report and plot this file")
    add("--list", action="store_true", help="print the case names")
    add("--bounds", action="store_true", help="print both bounds of each case, as Markdown")
    add("--dry-run", action="store_true", help="tiny problems on the CPU, to try the script")
    add("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    unknown = set(_split(arguments.providers)) - set(PROVIDERS)
    if unknown:
        parser.error(f"unknown providers {sorted(unknown)}; there are {names}")
    return arguments


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def describe(device: str) -> Row:
    """Return what the numbers depend on: machine, versions, date."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    try:
        import flash_attn_triton

        package_version = flash_attn_triton.__version__
    except Exception:  # absence is reported with the provider
        package_version = None
    found: Row = {
        "device": platform.machine(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "flash_attn_triton": package_version,
        "torch": torch.__version__,
        "triton": triton_version,
        "python": platform.python_version(),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "device": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return found


def check(
    problem: Problem, passes: tuple[str, ...], prepared: Prepared, inputs: Inputs, expected: Any
) -> dict[str, tuple[str, Row]]:
    """Run every pass once; return status and errors by pass."""
    if prepared.operands is not None:
        expected = reference(problem, *prepared.operands)
    dtype = problem.dtype if prepared.operands is not None else "bf16"
    results: dict[str, tuple[str, Row]] = {}
    for one in passes:
        run: Any = prepared.forward if one == "fwd" else prepared.backward
        if run is None:
            results[one] = ("skipped", {"message": "no backward"})
            continue
        names = ("out",) if one == "fwd" else ("dq", "dk", "dv")
        try:
            with prepared.context():
                got = run()
            tensors = (got,) if one == "fwd" else got
            right, errors = judge(dict(zip(names, tensors, strict=True)), expected, dtype)
        except Exception as error:
            results[one] = ("failed", {"message": _first_line(error)})
            continue
        results[one] = ("ok" if right else "wrong", {"errors": errors})
    return results


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:300]


def measure(
    problem: Problem, passes: tuple[str, ...], names: list[str], timer: Timer, rounds: int
) -> list[Row]:
    """Check, then time, every provider on one problem."""
    device = timer.device
    base = {"family": problem.family, "lengths": problem.lengths, "heads_q": problem.heads_q}
    base |= {"heads_k": problem.heads_k, "head_dim": problem.head_dim, "causal": problem.causal}
    rows: list[Row] = []
    ready: dict[str, Prepared] = {}
    status: dict[str, tuple[str, Row]]
    inputs = make_inputs(problem, device)
    backward = "bwd" in passes
    expected = reference(problem, inputs.q, inputs.k, inputs.v, inputs.dout if backward else None)
    for name in names:
        try:
            ready[name] = PROVIDERS[name].prepare(problem, inputs, backward)
            status = check(problem, passes, ready[name], inputs, expected)
            synchronize(device)
        except UnsupportedError as reason:
            status = dict.fromkeys(passes, ("skipped", {"message": str(reason)}))
        except Exception as error:  # a rival's failure is a result, not an end
            status = dict.fromkeys(passes, ("failed", {"message": _first_line(error)}))
        for one in passes:
            what, detail = status[one]
            row: Row = {"case": problem.case(one), "pass": one, "provider": name, "status": what}
            rows.append({**base, **row, **detail})
            if what not in ("ok", "skipped"):
                print(f"  {problem.case(one)}: {name} is {what}: {detail}", flush=True)
    del expected
    for one in passes:
        timed = [row for row in rows if row["pass"] == one and row["status"] == "ok"]
        for row in timed:
            row["rounds_ms"] = []
        for turn in range(rounds):
            # nobody always runs after the same neighbour
            for row in timed[turn % len(timed) :] + timed[: turn % len(timed)] if timed else []:
                if row["status"] != "ok":
                    continue
                prepared = ready[row["provider"]]
                run: Any = prepared.forward if one == "fwd" else prepared.backward
                try:
                    with prepared.context():
                        row["rounds_ms"].append(timer(run, graph=one == "fwd"))
                except Exception as error:
                    row |= {"status": "failed", "message": _first_line(error)}
                    print(f"  {row['case']}: {row['provider']} failed: {row['message']}")
        for row in timed:
            if row["status"] == "ok":
                row["ms"] = statistics.median(row["rounds_ms"])
                row["tflops"] = problem.flops(one) / row["ms"] / 1e9
    return rows


def measure_host(case: str, names: list[str], device: str) -> list[Row]:
    """Time what the host does in one warm call, or in the first ones of a process."""
    if case == "host-first-call":
        return [first_call()] if device == "cuda" and "ours" in names else []
    rows: list[Row] = []
    problem = HOST_PACKED if "packed" in case else HOST_PROBLEM
    inputs = make_inputs(problem, device)
    for name in names:
        row: Row = {"case": case, "provider": name, "status": "ok"}
        try:
            prepared = PROVIDERS[name].prepare(problem, inputs, backward="packed" not in case)
            run: Any
            if case == "host-fwd-grad":
                run = prepared.forward_grad
            else:
                run = prepared.backward if case == "host-bwd" else prepared.forward
            if run is None:
                continue
            with prepared.context():
                row |= host_microseconds(run, device)
        except UnsupportedError:
            continue
        except Exception as error:
            row |= {"status": "failed", "message": _first_line(error)}
        rows.append(row)
    return rows


def available(names: list[str], device: str) -> list[str]:
    """Return the providers that can run, and say why the others cannot."""
    kept = []
    for name in names:
        reason = PROVIDERS[name].unavailable(device)
        if reason is None:
            kept.append(name)
        else:
            print(f"provider {name} skipped: {reason}")
    return kept


def show(results: Row) -> None:
    """Print everything that was measured."""
    names = [n for n in PROVIDERS if any(row["provider"] == n for row in results["results"])]
    if results["results"]:
        print("\n" + report.results_table(results["results"], names))
        if results["means"]:
            print("\n" + report.means_table(results["means"]))
    if results["host"]:
        print("\n" + report.host_table(results["host"]))
    print("\n" + ", ".join(f"{key} {value}" for key, value in results["machine"].items()))
    if results["ceilings"]:
        print(", ".join(f"{key} {value:.0f}" for key, value in results["ceilings"].items()))


def save(results: Row, path: Path | None) -> None:
    """Write the results so far; a run that is cut short leaves what it has."""
    names = list(PROVIDERS)
    results["means"] = report.means(results["results"], names)
    if path is not None:
        path.write_text(json.dumps(results, indent=1) + "\n")


def main() -> int:
    arguments = parse_arguments()
    if arguments.child is not None:
        return run_child(arguments.child)
    if arguments.list:
        problems, host = select(_split(arguments.cases), arguments.quick)
        print("\n".join([p.case(one) for p, passes in problems for one in passes] + host))
        return 0
    if arguments.bounds:
        print(report.bounds_table())
        return 0
    if arguments.from_json is not None:
        results = json.loads(arguments.from_json.read_text())
        show(results)
    else:
        if not arguments.dry_run and not torch.cuda.is_available():
            print("no CUDA device; --dry-run tries the script on a CPU", file=sys.stderr)
            return 2
        results = run(arguments)
    if arguments.plot is not None:
        for path in plot.draw(results, arguments.plot, LABELS):
            print(f"wrote {path}")
    fine = ("ok", "skipped")
    mine = [row for row in results["results"] if row["provider"] == "ours"]
    return 0 if all(row["status"] in fine for row in mine) else 1


def run(arguments: argparse.Namespace) -> Row:
    """Measure what the arguments ask for."""
    began = time.monotonic()
    for path in (arguments.json, arguments.plot):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    device = "cpu" if arguments.dry_run else "cuda"
    # the reference is fp32, not TF32
    torch.set_float32_matmul_precision("highest")
    problems, host = select(_split(arguments.cases), arguments.quick)
    names = available(_split(arguments.providers), device)
    machine = describe(device)
    print(", ".join(f"{key} {value}" for key, value in machine.items()), flush=True)
    if device == "cuda" and arguments.jobs > 0 and len(problems) > 1:
        compiled = [name for name in names if PROVIDERS[name].compiles]
        for line in precompile(
            [(p.name, passes) for p, passes in problems], compiled, arguments.jobs
        ):
            print(line)
        print(f"[{time.monotonic() - began:5.0f} s] compiled ahead", flush=True)
    timer = Timer(device, arguments.warmup, arguments.rep)
    rounds = 1 if arguments.dry_run else arguments.rounds
    settings = {"warmup_ms": arguments.warmup, "rep_ms": arguments.rep, "rounds": rounds}
    results: Row = {
        "machine": machine,
        "settings": settings,
        "ceilings": ceilings(timer),
        "results": [],
        "host": [],
    }
    for problem, passes in problems:
        chosen = [name for name in names if name != "ours-bf16" or problem.dtype == "fp8"]
        small = problem.shrunk() if arguments.dry_run else problem
        try:
            rows = measure(small, passes, chosen, timer, rounds)
        except Exception as error:  # a device that faulted; what is measured is kept
            print(f"stopped at {problem.name}: {_first_line(error)}", flush=True)
            host = []
            break
        results["results"] += rows
        for one in passes:
            here = [row for row in rows if row["pass"] == one]
            text = "  ".join(
                f"{row['provider']} {row['tflops']:.0f}"
                if row["status"] == "ok"
                else f"{row['provider']} {row['status']}"
                for row in here
            )
            print(f"[{time.monotonic() - began:5.0f} s] {problem.case(one)}: {text}", flush=True)
        save(results, arguments.json)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    for case in host:
        results["host"] += measure_host(case, names, device)
    save(results, arguments.json)
    show(results)
    print(f"took {time.monotonic() - began:.0f} s")
    return results


if __name__ == "__main__":
    sys.exit(main())
