"""Processes beside the benchmark: those that compile ahead, and one that calls for the first time.

A child is this benchmark again, ``bench_flash_attn.py --child '<json>'``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from cases import PROBLEMS, PROVIDERS_OF, Problem
from checks import make_inputs
from providers import UnsupportedError
from rivals import PROVIDERS

SCRIPT = Path(__file__).with_name("bench_flash_attn.py")
TIMEOUT_S = 240.0


def _start(task: dict[str, Any], **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCRIPT), "--child", json.dumps(task)]
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", **variables}
    return subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def precompile(
    problems: list[tuple[str, tuple[str, ...]]], providers: list[str], jobs: int
) -> list[str]:
    """Run each problem once in other processes, which fills the compilers' caches on disk.

    Args:
        problems: Names and passes.
        providers: Those that compile.
        jobs: Number of processes.

    Returns:
        A line about each failure. They do no harm: the benchmark then compiles by itself.
    """
    if not providers:
        return []
    groups = _alike(problems)
    shares = [list(chain.from_iterable(groups[i::jobs])) for i in range(min(jobs, len(groups)))]
    children = [
        _start({"kind": "compile", "problems": share, "providers": providers}) for share in shares
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


def _alike(
    problems: list[tuple[str, tuple[str, ...]]],
) -> list[list[tuple[str, tuple[str, ...]]]]:
    """Return the problems in groups: two processes should not compile one kernel."""
    known = {problem.name: problem for problem in PROBLEMS}
    groups: dict[Problem, list[tuple[str, tuple[str, ...]]]] = {}
    for name, passes in problems:
        kind = replace(known[name], name="", lengths=(), passes=())
        groups.setdefault(kind, []).append((name, passes))
    # the largest first, for the processes to end together
    return sorted(groups.values(), key=len, reverse=True)


def first_call() -> dict[str, Any]:
    """Time the first calls of a process with an empty kernel cache: one shape class, d 128."""
    row: dict[str, Any] = {"case": "host-first-call", "provider": "ours", "status": "ok"}
    with tempfile.TemporaryDirectory() as cache:
        child = _start({"kind": "first-call"}, TRITON_CACHE_DIR=cache)
        try:
            output, _ = child.communicate(timeout=TIMEOUT_S)
            found = [line for line in output.splitlines() if line.startswith("{")]
            row["seconds"] = json.loads(found[-1])
        except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
            child.kill()
            row |= {"status": "failed", "message": f"{type(error).__name__}"}
    return row


def run_child(text: str) -> int:
    """Do what the parent asks for."""
    task = json.loads(text)
    if task["kind"] == "first-call":
        _call_first()
    else:
        _compile(task["problems"], task["providers"])
    return 0


def _compile(problems: list[tuple[str, list[str]]], providers: list[str]) -> None:
    known = {problem.name: problem for problem in PROBLEMS}
    for name, passes in problems:
        problem = known[name]
        inputs = make_inputs(problem, "cuda")
        for provider in PROVIDERS_OF[problem.family]:
            if provider not in providers:
                continue
            try:
                prepared = PROVIDERS[provider].prepare(problem, inputs, "bwd" in passes)
                with prepared.context():
                    if "fwd" in passes:
                        prepared.forward()
                    if prepared.backward is not None:
                        prepared.backward()
                torch.cuda.synchronize()
            except UnsupportedError:
                continue
            except Exception as error:  # said once more, with the result, by the parent
                text = str(error).strip().splitlines()[:1]
                print(f"compile ahead: {name}: {provider}: {type(error).__name__}: {text}")


def _call_first() -> None:
    import flash_attn_triton as fat

    q, k, v = (
        torch.randn(1, 4096, 16, 128, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for _ in range(3)
    )
    torch.cuda.synchronize()
    seconds = {}
    start = time.perf_counter()
    out = fat.flash_attn_func(q, k, v, causal=True)
    torch.cuda.synchronize()
    seconds["forward"] = time.perf_counter() - start
    start = time.perf_counter()
    out.sum().backward()
    torch.cuda.synchronize()
    seconds["backward"] = time.perf_counter() - start
    seconds["all"] = sum(seconds.values())
    print(json.dumps(seconds))
