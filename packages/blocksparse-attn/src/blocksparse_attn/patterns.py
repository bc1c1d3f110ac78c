"""Common block patterns as layouts; sizes and offsets are counted in blocks.

Each pattern is computed on the device. The local and strided pattern of Phi-3-small is
:meth:`BlockSparseLayout.local_strided`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from attn_common import cdiv
from torch import Tensor

from ._layout.checks import check_block_size
from ._linked.host.arguments import as_length, check_count
from .layout import BlockSparseLayout

Device = torch.device | str | None


def sliding_window(
    max_seqlen: int,
    window_blocks: int,
    sink_blocks: int = 0,
    block_size: int = 64,
    *,
    device: Device = None,
) -> BlockSparseLayout:
    """Keep the last ``window_blocks`` blocks, including the query's own, and the first blocks.

    The first blocks are the attention sinks of streaming language models (Xiao et al. 2023).

    Args:
        max_seqlen: positions that the layout covers.
        window_blocks: width of the window, at least 1.
        sink_blocks: number of first blocks that every query keeps. Default: 0.
        block_size: tokens per block. Default: 64.
        device: device of the layout. Default: torch's default device.
    """
    check_count("window_blocks", window_blocks, 1)
    check_count("sink_blocks", sink_blocks, 0)

    def kept(_head: Tensor, row: Tensor, col: Tensor) -> Tensor:
        return (col <= row) & ((row - col < window_blocks) | (col < sink_blocks))

    return _square(kept, 1, max_seqlen, block_size, device)


def dilated(
    max_seqlen: int,
    window_blocks: int,
    dilation: int,
    block_size: int = 64,
    *,
    device: Device = None,
) -> BlockSparseLayout:
    """Keep every ``dilation``-th block back from the query's own, ``window_blocks`` in all.

    Args:
        max_seqlen: positions that the layout covers.
        window_blocks: number of blocks, at least 1.
        dilation: distance of the blocks, at least 1.
        block_size: tokens per block. Default: 64.
        device: device of the layout. Default: torch's default device.
    """
    check_count("window_blocks", window_blocks, 1)
    check_count("dilation", dilation, 1)

    def kept(_head: Tensor, row: Tensor, col: Tensor) -> Tensor:
        back = row - col
        return (back >= 0) & (back % dilation == 0) & (back < window_blocks * dilation)

    return _square(kept, 1, max_seqlen, block_size, device)


def bigbird(
    num_heads: int,
    max_seqlen: int,
    window_blocks: int,
    global_blocks: int,
    random_blocks: int,
    block_size: int = 64,
    *,
    seed: int = 0,
    device: Device = None,
) -> BlockSparseLayout:
    """Keep a window on both sides, global rows and columns, and random blocks (BigBird).

    After Zaheer et al. 2020. In a causal call only the blocks up to the diagonal count.

    Args:
        num_heads: query heads; each has its own random blocks.
        max_seqlen: positions that the layout covers.
        window_blocks: width of the window on each side, including the query's own block, at
            least 1.
        global_blocks: number of first rows and columns that are kept whole.
        random_blocks: random columns per row; they may repeat, or fall on kept blocks.
        block_size: tokens per block. Default: 64.
        seed: seed of the random blocks; they are drawn on the CPU, so they are the same on every
            device. Default: 0.
        device: device of the layout. Default: torch's default device.
    """
    for name, value, least in (
        ("num_heads", num_heads, 1),
        ("window_blocks", window_blocks, 1),
        ("global_blocks", global_blocks, 0),
        ("random_blocks", random_blocks, 0),
    ):
        check_count(name, value, least)
    max_seqlen = as_length("max_seqlen", max_seqlen)
    side, _ = check_block_size(block_size)
    blocks = cdiv(max_seqlen, side)
    generator = torch.Generator().manual_seed(seed)
    size = (num_heads, blocks, random_blocks)
    chosen = torch.randint(max(blocks, 1), size, generator=generator, device="cpu")
    chosen = chosen.to(_device(device))

    def kept(head: Tensor, row: Tensor, col: Tensor) -> Tensor:
        near = (row - col).abs() < window_blocks
        drawn = (chosen[head, :, :, None] == col).any(1)
        return near | (row < global_blocks) | (col < global_blocks) | drawn

    return _square(kept, num_heads, max_seqlen, block_size, device)


def block_causal(
    max_seqlen: int, chunk_blocks: int = 1, block_size: int = 64, *, device: Device = None
) -> BlockSparseLayout:
    """Let each chunk of blocks see itself whole, and all chunks before it.

    Use it with ``causal=False``, for example for models that generate a chunk of tokens at a time.

    Args:
        max_seqlen: positions that the layout covers.
        chunk_blocks: blocks per chunk, at least 1. Default: 1.
        block_size: tokens per block. Default: 64.
        device: device of the layout. Default: torch's default device.
    """
    check_count("chunk_blocks", chunk_blocks, 1)

    def kept(_head: Tensor, row: Tensor, col: Tensor) -> Tensor:
        return col // chunk_blocks <= row // chunk_blocks

    return _square(kept, 1, max_seqlen, block_size, device)


def vertical_slash(
    max_seqlen: int,
    vertical: Sequence[Sequence[int]],
    slash: Sequence[Sequence[int]],
    block_size: int = 64,
    *,
    device: Device = None,
) -> BlockSparseLayout:
    """Keep given columns and diagonals per head, as in MInference (Jiang et al. 2024).

    Args:
        max_seqlen: positions that the layout covers.
        vertical: block columns of each head.
        slash: distances of each head's diagonals from the main diagonal, which is 0.
        block_size: tokens per block. Default: 64.
        device: device of the layout. Default: torch's default device.
    """
    if len(vertical) != len(slash) or not vertical:
        raise ValueError(
            f"vertical and slash must have one entry per head, got {len(vertical)} and {len(slash)}"
        )
    where = _device(device)
    columns = [torch.tensor(list(c), dtype=torch.int64, device=where) for c in vertical]
    diagonals = [torch.tensor(list(d), dtype=torch.int64, device=where) for d in slash]
    masks = []
    side, _ = check_block_size(block_size)
    max_seqlen = as_length("max_seqlen", max_seqlen)
    blocks = torch.arange(cdiv(max_seqlen, side), device=where)
    back = blocks[:, None] - blocks
    for column, diagonal in zip(columns, diagonals, strict=True):
        kept = torch.isin(blocks, column) | torch.isin(back, diagonal)
        masks.append(kept & (back >= 0))
    return BlockSparseLayout.from_dense(torch.stack(masks), block_size)


def _device(device: Device) -> torch.device:
    return torch.device(torch.get_default_device() if device is None else device)


def _square(
    kept: Callable[[Tensor, Tensor, Tensor], Tensor],
    num_heads: int,
    max_seqlen: int,
    block_size: int,
    device: Device,
) -> BlockSparseLayout:
    side, _ = check_block_size(block_size)
    max_seqlen = as_length("max_seqlen", max_seqlen)
    blocks = cdiv(max_seqlen, side)
    return BlockSparseLayout.from_mask_mod(
        kept, num_heads, blocks, blocks, block_size, device=_device(device)
    )
