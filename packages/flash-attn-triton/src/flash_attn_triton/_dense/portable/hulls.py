"""A table of the hulls of spans: which keys each tile of queries sees, and which it sees whole."""

from __future__ import annotations

import triton
import triton.language as tl

from ..._linked.launch.entries import entry
from .arguments import HullNumbers, HullTensors, HullTile
from .primitives import count_keys
from .schedule import find_sequence
from .spans import hulls_of, load_spans, store_hulls


@entry(triton.jit)
def hull_kernel(tensors: HullTensors, numbers: HullNumbers, TILE: HullTile):
    """Write the hulls of each tile of queries, int32 ``[slots, SPANS, 4]``; see ``Hull``.

    Sequences of one length have ``tiles`` slots each. Of packed sequences, slots are numbered as
    ``find_sequence`` does; those without a tile are not written.
    """
    slot = tl.program_id(0)
    if tensors.cu_seqlens_q_ptr is None:
        sequence = slot // numbers.tiles
        block = slot % numbers.tiles
        q_start = sequence.to(tl.int64) * numbers.tokens_q
        seqlen_q = numbers.tokens_q
        seqlen_k = numbers.tokens_k
    else:
        sequence = find_sequence(tensors.cu_seqlens_q_ptr, slot, numbers.batch, TILE.BLOCK)
        if (sequence < 0) | (sequence >= numbers.batch):
            return
        begin = tl.load(tensors.cu_seqlens_q_ptr + sequence)
        seqlen_q = tl.load(tensors.cu_seqlens_q_ptr + sequence + 1) - begin
        begin_k = tl.load(tensors.cu_seqlens_k_ptr + sequence)
        seqlen_k = tl.load(tensors.cu_seqlens_k_ptr + sequence + 1) - begin_k
        seqlen_k = count_keys(tensors.seqused_k_ptr, sequence, numbers.batch, seqlen_k)
        block = slot - (begin // TILE.BLOCK + sequence + 1)
        q_start = begin.to(tl.int64)
    if block * TILE.BLOCK >= seqlen_q:
        return
    rows = block * TILE.BLOCK + tl.arange(0, TILE.BLOCK)  # [BLOCK]
    spans_ptr = tensors.spans_ptr + q_start * (2 * TILE.SPANS)
    spans = load_spans(spans_ptr, rows, seqlen_q, seqlen_k, TILE.SPANS)
    store_hulls(tensors.hulls_ptr, slot, hulls_of(spans, rows, seqlen_q, seqlen_k))
