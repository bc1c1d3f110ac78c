"""The public function: attention of new tokens to a paged cache and to themselves."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._arrays import like, to_array
from ._backend import choose_backend
from ._checks import (
    check_lengths,
    check_number,
    check_packed,
    check_scales,
    check_sinks,
    check_table,
    check_window,
)
from ._launch import Options, launch
from .plan import build_plan


def paged_attention(
    q: Any,
    k: Any,
    v: Any,
    kv_cache: Any,
    block_table: Any,
    query_lens: Any,
    context_lens: Any,
    *,
    scale: float | None = None,
    window: int | None = None,
    sinks: Any = None,
    softcap: float | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Any:
    """Attend new tokens to their sequence's cached context and, causally, to each other.

    Sequences lie one behind the other; prefill, chunks and decode mix freely. Key ``j`` of a
    sequence is visible to its new token ``i`` iff ``j <= context + i``, and with a window also
    ``j > context + i - window``.

    Args:
        q: ``[tokens, heads, head_dim]``, fp16, bf16 (``ml_dtypes.bfloat16``) or fp32, which is also
            the precision of the products; NumPy arrays, or PyTorch tensors on the CPU.
        k, v: the new tokens' keys and values, ``[tokens, kv_heads, head_dim]``, in q's dtype.
        kv_cache: ``[2, blocks, kv_heads, block_size, head_dim]``, keys and values of the context,
            in fp16, bf16, fp32 or FP8 (e4m3, e4m3fn, e5m2).
        block_table: block numbers of each sequence, ``[batch, max_blocks]``, integers. Entries past
            a context are not read.
        query_lens: new tokens of each sequence, ``[batch]``; rows of q behind their sum give 0.
        context_lens: tokens of each sequence that the cache holds, ``[batch]``.
        scale: of the scores; any finite number. Default: ``head_dim ** -0.5``.
        window: how many keys a token sees at most, its own included. Default: all.
        sinks: ``[heads]``, one more logit in each denominator, in natural units.
        softcap: ``c`` makes scores ``c * tanh(s / c)``. Default: none.
        k_scale, v_scale: what cached keys and values are multiplied by; a number or ``[kv_heads]``.
        return_lse: also return the natural logarithm of the denominators, fp32 ``[heads, tokens]``.
        backend: ``auto``, ``nki`` (a device), ``nki-sim`` (AWS's simulator) or ``sim`` (ours).

    Returns:
        ``out`` in q's shape and dtype, or ``(out, lse)``. A row that sees no key gives 0 and -inf.

    Raises:
        TypeError: a dtype that is not offered.
        ValueError: a shape or a number out of range, or a block that is not in the cache.
        ImportError: the backend's package is not installed.
    """
    arrays = [to_array(n, x) for n, x in (("q", q), ("k", k), ("v", v), ("kv_cache", kv_cache))]
    queries, keys, values, cache = arrays
    check_packed(queries, keys, values, cache)
    tokens, heads, head_dim = queries.shape
    kv_heads = keys.shape[1]
    lens, contexts = check_lengths(query_lens, context_lens, tokens)
    table = check_table(block_table, contexts, cache.shape[3], cache.shape[1])
    options = Options(
        scale=head_dim**-0.5 if scale is None else check_number("scale", scale),
        softcap=0.0 if softcap is None else check_number("softcap", softcap, positive=True),
        sinks=check_sinks(sinks, heads),
        k_scales=check_scales("k_scale", k_scale, kv_heads),
        v_scales=check_scales("v_scale", v_scale, kv_heads),
        has_lse=return_lse,
        dtype=np.dtype(queries.dtype).name,
    )
    plan = build_plan(
        lens,
        contexts,
        table,
        cache.shape[3],
        heads=heads,
        kv_heads=kv_heads,
        tokens=tokens,
        window=check_window(window),
        joint=options.k_scales == options.v_scales == (1.0,) * kv_heads,
    )
    out, lse = launch(queries, keys, values, cache, plan, options, choose_backend(backend))
    return (like(out, q), like(lse, q)) if lse is not None else like(out, q)
