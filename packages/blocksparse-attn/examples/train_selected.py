"""A small language model that learns which blocks to attend to, beside one on all blocks.

    python examples/train_selected.py

Each sequence holds a passage of random tokens twice, far apart, and the model has to say the second
one by looking the first one up. A row of 16 queries sees 3 blocks of 8: its own and two that it
chooses. As in Native Sparse Attention (Yuan et al. 2025), a second branch attends to the means of
all past blocks; its scores are those of the choice, so that the choice is learned through it.
"""

from __future__ import annotations

import argparse
import math

import torch
from blocksparse_attn import BlockSparseLayout, blocksparse_attn_func, selectors
from torch import Tensor, nn

VOCABULARY, SEQLEN, PASSAGE = 32, 128, 24
BLOCK, TOP_K, HEADS, HEAD_DIM = 16, 3, 2, 16
WIDTH = HEADS * HEAD_DIM


class Attention(nn.Module):
    """Causal attention over all blocks, or over chosen blocks and the means of all past blocks."""

    def __init__(self, is_sparse: bool) -> None:
        super().__init__()
        self.is_sparse = is_sparse
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.gates = nn.Linear(WIDTH, 2 * HEADS)
        self.out = nn.Linear(WIDTH, WIDTH)
        blocks = SEQLEN // BLOCK
        self.all = BlockSparseLayout.from_dense(torch.ones(blocks, blocks, dtype=torch.bool), BLOCK)

    def forward(self, x: Tensor) -> Tensor:
        # a key also encodes the previous token, so a query finds the tokens that followed its own
        before = torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
        q, k, v = (part.unflatten(-1, (HEADS, HEAD_DIM)) for part in self.qkv(x).chunk(3, -1))
        k = k + self.qkv(before).chunk(3, -1)[0].unflatten(-1, (HEADS, HEAD_DIM))
        if not self.is_sparse:
            return self.out(blocksparse_attn_func(q, k, v, self.all).flatten(2))
        layout = selectors.topk_blocks(q, k, BLOCK, TOP_K)
        chosen = blocksparse_attn_func(q, k, v, layout)
        gates = self.gates(x).sigmoid().unflatten(-1, (2, HEADS, 1))
        return self.out((gates[:, :, 0] * chosen + gates[:, :, 1] * over_means(q, k, v)).flatten(2))


def over_means(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend to the means of blocks that end before a query; 0 if there is no such block."""
    keys, values = (x.unflatten(1, (-1, BLOCK)).mean(2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, keys) * HEAD_DIM**-0.5
    query = torch.arange(SEQLEN, device=q.device)[:, None]
    is_past = (torch.arange(keys.shape[1], device=q.device) + 1) * BLOCK <= query
    p = scores.masked_fill(~is_past, -1e9).softmax(-1) * is_past.any(-1, keepdim=True)
    return torch.einsum("bhij,bjhd->bihd", p, values)


class Model(nn.Module):
    """Two layers with residual connections."""

    def __init__(self, is_sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Attention(is_sparse) for _ in range(2))
        self.mlps = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)
            )
            for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for norm, attention, mlp in zip(self.norms, self.layers, self.mlps, strict=False):
            x = x + attention(norm(x))
            x = x + mlp(x)
        return self.head(self.norms[2](x))


def draw(count: int, generator: torch.Generator) -> Tensor:
    """Draw sequences that end with a passage of their first half."""
    tokens = torch.randint(VOCABULARY, (count, SEQLEN), generator=generator)
    for row in tokens:
        first = int(torch.randint(SEQLEN // 2 - PASSAGE, (), generator=generator))
        row[-PASSAGE:] = row[first : first + PASSAGE]
    return tokens


def train(is_sparse: bool, steps: int) -> list[float]:
    """Train a model; return its losses over the second passage, in nats a token."""
    torch.manual_seed(0)
    model = Model(is_sparse)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        tokens = draw(8, generator)
        # the first tokens of the passage identify it
        logits, wanted = model(tokens)[:, -PASSAGE + 2 : -1], tokens[:, -PASSAGE + 3 :]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=150, help="steps of training")
    steps = parser.parse_args().steps
    print(f"a guess: {math.log(VOCABULARY):.2f} nats a token")
    last = {}
    for name, is_sparse in (("all blocks", False), (f"{TOP_K} of {SEQLEN // BLOCK}", True)):
        losses = train(is_sparse, steps)
        last[name] = sum(losses[-10:]) / len(losses[-10:])
        shown = ", ".join(f"{loss:.2f}" for loss in losses[:: max(steps // 8, 1)])
        print(f"{name}: {shown}; the last ten {last[name]:.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
