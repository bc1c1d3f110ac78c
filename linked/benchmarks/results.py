"""The file of results: runs of one version on one machine, merged by case."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import json
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]
# the lists of a file: times of devices, and of the host
KINDS = ("results", "host")


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
    for name in sorted({*old["machine"], *new["machine"]} - {"date"}):
        before, now = (one["machine"].get(name) for one in (old, new))
        if before != now:
            text = f"the file holds results of {name} {before}, this is {now}"
            raise ValueError(f"{text}; --anew begins it anew")
    return _joined(old, new)


def _joined(old: Row, new: Row) -> Row:
    merged: Row = {"machine": new["machine"]}
    for kind in KINDS:
        measured = {row["case"] for row in new[kind]}
        merged[kind] = [r for r in old[kind] if r["case"] not in measured] + new[kind]
    used = {row["run"] for kind in KINDS for row in merged[kind]}
    runs = {**old["runs"], **new["runs"]}
    merged["runs"] = {name: runs[name] for name in sorted(runs) if name in used}
    return merged


def read(*paths: Path) -> Row:
    """Return the results of a file, with cases that further ones have in place of its own."""
    first, *others = (json.loads(path.read_text()) for path in paths)
    for other in others:
        first = {**_joined(first, other), "machine": first["machine"]}
    return first


def write(results: Row, path: Path) -> None:
    """Write the results, a row to a line."""
    parts = []
    for name in ("machine", "runs"):
        parts.append(f" {json.dumps(name)}: {json.dumps(results[name])}")
    for name in KINDS:
        rows = ",\n".join(f"  {json.dumps(row)}" for row in results[name])
        parts.append(f" {json.dumps(name)}: [\n{rows}\n ]")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def copy_gbps(results: Row, row: Row) -> float | None:
    """Return the bandwidth of a copy in the run of a row, if it was measured."""
    run = results["runs"].get(row.get("run"))
    return run["ceilings"].get("copy_gbps") if run else None


def commit_of(folder: Path) -> str | None:
    """Return the commit that is measured, with ``+`` behind it if sources differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    try:
        name = git("rev-parse", "--short=12", "HEAD")
        return name + ("+" if git("status", "--porcelain", "--", "../src") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def describe(package: str, device: str, commit: str | None) -> Row:
    """Return what the numbers depend on: machine, versions, commit, date."""
    found: Row = {"device": platform.machine(), "commit": commit, "torch": torch.__version__}
    found[package] = getattr(importlib.import_module(package), "__version__", None)
    for name in ("triton", "flash-linear-attention"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    found["python"] = platform.python_version()
    found["date"] = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "device": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return found
