"""Time linear attention across GPUs, as a share of one GPU's speed.

    torchrun --nproc-per-node=2 benchmarks/bench_parallel.py --json two.json
    torchrun --nproc-per-node=4 benchmarks/bench_parallel.py --json four.json

One GPU's speed is that of the plain function on the whole sequence with 1 / n of the heads. Both
are timed in turns, as GPUs that are hot are slower. A time is that of ten calls between two
events, the largest of all ranks, the median of seven such times.
Every output and every gradient is compared with the plain function before it is timed. NVLink
multicast stays off unless NCCL_NVLS_ENABLE is set.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from _linked.ranks import Results, Row, in_turns, joined, machine
from lightning_attn import build_slopes, distributed, lightning_attn_func
from torch import Tensor

HEAD_DIM = 128
# tokens a rank, heads
SIZES = ((16384, 64), (65536, 32))
# of the norm of what is compared
LIMITS = {torch.bfloat16: 0.02, torch.float32: 1e-4}


class Call:
    """A function of q, k and v, on tensors of its own."""

    def __init__(self, function: Callable[..., Tensor], x: list[Tensor]) -> None:
        *inputs, self._dout = x
        self._function = function
        self._leaves = [one.contiguous().requires_grad_() for one in inputs]
        self.out = function(*self._leaves)

    def forward(self) -> Tensor:
        """Compute the output alone."""
        with torch.no_grad():
            return self._function(*self._leaves)

    def backward(self) -> tuple[Tensor, ...]:
        """Return the gradients."""
        return torch.autograd.grad(self.out, self._leaves, self._dout, retain_graph=True)


def measure(tokens: int, heads: int, shard: str, device: torch.device) -> Row:
    """Measure sequences of so many tokens a rank."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    g = torch.Generator(device).manual_seed(0)
    size = 1, ranks * tokens, heads, HEAD_DIM
    every = [torch.randn(size, generator=g, device=device, dtype=dtype) for _ in range(4)]
    decay = build_slopes(heads).to(device)
    some = max(1, heads // ranks)

    def alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return lightning_attn_func(q, k, v, decay[: q.shape[2]], scale=None)[0]

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return distributed.lightning_attn_func(q, k, v, decay, scale=None, shard=shard)[0]

    def cut(x: Tensor) -> Tensor:
        return distributed.shard(x, ranks, rank, shard=shard)

    # the whole is computed once, to compare with: some heads after the others
    want: list[list[Tensor]] = [[] for _ in range(4)]
    for begin in range(0, heads, some):
        end = min(begin + some, heads)
        leaves = [x[:, :, begin:end].contiguous().requires_grad_() for x in every[:3]]
        out, _ = lightning_attn_func(*leaves, decay[begin:end], scale=None)
        arriving = every[3][:, :, begin:end]
        for found, x in zip(
            want, [out.detach(), *torch.autograd.grad(out, leaves, arriving)], strict=True
        ):
            found.append(cut(x))
    one = Call(alone, [x[:, :, :some] for x in every])
    own = Call(ours, [cut(x) for x in every])
    del every
    results = own.out.detach(), *own.backward()
    for name, got, parts in zip(("o", "dq", "dk", "dv"), results, want, strict=True):
        expected = torch.cat(parts, 2).float()
        error = float((got.float() - expected).norm() / expected.norm())
        if not error <= LIMITS[dtype]:
            raise RuntimeError(f"{name} is off by {error}")
    pairs = (one.forward, own.forward), (one.backward, own.backward)
    base, times = zip(*(in_turns(list(pair), device) for pair in pairs), strict=True)
    base = [x * heads / (some * ranks) for x in base]
    return {
        "tokens": tokens,
        "heads": heads,
        "shard": shard,
        "one_gpu_ms": base,
        "ms": times,
        "share": [x / y for x, y in zip(base, times, strict=True)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, help="a rank, instead of the sizes above")
    parser.add_argument("--heads", type=int, default=32, help="with --tokens")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="a file for the results")
    args = parser.parse_args()
    with joined(args.device) as device:
        results = Results(machine(device), args.json)
        for tokens, heads in ((args.tokens, args.heads),) if args.tokens else SIZES:
            for shard in ("zigzag", "contiguous"):
                results.add(measure(tokens, heads, shard, device))


if __name__ == "__main__":
    main()
