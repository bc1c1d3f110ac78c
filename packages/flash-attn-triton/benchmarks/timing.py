"""Clocks: device time of a pass, host time of a call, the machine's ceilings."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

# below this a launch costs more than the work, and only a CUDA graph shows the work
GRAPH_BELOW_MS = 0.05

MATMUL_SIDE = 8192
COPY_BYTES = 4 * 2**30


class Timer:
    """Median time of one pass in milliseconds.

    Args:
        device: ``cuda``, or ``cpu`` for dry runs (one wall-clock call).
        warmup: Milliseconds of warm-up before each measurement.
        rep: Milliseconds of each measurement.
    """

    def __init__(self, device: str, warmup: float, rep: float) -> None:
        self.device = device
        self.warmup = warmup
        self.rep = rep

    def __call__(self, run: Callable[[], Any], graph: bool = False) -> float:
        """Time ``run``; with ``graph``, as replays of a CUDA graph (L2 warm) when it is short."""
        if self.device == "cpu":
            start = time.perf_counter()
            run()
            return (time.perf_counter() - start) * 1e3
        from triton.testing import do_bench, do_bench_cudagraph

        # clears the second-level cache before every run
        took = do_bench(run, warmup=self.warmup, rep=self.rep, return_mode="median")
        if graph and took < GRAPH_BELOW_MS:
            took = do_bench_cudagraph(run, rep=self.rep, return_mode="median")
        return float(took)


def synchronize(device: str) -> None:
    """Wait for the device, if there is one; raises what a kernel did wrong."""
    if device == "cuda":
        torch.cuda.synchronize()


def host_microseconds(run: Callable[[], Any], device: str, calls: int = 400) -> dict[str, float]:
    """Return median and smallest CPU time of one warm call, the launch included."""
    calls = calls if device == "cuda" else 5
    for _ in range(min(calls, 20)):
        run()
    synchronize(device)
    took = []
    for i in range(calls):
        start = time.perf_counter_ns()
        run()
        took.append(time.perf_counter_ns() - start)
        if i % 20 == 19:
            # never let the launch queue fill: the host would wait for the device
            synchronize(device)
    return {"median_us": statistics.median(took) / 1e3, "min_us": min(took) / 1e3}


def ceilings(timer: Timer) -> dict[str, float]:
    """Measure what bounds every case: matrix products and a device-to-device copy."""
    if timer.device == "cpu":
        return {}
    found = {"matmul_bf16_tflops": _matmul_tflops(timer)}
    try:
        found["matmul_fp8_tflops"] = _fp8_matmul_tflops(timer)
    except Exception as error:  # a ceiling less is no reason to stop
        print(f"no FP8 matmul ceiling: {type(error).__name__}: {error}")
    source = torch.randn(COPY_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    found["copy_gbps"] = 2.0 * COPY_BYTES / timer(lambda: target.copy_(source)) / 1e6
    return found


def _operands() -> tuple[torch.Tensor, torch.Tensor]:
    shape = (MATMUL_SIDE, MATMUL_SIDE)
    a, b = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return a, b


def _matmul_tflops(timer: Timer) -> float:
    a, b = _operands()
    return 2.0 * MATMUL_SIDE**3 / timer(lambda: a @ b) / 1e9


def _fp8_matmul_tflops(timer: Timer) -> float:
    a, b = (x.to(torch.float8_e4m3fn) for x in _operands())
    one = torch.ones((), device="cuda")
    took = timer(
        lambda: torch._scaled_mm(
            a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    )
    return 2.0 * MATMUL_SIDE**3 / took / 1e9
