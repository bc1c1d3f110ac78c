"""Compressed rows and statistics of block patterns, in PyTorch on the device."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from attn_common import cdiv
from torch import Tensor

from .lists import entries_of

# rows share a tile if they then visit at most so many times the blocks that they visit in two
# tiles: a tile of half the rows is slower by about this factor, as measured on an H200
WORTH = 1.05


def alike(dense: Tensor, together: int) -> Tensor:
    """Say whether ``together`` rows should share a tile rather than take two tiles."""
    if together < 2:
        return torch.ones((), dtype=torch.int64, device=dense.device)
    heads, rows, cols = dense.shape
    padded = torch.nn.functional.pad(dense, (0, 0, 0, -rows % together))

    def visited(stack: int) -> Tensor:
        stacked = padded.view(heads, padded.shape[1] // stack, stack, cols)
        return stacked.any(2).sum(dtype=torch.int64) * stack

    return (visited(together) <= WORTH * visited(together // 2)).long()


def dense_csr(
    dense: Tensor, together: int, max_nnz: int | None
) -> tuple[Tensor, Tensor, int | None, bool]:
    """Return ``(crow, col, max_row, rows_alike)`` of a mask ``[heads, rows, cols]``.

    If ``max_nnz`` is None, the kept blocks are counted, and the host waits once for the device.
    """
    heads, rows, cols = dense.shape
    counts = dense.sum(-1, dtype=torch.int32)
    max_row, is_alike = None, False
    if max_nnz is None:
        numbers = torch.stack(
            [
                counts.sum(-1, dtype=torch.int64).amax() if counts.numel() else counts.sum(),
                counts.amax().long() if counts.numel() else counts.sum(),
                alike(dense, together),
            ]
        ).tolist()
        max_nnz, max_row, is_alike = int(numbers[0]), int(numbers[1]), bool(numbers[2])
    crow = counts.new_zeros((heads, rows + 1))
    crow[:, 1:] = counts.cumsum(-1)
    col = counts.new_full((heads, max(max_nnz, 1)), -1)
    if cols and rows and max_nnz:
        for head in range(heads):
            flat = dense[head].flatten()
            where = torch.nonzero_static(flat, size=max_nnz, fill_value=-1)[:, 0]
            col[head] = torch.where(where < 0, -1, where % cols).int()
    return crow, col, max_row, is_alike


def mask_of(
    fn: Callable[[Tensor, Tensor, Tensor], Tensor],
    num_heads: int,
    num_rows: int,
    num_cols: int,
    device: torch.device | str | None,
) -> Tensor:
    """Return the mask that a function of head, row and column computes."""
    if not callable(fn):
        raise TypeError(f"fn must be a function of head, row and column, got {type(fn).__name__}")
    row = torch.arange(num_rows, device=device)[:, None]
    col = torch.arange(num_cols, device=device)
    masks = []
    for head in range(num_heads):
        kept = fn(torch.tensor(head, device=device), row, col)
        if not isinstance(kept, Tensor) or kept.dtype != torch.bool:
            what = kept.dtype if isinstance(kept, Tensor) else type(kept).__name__
            raise TypeError(f"fn must return a tensor of torch.bool, got {what}")
        full = [num_rows, num_cols]
        sizes = zip(reversed(kept.shape), reversed(full), strict=False)
        if kept.ndim > 2 or any(mine not in (1, size) for mine, size in sizes):
            raise ValueError(f"fn must return what broadcasts to {full}, got {list(kept.shape)}")
        masks.append(kept.expand(num_rows, num_cols))
    return torch.stack(masks)


def density_of(
    crow: Tensor, col: Tensor, cols: int, block_size: tuple[int, int], seqlen: int | None
) -> float:
    """Return the kept share of a sequence's causally visible blocks."""
    block_q, block_k = block_size
    longest = (crow.shape[1] - 1) * block_q
    length = longest if seqlen is None else min(seqlen, longest)
    rows = torch.arange(cdiv(length, block_q), device=crow.device)
    if not rows.numel() or not cols:
        return 0.0
    ends = ((rows + 1) * block_q).clamp(max=length)
    seen = ((ends + block_k - 1) // block_k).clamp(max=cols)
    head, row, column, valid = entries_of(crow, col, cols)
    inside = valid & (row < rows.numel())
    inside &= column < seen[row.clamp(0, rows.numel() - 1)]
    pair = (head * rows.numel() + row) * cols + column
    kept = torch.unique(pair[inside]).numel()
    return float(kept / (int(seen.sum()) * crow.shape[0]))


def local_strided_csr(
    first_head: int,
    last_head: int,
    step: int,
    max_seqlen: int,
    block_size: tuple[int, int],
    local_blocks: int,
    vert_stride: int,
    device: torch.device,
) -> tuple[Tensor, Tensor, int]:
    """Return ``(crow, col, longest row)`` of a band and of columns, for a range of heads.

    A row keeps the columns ``begin..end`` around its diagonal and, before ``begin``, every
    ``vert_stride``-th column from ``vert_stride - 1 - shift`` on. The shift of a head is its index
    times ``step``; with ``step`` 0 the result has one head, for all.
    """
    heads = last_head - first_head if step else 1
    block_q, block_k = block_size
    rows = cdiv(max_seqlen, block_q)
    cols = cdiv(max_seqlen, block_k)

    def bounds(row: Tensor) -> tuple[Tensor, Tensor]:
        first = row * block_q // block_k
        last = ((row + 1) * block_q - 1) // block_k
        return (first - local_blocks + 1).clamp(min=0), last.clamp(max=cols - 1)

    def lengths(row: Tensor, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        begin, end = bounds(row)
        columns = (begin + shift[:, None]) // vert_stride
        return begin.expand_as(columns), columns, columns + (end - begin + 1)

    # shifts are periodic, and heads with equal shifts have one pattern
    period = vert_stride // math.gcd(step, vert_stride)
    distinct = min(heads, period)

    def shifts(where: torch.device) -> Tensor:
        return (first_head + torch.arange(distinct, device=where)) * step % vert_stride

    # computed on the host, without the device
    counts = lengths(torch.arange(rows, device="cpu"), shifts(torch.device("cpu")))[2]
    nnz = max(int(counts.sum(-1).amax()) if counts.numel() else 0, 1)
    longest = int(counts.amax()) if counts.numel() else 0

    shift = shifts(device)
    begin, columns, length = lengths(torch.arange(rows, device=device), shift)
    crow = torch.zeros((distinct, rows + 1), dtype=torch.int32, device=device)
    crow[:, 1:] = length.cumsum(-1)
    slot = torch.arange(nnz, dtype=torch.int32, device=device).repeat(distinct, 1)
    row = torch.searchsorted(crow, slot, right=True) - 1
    padding = row >= rows
    row = row.clamp_(max=max(rows - 1, 0))
    if rows:
        rank = slot - crow.gather(1, row)
        before = columns.int().gather(1, row)
        in_band = begin.int().gather(1, row) + rank - before
        in_column = (rank + 1) * vert_stride - 1 - shift.int()[:, None]
        col = torch.where(rank < before, in_column, in_band).masked_fill_(padding, -1)
    else:
        col = torch.full_like(slot, -1)
    if distinct < heads:
        which = torch.arange(heads, device=device) % period
        crow, col = crow[which], col[which]
    return crow, col, longest
