"""What is measured: patterns, densities, block sizes, decode; bf16, causal, grouped heads."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from _linked.cases import Case
from blocksparse_attn import BlockSparseLayout

DENSITIES = (1.0, 0.7, 0.5, 0.35, 0.2, 0.1, 0.05, 0.02)
PATTERNS = ((16, 8), (8, 16))


@dataclass(frozen=True)
class Problem(Case):
    """A layout over sequences of one length.

    Attributes:
        seqlen: Keys of a sequence.
        block: Positions of a block.
        passes: Which passes are measured.
        local: Blocks of the local and strided pattern; 0: a random one.
        stride: Of that pattern.
        homo: Whether all heads have one pattern.
        density: Of a random pattern; rows in pairs of 128 positions are alike.
        queries: Queries of a sequence; 0: as many as keys.
    """

    seqlen: int
    block: int
    passes: tuple[str, ...] = ("fwd", "bwd")
    local: int = 0
    stride: int = 0
    homo: bool = False
    density: float = 1.0
    batch: int = 1
    queries: int = 0
    heads_q: int = 32
    heads_k: int = 8
    head_dim: int = 128

    @property
    def group(self) -> int:
        return self.heads_q // self.heads_k

    def layout(self, device: str) -> BlockSparseLayout:
        """Return the kept blocks: the pattern, or random ones below the diagonal."""
        if self.local:
            sizes = self.heads_q, self.seqlen, self.block, self.local, self.stride, self.homo
            return BlockSparseLayout.local_strided(*sizes, device=device)
        # drawn in squares of 128 positions, so that blocks of 64 and 128 keep the same tokens
        side = max(128 // self.block, 1)
        blocks = -(-self.seqlen // (self.block * side))
        generator = torch.Generator().manual_seed(0)
        size = (1 if self.family == "dense" else self.heads_q, blocks, blocks)
        kept = torch.rand(size, generator=generator) < self.density
        kept |= torch.eye(blocks, dtype=torch.bool)  # no row sees nothing
        kept = kept.repeat_interleave(side, 1).repeat_interleave(side, 2)
        count = -(-self.seqlen // self.block)
        return BlockSparseLayout.from_dense(kept[:, :count, :count].tril().to(device), self.block)

    @functools.cached_property
    def kept(self) -> tuple[float, int, int]:
        """Return the density, and of the last row its blocks and those that a group needs."""
        if not self.local:
            return self.density, 0, 0
        layout = self.layout("cpu")
        last = layout.to_dense()[:, -1].expand(self.heads_q, -1)
        needed = last.unflatten(0, (self.heads_k, self.group)).any(1)
        return layout.density(self.seqlen), int(last.sum()), int(needed.sum())

    def flops(self, one: str) -> float:
        """Return the products of kept blocks, 2.5 times as many backward."""
        density, last, _ = self.kept
        if self.queries:  # one query of each sequence: the last row of blocks
            return 4.0 * self.batch * last * self.block * self.head_dim
        whole = 2.0 * self.heads_q * self.head_dim * self.seqlen**2 * self.batch
        return whole * density * (1 if one == "fwd" else 2.5)

    def bytes(self, one: str) -> float:
        """Return q, k, v and out, in the backward their gradients too, and the fp32 LSE.

        Of one query, keys and values: each that some head of its group needs counted once.
        """
        if self.queries:
            return float(self.kept[2] * self.block * self.head_dim * 4 * self.batch)
        row, heads = 2 * self.head_dim * self.seqlen, self.heads_q + self.heads_k
        moved = row * 2 * heads * (1 if one == "fwd" else 2) + 4 * self.heads_q * self.seqlen
        return float(moved * self.batch)

    def told(self) -> dict[str, str]:
        """Return the density for the table of bounds."""
        return {"density": f"{self.kept[0]:.3f}"}

    def kind(self) -> Problem:
        """Return what problems of the same kernels have in common."""
        return replace(self, name="", family="", seqlen=0, local=0, stride=0, density=0.0)

    def shrunk(self) -> Problem:
        """Return the same at a size that a CPU can do."""
        small: dict[str, Any] = {"seqlen": 256, "heads_q": 4, "heads_k": 2, "head_dim": 16}
        small |= {"batch": min(self.batch, 2), "block": min(self.block, 32)}
        return replace(self, local=min(self.local, 2), stride=min(self.stride, 3), **small)


def problem(family: str, seqlen: int, block: int, **more: Any) -> Problem:
    """Return a problem with its name."""
    found = Problem("", family, seqlen, block, **more)
    kind = f"local{found.local}-stride{found.stride}" if found.local else f"d{found.density:g}"
    homo = "-homo" if found.homo else ""
    name = f"{family}-b{found.batch}-s{seqlen}-block{block}-{kind}{homo}"
    return replace(found, name=name)


_FORWARD: dict[str, Any] = {"passes": ("fwd",), "batch": 32, "queries": 1}
PROBLEMS = (
    *(
        problem("pattern", seqlen, 64, local=local, stride=stride, homo=homo)
        for seqlen in (8192, 32768)
        for local, stride in PATTERNS
        for homo in (False, True)
    ),
    *(problem("dense", seqlen, 64) for seqlen in (8192, 32768)),
    # the same shape of pattern in smaller blocks: so many times the blocks, or local ones
    *(problem("small", 8192, b, local=1024 // b, stride=8) for b in (16, 32, 128)),
    *(problem("decode", 8192, 64, local=n, stride=s, **_FORWARD) for n, s in PATTERNS),
    *(problem("curve", 8192, b, density=density) for b in (64, 128) for density in DENSITIES),
)
# by family: whose figures they are, and beside whom. FlexAttention stands in the curve alone, as
# each other case compiles anew
FAMILIES: dict[str, tuple[str, ...]] = {
    "pattern": ("ours", "portable", "fa3", "fa3-short"),
    "dense": ("ours", "portable", "dense", "fa3", "cudnn"),
    "small": ("ours", "portable", "fa3"),
    "decode": ("ours",),
    "curve": ("ours", "portable", "fa3", "flex"),
}
