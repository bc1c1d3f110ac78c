"""Several GPUs of one machine: their process group, times of calls on all of them, results."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WARM_UP, REPEATS = 3, 7

Row = dict[str, Any]


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


def machine(device: torch.device) -> Row:
    """Say what is measured on, and of which commit."""
    import triton

    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    is_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_gpu else "CPU",
        "ranks": dist.get_world_size(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if is_gpu else None,
        "nvlink_multicast": os.environ.get("NCCL_NVLS_ENABLE") != "0",
        "commit": commit or None,
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


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
