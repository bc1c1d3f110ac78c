"""What is measured without rivals: decoding steps, memory, the time of the host."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from cases import LONG, DecodeProblem, Problem
from torch import Tensor

Row = dict[str, Any]
# largest relative error (Frobenius) of a whole tensor
TOLERANCE = 1.5e-2
COPY_BYTES = 4 * 2**30
HOST_CALLS = 300

FIRST_CALL = """
import time, torch
from lightning_attn import build_slopes, lightning_attn_func
q, k, v = (torch.randn(1, 4096, 64, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
leaves, decay = [t.requires_grad_() for t in (q, k, v)], build_slopes(64).cuda()
torch.cuda.synchronize()
start = time.perf_counter()
lightning_attn_func(*leaves, decay)[0].sum().backward()
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


class Timer:
    """Median time of a call in milliseconds; one wall-clock call on a CPU."""

    def __init__(self, device: str, warmup: float, rep: float) -> None:
        self.device, self.warmup, self.rep = device, warmup, rep

    def __call__(self, run: Callable[[], Any], graph: bool = False) -> float:
        if self.device == "cpu":
            start = time.perf_counter()
            run()
            return (time.perf_counter() - start) * 1e3
        from triton.testing import do_bench, do_bench_cudagraph

        if graph:
            return float(do_bench_cudagraph(run, rep=self.rep, return_mode="median"))
        # clears the second-level cache before every run
        return float(do_bench(run, warmup=self.warmup, rep=self.rep, return_mode="median"))


def copy_gbps(timer: Timer) -> float:
    """Return bytes read plus written per second of a device-to-device copy, in GB/s."""
    size = COPY_BYTES if timer.device == "cuda" else 2**20
    source = torch.empty(size // 4, device=timer.device)
    target = torch.empty_like(source)
    return 2.0 * size / timer(lambda: target.copy_(source)) / 1e6


def make(problem: Problem, device: str) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Draw ``([q, k, v], dout, decay, cu_seqlens)``."""
    from lightning_attn import build_slopes

    generator = torch.Generator(device=device).manual_seed(0)
    leading = (problem.tokens,) if problem.packed else (problem.batch, problem.tokens)

    def draw() -> Tensor:
        shape = (*leading, problem.heads, problem.d)
        return torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)

    ends = [sum(problem.lengths[:i]) for i in range(problem.batch + 1)]
    starts = torch.tensor(ends, dtype=torch.int32, device=device)
    return [draw(), draw(), draw()], draw(), build_slopes(problem.heads).to(device), starts


def relative_error(actual: Tensor, expected: Tensor) -> float:
    difference = actual.detach().reshape(expected.shape).float() - expected
    return float(difference.norm() / expected.norm())


def measure_decode(problem: DecodeProblem, timer: Timer) -> Row:
    """Time a decoding step as replays of a CUDA graph."""
    from lightning_attn import (
        build_slopes,
        lightning_attention_decode_reference,
        lightning_attn_decode,
    )

    b, h, d, n = problem.batch, problem.heads, problem.d, problem.new_tokens
    device = timer.device
    q, k, v = (torch.randn(b, n, h, d, device=device, dtype=torch.bfloat16) for _ in range(3))
    cache = torch.randn(b, h, d, d, device=device)
    slots = torch.arange(b, dtype=torch.int32, device=device)
    decay, out = build_slopes(h).to(device), torch.empty_like(v)
    few = min(b, 4)
    mine, theirs = cache[:few].clone(), cache[:few].double()
    given = [t[:few] for t in (q, k, v)]
    got = lightning_attn_decode(*given, mine, decay, slots[:few])
    want = lightning_attention_decode_reference(
        *(t.double() for t in given), theirs, decay, slots[:few]
    )
    right = relative_error(got, want.float()) <= TOLERANCE
    ms = timer(
        lambda: lightning_attn_decode(q, k, v, cache, decay, slots, out=out),
        graph=device == "cuda",
    )
    status = "ok" if right else "wrong"
    return {"case": problem.name, "status": status, "ms": ms, "gbps": problem.bytes / ms / 1e6}


def measure_memory(device: str) -> Row:
    """Run a million tokens forward, and return the peak memory beyond inputs and output."""
    if device == "cpu":
        return {}
    from lightning_attn import lightning_attn_func

    inputs, _, decay, _ = make(LONG, device)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    found: Row = {"case": LONG.name, "tokens": LONG.tokens}
    for schedule in ("sequential", "parallel"):
        torch.cuda.reset_peak_memory_stats()
        out, _ = lightning_attn_func(*inputs, decay, schedule=schedule)
        torch.cuda.synchronize()
        extra = torch.cuda.max_memory_allocated() - before - out.numel() * out.element_size()
        found[f"{schedule}_extra_bytes"] = extra
        del out
    return found


def measure_host(device: str) -> Row:
    """Return the host's microseconds of a call, launches included."""
    if device == "cpu":
        return {}
    from lightning_attn import build_slopes, lightning_attn_decode, lightning_attn_func

    q, k, v = (torch.randn(1, 128, 8, 128, device=device, dtype=torch.bfloat16) for _ in range(3))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    decay, cache = build_slopes(8).to(device), torch.zeros(1, 8, 128, 128, device=device)
    slots, new = torch.zeros(1, dtype=torch.int32, device=device), [t[:, :1] for t in (q, k, v)]
    out = torch.empty_like(new[2])

    def train() -> None:
        torch.autograd.grad(lightning_attn_func(*leaves, decay)[0], leaves, q)

    calls: dict[str, Callable[[], Any]] = {
        "forward": lambda: lightning_attn_func(q, k, v, decay),
        "forward, parallel": lambda: lightning_attn_func(q, k, v, decay, schedule="parallel"),
        "forward and backward": train,
        "decode": lambda: lightning_attn_decode(*new, cache, decay, slots, out=out),
    }
    found: Row = {}
    for name, call in calls.items():
        times = []
        for _ in range(HOST_CALLS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        found[name] = sorted(times)[HOST_CALLS // 2] * 1e6
    return found


def measure_first_call() -> float:
    """Return the seconds of the first call, forward and backward, that has all to compile."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", FIRST_CALL]
        fresh = {**os.environ, "TRITON_CACHE_DIR": folder}
        done = subprocess.run(command, env=fresh, capture_output=True, text=True, check=True)
    return float(done.stdout)
