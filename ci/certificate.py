"""Write docs/certificate.md from the results in docs/certificate/: what machines have checked.

    python ci/certificate.py            # or nox -s certificate

Results are what ``sanitize.py``, ``errors.py``, ``mutants.py`` and ``soak.py`` write with
``--json``. To renew one, copy its JSON over the one there; to renew some of its cases, merge both
(``sanitize.py --merge``). What has no result is said to be not run.

    sanitize-*.json, errors-*.json, mutants-*.json, soak-*.json
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from device_cases import ALGEBRA, CASES, ROOT
from mutants import explained

RESULTS = ROOT / "docs" / "certificate"
NOT_RUN = "not run"
TOOLS = ("memcheck", "overflow", "consan")
HEAD = """# Certificate

What was checked by machines, kernel by kernel. `nox -s certificate` writes this page from the JSON
files in `docs/certificate/`. Each names the commit it was made from, with a plus sign if files
differed from it. What the tools do, and what they cannot see, stands in
[testing.md](testing.md#sanitizers-and-errors), the bounds in
[numerics.md](numerics.md#error-bounds).

What is said to be not run has not been. On a CPU "eager code" is the definition's arithmetic, not a
kernel's, and "interpreted" is the portable kernel: the algorithm, without the rounding of products
to 16 bits, without registers, and without anything that happens at the same time. No tool here sees
a fault of a compiler for a GPU that none of the cases runs into, or an input unlike the cases'.
"""


def load(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{kind}-*.json"))]


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    # mistakes may be about an "or"
    cells = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    return [*lines, *("| " + " | ".join(row) + " |" for row in cells)]


def machine(told: dict[str, Any]) -> str:
    """Return where results were made: versions and device."""
    parts = [f"{name} {told[name]}" for name in ("torch", "triton") if name in told]
    parts.append(str(told.get("device", "unknown device")))
    if told.get("device") == "cpu":
        parts.append("interpreted" if told.get("interpreted") else "eager code")
    return ", ".join(parts)


def outcomes(told: dict[str, Any] | None, names: list[str]) -> str:
    """Return the outcomes of some cases, counted."""
    if told is None:
        return NOT_RUN
    found = [told["cases"].get(name, {}).get("outcome", NOT_RUN) for name in names]
    counts = Counter(found)
    if len(counts) == 1:
        return f"{found[0]} ({len(found)})"
    return ", ".join(f"{n} {name}" for name, n in counts.most_common())


def largest(told: dict[str, Any] | None, names: list[str]) -> str:
    """Return the largest error of some cases, over the bound or else over the largest value."""
    if told is None:
        return NOT_RUN
    ratios, relative = [], []
    for name in names:
        for result in told["cases"].get(name, {}).values():
            if isinstance(result, dict) and "over_bound" in result:
                ratios.append(result["over_bound"]["1.0"])
            elif isinstance(result, dict):
                relative.append(result["relative"])
    parts = [f"{max(ratios):.2f} of the bound"] if ratios else []
    parts += [f"{max(relative):.1e} of the largest value, no bound"] if relative else []
    return "; ".join(parts) or NOT_RUN


def short(told: dict[str, Any]) -> str:
    """Return where results were made, in a word or two."""
    return machine(told).split(", ")[-1]


def kernels(tools: dict[str, dict[str, Any]], errors: list[dict[str, Any]]) -> list[str]:
    """Return the table of kernels and tiles."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name, case in CASES.items():
        groups.setdefault((case.package, case.kernel, case.tile), []).append(name)
    rows = []
    for (package, kernel, tile), names in groups.items():
        found = [outcomes(tools.get(tool), names) for tool in TOOLS]
        found += [largest(told, names) for told in errors] or [NOT_RUN]
        rows.append([package, kernel, tile, *found])
    head = ["package", "kernel", "tile", "memcheck", "overflow", "ConSan"]
    head += [f"error, {short(told)}" for told in errors] or ["error"]
    return table(head, rows)


def algebra(told: dict[str, Any] | None) -> list[str]:
    """Return the table of what FpSan compared."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name, case in ALGEBRA.items():
        groups.setdefault((case.package, case.kernel, case.tile), []).append(name)
    rows = [[*group, outcomes(told, names)] for group, names in groups.items()]
    return table(["package", "kernel", "tile", "bits of the definition"], rows)


def findings(tools: dict[str, dict[str, Any]]) -> list[str]:
    """Return what the sanitizers said, and of how many cases."""
    said: Counter[tuple[str, str]] = Counter()
    for tool, told in tools.items():
        for case in told["cases"].values():
            said.update((tool, finding) for finding in case.get("findings", {}))
    rows = [[tool, f"`{finding}`", str(n)] for (tool, finding), n in said.most_common()]
    if not rows:
        return []
    note = "What ConSan finds is explained in [testing.md](testing.md#what-consan-finds)."
    return ["", *table(["tool", "finding", "cases"], rows), "", note]


def distribution(errors: list[dict[str, Any]]) -> list[str]:
    """Return quantiles of error over bound for each result of a kernel, the largest of cases."""
    found: dict[tuple[str, str, str, str], dict[str, float]] = {}
    for measured in errors:
        for name, case in measured["cases"].items():
            for result, told in case.items():
                if isinstance(told, dict) and "over_bound" in told:
                    package, kernel, *_ = name.split("/")
                    key = package, kernel, result, short(measured)
                    known = found.setdefault(key, {})
                    for q, value in told["over_bound"].items():
                        known[q] = max(value, known.get(q, 0.0))
    rows = [
        [*key, *(f"{value:.4f}" for value in known.values())]
        for key, known in sorted(found.items())
    ]
    quantiles = list(next(iter(found.values()))) if found else []
    return table(["package", "kernel", "result", "on", *quantiles], rows) if rows else [NOT_RUN]


def mutants(told: list[dict[str, Any]]) -> list[str]:
    rows, left = [], []
    for one in told:
        why = explained(one["package"])
        # of a line that is no longer as it was, what was known then
        reasons = {s["mutant"]: why.get(s["mutant"], s.get("explained")) for s in one["survivors"]}
        left += [[one["package"], f"`{x}`", reasons[x] or "not explained"] for x in reasons]
        explained_ones = sum(reasons[s["mutant"]] is not None for s in one["survivors"])
        caught = one["caught"] + one["hung"]
        rows.append(
            [
                one["package"],
                f"`{one['only']}`" if "only" in one else "all",
                str(one["mutations"]),
                str(one["tried"]),
                str(caught),
                f"{one['survived']}, {explained_ones} explained",
                str(one["not run"]),
                f"{100 * one['score']:.0f} %",
                f"`{one['commit']}`",
            ]
        )
    head = [
        "package",
        "drawn from",
        "mutants of the package",
        "tried",
        "caught",
        "survived",
        "not run",
        "score",
        "commit",
    ]
    survivors = ["package", "survivor", "why"]
    return [
        *(table(head, rows) if rows else [NOT_RUN]),
        *(["", *table(survivors, left)] if left else []),
    ]


def soak(told: list[dict[str, Any]]) -> list[str]:
    rows = [
        [
            one["device"],
            f"{one['seconds']:.0f} s",
            str(one["requests"]),
            str(one["wrong"]),
            str(one["repeats"]),
            str(one["differing"]),
            f"{one['grown_bytes'] / 2**20:.1f} MiB",
            f"`{one['commit']}`",
        ]
        for one in told
    ]
    head = ["device", "time", "answers", "wrong", "repeats", "differing", "memory grown", "commit"]
    return table(head, rows) if rows else [NOT_RUN]


def law(told: list[dict[str, Any]]) -> list[str]:
    rows = [
        [
            machine(one),
            str(one["cuts"]),
            str(one["differing"]),
            ", ".join(f"{name}: {n}" for name, n in one["with"].items()),
            f"`{one['commit']}`",
        ]
        for one in told
    ]
    head = ["on", "cuts", "differing", "of them with", "commit"]
    return table(head, rows) if rows else [NOT_RUN]


def text(folder: Path) -> str:
    """Return the certificate of the results in a folder."""
    tools = {told["tool"]: told for told in load(folder, "sanitize")}
    measured = load(folder, "errors")
    made = [
        [f"sanitize, tool {tool}", machine(told), f"`{told['commit']}`"]
        for tool, told in tools.items()
    ]
    made += [["errors", machine(told), f"`{told['commit']}`"] for told in measured]
    parts = [
        HEAD,
        "## Made from",
        "",
        *(table(["part", "on", "commit"], made) if made else [NOT_RUN]),
        "",
        "## Kernels",
        "",
        "Outcomes of the cases of each kernel and tile, and how many there are. The error is the",
        "largest of all elements.",
        "",
        *kernels(tools, measured),
        *findings(tools),
        "",
        "## Same algebra",
        "",
        "Forwards by the kernel for Hopper and by the portable one, built with FpSan: both outputs",
        "have to have the bits of the definition, softmax over all keys at once.",
        "",
        *algebra(tools.get("fpsan")),
        "",
        "## Measured error over bound",
        "",
        "Quantiles over the elements of a result, of each the largest of all cases.",
        "",
        *distribution(measured),
        "",
        "## Generated mistakes",
        "",
        *mutants(load(folder, "mutants")),
        "",
        "## The law",
        "",
        "Random chunks and decodes by prefix-prefill, held to the bits of a training forward by",
        "flash-attn-triton: [the law of `invariant=True`](numerics.md#the-law-of-invarianttrue).",
        "",
        *law(load(folder, "law")),
        "",
        "## Soak",
        "",
        *soak(load(folder, "soak")),
    ]
    return "\n".join(parts) + "\n"


def main() -> None:
    path = ROOT / "docs" / "certificate.md"
    path.write_text(text(RESULTS))
    print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
