"""The walk: the recurrence over chunks of tokens, with the state in registers.

Every token writes a product ``key^T value`` to a state that decays, and reads ``read . state`` from
it, its own included. One program owns some columns of the state of one head, and walks the chunks
of one piece of tokens. Within a chunk of C tokens, counted from 0, with the state S that arrived::

    out_i = sum_{j <= i} exp(-s (i - j)) (read_i . key_j) value_j  +  exp(-s (i + 1)) read_i S
    S     = exp(-s C) S  +  sum_j exp(-s (C - 1 - j)) key_j^T value_j

Every exponent is a distance, at least 0, so every factor is at most 1 and none can overflow.

This is the forward pass with (q, k, v), and dq with (dout, v, k). Going from the last token to the
first it is dv with (k, q, dout), and dk with (v, dout, q): the state is then its own gradient, and
decays after a token has read, not before it writes. The transpose of a state has its strides
swapped.

The sequential schedule gives a whole sequence to a program. The parallel one cuts sequences into
segments: one walk without reads leaves each segment's own contribution, :mod:`.combine` turns those
into the state before each segment, and a second walk starts from there, all segments at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from attn_common import cdiv, detect
from torch import Tensor

from .._configs import Tile, padded, use_segments, walk_tile
from .combine import launch_combine
from .launch import KINDS, NUMBERS, POINTERS, run, state_strides, token_strides
from .primitives import (
    clear_rows,
    dot,
    dot_add,
    factor,
    load_rows,
    load_rows_transposed,
    locate,
    rate_of,
    settle,
    slot_of,
    state_offsets,
)
from .runtime import aligned, dense, is_interpreted, row_bytes


@triton.jit
def _write(
    state, k_t, v, fading,
    TERMS: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return ``state + k_t @ (fading * v)``, the values as one or two numbers of 16 bits each."""
    faded = v.to(tl.float32) * fading[:, None]
    state = dot_add(state, k_t, faded, v.dtype, NARROW, PRECISION)
    if NARROW and TERMS == 2:
        rest = faded - faded.to(v.dtype).to(tl.float32)
        state = dot_add(state, k_t, rest, v.dtype, NARROW, PRECISION)
    return state


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def _walk_kernel(
    key_ptr, value_ptr, read_ptr, out_ptr, decay_ptr, first_ptr, last_ptr,
    cu_seqlens_ptr, slots_ptr, has_first_ptr,
    read_scale, write_scale,
    batch, heads, tokens, size, pieces,
    stride_rb, stride_rs, stride_rh,
    stride_kb, stride_ks, stride_kh,
    stride_vb, stride_vs, stride_vh,
    stride_first_b, stride_first_s, stride_first_h, stride_first_d, stride_first_e,
    stride_last_b, stride_last_s, stride_last_h, stride_last_d, stride_last_e,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
    ROW_BYTES: tl.constexpr,  # alignment of rows of reads and keys
    ROW_BYTES_V: tl.constexpr,
    REVERSE: tl.constexpr,  # from the last token to the first
    SEGMENTED: tl.constexpr,
    TERMS: tl.constexpr,
    NARROW: tl.constexpr,
    SETTLE: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,  # the interpreter multiplies in fp32
):  # fmt: skip
    SPLITS: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    pid = tl.program_id(0)
    first_col = pid % SPLITS * BLOCK_E
    head = pid // SPLITS % heads
    piece = pid // SPLITS // heads
    sequence, begin, length, place = locate(
        cu_seqlens_ptr, piece, batch, tokens, size, pieces, SEGMENTED
    )
    if SEGMENTED and length <= 0:
        return
    index = tl.arange(0, CHUNK)
    rows_d = tl.arange(0, BLOCK_D)
    cols = first_col + tl.arange(0, BLOCK_E)
    sequence_64 = sequence.to(tl.int64)
    head_64 = head.to(tl.int64)
    out_begin = begin.to(tl.int64)
    if cu_seqlens_ptr is None:
        out_begin += sequence_64 * tokens
    slot = slot_of(slots_ptr, sequence, batch)
    if slot < 0:
        if out_ptr is not None:
            clear_rows(out_ptr, out_begin, length, heads, head_64, cols, E, BLOCK_E, CHUNK)
            if cu_seqlens_ptr is not None and not SEGMENTED:
                # what lies ahead of the first sequence is the business of those who clear the rest
                ahead = tl.where(sequence == batch, tl.load(cu_seqlens_ptr), 0)
                clear_rows(out_ptr, 0, ahead, heads, head_64, cols, E, BLOCK_E, CHUNK)
        return
    if cu_seqlens_ptr is not None:
        sequence_64 = tl.zeros([], tl.int64)
    if SEGMENTED:
        state_b = sequence_64
    else:
        state_b = slot

    inside_state = (rows_d < D)[:, None] & (cols < E)[None, :]
    state = tl.zeros([BLOCK_D, BLOCK_E], tl.float32)
    if first_ptr is not None:
        is_there = inside_state
        if has_first_ptr is not None:
            there = tl.where(tl.load(has_first_ptr + sequence) != 0, D, 0)
            is_there = inside_state & (rows_d < there)[:, None]
        first_base = first_ptr + state_b * stride_first_b + place.to(tl.int64) * stride_first_s
        first_base += head_64 * stride_first_h
        offsets = state_offsets(rows_d, cols, stride_first_d, stride_first_e)
        state = tl.load(first_base + offsets, mask=is_there, other=0.0)

    origin = begin.to(tl.int64)
    k_base = key_ptr + sequence_64 * stride_kb + origin * stride_ks + head_64 * stride_kh
    v_base = value_ptr + sequence_64 * stride_vb + origin * stride_vs + head_64 * stride_vh
    if out_ptr is not None:
        q_base = read_ptr + sequence_64 * stride_rb + origin * stride_rs + head_64 * stride_rh
        # out is contiguous: [tokens, heads, E]
        out_base = out_ptr + (out_begin * heads + head) * E
        stride_out = heads * E

    rate = rate_of(decay_ptr, head)
    # from the token of a column to that of a row; what lies the other way does not count
    apart = index[:, None] - index[None, :]
    if REVERSE:
        apart = -apart
    weights = factor(rate, tl.maximum(apart, 0)) * (read_scale * write_scale)
    weights = tl.where(apart >= 0, weights, 0.0)  # [C, C]
    last_chunk = tl.maximum(length - 1, 0) // CHUNK * CHUNK
    for walked in tl.range(0, length, CHUNK):
        done = walked
        if REVERSE:
            done = last_chunk - walked
        rows = done + index
        inside = rows < length
        count = tl.minimum(CHUNK, length - done)
        k_t = load_rows_transposed(k_base, rows, stride_ks, inside, rows_d, D, ROW_BYTES)  # [D, C]
        v = load_rows(v_base, rows, stride_vs, inside, cols, E, ROW_BYTES_V)  # [C, E]
        # tokens between each one and the ends of the chunk
        until = tl.maximum(count - 1 - index, 0)
        since = index + 1
        if out_ptr is not None:
            q = load_rows(q_base, rows, stride_rs, inside, rows_d, D, ROW_BYTES)  # [C, D]
            arrival = factor(rate, until if REVERSE else since) * read_scale
            zeros = tl.zeros([CHUNK, BLOCK_E], tl.float32)
            out = dot_add(zeros, q, state, q.dtype, NARROW, PRECISION) * arrival[:, None]
            scores = dot(q, k_t, PRECISION, UPCAST) * weights  # [C, C]
            out = dot_add(out, scores, v, v.dtype, NARROW, PRECISION)  # [C, E]
            out_ptrs = out_base + (rows.to(tl.int64) * stride_out)[:, None] + cols[None, :]
            mask = inside[:, None] & (cols < E)[None, :]
            tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)
        fading = factor(rate, since if REVERSE else until) * write_scale
        state = _write(state * factor(rate, count), k_t, v, fading, TERMS, NARROW, PRECISION)
        state = settle(state, SETTLE)

    if last_ptr is not None:
        last_base = last_ptr + state_b * stride_last_b + place.to(tl.int64) * stride_last_s
        last_base += head_64 * stride_last_h
        offsets = state_offsets(rows_d, cols, stride_last_d, stride_last_e)
        tl.store(last_base + offsets, state, mask=inside_state)


@dataclass
class States:
    """A state per piece, with the strides of sequence, segment, head, d and e."""

    memory: Tensor | None
    strides: tuple[int, int, int, int, int]

    @classmethod
    def of(cls, state: Tensor | None) -> States:
        """Describe ``[batch, heads, d, e]``."""
        return cls(state, state_strides(state))

    @property
    def transposed(self) -> States:
        *rest, stride_d, stride_e = self.strides
        return States(self.memory, (*rest, stride_e, stride_d))  # type: ignore[arg-type]


class Walk:
    """One recurrence: what is written to the state, in which direction, and where it starts.

    Args:
        key: ``[batch, seqlen, heads, d]``, or packed.
        value: ``[batch, seqlen, heads, e]``, or packed.
        decay: fp32 ``[heads]``.
        cu_seqlens: where packed sequences begin.
        first: the states to start from.
        last: where the states at the end go.
        slots: the place of each sequence among ``first`` and ``last``.
        has_first: whether each sequence has a state to start from.
        write_scale: factor of what is written.
        reverse: from the last token to the first.
        schedule: as the public functions take it.
        size: tokens of a segment. Default: the tile's.
    """

    def __init__(
        self,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        cu_seqlens: Tensor | None,
        first: Tensor | None,
        last: Tensor | None,
        *,
        slots: Tensor | None = None,
        has_first: Tensor | None = None,
        write_scale: float = 1.0,
        reverse: bool = False,
        schedule: str = "auto",
        size: int | None = None,
    ) -> None:
        self.key, self.value, self.decay = aligned(key), aligned(value), dense(decay)
        self.cu_seqlens, self.slots = cu_seqlens, dense(slots)
        # the interpreter has no pointers to booleans
        self.has_first = None if has_first is None else dense(has_first).view(torch.uint8)
        self.first, self.last = first, last
        self.write_scale, self.reverse = write_scale, reverse
        self.tokens, self.heads, self.d = key.shape[-3:]
        self.e = value.shape[-1]
        self.batch = key.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        self.tile = tile_of(key, self.d, self.e)
        packed = cu_seqlens is not None
        all_tokens = self.tokens if packed else self.batch * self.tokens
        self.size = self.tile.segment if size is None else size
        self.segmented = use_segments(
            schedule, self.tile, self.e, self.heads, max(1, self.batch), all_tokens
        )
        # of a sequence of fixed length; of packed ones, the slots that hold all segments
        self.segments = (
            self.tokens // self.size + self.batch + 2 if packed else cdiv(self.tokens, self.size)
        )

    def state_memory(self) -> States:
        """Return memory for the state before each segment."""
        pieces = self.segments if self.cu_seqlens is not None else self.segments * self.batch
        shape = (pieces, self.heads, self.d, self.e)
        memory = torch.empty(shape, dtype=torch.float32, device=self.key.device)
        per_piece, per_head, per_row, _ = memory.stride()
        per_sequence = 0 if self.cu_seqlens is not None else self.segments * per_piece
        return States(memory, (per_sequence, per_piece, per_head, per_row, 1))

    def segment_states(self, states: States | None = None) -> States:
        """Fill and return the states before each segment; the final ones go to ``last``."""
        states = states or self.state_memory()
        self._launch(None, None, States.of(None), states, 1.0, segmented=True)
        launch_combine(self, states)
        return states

    def out(self, read: Tensor, read_scale: float, states: States | None = None) -> Tensor:
        """Return what every token reads, in the dtype of the inputs.

        With ``states``, those before each segment; else ``first``, and then ``last`` is filled.
        """
        shape = (*self.value.shape[:-1], self.e)
        out = torch.empty(shape, dtype=self.value.dtype, device=self.value.device)
        self.fill(out, read, read_scale, states)
        return out

    def fill(
        self, out: Tensor, read: Tensor, read_scale: float, states: States | None = None
    ) -> None:
        """Write to a contiguous ``out`` what every token reads; see :meth:`out`."""
        if self.batch == 0:  # a packed call may hold nothing but padding
            out.zero_()
            return
        read = aligned(read)
        if states is None and self.segmented:
            states = self.segment_states()
        if states is None:
            first, last = States.of(self.first), States.of(self.last)
            self._launch(read, out, first, last, read_scale, segmented=False)
        else:
            self._launch(read, out, states, States.of(None), read_scale, segmented=True)

    def finish(self) -> None:
        """Fill ``last`` alone."""
        if self.batch == 0:
            return
        if self.segmented:
            self.segment_states()
        else:
            first, last = States.of(self.first), States.of(self.last)
            self._launch(None, None, first, last, 1.0, segmented=False)

    def _launch(
        self,
        read: Tensor | None,
        out: Tensor | None,
        first: States,
        last: States,
        read_scale: float,
        *,
        segmented: bool,
    ) -> None:
        packed = self.cu_seqlens is not None
        size = self.size if segmented else self.tokens
        pieces = self.segments if segmented else 1
        # whole packed sequences, and all padding as one more
        programs = pieces if segmented and packed else pieces * self.batch
        programs += 1 if packed and not segmented else 0
        has_first = None if segmented else self.has_first
        run(
            _walk_kernel,
            programs * self.heads * cdiv(self.e, self.tile.block_e),
            (
                self.key, self.value, read, out, self.decay, first.memory, last.memory,
                self.cu_seqlens, self.slots, has_first,
            ),
            (
                read_scale, self.write_scale,
                self.batch, self.heads, self.tokens, size, pieces,
                *((0, 0, 0) if read is None else token_strides(read)),
                *token_strides(self.key), *token_strides(self.value),
                *first.strides, *last.strides,
            ),
            {
                "D": self.d,
                "E": self.e,
                "BLOCK_D": padded(self.d),
                "BLOCK_E": self.tile.block_e,
                "CHUNK": self.tile.chunk,
                "ROW_BYTES": row_bytes(self.key),
                "ROW_BYTES_V": row_bytes(self.value),
                "REVERSE": self.reverse,
                "SEGMENTED": segmented,
                **product_constants(self.tile),
                "SETTLE": detect(self.key.device).is_hopper,
            },
            self.tile.num_warps,
            self.tile.num_stages,
        )  # fmt: skip


def tile_of(key: Tensor, d: int, e: int) -> Tile:
    """Return the tile for tensors like ``key``."""
    return walk_tile(detect(key.device), d, e, KINDS[key.dtype])


def product_constants(tile: Tile) -> dict[str, Any]:
    """Return how a kernel multiplies."""
    return {
        "TERMS": tile.terms or 0,
        "NARROW": tile.terms is not None,
        "PRECISION": tile.precision,
        "UPCAST": is_interpreted(),
    }
