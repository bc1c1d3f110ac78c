"""The calls whose kernels ``python -m prefix_prefill compile`` builds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from .._linked.host.models import MODELS, Model

HEAD_DIMS = 64, 96, 128, 192, 256
# query heads a key head
GROUPS = 1, 4, 8
# sequences, queries of each, and keys: decode of few and many, drafts, chunks
STEPS = (1, 1, 1024), (1, 1, 32768), (64, 1, 1024), (256, 1, 4096), (64, 4, 1024), (4, 512, 4096)
PAGE = 16
PAGES = 65536


def calls_of(like: str | None) -> Iterator[dict[str, Any]]:
    """Yield the calls of a model's serving, or for None the common ones."""
    if like is not None:
        yield from _calls_of(MODELS[like], "bfloat16")
        return
    for head_dim, group, dtype in itertools.product(HEAD_DIMS, GROUPS, ("bfloat16", "float16")):
        yield from _calls_of(Model(8 * group, 8, head_dim), dtype)


def _calls_of(model: Model, dtype: str) -> Iterator[dict[str, Any]]:
    row = [model.heads_k, model.head_dim]
    windows = {(-1, -1), (-1 if model.window is None else model.window, -1)}
    for cache_dtype in (dtype, "float8_e4m3fn"):
        caches = {f"{x}_cache": [cache_dtype, [PAGES, PAGE, *row]] for x in "kv"}
        is_scaled = cache_dtype != dtype
        scales = {f"{x}_scale": ["float32", [1]] for x in "kv" if is_scaled}
        for (batch, queries, keys), window in itertools.product(STEPS, sorted(windows)):
            tokens = batch * queries
            arguments = {
                "q": [dtype, [tokens, model.heads_q, model.head_dim]],
                **caches,
                "block_table": ["int32", [batch, keys // PAGE]],
                "cu_seqlens_q": ["int32", [batch + 1]],
                "seqlens_k": ["int32", [batch]],
                "max_seqlen_q": queries,
                "max_seqlen_k": keys,
                "softcap": model.softcap,
                "window_size": [*window],
                **{f"{x}_descale": ["float32", [1]] for x in "kv" if is_scaled},
            }
            if model.has_sinks:
                arguments["sinks"] = ["float32", [model.heads_q]]
            yield {"function": "paged_attn_func", "arguments": arguments}
            written = {x: [dtype, [tokens, *row]] for x in "kv"}
            slots = {"slot_mapping": ["int64", [tokens]]}
            arguments = {**written, **caches, **slots, **scales}
            yield {"function": "reshape_and_cache", "arguments": arguments}
