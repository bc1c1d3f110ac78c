"""The calls whose kernels ``python -m lightning_attn compile`` builds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

# heads and head dimension
MODELS = {"minimax-text-01": (64, 128)}
COMMON = (16, 64), (16, 96), (16, 128), (16, 192), (16, 256)
# batch and length
SIZES = (8, 512), (2, 4096)


def calls_of(like: str | None) -> Iterator[dict[str, Any]]:
    """Yield the calls of a model, or for None the common ones."""
    shapes = COMMON if like is None else (MODELS[like],)
    dtypes = ("bfloat16", "float16") if like is None else ("bfloat16",)
    for (heads, head_dim), dtype in itertools.product(shapes, dtypes):
        decay = {"decay": ["float32", [heads]]}
        row = [heads, head_dim]
        states = ["float32", [256, heads, head_dim, head_dim]]
        for batch, length in SIZES:
            arguments: dict[str, Any] = {x: [dtype, [batch, length, *row]] for x in "qkv"} | decay
            yield {"function": "lightning_attn_func", "backward": True, "arguments": arguments}
            arguments = {x: [dtype, [batch * length, *row]] for x in "qkv"} | decay
            arguments |= {"cu_seqlens": ["int32", [batch + 1]]}
            yield {
                "function": "lightning_attn_varlen_func",
                "backward": True,
                "arguments": arguments,
            }
            slots = {"state_cache": states, "state_indices": ["int32", [batch]]}
            yield {"function": "lightning_attn_varlen_func", "arguments": arguments | slots}
        arguments = {x: [dtype, [64, 1, *row]] for x in "qkv"} | decay
        arguments |= {"state_cache": states, "slot_idx": ["int32", [64]]}
        yield {"function": "lightning_attn_decode", "arguments": arguments}
