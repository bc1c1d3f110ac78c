"""Processes beside a benchmark: those that compile ahead, and one that calls for the first time."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import torch

from .cases import Selected
from .providers import UnsupportedError

TIMEOUT_S = 240.0


def first_line(error: BaseException) -> str:
    """Return the kind of an error and the first line of what it says."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:300]


def apart(function: Callable[..., Any], arguments: tuple[Any, ...], timeout: float) -> Any:
    """Return what a function of a module returns in a process of its own, or how that ended."""
    context = multiprocessing.get_context("spawn")
    mine, other = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(other, function, arguments), daemon=True)
    child.start()
    other.close()
    try:
        return mine.recv() if mine.poll(timeout) else "timed out"
    except EOFError:
        return "crashed"
    finally:
        child.kill()
        child.join()


def _send(pipe: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    pipe.send(function(*arguments))


def precompile(
    bench: Any, problems: Selected, providers: list[str], jobs: int, device: str = "cuda"
) -> list[str]:
    """Run each problem once in other processes, which fills the compilers' caches on disk.

    Returns:
        A line about each failure. They do no harm: the benchmark then compiles by itself.
    """
    # two processes should not compile one kernel; the largest groups first, to end together
    alike = defaultdict(list)
    for problem, passes in problems:
        alike[problem.kind()].append((problem, passes))
    groups = sorted(alike.values(), key=len, reverse=True)
    shares = [list(chain.from_iterable(groups[i::jobs])) for i in range(min(jobs, len(groups)))]
    tasks = [(bench, share, providers, device) for share in shares]
    with ThreadPoolExecutor(jobs) as pool:
        ended = list(pool.map(lambda task: apart(run_once, task, TIMEOUT_S), tasks))
    lines = chain.from_iterable([one] if isinstance(one, str) else one for one in ended)
    return [f"compile ahead: {line}" for line in lines]


def run_once(bench: Any, problems: Selected, providers: list[str], device: str) -> list[str]:
    """Call problems with providers that compile; return a line about each failure."""
    lines = []
    for problem, passes in problems:
        inputs = bench.make_inputs(problem, device)
        for name in bench.providers_of(problem, providers):
            try:
                prepared = bench.providers[name].prepare(problem, inputs, passes)
                with prepared.context():
                    for one in set(passes) & set(prepared.calls):
                        prepared.calls[one]()
                if device == "cuda":
                    torch.cuda.synchronize()
            except UnsupportedError:
                continue
            except Exception as error:  # said once more, with the result, by the benchmark
                lines.append(f"{problem.name}: {name}: {first_line(error)}")
        inputs = prepared = None
        if device == "cuda":
            torch.cuda.empty_cache()
    return lines


def first_call(case: str, program: str) -> dict[str, Any]:
    """Run a program that prints seconds as JSON, with an empty kernel cache."""
    row: dict[str, Any] = {"case": case, "family": "host", "provider": "ours", "status": "ok"}
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TRITON_CACHE_DIR": cache}
        command = [sys.executable, "-c", program]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
            )
            row["seconds"] = json.loads(done.stdout.splitlines()[-1])
        except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
            row |= {"status": "failed", "message": type(error).__name__}
    return row
