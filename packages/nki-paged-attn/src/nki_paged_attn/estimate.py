"""The cost of a batch, from a run of the kernel that logs instructions without computing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from attn_common import cdiv

from ._paged.backends import simulated_kernel
from ._paged.call import Batch, Options
from ._paged.checks import (
    FLOATS,
    FP8,
    check_block_size,
    check_count,
    check_dtype,
    check_head_dim,
    check_heads,
    check_lengths,
    check_number,
    check_programs,
    check_transposes,
    check_window,
)
from ._paged.forms import Bucket, Buckets, Form, check_buckets
from ._paged.launch import find_form, form_tables, static_arguments
from ._paged.sequences import Packed
from .plan import Plan
from .sim import ArraySpec, Cost, Trace, cost, simulate
from .sim.arrays import Array
from .sim.dtypes import NUMPY

# iterations of a loop that an estimate traces
SAMPLES = 2


def sequential_table(context_lens: Sequence[int], block_size: int) -> Array:
    """Return a block table that hands out blocks one after the other."""
    check_block_size(block_size)
    check_lengths(context_lens, context_lens, None)
    blocks = [cdiv(int(c), block_size) for c in context_lens]
    table = np.zeros((len(blocks), max(blocks, default=0)), np.int64)
    first = 0
    for row, count in zip(table, blocks, strict=True):
        row[:count] = np.arange(first, first + count)
        first += count
    return table


def trace_plan(
    plan: Plan,
    *,
    head_dim: int,
    dtype: str = "bfloat16",
    cache_dtype: str | None = None,
    blocks: int,
    target: str = "trn2",
    programs: int = 1,
    softcap: float = 0.0,
    has_lse: bool = False,
) -> Trace:
    """Log a run of the kernel on a plan.

    Args:
        plan: of ``build_plan``.
        dtype: of queries and of products.
        cache_dtype: of the cache; q's by default.
        blocks: blocks in the cache.
        programs: cores of the logical core, 1 or 2.
    """
    check_head_dim(head_dim)
    check_count("blocks", blocks)
    check_programs(programs)
    if softcap:
        check_number("softcap", softcap, positive=True)
    check_dtype("dtype", dtype, FLOATS)
    check_dtype("cache_dtype", cache_dtype or dtype, (*FLOATS, *FP8))
    options = Options.plain(head_dim**-0.5, plan.kv_heads, dtype, softcap=softcap, has_lse=has_lse)
    form = replace(plan.form, head_dim=head_dim, programs=programs)
    return _log(plan.batch, form, options, blocks, cache_dtype or dtype, target)


def estimate_cost(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: str = "bfloat16",
    cache_dtype: str | None = None,
    window: int | None = None,
    target: str = "trn2",
    programs: int = 1,
    buckets: Buckets | None = None,
    transposes: str = "tensor",
) -> Cost:
    """Return engine cycles, DMA time and the bound of a batch on its form, without data.

    Two iterations of each device loop are traced, also of inner loops; each stands for half of
    them. Costs that grow linearly with the iteration are counted exactly.
    """
    trace = _trace(
        query_lens,
        context_lens,
        Shape(heads, kv_heads, head_dim, block_size, dtype, cache_dtype or dtype),
        buckets=buckets,
        window=window,
        target=target,
        programs=programs,
        samples=SAMPLES,
        transposes=transposes,
    )
    return cost(trace)


def count_instructions(
    bucket: Bucket,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: str = "bfloat16",
    cache_dtype: str | None = None,
    target: str = "trn2",
    programs: int = 1,
) -> int:
    """Return the instructions that are compiled for a form: each loop's body once."""
    if not isinstance(bucket, tuple) or len(bucket) != len(Bucket._fields):
        raise TypeError(f"bucket must be Bucket(batch, tokens, context), got {bucket!r}")
    trace = _trace(
        [],
        [],
        Shape(heads, kv_heads, head_dim, block_size, dtype, cache_dtype or dtype),
        buckets=Buckets(*bucket),
        window=None,
        target=target,
        programs=programs,
        samples=0,
        transposes="tensor",
    )
    # of the first program, if there are two
    return sum(not i.program for i in trace.instructions)


def trace_form(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: str = "bfloat16",
    cache_dtype: str | None = None,
    buckets: Buckets | None = None,
    window: int | None = None,
    target: str = "trn2",
    programs: int = 1,
    samples: int | None = None,
    transposes: str = "tensor",
) -> Trace:
    """Log a batch on the form of its bucket, without data.

    Args:
        buckets, transposes: as in ``paged_attention``.
        samples: iterations of a loop that are traced, evenly spaced; each stands for its share.
            Default: all.
    """
    return _trace(
        query_lens,
        context_lens,
        Shape(heads, kv_heads, head_dim, block_size, dtype, cache_dtype or dtype),
        buckets=buckets,
        window=window,
        target=target,
        programs=programs,
        samples=samples,
        transposes=transposes,
    )


class Shape(NamedTuple):
    """Heads, dimensions and dtypes of a call."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    cache_dtype: str


def _trace(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    shape: Shape,
    *,
    buckets: Buckets | None,
    window: int | None,
    target: str,
    programs: int,
    samples: int | None,
    transposes: str,
) -> Trace:
    check_head_dim(shape.head_dim)
    check_programs(programs)
    if samples is not None:
        check_count("samples", samples, least=0)
    check_heads(shape.heads, shape.kv_heads)
    check_dtype("dtype", shape.dtype, FLOATS)
    check_dtype("cache_dtype", shape.cache_dtype, (*FLOATS, *FP8))
    queries, contexts = check_lengths(query_lens, context_lens, None)
    table = sequential_table(context_lens, shape.block_size)
    options = Options.plain(
        shape.head_dim**-0.5,
        shape.kv_heads,
        shape.dtype,
        turns_by_dma=check_transposes(transposes, shape.dtype),
    )
    size = shape.block_size
    batch = Batch(queries, contexts, table, int(queries.sum()), check_window(window)).pack(size)
    form = find_form(batch, check_buckets(buckets), *shape[:2], size, shape.head_dim, programs)
    blocks = int(table.max(initial=0)) + 1
    return _log(batch, form, options, blocks, shape.cache_dtype, target, samples)


def _log(
    batch: Packed,
    form: Form,
    options: Options,
    blocks: int,
    cache_dtype: str,
    target: str,
    samples: int | None = None,
) -> Trace:
    """Log a form on a batch, with real tables; of the tensors only shapes matter."""
    tables, _ = form_tables(batch, form, options)
    kind, head_dim = NUMPY[options.dtype], form.head_dim
    rows = form.bucket.tokens * form.group * form.kv_heads
    new = ArraySpec((form.kv_heads, form.places, head_dim), kind)
    pool = ArraySpec((blocks, form.kv_heads, form.block_size, head_dim), NUMPY[cache_dtype])
    run = simulate(simulated_kernel()[form.programs], target, strict=False, execute=False)
    run.samples = samples
    run(
        q=ArraySpec((rows, head_dim), kind),
        k_new=new,
        v_new=new,
        k_cache=pool,
        v_cache=pool,
        tables=tables.table,
        numbers=ArraySpec(tables.numbers.shape, tables.numbers.dtype),
        **static_arguments(form, options),
    )
    return run.trace
