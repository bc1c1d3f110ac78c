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

from collections.abc import Callable

import torch
import torch.distributed as dist
from _linked.ranks import (
    Results,
    Row,
    check,
    differentiate,
    joined,
    machine,
    parser,
    time_passes,
    way_of,
)
from lightning_attn import build_slopes, distributed, lightning_attn_func
from torch import Tensor

HEAD_DIM = 128
# tokens a rank, heads
SIZES = ((16384, 64), (65536, 32))


def measure(tokens: int, heads: int, shard: str, device: torch.device) -> Row:
    """Measure sequences of so many tokens a rank."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    g = torch.Generator(device).manual_seed(0)
    size = 1, ranks * tokens, heads, HEAD_DIM
    every = [torch.randn(size, generator=g, device=device, dtype=dtype) for _ in range(4)]
    decay = build_slopes(heads).to(device)
    some = max(1, heads // ranks)

    def alone(own: Tensor) -> Callable[..., Tensor]:
        return lambda q, k, v: lightning_attn_func(q, k, v, own, scale=None)[0]

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return distributed.lightning_attn_func(q, k, v, decay, scale=None, shard=shard)[0]

    def cut(x: Tensor) -> Tensor:
        return distributed.shard(x, ranks, rank, shard=shard)

    # the whole is computed once, to compare with: some heads after the others
    want: list[list[Tensor]] = [[] for _ in range(4)]
    for begin in range(0, heads, some):
        end = min(begin + some, heads)
        part = way_of(alone(decay[begin:end]), [x[:, :, begin:end] for x in every])
        for found, x in zip(want, differentiate(part), strict=True):
            found.append(cut(x))
    one = way_of(alone(decay[:some]), [x[:, :, :some] for x in every])
    own = way_of(ours, [cut(x) for x in every])
    del every
    whole = [torch.cat(parts, 2) for parts in want]
    check(f"{heads} heads", differentiate(own), whole, of_rows=False)
    base, times = time_passes([one, own], device)
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
    made = parser(__doc__ or "")
    made.add_argument("--tokens", type=int, help="a rank, instead of the sizes above")
    made.add_argument("--heads", type=int, default=32, help="with --tokens")
    args = made.parse_args()
    with joined(args.device) as device:
        results = Results(machine("lightning_attn", device), args.json)
        for tokens, heads in ((args.tokens, args.heads),) if args.tokens else SIZES:
            for shard in ("zigzag", "contiguous"):
                results.add(measure(tokens, heads, shard, device))


if __name__ == "__main__":
    main()
