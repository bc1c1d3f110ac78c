"""Time decoding over several GPUs, each with its share of the keys, over one GPU's time.

    torchrun --nproc-per-node=2 benchmarks/bench_parallel.py --json two.json

One GPU's time is that of the plain function, with all keys in its own cache. Both run in CUDA
graphs, where the group allows it. A time is that of twenty calls between two events, the largest of
all ranks, the least of five such times. Every result is compared with the plain function's before
it is timed. NVLink multicast stays off unless NCCL_NVLS_ENABLE is set.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from prefix_prefill import distributed, paged_attn_func

HEADS_Q, HEADS_K, HEAD_DIM, PAGE = 32, 8, 128, 16
# sequences, keys of each
SIZES = ((1, 131_072), (1, 524_288), (32, 8192))
CALLS, REPEATS = 20, 5
# of the norm of the output
LIMITS = {torch.bfloat16: 0.02, torch.float32: 1e-4}

Row = dict[str, Any]


def milliseconds(function: Callable[[], Any], device: torch.device) -> float:
    """Return the time of a call, the largest of all ranks."""
    for _ in range(3):
        function()
    least = float("inf")
    for _ in range(REPEATS):
        dist.barrier()
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            for _ in range(CALLS):
                function()
            end.record()
            torch.cuda.synchronize()
            taken = begin.elapsed_time(end) / CALLS
        else:
            start = time.perf_counter()
            for _ in range(CALLS):
                function()
            taken = 1e3 * (time.perf_counter() - start) / CALLS
        longest = torch.tensor(taken, device=device)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        least = min(least, float(longest))
    return least


def captured(function: Callable[[], torch.Tensor]) -> Callable[[], None]:
    """Return the replay of a graph that holds a call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def cache_of(every: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    """Return the pages of ``[batch, keys, heads, head_dim]``: of the keys that a rank holds."""
    own = every[:, rank::ranks]
    batch, keys, heads, width = own.shape
    pages = torch.zeros(batch, -(-keys // PAGE) * PAGE, heads, width).to(own)
    pages[:, :keys] = own
    return pages.view(-1, PAGE, heads, width)


def measure(batch: int, keys: int, device: torch.device, is_captured: bool) -> Row:
    """Measure a step of decoding: one query of each sequence."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    g = torch.Generator(device).manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=g, device=device, dtype=dtype)

    q = draw(batch, HEADS_Q, HEAD_DIM)
    k, v = (draw(batch, keys, HEADS_K, HEAD_DIM) for _ in "kv")
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
    lengths = torch.full((batch,), keys, dtype=torch.int32, device=device)

    def step_over(ranks: int, rank: int, function: Any) -> Callable[[], torch.Tensor]:
        caches = [cache_of(x, ranks, rank) for x in (k, v)]
        table = torch.arange(caches[0].shape[0], dtype=torch.int32, device=device)
        table = table.view(batch, -1)

        def step() -> torch.Tensor:
            out: torch.Tensor = function(q, *caches, table, starts, lengths, 1, keys)
            return out

        return step

    one = step_over(1, 0, paged_attn_func)
    every = step_over(ranks, rank, distributed.paged_attn_func)
    got, want = every().float(), one().float()
    error = float((got - want).norm() / want.norm())
    if not error <= LIMITS[dtype]:
        raise RuntimeError(f"{batch} x {keys}: out is off by {error}")
    steps: list[Callable[[], Any]] = [one, every]
    if is_captured:
        steps = [captured(step) for step in steps]
    base, ms = (milliseconds(step, device) for step in steps)
    return {
        "batch": batch,
        "keys": keys,
        "captured": is_captured,
        "one_gpu_ms": base,
        "ms": ms,
        "ratio": ms / base,
    }


def machine(device: torch.device) -> Row:
    """Say what was measured on."""
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
        "heads": [HEADS_Q, HEADS_K, HEAD_DIM],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--keys", type=int, help="of one sequence, instead of the sizes above")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="a file for the results")
    args = parser.parse_args()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(minutes=5))
    found: Row = {"machine": machine(device), "results": []}
    try:
        for is_captured in (False, True) if device.type == "cuda" else (False,):
            for batch, keys in ((1, args.keys),) if args.keys else SIZES:
                row = measure(batch, keys, device, is_captured)
                found["results"].append(row)
                if dist.get_rank() == 0:
                    print(json.dumps(row), flush=True)
                    if args.json:
                        text = json.dumps(found, indent=1) + "\n"
                        args.json.write_text(text, encoding="utf-8")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
