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

import math
import sys
from pathlib import Path
from typing import Any

import torch
from _linked import report
from _linked.benchmark import Benchmark
from _linked.children import first_call
from _linked.plot import Panel, Series, bars, draw, note_of
from _linked.results import copy_gbps
from _linked.timing import Timer
from cases import FAMILIES, HOST, LONG, PROBLEMS, Problem, Step
from lightning_attn import lightning_attn_func
from providers import PROVIDERS, Inputs, judge, make_inputs, reference

Row = dict[str, Any]

# passes shorter than this are timed as replays of a CUDA graph, in ms
SHORT = 0.05
FIRST_CALL = """
import json, time, torch
from lightning_attn import build_slopes, lightning_attn_func
q, k, v = (torch.randn(1, 4096, 64, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
leaves, decay = [t.requires_grad_() for t in (q, k, v)], build_slopes(64).cuda()
torch.cuda.synchronize()
start = time.perf_counter()
lightning_attn_func(*leaves, decay)[0].sum().backward()
torch.cuda.synchronize()
print(json.dumps({"all": time.perf_counter() - start}))
"""


class Lightning(Benchmark):
    package = "lightning_attn"
    problems, providers, families = PROBLEMS, PROVIDERS, FAMILIES
    specials = {**dict.fromkeys([*HOST, "host-first-call"], "host"), "memory": "memory"}
    matmul_tflops, copy_tbps = 700.0, 4.3

    make_inputs, reference, judge = map(staticmethod, (make_inputs, reference, judge))

    def facts(self, problem: Problem | Step, inputs: Inputs) -> Row:
        if isinstance(problem, Step):
            return {}
        names = "heads", "tokens", "schedule"
        return {name: getattr(problem, name) for name in names}

    def numbers(self, problem: Problem | Step, one: str, ms: float) -> Row:
        return {"gbps": problem.bytes(one) / ms / 1e6} if isinstance(problem, Step) else {}

    def unit(self, family: str) -> str:
        return "gbps" if family == "decode" else "ms"

    def graph_below(self, problem: Problem | Step, one: str) -> float:
        # the schedules and decoding are compared without the host's time
        is_short = problem.family in ("crossover", "decode") or problem.bytes(one) / 4.3e9 < SHORT
        return math.inf if is_short else 0.0

    def special(self, name: str, names: list[str], timer: Timer) -> list[Row]:
        if name in HOST:
            return self.measure_host(name, *HOST[name], ["ours"], timer)
        if timer.device == "cpu":
            return []
        return [first_call(name, FIRST_CALL) if name == "host-first-call" else memory()]

    def summary(self, found: Row) -> str:
        """Return ours over the floor at the run's own bandwidth, and over fla's time."""
        lines = []
        for case, rows in report.by_case(self, found["results"]).items():
            mine = rows.get("ours", {})
            copy = copy_gbps(found, mine)
            if case in self.cases and "ms" in mine and copy:
                problem, one = self.cases[case]
                floor = problem.bytes(one) / copy / 1e6
                share = report.ratio(rows, "fla", "ours")
                cells = [f"{floor:.4f}", f"{mine['ms']:.4f}", f"{mine['ms'] / floor:.2f}"]
                cells += [f"{floor / mine['ms']:.2f}", report.number(share)]
                lines.append([case, *cells])
        head = ["case", "floor, ms", "ours, ms", "ours / floor", "of copy bandwidth", "ours / fla"]
        return report.markdown(head, lines)

    def tables(self, found: Row) -> dict[str, str]:
        return super().tables(found) | {"floors": self.summary(found)}

    def plot(self, found: Row, path: Path) -> list[Path]:
        """Draw the grid as bars, and the crossover as lines."""
        grid = self.rows_of(found, "grid")
        panels = [bars(self, grid, one, scale="log") for one in ("fwd", "bwd", "train")]
        rows = self.rows_of(found, "crossover")
        series = []
        for i, schedule in enumerate(("sequential", "parallel")):
            for tokens, line in ((4096, "-"), (32768, "--")):
                kind = schedule, tokens
                points = {r["heads"]: r["ms"] for r in rows if (r["schedule"], r["tokens"]) == kind}
                if points:
                    series.append(Series(f"{schedule}, {tokens} tokens", points, f"C{i}", line))
        panels.append(Panel("one sequence, by heads", series, "ms", "heads", False, "log"))
        return [draw(panels, path, 2, "Linear attention, bf16", note_of(found))]


def memory() -> Row:
    """Run a million tokens forward, and return the peak memory beyond inputs and output."""
    x = make_inputs(LONG, "cuda")
    x.dout = None  # 17 GB that nobody reads
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    row: Row = {"case": "memory", "family": "memory", "provider": "ours", "status": "ok"}
    row["tokens"] = LONG.tokens
    for schedule in ("sequential", "parallel"):
        torch.cuda.reset_peak_memory_stats()
        out, _ = lightning_attn_func(*x.given, x.decay, schedule=schedule)
        torch.cuda.synchronize()
        extra = torch.cuda.max_memory_allocated() - before - out.numel() * out.element_size()
        row[f"{schedule}_extra_bytes"] = extra
        del out
    return row


if __name__ == "__main__":
    sys.exit(Lightning(__doc__, __file__).main())
