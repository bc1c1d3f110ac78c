"""Several GPUs of one machine: their process group, times of calls on all of them, results.

Times are taken in turns, as GPUs that are hot are slower.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .results import Row, commit_of, describe

WARM_UP, REPEATS = 3, 7
# of the norm of what is compared; of a row's, and the mean one's, ten times as much
LIMITS = {torch.bfloat16: 0.02, torch.float32: 1e-4}


@contextlib.contextmanager
def joined(kind: str) -> Iterator[torch.device]:
    """Join the processes that torchrun started; yield this one's device, of a kind.

    NVLink multicast stays off unless NCCL_NVLS_ENABLE is set.
    """
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    device = torch.device(kind)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(minutes=5))
    try:
        yield device
    finally:
        dist.destroy_process_group()


def in_turns(
    functions: list[Callable[[], Any]], device: torch.device, calls: int = 10
) -> list[float]:
    """Return the time of a call of each function, in ms.

    It is the median of ``REPEATS`` times of so many calls, which the functions take in turns, as
    GPUs that are hot are slower.
    """
    for function in functions:
        for _ in range(WARM_UP):
            function()
    taken: list[list[float]] = [[] for _ in functions]
    for _ in range(REPEATS):
        for function, times in zip(functions, taken, strict=True):
            times.append(milliseconds(function, device, calls))
    return [statistics.median(times) for times in taken]


def milliseconds(function: Callable[[], Any], device: torch.device, calls: int) -> float:
    """Return the time of one of so many calls between two events, the largest of all ranks."""
    dist.barrier()
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(calls):
            function()
        end.record()
        torch.cuda.synchronize()
        taken = begin.elapsed_time(end) / calls
    else:
        start = time.perf_counter()
        for _ in range(calls):
            function()
        taken = 1e3 * (time.perf_counter() - start) / calls
    longest = torch.tensor(taken, device=device)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return float(longest)


class Way(NamedTuple):
    """A way to compute on this rank: a function of its leaves, and the gradient of its result.

    ``cut`` takes a rank's part of what is whole.
    """

    function: Callable[..., Tensor]
    leaves: list[Tensor]
    dout: Tensor
    cut: Callable[[Tensor], Tensor] = lambda x: x


def way_of(function: Callable[..., Tensor], given: Sequence[Tensor], **more: Any) -> Way:
    """Return a way on tensors of its own: inputs, and the gradient of the output."""
    *inputs, dout = (x.detach().contiguous() for x in given)
    return Way(function, [x.requires_grad_() for x in inputs], dout, **more)


def differentiate(way: Way) -> list[Tensor]:
    """Return the output and the gradients."""
    out = way.function(*way.leaves)
    return [out.detach(), *torch.autograd.grad(out, way.leaves, way.dout)]


def time_passes(ways: list[Way], device: torch.device) -> list[list[float]]:
    """Return the times of both passes in ms, for each of the ways."""

    def back(way: Way, out: Tensor) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(out, way.leaves, way.dout, retain_graph=True)

    with torch.no_grad():
        ahead = in_turns([functools.partial(way.function, *way.leaves) for way in ways], device)
    backs = in_turns([back(way, way.function(*way.leaves)) for way in ways], device)
    return [list(pair) for pair in zip(ahead, backs, strict=True)]


def captured(function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """Put a call into a CUDA graph; return its replay, and what the call returned."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph.replay, result


class WrongResultError(RuntimeError):
    """A result is not that of one GPU."""


def check(name: str, got: Iterable[Tensor], want: Iterable[Tensor], of_rows: bool = True) -> None:
    """Raise ``WrongResultError`` unless results are those of one GPU, and each of their rows is."""
    for number, (x, y) in enumerate(zip(got, want, strict=True)):
        if x.shape != y.shape:
            raise WrongResultError(
                f"{name}: result {number} has shape {[*x.shape]}, not {[*y.shape]}"
            )
        off, size = (t.float().norm(dim=-1) for t in (x.float() - y.float(), y))
        error = float(off.norm() / size.norm().clamp(min=1e-30))
        of_row = float((off / (size + size.mean()).clamp(min=1e-30)).max()) if of_rows else 0.0
        # NaN passes no comparison
        if not (error <= LIMITS[y.dtype] and of_row <= 10 * LIMITS[y.dtype]):
            raise WrongResultError(f"{name}: result {number} is off by {error}, a row by {of_row}")


def machine(package: str, device: torch.device) -> Row:
    """Say what is measured on, and of which commit."""
    is_gpu = device.type == "cuda"
    return {
        **describe(package, device.type, commit_of(Path(__file__).parent)),
        "ranks": dist.get_world_size(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if is_gpu else None,
        "nvlink_multicast": os.environ.get("NCCL_NVLS_ENABLE") != "0",
    }


def parser(about: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark of several GPUs."""
    made = argparse.ArgumentParser(
        formatter_class=argparse.ArgumentDefaultsHelpFormatter, description=about.split("\n")[0]
    )
    made.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="where the tensors are",
    )
    made.add_argument("--json", type=Path, help="a file for the results")
    return made


class Results:
    """Rows of results, which rank 0 prints and writes as they come, behind those of before."""

    def __init__(self, machine: Row, path: Path | None) -> None:
        self._found: Row = {"machine": machine, "results": []}
        self._path = path

    def add(self, row: Row) -> None:
        """Print a row, and write it to the file, if there is one."""
        self._found["results"].append(row)
        if dist.get_rank() != 0:
            return
        print(json.dumps(row), flush=True)
        if self._path:
            self._path.write_text(json.dumps(self._found, indent=1) + "\n", encoding="utf-8")
