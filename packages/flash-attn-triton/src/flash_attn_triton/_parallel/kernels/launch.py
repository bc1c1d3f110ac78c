"""The launches besides attention for sequences that are cut across ranks: merge and wait."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attn_common import cdiv, detect
from torch import Tensor

from ..._linked.host.forms import Memory
from ..._linked.host.tiles import padded_head_dim
from ..._linked.launch.entries import flat
from ..._linked.launch.kernels import Kernel
from ..._linked.launch.runtime import Launch, compact
from ..pieces import MERGED, Piece
from .arguments import MergeNumbers, MergeTensors, MergeTile, Raster

merge_kernel = Kernel(__package__, ".merge", "merge_kernel")
wait_kernel = Kernel(__package__, ".wait", "wait_kernel")

# tokens of one head per program
ROWS = 32

_launches: Memory[Launch] = Memory()
# by the rasters of the pieces, which repeat with a table
_work: Memory[tuple[int, tuple[float, ...]]] = Memory()
# in a trace, an exchange took less time to begin after the kernel that it waited for
HEAD_START_NS = 16_000
# no tokens
_ABSENT = 0, 0, 1, 0


def merge(pieces: Sequence[Piece], tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Merge up to ``MERGED`` pieces by their LSE, or add them up if they have none, in one pass.

    If the first piece has all tokens in one group, and ``dtype``, it is overwritten, but only where
    another piece has tokens.

    Returns:
        ``out``, ``[tokens, heads, d]`` in ``dtype``, and ``lse``, fp32 ``[heads, tokens]``; or the
        sum, and None.
    """
    first = pieces[0]
    if len(pieces) == 1:  # the kernel takes at least two
        pieces = first, first._replace(raster=_ABSENT)
    heads, head_dim = first.out.shape[-2:]
    has_lse = first.lse is not None
    is_in_place = first.raster == (0, tokens, tokens, 1) and first.out.dtype == dtype
    if is_in_place:
        out = first.out.view(tokens, heads, head_dim)
        lse = None if first.lse is None else first.lse.view(heads, tokens)
    else:
        out = first.out.new_empty((tokens, heads, head_dim), dtype=dtype)
        lse = first.out.new_empty((heads, tokens), dtype=torch.float32) if has_lse else None
    dtypes = tuple(piece.out.dtype for piece in pieces)
    key = dtype, dtypes, has_lse, head_dim, first.out.device
    launch = _launches.get(key)
    if launch is None:
        tile = MergeTile(head_dim, padded_head_dim(head_dim), ROWS)
        launch = _launches.keep(key, Launch(merge_kernel, {"TILE": tile, "num_warps": 4}))
    counts = is_in_place, tokens, heads, *[piece.raster for piece in pieces]
    grid, numbers = _work.get(counts) or _work.keep(
        counts, _count(pieces, tokens, heads, is_in_place)
    )
    tensors: list[Tensor | None] = []
    for piece in pieces:
        # the kernel needs aligned tensors, and parts of a received message may not be aligned
        tensors += compact(piece.out), None if piece.lse is None else piece.lse.contiguous()
    tensors += (None,) * (2 * (MERGED - len(pieces)))
    launch(grid, MergeTensors(out, lse, *tensors), numbers)
    return out, lse


def _count(
    pieces: Sequence[Piece], tokens: int, heads: int, is_in_place: bool
) -> tuple[int, tuple[float, ...]]:
    """Return the grid and the numbers of a launch."""
    begin, end = 0, tokens
    if is_in_place:
        begin = min(piece.raster[0] for piece in pieces[1:])
        end = max(piece.end for piece in pieces[1:])
    rasters = [piece.raster for piece in pieces] + [_ABSENT] * (MERGED - len(pieces))
    numbers = MergeNumbers(begin, end, tokens, heads, *(Raster(*raster) for raster in rasters))
    return heads * cdiv(end - begin, ROWS), flat(numbers)


def give_way(x: Tensor) -> None:
    """Let an exchange that was just issued begin before the next kernel on the device of ``x``.

    Both wait for the same event. A forward on Hopper occupies all multiprocessors until it ends: if
    it began first, the exchange would begin after it, and would not overlap with it.
    """
    if detect(x.device).vendor != "nvidia":
        return
    launch = _launches.get(x.device)
    if launch is None:
        launch = _launches.keep(x.device, Launch(wait_kernel, {"num_warps": 1}))
    launch(1, (x,), (HEAD_START_NS,))
