"""How lists are made on a GPU: a handful of launches, whose sizes are bounds that shapes give.

The bits take one eighth of a byte per block of the grid for a moment, kept or not.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from attn_common import cdiv
from torch import Tensor

from .._lists import Lists, ListSpec
from .form import launch_of
from .list_structures import (
    BitNumbers,
    BitOptions,
    BitTensors,
    ListNumbers,
    ListOptions,
    ListTensors,
)
from .lists import _bit_kernel, _list_kernel

# slots, or items, of a program
BLOCK = 512


@functools.cache
def _launch(kernel: Any, options: Any) -> Any:
    return launch_of(kernel, options, num_warps=4, num_stages=1)


def mark_bits(
    crow: Tensor,
    col: Tensor,
    cols: int,
    lists: tuple[int, int],
    items: int,
    pieces: tuple[int, int, int, int, int],
    group: int,
    by_key: bool,
    causal: bool,
) -> Tensor:
    """Return the bits of the kept blocks, int32 ``[lines of all lists, words]``.

    Args:
        crow: row pointers ``[heads, rows + 1]``.
        col: columns ``[heads, nnz]``.
        cols: number of key blocks.
        lists: how many there are, and lines of a list.
        items: bits of a line.
        pieces: of a block, by queries and by keys; their tokens; and how many are an item.
        group: heads that share the lines of a list.
        by_key: whether a line is a column.
        causal: leave out what lies right of the diagonal.
    """
    (heads, nnz), rows = col.shape, crow.shape[1] - 1
    count, lines = lists
    words = cdiv(items, 32)
    bits = torch.zeros((count * lines, words), dtype=torch.int32, device=crow.device)
    chunks = cdiv(nnz, BLOCK)
    steps = (rows + 1).bit_length()
    numbers = BitNumbers(chunks, nnz, rows, cols, steps, group, lines, words, *pieces)
    _launch(_bit_kernel, BitOptions(by_key, causal, BLOCK))(
        heads * chunks, BitTensors(crow, col, bits), numbers
    )
    return bits


def make_lists(
    crow: Tensor, col: Tensor, cols: int, block_size: tuple[int, int], spec: ListSpec
) -> Lists:
    """Return the lists of a layout, as ``query_lists`` and ``key_lists`` do, by kernels."""
    block_q, block_k = block_size
    (heads, nnz), rows = col.shape, crow.shape[1] - 1
    group, pack = spec.group, 1 if spec.by_key else spec.pack
    side, other, lines, items = (
        (block_k, block_q, cols, rows * group) if spec.by_key else (block_q, block_k, rows, cols)
    )
    stack = max(spec.span // side, 1)
    owners = max(cdiv(lines, stack), 1)
    groups, packs = cdiv(heads, group), 1 if spec.by_key else cdiv(group, pack)
    bits = mark_bits(
        crow,
        col,
        cols,
        (groups if spec.by_key else heads, lines),
        items,
        (1, 1, block_q, block_k, 1),
        group if spec.by_key else 1,
        spec.by_key,
        spec.causal,
    )
    total, chunks = groups * packs * owners, max(cdiv(items, BLOCK), 1)
    bound = heads * nnz + 1
    device = crow.device
    counts = torch.empty(2 * total * chunks, dtype=torch.int32, device=device)
    begin, whole = (torch.empty(n, dtype=torch.int64, device=device) for n in (total + 1, total))
    things, members = (torch.empty(bound, dtype=torch.int32, device=device) for _ in range(2))
    numbers = ListNumbers(
        owners,
        chunks,
        items,
        lines,
        bits.shape[1],
        heads,
        group,
        packs,
        stack * side,
        other,
        bound,
    )
    options = ListOptions(spec.by_key, spec.causal, pack > 1, pack if pack > 1 else stack, BLOCK)
    launch, written = _launch(_list_kernel, options), (begin, whole, things, members)
    launch(total * chunks, ListTensors(bits, counts, None, *written), numbers)
    ends = counts.cumsum(0)
    launch(total * chunks, ListTensors(bits, counts, ends, *written), numbers)
    return Lists(*written)
