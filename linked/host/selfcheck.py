"""The command ``python -m <package> [check]``; each package adds the cases that it checks."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import torch
from attn_common import Platform, detect
from torch import Tensor

from .forms import interpreted

# marks the child process, which interprets the kernels and does not print versions again
CHILD = "--in-this-process"


def print_versions(version: str) -> None:
    """Print the versions of the package, of PyTorch and of Triton."""
    package = __name__.partition(".")[0].replace("_", "-")
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = "missing"
    print(f"{package} {version}, torch {torch.__version__}, triton {triton}")
    if torch.cuda.is_available() and torch.version.hip is None:
        from ..launch.shipped.folders import folders

        fitting, aside = folders("sm_{}{}".format(*torch.cuda.get_device_capability()))
        for folder in fitting:
            print(f"compiled kernels: {len(folder.kernels)} in {folder.path}")
        for line in aside:
            print(f"compiled kernels: {line}")


def check_gradients(
    name: str,
    function: Callable[..., Any],
    reference: Callable[..., Any],
    tensors: Sequence[Tensor],
    options: dict[str, Any],
    dout: Tensor,
) -> bool:
    """Judge the output of a function and the gradients of its tensors.

    Args:
        name: title of the check.
        function: called with ``tensors`` and ``options``, like ``reference``.
        reference: the reference of ``function``.
        tensors: inputs; cast to the dtype of ``dout``, and to float64 for exact results.
        options: keyword arguments of both.
        dout: gradient of the output.
    """
    dtype = dout.dtype

    def run(call: Callable[..., Any], dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in tensors]
        out = call(*leaves, **options)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))]

    title = f"{name}, {short_name(dtype)}, forward and backward"
    got, eager = run(function, dtype), run(reference, dtype)
    return judge(title, dtype, got, eager, run(reference, torch.float64))


def judge(
    name: str,
    dtype: torch.dtype,
    got: Sequence[Tensor],
    eager: Sequence[Tensor],
    exact: Sequence[Tensor],
) -> bool:
    """Hold each result to the error budget, and print the largest share of it.

    Args:
        name: title of the check.
        dtype: dtype of the computation.
        got: results of the kernels.
        eager: results of the reference in ``dtype``.
        exact: results of the reference in float64.
    """
    # three times eager's error plus two units in the last place; an fp32 product of three TF32
    # products is exact to 2**-21
    unit = max(torch.finfo(dtype).eps, 2.0**-21)
    worst = 0.0
    for mine, plain, want in zip(got, eager, exact, strict=True):
        budget = 3 * (plain - want).abs().max() + 2 * unit * want.abs().max()
        error = ((mine - want).abs().max() / budget).item()
        worst = max(worst, error if error == error else float("inf"))
    verdict = "ok" if worst <= 1 else "MISMATCH"
    print(f"{name}: {worst:.2f} of the error budget, {verdict}", flush=True)
    return worst <= 1


def short_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module."""
    return str(dtype).removeprefix("torch.")


def run_command(
    arguments: list[str],
    describe: Callable[[Platform], None],
    check: Callable[[torch.device], bool],
    shipped: tuple[Callable[[str | None], Iterable[dict[str, Any]]], Iterable[str]] | None = None,
) -> int:
    """Run the command line; return 0 if every check passed.

    Args:
        arguments: arguments of the command line.
        describe: prints versions and tiles for a platform.
        check: checks the kernels on a device; returns whether all passed.
        shipped: what the command ``compile`` takes: the calls of a model, and the models. Default:
            it has to be given a file of calls.
    """
    if arguments[:1] == ["compile"]:
        from ..launch.compiler.command import compile_command

        return compile_command(arguments[1:], *(shipped or (None, ())))
    package = __name__.partition(".")[0]
    parser = argparse.ArgumentParser(
        prog=f"python -m {package}",
        description="Print versions, the platform and its tiles; check the kernels here.",
        epilog="Exits with 1 if a check failed. Without a GPU, the kernels are interpreted. "
        f"`python -m {package} compile --help` tells how to compile kernels into a folder.",
    )
    parser.add_argument(
        "command", nargs="?", choices=["check"], metavar="check", help="the same as without it"
    )
    parser.add_argument(CHILD, action="store_true", dest="is_child", help=argparse.SUPPRESS)
    is_child = parser.parse_args(arguments).is_child
    # a reader that closes the pipe early, such as head, causes no traceback
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    has_gpu = torch.cuda.is_available()
    if not is_child:
        describe(detect("cuda" if has_gpu else "cpu"))
    if has_gpu and not interpreted():
        print("checking the kernels on this GPU")
        return int(not check(torch.device("cuda")))
    if interpreted():
        return int(not check(torch.device("cpu")))
    if find_spec("triton") is None:
        print("neither a GPU nor Triton: checking what runs without them, in PyTorch", flush=True)
        return int(not check(torch.device("cpu")))
    print("no GPU: checking the kernels in Triton's interpreter", flush=True)
    command = [sys.executable, "-m", package, "check", CHILD]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    return subprocess.run(command, env=environment, check=False).returncode
