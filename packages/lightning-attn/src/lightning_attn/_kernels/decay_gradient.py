"""The gradient of the decays: minus the distance that everything has travelled, summed.

What a token writes is read later, so ``d(loss)/d(decay)`` is ``-sum (i - j) a_ij``, where a_ij is
the share of the loss that went from token j to token i. A path crosses chunks, and every chunk
counts the steps that are taken within it, so that nothing cancels: between two of its tokens; from
the state that arrives to a token; from a token to the state that leaves; and straight through.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attn_common import cdiv
from torch import Tensor

from .._configs import padded_head_dim
from ._linked.primitives import dot
from .common import NUMBERS, POINTERS, Inputs, run
from .launch.runtime import row_bytes, token_strides
from .primitives import (
    dot_add,
    factor,
    load_rows,
    load_rows_transposed,
    locate,
    rate_of,
    slot_of,
    state_offsets,
)
from .schedule import Walk, product_constants, tile_of


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def _decay_gradient_kernel(
    read_ptr, key_ptr, value_ptr, dout_ptr, out_ptr, decay_ptr, first_ptr, last_ptr,
    cu_seqlens_ptr,
    scale,
    batch, heads, tokens, size, pieces,
    stride_rb, stride_rs, stride_rh,
    stride_kb, stride_ks, stride_kh,
    stride_vb, stride_vs, stride_vh,
    stride_db, stride_ds, stride_dh,
    stride_first_b, stride_first_s, stride_first_h, stride_first_d, stride_first_e,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    ROW_BYTES_V: tl.constexpr,
    TERMS: tl.constexpr,
    NARROW: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Write one chunk's sum of steps, of some columns of the state of one head."""
    SPLITS: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    pid = tl.program_id(0)
    cols = pid % SPLITS * BLOCK_E + tl.arange(0, BLOCK_E)
    head = pid // SPLITS % heads
    piece = pid // SPLITS // heads
    sequence, begin, length, place = locate(
        cu_seqlens_ptr, piece, batch, tokens, size, pieces, SEGMENTED=True
    )
    if (length <= 0) | (slot_of(None, sequence, batch) < 0):
        return
    head_64 = head.to(tl.int64)
    sequence_64 = sequence.to(tl.int64)
    if cu_seqlens_ptr is not None:
        sequence_64 = tl.zeros([], tl.int64)
    origin = begin.to(tl.int64)
    q_base = read_ptr + sequence_64 * stride_rb + origin * stride_rs + head_64 * stride_rh
    k_base = key_ptr + sequence_64 * stride_kb + origin * stride_ks + head_64 * stride_kh
    v_base = value_ptr + sequence_64 * stride_vb + origin * stride_vs + head_64 * stride_vh
    dout_base = dout_ptr + sequence_64 * stride_db + origin * stride_ds + head_64 * stride_dh
    index = tl.arange(0, CHUNK)
    inside = index < length
    rows_d = tl.arange(0, BLOCK_D)
    q = load_rows(q_base, index, stride_rs, inside, rows_d, D, ROW_BYTES)  # [C, D]
    k_t = load_rows_transposed(k_base, index, stride_ks, inside, rows_d, D, ROW_BYTES)  # [D, C]
    v_t = load_rows_transposed(v_base, index, stride_vs, inside, cols, E, ROW_BYTES_V)  # [E, C]
    dout = load_rows(dout_base, index, stride_ds, inside, cols, E, ROW_BYTES_V)  # [C, E]

    rate = rate_of(decay_ptr, head)
    apart = tl.maximum(index[:, None] - index[None, :], 0)
    # 0 above the diagonal, where nothing travels
    steps = apart.to(tl.float32) * factor(rate, apart) * scale
    scores = dot(q, k_t, PRECISION, UPCAST)  # [C, C]
    total = tl.sum(tl.sum(steps * scores * dot(dout, v_t, PRECISION, UPCAST), 1), 0)

    # the state that arrives, and the gradient of the one that leaves, have the same strides
    base = sequence_64 * stride_first_b + place.to(tl.int64) * stride_first_s
    base += head_64 * stride_first_h
    offsets = state_offsets(rows_d, cols, stride_first_d, stride_first_e)
    inside_state = (rows_d < D)[:, None] & (cols < E)[None, :]
    state = tl.load(first_ptr + base + offsets, mask=inside_state, other=0.0)  # [D, E]
    zeros = tl.zeros([CHUNK, BLOCK_E], tl.float32)
    reads = dot_add(zeros, q, state, q.dtype, NARROW, PRECISION) * dout.to(tl.float32)
    steps = (index + 1).to(tl.float32) * factor(rate, index + 1) * scale
    total += tl.sum(steps * tl.sum(reads, 1), 0)

    gradient = tl.load(last_ptr + base + offsets, mask=inside_state, other=0.0)  # [D, E]
    k = load_rows(k_base, index, stride_ks, inside, rows_d, D, ROW_BYTES)  # [C, D]
    v = load_rows(v_base, index, stride_vs, inside, cols, E, ROW_BYTES_V)  # [C, E]
    left = tl.maximum(length - 1 - index, 0)
    writes = dot_add(zeros, k, gradient, k.dtype, NARROW, PRECISION) * v.to(tl.float32)
    steps = left.to(tl.float32) * factor(rate, left)
    total += tl.sum(steps * tl.sum(writes, 1), 0)

    through = tl.sum(tl.sum(state * gradient, 1), 0)
    total += length.to(tl.float32) * factor(rate, length) * through
    # every program of the grid has a place of its own
    tl.store(out_ptr + tl.program_id(0).to(tl.int64), total)


def launch_decay_gradient(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    cu_seqlens: Tensor | None,
    initial_state: Tensor | None,
    dfinal_state: Tensor | None,
    scale: float,
) -> Tensor:
    """Run the operator on checked inputs; see ``_ops.py`` for its schema.

    Unlike all else it keeps two states per chunk.
    """
    tile = tile_of(k, k.shape[-1], v.shape[-1])
    size = tile.chunk
    written = Inputs(k, v, decay, cu_seqlens, initial_state).readable
    gradients = Inputs(q, dout, decay, cu_seqlens, dfinal_state).readable
    forward = Walk(written, schedule="parallel", size=size)
    backward = Walk(gradients, write_scale=scale, reverse=True, schedule="parallel", size=size)
    if forward.batch == 0 or q.numel() == 0:
        return torch.zeros_like(decay)
    arriving, leaving = forward.segment_states(written), backward.segment_states(gradients)
    q, dout, k, v = gradients.key, gradients.value, written.key, written.value
    tokens = k.shape[-3]
    segments = forward.segments(tokens)
    pieces = segments * (1 if forward.is_packed else forward.batch)
    splits = cdiv(forward.e, tile.block_e)
    # a slot without tokens writes nothing
    out = torch.zeros((pieces, forward.heads, splits), dtype=torch.float32, device=q.device)
    run(
        _decay_gradient_kernel,
        out.numel(),
        (q, k, v, dout, out, written.decay, arriving.memory, leaving.memory, cu_seqlens),
        (
            scale,
            forward.batch, forward.heads, tokens, size, segments,
            *token_strides(q), *token_strides(k), *token_strides(v), *token_strides(dout),
            *arriving.strides,
        ),
        {
            "D": forward.d,
            "E": forward.e,
            "BLOCK_D": padded_head_dim(forward.d),
            "BLOCK_E": tile.block_e,
            "CHUNK": tile.chunk,
            "ROW_BYTES": row_bytes(q),
            "ROW_BYTES_V": row_bytes(v),
            **product_constants(tile, is_exact=True),
        },
        max(8, tile.num_warps),  # it holds two states
        num_stages=1,
    )  # fmt: skip
    return -out.sum(dim=(0, 2))
