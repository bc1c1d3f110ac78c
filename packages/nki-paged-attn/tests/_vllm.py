"""The batches on which the old kernel was tested: twelve settings, drawn and laid out anew.

Prompts have 16 to 511 new tokens and decodes one, all of them a context of 32 to 1023 tokens;
queries, keys and values are uniform in (-1, 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from nki_paged_attn import reorder_context_mask

# prompts, decodes, block size, large tile, heads, query heads of a KV head, head dim, bf16 products
SETTINGS = [
    (1, 199, 1, 512, 4, 2, 8, False),
    (1, 199, 1, 512, 4, 2, 8, True),
    (4, 12, 32, 2048, 32, 8, 64, False),
    (4, 12, 32, 2048, 16, 4, 32, True),
    (4, 12, 256, 8192, 8, 1, 128, False),
    (4, 12, 256, 8192, 64, 8, 64, True),
    (2, 24, 64, 4096, 12, 4, 96, False),
    (8, 8, 128, 2048, 24, 2, 48, True),
    (1, 128, 16, 1024, 4, 2, 16, False),
    (16, 4, 8, 1024, 4, 2, 128, True),
    (4, 12, 32, 2048, 16, 1, 32, True),
    (4, 12, 32, 2048, 16, 16, 32, True),
]


@dataclass(frozen=True)
class OldCall:
    """Arguments of the old function, and the same batch for the new one."""

    arguments: tuple
    options: dict
    packed: tuple
    tokens: int


def draw(setting, seed=0):
    """Draw a batch in both layouts."""
    prompts, decodes, block_size, large, heads, group, head_dim, mixed = setting
    rng = np.random.default_rng(seed)
    batch, kv_heads = prompts + decodes, heads // group
    contexts = rng.integers(32, 1024, batch)
    lens = np.concatenate([rng.integers(16, 512, prompts), np.ones(decodes, int)])
    tokens = int(lens.sum())
    counts = -(-contexts // block_size)
    blocks = int(counts.sum()) + 2
    order = rng.permutation(blocks)[: counts.sum()]
    starts = np.concatenate([[0], np.cumsum(counts)])
    table = np.full((batch, counts.max()), -1)
    for row, a, b in zip(table, starts, starts[1:], strict=False):
        row[: b - a] = order[a:b]

    def uniform(*shape):
        return rng.uniform(-1, 1, shape).astype(np.float32)

    q = uniform(tokens, heads, head_dim)
    k, v = uniform(tokens, kv_heads, head_dim), uniform(tokens, kv_heads, head_dim)
    cache = np.zeros((2, blocks, kv_heads, block_size, head_dim), np.float32)
    for row, context in zip(table, contexts, strict=True):
        position = np.arange(context)
        values = uniform(2, context, kv_heads, head_dim)
        cache[:, row[position // block_size], :, position % block_size] = values.swapaxes(0, 1)
    arguments = old_layout(q, k, v, cache, lens, contexts, order, counts, block_size, large)
    options = {"LARGE_TILE_SZ": large, "mixed_precision": mixed}
    return OldCall(arguments, options, (q, k, v, cache, table, lens, contexts), tokens)


def old_layout(q, k, v, cache, lens, contexts, order, counts, block_size, large):
    """Return the old arguments: padded to a power of two, with a dense mask in the old order."""
    tokens = len(q)
    padded = 1 << (tokens - 1).bit_length()
    per_tile = large // block_size
    active = -(-len(order) // per_tile) * per_tile
    table = np.zeros(active, np.int32)
    table[: len(order)] = order
    columns = active * block_size
    mask = np.zeros((padded, columns + padded), np.int32)
    row, column = 0, 0
    for count, context, n in zip(lens, contexts, counts, strict=True):
        own = slice(row, row + count)
        mask[own, column : column + context] = 1
        mask[own, columns + row : columns + row + count] = np.tri(count, dtype=np.int32)
        row, column = row + count, column + n * block_size
    mask = reorder_context_mask(mask, large, block_size)

    def pad(x):
        return np.concatenate([x, np.zeros((padded - tokens, *x.shape[1:]), x.dtype)])

    query, key = pad(q).transpose(1, 2, 0)[None], pad(k).transpose(1, 2, 0)[None]
    return query, key, pad(v).transpose(1, 0, 2)[None], cache, table, mask
