"""Clocks: device time of a call, host time of a call, the bandwidth of a copy."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

# below this a launch costs more than the work, and only a CUDA graph shows the work
GRAPH_BELOW_MS = 0.05
# below this what is still to be written back of an emptied cache is much of the time
SHORT_MS = 0.25
COPY_BYTES = 4 * 2**30
# how often the inputs of a graph fill the second-level cache
FILLS = 4
# calls of a graph, at least, and how often it is replayed
CALLS, REPLAYS = 100, 6


class Timer:
    """Median time of one call in milliseconds.

    Args:
        device: ``cuda``, or ``cpu`` for dry runs (one wall-clock call).
        warmup: Milliseconds of warm-up before each measurement.
        rep: Milliseconds of each measurement.
    """

    def __init__(self, device: str, warmup: float, rep: float) -> None:
        self.device, self.warmup, self.rep = device, warmup, rep

    def __call__(self, run: Callable[[], Any], graph: bool = True) -> float:
        """Time ``run``, with the second-level cache emptied before each call.

        With ``graph``, what takes less than ``GRAPH_BELOW_MS`` is timed as replays of a CUDA graph
        of this one call, whose inputs may then lie in that cache.
        """
        if self.device == "cpu":
            return _wall_ms(run)
        from triton.testing import do_bench, do_bench_cudagraph

        took = do_bench(run, warmup=self.warmup, rep=self.rep, return_mode="median")
        if graph and took < GRAPH_BELOW_MS:
            took = do_bench_cudagraph(run, rep=self.rep, return_mode="median")
        return float(took)

    def is_short(self, ms: float) -> bool:
        """Say whether a call is to be timed in a graph, too. A dry run tries it with all."""
        return self.device == "cpu" or ms < SHORT_MS

    def sets(self, call_bytes: float) -> int:
        """Return how many sets of inputs exceed the second-level cache ``FILLS`` times."""
        if self.device == "cpu":
            return 2
        size = torch.cuda.get_device_properties(0).L2_cache_size
        return max(2, math.ceil(FILLS * size / call_bytes))

    def captured(self, runs: Sequence[Callable[[], Any]]) -> Callable[[], float]:
        """Capture a CUDA graph of many calls in turn; return a function that times one of them.

        Each run has a set of inputs of its own. Nothing empties the second-level cache between two
        calls: the sets exceed it, and push one another out.
        """
        if self.device == "cpu":
            return lambda: statistics.median(_wall_ms(run) for run in runs)
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


def _wall_ms(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def copy_gbps(timer: Timer) -> float | None:
    """Measure the bandwidth of a device-to-device copy, bytes read plus written."""
    if timer.device == "cpu":
        return None
    source = torch.randn(COPY_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    return 2.0 * COPY_BYTES / timer(lambda: target.copy_(source)) / 1e6


def host_microseconds(run: Callable[[], Any], device: str) -> float:
    """Return the median CPU time of one warm call, the launch included."""
    took = []
    for i in range(400 if device == "cuda" else 5):
        start = time.perf_counter_ns()
        run()
        took.append(time.perf_counter_ns() - start)
        if device == "cuda" and i % 20 == 19:
            # never let the launch queue fill: the host would wait for the device
            torch.cuda.synchronize()
    return statistics.median(took[len(took) // 4 :]) / 1e3
