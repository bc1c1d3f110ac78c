"""One of several processes that share a sequence: ``_rank.py RANK FOLDER LENGTH...``."""

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


def differentiate(function, made: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the outputs and the gradients of a call."""
    leaves = {name: made[name].clone().requires_grad_() for name in INPUTS}
    out, final = function(**leaves, scale=0.5, output_final_state=True)
    arriving = made["dout"], made["dfinal"]
    grads = torch.autograd.grad(
        (out, final), list(leaves.values()), arriving, allow_unused=True, materialize_grads=True
    )
    found = dict(zip(("out", "final", *INPUTS), (out, final, *grads), strict=True))
    return {name: t.detach() for name, t in found.items()}


def main(rank: int, folder: Path, lengths: list[int]) -> None:
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=120)  # a hang is a failure
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", meeting, limit, rank=rank, world_size=len(lengths))
    made = problem(sum(lengths))
    begin = sum(lengths[:rank])
    for name in ("q", "k", "v", "dout"):
        made[name] = made[name][:, begin : begin + lengths[rank]]
    if rank < len(lengths) - 1:  # the gradient of the final state belongs to the last rank
        made["dfinal"] = torch.zeros_like(made["dfinal"])
    found = differentiate(distributed.lightning_attn_func, made)
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), [int(n) for n in sys.argv[3:]])
