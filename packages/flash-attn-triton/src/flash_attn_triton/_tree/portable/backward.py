"""Backward pass over a tree: dq walks up to the root as the forward does, dk and dv walk down.

A program that owns a block of keys walks the queries of its own segment and of all segments below,
in preorder, and sums their gradients in registers. So there are no atomics, and the result repeats
bit for bit. Within one segment it uses the walks of the dense ``backward_dq`` and
``backward_dkdv``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..._dense.portable.arguments import Inputs, Options, Tile
from ..._dense.portable.backward_dkdv import dkdv_walk
from ..._dense.portable.backward_dq import dq_walk
from ..._dense.portable.primitives import load_queries, load_tile, store_rows
from ..._dense.portable.structures import Head, Queries, Scores
from ..._linked.launch.entries import Pointer, entry
from ..._linked.portable.mask import Mask, key_range, query_range
from .arguments import Numbers, Tree
from .walk import bounds_of, keys_above, locate_segment, next_below, parent_of, start_of


@entry(triton.jit)
def tree_dq_kernel(
    inputs: Inputs,
    dq_ptr: Pointer,
    tree: Tree,
    numbers: Numbers,
    OPTIONS: Options,
    TILE: Tile,
):
    """``dq = scale * ds k`` over the keys of a path, with ``ds = p * (dout v^T - delta)``.

    One program writes one block of rows of one query head.
    """
    heads_q, tokens, segments = numbers.heads_q, numbers.tokens, numbers.segments
    # the last segments are the deepest, and their last blocks have the longest walks
    slot = numbers.tiles - 1 - tl.program_id(0) // heads_q
    head = tl.program_id(0) % heads_q
    block, segment, start, length = locate_segment(
        tree.cu_seqlens_ptr, slot, segments, tokens, TILE.BLOCK_M
    )
    if block < 0:
        return
    above = start_of(segment, segments)
    head_64 = head.to(tl.int64)
    head_k_64 = head_64 // OPTIONS.GROUP

    # load
    rows = block * TILE.BLOCK_M + tl.arange(0, TILE.BLOCK_M)  # [BLOCK_M]
    queries = load_queries(
        inputs.q_ptr + start * numbers.q.token + head_64 * numbers.q.head,
        inputs.dout_ptr + start * numbers.dout.token + head_64 * numbers.dout.head,
        inputs,
        head_64 * tokens + start,
        rows,
        numbers,
        length,
        TILE,
    )

    # compute
    dq = tl.zeros([TILE.BLOCK_M, TILE.BLOCK_D], tl.float32)  # [BLOCK_M, BLOCK_D]
    first_row = block * TILE.BLOCK_M
    last_row = tl.minimum(first_row + TILE.BLOCK_M, length) - 1
    own = Head(None, None, None)
    while above >= 0:
        source, seqlen_k, diagonal = keys_above(
            inputs, tree.cu_seqlens_ptr, numbers, above, segment, head_k_64
        )
        mask = Mask(length, seqlen_k, diagonal, -1, 0)
        scores = Scores(numbers.scale, numbers, mask, None, None)
        walk = key_range(first_row, last_row, mask, OPTIONS, TILE.BLOCK_N)
        for masked in tl.static_range(2):
            dq = dq_walk(dq, queries, rows, source, walk, scores, own, masked == 1, OPTIONS, TILE)
        above = parent_of(tree.parents_ptr, above)

    # finish
    row = (start + rows) * heads_q + head
    store_rows(dq_ptr, row, dq * numbers.scale, rows < length, TILE.HEAD_DIM, TILE.BLOCK_D)


@entry(triton.jit)
def tree_dkdv_kernel(
    inputs: Inputs,
    dk_ptr: Pointer,
    dv_ptr: Pointer,
    tree: Tree,
    links_ptr: Pointer,
    numbers: Numbers,
    OPTIONS: Options,
    TILE: Tile,
):
    """``dv = p^T dout`` and ``dk = scale * ds^T q`` over the queries of a segment and all below.

    One program writes one block of keys of one key head.
    """
    tokens, segments = numbers.tokens, numbers.segments
    heads_k = numbers.heads_q // OPTIONS.GROUP
    # the first segments have the most below them, and their first blocks the longest walks
    slot = tl.program_id(0) // heads_k
    head_k = tl.program_id(0) % heads_k
    block, segment, start, length = locate_segment(
        tree.cu_seqlens_ptr, slot, segments, tokens, TILE.BLOCK_N
    )
    if block < 0:
        return
    below = start_of(segment, segments)
    head_k_64 = head_k.to(tl.int64)

    # load
    keys = block * TILE.BLOCK_N + tl.arange(0, TILE.BLOCK_N)  # [BLOCK_N]
    k_base = inputs.k_ptr + start * numbers.k.token + head_k_64 * numbers.k.head
    v_base = inputs.v_ptr + start * numbers.v.token + head_k_64 * numbers.v.head
    # [BLOCK_N, BLOCK_D], [BLOCK_N, BLOCK_DV]
    k = load_tile(k_base, keys, numbers.k.token, 0, length, TILE.HEAD_DIM, TILE.BLOCK_D, True)
    v = load_tile(v_base, keys, numbers.v.token, 0, length, TILE.HEAD_DIM_V, TILE.BLOCK_DV, True)

    # compute
    dk = tl.zeros([TILE.BLOCK_N, TILE.BLOCK_D], tl.float32)  # [BLOCK_N, BLOCK_D]
    dv = tl.zeros([TILE.BLOCK_N, TILE.BLOCK_DV], tl.float32)  # [BLOCK_N, BLOCK_DV]
    first_key = block * TILE.BLOCK_N
    while below >= 0:
        q_start, seqlen_q = bounds_of(tree.cu_seqlens_ptr, below)
        # causal within the own segment; a segment below sees all keys
        diagonal = tl.where(below == segment, 0, length)
        mask = Mask(seqlen_q, length, diagonal, -1, 0)
        scores = Scores(numbers.scale, numbers, mask, None, None)
        walk = query_range(first_key, first_key + TILE.BLOCK_N - 1, mask, OPTIONS, TILE.BLOCK_M)
        queries = Queries(
            inputs.q_ptr + q_start * numbers.q.token,
            inputs.dout_ptr + q_start * numbers.dout.token,
            inputs.lse2_ptr + q_start,
            inputs.delta_ptr + q_start,
            None,
            numbers.q,
            numbers.dout,
            tokens,
            None,
            None,
            0,
            0,
            head_k,
            numbers.heads_q,
        )
        for masked in tl.static_range(2):
            dk, dv = dkdv_walk(
                dk, dv, k, v, keys, queries, walk, scores, masked == 1, OPTIONS, TILE
            )
        below = next_below(tree.parents_ptr, links_ptr, segments, below, segment)

    # finish
    inside = keys < length
    row = (start + keys) * heads_k + head_k
    store_rows(dk_ptr, row, dk * numbers.scale, inside, TILE.HEAD_DIM, TILE.BLOCK_D)
    store_rows(dv_ptr, row, dv, inside, TILE.HEAD_DIM_V, TILE.BLOCK_DV)
