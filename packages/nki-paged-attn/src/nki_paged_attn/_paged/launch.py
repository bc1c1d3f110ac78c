"""From checked arguments to the arguments of a form, and back."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from ..sim.arrays import Array
from . import backends
from .call import SMALLEST_FACTOR, Options
from .checks import PARTITIONS, largest_of
from .forms import MAX_PART_ROWS, Buckets, Form
from .sequences import Packed
from .tables import Scales, Tables, build_tables

# of a factor to the softcap, within fp32
LARGEST_RATIO = 2.0**127
# the negated maximum of a row without a key: above masked scores, below all others
NO_MAXIMUM = 8e37


def find_form(
    batch: Packed,
    buckets: Buckets,
    heads: int,
    kv_heads: int,
    block_size: int,
    head_dim: int,
    programs: int | None = None,
) -> Form:
    """Return the form that runs a batch; programs are the environment's by default."""
    return Form(
        buckets.find(*batch.needed),
        heads // kv_heads,
        kv_heads,
        block_size,
        programs or backends.find_programs(),
        batch.has_new,
        head_dim,
        batch.writes,
    )


def form_tables(batch: Packed, form: Form, options: Options) -> tuple[Tables, Array]:
    """Return the table of a batch, and the token at each place of new keys, -1 for none."""
    new = np.full(form.places, -1, np.int64)
    new[: len(batch.new)] = batch.new
    numbers, scales = _numbers(form, options)
    return build_tables(form, batch, scales, numbers), new


def _numbers(form: Form, options: Options) -> tuple[Array, Scales]:
    """Return sinks and factors as the kernel reads them, and where they begin."""
    kv_heads, group = form.kv_heads, form.group
    found = []
    if options.sinks is not None:
        found.append(sink_rows(options.sinks, group, no_maximum(options)).reshape(-1))
    nothing = sum(x.size for x in found)
    if options.sinks is not None:
        found.append(np.full(PARTITIONS, -no_maximum(options)))
    factors = -1
    if options.is_scaled:
        factors = sum(x.size for x in found)
        for source in (options.k_scales, options.v_scales), ((1.0,) * kv_heads,) * 2:
            for k_scale, v_scale in zip(*source, strict=True):
                row = (*scaling(options, k_scale), v_scale)
                found.append(np.tile(np.array(row, np.float32), PARTITIONS))
        # for parts: the cache's factors, and ratios of new tokens to them, by number of new tokens
        for count in range(MAX_PART_ROWS // group + 1):
            for k_scale, v_scale in zip(options.k_scales, options.v_scales, strict=True):
                row = (*scaling(options, k_scale), v_scale)
                ratios = np.ones((PARTITIONS, 2), np.float32)
                ratios[:count] = 1 / k_scale, 1 / v_scale
                found += [np.tile(np.array(row, np.float32), PARTITIONS), ratios.reshape(-1)]
    inverse = sum(x.size for x in found)
    if options.is_scaled and form.writes:
        for k_scale, v_scale in zip(options.k_scales, options.v_scales, strict=True):
            found.append(np.tile(np.array([1 / k_scale, 1 / v_scale], np.float32), PARTITIONS))
    # a load of factors reads this much even if there are none
    found.append(np.zeros(4 * PARTITIONS, np.float32))
    return np.concatenate(found).astype(np.float32), Scales(0, nothing, factors, inverse)


def sink_rows(sinks: Array, group: int, least: float) -> Array:
    """Return the sinks of a tile's rows for each KV head, ``[kv_heads, 128]``, token by token."""
    # a sink of -inf is none: it becomes the maximum of a row without a key
    sinks = np.maximum(sinks, np.float32(-least)).reshape(-1, group)
    rows = np.tile(sinks, (1, PARTITIONS // group + 1))
    return np.ascontiguousarray(rows[:, :PARTITIONS])


def scaling(options: Options, k_scale: float = 1.0) -> tuple[float, float, float]:
    """Return the factor of scores before the cap, of the exponential, and the latter negated."""
    factor = options.scale * k_scale
    if options.softcap:
        # an infinite ratio times a score of 0 is NaN; tanh is 1 for much smaller ratios
        factor = min(factor, options.softcap * LARGEST_RATIO)
        return factor / options.softcap, options.softcap, -options.softcap
    return factor, factor, -factor


def no_maximum(options: Options) -> float:
    """Return the negated maximum of a row without a key, above that of any other row.

    It is compiled in, so that it does not depend on the scales of a cache.
    """
    smallest = options.softcap or options.scale
    if options.is_scaled and not options.softcap:
        smallest = SMALLEST_FACTOR
    return NO_MAXIMUM * min(1.0, smallest)


def fold_scale(q: Array, options: Options) -> tuple[Array, Options]:
    """Return queries and options such that the factor of the scores is well above 0."""
    scale, softcap = options.scale, options.softcap
    if 0 < softcap < SMALLEST_FACTOR:
        # capped scores are so small that the exponential rounds as for 0
        return np.zeros_like(q), replace(options, scale=1.0, softcap=0.0)
    if scale < 0:
        q, scale = -q, -scale
    least = SMALLEST_FACTOR / options.least_scale
    if scale < least:
        # the largest power of two that serves: it rounds only fp16's smallest numbers
        power = 2.0 ** (math.frexp(scale / least)[1] - 1) if scale else 0.0
        q = (q.astype(np.float32) * np.float32(power)).astype(q.dtype)
        scale = scale / power if scale else least
    return q, replace(options, scale=scale, softcap=softcap)


def find_folding(options: Options) -> tuple[float | None, Options]:
    """Return the multiplier of queries, None for zeros, and the remaining options."""
    one, folded = fold_scale(np.ones(1, np.float32), options)
    return (None if not one[0] and options.scale else float(one[0])), folded


def static_arguments(form: Form, options: Options) -> dict[str, Any]:
    """Return the constants that are compiled into a form, by name."""
    return {
        "loops": tuple(loop.spec for loop in form.loops),
        "slots": form.slots,
        "group": form.group,
        "wide": form.wide,
        "scaling": scaling(options),
        "is_scaled": options.is_scaled,
        "softcap": options.softcap,
        "no_maximum": no_maximum(options),
        "has_sinks": options.sinks is not None,
        "has_lse": options.has_lse,
        "has_new": form.has_new,
        "is_packed": options.is_packed,
        "turns_by_dma": options.turns_by_dma,
        "largest": options.largest,
        "dtype": options.dtype,
    }


def form_arguments(
    q: Array, k: Array, v: Array, kv_cache: Array, batch: Packed, form: Form, options: Options
) -> dict[str, Any]:
    """Return the arguments of a form's kernel, by name; q, k, v are packed."""
    tokens, heads, head_dim = q.shape
    q, options = fold_scale(q, options)
    tables, new = form_tables(batch, form, options)
    queries = np.zeros((form.bucket.tokens * heads, head_dim), q.dtype)
    queries[: tokens * heads] = q.reshape(tokens * heads, head_dim)
    if not kv_cache.shape[1]:
        kv_cache = np.zeros((2, 1, *kv_cache.shape[2:]), kv_cache.dtype)
    return {
        "q": queries,
        "k_new": by_head(k, new),
        "v_new": by_head(v, new),
        "k_cache": kv_cache[0],
        "v_cache": kv_cache[1],
        "tables": tables.table,
        "numbers": tables.numbers,
        **static_arguments(form, options),
    }


def by_head(x: Array, places: Array) -> Array:
    """Return new keys or values as ``[kv_heads, places, head_dim]``; empty places are 0."""
    result = np.zeros((x.shape[1], len(places), x.shape[2]), x.dtype)
    used = np.flatnonzero(places >= 0)
    result[:, used] = x[places[used]].transpose(1, 0, 2)
    return result


def launch_form(
    q: Array,
    k: Array,
    v: Array,
    kv_cache: Array,
    batch: Packed,
    options: Options,
    buckets: Buckets,
    backend: str,
) -> tuple[Array, Array | None]:
    """Run a batch's form; return out ``[tokens, heads, head_dim]``, lse ``[heads, tokens]``."""
    tokens, heads, head_dim = q.shape
    form = find_form(batch, buckets, heads, k.shape[1], kv_cache.shape[3], head_dim)
    if not q.size:
        lse = np.zeros((heads, tokens), np.float32)
        return np.zeros_like(q), lse if options.has_lse else None
    if form.writes:
        options = replace(options, largest=largest_of(kv_cache.dtype.name, options.target))
    arguments = form_arguments(q, k, v, kv_cache, batch, form, options)
    out, lse, *written = backends.run(backend, arguments)
    if backend != "sim":
        # the simulator of this package writes the cache in place
        for half, own in zip(kv_cache, written, strict=False):
            half[...] = np.asarray(own)
    out = np.ascontiguousarray(np.asarray(out)[: tokens * heads]).reshape(q.shape)
    if not options.has_lse:
        return out, None
    return out, finish_lse(lse, tokens, heads, arguments["no_maximum"])


def finish_lse(lse: Any, tokens: int, heads: int, least: float) -> Array:
    """Return the LSE of rows as ``[heads, tokens]``."""
    found = np.asarray(lse)[: tokens * heads]
    result = np.ascontiguousarray(found.reshape(tokens, heads).T)
    # a row that sees neither a key nor a sink
    result[result <= -least / 2] = -np.inf
    return result
