"""Attention of a Phi-3-small in miniature: prefilled and decoded, against the same on a dense mask.

    python examples/phi3_small.py

The architecture's attention with random weights: grouped query heads (4 to 1), rotary positions,
every second layer dense and the others block-sparse: local blocks, and a stride of columns that is
shifted from head to head. One layout serves all sparse layers, the prefill, every later chunk of
it, and each decoded token.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from blocksparse_attn import BlockSparseLayout, blocksparse_attn_func
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class Config:
    """Phi-3-small has 32:8 heads of 128, 32 layers, blocks of 64, 16 local ones, a stride of 8."""

    vocabulary: int = 101
    layers: int = 4
    heads: int = 8
    heads_k: int = 2
    head_dim: int = 16
    block: int = 16
    local_blocks: int = 2
    vert_stride: int = 4
    max_seqlen: int = 256

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


def rotate(x: Tensor, first: int) -> Tensor:
    """Apply rotary positions from ``first`` on to ``[batch, seqlen, heads, head_dim]``."""
    half = x.shape[-1] // 2
    frequency = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    position = torch.arange(first, first + x.shape[1], device=x.device)
    angle = (position[:, None] * frequency)[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class Attention(nn.Module):
    """One layer's attention; it caches its keys and values for later tokens."""

    def __init__(self, config: Config, layout: BlockSparseLayout, use_mask: bool) -> None:
        super().__init__()
        self.config, self.layout, self.use_mask = config, layout, use_mask
        together = config.heads + 2 * config.heads_k
        self.qkv = nn.Linear(config.width, together * config.head_dim, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.cache: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        c = self.config
        parts = self.qkv(x).unflatten(-1, (-1, c.head_dim))
        q, k, v = parts.split([c.heads, c.heads_k, c.heads_k], dim=2)
        first = 0 if self.cache is None else self.cache[0].shape[1]
        q, k = rotate(q, first), rotate(k, first)
        if self.cache is not None:
            k, v = (torch.cat(pair, 1) for pair in zip(self.cache, (k, v), strict=True))
        self.cache = k, v
        if self.use_mask:
            attended = self.by_mask(q, k, v)
        else:
            attended = blocksparse_attn_func(q, k, v, self.layout)
        return self.out(attended.flatten(2))

    def by_mask(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute the same with a dense mask of queries and keys."""
        position = torch.arange(k.shape[1], device=q.device)
        row = position[k.shape[1] - q.shape[1] :, None]
        side = self.layout.block_size[0]
        blocks = self.layout.to_dense()
        mask = blocks[:, row // side, position // side] & (position <= row)
        heads_first = (t.transpose(1, 2) for t in (q, k, v))
        return scaled_dot_product_attention(*heads_first, mask, enable_gqa=True).transpose(1, 2)


class Model(nn.Module):
    """Embeddings, layers of attention and a small network, logits."""

    def __init__(self, config: Config, device: torch.device, use_mask: bool) -> None:
        super().__init__()
        sparse = BlockSparseLayout.local_strided(
            config.heads,
            config.max_seqlen,
            config.block,
            config.local_blocks,
            config.vert_stride,
            device=device,
        )
        dense = BlockSparseLayout.from_mask_mod(
            lambda h, r, c: c <= r, 1, sparse.num_rows, sparse.num_cols, config.block, device=device
        )
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList()
        for i in range(config.layers):
            layout = dense if i % 2 else sparse
            self.layers.append(
                nn.ModuleDict(
                    {
                        "norm": nn.LayerNorm(config.width),
                        "attention": Attention(config, layout, use_mask),
                        "network": nn.Sequential(
                            nn.LayerNorm(config.width),
                            nn.Linear(config.width, 2 * config.width),
                            nn.GELU(),
                            nn.Linear(2 * config.width, config.width),
                        ),
                    }
                )
            )
        self.logits = nn.Linear(config.width, config.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer["attention"](layer["norm"](x))
            x = x + layer["network"](x)
        return self.logits(x)


@torch.no_grad()
def generate(model: Model, prompt: Tensor, chunks: list[int], count: int) -> tuple[Tensor, Tensor]:
    """Prefill in chunks, then decode greedily; return the tokens and all logits."""
    pieces = [model(piece) for piece in prompt.split(chunks, dim=1)]
    tokens = prompt
    for _ in range(count):
        tokens = torch.cat([tokens, pieces[-1][:, -1:].argmax(-1)], 1)
        pieces.append(model(tokens[:, -1:]))
    return tokens, torch.cat(pieces, 1)


def compare(
    device: torch.device, config: Config = Config(), prompt: int = 100, count: int = 12
) -> float:
    """Run both models, and return the largest difference of their logits."""
    torch.manual_seed(0)
    sparse = Model(config, device, use_mask=False).to(device)
    masked = Model(config, device, use_mask=True).to(device)
    masked.load_state_dict(sparse.state_dict())
    start = torch.randint(config.vocabulary, (2, prompt), device=device)
    tokens, logits = generate(sparse, start, [prompt - 30, 29, 1], count)
    same_tokens, same_logits = generate(masked, start, [prompt], count)
    if not torch.equal(tokens, same_tokens):
        return float("inf")
    return float((logits - same_logits).abs().max())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="where the tensors are",
    )
    device = torch.device(parser.parse_args().device)
    config = Config()
    layout = BlockSparseLayout.local_strided(
        config.heads, config.max_seqlen, config.block, config.local_blocks, config.vert_stride
    )
    print(layout)
    difference = compare(device, config)
    print(f"prefilled in chunks of 70, 29 and 1 tokens, then decoded 12, on {device}")
    print(f"largest difference of the logits from those on a dense mask: {difference:.1e}")
    return int(difference > 1e-3)


if __name__ == "__main__":
    raise SystemExit(main())
