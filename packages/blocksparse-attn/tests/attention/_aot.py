"""What this package builds ahead of time: configurations, and the launchers on meta tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from attn_common import detect
from blocksparse_attn._attention.call import (
    BackwardCall,
    BackwardWalks,
    Blocks,
    Bounds,
    Common,
    ForwardCall,
    ListForm,
    Options,
    Pattern,
    Tensors,
    Walks,
)
from blocksparse_attn._attention.tiles import SHORT
from blocksparse_attn._layout.kept_lists import spec_of

HEADS_Q, HEADS_K, BATCH = 8, 2, 2


@dataclass(frozen=True)
class Config:
    """What a build depends on; sizes of tensors are those of a typical call."""

    head_dim: int
    dtype: str = "bfloat16"
    head_dim_v: int | None = None
    block: tuple[int, int] = (64, 64)
    causal: bool = True
    shared: bool = False  # one pattern for all heads
    alike: bool = False  # rows of blocks resemble their neighbours
    packed: bool = False
    page: int = 0
    short: bool = False  # the forward's tile of a few queries, split
    ruled: bool = False  # a token rule
    heads_first: bool = False  # memory in the order of [batch, heads, tokens, head_dim]

    def __str__(self) -> str:
        dims = f"{self.head_dim}" + (f":{self.head_dim_v}" if self.head_dim_v else "")
        kind = "-".join(
            name
            for name in ("causal", "shared", "alike", "packed", "short", "ruled", "heads_first")
            if getattr(self, name)
        )
        page = f"-page{self.page}" if self.page else ""
        return f"d{dims}-{self.dtype}-b{self.block[0]}:{self.block[1]}-{kind}{page}"

    def lists(self, kind: str) -> tuple[torch.Tensor, ...]:
        """Meta tensors of the lists that a kernel walks."""
        width = max(self.head_dim, self.head_dim_v or 0)
        itemsize = getattr(torch, self.dtype).itemsize
        form = ListForm(HEADS_Q // HEADS_K, width, itemsize, self.causal)
        pattern = Pattern(self.shared, 16, 16, *self.block, self.alike, 16)
        spec_of(kind, detect("meta"), pattern, form)
        return tuple(
            torch.empty(9, dtype=dtype, device="meta")
            for dtype in (torch.int64, torch.int64, torch.int32, torch.int32)
        )

    def tensors(self, seqlen_q: int, seqlen_k: int) -> Tensors:
        """Meta tensors: q, k, v, and the optional ones."""
        dtype = getattr(torch, self.dtype)

        def meta(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(*size, dtype=dtype, device="meta")

        def tokens(count: int, heads: int, width: int) -> torch.Tensor:
            leading = (BATCH * count,) if self.packed else (BATCH, count)
            if self.heads_first:
                return meta(*leading[:-1], heads, leading[-1], width).transpose(-2, -3)
            return meta(*leading, heads, width)

        width_v = self.head_dim_v or self.head_dim
        made: dict[str, Any] = {"q": tokens(seqlen_q, HEADS_Q, self.head_dim)}
        if self.page:
            pages = BATCH * seqlen_k // self.page
            made["k"] = meta(pages, self.page, HEADS_K, self.head_dim)
            made["v"] = meta(pages, self.page, HEADS_K, width_v)
        else:
            made["k"] = tokens(seqlen_k, HEADS_K, self.head_dim)
            made["v"] = tokens(seqlen_k, HEADS_K, width_v)
        offsets = meta(BATCH + 1, dtype=torch.int32) if self.packed else None
        made["cu_seqlens_q"] = made["cu_seqlens_k"] = offsets
        made["block_table"] = None
        if self.page:
            made["block_table"] = meta(BATCH, seqlen_k // self.page, dtype=torch.int32)
        return Tensors(**made, rule=self.rule(seqlen_k))

    def rule(self, seqlen_k: int) -> torch.Tensor | None:
        """Bounds of what a layout's positions see."""
        if not self.ruled:
            return None
        return torch.empty(1, seqlen_k, 2, dtype=torch.int32, device="meta")

    def call(self, seqlen_q: int, seqlen_k: int) -> Common:
        """What the launchers want to know of a layout, and of what is no tensor."""
        heads = 1 if self.shared else HEADS_Q
        rows, cols = (-(-seqlen_k // side) for side in self.block)
        crow, col = (
            torch.empty(heads, n, dtype=torch.int32, device="meta") for n in (rows + 1, rows * 8)
        )
        blocks = Blocks(crow, col, cols, *self.block, self.alike)
        options = Options(self.head_dim**-0.5, self.causal, 4 if self.short else 1, False)
        return Common(blocks, 64, Bounds(seqlen_q, seqlen_k), options, self.rule(seqlen_k))


def launch_forward(config: Config, seqlen: int = 1024) -> None:
    """Run the forward launcher on meta tensors."""
    from blocksparse_attn._attention.launch import launch_forward as launch

    seqlen_q = min(seqlen, SHORT) if config.short else seqlen
    lists = config.lists("short" if config.short else "tall")
    walks = Walks(short=lists) if config.short else Walks(tall=lists)
    *tensors, _ = config.tensors(seqlen_q, seqlen)
    launch(ForwardCall(*tensors, walks, config.call(seqlen_q, seqlen)))


def launch_backward(config: Config, seqlen: int = 1024) -> None:
    """Run the backward launcher on meta tensors."""
    from blocksparse_attn._attention.launch import launch_backward as launch

    x = config.tensors(seqlen, seqlen)
    q = x.q
    out = q.new_empty((*q.shape[:-1], x.v.shape[-1]))
    lse_size = q.shape[1::-1] if config.packed else (q.shape[0], q.shape[2], q.shape[1])
    lse = torch.empty(lse_size, device="meta")
    walks = BackwardWalks(by_query=config.lists("dq"), by_key=config.lists("dkdv"))
    of_call = out, q, x.k, x.v, out, lse, lse, x.cu_seqlens_q, x.cu_seqlens_k
    launch(BackwardCall(*of_call, walks, config.call(seqlen, seqlen)))
