"""Forward pass over a tree: one program owns a block of queries and walks up to the root.

The walk over the keys of one segment is the walk of the dense forward: whole tiles, then tiles that
the diagonal or the end of the segment cuts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..._dense.portable.arguments import Options, Tile
from ..._dense.portable.forward import attend, lse_of, normalise, start_softmax
from ..._dense.portable.primitives import load_tile, store_rows
from ..._dense.portable.structures import Head, Scores
from ..._linked.launch.entries import entry
from ..._linked.portable.mask import Mask, key_range
from .arguments import ForwardTensors, Numbers
from .walk import keys_above, locate_segment, parent_of, start_of


@entry(triton.jit)
def tree_forward_kernel(tensors: ForwardTensors, numbers: Numbers, OPTIONS: Options, TILE: Tile):
    """``out = softmax(s) v`` and ``lse = log(sum(exp(s)))`` over the keys of a path.

    One program writes one block of rows of one query head.
    """
    heads_q, tokens, segments = numbers.heads_q, numbers.tokens, numbers.segments
    # the last segments are the deepest, and their last blocks have the longest walks
    slot = numbers.tiles - 1 - tl.program_id(0) // heads_q
    head = tl.program_id(0) % heads_q
    block, segment, start, length = locate_segment(
        tensors.cu_seqlens_ptr, slot, segments, tokens, TILE.BLOCK_M
    )
    if block < 0:
        return
    above = start_of(segment, segments)
    head_64 = head.to(tl.int64)
    head_k_64 = head_64 // OPTIONS.GROUP

    # load
    rows = block * TILE.BLOCK_M + tl.arange(0, TILE.BLOCK_M)  # [BLOCK_M]
    q_base = tensors.q_ptr + start * numbers.q.token + head_64 * numbers.q.head
    # [BLOCK_M, BLOCK_D]
    q = load_tile(q_base, rows, numbers.q.token, 0, length, TILE.HEAD_DIM, TILE.BLOCK_D, True)

    # compute
    l_i, m_i = start_softmax(tensors.sinks_ptr, head, above < 0, OPTIONS.SHIFT, TILE.BLOCK_M)
    acc = tl.zeros([TILE.BLOCK_M, TILE.BLOCK_DV], tl.float32)  # [BLOCK_M, BLOCK_DV]
    first_row = block * TILE.BLOCK_M
    last_row = tl.minimum(first_row + TILE.BLOCK_M, length) - 1
    own = Head(None, None, None)
    while above >= 0:
        source, seqlen_k, diagonal = keys_above(
            tensors, tensors.cu_seqlens_ptr, numbers, above, segment, head_k_64
        )
        mask = Mask(length, seqlen_k, diagonal, -1, 0)
        scores = Scores(numbers.scale, numbers, mask, None, None)
        walk = key_range(first_row, last_row, mask, OPTIONS, TILE.BLOCK_N)
        for masked in tl.static_range(2):
            acc, l_i, m_i = attend(
                acc, l_i, m_i, q, rows, source, walk, scores, own, masked == 1, OPTIONS, TILE
            )
        above = parent_of(tensors.parents_ptr, above)

    # finish
    out = normalise(acc, l_i, 1.0)
    lse = lse_of(l_i, m_i, OPTIONS.SHIFT)
    inside = rows < length
    tl.store(tensors.lse_ptr + head_64 * tokens + start + rows, lse, mask=inside)
    row = (start + rows) * heads_q + head
    store_rows(tensors.out_ptr, row, out, inside, TILE.HEAD_DIM_V, TILE.BLOCK_DV)
