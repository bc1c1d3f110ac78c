"""Batches whose new tokens have places in the cache, and the cache that their writes leave."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from nki_paged_attn import reshape_and_cache

from ._cases import F32, make_case

QUERIES, CONTEXTS = [20, 1, 0, 170, 1, 3], [100, 300, 5, 3, 0, 1500]


def make(queries=QUERIES, contexts=CONTEXTS, **options):
    """Return a batch whose tables have blocks for the new tokens, and the slots of those."""
    ends = [q + c for q, c in zip(queries, contexts, strict=True)]
    case = replace(make_case(queries, ends, **options), context_lens=contexts)
    size = case.kv_cache.shape[3]
    slots = [
        case.block_table[i, p // size] * size + p % size
        for i, (q, c) in enumerate(zip(queries, contexts, strict=True))
        for p in range(c, c + q)
    ]
    return case, np.array(slots, np.int64)


def expected_cache(case, slots):
    """Return the cache as ``reshape_and_cache`` writes it, of what scales leave of new tokens."""
    cache = case.kv_cache.copy()
    tokens = len(slots)
    kv_heads = case.k.shape[1]
    new = []
    for x, name in ((case.k, "k_scale"), (case.v, "v_scale")):
        scales = np.broadcast_to(case.options.get(name, 1.0), kv_heads)[:, None]
        new.append((x[:tokens].astype(np.float32) / scales).astype(F32))
    reshape_and_cache(*new, cache, slots)
    return cache
