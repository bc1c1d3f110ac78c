"""One of several processes that share a sequence: ``_rank.py RANK RANKS FOLDER SHARD SEQLEN``."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from lightning_attn import distributed

HEADS, D, E = 2, 16, 32
INPUTS = ("q", "k", "v", "decay", "initial_state")


def problem(tokens: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Return inputs and the gradients that arrive, the same values in every process."""
    g = torch.Generator().manual_seed(tokens)
    shapes = {"q": D, "k": D, "v": E, "dout": E}
    made = {name: torch.randn(2, tokens, HEADS, n, generator=g) for name, n in shapes.items()}
    made["decay"] = torch.rand(HEADS, generator=g) / 3
    for name in ("initial_state", "dfinal"):
        made[name] = torch.randn(2, HEADS, D, E, generator=g)
    return {name: t.to(dtype) for name, t in made.items()}


def differentiate(function, made: dict[str, torch.Tensor], **options) -> dict[str, torch.Tensor]:
    """Return the outputs and the gradients of a call."""
    leaves = {name: made[name].clone().requires_grad_() for name in INPUTS}
    out, final = function(**leaves, scale=0.5, output_final_state=True, **options)
    arriving = made["dout"], made["dfinal"]
    grads = torch.autograd.grad((out, final), list(leaves.values()), arriving)
    found = dict(zip(("out", "final", *INPUTS), (out, final, *grads), strict=True))
    return {name: t.detach() for name, t in found.items()}


def main(rank: int, ranks: int, folder: Path, shard: str, seqlen: int) -> None:
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=120)  # a hang is a failure
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", meeting, limit, rank=rank, world_size=ranks)
    made = problem(seqlen)
    for name in ("q", "k", "v", "dout"):
        made[name] = distributed.shard(made[name], ranks, rank, shard=shard)
    if rank < ranks - 1:  # one rank alone uses the final states
        made["dfinal"] = torch.zeros_like(made["dfinal"])
    function = distributed.lightning_attn_func
    found = differentiate(function, made, shard=shard, seqlen=seqlen)
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    rank, ranks, folder, shard, seqlen = sys.argv[1:]
    main(int(rank), int(ranks), Path(folder), shard, int(seqlen))
