"""``python -m nki_paged_attn [check | cost | plan | run]``: see ``--help`` of each."""

from __future__ import annotations

import argparse
import signal
import sys
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from . import __version__, build_plan, paged_attention, paged_attention_reference
from ._paged.backends import choose_backend, find_programs
from ._paged.checks import FLOATS, FP8, MAX_HEAD_DIM
from ._paged.forms import BLOCKS, MERGES, PARTS, Buckets
from .estimate import SAMPLES, sequential_table, trace_form
from .sim import Trace, cost, find_target, write_timeline
from .sim.__main__ import add_run, run_file
from .sim.targets import default_target

# distance of 1 to the next number
EPSILON = {"float32": 2.0**-23, "bfloat16": 2.0**-7}


def describe(backend: str) -> None:
    """Print versions, the backend, and the tile choices."""
    try:
        nki = version("nki")
    except PackageNotFoundError:
        nki = "missing"
    print(f"nki-paged-attn {__version__}, numpy {np.__version__}, nki {nki}")
    where = {"sim": "our simulator", "nki-sim": "AWS's simulator", "nki": "a Neuron device"}[
        backend
    ]
    target = find_target(default_target())
    print(f"backend {backend}: {where}; {find_programs()} program(s) of a logical core")
    if backend == "sim":
        print(f"target {target.name}: {target.sbuf_bytes} B of SBUF a partition")
    print("  blocks of up to 64 tiles: 128 query rows on the partitions x 1024 or 128 keys")
    print("  up to 64 rows of a sequence: keys on the partitions, in parts of up to 4096")


def check(backend: str) -> bool:
    """Compare the kernel with the float64 reference; print a line per case."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray[Any, Any]:
        return rng.uniform(-1, 1, shape).astype(np.float32)

    sinks = np.linspace(-1, 1, 4).astype(np.float32)
    cases: dict[str, tuple[list[int], list[int], dict[str, Any]]] = {
        "prefill": ([150], [0], {}),
        "chunks": ([70, 40], [300, 33], {}),
        "decode": ([1, 1, 1], [5, 300, 1100], {}),
        "mixed, an empty sequence": ([1, 0, 90, 3], [100, 7, 0, 40], {}),
        "window, softcap": ([40, 1], [300, 90], {"window": 50, "softcap": 2.0}),
        "sinks": ([40, 1], [30, 90], {"sinks": sinks}),
    }
    good = True
    for name, (queries, contexts, options) in cases.items():
        table = sequential_table(contexts, 16)
        tokens, blocks = sum(queries), int(table.max(initial=0)) + 1
        exact = [draw(tokens, 4, 64), draw(tokens, 2, 64), draw(tokens, 2, 64)]
        cache = draw(2, blocks, 2, 16, 64)
        for dtype in (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)):
            tensors = [x.astype(dtype) for x in (*exact, cache)]
            arguments = (*tensors, table, queries, contexts)
            out = paged_attention(*arguments, backend=backend, **options)
            want, _ = paged_attention_reference(*arguments, **options)
            error = float(np.abs(out.astype(np.float64) - want).max())
            # a unit of the largest value for each of p, the output and the sum of many
            budget = 4 * max(EPSILON[dtype.name], 2.0**-19) * np.abs(want).max()
            verdict = "ok" if error <= budget else "MISMATCH"
            good &= error <= budget
            print(f"{name}, {dtype.name}: {error / budget:.2f} of the error budget, {verdict}")
    return good


def _numbers(text: str) -> list[int]:
    """Read ``1,2,3`` or ``8x512``: eight times 512."""
    found = []
    try:
        for part in text.split(","):
            count, times, value = part.partition("x")
            found += [int(value)] * int(count) if times else [int(part)]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be like 512,8x1, got {text!r}") from None
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m nki_paged_attn", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    found = commands.add_parser("check", help="compare the kernel with the reference")
    found.add_argument("--backend", default="auto", help="auto, nki, nki-sim or sim (auto)")
    add_run(commands.add_parser("run", help="run a file whose `import nki` is the simulator"))
    for name, text in (("cost", "estimate engine and DMA time"), ("plan", "show a plan")):
        found = commands.add_parser(name, help=f"{text} of a batch, without data")
        _add_batch(found)
        if name == "cost":
            _add_cost(found)
    return parser


def _add_batch(parser: argparse.ArgumentParser) -> None:
    def number(name: str, default: int | None, text: str) -> None:
        parser.add_argument(name, type=int, default=default, metavar="N", help=text)

    parser.add_argument(
        "--queries",
        type=_numbers,
        default=[512, 1, 1],
        metavar="512,8x1",
        help="new tokens of each sequence; 8x1 is eight times 1 (512,2x1)",
    )
    parser.add_argument(
        "--contexts",
        type=_numbers,
        default=[0, 4096, 4096],
        metavar="0,8x4096",
        help="cached tokens of each sequence (0,2x4096)",
    )
    number("--heads", 8, "query heads (8)")
    number("--kv-heads", 1, "heads of the cache (1)")
    number("--head-dim", 128, f"dimension of a head, {MAX_HEAD_DIM} at most (128)")
    number("--block-size", 32, "tokens of a block of the cache (32)")
    number("--window", None, "keys that a token sees at most (all)")


def _add_cost(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype", default="bfloat16", choices=FLOATS, help="of the queries (bfloat16)"
    )
    parser.add_argument(
        "--cache-dtype", choices=(*FLOATS, *FP8), help="of the cache (that of the queries)"
    )
    target = default_target()
    parser.add_argument("--target", default=target, help=f"trn2 or trn3 ({target})")
    parser.add_argument(
        "--programs", type=int, default=1, choices=(1, 2), help="cores of the logical core (1)"
    )
    parser.add_argument("--html", metavar="FILE.html", help="where to write a timeline as a page")
    parser.add_argument(
        "--trace", metavar="FILE.json", help="where to write a timeline as Chrome's trace events"
    )


def _print_plan(arguments: argparse.Namespace) -> None:
    table = sequential_table(arguments.contexts, arguments.block_size)
    plan = build_plan(
        arguments.queries,
        arguments.contexts,
        table,
        arguments.block_size,
        heads=arguments.heads,
        kv_heads=arguments.kv_heads,
        window=arguments.window,
    )
    print(plan)
    for spec, count in plan.counts.items():
        print(f"  {_describe(spec)}: {count}")


def _describe(spec: tuple[int, ...]) -> str:
    """Describe a loop of a form."""
    if spec[0] == BLOCKS:
        return f"blocks of {spec[1]} tiles"
    if spec[0] == PARTS:
        return f"{'last ' * spec[3]}parts of {spec[1]} chunks, {spec[2]} tokens"
    if spec[0] == MERGES:
        return f"merges of {spec[1]} parts, {spec[2]} tokens"
    return "merges of two tiles"


def _run_batch(arguments: argparse.Namespace) -> int:
    queries, contexts = arguments.queries, arguments.contexts
    if len(queries) != len(contexts):
        raise ValueError(
            f"--contexts must be as many as --queries, {len(queries)}, got {len(contexts)}"
        )
    if arguments.command == "plan":
        _print_plan(arguments)
        return 0
    for option, suffix in (("html", ".html"), ("trace", ".json")):
        path = getattr(arguments, option)
        if path and Path(path).suffix != suffix:
            raise ValueError(f"--{option} must be a file that ends in {suffix}, got {path!r}")
    names = [
        "heads",
        "kv_heads",
        "head_dim",
        "block_size",
        "dtype",
        "cache_dtype",
        "window",
        "target",
        "programs",
    ]
    shape = {name: getattr(arguments, name) for name in names}
    # each loop body once, as a compiler counts
    form = trace_form(queries, contexts, **shape, samples=0)
    # a timeline shows all iterations
    samples = None if arguments.html or arguments.trace else SAMPLES
    trace = trace_form(queries, contexts, **shape, samples=samples)
    print(Buckets().find(len(queries), sum(queries), max(contexts, default=0)))
    print(f"  compiled: {_forms(form)}")
    print(cost(trace))
    for path in (arguments.html, arguments.trace):
        if path:
            write_timeline(trace, path)
            print(f"timeline in {path}")
    return 0


def _forms(trace: Trace) -> str:
    """Describe the distinct instructions of a program, sizes included."""
    own = [i for i in trace.instructions if not i.program]
    forms = {(i.op, i.engine, i.elements, i.stationary, i.form) for i in own}
    ops = Counter(i.op for i in own)
    kinds = ", ".join(f"{count} {op}" for op, count in ops.most_common())
    return f"{len(forms)} forms of {len(own)} instructions: {kinds}"


def main(arguments: list[str]) -> int:
    """Run the command line; 0 if every check passed, 1 if one did not, 2 if it cannot run."""
    try:
        found = _parser().parse_args(arguments)
        if found.command == "run":
            return run_file(found)
        if found.command in ("cost", "plan"):
            return _run_batch(found)
        backend = choose_backend(getattr(found, "backend", "auto"))
        describe(backend)
    except (ImportError, NotImplementedError, OSError, ValueError) as error:
        # of the arguments and of the environment, not of the checks
        print(f"python -m nki_paged_attn: {error}", file=sys.stderr)
        return 2
    return int(not check(backend))


if __name__ == "__main__":
    # a reader that stops early, as head does, ends the program without a traceback
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main(sys.argv[1:]))
