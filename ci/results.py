"""What the commands of this folder share: how they are called, and what a file of results says."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OURS = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))


def parser_of(doc: str | None, *, has_cases: bool = False) -> argparse.ArgumentParser:
    """Return a parser with the options that all commands have, or all that run cases."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="where to write what was found")
    if has_cases:
        parser.add_argument("--device", default="cuda")
        parser.add_argument("--package", default="", help="cases of one package")
        parser.add_argument("--only", nargs="+", default=[""], help="if the name has one of these")
    return parser


def chosen(cases: Iterable[Any], given: argparse.Namespace) -> list[Any]:
    """Return the cases that ``--package`` and ``--only`` leave."""
    asked = (case for case in cases if given.package in case.package)
    return [case for case in asked if any(part in case.name for part in given.only)]


def commit() -> str:
    """Return the commit at hand, with a plus sign if files differ from it."""
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def about(device: str = "cuda") -> dict[str, Any]:
    """Return the versions that were used, the device, and whether kernels were interpreted."""
    import torch

    told: dict[str, Any] = {"torch": torch.__version__, "device": "cpu"}
    if os.environ.get("TRITON_INTERPRET") == "1":
        told["interpreted"] = True
    if "triton" in sys.modules:
        told["triton"] = sys.modules["triton"].__version__
    if torch.cuda.is_available():
        told["capability"] = "sm_{}{}".format(*torch.cuda.get_device_capability())
        if device != "cpu":
            told["device"] = torch.cuda.get_device_name()
    return told


def write(told: Any, path: Path | None) -> None:
    """Write what was found to a file, if there is one; a run that is ended leaves what it wrote."""
    if path:
        path.write_text(json.dumps(told, indent=1) + "\n")
