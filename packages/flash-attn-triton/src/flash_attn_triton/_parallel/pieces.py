"""Partial results, over some keys for some tokens, and their merge."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# pieces that one merge takes
MERGED = 4
# (first token, tokens per group, distance of groups, number of groups)
Raster = tuple[int, int, int, int]


class Piece(NamedTuple):
    """Outputs, or gradients, of the tokens of a raster.

    ``out`` is ``[batch, size, heads, d]``, and ``lse`` fp32 ``[batch, heads, size]``, or None if
    pieces are to be added up. A piece of sequences of several lengths covers all tokens from the
    first to the last: ``[size, heads, d]`` and ``[heads, size]``.
    """

    out: Tensor
    lse: Tensor | None
    raster: Raster

    @property
    def end(self) -> int:
        """The token after the last one."""
        begin, size, step, batch = self.raster
        return begin + (batch - 1) * step + size

    def has_all(self, tokens: int) -> bool:
        """Tell whether the piece has all of ``tokens`` tokens."""
        _, size, step, batch = self.raster
        return size * batch == tokens and (batch == 1 or size == step)


def summand(x: Tensor, raster: Raster) -> Piece:
    """Return gradients as a piece to be added up; adjacent groups become one."""
    begin, size, step, batch = raster
    if size == step:
        raster = begin, size * batch, size * batch, 1
    return Piece(x, None, raster)


def merge_eagerly(
    pieces: Sequence[Piece], tokens: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Merge pieces by their LSE, or add them up if they have none; for CPU tensors.

    Returns:
        ``out``, ``[tokens, heads, d]`` in ``dtype``, and ``lse``, fp32 ``[heads, tokens]``; or the
        sum, and None.
    """
    heads, width = pieces[0].out.shape[-2:]
    acc = pieces[0].out.new_zeros((tokens, heads, width), dtype=torch.float32)
    lses = []
    for piece in pieces:
        lse = acc.new_full((tokens, heads), -math.inf)
        if piece.lse is not None:
            lse[_rows(piece)] = piece.lse.transpose(-1, -2).reshape(-1, heads)
        lses.append(lse)
    largest = torch.stack(lses).amax(0)
    # 0 where no piece saw a key
    shift = largest.masked_fill(largest.isinf(), 0.0)
    total = torch.zeros_like(largest)
    for piece, lse in zip(pieces, lses, strict=True):
        rows = _rows(piece)
        out = piece.out.reshape(-1, heads, width).float()
        if piece.lse is not None:
            weight = torch.exp(lse - shift)
            total += weight
            out = torch.where(weight[rows, :, None] > 0.0, out * weight[rows, :, None], 0.0)
        acc[rows] += out
    if pieces[0].lse is None:
        return acc.to(dtype), None
    acc *= total.reciprocal().masked_fill(total == 0.0, 0.0)[..., None]
    return acc.to(dtype), (shift + torch.log(total)).T.contiguous()


def _rows(piece: Piece) -> Tensor:
    """Return the tokens of a piece, in its order."""
    begin, size, step, batch = piece.raster
    starts = begin + step * torch.arange(batch)
    return (starts[:, None] + torch.arange(size)).flatten()
