"""Run other repositories' kernels on the simulator, unmodified, and write what comes of each.

``python benchmarks/upstream/run.py FOLDER [--write FILE] [--results FOLDER]``; the first folder has
a checkout of each repository of ``COMMITS``, under its name and at its commit. None of their code
is kept.
"""

from __future__ import annotations

import argparse
import ast
import collections
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

HERE = Path(__file__).parent
COMMITS = {
    "autocomp": "dd26a56",
    "aws-neuron-sdk": "81ce03ae",
    "neuronx-distributed-inference": "4bcdc54",
    "nki-autotune": "d57bcc3",
    "nki-library": "d2ad3a5",
    "nki-samples": "6905a68",
    "trainium-model-translation": "ec42154",
    "triton-viz": "203b0c7",
    "trnfft": "9c494a8",
    "trnrand": "cb37049",
    "trnsolver": "48a415c",
    "trnsparse": "6ae5ad9",
    "vllm-neuron": "a5ef7c8",
}
IMPORTS = re.compile(r"^\s*(import|from) nki\b", re.MULTILINE)
# own tests of repositories: what pytest is given, and the environment
LIBRARY = ["--noconftest", "-p", "library_plugin", "-m", "fast", "test/integration"]
SUITES = {
    "nki-library": (LIBRARY, {}),
    "trainium-model-translation": (
        ["models/qwen3_6_moe/tests"],
        {"NEURON_PLATFORM_TARGET_OVERRIDE": "trn3"},
    ),
    **{
        name: (["-m", "nki_simulator", "tests"], {f"{name.upper()}_USE_SIMULATOR": "1"})
        for name in ("trnfft", "trnrand", "trnsolver", "trnsparse")
    },
}
RANKS = ("wrong", "right", "refused", "expected", "slow", "error", "skipped")
SAID = {
    "right": "right",
    "refused": "refused",
    "wrong": "**wrong**",
    "expected": "wrong, as upstream expects",
    "slow": "too large",
    "error": "its own error",
    "skipped": "skipped",
    "none": "not driven",
}


INTRODUCTION = (
    "Written by `nox -s nki-upstream -- FOLDER`. Each kernel ran unmodified, at the commit "
    "below, on the simulator of this package, and was compared with its repository's own "
    "reference or with one in NumPy. Nothing ran on a device. Kernels are those that "
    "`nki.jit` decorates, in order of path, and those that upstream's tests run. *Not driven* "
    "are those for which neither a test nor a case of ours has inputs; *too large* are those "
    "whose calls take longer than the session gives them."
)


def summary(total: collections.Counter, good: int, modules: int) -> str:
    """Return the numbers that the README quotes."""
    return (
        f"{total['right']} kernels are right, {total['refused']} refused, {total['wrong']} wrong. "
        f"{total['expected']} lose precision as upstream's own marks expect of NKI, "
        f"{total['slow']} are too large, {total['error']} fail by an error of their own, and "
        f"{total['none']} are not driven. {good} of nki-library's {modules} modules import."
    )


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def check(root: Path) -> None:
    """Stop unless each checkout is there, at its commit, and unmodified."""
    for name, commit in COMMITS.items():
        if not (root / name).is_dir():
            sys.exit(f"{root / name}: a checkout of {name} at {commit} is missing")
        found = git(root / name, "rev-parse", "HEAD").strip()
        if not found.startswith(commit):
            sys.exit(f"{root / name} must be at {commit}, is at {found[:8]}")
        if changed := git(root / name, "diff", "HEAD", "--name-only", "--diff-filter=M"):
            sys.exit(f"{root / name} must be unmodified, has changes in {changed.split()[0]}")


def find_kernels(folder: Path) -> list[tuple[str, str]]:
    """Return the decorated kernels of a checkout, in order of path."""
    found = []
    for file in sorted(git(folder, "ls-files", "*.py").split("\n")):
        path = folder / file
        if not path.is_file() or re.search(
            r"(^|/)(tests?|api|test_[^/]*|[^/]*_test)(/|\.py)", file
        ):
            continue
        text = path.read_text(errors="replace")
        if not IMPORTS.search(text):
            continue
        try:
            tree = ast.parse(text)
        except SyntaxError:
            found.append((file, "(a syntax error)"))
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and any(map(is_jit, node.decorator_list)):
                found.append((file, node.name))
    return found


def is_jit(node: ast.expr) -> bool:
    node = node.func if isinstance(node, ast.Call) else node
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name in ("jit", "nki_jit")


def environment(root: Path, **more: str) -> dict[str, str]:
    library = root / "nki-library"
    paths = [str(HERE), str(library / "src"), str(library), str(library / "src" / "nkilib_src")]
    old = os.environ.get("PYTHONPATH", "")
    own = {"PYTHONPATH": os.pathsep.join([*paths, *filter(None, [old])]), "OMP_NUM_THREADS": "1"}
    return {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **own, **more}


def run_suite(root: Path, name: str, results: Path) -> list[dict]:
    """Run a repository's own tests, and return what the recorder says of each."""
    arguments, more = SUITES[name]
    out, folder = results / f"{name}.jsonl", root / name
    if not out.exists():
        command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider"]
        command += ["-c", os.devnull, f"--rootdir={folder}", "--continue-on-collection-errors"]
        command += ["-p", "installer", "-p", "recorder", *arguments]
        own = environment(root, NKI_UPSTREAM_OUT=str(out), **more)
        own["PYTHONPATH"] += os.pathsep + str(folder)
        subprocess.run(command, cwd=folder, env=own, stdout=subprocess.DEVNULL)
    lines = out.read_text().splitlines() if out.exists() else []
    return [json.loads(line) for line in lines]


def run_cases(root: Path) -> list[tuple[str, str, str, dict]]:
    """Run the cases of this folder."""
    sys.path[:0] = [str(HERE), str(root / "nki-library" / "src")]
    import installer  # noqa: F401
    import recorder
    from cases import CASES

    recorder.record()
    return [
        (c.repository, c.file, c.kernel, recorder.guarded(lambda c=c: c.run(root), 60))
        for c in CASES
    ]


def count_modules(root: Path) -> tuple[int, int]:
    """Return how many of nki-library's modules import, and how many there are."""
    source = root / "nki-library" / "src"
    files = sorted(source.glob("nkilib_src/nkilib/**/*.py"))
    names = [".".join(f.relative_to(source).with_suffix("").parts) for f in files]
    code = (
        "import importlib, installer, sys\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n        importlib.import_module(name.removesuffix('.__init__'))\n"
        "        print('good', name)\n"
        "    except BaseException:\n        pass\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *names], env=environment(root), capture_output=True, text=True
    )
    return len(re.findall("^good ", done.stdout, re.MULTILINE)), len(names)


def collect(root: Path, results: Path) -> tuple[dict, dict]:
    """Return the judgements by (repository, file, kernel), and what reached no kernel, by why."""
    judged = collections.defaultdict(list)
    unreached = collections.defaultdict(collections.Counter)
    for repository, file, kernel, found in run_cases(root):
        judged[repository, file, kernel].append(found)
    for name in SUITES:
        folder = str(root / name) + os.sep
        for found in run_suite(root, name, results):
            inside = [(f, k) for f, k in found["kernels"] if f.startswith(folder)]
            for file, kernel in inside:
                judged[name, file.removeprefix(folder), kernel].append(found)
            if not inside and found["status"] not in ("right", "skipped"):
                test = found["test"].partition("::")[0]
                unreached[name][test, found["status"], found["why"]] += 1
    return judged, unreached


def describe(found: list[dict]) -> tuple[str, str]:
    """Return the status of a kernel from those of its calls, and a sentence on it."""
    counts = collections.Counter(f["status"] for f in found)
    status = next((s for s in RANKS if counts[s]), "none")
    parts = [f"{counts['right']} of {len(found)} calls"] if counts["right"] else []
    for kind in ("wrong", "refused", "expected", "error", "slow"):
        whys = sorted({f["why"] for f in found if f["status"] == kind})
        parts += [f"{kind}: {clean(why)}" if counts["right"] else clean(why) for why in whys[:2]]
    return status, "; ".join(parts)


def clean(text: str) -> str:
    text = re.sub(r"\b(sbuf|psum|shared_hbm|private_hbm)_\d+", r"\1", text)
    # no path of the machine
    text = re.sub(rf"/\S*/(?=({'|'.join(COMMITS)})/)", "", text)
    return text.replace("|", "\\|").replace("<", "&lt;")[:180]


def write(root: Path, judged: dict, unreached: dict) -> str:
    """Return the page."""
    good, modules = count_modules(root)
    rows, sums = [], collections.defaultdict(collections.Counter)
    for name in COMMITS:
        known = find_kernels(root / name)
        tested = sorted(k[1:] for k in judged if k[0] == name)
        for file, kernel in sorted({*known, *tested}):
            status, text = describe(judged.get((name, file, kernel), []))
            if kernel == "(a syntax error)":
                status, text = "error", "a syntax error"
            sums[name][status] += 1
            rows.append(f"| {name} | `{file}` | `{kernel}` | {SAID[status]} | {text} |")
    total = sum(sums.values(), collections.Counter())
    heads = ("right", "refused", "wrong", "expected", "slow", "error", "none")
    lines = [
        "# Other repositories' kernels on the simulator",
        "",
        *textwrap.wrap(INTRODUCTION, 118),
        "",
        *textwrap.wrap(summary(total, good, modules), 118),
        "",
        "| repository | commit | " + " | ".join(SAID[h] for h in heads) + " |",
        "|---|---|" + "---:|" * len(heads),
        *(
            f"| {name} | {commit} | " + " | ".join(str(sums[name][h]) for h in heads) + " |"
            for name, commit in COMMITS.items()
        ),
        "",
        "## Kernels",
        "",
        "| repository | file | kernel | result | |",
        "|---|---|---|---|---|",
        *rows,
        "",
        "## Tests that reached no kernel",
        "",
        "| repository | file | tests | | why |",
        "|---|---|---:|---|---|",
        *(
            f"| {name} | `{test}` | {count} | {SAID[status]} | {clean(why)} |"
            for name in sorted(unreached)
            for (test, status, why), count in sorted(unreached[name].items())
        ),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the folder of the checkouts")
    parser.add_argument("--write", type=Path, help="the page to write; default: print it")
    parser.add_argument(
        "--results",
        type=Path,
        help="a folder for what tests give; a suite that is there is not run",
    )
    arguments = parser.parse_args()
    root = arguments.folder.resolve()
    check(root)
    with tempfile.TemporaryDirectory() as scratch:
        results = arguments.results or Path(scratch)
        results.mkdir(exist_ok=True)
        page = write(root, *collect(root, results.resolve()))
    if arguments.write:
        arguments.write.write_text(page)
    else:
        print(page)
    if "| **wrong** |" in page.partition("## Kernels")[2]:
        sys.exit("some kernels give wrong numbers")


if __name__ == "__main__":
    main()
