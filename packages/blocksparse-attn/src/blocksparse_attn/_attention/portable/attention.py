"""The entry of the portable attention kernels.

A launch makes the output and the LSE, or dq, or dk and dv. For dk and dv a program owns a tile of
keys; otherwise it owns a tile of queries.
"""

import triton
import triton.language as tl

from .backward_dkdv import make_dkdv
from .backward_dq import make_dq
from .forward import fill_padding, make_output
from .merge import merge_parts
from .schedule import key_walk, locate_queries, rows_of, tile_rows
from .structures import Grid, Keys, Numbers, Tensors


@triton.jit
def _key_bases(work, batch, tensors, numbers, OPTIONS: tl.constexpr):
    """Return the pointers to a head's keys and values: of the sequence, or of the whole cache."""
    k_base, v_base = tensors.k_ptr, tensors.v_ptr
    if not OPTIONS.PAGE:
        k_base += batch * numbers.stride_kb + work.k_start * numbers.stride_ks
        v_base += batch * numbers.stride_vb + work.k_start * numbers.stride_vs
    head = (work.unit // OPTIONS.PACKS).to(tl.int64)
    return k_base + head * numbers.stride_kh, v_base + head * numbers.stride_vh


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
    rows = tile_rows(work, numbers.batch, OPTIONS)
    if OPTIONS.MERGES:
        merge_parts(work, rows, tensors, numbers, OPTIONS)
    else:
        _attend(work, rows, tensors, numbers, OPTIONS)


@triton.jit
def _attend(work, rows, tensors, numbers, OPTIONS: tl.constexpr):
    """Walk the keys of a tile of queries, to make the output or dq."""
    k_base, v_base = _key_bases(work, rows.batch, tensors, numbers, OPTIONS)
    table_ptr = tensors.block_table_ptr
    if OPTIONS.PAGE:
        table_ptr += rows.batch * numbers.stride_table
    keys_at = Keys(k_base, v_base, table_ptr, 0, 0)
    standing = rows_of(work, rows.row + work.diagonal, tensors, numbers, OPTIONS)
    walk = key_walk(work, standing.last_position, tensors, numbers, OPTIONS)
    if tensors.dout_ptr is None:
        make_output(work, rows, walk, keys_at, standing, tensors, numbers, OPTIONS)
    else:
        make_dq(work, rows, walk, keys_at, standing, tensors, numbers, OPTIONS)


@triton.jit(do_not_specialize=Numbers._fields, do_not_specialize_on_alignment=Tensors._fields)
def attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse2_ptr,
    delta_ptr,
    out_ptr,
    dv_ptr,
    lse_ptr,
    part_out_ptr,
    part_lse_ptr,
    begin_ptr,
    whole_ptr,
    items_ptr,
    members_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    block_table_ptr,
    rule_ptr,
    scale,
    batch,
    heads_q,
    tokens_q,
    tokens_k,
    tiles,
    span,
    splits,
    fills,
    list_rows,
    list_stride,
    extent,
    stride_table,
    rule_stride,
    stride_dob,
    stride_dos,
    stride_doh,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_vb,
    stride_vs,
    stride_vh,
    OPTIONS: tl.constexpr,
):
    """``out = softmax(scale * q k^T) v`` over the kept blocks, and ``lse`` of each row.

    With ``dout``: ``dq = scale * ds k``, or ``dk = scale * ds^T q`` and ``dv = p^T dout``, where
    ``p = exp(scale * q k^T - lse)`` and ``ds = p * (dout v^T - delta)``.
    """
    tensors = Tensors(
        q_ptr,
        k_ptr,
        v_ptr,
        dout_ptr,
        lse2_ptr,
        delta_ptr,
        out_ptr,
        dv_ptr,
        lse_ptr,
        part_out_ptr,
        part_lse_ptr,
        begin_ptr,
        whole_ptr,
        items_ptr,
        members_ptr,
        cu_seqlens_q_ptr,
        cu_seqlens_k_ptr,
        block_table_ptr,
        rule_ptr,
    )
    numbers = Numbers(
        scale,
        batch,
        heads_q,
        tokens_q,
        tokens_k,
        tiles,
        span,
        splits,
        fills,
        list_rows,
        list_stride,
        extent,
        stride_table,
        rule_stride,
        stride_dob,
        stride_dos,
        stride_doh,
        stride_qb,
        stride_qs,
        stride_qh,
        stride_kb,
        stride_ks,
        stride_kh,
        stride_vb,
        stride_vs,
        stride_vh,
    )
    if OPTIONS.BY_KEY:
        make_dkdv(tensors, numbers, OPTIONS)
    else:
        _own_queries(tensors, numbers, OPTIONS)
