"""Benchmark of flash-attn-triton beside its rivals: check first, then time, in turns.

    python benchmarks/bench_flash_attn.py --quick                      the gate's cases
    python benchmarks/bench_flash_attn.py --commit HASH --json grid.json
    python benchmarks/bench_flash_attn.py --family shapes --shapes 100 --seed 7 --json shapes.json
    python benchmarks/bench_flash_attn.py --cases d128-h16:4-4x2205-packed-causal-w1023
    python benchmarks/bench_flash_attn.py --family dropout,bias --json grid.json
    python benchmarks/bench_flash_attn.py --cases packed,host --providers ours,fa3
    python benchmarks/bench_flash_attn.py --from-json grid.json --plot grid.png --documents
    python benchmarks/bench_flash_attn.py --dry-run                    tiny, on the CPU

Results of several runs of one commit on one machine share a file: a run replaces the cases that it
measured. ``--documents`` writes the tables of the documents from it.

The family ``shapes`` is drawn by a seed: a shorter list is the beginning of a longer one, and
``--budget`` ends it after some seconds. ``shapes.named`` explains the names, by which
``--cases`` measures one alone.

TFLOP/s by the usual count: forward 4 B H Sq Sk D, halved when causal; backward 2.5 times that.
FlashAttention-3 runs where a module ``fa3`` is on the path (see ``rivals.Fa3``).
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import documents
from _linked.benchmark import Benchmark
from _linked.children import first_call
from _linked.plot import bars, draw, note_of
from _linked.timing import Timer
from cases import FAMILIES, HOST, PROBLEMS, QUICK, Problem
from checks import judge, make_inputs, reference
from rivals import PROVIDERS
from shapes import FAMILY, named, roll

Row = dict[str, Any]

PACKAGE = Path(__file__).parent.parent
RESULTS = PACKAGE / "benchmarks" / "results" / "h200.json"
# below this a launch costs more than the work, and only a CUDA graph shows the work
GRAPH_BELOW_MS = 0.05
FIRST_CALL = """
import json, time, torch
import flash_attn_triton as fat
size = 1, 4096, 16, 128
leaves = [torch.randn(size, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in "qkv"]
torch.cuda.synchronize()
start = time.perf_counter()
out = fat.flash_attn_func(*leaves, causal=True)
torch.cuda.synchronize()
between = time.perf_counter()
out.sum().backward()
torch.cuda.synchronize()
end = time.perf_counter()
print(json.dumps({"forward": between - start, "backward": end - between, "all": end - start}))
"""


class FlashAttn(Benchmark):
    package = "flash_attn_triton"
    problems, providers, families, quick = PROBLEMS, PROVIDERS, FAMILIES, QUICK
    specials = dict.fromkeys([*HOST, "host-first-call"], "host")
    written = tuple(
        PACKAGE / name for name in ("README.md", "benchmarks/NOTES.md", "docs/performance.md")
    )
    most_jobs = 64

    make_inputs, reference = staticmethod(make_inputs), staticmethod(reference)
    draw, named = staticmethod(roll), staticmethod(named)

    @staticmethod
    def judge(problem: Problem, one: str, got: Any, expected: Any) -> tuple[bool, Any]:
        names, tensors = (("out",), (got,)) if one == "fwd" else (("dq", "dk", "dv", "dbias"), got)
        # a bias that is not learned has no gradient
        return judge(dict(zip(names, tensors, strict=False)), expected, problem)

    def numbers(self, problem: Problem, one: str, ms: float) -> Row:
        return {"tflops": problem.flops(one) / ms / 1e9}

    def unit(self, family: str) -> str:
        return "tflops"

    def rate(self, problem: Problem) -> float:
        # FP8: the nominal ratio of the two rates, not measured
        return self.matmul_tflops * (2.0 if problem.fp8 else 1.0)

    def graph_below(self, problem: Problem, one: str) -> float:
        # a drawn shape is timed as users call it
        return GRAPH_BELOW_MS if one == "fwd" and problem.family != FAMILY else 0.0

    def special(self, name: str, names: list[str], timer: Timer) -> list[Row]:
        if name == "host-first-call":
            is_asked = timer.device == "cuda" and "ours" in names
            return [first_call(name, FIRST_CALL)] if is_asked else []
        asked = [n for n in names if n in ("ours", "portable", "fa3", "cudnn", "fa2")]
        return self.measure_host(name, *HOST[name], asked, timer)

    def tables(self, found: Row) -> dict[str, str]:
        return documents.tables(self, found)

    def plot(self, found: Row, path: Path) -> list[Path]:
        """Draw ``<stem>-forward.png`` and ``<stem>-backward.png`` of the grid, and each family."""
        written = super().plot(found, path)
        for one, word in (("fwd", "forward"), ("bwd", "backward")):
            panels = []
            for mask, d in itertools.product(("full", "causal"), (64, 128, 256)):
                parts = f"-d{d}-", f"-{mask}"
                rows = self.rows_of(found, "grid")
                rows = [row for row in rows if all(part in row["case"] for part in parts)]
                title = f"head dim {d}, {mask}"
                panels.append(bars(self, rows, one, self._length, title=title))
            if any(panel.series for panel in panels):
                title = f"Attention {word}, bf16, 16k tokens, heads x dim = 2048"
                to = path.with_name(f"{path.stem}-{word}.png")
                written.append(draw(panels, to, 3, title, note_of(found)))
        return written

    def _length(self, row: Row) -> str:
        return f"{self.cases[row['case']][0].max_seqlen // 1024}k"


BENCH = FlashAttn(__doc__, __file__)

if __name__ == "__main__":
    sys.exit(BENCH.main())
