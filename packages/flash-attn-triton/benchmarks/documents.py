"""The tables of the documents, written from a file of results: no figure is typed by hand.

A table stands between ``<!-- table: name -->`` and ``<!-- end of table -->``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aims
import report
from cases import PROVIDERS_OF, Problem
from rivals import LABELS

Row = dict[str, Any]

PACKAGE = Path(__file__).parent.parent
RESULTS = PACKAGE / "benchmarks" / "results" / "h200.json"
DOCUMENTS = tuple(
    PACKAGE / name for name in ("README.md", "benchmarks/NOTES.md", "docs/performance.md")
)
_TABLE = re.compile(r"(<!-- table: ([\w -]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def _dense(head_dim: int, family: str) -> Callable[[Problem], bool]:
    return lambda p: p.family == family and p.head_dim == head_dim


def _family(name: str) -> Callable[[Problem], bool]:
    return lambda p: p.family == name


DENSE = {f"dense, d={d}": _dense(d, "grid") for d in (64, 128, 256)}
DENSE |= {
    "dense, d=128, batch 4, 8k": _family("long"),
    "packed, 32:8 heads, d=128": _family("packed"),
    "few queries, 32:4 heads, d=128": _family("few"),
}
DIMS = {
    f"d={name}": (lambda p, d=d, v=v: p.family == "dims" and (p.head_dim, p.values) == (d, v))
    for name, d, v in [(str(d), d, 0) for d in (72, 80, 96, 112, 160, 192)]
    + [("192, 128", 192, 128)]
}
DROPOUT = {f"dropout, d={d}": _dense(d, "dropout") for d in (64, 128, 256)}
BIAS = {f"additive bias, d={d}": _dense(d, "bias") for d in (64, 128)}
WITHOUT = {
    "gradient of the bias": _family("dbias"),
    "ALiBi": lambda p: p.alibi,
    "`seqused_k`": lambda p: p.used,
    "`deterministic=True`": _family("repeats"),
    "`invariant=True`": _family("invariant"),
    "FP8": _family("fp8"),
    "a tree": _family("tree"),
}
PORTABLE = {f"d={d}": _dense(d, "portable") for d in (64, 128, 256)}


def tables(found: Row) -> dict[str, str]:
    """Return every table by its name."""

    def means(groups: dict[str, Callable[[Problem], bool]], *rivals: str) -> str:
        return report.families(found, groups, list(rivals), LABELS)

    made = {
        "machine": _machine(found),
        "aims": aims.table(found, LABELS),
        "dense": means(DENSE, "fa2", "cudnn", "fa3"),
        "dims": means(DIMS, "fa3"),
        "features": means({**DROPOUT, **BIAS}, "fa2", "cudnn"),
        "without": means(WITHOUT, "base", "flex", "fa3", "fa3-repeats"),
        "portable": means(PORTABLE, "flex", "ours"),
        "host": report.host(found, LABELS),
    }
    for family in PROVIDERS_OF:
        made[f"cases {family}"] = report.cases_of(found, family, LABELS)
    return made


def _machine(found: Row) -> str:
    machine = found["machine"]
    commit = f", commit {machine['commit']}" if machine["commit"] else ""
    dates = sorted({began.split()[0] for began in found["runs"]})
    copies = [run["ceilings"]["copy_gbps"] / 1e3 for run in found["runs"].values()]
    products = [run["ceilings"]["matmul_bf16_tflops"] for run in found["runs"].values()]
    return (
        f"{machine['device']}, {' and '.join(dates)}, PyTorch {machine['torch']}, Triton "
        f"{machine['triton']}, cuDNN {machine['cudnn']}{commit}.\n"
        f"An 8192³ bf16 product ran at {min(products):.0f} to {max(products):.0f} TFLOP/s, "
        f"a copy at {min(copies):.2f} to {max(copies):.2f} TB/s."
    )


def filled(text: str, made: dict[str, str]) -> str:
    """Return a document with its tables; a name that is unknown is a ``KeyError``."""
    return _TABLE.sub(lambda found: f"{found[1]}\n{made[found[2]]}\n\n{found[3]}", text)


def write(found: Row) -> list[Path]:
    """Write the tables into the documents; return those that changed."""
    made = tables(found)
    changed = []
    for path in DOCUMENTS:
        text = path.read_text()
        if filled(text, made) != text:
            path.write_text(filled(text, made))
            changed.append(path)
    return changed
