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
they are installed.
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aims
import torch
from _linked import report
from _linked.benchmark import Benchmark
from _linked.children import first_line
from _linked.plot import bars, draw, note_of
from _linked.providers import Prepared
from _linked.timing import Timer
from cases import BY_NAME, FEW, PROBLEMS, Problem
from checks import judge, make_inputs, reference
from prefix_prefill import reshape_and_cache
from providers import PROVIDERS

Row = dict[str, Any]

# below this what is still to be written back of an emptied cache is much of the time
SHORT_MS = 0.25
# the cases of README
DECODE = ("decode-64x8192", "decode-1x65536", "decode-256x2048")


class PrefixPrefill(Benchmark):
    package = "prefix_prefill"
    problems, providers = PROBLEMS, PROVIDERS
    families = dict.fromkeys(("decode", "window", "prefill", "mixed"), tuple(PROVIDERS))
    specials = {"host": "host", "write-1000": "write", "write-8192": "write"}

    make_inputs, reference, judge = map(staticmethod, (make_inputs, reference, judge))

    def numbers(self, problem: Problem, one: str, ms: float) -> Row:
        return {"tflops": problem.flops() / ms / 1e9, "gbps": problem.bytes() / ms / 1e6}

    def unit(self, family: str) -> str:
        return "tflops" if family in ("prefill", "mixed") else "gbps"

    def special(self, name: str, names: list[str], timer: Timer) -> list[Row]:
        if name == "host":
            problem = Problem("host", "host", ((1, 63),) * 8)
            rows = self.measure_host(name, problem, "", ["ours-unsplit"], timer)
            return [{**row, "provider": "ours"} for row in rows]
        return measure_writes(name, timer)

    def time_further(
        self,
        problem: Problem,
        ready: dict[str, Prepared],
        rows: list[Row],
        timer: Timer,
        rounds: int,
    ) -> None:
        """Time a short problem in graphs, over inputs that exceed the second-level cache."""

        def is_short(ms: float) -> bool:  # a dry run tries it with all
            return timer.device == "cpu" or ms < SHORT_MS

        timed = [row for row in rows if "ms" in row]
        if not timed or not is_short(min(row["ms"] for row in timed)):
            return
        seeds = range(1, timer.sets(problem.all_bytes))
        more = [make_inputs(problem, timer.device, seed) for seed in seeds]
        graphs: list[tuple[Row, Callable[[], float], list[float]]] = []
        for row in timed:
            name = row["provider"]
            if not is_short(row["ms"] / 2):  # one that is a little slower has a graph, too
                continue
            try:
                with ready[name].context():
                    others = [PROVIDERS[name].prepare(problem, x, ("",)).calls[""] for x in more]
                    graphs.append((row, timer.captured([ready[name].calls[""], *others]), []))
            except Exception as reason:  # not every rival can be captured
                print(f"  {problem.name}: no graph of {name}: {first_line(reason)}", flush=True)
        for _ in range(rounds):
            for _, replay, took in graphs:
                took.append(replay())
        for row, _, took in graphs:
            row["ms_graph"] = statistics.median(took)

    def summary(self, found: Row) -> str:
        return aims.table(aims.Values(self, found))

    def tables(self, found: Row) -> dict[str, str]:
        """Return the tables of README and NOTES."""
        values = aims.Values(self, found)
        number = report.number
        prefill, decode, every = [], [], []
        for case in aims.CHUNKS:
            rates = [number(values.time(case, name, "tflops"), ".0f") for name in ("ours", "fa3")]
            count, lengths = case.removeprefix("prefill-").split("x")
            label = f"{count} x ({lengths.replace('+', ' + ')})"
            prefill.append([label, *rates, number(values.value("fa3", case))])
        for case in DECODE:
            shares = [number(values.of_copy(case, name)) for name in ("ours", "fa3")]
            decode.append([case.removeprefix("decode-").replace("x", " x "), *shares])
        for case, rows in values.cases.items():
            mine = rows.get("ours", {})
            if "ms" not in mine:
                continue
            cells = [f"{mine['ms']:.4f}", number(mine.get("ms_graph"), ".4f")]
            cells += [number(values.time(case, name), ".4f") for name in ("portable", "fa3")]
            known = case in BY_NAME
            cells += [number(values.value(of, case) if known else None) for of in ("fa3", "bf16")]
            if known and BY_NAME[case].max_new >= FEW:
                cells.append(f"{mine['tflops']:.0f} TFLOP/s")
            else:
                cells.append(f"{number(values.of_copy(case), '.3f')} of copy bandwidth")
            every.append([case, *cells])
        head = ["case", "ms", "in a graph, ms", "portable, ms", "FA3, ms"]
        head += ["FA3's time over ours", "bf16's time over ours", "other"]
        pair = ["prefix-prefill", "FlashAttention-3"]
        lengths = "sequences, new and cached tokens of each"
        return {
            "prefill": report.markdown([lengths, *pair, "/ FlashAttention-3"], prefill),
            "decode": report.markdown(["sequences x keys", *pair], decode),
            "sentences": _sentences(values),
            "cases": report.markdown(head, every),
            "aims": aims.table(values),
        }

    def plot(self, found: Row, path: Path) -> list[Path]:
        """Draw TFLOP/s of prefill and GB/s of decoding."""
        panels = []
        for family in ("prefill", "decode"):
            rows = [row for row in self.rows_of(found, family) if _is_usual(row["case"])]
            panels.append(bars(self, rows, "", title=family))
        return [draw(panels, path, 2, "bf16, 32:8 heads, head_dim 128", note_of(found))]


def _is_usual(case: str) -> bool:
    """Say whether a case is of what the title of the plot says."""
    p = BY_NAME[case]
    return (p.cache, p.heads_q, p.columns) == ("bf16", 32, 256) and not p.dense


def _sentences(values: aims.Values) -> str:
    sums = [report.number(values.value("parts", case)) for case in aims.SUMS]
    writes = [report.number(values.of_copy(f"write-{n}")) for n in (1000, 8192)]
    host = report.number(values.value("us", "host"), ".1f")
    return (
        f"A mixture of 32 decoding sequences and 4 chunks took {sums[0]} of the sum of its "
        f"parts; a window of 4096 in a\ncontext of 64k {sums[1]} (decoding) and "
        f"{sums[2]} (prefill) of what a context of 4096 takes. Writing runs at\n"
        f"{writes[0]} of copy bandwidth for 1000 tokens, and at {writes[1]} for 8192. A "
        f"warm decoding call takes {host} µs of the\nhost's time."
    )


def measure_writes(case: str, timer: Timer) -> list[Row]:
    """Time the writing of new keys and values into a cache."""
    device, heads_k, head_dim, page = timer.device, 8, 128, 16
    tokens = int(case.split("-")[1]) if device == "cuda" else 32
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
    runs[0]()
    new, caches, slots = sets[0][:2], sets[0][2:4], sets[0][4]
    right = all(torch.equal(c.flatten(0, 1)[slots], n) for c, n in zip(caches, new, strict=True))
    row: Row = {"case": case, "family": "write", "provider": "ours"}
    if not right:
        return [{**row, "status": "wrong"}]
    ms = timer(runs[0], 0.05)
    row |= {"status": "ok", "ms": ms, "gbps": moved / ms / 1e6}
    return [{**row, "ms_graph": timer.captured(runs)()}]


if __name__ == "__main__":
    sys.exit(PrefixPrefill(__doc__, __file__).main())
