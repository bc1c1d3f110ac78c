"""What a batch costs, from a run of the kernel that logs and does not compute."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attn_common import cdiv

from ._arrays import FLOATS, FP8, Array
from ._backend import simulated_kernel
from ._checks import check_block_size, check_count, check_head_dim, check_lengths
from ._launch import Options, kernel_arguments, new_places
from .plan import Plan, build_plan
from .sim import ArraySpec, Cost, Trace, cost, simulate
from .sim.dtypes import NUMPY


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
        blocks: in the cache.
        programs: cores of the logical core, 1 or 2.
    """
    check_head_dim(head_dim)
    check_count("blocks", blocks)
    for name, given, allowed in (
        ("dtype", dtype, FLOATS),
        ("cache_dtype", cache_dtype or dtype, (*FLOATS, *FP8)),
    ):
        if given not in allowed:
            raise TypeError(f"{name} must be one of {', '.join(allowed)}, got {given!r}")
    heads = plan.group * plan.kv_heads
    kind = NUMPY[dtype]
    options = Options(
        scale=head_dim**-0.5,
        softcap=softcap,
        sinks=None,
        k_scales=(1.0,) * plan.kv_heads,
        v_scales=(1.0,) * plan.kv_heads,
        has_lse=has_lse,
        dtype=dtype,
    )
    # the tables are real; of the tensors only shapes matter
    few = np.zeros((plan.tokens, plan.kv_heads, head_dim), kind)
    cache = np.zeros((2, 1, plan.kv_heads, plan.block_size, head_dim), kind)
    queries = np.zeros((1, heads, head_dim), kind)
    arguments = kernel_arguments(queries, few, few, cache, plan, options)
    new = ArraySpec((plan.kv_heads, new_places(plan), head_dim), kind)
    pool = (2, blocks, plan.kv_heads, plan.block_size, head_dim)
    arguments["q"] = ArraySpec((plan.tokens * heads, head_dim), kind)
    arguments["k_new"] = arguments["v_new"] = new
    arguments["kv_cache"] = ArraySpec(pool, NUMPY[cache_dtype or dtype])
    for name in ("bounds", "bounds_tokens", "sinks", "sink_rows"):
        arguments[name] = ArraySpec(arguments[name].shape, arguments[name].dtype)
    run = simulate(simulated_kernel()[programs], target, execute=False)
    run(**arguments)
    return run.trace


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
) -> Cost:
    """Return engine cycles, DMA time and the bound of a batch, without data."""
    table = sequential_table(context_lens, block_size)
    plan = build_plan(
        query_lens, context_lens, table, block_size, heads=heads, kv_heads=kv_heads, window=window
    )
    trace = trace_plan(
        plan,
        head_dim=head_dim,
        dtype=dtype,
        cache_dtype=cache_dtype,
        target=target,
        programs=programs,
        blocks=int(table.max(initial=0)) + 1,
    )
    return cost(trace)
