"""Clocks: device time of a call, host time of a call, what bounds every case."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

MATMUL_SIDE = 8192
COPY_BYTES = 4 * 2**30
# how often the inputs of a graph fill the second-level cache
FILLS = 4
# calls of a graph, at least, and how often it is replayed
CALLS, REPLAYS = 100, 6

Run = Callable[[], Any]


class Timer:
    """Median time of one call in milliseconds.

    Args:
        device: ``cuda``, or ``cpu`` for dry runs (one wall-clock call).
        warmup: Milliseconds of warm-up before each measurement.
        rep: Milliseconds of each measurement.
    """

    def __init__(self, device: str, warmup: float = 20.0, rep: float = 60.0) -> None:
        self.device, self.warmup, self.rep = device, warmup, rep

    def __call__(self, run: Run, graph_below: float = 0.0) -> float:
        """Time ``run``, with the second-level cache emptied before each call.

        What takes less than ``graph_below`` ms is timed as replays of a CUDA graph of this one
        call, whose inputs may then lie in that cache; infinity skips the first measurement.
        """
        if self.device == "cpu":
            return wall_ms(run)
        from triton.testing import do_bench, do_bench_cudagraph

        took = 0.0
        if graph_below < math.inf:
            took = do_bench(run, warmup=self.warmup, rep=self.rep, return_mode="median")
        if took < graph_below:
            with torch.cuda.stream(torch.cuda.Stream()):
                took = do_bench_cudagraph(run, rep=self.rep, return_mode="median")
        return float(took)

    def sets(self, call_bytes: float) -> int:
        """Return how many sets of inputs exceed the second-level cache ``FILLS`` times."""
        if self.device == "cpu":
            return 2
        size = torch.cuda.get_device_properties(0).L2_cache_size
        return max(2, math.ceil(FILLS * size / call_bytes))

    def captured(self, runs: Sequence[Run]) -> Callable[[], float]:
        """Capture a CUDA graph of many calls in turn; return a function that times one of them.

        Each run has a set of inputs of its own. Nothing empties the second-level cache between two
        calls: the sets exceed it, and push one another out.
        """
        if self.device == "cpu":
            return lambda: statistics.median(map(wall_ms, runs))
        turns = math.ceil(CALLS / len(runs))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            for run in runs:
                run()
            stream.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                for run in [*runs] * turns:
                    run()
        torch.cuda.synchronize()

        def replay() -> float:
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
            graph.replay()
            marks[0].record()
            for mark in marks[1:]:
                graph.replay()
                mark.record()
            torch.cuda.synchronize()
            took = [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
            return statistics.median(took) / (turns * len(runs))

        return replay


def wall_ms(run: Run) -> float:
    """Return the milliseconds of one call by the host's clock."""
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def synchronize(device: str) -> None:
    """Wait for the device, if there is one; raises what a kernel did wrong."""
    if device == "cuda":
        torch.cuda.synchronize()


def host_microseconds(run: Run, device: str, calls: int = 400) -> dict[str, float]:
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
    """Measure what bounds every case: matrix products, and a copy's bytes read plus written."""
    if timer.device == "cpu":
        return {}
    shape = (MATMUL_SIDE, MATMUL_SIDE)
    a, b = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    operations = 2.0 * MATMUL_SIDE**3 / 1e9
    found = {"matmul_bf16_tflops": operations / timer(lambda: a @ b)}
    try:
        a8, b8 = (x.to(torch.float8_e4m3fn) for x in (a, b))
        options: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        options["scale_a"] = options["scale_b"] = torch.ones((), device="cuda")
        took = timer(lambda: torch._scaled_mm(a8, b8.t(), **options))
        found["matmul_fp8_tflops"] = operations / took
    except Exception as error:  # a ceiling less is no reason to stop
        print(f"no FP8 matmul ceiling: {type(error).__name__}: {error}")
    source = torch.randn(COPY_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    found["copy_gbps"] = 2.0 * COPY_BYTES / timer(lambda: target.copy_(source)) / 1e6
    return found
