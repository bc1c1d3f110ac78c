"""``python -m <package> compile``: the kernels of calls, compiled into a folder."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from attn_common import detect

from ...host.forms import noting
from ..shipped.folders import FOLDERS, PACKAGE

GPUS = "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120"

# a call, as a line of JSON has it: the function's name, its arguments, tensors as [dtype, shape]
Call = dict[str, Any]


def compile_command(
    arguments: list[str],
    calls_of: Callable[[str | None], Iterable[Call]] | None,
    models: Iterable[str],
) -> int:
    """Compile the kernels of calls into a folder; return 0.

    Args:
        arguments: arguments of the command line behind ``compile``.
        calls_of: returns the calls of a model, or the common ones for None. None: they come from a
            file.
        models: the models that ``calls_of`` knows.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {PACKAGE} compile",
        description="Compile kernels for a GPU, which need not be here, into a folder.",
        epilog=f"A process that finds the folder in the environment variable {FOLDERS} launches "
        "the kernels without Triton and without a compiler.",
    )
    parser.add_argument("--gpu", required=True, choices=GPUS, help="the GPU to compile for")
    which = parser.add_mutually_exclusive_group(required=calls_of is None)
    if calls_of is not None:
        which.add_argument(
            "--like",
            choices=sorted(models),
            help="a model whose calls to compile (default: common calls)",
        )
    which.add_argument(
        "--calls",
        type=Path,
        help='lines of JSON: {"function": NAME, "backward": true, "arguments": {...}}, a tensor as '
        '["bfloat16", [2, 4096, 16, 128]]',
    )
    parser.add_argument("--out", required=True, type=Path, help="the folder, made if missing")
    given = parser.parse_args(arguments)
    os.environ["ATTN_COMMON_PLATFORM"] = f"nvidia:{given.gpu}"
    # names of files and lines would double the size of the kernels
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    detect.cache_clear()
    if given.calls is None and calls_of is not None:
        calls = list(calls_of(given.like))
    else:
        calls = [json.loads(line) for line in given.calls.read_text().splitlines() if line]
    from .shipping import ship

    noted = [launch for call in calls for launch in launches_of(call)]
    start = time.monotonic()

    def say(done: int, total: int) -> None:
        spent = time.monotonic() - start
        print(f"\r{done} of {total} kernels, {spent:.0f} s", end="", flush=True)

    new, held = ship(noted, torch.device("meta"), given.out, say)
    print(f"\r{len(calls)} calls: {new} kernels compiled, {held} in {given.out}")
    return 0


def launches_of(call: Call) -> list[Any]:
    """Return what a call launches.

    Raises:
        ValueError: the call is not of the form that the command's help shows.
    """
    package = importlib.import_module(PACKAGE)
    function = getattr(package, str(call.get("function")), None)
    if not callable(function) or not isinstance(call.get("arguments"), dict):
        raise ValueError(f"a call must have a function of {PACKAGE} and its arguments, got {call}")
    arguments = {name: _argument(value) for name, value in call["arguments"].items()}
    leaves = [x for x in arguments.values() if isinstance(x, torch.Tensor)]
    leaves = [x for x in leaves if x.is_floating_point()]
    backward = bool(call.get("backward"))
    with noting() as noted:
        for x in leaves:
            x.requires_grad_(backward)
        results = function(**arguments)
        if backward:
            out = results[0] if isinstance(results, tuple) else results
            torch.autograd.grad(out, leaves, torch.empty_like(out))
    return noted


def _argument(value: Any) -> Any:
    """Return an argument of a call; a dtype with a shape is a tensor without data."""
    if isinstance(value, list) and len(value) == 2 and isinstance(value[0], str):
        dtype, shape = value
        return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
    return tuple(value) if isinstance(value, list) else value
