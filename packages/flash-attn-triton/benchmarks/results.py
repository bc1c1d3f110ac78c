"""The file of results: runs of one version on one machine, merged by case. Needs no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def merge(old: Row | None, new: Row) -> Row:
    """Return the results of a file with those of a run in place of the cases that it measured.

    A case's rows come from one run, so that their ratios do. Each row names its run by the time
    that it began.

    Args:
        old: What the file holds: ``machine``, ``runs``, ``results`` and ``host``; None: nothing.
        new: The same of the run.

    Raises:
        ValueError: the two come from different machines, versions or commits.
    """
    if old is None:
        return new
    for name in sorted({*old["machine"], *new["machine"]}):
        before, now = (one["machine"].get(name) for one in (old, new))
        if before != now:
            raise ValueError(f"the file holds results of {name} {before}, this is {now}")
    merged: Row = {"machine": new["machine"]}
    for kind in ("results", "host"):
        measured = {row["case"] for row in new[kind]}
        merged[kind] = [r for r in old[kind] if r["case"] not in measured] + new[kind]
    used = {row["run"] for kind in ("results", "host") for row in merged[kind]}
    runs = {**old["runs"], **new["runs"]}
    merged["runs"] = {name: runs[name] for name in sorted(runs) if name in used}
    return merged


def read(path: Path) -> Row:
    """Return the results of a file."""
    found: Row = json.loads(path.read_text())
    return found


def write(results: Row, path: Path) -> None:
    """Write the results, a row to a line."""
    parts = []
    for name in ("machine", "runs"):
        parts.append(f" {json.dumps(name)}: {json.dumps(results[name])}")
    for name in ("results", "host"):
        rows = ",\n".join(f"  {json.dumps(row)}" for row in results[name])
        parts.append(f" {json.dumps(name)}: [\n{rows}\n ]")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")
