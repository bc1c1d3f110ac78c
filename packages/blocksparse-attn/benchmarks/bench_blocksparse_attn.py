"""Benchmark of blocksparse-attn beside its rivals: check first, then time, in turns.

    python benchmarks/bench_blocksparse_attn.py --json h200.json --plot h200.png
    python benchmarks/bench_blocksparse_attn.py --families pattern,decode --providers ours,fa3
    python benchmarks/bench_blocksparse_attn.py --from-json h200.json --plot h200.png
    python benchmarks/bench_blocksparse_attn.py --dry-run                  tiny, on the CPU

What block-sparse attention could take at best is the share of blocks that it keeps, times what a
dense kernel takes: "ideal" below is density times FlashAttention-3's time for the causal whole.
"fa3-short" is its time for about as many products without a mask: walks as short as those of the
pattern, held against their own share of the whole.
FlashAttention-3 runs where a module ``fa3`` is on the path (see ``providers.Fa3``). Decode is held
against the bandwidth of a device-to-device copy of the same run: bytes of keys and values, each
that some head of its group needs counted once.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import bounds
import torch
from cases import FAMILIES, Case, select
from checks import check, first_keys, make_inputs
from plot import draw
from providers import PROVIDERS, UnsupportedError
from timing import copy_bandwidth, host_microseconds, measure

Row = dict[str, Any]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--families", default=",".join(FAMILIES), help=f"of {', '.join(FAMILIES)}")
    add("--cases", default="", help="comma-separated substrings of case names; default: all")
    add("--providers", default=",".join(PROVIDERS), help=f"of {', '.join(PROVIDERS)}")
    add("--rep", type=float, default=30.0, help="milliseconds of each measurement")
    add("--rounds", type=int, default=3, help="turns that the providers of a case take")
    add("--json", type=Path, help="write all numbers there")
    add("--plot", type=Path, help="draw the curve of time over density there")
    add("--from-json", type=Path, help="measure nothing: report and plot this file")
    add("--bounds", action="store_true", help="print what no version can be faster than")
    add("--dry-run", action="store_true", help="tiny problems on the CPU, to try the script")
    return parser.parse_args()


def describe(device: str) -> Row:
    """Return what the numbers depend on: machine, versions, date."""
    import blocksparse_attn

    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    found: Row = {
        "device": platform.machine(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "blocksparse_attn": blocksparse_attn.__version__,
        "torch": torch.__version__,
        "triton": triton_version,
    }
    if device == "cuda":
        found["device"] = torch.cuda.get_device_properties(0).name
    return found


def run_case(case: Case, names: list[str], arguments: argparse.Namespace, device: str) -> list[Row]:
    """Check, then time, every provider on one case."""
    inputs = make_inputs(case, device)
    rows, ready = [], {}
    for name in names:
        row: Row = {"case": case.name, "family": case.family, "provider": name, "pass": case.way}
        row |= {"density": inputs.density, "block": case.block, "seqlen": case.seqlen}
        row |= {"heads": [case.heads_q, case.heads_k], "needed_bytes": inputs.needed_bytes}
        rows.append(row)
        try:
            run = PROVIDERS[name].prepare(case, inputs)
            row["status"], row["error"] = check(case, inputs, run(), PROVIDERS[name].sees)
            if row["status"] == "ok":
                ready[name] = run
        except UnsupportedError as reason:
            row |= {"status": "skipped", "message": str(reason)}
        except Exception as error:  # a rival's failure is a result, not an end
            text = str(error).strip().splitlines()
            message = f"{type(error).__name__}: {text[0] if text else ''}"[:300]
            row |= {"status": "failed", "message": message}
    taken: dict[str, list[float]] = {name: [] for name in ready}
    order = list(ready)
    for turn in range(1 if arguments.dry_run else arguments.rounds):
        # nobody always runs after the same neighbour
        for name in order[turn % len(order) :] + order[: turn % len(order)] if order else []:
            taken[name].append(measure(ready[name], device, arguments.rep))
    for row in rows:
        if row["provider"] in ready:
            row["rounds_ms"] = taken[row["provider"]]
            row["ms"] = statistics.median(row["rounds_ms"])
    return rows


def building_times(device: str, tokens: int) -> list[Row]:
    """Time making a layout, and the first plans for it, at 32 heads."""
    from blocksparse_attn import BlockSparseLayout
    from blocksparse_attn._layout import kept_lists

    rows = []
    for name, where in (("layout", device), ("layout-cpu", "cpu")):
        took = []
        for _ in range(3):
            started = time.perf_counter()
            layout = BlockSparseLayout.local_strided(32, tokens, device=where)
            if where == "cuda":
                torch.cuda.synchronize()
            took.append((time.perf_counter() - started) * 1e3)
        rows.append({"case": f"{name}-{tokens}-h32", "ms": min(took)})
        if name == "layout":
            for kind in ("tall", "short", "dq", "dkdv", "pairs"):
                started = time.perf_counter()
                kept_lists.lists_for(layout, kind, 4, 128, 2, True)
                if where == "cuda":
                    torch.cuda.synchronize()
                took_ms = (time.perf_counter() - started) * 1e3
                rows.append({"case": f"plan-{kind}-{tokens}-h32", "ms": took_ms})
    return rows


def report(results: Row) -> str:
    """Return all numbers as a table, with what they are held against."""
    lines = [
        "| case | density | provider | ms | of ideal, or of copy bandwidth |",
        "|---|---|---|---|---|",
    ]
    times = {(r["case"], r["provider"]): r["ms"] for r in results["results"] if "ms" in r}
    for row in results["results"]:
        if "ms" not in row:
            shown = f"{row['status']}: {row.get('message', row.get('error', ''))}"
            lines.append(f"| {row['case']} | | {row['provider']} | {shown} | |")
            continue
        held = ""
        if row["family"] == "decode" and results["copy_gbps"]:
            rate = row["needed_bytes"] / row["ms"] / 1e6
            held = f"{rate:.0f} GB/s, {rate / results['copy_gbps']:.2f}"
        elif (row["case"], "fa3") in times and row["provider"] not in ("fa3", "cudnn"):
            share = row["density"]
            if row["provider"] == "fa3-short":
                share = 2 * first_keys(share, row["seqlen"]) / row["seqlen"]
            held = f"{row['ms'] / (share * times[row['case'], 'fa3']):.2f} x ideal"
            dense = times.get((row["case"], "dense"))
            if dense and row["density"] == 1.0 and row["provider"] == "ours":
                held += f", {row['ms'] / dense:.2f} x our dense"
        shown = f"{row['density']:.3f} | {row['provider']} | {row['ms']:.3f}"
        lines.append(f"| {row['case']} | {shown} | {held} |")
    for row in results["building"]:
        lines.append(f"| {row['case']} | | ours | {row['ms']:.2f} | |")
    for row in results["host"]:
        lines.append(f"| {row['case']} | | ours | {row['us'] / 1e3:.4f} | host |")
    return "\n".join(lines)


def main() -> int:
    arguments = parse_arguments()
    if arguments.bounds:
        print(bounds.table())
        return 0
    if arguments.from_json is not None:
        results = json.loads(arguments.from_json.read_text())
    else:
        device = "cpu" if arguments.dry_run else "cuda"
        if device == "cuda" and not torch.cuda.is_available():
            print("no CUDA device; --dry-run tries the script on a CPU", file=sys.stderr)
            return 2
        results = run_all(arguments, device)
    print(report(results))
    print(", ".join(f"{key} {value}" for key, value in results["machine"].items()))
    if arguments.plot is not None:
        draw(results, arguments.plot)
        print(f"wrote {arguments.plot}")
    mine = [r for r in results["results"] if r["provider"] == "ours"]
    return 0 if all(row["status"] in ("ok", "skipped") for row in mine) else 1


def run_all(arguments: argparse.Namespace, device: str) -> Row:
    """Measure what the arguments ask for; the numbers so far are written after every case."""
    # the reference is fp32, not TF32
    torch.set_float32_matmul_precision("highest")
    names = []
    for name in filter(None, arguments.providers.split(",")):
        reason = PROVIDERS[name].unavailable(device)
        if reason is None:
            names.append(name)
        else:
            print(f"provider {name} skipped: {reason}")
    families = [f for f in arguments.families.split(",") if f]
    results: Row = {
        "machine": describe(device),
        "copy_gbps": copy_bandwidth() if device == "cuda" else None,
        "results": [],
        "building": [],
        "host": [],
    }
    began = time.monotonic()
    for case in select(families, [c for c in arguments.cases.split(",") if c], arguments.dry_run):
        rows = run_case(case, names, arguments, device)
        results["results"] += rows
        shown = "  ".join(
            f"{r['provider']} {r['ms']:.3f}" if "ms" in r else f"{r['provider']} {r['status']}"
            for r in rows
        )
        print(f"[{time.monotonic() - began:5.0f} s] {case.name}: {shown}", flush=True)
        save(results, arguments.json)
    if "build" in families:
        results["building"] = building_times(device, 1024 if arguments.dry_run else 131072)
    if "host" in families:
        results["host"] = host_microseconds(device)
    save(results, arguments.json)
    return results


def save(results: Row, path: Path | None) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
