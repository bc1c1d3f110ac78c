"""Benchmark of blocksparse-attn beside its rivals: check first, then time, in turns.

    python benchmarks/bench_blocksparse_attn.py --json h200.json --plot h200.png
    python benchmarks/bench_blocksparse_attn.py --families pattern,decode --providers ours,fa3
    python benchmarks/bench_blocksparse_attn.py --from-json h200.json --plot h200.png
    python benchmarks/bench_blocksparse_attn.py --bounds      what no version can be faster than
    python benchmarks/bench_blocksparse_attn.py --dry-run     tiny, on the CPU

What block-sparse attention could take at best is the share of blocks that it keeps, times what a
dense kernel takes: "ideal" below is density times FlashAttention-3's time for the causal whole.
"fa3-short" is its time for about as many products without a mask: walks as short as those of the
pattern, held against their own share of the whole.
FlashAttention-3 runs where a module ``fa3`` is on the path (see ``providers.Fa3``). Decode is held
against the bandwidth of a device-to-device copy of the same run: bytes of keys and values, each
that some head of its group needs counted once.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _linked import report
from _linked.benchmark import Benchmark
from _linked.plot import Panel, Series, draw, note_of
from _linked.results import copy_gbps
from _linked.timing import Timer, host_microseconds, synchronize
from blocksparse_attn import BlockSparseLayout, blocksparse_attn_func
from blocksparse_attn._attention.call import ListForm
from cases import FAMILIES, PROBLEMS, Problem
from checks import Inputs, first_keys, judge, make_inputs, reference
from providers import PROVIDERS

Row = dict[str, Any]


class BlockSparse(Benchmark):
    package = "blocksparse_attn"
    problems, providers, families = PROBLEMS, PROVIDERS, FAMILIES
    specials = {"build": "build", "host-prefill": "host", "host-decode": "host"}

    make_inputs, reference, judge = map(staticmethod, (make_inputs, reference, judge))

    def facts(self, problem: Problem, inputs: Inputs) -> Row:
        return {"density": inputs.density, "block": problem.block, "seqlen": problem.seqlen}

    def numbers(self, problem: Problem, one: str, ms: float) -> Row:
        return {"gbps": problem.bytes(one) / ms / 1e6} if problem.family == "decode" else {}

    def unit(self, family: str) -> str:
        return "gbps" if family == "decode" else "ms"

    def graph_below(self, problem: Problem, one: str) -> float:
        return 0.2  # as long as the host needs for a call

    def special(self, name: str, names: list[str], timer: Timer) -> list[Row]:
        device = timer.device
        if name == "build":
            return building_times(device, 131072 if device == "cuda" else 1024)
        layout = BlockSparseLayout.local_strided(16, 128, 64, 1, 2, device=device)
        q, k, v = (
            torch.randn(1, 128, 16, 128, device=device, dtype=torch.bfloat16) for _ in range(3)
        )
        calls: dict[str, Callable[[], Any]] = {
            "host-prefill": lambda: blocksparse_attn_func(q, k, v, layout),
            "host-decode": lambda: blocksparse_attn_func(q[:, :1], k, v, layout, num_splits=1),
        }
        row: Row = {"case": name, "family": "host", "provider": "ours", "status": "ok"}
        with torch.no_grad():
            return [row | host_microseconds(calls[name], device)]

    def summary(self, found: Row) -> str:
        """Return each time over the ideal one, and decode's share of copy bandwidth."""
        rows = [row for row in found["results"] if row["case"] in self.cases and "ms" in row]
        times = {(row["case"], row["provider"]): row["ms"] for row in rows}
        lines = []
        for row in rows:
            case, name, share = row["case"], row["provider"], row["density"]
            held, copy = "", copy_gbps(found, row)
            if row["family"] == "decode":
                held = f"{row['gbps'] / copy:.2f} of copy bandwidth" if copy else ""
            elif (case, "fa3") in times and name not in ("fa3", "cudnn"):
                if name == "fa3-short":
                    share = 2 * first_keys(share, row["seqlen"]) / row["seqlen"]
                held = f"{row['ms'] / (share * times[case, 'fa3']):.2f} x ideal"
                if (case, "dense") in times and row["density"] == 1.0 and name == "ours":
                    held += f", {row['ms'] / times[case, 'dense']:.2f} x our dense"
            lines.append([case, f"{row['density']:.3f}", name, f"{row['ms']:.3f}", held])
        head = ["case", "density", "provider", "ms", "of ideal, or of copy bandwidth"]
        return report.markdown(head, lines)

    def tables(self, found: Row) -> dict[str, str]:
        return super().tables(found) | {"ideal": self.summary(found)}

    def plot(self, found: Row, path: Path) -> list[Path]:
        """Draw time over dense FlashAttention-3's time against density, with the ideal line."""
        rows = [r for r in found["results"] if r["family"] == "curve" and "ms" in r]
        dense = {r["case"]: r["ms"] for r in rows if r["provider"] == "fa3"}
        panels = []
        for one, title in (("fwd", "forward"), ("bwd", "backward")):
            series = [Series("ideal: density", {0.02: 0.02, 1.0: 1.0}, line=":")]
            for i, name in enumerate(("ours", "portable", "flex")):
                for block, line in ((64, "-"), (128, "--")):
                    points = {
                        row["density"]: row["ms"] / dense[row["case"]]
                        for row in rows
                        if (row["provider"], row["block"], row["pass"]) == (name, block, one)
                        and row["case"] in dense
                    }
                    if points:
                        label = f"{PROVIDERS[name].label}, block {block}"
                        series.append(Series(label, points, f"C{i}", line))
            axes = "time / dense FlashAttention-3's", "density of the causal blocks"
            panels.append(Panel(title, series, *axes, bars=False, scale="log"))
        return [draw(panels, path, 2, "8192 tokens, 32:8 heads of 128, bf16", note_of(found))]


def building_times(device: str, tokens: int) -> list[Row]:
    """Time making a layout, and the first plans for it, at 32 heads."""

    def ms_of(make: Callable[[], Any]) -> float:
        started = time.perf_counter()
        make()
        synchronize(device)
        return (time.perf_counter() - started) * 1e3

    rows: list[Row] = []

    def add(case: str, ms: float) -> None:
        row = {"case": f"{case}-{tokens}-h32", "family": "build", "provider": "ours"}
        rows.append({**row, "status": "ok", "ms": ms})

    def layout(where: str) -> BlockSparseLayout:
        return BlockSparseLayout.local_strided(32, tokens, device=where)

    for name, where in (("layout", device), ("layout-cpu", "cpu")):
        add(name, min(ms_of(functools.partial(layout, where)) for _ in range(3)))
    new = layout(device)
    form = ListForm(4, 128, 2, True)
    for kind in ("tall", "short", "dq", "dkdv", "pairs"):
        add(f"plan-{kind}", ms_of(functools.partial(new._lists.of, kind, form)))
    return rows


if __name__ == "__main__":
    sys.exit(BlockSparse(__doc__, __file__).main())
