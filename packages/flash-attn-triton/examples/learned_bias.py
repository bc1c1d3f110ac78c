"""Train additive biases: of pairs, as in an Evoformer, and of relative positions, as in T5.

    python examples/learned_bias.py
    python examples/learned_bias.py --model t5 --tokens 1024 --device cuda

Each model is trained twice from the same weights on the same data: with ``flash_attn_func``, whose
``bias`` gets its gradient from the kernel, and with what that replaces, products and a softmax that
are written out. Both have the same loss at each step. Exits with 1 if they deviate.

``PairBias``, the attention of an Evoformer along the rows of an alignment, adds a linear map of the
representation of pairs to all rows' scores: the bias ``[1, heads, residues, residues]`` is read as
it is by every row, not copied. What is padded is left out by ``seqused_k``, not by a second bias.

``RelativeBias``, the self-attention of T5, adds a number for each head and bucket of distances, and
does not scale its scores.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from flash_attn_triton import flash_attn_func, flash_attn_varlen_func
from torch import Tensor, nn
from torch.nn import functional

HEADS, HEAD_DIM, PAIRS, LETTERS = 4, 16, 8, 20
WIDTH = HEADS * HEAD_DIM
BUCKETS, FURTHEST = 32, 128  # T5's own

# q, k, v [batch, tokens, heads, head_dim], a bias [1, heads, tokens, tokens], the number of keys
# that are no padding [batch] or None, the scale, and whether the mask is causal
Attention = Callable[..., Tensor]


def fused(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, used: Tensor | None, **options: Any
) -> Tensor:
    """Attend by this package."""
    if used is None:
        return flash_attn_func(q, k, v, bias=bias, **options)
    batch, tokens = q.shape[:2]
    starts = torch.arange(batch + 1, device=q.device, dtype=torch.int32) * tokens
    rows = (x.flatten(0, 1) for x in (q, k, v))
    out = flash_attn_varlen_func(
        *rows, starts, starts, tokens, tokens, bias=bias, seqused_k=used, **options
    )
    return out.unflatten(0, (batch, tokens))


def written_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    used: Tensor | None,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Attend by what this package replaces."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale + bias
    places = torch.arange(q.shape[1], device=q.device)
    if causal:
        scores = scores.masked_fill(places[None, :] > places[:, None], -math.inf)
    if used is not None:
        scores = scores.masked_fill((places >= used[:, None])[:, None, None], -math.inf)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)


class PairBias(nn.Module):
    """Gated attention along rows, with a bias from pairs (AlphaFold 2, algorithm 7)."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.norm, self.norm_pairs = nn.LayerNorm(WIDTH), nn.LayerNorm(PAIRS)
        self.project = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.bias = nn.Linear(PAIRS, HEADS, bias=False)
        self.gate, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: Tensor, pairs: Tensor, used: Tensor | None = None) -> Tensor:
        """Take rows ``[rows, residues, width]`` and pairs ``[residues, residues, width of pairs]``.

        ``used`` ``[rows]``, int32: how many residues of each row are no padding.
        """
        x = self.norm(rows)
        q, k, v = self.project(x).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(-3)
        bias = self.bias(self.norm_pairs(pairs)).permute(2, 0, 1)[None]  # [1, heads, i, j]
        mixed = self.attention(q, k, v, bias, used).flatten(-2)
        return self.out(torch.sigmoid(self.gate(x)) * mixed)


class RelativeBias(nn.Module):
    """Self-attention of a T5 decoder."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.norm = nn.RMSNorm(WIDTH)
        self.project = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.distances = nn.Embedding(BUCKETS, HEADS)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        # scores are not scaled, so the weights are
        nn.init.normal_(self.project.weight, std=(WIDTH * HEAD_DIM**0.5) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Take ``[batch, tokens, width]``."""
        q, k, v = self.project(self.norm(x)).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(-3)
        bias = self.distances(buckets(x.shape[1], x.device)).permute(2, 0, 1)[None]
        mixed = self.attention(q, k, v, bias, None, softmax_scale=1.0, causal=True)
        return self.out(mixed.flatten(-2))


def buckets(tokens: int, device: torch.device) -> Tensor:
    """Return the bucket of each key's distance behind each query, ``[tokens, tokens]``.

    Half of the buckets hold one distance each; those of the others grow by a factor.
    """
    places = torch.arange(tokens, device=device)
    distance = (places[:, None] - places).clamp(min=0)
    exact = BUCKETS // 2
    grown = torch.log(distance.clamp(min=1) / exact) / math.log(FURTHEST / exact)
    far = (exact + (grown * (BUCKETS - exact)).long()).clamp(max=BUCKETS - 1)
    return torch.where(distance < exact, distance, far)


class Evoformer(nn.Module):
    """Names the letter of the residue that is a pair with each one."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(LETTERS, WIDTH), nn.Linear(WIDTH, LETTERS)
        self.mix = PairBias(attention)

    def loss(self, tokens: int, generator: torch.Generator, device: str) -> Tensor:
        letters = torch.randint(LETTERS, (8, tokens), generator=generator)
        # residues behind the first three quarters are padding
        count = 3 * tokens // 4
        partner = torch.randperm(count, generator=generator)
        pairs = torch.randn(tokens, tokens, PAIRS, generator=generator)
        pairs[torch.arange(count), partner, 0] += 6.0
        used = torch.full((8,), count, dtype=torch.int32)
        letters, partner, pairs, used = (x.to(device) for x in (letters, partner, pairs, used))
        logits = self.head(self.mix(self.embed(letters), pairs, used))[:, :count]
        return functional.cross_entropy(logits.flatten(0, 1), letters[:, partner].flatten())


class T5(nn.Module):
    """Names the letter that stood three places before."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(LETTERS, WIDTH), nn.Linear(WIDTH, LETTERS)
        self.mix = RelativeBias(attention)

    def loss(self, tokens: int, generator: torch.Generator, device: str) -> Tensor:
        letters = torch.randint(LETTERS, (8, tokens), generator=generator).to(device)
        logits = self.head(self.mix(self.embed(letters)))[:, 3:]
        return functional.cross_entropy(logits.flatten(0, 1), letters[:, :-3].flatten())


MODELS: dict[str, type[Evoformer] | type[T5]] = {"evoformer": Evoformer, "t5": T5}


def train(kind: str, steps: int, tokens: int, device: str) -> tuple[list[float], float]:
    """Train both ways; return the losses of the first, and the largest difference from them."""
    torch.manual_seed(0)
    first = MODELS[kind](fused).to(device)
    models = {"fused": first, "written out": copy.deepcopy(first)}
    models["written out"].mix.attention = written_out
    optimizers = {name: torch.optim.Adam(x.parameters(), lr=1e-2) for name, x in models.items()}
    seconds, losses = dict.fromkeys(models, 0.0), []
    apart = 0.0
    for step in range(steps):
        found = {}
        for name, model in models.items():
            began = time.perf_counter()
            loss = model.loss(tokens, torch.Generator().manual_seed(step), device)
            optimizers[name].zero_grad()
            loss.backward()
            optimizers[name].step()
            found[name] = float(loss.detach())
            seconds[name] += time.perf_counter() - began
        losses.append(found["fused"])
        apart = max(apart, abs(found["fused"] - found["written out"]))
        if step % max(1, steps // 5) == 0 or step == steps - 1:
            both = ", ".join(f"{name} {loss:.5f}" for name, loss in found.items())
            print(f"{kind}, step {step:3}: loss {both}", flush=True)
    print(", ".join(f"{name}: {spent:.1f} s" for name, spent in seconds.items()))
    return losses, apart


def main() -> int:
    parser = argparse.ArgumentParser(
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description=(__doc__ or "").split("\n")[0],
    )
    parser.add_argument("--model", choices=list(MODELS), help="default: one after the other")
    parser.add_argument("--steps", type=int, default=80, help="steps of training")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a sequence")
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="where the tensors are",
    )
    args = parser.parse_args()
    status = 0
    for kind in [args.model] if args.model else MODELS:
        losses, apart = train(kind, args.steps, args.tokens, args.device)
        print(f"{kind}: largest difference of a loss {apart:.1e}")
        # fp32, and steps that add up
        status |= int(not apart < 1e-2 or losses[-1] >= losses[0])
    return status


if __name__ == "__main__":
    sys.exit(main())
