"""Time context parallelism, as a share of one GPU's speed, beside a plain all-gather of keys.

    torchrun --nproc-per-node=2 benchmarks/bench_parallel.py --out parallel.json

One GPU's speed is that of the plain function on the whole sequence with 1 / n of the heads. A time
is that of ten calls between two events, the largest of all ranks, the least of five such times.
The all-gather waits for the keys of all ranks and computes each of a rank's two runs of queries in
one call; its backward is not timed. Every result is compared with the plain function before.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from flash_attn_triton import distributed, flash_attn_func, flash_attn_varlen_func
from torch import Tensor

HEADS_Q, HEADS_K, HEAD_DIM = 32, 8, 128
MIX = (8192, 4096, 2048, 1024, 512, 512)
CALLS, REPEATS = 10, 5


def seconds(function: Callable[[], Any], device: torch.device) -> float:
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
            taken = begin.elapsed_time(end) / 1e3 / CALLS
        else:
            start = time.perf_counter()
            for _ in range(CALLS):
                function()
            taken = (time.perf_counter() - start) / CALLS
        longest = torch.tensor(taken, device=device)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        least = min(least, float(longest))
    return least


def both_passes(
    forward: Callable[..., Tensor], tensors: list[Tensor], device: torch.device
) -> tuple[float, float]:
    """Return the times of the forward pass and of the backward pass."""
    with torch.no_grad():
        ahead = seconds(lambda: forward(*tensors), device)
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = forward(*leaves)
    dout = torch.randn_like(out)
    back = seconds(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True), device)
    return ahead, back


def gathered(q: Tensor, k: Tensor, v: Tensor, ranks: int, rank: int) -> Tensor:
    """Compute with the keys of all ranks, gathered first."""
    message = torch.cat([k, v], -1)
    every = [torch.empty_like(message) for _ in range(ranks)]
    dist.all_gather(every, message)
    keys, values = distributed.unshard(every).split(HEAD_DIM, -1)
    half = q.shape[1] // 2
    parts = []
    for part, own in ((rank, q[:, :half]), (2 * ranks - 1 - rank, q[:, half:])):
        end = (part + 1) * half
        out = flash_attn_func(own, keys[:, :end], values[:, :end], causal=True)
        assert isinstance(out, Tensor)
        parts.append(out)
    return torch.cat(parts, 1)


def draw(tokens: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    g = torch.Generator(device).manual_seed(0)
    heads = HEADS_Q, HEADS_K, HEADS_K
    return [
        torch.randn(tokens, n, HEAD_DIM, generator=g, device=device, dtype=dtype) for n in heads
    ]


def check(name: str, got: Tensor, want: Tensor) -> None:
    error, scale = float((got - want).abs().max()), float(want.abs().max())
    if not error <= 0.02 * scale:
        raise RuntimeError(f"{name}: error {error} of {scale}")


def measure(tokens: int, device: torch.device, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Measure sequences of so many tokens a rank."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    whole = tokens * ranks
    every = draw(whole, dtype, device)
    some = [x[:, : max(1, x.shape[1] // ranks)].contiguous() for x in every]
    mix = [n * tokens // 8192 for n in MIX] * (ranks // 2 or 1)
    mix[-1] += whole - sum(mix)
    offsets = [sum(mix[:b]) for b in range(len(mix) + 1)]
    plan = distributed.ShardPlan(offsets, ranks, causal=True)
    starts = torch.tensor(offsets, dtype=torch.int32, device=device)
    packed = (starts, starts, max(mix), max(mix))

    def alone(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flash_attn_func(q[None], k[None], v[None], causal=True)

    def alone_packed(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flash_attn_varlen_func(q, k, v, *packed, causal=True)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return distributed.flash_attn_func(q, k, v, causal=True)

    def ours_packed(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return distributed.flash_attn_varlen_func(q, k, v, plan)

    own = [distributed.shard(x[None], ranks, rank) for x in every]
    cut = [plan.shard(x, rank) for x in every]
    with torch.no_grad():
        want = distributed.shard(alone(*every), ranks, rank)
        check("dense", ours(*own), want)
        check("all-gather", gathered(*own, ranks, rank), want)
        check("packed", ours_packed(*cut), plan.shard(alone_packed(*every), rank))
        del want
    del every
    one, one_packed = both_passes(alone, some, device), both_passes(alone_packed, some, device)
    cases = {
        "dense": (one, both_passes(ours, own, device)),
        "packed": (one_packed, both_passes(ours_packed, cut, device)),
    }
    with torch.no_grad():
        plain = seconds(lambda: gathered(*own, ranks, rank), device)
    found = []
    for name, (base, times) in cases.items():
        found.append(
            {
                "case": name,
                "ranks": ranks,
                "tokens": tokens,
                "one_gpu_ms": [1e3 * x for x in base],
                "ms": [1e3 * x for x in times],
                "share": [x / y for x, y in zip(base, times, strict=True)],
            }
        )
    found[0]["all_gather_share"] = one[0] / plain
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768], help="a rank")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", help="a file for the results")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        results = []
        for tokens in args.tokens:
            results += measure(tokens, device, dtype)
        if dist.get_rank() == 0:
            for row in results:
                print(json.dumps(row), flush=True)
            if args.out:
                Path(args.out).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
