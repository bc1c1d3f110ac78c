"""Write docs/certificate.md from the results in docs/certificate/: what machines have checked.

    python ci/certificate.py            # or nox -s certificate

Results are what ``sanitize.py``, ``errors.py``, ``mutants.py``, ``cuts.py`` and ``soak.py`` write
with ``--json``. To renew one, copy its JSON over the one there; to renew some of its cases, merge
both (``sanitize.py --merge``). What has no result is said to be not run.

    sanitize-*.json, errors-*.json, mutants-*.json, law-*.json, soak-*.json
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from device_cases import ALGEBRA, CASES, Case
from mutants import explained
from results import ROOT

RESULTS = ROOT / "docs" / "certificate"
TEMPLATE = ROOT / "ci" / "certificate.md"
NOT_RUN = "not run"
TOOLS = ("memcheck", "overflow", "consan")
Told = dict[str, Any]


def load(folder: Path, kind: str) -> list[Told]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{kind}-*.json"))]


def table(head: str, rows: Iterable[list[str]]) -> str:
    """Return a table, whose columns are named with bars between; or that nothing was run."""
    names = head.split(" | ")
    # mistakes may be about an "or"
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = ["| " + " | ".join(row) + " |" for row in (names, *cells)]
    lines.insert(1, "|" + "---|" * len(names))
    return "\n".join(lines) if cells else NOT_RUN


def machine(told: Told) -> str:
    """Return where results were made: versions and device."""
    parts = [f"{name} {told[name]}" for name in ("torch", "triton") if name in told]
    parts.append(str(told.get("device", "unknown device")))
    if told.get("device") == "cpu":
        parts.append("interpreted" if told.get("interpreted") else "eager code")
    return ", ".join(parts)


def short(told: Told) -> str:
    """Return where results were made, in a word or two."""
    return machine(told).split(", ")[-1]


def groups(cases: Mapping[str, Case]) -> dict[tuple[str, ...], list[str]]:
    """Return the names of the cases of each kernel and tile."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name, case in cases.items():
        found.setdefault((case.package, case.kernel, case.tile), []).append(name)
    return found


def outcomes(told: Told | None, names: list[str]) -> str:
    """Return the outcomes of some cases, counted."""
    if told is None:
        return NOT_RUN
    counts = Counter(told["cases"].get(name, {}).get("outcome", NOT_RUN) for name in names)
    if len(counts) == 1:
        return f"{next(iter(counts))} ({len(names)})"
    return ", ".join(f"{n} {name}" for name, n in counts.most_common())


def results_of(told: Told) -> Iterator[tuple[str, str, Told]]:
    """Return each case and each of its results with their errors, but of cases that failed."""
    for case, results in told["cases"].items():
        for name, errors in results.items():
            if isinstance(errors, dict):
                yield case, name, errors


def largest(told: Told, names: list[str]) -> str:
    """Return the largest error of some cases, over the bound or else over the largest value."""
    errors = [errors for case, _, errors in results_of(told) if case in names]
    ratios = [x["over_bound"]["1.0"] for x in errors if "over_bound" in x]
    relative = [x["relative"] for x in errors if "over_bound" not in x]
    parts = [f"{max(ratios):.2f} of the bound"] if ratios else []
    parts += [f"{max(relative):.1e} of the largest value, no bound"] if relative else []
    return "; ".join(parts) or NOT_RUN


def kernels(tools: dict[str, Told], errors: list[Told]) -> str:
    """Return the table of kernels and tiles."""
    rows = [
        [*group, *(outcomes(tools.get(tool), names) for tool in TOOLS)]
        + ([largest(told, names) for told in errors] or [NOT_RUN])
        for group, names in groups(CASES).items()
    ]
    heads = [f"error, {short(told)}" for told in errors] or ["error"]
    return table(
        " | ".join(["package | kernel | tile | memcheck | overflow | ConSan", *heads]), rows
    )


def findings(tools: dict[str, Told]) -> str:
    """Return what the sanitizers said, and of how many cases."""
    said = Counter(
        (tool, finding)
        for tool, told in tools.items()
        for case in told["cases"].values()
        for finding in case.get("findings", {})
    )
    rows = [[tool, f"`{finding}`", str(n)] for (tool, finding), n in said.most_common()]
    note = "What ConSan finds is explained in [testing.md](testing.md#what-consan-finds)."
    return f"\n\n{table('tool | finding | cases', rows)}\n\n{note}" if rows else ""


def distribution(errors: list[Told]) -> str:
    """Return quantiles of error over bound for each result of a kernel, the largest of cases."""
    found: dict[tuple[str, ...], dict[str, float]] = {}
    for measured in errors:
        for case, name, told in results_of(measured):
            package, kernel, *_ = case.split("/")
            known = found.setdefault((package, kernel, name, short(measured)), {})
            for q, value in told.get("over_bound", {}).items():
                known[q] = max(value, known.get(q, 0.0))
    bounded = {key: values for key, values in sorted(found.items()) if values}
    quantiles = next((list(values) for values in bounded.values()), [])
    rows = ([*key, *(f"{x:.4f}" for x in values.values())] for key, values in bounded.items())
    return table(" | ".join(["package | kernel | result | on", *quantiles]), rows)


def mutants(told: list[Told]) -> list[str]:
    """Return the table of what was tried, and that of survivors."""
    rows, left = [], []
    for one in told:
        why = explained(one["package"])
        # of a line that is no longer as it was, what was known then
        reasons = {s["mutant"]: why.get(s["mutant"], s.get("explained")) for s in one["survivors"]}
        left += [[one["package"], f"`{x}`", reasons[x] or "not explained"] for x in reasons]
        known = sum(reasons[s["mutant"]] is not None for s in one["survivors"])
        drawn = f"`{one['only']}`" if "only" in one else "all"
        counts = [str(one[key]) for key in ("mutations", "tried")]
        counts += [str(one["caught"] + one["hung"]), f"{one['survived']}, {known} explained"]
        score = f"{100 * one['score']:.0f} %"
        rows.append([one["package"], drawn, *counts, str(one["not run"]), score, _commit(one)])
    head = "package | drawn from | mutants of the package | tried | caught | survived | not run"
    tried = table(f"{head} | score | commit", rows)
    return [tried, table("package | survivor | why", left)] if left else [tried]


def soak(told: list[Told]) -> str:
    rows = (
        [one["device"], f"{one['seconds']:.0f} s"]
        + [str(one[key]) for key in ("requests", "wrong", "repeats", "differing")]
        + [f"{one['grown_bytes'] / 2**20:.1f} MiB", _commit(one)]
        for one in told
    )
    head = "device | time | answers | wrong | repeats | differing | memory grown | commit"
    return table(head, rows)


def law(told: list[Told]) -> str:
    rows = (
        [machine(one), str(one["cuts"]), str(one["differing"])]
        + [", ".join(f"{name}: {n}" for name, n in one["with"].items()), _commit(one)]
        for one in told
    )
    return table("on | cuts | differing | of them with | commit", rows)


def _commit(told: Told) -> str:
    return f"`{told['commit']}`"


def text(folder: Path) -> str:
    """Return the certificate of the results in a folder."""
    tools = {told["tool"]: told for told in load(folder, "sanitize")}
    errors = load(folder, "errors")
    parts = [*((f"sanitize, tool {tool}", told) for tool, told in tools.items())]
    parts += [("errors", told) for told in errors]
    same = ([*group, outcomes(tools.get("fpsan"), n)] for group, n in groups(ALGEBRA).items())
    return TEMPLATE.read_text().format(
        made=table("part | on | commit", ([name, machine(x), _commit(x)] for name, x in parts)),
        kernels=kernels(tools, errors),
        findings=findings(tools),
        algebra=table("package | kernel | tile | bits of the definition", same),
        distribution=distribution(errors),
        mutants="\n\n".join(mutants(load(folder, "mutants"))),
        law=law(load(folder, "law")),
        soak=soak(load(folder, "soak")),
    )


def main() -> None:
    path = ROOT / "docs" / "certificate.md"
    path.write_text(text(RESULTS))
    print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
