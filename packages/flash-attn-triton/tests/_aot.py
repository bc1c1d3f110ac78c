"""What this package builds ahead of time: configurations, and the launchers on meta tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Config:
    """What a build depends on; sizes of tensors are those of a typical call."""

    head_dim: int
    dtype: str = "bfloat16"
    head_dim_v: int | None = None
    causal: bool = True
    rich: bool = False  # every feature at once, packed
    heads_first: bool = False  # memory in the order of [batch, heads, tokens, head_dim]

    def __str__(self) -> str:
        dims = f"{self.head_dim}" + (f":{self.head_dim_v}" if self.head_dim_v else "")
        kind = "rich" if self.rich else "causal" if self.causal else "full"
        kind += "-heads_first" if self.heads_first else ""
        return f"d{dims}-{self.dtype}-{kind}"

    @property
    def is_fp8(self) -> bool:
        return self.dtype.startswith("float8")

    def tensors(self, seqlen: int = 1024) -> dict[str, Any]:
        """Meta tensors: q, k, v and the optional ones."""
        dtype, batch, heads = getattr(torch, self.dtype), 2, 8
        leading = (batch * seqlen,) if self.rich else (batch, seqlen)

        def meta(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(*size, dtype=dtype, device="meta")

        def tokens(heads: int, width: int) -> torch.Tensor:
            if self.heads_first:
                return meta(*leading[:-1], heads, leading[-1], width, dtype=dtype).transpose(-2, -3)
            return meta(*leading, heads, width, dtype=dtype)

        made: dict[str, Any] = {
            "q": tokens(heads, self.head_dim),
            "k": tokens(2, self.head_dim),
            "v": tokens(2, self.head_dim_v or self.head_dim),
        }
        names = ["cu_seqlens_q", "cu_seqlens_k", "seqused_k", "bias", "alibi_slopes", "sinks"]
        made.update(dict.fromkeys([*names, "rng_state"]))
        if self.rich:
            offsets = meta(batch + 1, dtype=torch.int32)
            wide = torch.float32 if self.is_fp8 else dtype
            made.update(
                cu_seqlens_q=offsets,
                cu_seqlens_k=offsets,
                seqused_k=meta(batch, dtype=torch.int32),
                bias=meta(batch, heads, seqlen, seqlen, dtype=wide),
                alibi_slopes=meta(batch, heads),
                sinks=meta(heads),
            )
            if not self.is_fp8:
                made["rng_state"] = meta(2, dtype=torch.int64)
        return made

    def options(self, seqlen: int = 1024) -> tuple[Any, ...]:
        """Return the operators' scalar arguments, from ``max_seqlen_q`` to ``dropout_p``."""
        left, right = (500, 0) if self.rich else (-1, 0 if self.causal else -1)
        capped, dropped = (30.0, 0.0 if self.is_fp8 else 0.1) if self.rich else (0.0, 0.0)
        return seqlen, seqlen, self.head_dim**-0.5, left, right, capped, dropped


def launch_forward(config: Config, seqlen: int = 1024) -> None:
    """Run the forward launcher on meta tensors."""
    from flash_attn_triton._kernels.forward import launch_forward as launch

    t = config.tensors(seqlen)
    rng_state = t.pop("rng_state")
    descales = [torch.empty(2, 2, device="meta")] * 3 if config.is_fp8 else [None] * 3
    out_dtype = torch.bfloat16 if config.is_fp8 else t["q"].dtype
    launch(*t.values(), *descales, None, rng_state, *config.options(seqlen), out_dtype)


def launch_backward(config: Config, seqlen: int = 1024) -> None:
    """Run the backward launcher on meta tensors."""
    from flash_attn_triton._kernels.backward import launch_backward as launch

    t = config.tensors(seqlen)
    q, k, v = t.pop("q"), t.pop("k"), t.pop("v")
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    packed = t["cu_seqlens_q"] is not None
    lse_size = q.shape[1::-1] if packed else (q.shape[0], q.shape[2], q.shape[1])
    lse = torch.empty(lse_size, device="meta")
    launch(out, q, k, v, out, lse, lse, *t.values(), *config.options(seqlen), config.rich)
