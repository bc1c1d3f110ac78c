"""The last kernel of the Hopper backward: scale, round and reorder the sums of dq."""

from __future__ import annotations

import triton
import triton.language as tl

from ...._linked.launch.entries import entry
from ...portable.primitives import count_keys
from ...portable.schedule import locate
from .arguments import RoundingNumbers, RoundingOptions, RoundingTensors


@triton.jit
def _load_half(sums_ptr, WIDTH: tl.constexpr):
    """Load a warpgroup's sums of a panel, ``[64, WIDTH]``."""
    sums = tl.load(sums_ptr + tl.arange(0, 64 * WIDTH))  # [64 * WIDTH]
    sums = tl.permute(tl.reshape(sums, (WIDTH // 8, 4, 8, 4, 2, 2)), (1, 4, 2, 0, 3, 5))
    return tl.reshape(sums, (64, WIDTH))


@entry(triton.jit)
def round_dq_kernel(tensors: RoundingTensors, numbers: RoundingNumbers, OPTIONS: RoundingOptions):
    """``dq = scale * sums``, rounded, of a tile of queries.

    Each of two warpgroups summed half of the tile's columns, or with 128 queries half of its rows.
    With two panels it has half of each, first of the wide panel, then of the narrow one. ``sums``
    is ``[heads, tiles, 2, 64 * width]`` in fp32. Dimensions within a panel: eights of columns,
    warp, row of eight, pair of columns, half of the warp's sixteen rows, column.
    """
    PARTS: tl.constexpr = OPTIONS.BLOCK_M // 64
    HEAD: tl.constexpr = OPTIONS.HEAD_DIM
    BOTH: tl.constexpr = OPTIONS.WIDE + OPTIONS.NARROW
    block, sequence, head, q_start, _k_start, len_q, len_k = locate(
        tensors.cu_seqlens_q_ptr,
        tensors.cu_seqlens_k_ptr,
        numbers.batch,
        numbers.heads_q,
        numbers.tokens_q,
        numbers.tokens_k,
        numbers.tiles,
        1,
        OPTIONS.BLOCK_M,
        BALANCE=False,
        LAST_IS_LONGEST=False,
    )
    if block < 0:
        return
    len_k = count_keys(tensors.seqused_k_ptr, sequence, numbers.batch, len_k)
    sequence = tl.maximum(tl.minimum(sequence, numbers.batch - 1), 0).to(tl.int64)
    shift = 0
    if OPTIONS.HAS_RIGHT:
        # rows before the first one that sees a key have no sums
        shift = tl.minimum(tl.maximum(len_q - len_k - numbers.window_right, 0), len_q)
    sums_ptr = tensors.sums_ptr + tl.program_id(0).to(tl.int64) * (OPTIONS.BLOCK_M * BOTH)
    for half in tl.static_range(2):
        for panel in tl.static_range(2 if OPTIONS.NARROW > 0 else 1):
            # begin of the panel's sums, then its rows and columns
            begin = half * (32 * PARTS * BOTH) + panel * (32 * PARTS * OPTIONS.WIDE)
            sums = _load_half(
                sums_ptr + begin, (OPTIONS.NARROW if panel > 0 else OPTIONS.WIDE) * PARTS // 2
            )
            rows = block * OPTIONS.BLOCK_M + tl.arange(0, 64)
            cols = tl.arange(0, sums.shape[1]) + panel * OPTIONS.WIDE
            if PARTS == 2:
                rows += half * 64
            else:
                cols += half * sums.shape[1]
            if tensors.cu_seqlens_q_ptr is None:
                token = sequence * numbers.tokens_q + rows
            else:
                token = q_start + rows
            # dq is contiguous: [tokens, heads_q, HEAD_DIM]
            row_at = (token * numbers.heads_q + head) * HEAD
            pointers = tensors.dq_ptr + row_at[:, None] + cols[None, :]
            inside = (cols < HEAD)[None, :]
            dq = (sums * numbers.scale).to(tensors.dq_ptr.dtype.element_ty)
            ahead = shift.to(tl.int64) * numbers.heads_q * HEAD if OPTIONS.HAS_RIGHT else 0
            tl.store(pointers + ahead, dq, mask=(rows + shift < len_q)[:, None] & inside)
            if OPTIONS.HAS_RIGHT:
                tl.store(pointers, tl.zeros_like(dq), mask=(rows < shift)[:, None] & inside)
