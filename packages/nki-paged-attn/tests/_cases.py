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

    def _repr_pretty_(self, printer, cycle):
        # Hypothesis would print every array of a dataclass
        printer.text(repr(self))

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
        emulated, moves, lse_moves = emulate(self, self.q.dtype)
        assert_within(out, exact, emulated, self.q.dtype, moves)
        np.testing.assert_array_equal(np.isinf(lse), np.isinf(exact_lse))
        finite = np.isfinite(exact_lse)
        scale = max(1.0, np.abs(exact_lse[finite]).max(initial=0))
        # fp32 throughout: the scores' own rounding and the sums'
        budget = max(2**-19 * scale, 2 * lse_moves.max(initial=0))
        assert np.abs(lse[finite] - exact_lse[finite]).max(initial=0) <= budget
        return out, lse


def emulate(case, dtype):
    """Plain attention that rounds the scores to fp32 and probabilities and output to a dtype.

    Returns the output, then how far the kernel's sums over the head dim, in fp32, may move each of
    its elements and each lse. Score j has an error of ``e_j = 2^-24 |scale| sum_d |q_d k_jd|``, and
    to first order moves the output by ``p_j e_j (v_j - out)`` and the lse by ``p_j e_j``.
    """
    q, k, v, cache, table, lens, contexts = case.tensors
    options = dict(case.options)
    _, kv_heads = q.shape[1], k.shape[1]
    k_scale = np.broadcast_to(options.pop("k_scale", None) or 1.0, kv_heads)
    v_scale = np.broadcast_to(options.pop("v_scale", None) or 1.0, kv_heads)
    out, moves = np.zeros((2, *q.shape), np.float64)
    lse_moves = np.zeros(q.shape[:2], np.float64)
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
            queries = q[own, h].astype(np.float64)
            scale = options.get("scale")
            scale = np.float32(q.shape[2] ** -0.5 if scale is None else scale)
            s = scale * (queries @ keys[:, g].T).astype(np.float32)
            errors = 2.0**-24 * abs(scale) * (np.abs(queries) @ np.abs(keys[:, g]).T)
            if options.get("softcap"):
                cap = np.float32(options["softcap"])
                s = cap * np.tanh(s / cap)
                errors *= 1 - (s / cap) ** 2
            s, errors = np.where(seen, s, -np.inf), np.where(seen, errors, 0.0)
            sink = -np.inf if options.get("sinks") is None else options["sinks"][h]
            top = np.maximum(s.max(axis=1, initial=-np.inf), sink)[:, None]
            p = np.where(seen, np.exp(s - np.where(np.isfinite(top), top, 0)), 0)
            total = p.sum(axis=1) + np.exp(sink - top[:, 0])
            clean = np.where(seen.any(axis=0)[:, None], values[:, g], 0.0)
            out[own, h] = o = p.astype(dtype).astype(np.float64) @ clean / total[:, None]
            p = p.astype(np.float64) / total[:, None]
            # sum p e |v - o| <= sqrt(sum p e^2) sqrt(sum p (v - o)^2): no array of keys and dims
            far = p @ clean**2 - 2 * o * (p @ clean) + o**2 * p.sum(axis=1, keepdims=True)
            moves[own, h] = np.sqrt((p * errors**2).sum(axis=1)[:, None] * np.maximum(far, 0))
            lse_moves[own, h] = (p * errors).sum(axis=1)
    return out.astype(dtype).astype(np.float64), moves, lse_moves


def assert_within(got, exact, emulated, dtype, moves=0.0):
    """Judge the largest error: ``max |got - exact|``.

    It may be twice that of the emulated output, plus two units of the largest value or, where that
    is more, twice what the errors of the scores move: a large scale and many dims make it so.
    """
    got = got.astype(np.float64)
    assert not np.isnan(got).any()
    unit = float(ml_dtypes.finfo(dtype).eps)
    # products of three fp32 roundings and sums of many
    unit = max(unit, 2.0**-19)
    rest = max(unit * np.abs(exact).max(initial=0), np.max(moves, initial=0))
    budget = 2 * np.abs(emulated - exact).max(initial=0) + 2 * rest
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
