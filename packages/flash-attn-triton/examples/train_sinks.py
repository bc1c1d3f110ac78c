"""Train attention sinks, as gpt-oss has them, on any GPU or on a CPU.

    python examples/train_sinks.py
    python examples/train_sinks.py --steps 200 --device cuda

A sink is one logit per head that takes part in the softmax and has no value, so that a head may
attend to nothing. Here half of the queries ask for a key that is not there, and the answer to those
is 0. Three models start from the same weights: with sinks by this package, with the sinks that it
replaces (a column that is put beside the scores and cut off again), and without. The first two have
the same loss at each step; the third, which cannot say nothing, stays above it. Exits with 1 if the
first two deviate.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable

import torch
from flash_attn_triton import flash_attn_func
from torch import Tensor, nn
from torch.nn import functional

HEADS, HEAD_DIM = 4, 16
WIDTH = HEADS * HEAD_DIM

Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def fused(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """Attend with sinks ``[heads]``; q, k, v are ``[batch, tokens, heads, head_dim]``."""
    return flash_attn_func(q, k, v, sinks=sinks)


def written_out(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """Attend as the eager code of gpt-oss does."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def without(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """Attend to the keys alone; the sinks get no gradient."""
    return flash_attn_func(q, k, v)


class Model(nn.Module):
    """Looks up queries among keys."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.project = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in "qkv")
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.sinks = nn.Parameter(torch.zeros(HEADS))

    def forward(self, asked: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (HEADS, HEAD_DIM))
            for project, x in zip(self.project, (asked, keys, values), strict=True)
        )
        return self.out(self.attention(q, k, v, self.sinks).flatten(-2))


def draw(batch: int, tokens: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Return what is asked for, keys, values, and answers, ``[batch, tokens, width]`` each."""
    keys, strangers, values = torch.randn(3, batch, tokens, WIDTH, generator=generator)
    order = torch.rand(batch, tokens, generator=generator).argsort(-1)
    is_there = torch.rand(batch, tokens, 1, generator=generator) < 0.5
    rows = order[..., None].expand_as(keys)
    asked = torch.where(is_there, keys.gather(1, rows), strangers)
    return asked, keys, values, values.gather(1, rows) * is_there


def train(steps: int, batch: int, tokens: int, device: str) -> dict[str, list[float]]:
    """Return the losses of each model, by its name."""
    torch.manual_seed(0)
    first = Model(fused).to(device)
    models = {"fused": first, "written out": copy.deepcopy(first), "no sinks": copy.deepcopy(first)}
    models["written out"].attention, models["no sinks"].attention = written_out, without
    optimizers = {
        name: torch.optim.Adam(model.parameters(), lr=1e-2) for name, model in models.items()
    }
    generator = torch.Generator().manual_seed(1)
    losses: dict[str, list[float]] = {name: [] for name in models}
    for step in range(steps):
        *inputs, answers = (x.to(device) for x in draw(batch, tokens, generator))
        for name, model in models.items():
            loss = functional.mse_loss(model(*inputs), answers)
            optimizers[name].zero_grad()
            loss.backward()
            optimizers[name].step()
            losses[name].append(float(loss.detach()))
        if step % max(1, steps // 10) == 0 or step == steps - 1:
            print(
                f"step {step:4}: loss",
                ", ".join(f"{name} {found[-1]:.5f}" for name, found in losses.items()),
                flush=True,
            )
    print("sinks:", ", ".join(f"{x:.2f}" for x in first.sinks.tolist()))
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description=(__doc__ or "").split("\n")[0],
    )
    parser.add_argument("--steps", type=int, default=200, help="steps of training")
    parser.add_argument("--batch", type=int, default=16, help="sequences of a step")
    parser.add_argument("--tokens", type=int, default=24, help="tokens of a sequence")
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="where the tensors are",
    )
    args = parser.parse_args()
    losses = train(args.steps, args.batch, args.tokens, args.device)
    pairs = zip(losses["fused"], losses["written out"], strict=True)
    apart = max(abs(a - b) for a, b in pairs)
    print(f"largest difference of a loss with sinks: {apart:.1e}")
    # fp32, and steps that add up
    return int(not apart < 1e-3)


if __name__ == "__main__":
    sys.exit(main())
