"""Results over some keys for some tokens, and how they are put together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ._linked.host.forms import interpreted

# pieces that one pass takes
MERGED = 4


class Piece(NamedTuple):
    """Outputs, or gradients of queries, of tokens that lie in a raster.

    ``out`` is ``[batch, size, heads, d]``, and ``lse`` fp32 ``[batch, heads, size]``, or None where
    pieces are added up. Of sequences of several lengths there is one of all that lies between the
    first and the last of them: ``[size, heads, d]`` and ``[heads, size]``.
    """

    out: Tensor
    lse: Tensor | None
    # the first token, how many follow, from one such group to the next, and how many groups
    raster: tuple[int, int, int, int]


class Pieces:
    """What has been computed so far: never more than ``MERGED`` pieces are in memory.

    Results are rounded once, at the end; what is merged before stays in fp32.
    """

    def __init__(self, tokens: int, dtype: torch.dtype) -> None:
        self._tokens, self._dtype = tokens, dtype
        self._held: list[Piece] = []

    def add(self, piece: Piece) -> None:
        """Take one more piece."""
        if len(self._held) == MERGED:
            whole = self._tokens
            out, lse = self._merged(torch.float32)
            self._held = [Piece(out, lse, (0, whole, whole, 1))]
        self._held.append(piece)

    def result(self) -> tuple[Tensor, Tensor | None]:
        """Return ``[tokens, heads, d]``, and the LSE as ``[heads, tokens]`` if there is one.

        The first piece has all tokens.
        """
        out, lse, _ = self._held[0]
        if len(self._held) > 1:
            return self._merged(self._dtype)
        if lse is not None and lse.ndim == 3:
            lse = lse.transpose(0, 1).flatten(1)
        return (out.flatten(0, 1) if out.ndim == 4 else out), lse

    def _merged(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        merge: Callable[..., tuple[Tensor, Tensor | None]]
        if self._held[0].out.is_cpu and not interpreted():
            merge = merge_eagerly
        else:
            from ._kernels.sharded_plans import merge
        return merge(self._held, self._tokens, dtype)


def merge_eagerly(
    pieces: Sequence[Piece], tokens: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Merge pieces by their LSE, or add them up if they have none; what the CPU runs.

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
    # where no piece saw a key
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
