"""The last kernel of the Hopper backward: scale, round and reorder the fp32 sums of a gradient."""

from __future__ import annotations

import triton
import triton.language as tl

from ....._linked.launch.entries import entry
from ....portable.primitives import count_keys
from ....portable.schedule import locate
from ..arguments import RoundingNumbers, RoundingOptions, RoundingTensors


@triton.jit
def _load_part(sums_ptr, pitch, WIDTH: tl.constexpr, SHARES: tl.constexpr):
    """Load a warpgroup's sums of a panel, ``[64, WIDTH]``, added up over ``SHARES`` places."""
    index = tl.arange(0, 64 * WIDTH)
    sums = tl.load(sums_ptr + index)  # [64 * WIDTH]
    for share in tl.static_range(1, SHARES):
        sums += tl.load(sums_ptr + share * pitch + index)
    sums = tl.permute(tl.reshape(sums, (WIDTH // 8, 4, 8, 4, 2, 2)), (1, 4, 2, 0, 3, 5))
    return tl.reshape(sums, (64, WIDTH))


@triton.jit
def _hidden_rows(tensors, numbers, sequence, len_own, len_other, OPTIONS: tl.constexpr):
    """Return how many leading rows no pair of a query and a key has: they have no sums."""
    hidden = 0
    if OPTIONS.HAS_WINDOW:
        if OPTIONS.OF_KEYS:
            len_own = count_keys(tensors.seqused_k_ptr, sequence, numbers.batch, len_own)
        else:
            len_other = count_keys(tensors.seqused_k_ptr, sequence, numbers.batch, len_other)
        hidden = tl.minimum(tl.maximum(len_own - len_other - numbers.window, 0), len_own)
    return hidden


@entry(triton.jit)
def round_kernel(tensors: RoundingTensors, numbers: RoundingNumbers, OPTIONS: RoundingOptions):
    """``gradient = scale * sums``, rounded, of a tile of queries or a block of keys.

    Each of two warpgroups summed half of the tile's columns, or with 128 rows half of its rows, or
    one panel; of a block of 64 keys, one warpgroup summed all. With two panels, a warpgroup's part
    has first its columns of the wide panel, then of the narrow one. ``sums`` is
    ``[heads, tiles, parts, 64 * width]`` in fp32. Dimensions within a panel: eights of columns,
    warp, row of eight, pair of columns, half of the warp's sixteen rows, column.
    """
    HEAD: tl.constexpr = OPTIONS.HEAD_DIM
    PARTS: tl.constexpr = OPTIONS.BLOCK // 64 * OPTIONS.COLUMN_PARTS
    BOTH: tl.constexpr = OPTIONS.WIDE + OPTIONS.NARROW
    block, sequence, head, start, _other_start, len_own, len_other = locate(
        tensors.cu_seqlens_own_ptr,
        tensors.cu_seqlens_other_ptr,
        numbers.batch,
        numbers.heads,
        numbers.tokens_own,
        numbers.tokens_other,
        numbers.tiles,
        1,
        OPTIONS.BLOCK,
        BALANCE=False,
        LAST_IS_LONGEST=False,
    )
    if block < 0:
        return
    shift = _hidden_rows(tensors, numbers, sequence, len_own, len_other, OPTIONS)
    sequence = tl.maximum(tl.minimum(sequence, numbers.batch - 1), 0).to(tl.int64)
    SIZE: tl.constexpr = OPTIONS.BLOCK * BOTH
    place = tl.program_id(0).to(tl.int64)
    pitch = numbers.tiles.to(tl.int64) * SIZE
    if OPTIONS.SHARES > 1:
        # the places of a key head's shares lie ``tiles`` apart
        plane = place // numbers.tiles
        place += plane * (OPTIONS.SHARES - 1) * numbers.tiles
    sums_ptr = tensors.sums_ptr + place * SIZE
    for part in tl.static_range(PARTS):
        for panel in tl.static_range(2 if OPTIONS.NARROW > 0 else 1):
            # begin of the panel's sums, then its rows and columns
            begin = part * (SIZE // PARTS) + panel * (64 * OPTIONS.WIDE // OPTIONS.COLUMN_PARTS)
            sums = _load_part(
                sums_ptr + begin,
                pitch,
                (OPTIONS.NARROW if panel > 0 else OPTIONS.WIDE) // OPTIONS.COLUMN_PARTS,
                OPTIONS.SHARES,
            )
            rows = block * OPTIONS.BLOCK + tl.arange(0, 64)
            cols = tl.arange(0, sums.shape[1]) + panel * OPTIONS.WIDE
            if OPTIONS.COLUMN_PARTS == 1:
                rows += part * 64
            else:
                cols += part * sums.shape[1]
            if tensors.cu_seqlens_own_ptr is None:
                token = sequence * numbers.tokens_own + rows
            else:
                token = start + rows
            # the gradient is contiguous: [tokens, heads, HEAD_DIM]
            row_at = (token * numbers.heads + head) * HEAD
            pointers = tensors.gradient_ptr + row_at[:, None] + cols[None, :]
            inside = (cols < HEAD)[None, :]
            gradient = (sums * numbers.scale).to(tensors.gradient_ptr.dtype.element_ty)
            ahead = shift.to(tl.int64) * numbers.heads * HEAD if OPTIONS.HAS_WINDOW else 0
            shown = (rows + shift < len_own)[:, None] & inside
            tl.store(pointers + ahead, gradient, mask=shown)
            if OPTIONS.HAS_WINDOW:
                hidden = (rows < shift)[:, None] & inside
                tl.store(pointers, tl.zeros_like(gradient), mask=hidden)
