"""Helpers of reference tests that other tests use too."""

from __future__ import annotations

import math

import torch

from .._numerics import PACKED


def rows_of(case, problem, b):
    """Queries, keys and values of one sequence, ``[heads, tokens, head_dim]``, and its rows."""
    starts = case.options["cu_seqlens_q"].tolist()
    rows = slice(starts[b], starts[b + 1])
    table, page = case.options["block_table"][b].tolist(), problem.page
    parts = []
    for name in "kv":
        cache = case.inputs[f"{name}_cache"]
        where = [(table[i // page], i % page) for i in range(problem.cached(b))]
        if problem.layout == PACKED:
            found = [
                cache[p, :, ..., s, :].flatten(1) if name == "k" else cache[p, :, :, s]
                for p, s in where
            ]
        else:
            found = [cache[p, s] for p, s in where]
        if problem.dense:
            found += list(case.inputs[name][rows])
        parts.append(torch.stack(found, 1))
    return case.inputs["q"][rows].transpose(0, 1), *parts, rows


def bias_of(case, queries, keys, heads, b):
    """Masks and slopes as one additive bias."""
    position = torch.arange(queries)[:, None] + keys - queries
    key = torch.arange(keys)
    left, right = case.options.get("window_size", (-1, -1))
    if case.options.get("causal", True):
        right = 0
    hidden = torch.zeros(queries, keys, dtype=torch.bool)
    if left >= 0:
        hidden |= key < position - left
    if right >= 0:
        hidden |= key > position + right
    bias = torch.zeros(heads, queries, keys, dtype=torch.float64)
    slopes = case.inputs.get("alibi_slopes")
    if slopes is not None:
        slopes = slopes[b] if slopes.ndim == 2 else slopes
        bias -= slopes.double()[:, None, None] * (position - key).abs()
    return bias.masked_fill(hidden, -math.inf)
