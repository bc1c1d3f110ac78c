"""Random paged batches, and the error that a kernel may have."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
from nki_paged_attn import paged_attention, paged_attention_reference

BF16 = np.dtype(ml_dtypes.bfloat16)
F16, F32 = np.dtype(np.float16), np.dtype(np.float32)


@dataclass(frozen=True)
class Case:
    """Arguments of ``paged_attention``."""

    q: Any
    k: Any
    v: Any
    kv_cache: Any
    block_table: Any
    query_lens: Any
    context_lens: Any
    options: dict[str, Any] = field(default_factory=dict)

    def __repr__(self):
        names = ("q", "k", "kv_cache")
        shapes = ", ".join(f"{n} {getattr(self, n).shape} {getattr(self, n).dtype}" for n in names)
        return f"Case({self.query_lens}, {self.context_lens}, {shapes}, {self.options})"

    @property
    def tensors(self):
        return (
            self.q,
            self.k,
            self.v,
            self.kv_cache,
            self.block_table,
            self.query_lens,
            self.context_lens,
        )

    def with_options(self, **options):
        return replace(self, options=self.options | options)

    def run(self, **options):
        """Return out and lse of the kernel on our simulator."""
        arguments = {"return_lse": True, "backend": "sim"} | self.options | options
        return paged_attention(*self.tensors, **arguments)

    def oracle(self):
        return paged_attention_reference(*self.tensors, **self.options)

    def check(self, **options):
        """Hold the kernel against float64, within the error that its dtype explains."""
        out, lse = self.run(**options)
        exact, exact_lse = self.oracle()
        assert out.dtype == self.q.dtype
        assert lse.dtype == np.float32
        assert_within(out, exact, self.emulated(), self.q.dtype)
        np.testing.assert_array_equal(np.isinf(lse), np.isinf(exact_lse))
        finite = np.isfinite(exact_lse)
        scale = max(1.0, np.abs(exact_lse[finite]).max(initial=0))
        # fp32 throughout: the scores' own rounding and the sums'
        assert np.abs(lse[finite] - exact_lse[finite]).max(initial=0) <= 2**-19 * scale
        return out, lse

    def emulated(self):
        """Return the oracle with scores, probabilities and output rounded as eager code would."""
        dtype = self.q.dtype
        return emulate(self, dtype).astype(dtype).astype(np.float64)


def emulate(case, dtype):
    """Plain attention that rounds the scores to fp32 and the probabilities to a dtype."""
    q, k, v, cache, table, lens, contexts = case.tensors
    options = dict(case.options)
    _, kv_heads = q.shape[1], k.shape[1]
    k_scale = np.broadcast_to(options.pop("k_scale", None) or 1.0, kv_heads)
    v_scale = np.broadcast_to(options.pop("v_scale", None) or 1.0, kv_heads)
    out = np.zeros(q.shape, np.float64)
    first = 0
    for i, (count, context) in enumerate(zip(lens, contexts, strict=True)):
        own = slice(first, first + count)
        first += count
        pages = cache[:, table[i, : -(-context // cache.shape[3])]].astype(np.float64)
        flat = pages.transpose(0, 1, 3, 2, 4).reshape(2, -1, kv_heads, q.shape[2])[:, :context]
        keys = np.concatenate([flat[0] * k_scale[:, None], k[own].astype(np.float64)])
        values = np.concatenate([flat[1] * v_scale[:, None], v[own].astype(np.float64)])
        place = context + np.arange(count)[:, None]
        j = np.arange(len(keys))
        seen = (j <= place) & (j > place - (options.get("window") or 2**30))
        for h in range(q.shape[1]):
            g = h * kv_heads // q.shape[1]
            s = (q[own, h].astype(np.float64) @ keys[:, g].T).astype(np.float32)
            scale = options.get("scale")
            s = np.float32(q.shape[2] ** -0.5 if scale is None else scale) * s
            if options.get("softcap"):
                cap = np.float32(options["softcap"])
                s = cap * np.tanh(s / cap)
            s = np.where(seen, s, -np.inf)
            sink = -np.inf if options.get("sinks") is None else options["sinks"][h]
            top = np.maximum(s.max(axis=1, initial=-np.inf), sink)[:, None]
            p = np.where(seen, np.exp(s - np.where(np.isfinite(top), top, 0)), 0)
            total = p.sum(axis=1) + np.exp(sink - top[:, 0])
            clean = np.where(seen.any(axis=0)[:, None], values[:, g], 0.0)
            out[own, h] = p.astype(dtype).astype(np.float64) @ clean / total[:, None]
    return out


def assert_within(got, exact, emulated, dtype):
    """``max |got - exact| <= 2 max |emulated - exact| + 2 units of the largest value``."""
    got = got.astype(np.float64)
    assert not np.isnan(got).any()
    unit = float(ml_dtypes.finfo(dtype).eps)
    # products of three fp32 roundings and sums of many
    unit = max(unit, 2.0**-19)
    budget = 2 * np.abs(emulated - exact).max(initial=0) + 2 * unit * np.abs(exact).max(initial=0)
    error = np.abs(got - exact).max(initial=0)
    assert error <= budget, f"error {error:.3g}, budget {budget:.3g}"


def make_case(
    query_lens,
    context_lens,
    *,
    heads=4,
    kv_heads=2,
    head_dim=32,
    block_size=16,
    dtype=F32,
    cache_dtype=None,
    seed=0,
    spare=3,
    extra=0,
    **options,
):
    """Draw a batch whose blocks lie in random order, with unused blocks between."""
    rng = np.random.default_rng(seed)
    tokens = sum(query_lens) + extra
    counts = [-(-c // block_size) for c in context_lens]
    blocks = sum(counts) + spare
    order = rng.permutation(blocks)
    table = np.full((len(counts), max(counts, default=0)), -1, np.int32)
    at = 0
    for row, count in zip(table, counts, strict=True):
        row[:count] = order[at : at + count]
        at += count

    def draw(*shape):
        return rng.uniform(-1, 1, shape).astype(np.float32)

    q, k, v = (draw(tokens, n, head_dim).astype(dtype) for n in (heads, kv_heads, kv_heads))
    cache = draw(2, blocks, kv_heads, block_size, head_dim).astype(cache_dtype or dtype)
    return Case(q, k, v, cache, table, list(query_lens), list(context_lens), options)


def unused_slots(case):
    """Return booleans ``[blocks, block_size]``: slots that no sequence's context reaches."""
    blocks, block_size = case.kv_cache.shape[1], case.kv_cache.shape[3]
    free = np.ones((blocks, block_size), bool)
    for row, context in zip(case.block_table, case.context_lens, strict=True):
        for position in range(context):
            free[row[position // block_size], position % block_size] = False
    return free


def poisoned(case, value, slots=None):
    """Return the case with a value in every slot that nobody reaches, or in the given ones."""
    cache = case.kv_cache.copy()
    where = unused_slots(case) if slots is None else slots
    cache.transpose(1, 3, 0, 2, 4)[where] = value
    return replace(case, kv_cache=cache)
