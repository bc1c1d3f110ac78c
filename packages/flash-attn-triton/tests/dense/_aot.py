"""What this package builds ahead of time: configurations, and the launchers on meta tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from flash_attn_triton._dense.call import BackwardCall, ForwardCall
from flash_attn_triton._linked.host.operators import structured

from .._numerics import only_portable

# odd, so that no count of rows is a multiple of 16 for that of the batch
BATCH = 3


@dataclass(frozen=True)
class Config:
    """What a build depends on; sizes of tensors are those of a typical call."""

    head_dim: int
    dtype: str = "bfloat16"
    head_dim_v: int | None = None
    causal: bool = True
    rich: bool = False  # every feature at once, packed
    heads_first: bool = False  # memory in the order of [batch, heads, tokens, head_dim]
    # parts of larger tensors: strides are odd multiples of 16 bytes, small ones begin anywhere
    apart: bool = False
    spans: int = 0  # spans of a row, in place of a mask; nothing that they refuse is given

    def __str__(self) -> str:
        dims = f"{self.head_dim}" + (f":{self.head_dim_v}" if self.head_dim_v else "")
        kind = "rich" if self.rich else "causal" if self.causal else "full"
        kind += "-heads_first" if self.heads_first else ""
        kind += "-apart" if self.apart else ""
        kind += f"-spans{self.spans}" if self.spans else ""
        return f"d{dims}-{self.dtype}-{kind}"

    @property
    def is_fp8(self) -> bool:
        return self.dtype.startswith("float8")

    def tensors(self, seqlen: int = 1024) -> dict[str, Any]:
        """Meta tensors: q, k, v and the optional ones."""
        dtype, heads = getattr(torch, self.dtype), 8
        made: dict[str, Any] = {
            "q": self.tokens(seqlen, heads, self.head_dim),
            "k": self.tokens(seqlen, 2, self.head_dim),
            "v": self.tokens(seqlen, 2, self.head_dim_v or self.head_dim),
        }
        names = ["cu_seqlens_q", "cu_seqlens_k", "seqused_k", "bias", "alibi_slopes", "sinks"]
        made.update(dict.fromkeys([*names, "spans", "rng_state"]))
        if self.rich:
            offsets = self.small(BATCH + 1, dtype=torch.int32)
            wide = torch.float32 if self.is_fp8 else dtype
            made.update(
                cu_seqlens_q=offsets,
                cu_seqlens_k=offsets,
                seqused_k=self.small(BATCH, dtype=torch.int32),
                bias=torch.empty(BATCH, heads, seqlen, seqlen, dtype=wide, device="meta"),
                alibi_slopes=self.small(BATCH, heads),
                sinks=self.small(heads),
            )
            if not self.is_fp8:
                made["rng_state"] = self.small(2, dtype=torch.int64)
        if self.spans:
            rows = made["q"].shape[:-2]
            made.update(
                spans=self.small(*rows, self.spans, 2, dtype=torch.int32),
                bias=None,
                alibi_slopes=None,
            )
        return made

    def small(self, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a contiguous meta tensor."""
        ahead = int(self.apart)
        x = torch.empty(math.prod(size) + ahead, dtype=dtype, device="meta")
        return x[ahead:].view(size)

    def tokens(self, seqlen: int, heads: int, width: int) -> torch.Tensor:
        """Return a meta tensor of so many tokens per sequence, in this memory layout."""
        outer, length = ((), BATCH * seqlen) if self.rich else ((BATCH,), seqlen)
        inner = (heads, length) if self.heads_first else (length, heads)
        dtype = getattr(torch, self.dtype)
        more = 16 // dtype.itemsize if self.apart else 0
        room = (*(n + (more > 0) for n in inner), width + more)
        x = torch.empty(*outer, *room, dtype=dtype, device="meta")
        x = x[..., : inner[0], : inner[1], :width]
        return x.transpose(-2, -3) if self.heads_first else x

    def options(self, seqlen: int = 1024) -> tuple[Any, ...]:
        """Return the operators' scalar arguments, from ``max_seqlen_q`` to ``dropout_p``."""
        left, right = (500, 0) if self.rich else (-1, 0 if self.causal else -1)
        if self.spans:
            left, right = -1, -1
        capped, dropped = (30.0, 0.0 if self.is_fp8 else 0.1) if self.rich else (0.0, 0.0)
        return seqlen, seqlen, self.head_dim**-0.5, left, right, capped, dropped


def launch_forward(config: Config, seqlen: int = 1024) -> None:
    """Run the forward launcher on meta tensors."""
    from flash_attn_triton._dense.launch import launch_forward as launch

    t = config.tensors(seqlen)
    spans, rng_state = t.pop("spans"), t.pop("rng_state")
    descales = [config.small(BATCH, 2)] * 3 if config.is_fp8 else [None] * 3
    out_dtype = torch.bfloat16 if config.is_fp8 else t["q"].dtype
    with only_portable():
        given = *t.values(), *descales, None, spans, rng_state, *config.options(seqlen), out_dtype
        launch(structured(ForwardCall, given))


def launch_backward(config: Config, seqlen: int = 1024) -> None:
    """Run the backward launcher on meta tensors."""
    from flash_attn_triton._dense.launch import launch_backward as launch

    t = config.tensors(seqlen)
    q, k, v = t.pop("q"), t.pop("k"), t.pop("v")
    out = config.tokens(seqlen, q.shape[-2], v.shape[-1])
    packed = t["cu_seqlens_q"] is not None
    lse_size = q.shape[1::-1] if packed else (q.shape[0], q.shape[2], q.shape[1])
    lse, dlse = torch.empty(lse_size, device="meta"), config.small(*lse_size)
    options = *config.options(seqlen), False, t["bias"] is not None
    with only_portable():
        launch(structured(BackwardCall, (out, q, k, v, out, lse, dlse, *t.values(), *options)))
