"""Plant generated mistakes in kernels, one at a time, and see whether a package's tests notice.

    python ci/mutants.py lightning-attn --seconds 600 --json mutants.json
    python ci/mutants.py lightning-attn --list --kind dropped
    python ci/mutants.py lightning-attn --file walk.py --only walk_kernel --count 5

Each mistake gets a process, forked from one that has imported torch and Triton, and a copy of the
package's source. Outcomes:

    caught      a test failed, or the package did not load
    hung        the tests took four times as long as without a mistake; counts as caught
    survived    all tests passed
    not run     all tests passed, and also when the place raised: the interpreters do not get there

The score is caught / (caught + survived). ``ci/survivors.json`` says why a mutant that is known to
survive changes no result; those are listed as explained, and still count as survivors. The status
is 1 if another survives.
"""

from __future__ import annotations

import argparse
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
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mutations import Mutation, mutations_of, sample

ROOT = Path(__file__).resolve().parent.parent
SURVIVORS = ROOT / "ci" / "survivors.json"
# which tests see a file of _kernels/, files or parts of them: the first line whose pattern fits
TESTS: dict[str, list[tuple[str, str]]] = {
    "lightning-attn": [
        ("hopper/*", "test_gluon.py"),
        ("decode.py", "test_decode.py test_poison.py"),
        ("decay_gradient.py", "test_backward.py test_varlen.py"),
        ("arrival.py", "test_distributed.py"),
        ("primitives.py", "test_forward.py test_decode.py test_backward.py"),
        ("*", "test_forward.py test_backward.py test_varlen.py"),
    ],
    "prefix-prefill": [
        ("hopper/_linked/*", "test_gluon.py test_gluon_mla.py"),
        ("hopper/mla*", "test_gluon_mla.py"),
        (
            "hopper/consumer.py",
            "test_gluon.py test_gluon_chunks.py::test_scales_of_values_of_any_size"
            " test_gluon_chunks.py::test_new_keys_beside_a_cache_of_fewer_bits",
        ),
        (
            "hopper/wide*",
            "test_gluon.py::test_poison_of_an_fp8_cache test_gluon.py::test_fp8_cache"
            " test_gluon_chunks.py::test_a_cache_of_integers"
            " test_gluon_chunks.py::test_new_keys_beside_a_cache_of_fewer_bits",
        ),
        ("hopper/scales.py", "test_gluon_chunks.py"),
        ("hopper/*", "test_gluon.py"),
        ("invariant/hopper/*", "test_gluon_invariant.py"),
        ("invariant/*", "test_invariant.py test_invariant_forms.py"),
        ("cache.py", "test_cache.py test_quantised_writes.py"),
        ("kvcache.py", "test_kvcache.py test_kvcache_quantised.py"),
        ("mla.py", "test_mla.py"),
        ("merge.py", "test_cascade.py test_attention.py"),
        ("words.py", "test_quantised.py"),
        (
            "in_order.py",
            "test_attention.py::test_a_packed_cache_is_read_as_it_lies"
            " test_poison.py::test_no_read_beyond_a_packed_cache",
        ),
        ("queries.py", "test_attention.py test_cascade.py test_tree.py"),
        (
            "walk.py",
            "test_attention.py test_fp8.py test_tree.py test_quantised.py"
            " test_poison.py::test_no_read_of_a_cache_without_pages",
        ),
        ("*", "test_attention.py test_fp8.py test_tree.py test_quantised.py"),
    ],
    "flash-attn-triton": [
        ("_linked/*", "test_tanh.py test_forward.py test_backward.py test_varlen.py"),
        ("hopper/_linked/softmax.py", "test_tanh.py test_gluon.py test_gluon_backward.py"),
        ("hopper/_linked/*", "test_gluon.py test_gluon_backward.py"),
        ("hopper/tree*", "test_gluon_tree.py"),
        ("hopper/*bias*", "test_gluon_bias.py"),
        ("hopper/backward*", "test_gluon_backward.py"),
        ("hopper/fp8.py", "test_gluon_fp8.py"),
        ("hopper/values.py", "test_gluon_fp8.py"),
        ("hopper/ordered.py", "test_gluon_order.py"),
        ("hopper/round_dq.py", "test_gluon_backward.py"),
        ("hopper/*", "test_gluon.py test_gluon_fp8.py"),
        ("tree*", "test_tree.py"),
        ("invariant/hopper/*", "test_gluon_invariant.py"),
        ("invariant/*", "test_invariant.py"),
        ("backward_short.py", "test_short.py"),
        ("sharded_merge.py", "test_pieces.py"),
        (
            "forward.py",
            "test_forward.py test_varlen.py test_fp8.py"
            " test_poison.py::test_no_read_beyond_a_tensor"
            " test_poison.py::test_a_nan_stays_out_of_tiles_that_do_not_see_it",
        ),
        (
            "b*.py",
            "test_backward.py test_varlen.py test_poison.py::test_no_read_beyond_a_tensor"
            " test_poison.py::test_a_nan_stays_out_of_tiles_that_do_not_see_it",
        ),
        ("*", "test_forward.py test_backward.py test_varlen.py"),
    ],
    "blocksparse-attn": [
        ("hopper/_linked/*", "test_gluon.py test_gluon_backward.py"),
        ("hopper/backward*", "test_gluon_backward.py test_gluon_repeats.py"),
        ("hopper/row_gradients.py", "test_gluon_repeats.py"),
        (
            "hopper/[fq]*",
            "test_gluon.py::test_without_a_mistake"
            " test_gluon.py::test_what_one_half_of_a_tile_sees_alone"
            " test_gluon.py::test_rows_that_begin_with_the_queries test_gluon.py::test_packed"
            " test_gluon.py::test_a_layout_per_sequence"
            " test_gluon.py::test_rows_that_keep_nothing_are_0_beside_values_that_are_nan",
        ),
        ("hopper/*", "test_gluon.py"),
        (
            "pair*.py",
            "test_planning.py::test_the_example_of_the_docs"
            " test_planning.py::test_pairs[cpu-128x64-1-causal]"
            " test_planning.py::test_pairs[cpu-32x32-3-causal]"
            " test_planning.py::test_pairs[cpu-64x16-0-causal]"
            " test_planning.py::test_no_pair_is_read_or_written_beyond_a_tensor",
        ),
        ("sums.py", "test_gluon_backward.py"),
        (
            "lists.py",
            "test_planning.py::test_nothing_is_read_or_written_beyond_a_tensor"
            " test_token_rule.py::test_whole_blocks_are_found"
            " test_planning.py::test_lists_of_one_group_of_heads_after_the_other"
            " test_planning.py::test_odd_layouts test_planning.py::test_lists",
        ),
        ("merge.py", "test_varlen.py test_poison.py::test_no_read_beyond_a_tensor"),
        (
            "backward_rows.py",
            "test_backward.py test_poison.py test_gluon_backward.py::test_without_a_mistake"
            " test_gluon_backward.py::test_packed",
        ),
        (
            "backward*",
            "test_backward.py test_poison.py test_token_rule.py::test_matches_reference"
            " test_token_rule.py::test_packed_matches_reference",
        ),
        (
            "forward.py",
            "test_forward.py test_varlen.py test_semantics.py"
            " test_poison.py::test_no_read_beyond_a_tensor",
        ),
        (
            "*",
            "test_forward.py test_varlen.py test_align.py test_backward.py test_token_rule.py"
            " test_poison.py::test_no_read_beyond_a_tensor",
        ),
    ],
    "nki-paged-attn": [("write.py", "test_write.py"), ("*", "test_kernel.py")],
}
CAUGHT, SURVIVED, HUNG, NOT_RUN = "caught", "survived", "hung", "not run"


def tests_of(package: str, file: str) -> tuple[str, ...]:
    """Return the tests that see a file of ``_kernels/``."""
    for pattern, names in TESTS[package]:
        if fnmatch.fnmatch(file, pattern):
            return tuple(names.split())
    raise LookupError(f"no tests for {file} of {package}")


def import_name(package: str) -> str:
    return package.replace("-", "_")


def kernels_of(package: str) -> Path:
    return ROOT / "packages" / package / "src" / import_name(package) / "_kernels"


def files_of(package: str) -> list[str]:
    """Return the names of the files of ``_kernels/``, and of linked ones those that it uses."""
    folder = kernels_of(package)
    walked = os.walk(folder, followlinks=True)
    paths = [Path(place) / name for place, _, names in walked for name in names]
    texts = {p.relative_to(folder).as_posix(): p.read_text() for p in paths if p.suffix == ".py"}
    own = "\n".join(text for name, text in texts.items() if "_linked/" not in name)
    used = set(re.findall(r"_linked\.(\w+)", own))
    linked = {Path(name).stem: text for name, text in texts.items() if "_linked/" in name}
    while (
        more := {
            stem for name in used for stem in re.findall(r"from \.(\w+)", linked.get(name, ""))
        }
        - used
    ):
        used |= more
    return sorted(name for name in texts if "_linked/" not in name or Path(name).stem in used)


def all_mutations(package: str) -> list[Mutation]:
    """Return every mutation of a package's kernels, in the order of files and lines."""
    # nki kernels are functions without a decorator
    is_nki = package == "nki-paged-attn"
    folder = kernels_of(package)
    made = (mutations_of(folder / f, f, every_function=is_nki) for f in files_of(package))
    return [mutation for mutations in made for mutation in mutations]


class Tree:
    """A copy of a package's source, in which one file at a time is not as it should be."""

    def __init__(self, package: str, folder: Path) -> None:
        self.package, self.source = package, folder / "src"
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "packages" / package / "src", self.source, ignore=ignored)
        compileall.compile_dir(self.source, quiet=1)

    @contextlib.contextmanager
    def changed(self, file: str, text: bytes) -> Any:
        path = self.source / import_name(self.package) / "_kernels" / file
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
    pytest = importlib.import_module("pytest")
    marks = [] if package == "nki-paged-attn" else ["-m", "not aot and not device and not mutation"]
    quiet = ["-x", "-q", "--tb=no", "--no-header", "-p", "no:cacheprovider"]
    status = pytest.main([*quiet, *marks, *(f"tests/{name}" for name in tests)])
    os._exit(int(status))


def run_tests(package: str, source: Path, tests: Sequence[str], limit: float) -> tuple[int, float]:
    """Return pytest's status, or -1 if the tests were ended, and the seconds they took."""
    began = time.monotonic()
    process = multiprocessing.get_context("fork").Process(
        target=_child, args=(package, source, tests)
    )
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
    path = tree.source / import_name(tree.package) / "_kernels" / mutation.file
    right = path.read_bytes()
    with tree.changed(mutation.file, mutation.applied(right)):
        status, _ = run_tests(tree.package, tree.source, tests, limit)
    if status == -1:
        return HUNG
    if status != 0:
        return CAUGHT
    with tree.changed(mutation.file, mutation.probed(right)):
        status, _ = run_tests(tree.package, tree.source, tests, limit)
    return NOT_RUN if status == 0 else SURVIVED


def _prepare() -> None:
    """Import what every child needs, once."""
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["OMP_NUM_THREADS"] = "1"
    # of no use here, and they take a second of each mutant
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    import numpy  # noqa: F401
    import torch

    torch.set_num_threads(1)
    with contextlib.suppress(ImportError):
        import triton.language  # noqa: F401


def _work(package: str, tasks: Any, results: Any) -> None:
    """Take mutations until there is none, in a copy of one's own."""
    sys.dont_write_bytecode = True
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(package, Path(folder))
        while (task := tasks.get()) is not None:
            mutation, limit = task
            results.put((mutation, outcome_of(mutation, tree, limit)))


def try_mutations(
    package: str,
    chosen: Sequence[Mutation],
    jobs: int,
    seconds: float,
    keep: Callable[[Sequence[tuple[Mutation, str]]], None],
) -> list[tuple[Mutation, str]]:
    """Try mutations in their order until the time is up; tests have to pass without any first.

    How long they take without a mistake is no part of the time. ``keep`` is called after each, with
    the outcomes up to then.
    """
    _prepare()
    end = time.monotonic() + seconds
    limits: dict[tuple[str, ...], float] = {}
    source = ROOT / "packages" / package / "src"
    context = multiprocessing.get_context("fork")
    tasks, results = context.Queue(), context.Queue()
    workers = [context.Process(target=_work, args=(package, tasks, results)) for _ in range(jobs)]
    for worker in workers:
        worker.start()
    done: list[tuple[Mutation, str]] = []
    given = 0

    def take_one() -> None:
        done.append(results.get())
        keep(done)
        _tell(done, end)

    try:
        for mutation in chosen:
            if given - len(done) >= jobs:
                take_one()
            if time.monotonic() > end:
                break
            tests = tests_of(package, mutation.file)
            if tests not in limits:
                took = _time_without(package, source, tests)
                limits[tests] = 4 * took + 30
                end += took
            tasks.put((mutation, limits[tests]))
            given += 1
        while len(done) < given:
            take_one()
    except BaseException:
        for worker in workers:
            worker.terminate()
        raise
    for _ in workers:
        tasks.put(None)
    for worker in workers:
        worker.join()
    return done


def _time_without(package: str, source: Path, tests: Sequence[str]) -> float:
    """Return how long tests take, which have to pass."""
    status, took = run_tests(package, source, tests, 1800)
    if status != 0:
        raise SystemExit(f"{package}: {' '.join(tests)} end with {status} without a mistake")
    print(f"{package}: {' '.join(tests)} take {took:.1f} s", flush=True)
    return took


def _tell(done: Sequence[tuple[Mutation, str]], end: float) -> None:
    mutation, outcome = done[-1]
    left = max(0, round(end - time.monotonic()))
    print(f"{len(done)} ({left} s left) {outcome}: {mutation.name}", flush=True)


def explained(package: str) -> dict[str, str]:
    """Return why mutants of a package are known to survive, by their names."""
    found: dict[str, str] = json.loads(SURVIVORS.read_text()).get(package, {})
    return found


def summary(
    package: str, done: Sequence[tuple[Mutation, str]], total: int, seed: int, only: str = ""
) -> Any:
    """Return what is written as JSON; ``only``: what the names of those that were drawn hold."""
    counts = Counter(outcome for _, outcome in done)
    caught = counts[CAUGHT] + counts[HUNG]
    reasons = explained(package)
    kinds: dict[str, Counter[str]] = {}
    files: dict[str, Counter[str]] = {}
    for mutation, outcome in done:
        kinds.setdefault(mutation.kind, Counter())[outcome] += 1
        files.setdefault(mutation.file, Counter())[outcome] += 1
    left = sorted((m for m, o in done if o == SURVIVED), key=lambda m: (m.file, m.line))
    return {
        "package": package,
        "commit": commit(),
        "seed": seed,
        **({"only": only} if only else {}),
        "mutations": total,
        "tried": len(done),
        **{name: counts[name] for name in (CAUGHT, HUNG, SURVIVED, NOT_RUN)},
        "score": round(caught / max(1, caught + counts[SURVIVED]), 4),
        "kinds": {name: dict(kinds[name]) for name in sorted(kinds)},
        "files": {name: dict(files[name]) for name in sorted(files)},
        "survivors": [
            {"mutant": m.name, "line": m.line, "kind": m.kind, "explained": reasons.get(m.name)}
            for m in left
        ],
        "not_run": sorted(m.name for m, o in done if o == NOT_RUN),
    }


def commit() -> str:
    """Return the commit at hand, with a plus sign if files differ from it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    found = git("rev-parse", "--short=12", "HEAD")
    dirty = git("status", "--porcelain", "--untracked-files=no")
    return found + ("+" if dirty else "") if found else "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("package", choices=sorted(TESTS))
    parser.add_argument("--seconds", type=float, default=600, help="begin no mutant after these")
    parser.add_argument("--count", type=int, help="try that many at most")
    parser.add_argument("--seed", type=int, default=0, help="of the random order")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", help="mutants whose name holds this")
    parser.add_argument("--file", default="", help="mutants of this file of _kernels/")
    parser.add_argument("--kind", default="", help="of one kind, dropped for instance")
    parser.add_argument("--json", type=Path, help="where to write what was found")
    parser.add_argument("--list", action="store_true", help="print the mutants and try none")
    given = parser.parse_args()
    found = all_mutations(given.package)
    drawn = [m for m in found if given.only in m.name and given.file in ("", m.file)]
    chosen = list(sample(drawn, given.seed))
    chosen = [m for m in chosen if given.kind in m.kind][: given.count]
    if given.list:
        print(*(f"{m.kind}: {m.name}" for m in chosen), sep="\n")
        return

    def told(done: Sequence[tuple[Mutation, str]]) -> str:
        only = given.only or given.file
        return json.dumps(summary(given.package, done, len(found), given.seed, only), indent=1)

    def keep(done: Sequence[tuple[Mutation, str]]) -> None:
        if given.json:  # so that a run that is ended leaves what it found
            given.json.write_text(told(done) + "\n")

    keep([])
    text = told(try_mutations(given.package, chosen, given.jobs, given.seconds, keep))
    print(text)
    sys.exit(any(one["explained"] is None for one in json.loads(text)["survivors"]))


if __name__ == "__main__":
    main()
