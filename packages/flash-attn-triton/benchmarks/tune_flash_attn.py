"""Sweep the tiles of flash-attn-triton's kernels on the GPU at hand; the table is edited by hand.

    python benchmarks/tune_flash_attn.py --kernels fwd --head-dims 128
    python benchmarks/tune_flash_attn.py --kernels dkdv,dq --seqlens 4096,16384 --json tiles.json
    python benchmarks/tune_flash_attn.py --kernels fwd --set block_m=256 --set num_warps=8,16

Each candidate is compiled and compared with an fp32 reference in a process of its own kind, in
parallel; one that fails, hangs or crashes is reported and never timed. Those that are right are
then timed one after another, the tile of the table among them. Tiles do not depend on the mask or
the length, so candidates are ranked by the geometric mean over both masks and all lengths.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from cases import GRID_TOKENS, GRID_WIDTH, Problem
from checks import Inputs, judge, make_inputs, reference
from flash_attn_triton._dense import tiles as dense_tiles
from report import geometric_mean
from rivals import PROVIDERS
from tiles import KERNELS, Tile, compiled_kernels, overridden, resources
from timing import Timer, synchronize

Row = dict[str, Any]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--kernels", default="fwd,dkdv,dq", help="comma-separated, of fwd, dkdv, dq")
    add("--head-dims", default="128", help="comma-separated")
    add("--seqlens", default="4096", help="comma-separated; 16k tokens in all")
    add("--masks", default="causal,full")
    add("--dtype", default="bf16", choices=("bf16", "fp8"), help="fp8: forward only")
    add("--set", action="append", default=[], metavar="FIELD=V,V", help="values of a tile's field")
    add("--keep", type=int, default=10, help="candidates that go on after the first problem")
    jobs = max(1, (os.cpu_count() or 1) - 2)
    add("--jobs", type=int, default=jobs, help="processes that compile")
    add("--timeout", type=float, default=120.0, help="seconds to compile and check one candidate")
    add("--budget", type=float, default=500.0, help="seconds after which nothing new is begun")
    add("--warmup", type=float, default=10.0, help="milliseconds")
    add("--rep", type=float, default=40.0, help="milliseconds")
    add("--top", type=int, default=12, help="lines of each table printed")
    add("--json", type=Path, help="write all numbers there")
    add("--dry-run", action="store_true", help="tiny, on the CPU; wants TRITON_INTERPRET=1")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def problem_of(head_dim: int, seqlen: int, causal: bool, dtype: str, tokens: int) -> Problem:
    heads = GRID_WIDTH // head_dim
    name = f"d{head_dim}-s{seqlen}-{'causal' if causal else 'full'}-{dtype}"
    lengths = (seqlen,) * max(1, tokens // seqlen)
    return Problem(name, "tune", lengths, heads, heads, head_dim, causal, dtype=dtype)


class Bench:
    """Operands and reference of one problem, on which tiles of one kernel are tried."""

    def __init__(self, problem: Problem, kernel: str, device: str) -> None:
        self.problem, self.kernel, self.device = problem, KERNELS[kernel], device
        backward = self.kernel.direction == "bwd"
        # the tiles are those of the portable kernels
        dense_tiles.HOPPER = False
        inputs: Inputs = make_inputs(problem, device)
        self.prepared = PROVIDERS["ours"].prepare(problem, inputs, backward)
        self.expected = reference(problem, inputs, backward, self.prepared.operands)
        run = self.prepared.backward if backward else self.prepared.forward
        if run is None:
            raise ValueError("no backward")
        self.run = run

    def check(self, tile: Tile | None) -> Row:
        """Run once with a tile; return what came of it."""
        with overridden(self.kernel.lookup, tile) as given:
            results: Any = self.run()
        synchronize(self.device)
        if not given:
            raise RuntimeError(f"{self.kernel.lookup} was not called: the tile was not tried")
        if self.kernel.direction == "fwd":
            actual = {"out": results}
        else:
            named = dict(zip(("dq", "dk", "dv"), results, strict=True))
            actual = {name: named[name] for name in self.kernel.checked}
        right, errors = judge(actual, self.expected, self.problem)
        return {"status": "ok" if right else "wrong", "errors": errors}

    def time(self, tile: Tile | None, timer: Timer) -> float:
        with overridden(self.kernel.lookup, tile):
            return timer(self.run)


# --- processes that compile and check -----------------------------------------------------------


def work() -> int:
    """Answer each line of stdin, a candidate, with a line: what came of compiling it."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    # whatever else prints must not get between the replies
    os.dup2(2, 1)
    benches: dict[str, Bench] = {}
    for line in sys.stdin:
        job = json.loads(line)
        began = time.monotonic()
        reply: Row = {}
        try:
            # json has no tuples
            fields = {name: tuple(job["problem"][name]) for name in ("lengths", "passes")}
            problem = Problem(**{**job["problem"], **fields})
            key = f"{problem.name}-{job['kernel']}"
            if key not in benches:
                benches[key] = Bench(problem, job["kernel"], job["device"])
            before = {}
            if job["device"] == "cuda":
                with contextlib.suppress(AttributeError):
                    before = compiled_kernels()
            reply = benches[key].check(job["tile"])
            if job["device"] == "cuda":
                with contextlib.suppress(AttributeError):  # Triton's internals, only for the table
                    reply["resources"] = resources(before, benches[key].kernel.part)
        except Exception as error:
            text = str(error).strip().splitlines()
            reply |= {"status": type(error).__name__, "message": (text[0] if text else "")[:200]}
        reply["seconds"] = time.monotonic() - began
        replies.write(json.dumps(reply) + "\n")
        if "CUDA" in reply.get("message", "") or reply["status"] == "AcceleratorError":
            # a fault poisons the process; the next candidate gets a fresh one
            return 1
    return 0


class Pool:
    """Worker processes, each restarted when a candidate takes it down or takes too long."""

    def __init__(self, jobs: int, timeout: float) -> None:
        self.jobs, self.timeout = jobs, timeout
        # kept from one sweep to the next: starting one takes as long as a compile
        self.idle: list[subprocess.Popen[str]] = []

    def map(self, jobs: list[Row], deadline: float) -> list[Row]:
        """Return what came of each job, in order."""
        replies: list[Row] = [{"status": "not tried"} for _ in jobs]
        waiting: queue.Queue[int] = queue.Queue()
        for index in range(len(jobs)):
            waiting.put(index)
        threads = [
            threading.Thread(
                target=self._serve, args=(jobs, replies, waiting, deadline), daemon=True
            )
            for _ in range(min(self.jobs, len(jobs)))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return replies

    def _serve(
        self, jobs: list[Row], replies: list[Row], waiting: queue.Queue[int], deadline: float
    ) -> None:
        worker = self.idle.pop() if self.idle else None
        while time.monotonic() < deadline:
            try:
                index = waiting.get_nowait()
            except queue.Empty:
                break
            if worker is None or worker.poll() is not None:
                worker = subprocess.Popen(
                    [sys.executable, __file__, "--worker"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            replies[index] = self._ask(worker, jobs[index])
        if worker is not None:
            self.idle.append(worker)

    def close(self) -> None:
        """End the workers."""
        for worker in self.idle:
            worker.kill()
            worker.wait()

    def _ask(self, worker: subprocess.Popen[str], job: Row) -> Row:
        late = threading.Event()

        def stop() -> None:
            late.set()
            worker.kill()

        # the first job of a worker also pays for its imports
        timer = threading.Timer(self.timeout, stop)
        timer.start()
        try:
            if worker.stdin is None or worker.stdout is None:
                raise OSError("no pipes")
            worker.stdin.write(json.dumps(job) + "\n")
            worker.stdin.flush()
            reply: Row = json.loads(worker.stdout.readline())
        except (OSError, ValueError):
            worker.kill()
            worker.wait()
            reply = {"status": "timed out" if late.is_set() else "crashed"}
        finally:
            timer.cancel()
        return reply


# --- the sweep ----------------------------------------------------------------------------------


def sweep(
    kernel: str, head_dim: int, arguments: argparse.Namespace, pool: Pool, deadline: float
) -> Row:
    """Check, time and rank the tiles of one kernel and head dimension."""
    began = time.monotonic()
    device = "cpu" if arguments.dry_run else "cuda"
    timer = Timer(device, arguments.warmup, arguments.rep)
    space = {}
    for one in arguments.set:
        field, _, values = one.partition("=")
        space[field] = tuple(int(value) for value in values.split(","))
    itemsize = 1 if arguments.dtype == "fp8" else 2
    tiles = KERNELS[kernel].candidates(head_dim, itemsize, space)
    masks = [mask == "causal" for mask in arguments.masks.split(",")]
    # one length that no tile divides; same heads, so the same variants as the timed problems
    small = [problem_of(head_dim, 1000, causal, arguments.dtype, 2000) for causal in masks]
    timed = [
        problem_of(head_dim, int(seqlen), causal, arguments.dtype, GRID_TOKENS)
        for seqlen in arguments.seqlens.split(",")
        for causal in masks
    ]
    if arguments.dry_run:
        tiles = tiles[:3]
        small, timed = ([p.shrunk() for p in problems] for problems in (small, timed))

    rows: list[Row] = [{"tile": tile, "status": "ok", "ms": {}} for tile in tiles]
    jobs = [
        {"kernel": kernel, "device": device, "tile": row["tile"], "problem": vars(problem)}
        for problem in small
        for row in rows
    ]
    replies = pool.map(jobs, deadline)
    for i, reply in enumerate(replies):
        row = rows[i % len(rows)]
        row.setdefault("checks", []).append(reply)
        if reply["status"] != "ok" and row["status"] == "ok":
            row |= {"status": reply["status"], "message": reply.get("message", "")}
    right = sum(row["status"] == "ok" for row in rows)
    took = f"{time.monotonic() - began:.0f} s"
    print(f"{kernel} d{head_dim}: {len(rows)} tiles, {right} right, {took}", flush=True)

    # the tile of the table first: it stays whatever comes of the others
    rows.insert(0, {"tile": None, "status": "ok", "ms": {}})
    going = [row for row in rows if row["status"] == "ok"]
    for problem in timed:
        bench = Bench(problem, kernel, device)
        for row in going:
            if row["status"] != "ok" or time.monotonic() > deadline:
                continue
            try:
                outcome = bench.check(row["tile"])
                if outcome["status"] == "ok":
                    row["ms"][problem.name] = bench.time(row["tile"], timer)
                else:
                    row |= {"status": "wrong", "message": f"{problem.name}: {outcome['errors']}"}
            except Exception as error:
                row |= {"status": type(error).__name__, "message": str(error)[:200]}
        done = [r for r in going if problem.name in r["ms"] and r["tile"] is not None]
        done.sort(key=lambda row: geometric_mean(list(row["ms"].values())))
        going = [rows[0], *done[: arguments.keep]]
        del bench
        if device == "cuda":
            torch.cuda.empty_cache()
    for row in rows:
        if len(row["ms"]) == len(timed):
            flops = {problem.name: problem.flops(KERNELS[kernel].direction) for problem in timed}
            row["tflops"] = {name: flops[name] / ms / 1e9 for name, ms in row["ms"].items()}
            row["geomean_tflops"] = geometric_mean(list(row["tflops"].values()))
    rows.sort(key=lambda row: -row.get("geomean_tflops", 0.0))
    return {
        "kernel": kernel,
        "head_dim": head_dim,
        "dtype": arguments.dtype,
        "problems": [problem.name for problem in timed],
        "rows": rows,
        "seconds": time.monotonic() - began,
    }


def show(result: Row, top: int) -> None:
    """Print the best tiles, the table's among them, and what became of the rest."""
    names = result["problems"]
    whole = "pass" if result["kernel"] == "fwd" else "whole backward"
    print(f"\n{result['kernel']} d{result['head_dim']} {result['dtype']}: TFLOP/s of the {whole}")
    head = "".join(f"{name:>22}" for name in names)
    print(f"{'block_m block_n warps stages':<30}{'geomean':>8}{head}")
    shown = 0
    for row in result["rows"]:
        if "geomean_tflops" not in row:
            continue
        shown += 1
        if shown > top and row["tile"] is not None:
            continue
        tile = row["tile"]
        text = "the table's" if tile is None else "".join(f"{value:<7}" for value in tile.values())
        cells = "".join(f"{row['tflops'][name]:>22.0f}" for name in names)
        used = [one for reply in row.get("checks", []) for one in reply.get("resources", [])]
        extra = "".join(f"  {u['registers']}r {u['spills']}sp {u['shared'] // 1024}K" for u in used)
        print(f"{text:<30}{row['geomean_tflops']:>8.1f}{cells}{extra}")
    fates: dict[str, int] = {}
    for row in result["rows"]:
        if row["status"] != "ok":
            fates[row["status"]] = fates.get(row["status"], 0) + 1
        if row["status"] not in ("ok", "OutOfResources"):
            print(f"  {row['tile']}: {row['status']} {row.get('message', '')[:120]}")
    print(f"not timed: {fates or 'none'}; {result['seconds']:.0f} s", flush=True)


def main() -> int:
    arguments = parse_arguments()
    torch.set_float32_matmul_precision("highest")
    if arguments.worker:
        return work()
    if not arguments.dry_run and not torch.cuda.is_available():
        print("no CUDA device", file=sys.stderr)
        return 2
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + arguments.budget
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    results: list[Row] = []
    pool = Pool(1 if arguments.dry_run else arguments.jobs, arguments.timeout)
    for head_dim in (int(text) for text in arguments.head_dims.split(",")):
        for kernel in arguments.kernels.split(","):
            if time.monotonic() > deadline:
                print(f"{kernel} d{head_dim}: no time left")
                continue
            results.append(sweep(kernel, head_dim, arguments, pool, deadline))
            show(results[-1], arguments.top)
            if arguments.json is not None:
                whole = {"device": machine, "torch": torch.__version__, "sweeps": results}
                arguments.json.write_text(json.dumps(whole, indent=1) + "\n")
    pool.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
