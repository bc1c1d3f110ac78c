"""From checked arguments and a plan to the kernel's arguments, and back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import _backend
from ._arrays import Array
from .plan import MAX_TOKENS, PARTITIONS, Plan

# factors below this are multiplied into the queries, because masked scores are finite numbers, too
SMALLEST_FACTOR = 2.0**-40
# of a factor to the softcap, as fp32 holds it
LARGEST_RATIO = 2.0**127
# of the largest fp32 number: above what a masked score is, below every other
NO_MAXIMUM = 8e37


@dataclass(frozen=True)
class Options:
    """Checked options of a call.

    Attributes:
        softcap: 0.0 for none.
        k_scales, v_scales: of the cache, for each KV head.
        dtype: NKI name of the dtype of the operands of products.
    """

    scale: float
    softcap: float
    sinks: Array | None
    k_scales: tuple[float, ...]
    v_scales: tuple[float, ...]
    has_lse: bool
    dtype: str


def kernel_arguments(
    q: Array, k: Array, v: Array, kv_cache: Array, plan: Plan, options: Options
) -> dict[str, Any]:
    """Return what the kernel takes, by name; q, k, v are packed: ``[tokens, heads, head_dim]``."""
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    q, scale, softcap = _fold_scale(q, options)
    # a ratio beyond fp32 would make NaN of a score of 0; tanh of it is 1 long before
    largest = softcap * LARGEST_RATIO if softcap else math.inf
    factors = (
        tuple(min(scale * s, largest) for s in options.k_scales),
        (min(scale, largest),) * kv_heads,
    )
    smallest = softcap if softcap else min(min(f) for f in factors)
    sinks = np.zeros(heads, np.float32) if options.sinks is None else options.sinks
    no_maximum = NO_MAXIMUM * min(1.0, smallest)
    # a sink of -inf is none: the maximum of a row without a key
    sinks = np.maximum(sinks, np.float32(-no_maximum))
    group = heads // kv_heads
    of_rows = np.tile(sinks.reshape(kv_heads, group), (1, PARTITIONS // group + 1))
    of_rows = np.ascontiguousarray(of_rows[:, :PARTITIONS])
    if not kv_cache.shape[1]:
        kv_cache = np.zeros((2, 1, *kv_cache.shape[2:]), kv_cache.dtype)
    return {
        "q": np.ascontiguousarray(q).reshape(tokens * heads, head_dim),
        "k_new": _by_head(k, plan),
        "v_new": _by_head(v, plan),
        "kv_cache": kv_cache,
        "kv_index": plan.kv_index,
        "kv_valid": plan.kv_valid,
        "q_index": plan.q_index,
        "bounds": plan.bounds,
        "bounds_tokens": plan.bounds_tokens,
        "sinks": np.ascontiguousarray(of_rows.T),
        "sink_rows": of_rows,
        "structure": plan.structure,
        "sections": plan.sections,
        "rows": plan.rows,
        "group": group,
        "factors": factors,
        "v_scales": (options.v_scales, (1.0,) * kv_heads),
        "softcap": softcap,
        "no_maximum": no_maximum,
        "has_sinks": options.sinks is not None,
        "has_lse": options.has_lse,
        "dtype": options.dtype,
    }


def _fold_scale(q: Array, options: Options) -> tuple[Array, float, float]:
    """Return queries, scale and softcap such that the factor of the scores is well above 0."""
    scale, softcap = options.scale, options.softcap
    if 0 < softcap < SMALLEST_FACTOR:
        # scores of 0, to within what the exponential shows
        return np.zeros_like(q), 1.0, 0.0
    if scale < 0:
        q, scale = -q, -scale
    if scale * min(1.0, *options.k_scales) < SMALLEST_FACTOR:
        q, scale = (q.astype(np.float32) * np.float32(scale)).astype(q.dtype), 1.0
    return q, scale, softcap


def new_places(plan: Plan) -> int:
    """Return the places of new tokens that the kernel reads: a multiple of 8, and not none."""
    return max(MAX_TOKENS, len(plan.new_tokens))


def _by_head(x: Array, plan: Plan) -> Array:
    """Return new keys or values as ``[kv_heads, places, head_dim]``, with 0 where nothing is."""
    _, kv_heads, head_dim = x.shape
    result = np.zeros((kv_heads, new_places(plan), head_dim), x.dtype)
    places = np.flatnonzero(plan.new_tokens >= 0)
    result[:, places] = x[plan.new_tokens[places]].transpose(1, 0, 2)
    return result


def launch(
    q: Array, k: Array, v: Array, kv_cache: Array, plan: Plan, options: Options, backend: str
) -> tuple[Array, Array | None]:
    """Run the kernel; return out ``[tokens, heads, head_dim]`` and lse ``[heads, tokens]``."""
    tokens, heads, _ = q.shape
    if not q.size:
        lse = np.zeros((heads, tokens), np.float32)
        return np.zeros_like(q), lse if options.has_lse else None
    arguments = kernel_arguments(q, k, v, kv_cache, plan, options)
    out, lse = _backend.run(backend, arguments)
    if not options.has_lse:
        return np.asarray(out).reshape(q.shape), None
    lse = np.ascontiguousarray(np.asarray(lse).reshape(tokens, heads).T)
    # a row that sees neither a key nor a sink
    lse[lse <= -arguments["no_maximum"] / 2] = -np.inf
    return np.asarray(out).reshape(q.shape), lse
