"""Attention over a paged cache: one program owns a tile of rows of one head of keys.

A row is one query head of one token. The rows of a tile share their keys, so keys are read once for
the whole GQA group. The program visits the cached keys and then the new ones once, with the online
softmax of FlashAttention-2 (Dao, 2023): running maximum and sum per row, in base 2. It visits whole
tiles, which need no mask, and then tiles that a window, the diagonal or the end cuts. For tiles
that no row sees it does not even read page numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..._cache.kernels.words import joined
from ..._linked.launch.entries import entry
from .arguments import Numbers, Options, Schedule, Tensors, Tile
from .primitives import cut_range, head_of, key_range, tiles_of
from .queries import (
    as_fp16,
    branches_of,
    load_queries,
    load_slices,
    positions_of,
    query_rows,
    slopes_of,
    tree_of,
    unit_of,
)
from .results import fill_padding, store_out, store_part
from .schedule import locate
from .structures import Problem, Queries, Softmax, Source, Table, Vectors
from .walk import attend_to_all, finish_softmax, start_softmax


@triton.jit
def _share_of(split, splits, tiles):
    """Return the tiles ``[begin, end)`` of a split; splits differ by at most one tile."""
    share, rest = tiles // splits, tiles % splits
    begin = split * share + tl.minimum(split, rest)
    return begin, begin + share + tl.where(split < rest, 1, 0)


@triton.jit
def _context_of(place, seqlen_k, k_ptr, OPTIONS: tl.constexpr):
    """Return how many keys of a sequence are in the cache; the keys after them are new."""
    context = seqlen_k
    if k_ptr is not None:
        context = tl.maximum(seqlen_k - place.seqlen_q, 0)
        if OPTIONS.DECODE_FROM_CACHE:
            context = tl.where(place.seqlen_q == 1, seqlen_k, context)
    return context


@triton.jit
def _scales_of(problem, descale_at):
    """Return the scale of products with new keys, and of products with cached keys."""
    tensors, scale = problem.tensors, problem.numbers.scores.scale
    if tensors.q_descale_ptr is not None:
        scale *= tl.load(tensors.q_descale_ptr + descale_at)
    cache_scale = scale
    if tensors.k_descale_ptr is not None:
        cache_scale *= tl.load(tensors.k_descale_ptr + descale_at)
    return scale, cache_scale


@entry(triton.jit)
def paged_kernel(
    tensors: Tensors, numbers: Numbers, OPTIONS: Options, SCHEDULE: Schedule, TILE: Tile
):
    """``out = softmax(mask(scale * q @ k.T)) @ v``, of a tile of rows or of a split of their keys.

    ``k`` and ``v`` are in the pages of a cache, followed by new ones in dense tensors.
    """
    # Triton 3.6 takes structures within structures of constants only by a name
    SLICES: tl.constexpr = OPTIONS.CACHE.SLICES
    problem = Problem(tensors, numbers)
    heads_k, splits = numbers.heads_k, numbers.splits
    pid = tl.program_id(0)
    if TILE.OVERLAP and tensors.part_out_ptr is not None:
        tl.extra.cuda.gdc_launch_dependents()
    if TILE.FILL_TOKENS > 0:
        programs = numbers.units * splits * heads_k
        if pid >= programs:
            fill_padding((pid - programs) // heads_k, pid % heads_k, problem, SCHEDULE, TILE)
            return
    # heads vary fastest: their keys are neighbours in a page
    head_k = pid % heads_k
    split = pid // heads_k % splits
    unit = pid // heads_k // splits
    place = locate(unit, tensors.cu_seqlens_q_ptr, numbers.batch, SCHEDULE)
    # before the branch, so that this load overlaps with the loads of ``locate``
    is_real = (place.sequence >= 0) & (place.sequence < numbers.batch)
    seqlen_k = tl.load(tensors.seqlens_k_ptr + place.sequence, mask=is_real, other=0)
    if place.tile < 0:
        return
    sequence_64 = place.sequence.to(tl.int64)
    head_k_64 = head_k.to(tl.int64)
    q_start_64 = place.q_start.to(tl.int64)

    # ---- load the queries; keys from `context` on are new
    context = _context_of(place, seqlen_k, tensors.k_ptr, OPTIONS)
    rows = query_rows(place, q_start_64, head_k_64, SCHEDULE, TILE)
    if SLICES == 1:
        q = (load_queries(rows, problem, OPTIONS, TILE),)  # [BLOCK_M, BLOCK_D]
    else:
        q = load_slices(rows, problem, OPTIONS.CACHE)  # each [BLOCK_M, BLOCK_D // SLICES]
    if SLICES > 1 and tensors.q_ptr.dtype.element_ty == tl.bfloat16:
        row_unit = unit_of(q)  # [BLOCK_M]
    else:
        row_unit = None
    if SLICES > 1:
        q = as_fp16(q, row_unit)
    positions = positions_of(rows, place, seqlen_k, tensors.positions_ptr, SCHEDULE)
    slopes = slopes_of(rows, sequence_64, problem)
    # first key to which a tree applies, in place of the diagonal
    first_new = seqlen_k - place.seqlen_q
    descale_at = head_k if OPTIONS.DESCALE_NDIM > 0 else 0
    if OPTIONS.DESCALE_NDIM == 2:
        descale_at += sequence_64 * heads_k
    scale, cache_scale = _scales_of(problem, descale_at)
    softmax = start_softmax(rows, split, tensors.sinks_ptr, OPTIONS, SCHEDULE, TILE)
    tree = tree_of(rows, problem, OPTIONS)
    branches = branches_of(tree)

    # ---- this program's split of the tiles of both sources
    seen = key_range(positions, first_new, 0, context, problem, OPTIONS)
    tile_begin, cache_tiles = tiles_of(seen, TILE.BLOCK_N)
    all_tiles = cache_tiles
    if OPTIONS.NEW is not None:
        new_seen = key_range(positions, first_new, context, seqlen_k, problem, OPTIONS)
        new_begin, new_tiles = tiles_of(new_seen, TILE.BLOCK_N)
        all_tiles += new_tiles
    begin, end = _share_of(split, splits, all_tiles)

    # ---- fold the cached keys
    cache_begin = tile_begin + tl.minimum(begin, cache_tiles)
    cache_end = tile_begin + tl.minimum(end, cache_tiles)
    walk = cut_range(seen, cache_begin, cache_end, TILE.BLOCK_N)
    lie, lie_v = numbers.k_cache, numbers.v_cache
    k_base = head_of(tensors.k_cache_ptr, lie.head, head_k_64, OPTIONS.CACHE)
    v_base = head_of(tensors.v_cache_ptr, lie_v.head, head_k_64, OPTIONS.CACHE)
    k_scales, v_scales = None, None
    if OPTIONS.CACHE.SCALED:
        scales, scales_v = numbers.k_scales, numbers.v_scales
        k_scale_base = tensors.k_scale_cache_ptr + head_k_64 * scales.head
        v_scale_base = tensors.v_scale_cache_ptr + head_k_64 * scales_v.head
        k_scales = Vectors(k_scale_base, scales.page, scales.slot, None, None)
        v_scales = Vectors(v_scale_base, scales_v.page, scales_v.slot, None, None)
    entries = tensors.block_table_ptr + sequence_64 * numbers.table.sequence
    # sources are made here, not in a function, because Triton 3.6 cannot return None
    source = Source(
        Vectors(k_base, lie.page, lie.slot, lie.run, lie.number),
        Vectors(v_base, lie_v.page, lie_v.slot, None, lie_v.number),
        k_scales,
        v_scales,
        Table(entries, numbers.table.page),
        cache_scale,
    )
    queries = Queries(q, row_unit, positions.position, slopes, tree, branches, first_new)
    softmax = attend_to_all(softmax, queries, source, walk, problem, OPTIONS.CACHE, OPTIONS, TILE)
    softmax = Softmax((joined(softmax.acc),), softmax.l_i, softmax.m_i)
    v_descale = 1.0
    if tensors.v_descale_ptr is not None:
        v_descale = tl.load(tensors.v_descale_ptr + descale_at)

    # ---- fold the new keys, which have no scale
    if OPTIONS.NEW is not None:
        softmax = Softmax((softmax.acc[0] * v_descale,), softmax.l_i, softmax.m_i)
        v_descale = 1.0
        if SLICES > 1:
            q = (load_queries(rows, problem, OPTIONS, TILE),)
        dense_begin = new_begin + tl.maximum(begin - cache_tiles, 0)
        dense_end = new_begin + tl.maximum(end - cache_tiles, 0)
        walk = cut_range(new_seen, dense_begin, dense_end, TILE.BLOCK_N)
        new_k = tensors.k_ptr + (q_start_64 * numbers.k.token + head_k_64 * numbers.k.head)
        new_v = tensors.v_ptr + (q_start_64 * numbers.v.token + head_k_64 * numbers.v.head)
        source = Source(
            Vectors(new_k, None, numbers.k.token, None, None),
            Vectors(new_v, None, numbers.v.token, None, None),
            None,
            None,
            None,
            scale,
        )
        position = positions.position - context
        queries = Queries(q, None, position, slopes, tree, branches, first_new - context)
        softmax = attend_to_all(softmax, queries, source, walk, problem, OPTIONS.NEW, OPTIONS, TILE)

    # ---- finish: one block of partial rows per tile, head and split, or rows of the output
    out, lse2 = finish_softmax(softmax, v_descale, OPTIONS.SHIFT)
    if tensors.part_out_ptr is not None:
        at = ((unit.to(tl.int64) * heads_k + head_k) * splits + split) * SCHEDULE.BLOCK_M
        store_part(out, lse2, rows, at, tensors, OPTIONS, TILE)
    else:
        store_out(out, lse2, rows, problem, OPTIONS, TILE)
