"""Benchmark of flash-attn-triton beside its rivals: check first, then time, in turns.

    python benchmarks/bench_flash_attn.py --quick                      the gate's cases
    python benchmarks/bench_flash_attn.py --commit HASH --json grid.json
    python benchmarks/bench_flash_attn.py --family dropout,bias --json grid.json
    python benchmarks/bench_flash_attn.py --cases packed,host --providers ours,fa3
    python benchmarks/bench_flash_attn.py --from-json grid.json --plot grid.png --documents
    python benchmarks/bench_flash_attn.py --dry-run                    tiny, on the CPU

Results of several runs of one commit on one machine share a file: a run replaces the cases that it
measured. ``--documents`` writes the tables of the documents from it.

TFLOP/s by the usual count: forward 4 B H Sq Sk D, halved when causal; backward 2.5 times that.
FlashAttention-3 runs where a module ``fa3`` is on the path (see ``rivals.Fa3``).
"""

from __future__ import annotations

import argparse
import datetime
import gc
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# the compiles run in processes of their own here (see precompile); read when torch is imported
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import documents
import plot
import report
import results as files
import torch
from cases import PROVIDERS_OF, Problem, Selected, select
from checks import Inputs, judge, make_inputs, reference
from children import first_call, precompile, run_child
from providers import Prepared, UnsupportedError
from rivals import LABELS, PROVIDERS
from timing import Timer, ceilings, host_microseconds, synchronize

Row = dict[str, Any]

# passes that take longer are measured in two turns: their times differ little
LONG_MS = 5.0
# turns of the providers in a host case
HOST_ROUNDS = 5
# seconds after which no problem is begun
BUDGET_S = 450.0

# all of one size, small enough for the launch to be all there is
HOST_PROBLEM = Problem("host", "host", (128,), 16, 16, 128, True)
HOST_SMALL = Problem("host-small", "host", (128,), 8, 8, 64, False)
HOST_PACKED = Problem("host-packed", "host", (64, 64), 16, 16, 128, True, packed=True)
HOST_PROVIDERS = ("ours", "portable", "fa3", "cudnn", "fa2")


def parse_arguments() -> argparse.Namespace:
    names = ",".join(PROVIDERS)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--cases", default="", help="comma-separated substrings of case names; default: all")
    add("--family", default="", help=f"comma-separated, of {','.join(PROVIDERS_OF)},host")
    add("--providers", default=names, help=f"comma-separated; default: {names}")
    add("--quick", action="store_true", help="only the gate's cases: d128, 4k and 16k")
    add("--warmup", type=float, default=20.0, help="milliseconds before each measurement")
    add("--rep", type=float, default=60.0, help="milliseconds of each measurement")
    add("--rounds", type=int, default=3, help="turns that the providers of a case take")
    jobs = max(1, (os.cpu_count() or 1) - 4)
    add("--jobs", type=int, default=jobs, help="processes that compile ahead; 0: none")
    add("--budget", type=float, default=BUDGET_S, help="seconds after which nothing is begun")
    add("--commit", default="", help="of the package; default: asks git")
    add("--json", type=Path, help="merge all numbers into this file")
    add("--anew", action="store_true", help="begin the file anew")
    add("--plot", type=Path, help="draw <stem>-forward.png, <stem>-backward.png and families there")
    add("--from-json", type=Path, help="measure nothing: report and plot this file")
    add("--documents", action="store_true", help="write the tables of the documents from the file")
    add("--list", action="store_true", help="print the case names")
    add("--dry-run", action="store_true", help="tiny problems on the CPU, to try the script")
    add("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    known = {"providers": set(PROVIDERS), "family": {*PROVIDERS_OF, "host"}}
    for option, values in known.items():
        unknown = set(_split(getattr(arguments, option))) - values
        if unknown:
            parser.error(f"unknown {option} {sorted(unknown)}; there are {sorted(values)}")
    return arguments


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def commit_of(given: str) -> str | None:
    """Return the commit that is measured, with ``+`` behind it if files differ from it."""
    if given:
        return given
    here = Path(__file__).parent
    try:
        name = _git(here, "rev-parse", "--short=12", "HEAD")
        return name + ("+" if _git(here, "status", "--porcelain", "--", "../src") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def describe(device: str, commit: str | None) -> Row:
    """Return what the numbers depend on: machine, versions, commit."""
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
        "flash_attn_triton": package_version,
        "commit": commit,
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
    if prepared.instead is not None:
        problem, inputs = prepared.instead
    if prepared.instead is not None or prepared.operands:
        expected = reference(problem, inputs, "bwd" in passes, prepared.operands)
    found: dict[str, tuple[str, Row]] = {}
    for one in passes:
        run: Any = prepared.forward if one == "fwd" else prepared.backward
        if run is None:
            found[one] = ("skipped", {"message": "no backward"})
            continue
        names = ("out",) if one == "fwd" else ("dq", "dk", "dv", "dbias")
        try:
            with prepared.context():
                got = run()
            tensors = (got,) if one == "fwd" else got
            # a bias that is not learned has no gradient
            right, errors = judge(dict(zip(names, tensors, strict=False)), expected, problem)
        except Exception as error:
            found[one] = ("failed", {"message": _first_line(error)})
            continue
        found[one] = ("ok" if right else "wrong", {"errors": errors})
    return found


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:300]


def measure(
    problem: Problem, passes: tuple[str, ...], names: list[str], timer: Timer, rounds: int
) -> list[Row]:
    """Check, then time, every provider on one problem."""
    device = timer.device
    rows: list[Row] = []
    ready: dict[str, Prepared] = {}
    status: dict[str, tuple[str, Row]]
    inputs = make_inputs(problem, device)
    backward = "bwd" in passes
    expected = reference(problem, inputs, backward)
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
            row: Row = {"case": problem.case(one), "family": problem.family, "pass": one}
            rows.append({**row, "provider": name, "status": what, **detail})
            if what not in ("ok", "skipped"):
                print(f"  {problem.case(one)}: {name} is {what}: {detail}", flush=True)
    del expected
    for one in passes:
        timed = [row for row in rows if row["pass"] == one and row["status"] == "ok"]
        for row in timed:
            row["rounds_ms"] = []
        for turn in range(rounds):
            if turn == 2 and all(min(row["rounds_ms"] or [0.0]) > LONG_MS for row in timed):
                break
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
                instead = ready[row["provider"]].instead
                counted = problem if instead is None else instead[0]
                row["tflops"] = counted.flops(one) / row["ms"] / 1e9
    return rows


def measure_host(case: str, names: list[str], device: str) -> list[Row]:
    """Time what the host does in one warm call, or in the first ones of a process."""
    if case == "host-first-call":
        return [first_call()] if device == "cuda" and "ours" in names else []
    special = {"host-packed-fwd": HOST_PACKED, "host-small-step": HOST_SMALL}
    problem = special.get(case, HOST_PROBLEM)
    inputs = make_inputs(problem, device)
    rows: list[Row] = []
    runs: dict[str, tuple[Any, Prepared]] = {}
    for name in names:
        row: Row = {"case": case, "provider": name, "status": "ok"}
        try:
            prepared = PROVIDERS[name].prepare(problem, inputs, backward="packed" not in case)
            parts = {"host-fwd-grad": prepared.forward_grad, "host-bwd": prepared.backward}
            parts |= {"host-step": prepared.step, "host-small-step": prepared.step}
            run = parts.get(case, prepared.forward)
            if run is None:
                continue
            with prepared.context():
                run()
            runs[name] = run, prepared
        except UnsupportedError:
            continue
        except Exception as error:
            row |= {"status": "failed", "message": _first_line(error)}
        rows.append(row)
    took: dict[str, list[Row]] = {name: [] for name in runs}
    for _ in range(HOST_ROUNDS if device == "cuda" else 1):
        for name, (run, prepared) in runs.items():
            with prepared.context():
                took[name].append(host_microseconds(run, device))
    for row in rows:
        if row["status"] == "ok":
            times = took[row["provider"]]
            row["median_us"] = statistics.median(one["median_us"] for one in times)
            row["min_us"] = min(one["min_us"] for one in times)
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


def show(found: Row) -> None:
    """Print everything that was measured."""
    names = [n for n in PROVIDERS if any(row["provider"] == n for row in found["results"])]
    if found["results"]:
        print("\n" + report.results_table(found["results"], names))
        print("\n" + report.means_table(report.means(found["results"])))
    if found["host"]:
        print("\n" + report.host_table(found["host"]))
    print("\n" + ", ".join(f"{key} {value}" for key, value in found["machine"].items()))
    for began, one in found["runs"].items():
        print(began, ", ".join(f"{key} {value:.0f}" for key, value in one["ceilings"].items()))


def main() -> int:
    arguments = parse_arguments()
    if arguments.child is not None:
        return run_child(arguments.child)
    if arguments.list:
        problems, host = chosen(arguments)
        print("\n".join([p.case(one) for p, passes in problems for one in passes] + host))
        return 0
    if arguments.from_json is not None:
        found = files.read(arguments.from_json)
        show(found)
    else:
        if not arguments.dry_run and not torch.cuda.is_available():
            print("no CUDA device; --dry-run tries the script on a CPU", file=sys.stderr)
            return 2
        found = run(arguments)
    if arguments.plot is not None:
        for path in plot.draw(found, arguments.plot, LABELS):
            print(f"wrote {path}")
    if arguments.documents:
        for path in documents.write(found):
            print(f"wrote {path}")
    fine = ("ok", "skipped")
    mine = [row for row in found["results"] if row["provider"] == "ours"]
    return 0 if all(row["status"] in fine for row in mine) else 1


def chosen(arguments: argparse.Namespace) -> Selected:
    """Return the problems and the host cases that are asked for."""
    return select(_split(arguments.cases), _split(arguments.family), arguments.quick)


def run(arguments: argparse.Namespace) -> Row:
    """Measure what the arguments ask for; a run that is cut short leaves what it has."""
    began = time.monotonic()
    for path in (arguments.json, arguments.plot):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    device = "cpu" if arguments.dry_run else "cuda"
    # the reference is fp32, not TF32
    torch.set_float32_matmul_precision("highest")
    problems, host = chosen(arguments)
    names = available(_split(arguments.providers), device)
    machine = describe(device, commit_of(arguments.commit))
    print(", ".join(f"{key} {value}" for key, value in machine.items()), flush=True)
    known = arguments.json is not None and arguments.json.exists() and not arguments.anew
    before = files.read(arguments.json) if known else None
    if before is not None:
        files.merge(before, {**before, "machine": machine})  # refuses another machine's at once
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
    this = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    found: Row = {"machine": machine, "results": [], "host": []}
    found["runs"] = {this: {"settings": settings, "ceilings": ceilings(timer)}}

    def keep(kind: str, rows: list[Row]) -> None:
        found[kind] += [{**row, "run": this} for row in rows]
        if arguments.json is not None:
            files.write(files.merge(before, found), arguments.json)

    # short, and in need of a machine that does nothing else
    for case in host:
        keep("host", measure_host(case, [n for n in names if n in HOST_PROVIDERS], device))
    for problem, passes in problems:
        if time.monotonic() - began > arguments.budget:
            print(f"out of time: {problem.name} and what follows is not measured")
            break
        here = [name for name in PROVIDERS_OF[problem.family] if name in names]
        small = problem.shrunk() if arguments.dry_run else problem
        try:
            rows = measure(small, passes, here, timer, rounds)
        except Exception as error:  # a device that faulted; what is measured is kept
            print(f"stopped at {problem.name}: {_first_line(error)}", flush=True)
            break
        keep("results", rows)
        for one in passes:
            text = "  ".join(
                f"{row['provider']} {row['tflops']:.0f}"
                if row["status"] == "ok"
                else f"{row['provider']} {row['status']}"
                for row in rows
                if row["pass"] == one
            )
            print(f"[{time.monotonic() - began:5.0f} s] {problem.case(one)}: {text}", flush=True)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    merged = files.merge(before, found)
    show(found)
    print(f"took {time.monotonic() - began:.0f} s")
    return merged


if __name__ == "__main__":
    sys.exit(main())
