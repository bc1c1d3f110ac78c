"""The entry of the portable attention kernels.

A launch makes the output and the LSE, or dq, or dk and dv. For dk and dv a program owns a tile of
keys; otherwise it owns a tile of queries.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..._linked.launch.entries import entry
from .arguments import Numbers, Options, Tensors
from .backward_dkdv import make_dkdv
from .backward_dq import make_dq
from .forward import fill_padding, make_output
from .merge import merge_parts
from .schedule import key_walk, locate_queries, rows_of
from .structures import Grid


@triton.jit
def _own_queries(tensors, numbers, OPTIONS: tl.constexpr):
    """Work on one tile of queries, or on a split of its keys."""
    q_starts, k_starts = tensors.cu_seqlens_q_ptr, tensors.cu_seqlens_k_ptr
    units = numbers.heads_q // OPTIONS.GROUP * OPTIONS.PACKS
    sizes = numbers.tokens_q, numbers.tokens_k, numbers.tiles, numbers.span
    # one program merges the splits of a tile
    splits = 1 if OPTIONS.MERGES else numbers.splits
    grid = Grid(q_starts, k_starts, numbers.batch, units, *sizes, splits)
    work = locate_queries(
        tl.program_id(0),
        grid,
        OPTIONS.POSITIONS,
        OPTIONS.IS_SHORT,
        OPTIONS.IS_CAUSAL,
        OPTIONS.SHORT,
        OPTIONS.TOP_LEFT,
    )
    if OPTIONS.IS_SHORT and not OPTIONS.MERGES and q_starts is not None:
        fill_padding(work, tensors, numbers, OPTIONS)
    if not work.is_alive:
        return
    rows = rows_of(work, tensors, numbers, OPTIONS)
    if OPTIONS.MERGES:
        merge_parts(rows, tensors, numbers, OPTIONS)
    else:
        walk = key_walk(rows, tensors, numbers, OPTIONS)
        if tensors.dout_ptr is None:
            make_output(rows, walk, tensors, numbers, OPTIONS)
        else:
            make_dq(rows, walk, tensors, numbers, OPTIONS)


@entry(triton.jit)
def attention_kernel(tensors: Tensors, numbers: Numbers, OPTIONS: Options):
    """``out = softmax(scale * q k^T) v`` over the kept blocks, and ``lse`` of each row.

    With ``dout``: ``dq = scale * ds k``, or ``dk = scale * ds^T q`` and ``dv = p^T dout``, where
    ``p = exp(scale * q k^T - lse)`` and ``ds = p * (dout v^T - delta)``.
    """
    if OPTIONS.BY_KEY:
        make_dkdv(tensors, numbers, OPTIONS)
    else:
        _own_queries(tensors, numbers, OPTIONS)
