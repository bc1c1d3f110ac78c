"""Time decoding over several GPUs, each with its share of the keys, over one GPU's time.

    torchrun --nproc-per-node=2 benchmarks/bench_parallel.py --json two.json

One GPU's time is that of the plain function, with all keys in its own cache. Both run in CUDA
graphs, where the group allows it, and are timed in turns, as GPUs that are hot are slower. A time
is that of twenty calls between two events, the largest of all ranks, the median of seven such
times. Every result is compared with the plain function's before it is timed. NVLink multicast stays
off unless NCCL_NVLS_ENABLE is set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from _linked.ranks import Results, Row, captured, check, in_turns, joined, machine, parser
from prefix_prefill import distributed, paged_attn_func

HEADS_Q, HEADS_K, HEAD_DIM, PAGE = 32, 8, 128, 16
# sequences, keys of each
SIZES = ((1, 131_072), (1, 524_288), (32, 8192))
CALLS = 20


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
    check(f"{batch} x {keys}", [every()], [one()], of_rows=False)
    steps: list[Callable[[], Any]] = [one, every]
    if is_captured:
        steps = [captured(step)[0] for step in steps]
    base, ms = in_turns(steps, device, CALLS)
    return {
        "batch": batch,
        "keys": keys,
        "captured": is_captured,
        "one_gpu_ms": base,
        "ms": ms,
        "ratio": ms / base,
    }


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--keys", type=int, help="of one sequence, instead of the sizes above")
    args = made.parse_args()
    with joined(args.device) as device:
        results = Results(
            {**machine("prefix_prefill", device), "heads": [HEADS_Q, HEADS_K, HEAD_DIM]}, args.json
        )
        for is_captured in (False, True) if device.type == "cuda" else (False,):
            for batch, keys in ((1, args.keys),) if args.keys else SIZES:
                results.add(measure(batch, keys, device, is_captured))


if __name__ == "__main__":
    main()
