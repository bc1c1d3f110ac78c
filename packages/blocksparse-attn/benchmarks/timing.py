"""Clocks: device time of a pass, host time of a call, bandwidth of a copy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

COPY_BYTES = 2**31


def measure(run: Callable[[], Any], device: str, rep: float) -> float:
    """Return the median time of a call, in milliseconds."""
    if device == "cpu":
        started = time.perf_counter()
        run()
        return (time.perf_counter() - started) * 1e3
    from triton.testing import do_bench, do_bench_cudagraph

    took = float(do_bench(run, warmup=20, rep=rep, return_mode="median"))
    if took < 0.2:  # as long as the host needs for a call
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            took = float(do_bench_cudagraph(run, rep=rep, return_mode="median"))
    return took


def copy_bandwidth() -> float:
    """Return bytes read plus written by a device-to-device copy, in GB/s."""
    source = torch.randn(COPY_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    return 2.0 * COPY_BYTES / measure(lambda: target.copy_(source), "cuda", 100.0) / 1e6


def host_microseconds(device: str) -> list[dict[str, Any]]:
    """Time what the host does in one warm call, with nothing for the device to do."""
    from blocksparse_attn import BlockSparseLayout, blocksparse_attn_func

    layout = BlockSparseLayout.local_strided(16, 128, 64, 1, 2, device=device)
    dtype = torch.bfloat16
    q, k, v = (torch.randn(1, 128, n, 128, device=device, dtype=dtype) for n in (16, 16, 16))
    one = q[:, :1]
    rows = []
    for name, run in (
        ("host-prefill", lambda: blocksparse_attn_func(q, k, v, layout)),
        ("host-decode", lambda: blocksparse_attn_func(one, k, v, layout, num_splits=1)),
    ):
        with torch.no_grad():
            for _ in range(5):
                run()
            took = []
            for i in range(20 if device == "cpu" else 200):
                started = time.perf_counter_ns()
                run()
                took.append((time.perf_counter_ns() - started) / 1e3)
                if device == "cuda" and i % 20 == 19:
                    torch.cuda.synchronize()  # never let the launch queue fill
        rows.append({"case": name, "us": statistics.median(took)})
    return rows
