"""Write what builds spill to a package's tests/spills.json, from what its tests reported.

    nox -s "compile(lightning-attn)" -- --write     # builds all there is, and runs this
    ATTN_AOT_REPORT=FILE pytest -m aot              # in the package's folder, then
    python ci/spills.py lightning-attn FILE         # only what was built

Each number that changes is printed. A build that spills and that no pattern under ``reasons`` fits
is printed too; the exit status is then 1. See ``linked/testing/spills.py``.
"""

from __future__ import annotations

import argparse
import json
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def merge(known: dict[str, Any], report: list[dict[str, Any]], everything: bool) -> dict[str, Any]:
    """Return what is known with the numbers of a report, or with these alone."""
    versions, bounds = known["triton"], {} if everything else known.get("bounds", {})
    spills = {} if everything else {name: list(x) for name, x in known["spills"].items()}
    measured: dict[tuple[str, str], int] = {}
    for line in report:
        name, version, spilled = (line[key] for key in ("build", "triton", "spilled"))
        if measured.setdefault((name, version), spilled) != spilled:
            raise ValueError(f"two builds are called {name}")
        unknown = None if is_fit(name, bounds) else 0
        numbers = spills.setdefault(name, [unknown] * len(versions))
        numbers[versions.index(version)] = spilled
    kept = {name: x for name, x in sorted(spills.items()) if any(x) or is_fit(name, bounds)}
    return {**known, "bounds": bounds, "spills": kept}


def is_fit(name: str, patterns: dict[str, Any]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def unexplained(known: dict[str, Any]) -> list[str]:
    """Return the builds that spill without a reason."""
    spilling = [name for name, numbers in known["spills"].items() if any(numbers)]
    return [name for name in spilling if not is_fit(name, known["reasons"])]


def text_of(known: dict[str, Any]) -> str:
    """Return the file, with a line for each build."""
    sections = []
    for title, value in known.items():
        if isinstance(value, dict) and value:
            lines = (f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            sections.append(f'  "{title}": {{\n' + ",\n".join(lines) + "\n  }")
        elif value:
            sections.append(f'  "{title}": {json.dumps(value)}')
    return "{\n" + ",\n".join(sections) + "\n}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("package")
    parser.add_argument("reports", nargs="+", type=Path)
    parser.add_argument("--all", action="store_true", help="nothing else is built any more")
    options = parser.parse_args()
    path = ROOT / "packages" / options.package / "tests" / "spills.json"
    before = json.loads(path.read_text())
    lines = (line for report in options.reports for line in report.read_text().splitlines())
    after = merge(before, [json.loads(line) for line in lines], options.all)
    path.write_text(text_of(after))
    for name in sorted(before["spills"].keys() | after["spills"].keys()):
        old, new = (known["spills"].get(name) for known in (before, after))
        if old != new:
            print(f"{name}: {old} -> {new}")
    for name in (missing := unexplained(after)):
        print(f"no reason for {name}")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
