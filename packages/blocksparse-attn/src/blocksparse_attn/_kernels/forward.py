"""Forward pass: one program owns a tile of queries and walks the blocks of keys that it keeps.

The online softmax of FlashAttention-2 (Dao, 2023): running maximum and sum per row, in base 2. The
list of a tile has two parts: blocks that every row sees whole, walked without masks, and blocks
that the diagonal or the end of the sequence cuts, or that only some of the tile's rows of blocks,
or of its heads, keep. What no row keeps is never visited. The next step's entry of the list is
loaded a step ahead, so that the loads of keys wait for nothing.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from attn_common import cdiv

from .._configs import SHORT, short_shape, tall_shape
from ._linked.primitives import LOG2E, NEG_INF, dot, dot_add
from .backward import run_backward
from .common import NUMBERS, POINTERS, Plan, QueryTiles, processors
from .launch.runtime import dense
from .merge import launch_merge, store_rows
from .primitives import (
    NO_BLOCK,
    count_steps,
    fetch,
    keeps,
    key_offsets,
    live_keys,
    load_tile,
    load_tile_transposed,
    tokens_of,
)
from .schedule import key_walk, locate_queries

# programs per multiprocessor that a decode is split into, and the least steps of a program
WAVES = 4
LEAST_STEPS = 4


@triton.jit
def _attend(
    acc, l_i, m_i, q, k_base, v_base, stride_kb, stride_ks, stride_vb, stride_vs, table_ptr,
    items_ptr, members_ptr, first_step, last_step, first_a, count_a, first_b, count_b,
    positions, bits, first_position, last_position, span_start, seqlen_k, scale,
    MASKED: tl.constexpr, FOLD: tl.constexpr, IS_CAUSAL: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, ROW_MEMBERS: tl.constexpr,
    HEAD_MEMBERS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, ROW_BYTES: tl.constexpr,
    ROW_BYTES_V: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Fold keys into the running softmax of a tile of queries: masked steps, or whole ones."""
    HAS_MEMBERS: tl.constexpr = MASKED and (ROW_MEMBERS > 1 or HEAD_MEMBERS > 1)
    cols_d = tl.arange(0, BLOCK_D)
    cols_dv = tl.arange(0, BLOCK_DV)
    block = fetch(
        items_ptr, first_step, first_a, count_a, first_b, count_b, first_b, 0, NO_BLOCK,
        BLOCK_N, BLOCK_K,
    )  # fmt: skip
    members = 1
    if HAS_MEMBERS:
        members = fetch(
            members_ptr, first_step, first_a, count_a, first_b, count_b, first_b, 0, 0,
            BLOCK_N, BLOCK_K,
        )  # fmt: skip
    for step in tl.range(first_step, last_step):
        keys = tokens_of(block, step, BLOCK_N, BLOCK_K)
        live = keys >= 0
        if MASKED:
            live = live_keys(
                keys, members, first_position, last_position, span_start, seqlen_k,
                IS_CAUSAL, BLOCK_Q, ROW_MEMBERS,
            )  # fmt: skip
        k_at = key_offsets(keys, live, table_ptr, stride_kb, stride_ks, PAGE, MASKED)
        v_at = key_offsets(keys, live, table_ptr, stride_vb, stride_vs, PAGE, MASKED)
        k = load_tile_transposed(
            k_base, k_at, live, cols_d, HEAD_DIM, BLOCK_D, ROW_BYTES, MASKED
        )  # [D, N]
        s = dot(q, k, PRECISION, UPCAST)  # [M, N]
        if FOLD and not MASKED:
            # the scale goes into the exponential's multiply-add; it is positive, so max commutes
            factor = scale * LOG2E
        else:
            factor = 1.0
            s = s * (scale * LOG2E)
        if MASKED:
            if IS_CAUSAL:
                visible = keys[None, :] <= positions[:, None]
            else:
                visible = (keys < seqlen_k)[None, :] & (positions >= 0)[:, None]
            if HAS_MEMBERS:
                visible &= keeps(members, bits, BLOCK_N, BLOCK_K)
            s = tl.where(visible, s, NEG_INF)
        m_new = tl.maximum(m_i, tl.max(s, 1) * factor)
        if MASKED:
            # a row that has seen no key yet keeps a finite pivot: -inf - -inf is NaN
            pivot = tl.where(m_new == NEG_INF, 0.0, m_new)
        else:
            pivot = m_new
        p = tl.exp2(s * factor - pivot[:, None])
        alpha = tl.exp2(m_i - pivot)
        l_i = l_i * alpha + tl.sum(p, 1)
        v = load_tile(
            v_base, v_at, live, cols_dv, HEAD_DIM_V, BLOCK_DV, ROW_BYTES_V, MASKED
        )  # [N, DV]
        acc = dot_add(acc * alpha[:, None], p, v, PRECISION, UPCAST)  # [M, DV]
        m_i = m_new
        block = fetch(
            items_ptr, step + 1, first_a, count_a, first_b, count_b, first_b, 0, NO_BLOCK,
            BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if HAS_MEMBERS:
            members = fetch(
                members_ptr, step + 1, first_a, count_a, first_b, count_b, first_b, 0, 0,
                BLOCK_N, BLOCK_K,
            )  # fmt: skip
    return acc, l_i, m_i


@triton.jit
def _fill(
    out_ptr, lse_ptr, first, last, tokens_q, heads_q, head_base, in_group,
    GROUP: tl.constexpr, HEADS: tl.constexpr, POSITIONS: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Write what padding gives: output 0, lse -inf."""
    cols_dv = tl.arange(0, BLOCK_DV)
    head = head_base + in_group
    for begin in range(first, last, POSITIONS):
        token = (begin + tl.arange(0, BLOCK_M) // HEADS).to(tl.int64)
        inside = (token < last) & (in_group < GROUP)
        tl.store(
            lse_ptr + head.to(tl.int64) * tokens_q + token,
            tl.full([BLOCK_M], NEG_INF, tl.float32), mask=inside,
        )  # fmt: skip
        out_ptrs = out_ptr + ((token * heads_q + head) * HEAD_DIM_V)[:, None] + cols_dv[None, :]
        nothing = tl.zeros([BLOCK_M, BLOCK_DV], out_ptr.dtype.element_ty)
        tl.store(out_ptrs, nothing, mask=inside[:, None] & (cols_dv < HEAD_DIM_V)[None, :])


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, part_out_ptr, part_lse_ptr,
    begin_ptr, whole_ptr, items_ptr, members_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, block_table_ptr,
    scale, batch, heads_q, tokens_q, tokens_k, tiles, span, splits, fills, list_rows, extent_k,
    stride_table,
    stride_qb, stride_qs, stride_qh,
    stride_kb, stride_ks, stride_kh,
    stride_vb, stride_vs, stride_vh,
    GROUP: tl.constexpr,  # query heads per key head
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    ROW_BYTES_V: tl.constexpr,
    BLOCK_Q: tl.constexpr,  # of the layout
    BLOCK_K: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    PER_HEAD: tl.constexpr,  # lists of each unit, or one for all
    POSITIONS: tl.constexpr,  # of a tile
    HEADS: tl.constexpr,  # of a tile, from one group
    PACKS: tl.constexpr,  # tiles that hold all heads of a group
    SPAN: tl.constexpr,  # positions of a list's owner
    ROW_MEMBERS: tl.constexpr,  # rows of blocks in a tile
    HEAD_MEMBERS: tl.constexpr,  # heads whose lists are united
    PAGE: tl.constexpr,  # tokens of a page, 0 without pages
    IS_SHORT: tl.constexpr,
    SHORT: tl.constexpr,
    FOLD: tl.constexpr,  # the scale is not negative
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,  # the interpreter multiplies in fp32
):  # fmt: skip
    units = heads_q // GROUP * PACKS
    tile, is_alive, sequence, unit, split, q_start, k_start, seqlen_q, seqlen_k = locate_queries(
        tl.program_id(0), cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, units, tokens_q, tokens_k,
        tiles, span, splits, POSITIONS, IS_SHORT, IS_CAUSAL, SHORT,
    )  # fmt: skip
    head_k = unit // PACKS
    pack = unit % PACKS
    m = tl.arange(0, BLOCK_M)
    in_group = pack * HEADS + m % HEADS
    if IS_SHORT and cu_seqlens_q_ptr is not None:
        # the first program of the first and of the last sequence, if no other grid writes padding
        is_first = (tl.program_id(0) // (splits * units) % tiles + split == 0) & (fills != 0)
        if is_first & (sequence == 0):
            _fill(
                out_ptr, lse_ptr, 0, tl.load(cu_seqlens_q_ptr), tokens_q, heads_q, head_k * GROUP,
                in_group, GROUP, HEADS, POSITIONS, HEAD_DIM_V, BLOCK_DV, BLOCK_M,
            )  # fmt: skip
        if is_first & (sequence == batch - 1):
            _fill(
                out_ptr, lse_ptr, tl.load(cu_seqlens_q_ptr + batch), tokens_q, tokens_q, heads_q,
                head_k * GROUP, in_group, GROUP, HEADS, POSITIONS, HEAD_DIM_V, BLOCK_DV, BLOCK_M,
            )  # fmt: skip
    if not is_alive:
        return
    # padding around the sequences has no row in per-sequence tensors
    batch_64 = tl.maximum(tl.minimum(sequence, batch - 1), 0).to(tl.int64)
    head_k_64 = head_k.to(tl.int64)
    positions = tile * POSITIONS + m // HEADS
    rows = positions - (seqlen_k - seqlen_q)
    heads = head_k * GROUP + in_group
    inside = (rows >= 0) & (rows < seqlen_q) & (in_group < GROUP)
    cols_d = tl.arange(0, BLOCK_D)
    cols_dv = tl.arange(0, BLOCK_DV)
    q_at = rows.to(tl.int64) * stride_qs + heads.to(tl.int64) * stride_qh
    q = load_tile(
        q_ptr + batch_64 * stride_qb + q_start * stride_qs, q_at, inside, cols_d,
        HEAD_DIM, BLOCK_D, ROW_BYTES, True,
    )  # [M, D]  # fmt: skip
    table_ptr = block_table_ptr
    if PAGE:
        k_base = k_ptr + head_k_64 * stride_kh
        v_base = v_ptr + head_k_64 * stride_vh
        table_ptr += batch_64 * stride_table
    else:
        k_base = k_ptr + batch_64 * stride_kb + k_start * stride_ks + head_k_64 * stride_kh
        v_base = v_ptr + batch_64 * stride_vb + k_start * stride_vs + head_k_64 * stride_vh

    first_position = tl.maximum(tl.maximum(seqlen_k - seqlen_q, 0), tile * POSITIONS)
    last_position = tl.minimum(seqlen_k, (tile + 1) * POSITIONS) - 1
    span_start = tile * POSITIONS // SPAN * SPAN
    bits = positions * 0
    if HEAD_MEMBERS > 1:
        bits = m % HEADS
    elif ROW_MEMBERS > 1:
        bits = tl.maximum(positions - span_start, 0) // BLOCK_Q

    PER_STEP: tl.constexpr = BLOCK_N // BLOCK_K if BLOCK_N > BLOCK_K else 1
    start, whole, rest, rests, cut, cuts = key_walk(
        begin_ptr, whole_ptr, items_ptr, unit, tile, list_rows, last_position, seqlen_k, extent_k,
        POSITIONS, SPAN, BLOCK_K, PER_STEP, IS_CAUSAL, PER_HEAD,
    )  # fmt: skip
    m_i = tl.full([BLOCK_M], NEG_INF, tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for masked in tl.static_range(2):
        if masked == 1:
            first_a, count_a, first_b, count_b = rest, rests, cut, cuts
        else:
            first_a, count_a, first_b, count_b = start, whole, start, cuts * 0
        steps = count_steps(count_a + count_b, BLOCK_N, BLOCK_K)
        first_step = steps * 0
        if IS_SHORT:
            first_step = (steps.to(tl.int64) * split // splits).to(tl.int32)
            steps = (steps.to(tl.int64) * (split + 1) // splits).to(tl.int32)
        acc, l_i, m_i = _attend(
            acc, l_i, m_i, q, k_base, v_base, stride_kb, stride_ks, stride_vb, stride_vs,
            table_ptr, items_ptr, members_ptr, first_step, steps,
            first_a, count_a, first_b, count_b,
            positions, bits, first_position, last_position, span_start, seqlen_k, scale,
            MASKED=masked == 1, FOLD=FOLD, IS_CAUSAL=IS_CAUSAL, PAGE=PAGE, BLOCK_Q=BLOCK_Q,
            BLOCK_K=BLOCK_K, ROW_MEMBERS=ROW_MEMBERS, HEAD_MEMBERS=HEAD_MEMBERS,
            HEAD_DIM=HEAD_DIM, HEAD_DIM_V=HEAD_DIM_V, BLOCK_D=BLOCK_D, BLOCK_DV=BLOCK_DV,
            ROW_BYTES=ROW_BYTES, ROW_BYTES_V=ROW_BYTES_V, BLOCK_N=BLOCK_N, PRECISION=PRECISION,
            UPCAST=UPCAST,
        )  # fmt: skip

    # rows that saw no key: output 0, lse -inf
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    out = acc / l_safe[:, None]
    lse2 = tl.where(l_i == 0.0, NEG_INF, m_i + tl.log2(l_safe))
    if part_out_ptr is not None:
        # a part of the keys: [program without split, split, M], to be merged; every row is written
        first = tl.program_id(0).to(tl.int64) * BLOCK_M
        tl.store(part_lse_ptr + first + m, lse2)
        tl.store(
            part_out_ptr + first * HEAD_DIM_V + (m[:, None] * HEAD_DIM_V + cols_dv[None, :]), out,
            mask=(cols_dv < HEAD_DIM_V)[None, :],
        )  # fmt: skip
    else:
        store_rows(
            out_ptr, lse_ptr, out, lse2, cu_seqlens_q_ptr, batch_64, q_start,
            tile * POSITIONS - (seqlen_k - seqlen_q), head_k * GROUP + pack * HEADS, inside,
            heads_q, tokens_q, HEADS, HEAD_DIM_V, BLOCK_M, BLOCK_DV,
        )  # fmt: skip


class ForwardPlan(Plan):
    """The forward pass of the calls of one form, and what its backward pass needs to know."""

    def __init__(self, x, pattern, options):
        super().__init__(x, pattern, options)
        self._tall = QueryTiles(self, tall_shape(self.platform, *self.choice))
        self._short = QueryTiles(self, short_shape(self.platform, *self.choice[:-1]))
        self._flags = {
            "PAGE": 0 if x.block_table is None else x.k.shape[1],
            "SHORT": SHORT,
            "FOLD": options.softmax_scale >= 0,
        }

    def forward(self, x, walks, bounds):
        """Return ``(out, lse)`` of tensors as ``readable`` leaves them."""
        q = x.q
        tokens_q = q.shape[-3]
        out = q.new_empty((*q.shape[:-1], self.head_dim_v))
        per_head = (self.heads_q, tokens_q)
        lse_shape = per_head if self.is_packed else (self.batch, *per_head)
        lse = q.new_empty(lse_shape, dtype=torch.float32)
        if self.batch == 0:  # a packed call may hold nothing but padding
            return out.zero_(), lse.fill_(-math.inf)
        if walks.tall:
            self.run_tall(x, walks.tall, out, lse)
        if walks.short:
            # a tile may begin ahead of the sequence's first query
            longest = min(bounds.seqlen_q, SHORT)
            tiles = cdiv(longest - 1, self._short.shape.positions) + 1 if longest > 1 else 1
            programs = self.batch * tiles * self._short.units
            splits = self.options.num_splits or self._splits(programs, bounds.seqlen_k, q.device)
            parts = None, None
            if splits > 1:
                rows = programs * splits * self._short.tile.block_m
                parts = (
                    q.new_empty((rows, self.head_dim_v), dtype=torch.float32),
                    q.new_empty((rows,), dtype=torch.float32),
                )
            written = (out, lse, *parts)
            self._run(
                x, self._short, walks.short, written, tiles, splits, programs * splits,
                fills=self.is_packed and not walks.tall,
            )  # fmt: skip
            if splits > 1:
                launch_merge(self, self._short, x, written, tiles, splits, programs)
        return out, lse

    def run_tall(self, x, walk, out, lse):
        """Compute the sequences of many queries."""
        tiles = self._tall.count(x.q.shape[-3], x.k.shape[-3])
        programs = self._tall.programs(tiles)
        self._run(x, self._tall, walk, (out, lse, None, None), tiles, 1, programs)

    def _run(self, x, queries, walk, written, tiles, splits, programs, fills=False):
        is_short = queries is self._short
        launch = self.launch(
            _forward_kernel, (is_short, splits > 1), queries.constants, None, queries.tile,
            **self._flags, IS_SHORT=is_short,
        )  # fmt: skip
        table = dense(x.block_table)
        launch(
            programs,
            (x.q, x.k, x.v, *written, *walk, x.cu_seqlens_q, x.cu_seqlens_k, table),
            (
                self.options.softmax_scale, *self.sizes(x.q, x.k), tiles,
                queries.span(x.k.shape[-3]), splits, int(fills), queries.list_rows, self.extent_k,
                0 if table is None else table.stride(0), *self.strides,
            ),
        )  # fmt: skip

    def _splits(self, programs, seqlen_k, device):
        """Return over how many programs the keys of a short tile are split."""
        pattern, shape = self.pattern, self._short.shape
        blocks = min(pattern.max_row * shape.pack, cdiv(seqlen_k, pattern.block_k))
        steps = cdiv(blocks * pattern.block_k, shape.tile.block_n)
        wanted = cdiv(WAVES * processors(device), max(programs, 1))
        return max(1, min(wanted, steps // LEAST_STEPS, 64))

    backward = run_backward
