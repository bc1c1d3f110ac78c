"""Measure the error of every kernel, and how much of its a-priori bound it takes.

    python ci/errors.py --json errors.json                         # on a GPU
    TRITON_INTERPRET=1 python ci/errors.py --device cpu --only d64/causal

For each result of each case (``device_cases.py``): the largest error relative to the largest exact
value, and where docs/numerics.md derives a bound, quantiles of error over bound of all elements.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from device_cases import CASES, Case

QUANTILES = (0.5, 0.9, 0.99, 0.999, 1.0)
# beyond this part of the largest value a result is wrong, and not merely rounded
WRONG = 0.1


def measure(case: Case, device: str) -> dict[str, dict[str, Any]]:
    """Run a case, and return what is said of each of its results."""
    import torch

    got, exact, bounds = case.run(device)
    found: dict[str, dict[str, Any]] = {}
    for name, value in got.items():
        wide, right = value.double(), exact[name].double()
        finite = torch.isfinite(right)
        largest = right[finite].abs().max().item() if finite.any() else 0.0
        error = torch.where(finite, (wide - right).abs(), (wide != right).double())
        error = torch.where(torch.isnan(error), torch.inf, error)
        told: dict[str, Any] = {"relative": error.max().item() / max(largest, 1e-30)}
        if name in bounds:
            ratio = bounds[name].ratio(value).flatten().sort().values
            last = ratio.numel() - 1
            told["over_bound"] = {str(q): ratio[round(q * last)].item() for q in QUANTILES}
        found[name] = told
    return found


def is_right(found: dict[str, dict[str, Any]]) -> bool:
    """Say whether all results are within their bounds, or else near what is exact."""
    return all(
        x["over_bound"]["1.0"] <= 1 if "over_bound" in x else x["relative"] < WRONG
        for x in found.values()
    )


def about() -> dict[str, Any]:
    """Return the versions that were used, the device, and whether kernels were interpreted."""
    import torch

    told: dict[str, Any] = {"torch": torch.__version__, "device": "cpu"}
    if os.environ.get("TRITON_INTERPRET") == "1":
        told["interpreted"] = True
    if "triton" in sys.modules:
        told["triton"] = sys.modules["triton"].__version__
    if torch.cuda.is_available():
        told["device"] = torch.cuda.get_device_name()
        told["capability"] = "sm_{}{}".format(*torch.cuda.get_device_capability())
    return told


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--package", default="", help="cases of one package")
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name has one of these")
    parser.add_argument("--json", type=Path, help="where to write what was found")
    given = parser.parse_args(arguments)
    from mutants import commit

    chosen = [
        case
        for case in CASES.values()
        if given.package in case.package and any(part in case.name for part in given.only)
    ]
    results: dict[str, Any] = {}
    told: dict[str, Any] = {"commit": commit()}
    for case in chosen:
        try:
            results[case.name] = measure(case, given.device)
        except Exception:
            results[case.name] = {"failed": traceback.format_exc(limit=-2)}
        print(case.name, json.dumps(results[case.name]), flush=True)
        told |= {**about(), "cases": results}
        if given.device == "cpu":
            told["device"] = "cpu"
        if given.json:  # so that a run that is ended leaves what it found
            given.json.write_text(json.dumps(told, indent=1) + "\n")
    bad = [n for n, x in results.items() if "failed" in x or not is_right(x)]
    print(f"{len(results)} cases, {len(bad)} beyond their bound or failed", *bad, sep="\n  ")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
