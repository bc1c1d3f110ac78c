"""Processes beside the benchmark that call its problems first: their kernels compile in parallel.

Each is the benchmark again, ``bench_prefix_prefill.py --compile "NAME;NAME"``. What it compiles is
in the cache on disk when the benchmark asks for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch
from cases import BY_NAME, Problem
from providers import FEW, PROVIDERS, UnsupportedError, make_inputs

SCRIPT = Path(__file__).with_name("bench_prefix_prefill.py")
# a process holds inputs of up to 5 GB
MOST_JOBS = 12
TIMEOUT_S = 240.0


def jobs_of_machine() -> int:
    """Return how many processes compile side by side, unless one says otherwise."""
    return max(1, min(MOST_JOBS, (os.cpu_count() or 1) - 4))


def precompile(problems: list[Problem], providers: list[str], jobs: int) -> list[str]:
    """Call each problem once in other processes.

    Returns:
        A line about each failure. They do no harm: the benchmark then compiles by itself.
    """
    groups = _alike(problems)
    shares = [";".join(chain.from_iterable(groups[i::jobs])) for i in range(jobs)]
    options = ["--providers", ",".join(providers)]
    children = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), "--compile", share, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for share in filter(None, shares)
    ]
    lines = []
    deadline = time.monotonic() + TIMEOUT_S
    for child in children:
        try:
            output, _ = child.communicate(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            output, _ = child.communicate()
            lines.append("compile ahead: a process ran out of time")
        marked = [line for line in output.splitlines() if line.startswith("compile ahead")]
        lines += marked
        if child.returncode and not marked:
            last = output.strip().splitlines()[-1:] or ["no output"]
            lines.append(f"compile ahead: a process failed: {last[0]}")
    return lines


def _alike(problems: Iterable[Problem]) -> list[list[str]]:
    """Return names in groups of one kernel each: two processes should not compile it both."""
    groups: dict[tuple[Problem, bool], list[str]] = defaultdict(list)
    for problem in problems:
        kind = replace(problem, name="", family="", lengths=())
        groups[kind, problem.max_new < FEW].append(problem.name)
    # the largest first, for the processes to end together
    return sorted(groups.values(), key=len, reverse=True)


def call_once(names: list[str], providers: list[str]) -> None:
    """Call problems, by name, with every provider that compiles."""
    for name in names:
        try:
            inputs = make_inputs(BY_NAME[name], "cuda")
            for provider in providers:
                if PROVIDERS[provider].compiles:
                    try:
                        PROVIDERS[provider].prepare(BY_NAME[name], inputs)()
                    except UnsupportedError:
                        continue
            torch.cuda.synchronize()
        except Exception as error:  # said once more, with the result, by the parent
            text = (str(error).splitlines() or [""])[0]
            print(f"compile ahead: {name}: {type(error).__name__}: {text}")
        inputs = None
        torch.cuda.empty_cache()
