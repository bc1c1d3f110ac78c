"""Attention over a paged cache: one program owns a tile of rows of one head of keys.

A row is one query head of one token. The rows of a tile share their keys, so keys are read once for
the whole GQA group. The program visits the cached keys and then the new ones once, with the online
softmax of FlashAttention-2 (Dao, 2023): running maximum and sum per row, in base 2. It visits whole
tiles, which need no mask, and then tiles that a window, the diagonal or the end cuts. For tiles
that no row sees it does not even read page numbers.
"""

import triton
import triton.language as tl

from ..._cache.kernels.words import joined
from .parameters import (
    Counts,
    Options,
    Pointers,
    RowLayout,
    Schedule,
    Scores,
    Strides,
    Tile,
    pointers_of_callers,
)
from .primitives import cut_range, key_range, masked_from, tiles_of
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
from .structures import (
    Columns,
    Packed,
    Queries,
    Results,
    Softmax,
    Source,
    SourceLayout,
    Table,
    VectorLayout,
    Vectors,
)
from .walk import attend_to_all, finish_softmax, start_softmax

# No specialisation on values or alignment: with it, the bits of a result could depend on a stride,
# and a new length could trigger a compilation.
NUMBERS = Scores._fields + Counts._fields + Strides._fields
POINTERS = pointers_of_callers(Pointers._fields)


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
def _scales_of(scale, descale_at, q_descale_ptr, k_descale_ptr):
    """Return the scale of products with new keys, and of products with cached keys."""
    if q_descale_ptr is not None:
        scale *= tl.load(q_descale_ptr + descale_at)
    cache_scale = scale
    if k_descale_ptr is not None:
        cache_scale *= tl.load(k_descale_ptr + descale_at)
    return scale, cache_scale


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def paged_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_ptr,
    v_ptr,
    block_table_ptr,
    cu_seqlens_q_ptr,
    seqlens_k_ptr,
    alibi_slopes_ptr,
    sinks_ptr,
    q_descale_ptr,
    k_descale_ptr,
    v_descale_ptr,
    k_scale_cache_ptr,
    v_scale_cache_ptr,
    out_scale_ptr,
    positions_ptr,
    tree_mask_ptr,
    out_ptr,
    lse_ptr,
    part_out_ptr,
    part_lse_ptr,
    scale,
    softcap,
    window_left,
    window_right,
    batch,
    heads_k,
    tokens,
    units,
    splits,
    stride_qs,
    stride_qh,
    stride_os,
    stride_oh,
    stride_kcp,
    stride_kcs,
    stride_kch,
    stride_kcx,
    stride_kcd,
    stride_vcp,
    stride_vcs,
    stride_vch,
    stride_vcd,
    stride_ks,
    stride_kh,
    stride_vs,
    stride_vh,
    stride_table_b,
    stride_table_p,
    stride_alibi_b,
    stride_skp,
    stride_sks,
    stride_skh,
    stride_svp,
    stride_svs,
    stride_svh,
    PAGE: tl.constexpr,
    K_RUN: tl.constexpr,
    K_UNIT: tl.constexpr,
    K_BYTES: tl.constexpr,
    V_UNIT: tl.constexpr,
    V_BYTES: tl.constexpr,
    V_COLUMN_RUN: tl.constexpr,
    V_AS_K: tl.constexpr,
    IN_ORDER: tl.constexpr,
    SLICES: tl.constexpr,
    WORD_BITS: tl.constexpr,
    NEW_V_AS_K: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    OUT_BYTES: tl.constexpr,
    PART_BYTES: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    SIGNED_ALIBI: tl.constexpr,
    FOLD: tl.constexpr,
    DESCALE_NDIM: tl.constexpr,
    SHIFT: tl.constexpr,
    OUT_MAX: tl.constexpr,
    DECODE_FROM_CACHE: tl.constexpr,
    GROUP: tl.constexpr,
    MIN_TOKENS: tl.constexpr,
    MAX_TOKENS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    FILL_TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    PTX: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """``out = softmax(mask(scale * q @ k.T)) @ v``, of a tile of rows or of a split of their keys.

    ``k`` and ``v`` are in the pages of a cache, followed by new ones in dense tensors.
    """
    TILE: tl.constexpr = Tile(
        HEAD_DIM,
        HEAD_DIM_V,
        BLOCK_N,
        BLOCK_D,
        BLOCK_DV,
        FILL_TOKENS,
        PRECISION,
        UPCAST,
        PTX,
        OVERLAP,
    )
    K_WORDS: tl.constexpr = Columns(HEAD_DIM // SLICES, BLOCK_D // SLICES)
    V_WORDS: tl.constexpr = Columns(HEAD_DIM_V // SLICES, BLOCK_DV // SLICES)
    Q: tl.constexpr = q_ptr.dtype.element_ty
    # fp16 holds all numbers of 8 bits; bf16 holds scaled weights of any size
    NARROW: tl.constexpr = tl.float16 if k_scale_cache_ptr is None else tl.bfloat16
    WEIGHTS: tl.constexpr = Q if tl.float32 == Q or tl.float16 == Q else NARROW
    LAYOUT: tl.constexpr = SourceLayout(
        PAGE,
        VectorLayout(K_RUN, K_UNIT, K_BYTES, 0),
        VectorLayout(HEAD_DIM_V // SLICES, V_UNIT, V_BYTES, V_COLUMN_RUN),
        V_AS_K,
        IN_ORDER,
        K_WORDS,
        V_WORDS,
        SLICES,
        k_cache_ptr.dtype.element_ty,
        WEIGHTS,
        k_scale_cache_ptr is not None,
    )
    ROW_LAYOUT: tl.constexpr = RowLayout(NEW_V_AS_K, ROW_BYTES, OUT_BYTES, PART_BYTES)
    OPTIONS: tl.constexpr = Options(
        HAS_LEFT,
        HAS_RIGHT,
        HAS_SOFTCAP,
        SIGNED_ALIBI,
        FOLD,
        DESCALE_NDIM,
        SHIFT,
        OUT_MAX,
        DECODE_FROM_CACHE,
    )
    SCHEDULE: tl.constexpr = Schedule(GROUP, MIN_TOKENS, MAX_TOKENS, TILES, BLOCK_M)

    results = Results(Packed(out_ptr, stride_os, stride_oh), lse_ptr, out_scale_ptr, tokens)
    pid = tl.program_id(0)
    if OVERLAP and part_out_ptr is not None:
        tl.extra.cuda.gdc_launch_dependents()
    if FILL_TOKENS > 0:
        programs = units * splits * heads_k
        if pid >= programs:
            block = (pid - programs) // heads_k
            fill_padding(block, pid % heads_k, cu_seqlens_q_ptr, batch, results, SCHEDULE, TILE)
            return
    # heads vary fastest: their keys are neighbours in a page
    head_k = pid % heads_k
    split = pid // heads_k % splits
    unit = pid // heads_k // splits
    place = locate(unit, cu_seqlens_q_ptr, batch, SCHEDULE)
    # before the branch, so that this load overlaps with the loads of ``locate``
    is_real = (place.sequence >= 0) & (place.sequence < batch)
    seqlen_k = tl.load(seqlens_k_ptr + place.sequence, mask=is_real, other=0)
    if place.tile < 0:
        return
    sequence_64 = place.sequence.to(tl.int64)
    head_k_64 = head_k.to(tl.int64)
    q_start_64 = place.q_start.to(tl.int64)

    # keys from `context` on are dense
    context = _context_of(place, seqlen_k, k_ptr, OPTIONS)
    HAS_DENSE: tl.constexpr = k_ptr is not None
    rows = query_rows(place, q_start_64, head_k_64, SCHEDULE, TILE)
    packed_q = Packed(q_ptr, stride_qs, stride_qh)
    if SLICES == 1:
        q = (load_queries(rows, packed_q, ROW_LAYOUT, TILE),)  # [BLOCK_M, BLOCK_D]
    else:
        q = load_slices(rows, packed_q, K_WORDS, SLICES)  # each [BLOCK_M, BLOCK_D // SLICES]
    if SLICES > 1 and q_ptr.dtype.element_ty == tl.bfloat16:
        row_unit = unit_of(q)  # [BLOCK_M]
    else:
        row_unit = None
    if SLICES > 1:
        q = as_fp16(q, row_unit)
    positions = positions_of(rows, place, positions_ptr, seqlen_k, SCHEDULE)
    slopes = slopes_of(rows, sequence_64, positions_ptr, alibi_slopes_ptr, stride_alibi_b)
    # first key to which a tree applies, in place of the diagonal
    first_new = seqlen_k - place.seqlen_q
    descale_at = head_k if DESCALE_NDIM > 0 else 0
    if DESCALE_NDIM == 2:
        descale_at += sequence_64 * heads_k
    scale, cache_scale = _scales_of(scale, descale_at, q_descale_ptr, k_descale_ptr)
    softmax = start_softmax(rows, split, sinks_ptr, OPTIONS, SCHEDULE, TILE, SLICES)

    # this program's split of the tiles of both sources
    scores = Scores(cache_scale, softcap, window_left, window_right)
    tree = tree_of(rows, tree_mask_ptr, scores, OPTIONS)
    branches = branches_of(tree)
    seen = key_range(positions.first, positions.last, context, scores, OPTIONS)
    if tree_mask_ptr is not None:
        seen = masked_from(seen, first_new)
    tile_begin, cache_tiles = tiles_of(seen, BLOCK_N)
    all_tiles = cache_tiles
    if HAS_DENSE:
        new_first, new_last = positions.first - context, positions.last - context
        new_seen = key_range(new_first, new_last, seqlen_k - context, scores, OPTIONS)
        if tree_mask_ptr is not None:
            new_seen = masked_from(new_seen, first_new - context)
        new_begin, new_tiles = tiles_of(new_seen, BLOCK_N)
        all_tiles += new_tiles
    begin, end = _share_of(split, splits, all_tiles)

    cache_begin = tile_begin + tl.minimum(begin, cache_tiles)
    cache_end = tile_begin + tl.minimum(end, cache_tiles)
    walk = cut_range(seen, cache_begin, cache_end, BLOCK_N)
    if WORD_BITS == 16:
        k_cache_ptr = k_cache_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
        v_cache_ptr = v_cache_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    k_cache_ptr += head_k_64 * stride_kch
    v_cache_ptr += head_k_64 * stride_vch
    if k_scale_cache_ptr is not None:
        k_scale_cache_ptr += head_k_64 * stride_skh
        v_scale_cache_ptr += head_k_64 * stride_svh
    source = Source(
        Vectors(k_cache_ptr, stride_kcp, stride_kcs, stride_kcx, stride_kcd),
        Vectors(v_cache_ptr, stride_vcp, stride_vcs, None, stride_vcd),
        Vectors(k_scale_cache_ptr, stride_skp, stride_sks, None, None),
        Vectors(v_scale_cache_ptr, stride_svp, stride_svs, None, None),
        Table(block_table_ptr + sequence_64 * stride_table_b, stride_table_p),
    )
    queries = Queries(q, row_unit, positions.position, slopes, tree, branches, first_new)
    softmax = attend_to_all(softmax, queries, source, walk, scores, LAYOUT, OPTIONS, TILE)
    softmax = Softmax((joined(softmax.acc),), softmax.l_i, softmax.m_i)
    v_descale = 1.0
    if v_descale_ptr is not None:
        v_descale = tl.load(v_descale_ptr + descale_at)
    if HAS_DENSE:
        # new keys and values have no scale
        softmax = Softmax((softmax.acc[0] * v_descale,), softmax.l_i, softmax.m_i)
        v_descale = 1.0
        if SLICES > 1:
            q = (load_queries(rows, packed_q, ROW_LAYOUT, TILE),)
        dense_begin = new_begin + tl.maximum(begin - cache_tiles, 0)
        dense_end = new_begin + tl.maximum(end - cache_tiles, 0)
        walk = cut_range(new_seen, dense_begin, dense_end, BLOCK_N)
        NEW_LAYOUT: tl.constexpr = SourceLayout(
            0,
            VectorLayout(HEAD_DIM, True, ROW_BYTES, 0),
            VectorLayout(HEAD_DIM_V, True, ROW_BYTES, 0),
            NEW_V_AS_K,
            False,
            Columns(HEAD_DIM, BLOCK_D),
            Columns(HEAD_DIM_V, BLOCK_DV),
            1,
            k_ptr.dtype.element_ty,
            WEIGHTS,
            False,
        )
        k_ptr += q_start_64 * stride_ks + head_k_64 * stride_kh
        v_ptr += q_start_64 * stride_vs + head_k_64 * stride_vh
        # made here, not in a function, because Triton 3.6 cannot return None
        source = Source(
            Vectors(k_ptr, None, stride_ks, None, None),
            Vectors(v_ptr, None, stride_vs, None, None),
            None,
            None,
            None,
        )
        queries = Queries(
            q, None, positions.position - context, slopes, tree, branches, first_new - context
        )
        scores = Scores(scale, softcap, window_left, window_right)
        softmax = attend_to_all(softmax, queries, source, walk, scores, NEW_LAYOUT, OPTIONS, TILE)

    out, lse2 = finish_softmax(softmax, v_descale, SHIFT)
    if part_out_ptr is not None:
        # one block of rows per tile, head and split
        at = ((unit.to(tl.int64) * heads_k + head_k) * splits + split) * BLOCK_M
        store_part(out, lse2, rows, at, part_out_ptr, part_lse_ptr, PART_BYTES, TILE)
    else:
        store_out(out, lse2, rows, results, OUT_BYTES, OUT_MAX, TILE)
