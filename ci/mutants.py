"""Plant generated mistakes in kernels, one at a time, and see whether a package's tests notice.

    python ci/mutants.py lightning-attn --seconds 600 --json mutants.json
    python ci/mutants.py lightning-attn --list --kind dropped
    python ci/mutants.py lightning-attn --file _linear/portable/walk.py --count 5

Each mistake gets a process, forked from one that has imported torch and Triton, and a copy of the
package's source. ``mutants.json`` says which tests see a file. Outcomes:

    caught      a test failed, or the package did not load
    hung        the tests took four times as long as without a mistake; counts as caught
    survived    all tests passed
    not run     all tests passed, and also when the place raised: the interpreters do not get there

The score is caught / (caught + survived). ``ci/survivors.json`` says why a mutant that is known to
survive changes no result; those are listed as explained, and still count as survivors. The status
is 1 if another survives.
"""

from __future__ import annotations

import compileall
import contextlib
import fnmatch
import importlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from mutations import Mutation, mutations_of, sample
from results import ROOT, commit, parser_of, write

SURVIVORS = ROOT / "ci" / "survivors.json"
# which tests see a file of a package, files or parts of them: the first line whose pattern fits
TESTS: dict[str, dict[str, list[str]]] = json.loads((ROOT / "ci" / "mutants.json").read_text())
IMPORT = r"^ *from (\.+)([\w.]*) import (\((?:[^)]*)\)|.*)"
# a kernel as its launch names it
KERNEL = r'Kernel\(\s*__package__,\s*"(\.+)([\w.]+)"'
CAUGHT, SURVIVED, HUNG, NOT_RUN = "caught", "survived", "hung", "not run"
Outcome = tuple[Mutation, str]


def tests_of(package: str, file: str) -> tuple[str, ...]:
    """Return the tests that see a file of a package."""
    for pattern, names in TESTS[package].items():
        if fnmatch.fnmatch(file, pattern):
            return tuple(names)
    raise LookupError(f"no tests for {file} of {package}")


def source_of(package: str) -> Path:
    return ROOT / "packages" / package / "src"


def package_of(package: str, source: Path | None = None) -> Path:
    return (source or source_of(package)) / package.replace("-", "_")


def files_of(package: str) -> list[str]:
    """Return the files that hold kernels, and of linked ones those that the package uses."""
    folder = package_of(package)
    walked = os.walk(folder, followlinks=True)
    paths = [Path(place) / name for place, _, names in walked for name in names]
    texts = {p.relative_to(folder).as_posix(): p.read_text() for p in paths if p.suffix == ".py"}
    if package == "nki-paged-attn":
        return sorted(name for name in texts if name.startswith("_kernels/"))
    used, more = set[str](), {name for name in texts if "_linked/" not in name}
    while more:
        used |= more
        more = {found for name in more for found in _imported(name, texts)} - used
    return sorted(
        name for name in used if re.search(r"^@(entry\()?\w+\.jit", texts[name], re.MULTILINE)
    )


def _imported(name: str, texts: dict[str, str]) -> Iterator[str]:
    """Yield the files that one file imports modules or names of, or names the kernels of."""
    named = [(*found, "") for found in re.findall(KERNEL, texts[name])]
    for dots, module, names in [*re.findall(IMPORT, texts[name], re.MULTILINE), *named]:
        base = [*Path(name).parts[: -len(dots)], *filter(None, module.split("."))]
        for more in ([], *([word] for word in re.findall(r"\w+", names))):
            if (file := "/".join([*base, *more]) + ".py") in texts:
                yield file


def all_mutations(package: str) -> list[Mutation]:
    """Return every mutation of a package's kernels, in the order of files and lines."""
    # nki kernels are functions without a decorator
    is_nki, folder = package == "nki-paged-attn", package_of(package)
    files = files_of(package)
    return [m for f in files for m in mutations_of(folder / f, f, every_function=is_nki)]


class Tree:
    """A copy of a package's source, in which one file at a time is not as it should be."""

    def __init__(self, package: str, folder: Path) -> None:
        self.package, self.source = package, folder / "src"
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source_of(package), self.source, ignore=ignored)
        compileall.compile_dir(self.source, quiet=1)

    def path(self, file: str) -> Path:
        return package_of(self.package, self.source) / file

    @contextlib.contextmanager
    def changed(self, file: str, text: bytes) -> Any:
        path = self.path(file)
        right, times = path.read_bytes(), path.stat()
        path.write_bytes(text)
        # so that no compiled form of it, which has its time and perhaps its size, is taken
        os.utime(path, (times.st_atime + 10, times.st_mtime + 10))
        try:
            yield
        finally:
            path.write_bytes(right)
            os.utime(path, (times.st_atime, times.st_mtime))


def _child(package: str, source: Path, tests: Sequence[str]) -> None:
    """Run tests in a forked process, and end it with pytest's status."""
    os.setpgrp()
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    sys.path.insert(0, str(source))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])
    os.chdir(ROOT / "packages" / package)
    importlib.import_module("torch").set_num_threads(1)
    marks = [] if package == "nki-paged-attn" else ["-m", "not aot and not device and not mutation"]
    quiet = ["-x", "-q", "--tb=no", "--no-header", "-p", "no:cacheprovider"]
    pytest = importlib.import_module("pytest")
    os._exit(int(pytest.main([*quiet, *marks, *map(path_of, tests)])))


def path_of(test: str) -> str:
    """Return where a test lies from its package's folder, by the name of its file."""
    file, *rest = test.split("::")
    (path,) = Path("tests").rglob(file)
    return "::".join([str(path), *rest])


def run_tests(package: str, source: Path, tests: Sequence[str], limit: float) -> tuple[int, float]:
    """Return pytest's status, or -1 if the tests were ended, and the seconds they took."""
    began = time.monotonic()
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_child, args=(package, source, tests))
    process.start()
    process.join(limit)
    status = process.exitcode
    if status is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
        process.join()
        status = -1
    return status, time.monotonic() - began


def outcome_of(mutation: Mutation, tree: Tree, limit: float) -> str:
    """Plant a mistake, and say what the tests make of it."""
    tests = tests_of(tree.package, mutation.file)
    right = tree.path(mutation.file).read_bytes()
    with tree.changed(mutation.file, mutation.applied(right)):
        status, _ = run_tests(tree.package, tree.source, tests, limit)
    if status != 0:
        return HUNG if status == -1 else CAUGHT
    with tree.changed(mutation.file, mutation.probed(right)):
        status, _ = run_tests(tree.package, tree.source, tests, limit)
    return NOT_RUN if status == 0 else SURVIVED


def _prepare() -> None:
    """Have the process that others are forked from import what every one of them needs."""
    os.environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    # of no use here, and they take a second of each mutant
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    needed = ["numpy", "pytest", "torch", "triton.language"]
    multiprocessing.get_context("forkserver").set_forkserver_preload(needed)


def try_mutations(
    package: str,
    chosen: Sequence[Mutation],
    jobs: int,
    seconds: float,
    keep: Callable[[Sequence[Outcome]], None],
) -> list[Outcome]:
    """Try mutations in their order until the time is up; tests have to pass without any first.

    How long they take without a mistake is no part of the time. ``keep`` is called after each, with
    the outcomes up to then.
    """
    _prepare()
    end = time.monotonic() + seconds
    limits: dict[tuple[str, ...], float] = {}
    done: list[Outcome] = []
    running: set[Future[Outcome]] = set()
    spare: SimpleQueue[Tree] = SimpleQueue()

    def one(mutation: Mutation, limit: float) -> Outcome:
        tree = spare.get()
        outcome = outcome_of(mutation, tree, limit)
        spare.put(tree)
        return mutation, outcome

    def take(least: int) -> None:
        """Wait until fewer than so many are running."""
        while len(running) >= least:
            finished, _ = wait(running, return_when=FIRST_COMPLETED)
            running.difference_update(finished)
            for future in finished:
                done.append(future.result())
                keep(done)
                _tell(done, end)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        for number in range(jobs):
            spare.put(Tree(package, Path(folder) / str(number)))
        for mutation in chosen:
            take(jobs)
            if time.monotonic() > end:
                break
            tests = tests_of(package, mutation.file)
            if tests not in limits:
                took = _time_without(package, source_of(package), tests)
                limits[tests] = 4 * took + 30
                end += took
            running.add(pool.submit(one, mutation, limits[tests]))
        take(1)
    return done


def _time_without(package: str, source: Path, tests: Sequence[str]) -> float:
    """Return how long tests take, which have to pass."""
    status, took = run_tests(package, source, tests, 1800)
    if status != 0:
        raise SystemExit(f"{package}: {' '.join(tests)} end with {status} without a mistake")
    print(f"{package}: {' '.join(tests)} take {took:.1f} s", flush=True)
    return took


def _tell(done: Sequence[Outcome], end: float) -> None:
    mutation, outcome = done[-1]
    left = max(0, round(end - time.monotonic()))
    print(f"{len(done)} ({left} s left) {outcome}: {mutation.name}", flush=True)


def explained(package: str) -> dict[str, str]:
    """Return why mutants of a package are known to survive, by their names."""
    found: dict[str, str] = json.loads(SURVIVORS.read_text()).get(package, {})
    return found


def summary(done: Sequence[Outcome], **head: Any) -> dict[str, Any]:
    """Return what is written as JSON after its first lines."""
    counts = Counter(outcome for _, outcome in done)
    caught = counts[CAUGHT] + counts[HUNG]
    reasons = explained(head["package"])
    left = sorted((m for m, o in done if o == SURVIVED), key=lambda m: (m.file, m.line))
    return {
        **head,
        "tried": len(done),
        **{name: counts[name] for name in (CAUGHT, HUNG, SURVIVED, NOT_RUN)},
        "score": round(caught / max(1, caught + counts[SURVIVED]), 4),
        "survivors": [
            {"mutant": m.name, "line": m.line, "kind": m.kind, "explained": reasons.get(m.name)}
            for m in left
        ],
        "not_run": sorted(m.name for m, o in done if o == NOT_RUN),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("package", choices=sorted(TESTS))
    parser.add_argument("--seconds", type=float, default=600, help="begin no mutant after these")
    parser.add_argument("--count", type=int, help="try that many at most")
    parser.add_argument("--seed", type=int, default=0, help="of the random order")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", help="mutants whose name holds this")
    parser.add_argument("--file", default="", help="mutants of this file of the package")
    parser.add_argument("--kind", default="", help="of one kind, dropped for instance")
    parser.add_argument("--list", action="store_true", help="print the mutants and try none")
    given = parser.parse_args()
    found = all_mutations(given.package)
    if given.file and given.file not in {m.file for m in found}:
        parser.error(f"--file must be a file that holds kernels, got {given.file!r}")
    drawn = [m for m in found if given.only in m.name and given.file in ("", m.file)]
    chosen = [m for m in sample(drawn, given.seed) if given.kind in m.kind][: given.count]
    if given.list:
        print(*(f"{m.kind}: {m.name}" for m in chosen), sep="\n")
        return
    head = {"package": given.package, "commit": commit(), "seed": given.seed}
    if only := given.only or given.file:
        head["only"] = only
    head["mutations"] = len(found)

    def keep(done: Sequence[Outcome]) -> None:
        write(summary(done, **head), given.json)

    keep([])
    done = try_mutations(given.package, chosen, given.jobs, given.seconds, keep)
    told = summary(done, **head)
    print(json.dumps(told, indent=1))
    sys.exit(any(one["explained"] is None for one in told["survivors"]))


if __name__ == "__main__":
    main()
