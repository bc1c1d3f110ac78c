"""Helpers of lists tests that other tests use too."""

from __future__ import annotations

import torch
from blocksparse_attn import BlockSparseLayout


def random_layout(seed, block):
    """Unsorted columns, some of them twice, empty rows."""
    generator = torch.Generator().manual_seed(seed)
    heads = (1, 2, 4, 6)[seed % 4]
    rows, cols = torch.randint(1, 9, (2,), generator=generator).tolist()
    kept = torch.rand(heads, rows, cols, generator=generator) < (0.0, 0.4, 0.7, 1.0)[seed % 4]
    kept |= torch.rand(heads, rows, cols, generator=generator) < 0.3
    layout = BlockSparseLayout.from_dense(kept, block)
    crow, col = layout.crow, layout.col
    if col.shape[1] > 2:
        col[:, 1] = torch.where(crow[:, 1] > 1, col[:, 0], col[:, 1])
    return BlockSparseLayout(crow, col, block, num_cols=cols)
