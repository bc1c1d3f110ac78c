"""Measure the error of every kernel, and how much of its a-priori bound it takes.

    python ci/errors.py --json errors.json                         # on a GPU
    TRITON_INTERPRET=1 python ci/errors.py --device cpu --only d64/causal

For each result of each case (``device_cases.py``): the largest error relative to the largest exact
value, and where docs/numerics.md derives a bound, quantiles of error over bound of all elements.
"""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

from device_cases import CASES, Case
from results import about, chosen, commit, parser_of, write

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
        error = error.nan_to_num(nan=torch.inf, posinf=torch.inf)
        found[name] = {"relative": error.max().item() / max(largest, 1e-30)}
        if name in bounds:
            ratio = bounds[name].ratio(value).flatten().sort().values
            last = ratio.numel() - 1
            over = {str(q): ratio[round(q * last)].item() for q in QUANTILES}
            found[name]["over_bound"] = over
    return found


def is_right(found: dict[str, dict[str, Any]]) -> bool:
    """Say whether all results are within their bounds, or else near what is exact."""
    return all(
        x["over_bound"]["1.0"] <= 1 if "over_bound" in x else x["relative"] < WRONG
        for x in found.values()
    )


def main() -> None:
    given = parser_of(__doc__, has_cases=True).parse_args()
    results: dict[str, Any] = {}
    bad = []
    for case in chosen(CASES.values(), given):
        try:
            found = results[case.name] = measure(case, given.device)
            bad += [] if is_right(found) else [case.name]
        except Exception:
            results[case.name] = {"failed": traceback.format_exc(limit=-2)}
            bad.append(case.name)
        print(case.name, json.dumps(results[case.name]), flush=True)
        write({"commit": commit(), **about(given.device), "cases": results}, given.json)
    print(f"{len(results)} cases, {len(bad)} beyond their bound or failed", *bad, sep="\n  ")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
