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

The state is held turned, [E, D]: so products read it where others leave it, in registers.

The sequential schedule gives a whole sequence to a program. The parallel one cuts sequences into
segments: one walk without reads leaves each segment's own contribution, :mod:`.combine` turns those
into the state before each segment, and a second walk starts from there, all segments at once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from attn_common import cdiv, detect
from torch import Tensor

from .._configs import Tile, WalkPlan, padded, plan_walk, walk_tile
from .._forms import LIMIT
from .combine import launch_combine
from .launch import KINDS, NUMBERS, POINTERS, Inputs, States, token_strides
from .primitives import (
    clear_rows,
    dot,
    dot_add,
    dot_apart,
    factor,
    load_rows,
    locate,
    rate_of,
    settle,
    slot_of,
    state_offsets,
)
from .runtime import Launch, is_interpreted, row_bytes


@triton.jit
def _written(
    v_t, k, fading,
    TERMS: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return ``(fading * v_t) @ k``, the values as one or two numbers of 16 bits each."""
    faded = v_t.to(tl.float32) * fading[None, :]
    if NARROW and TERMS == 2:
        # the upper half of a number's bits is one of 16 bits
        upper = (faded.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        written = dot_apart(upper, k, v_t.dtype, NARROW, PRECISION)
        return dot_add(written, faded - upper, k, v_t.dtype, NARROW, PRECISION)
    return dot_apart(faded, k, v_t.dtype, NARROW, PRECISION)


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

    inside_state = (cols < E)[:, None] & (rows_d < D)[None, :]
    state = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
    if first_ptr is not None:
        is_there = inside_state
        if has_first_ptr is not None:
            there = tl.where(tl.load(has_first_ptr + sequence) != 0, D, 0)
            is_there = inside_state & (rows_d < there)[None, :]
        first_base = first_ptr + state_b * stride_first_b + place.to(tl.int64) * stride_first_s
        first_base += head_64 * stride_first_h
        offsets = state_offsets(cols, rows_d, stride_first_e, stride_first_d)
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
    # from the token of a row to that of a column; what lies the other way does not count
    apart = index[None, :] - index[:, None]
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
        k = load_rows(k_base, rows, stride_ks, inside, rows_d, D, ROW_BYTES)  # [C, D]
        v = load_rows(v_base, rows, stride_vs, inside, cols, E, ROW_BYTES_V)
        v_t = tl.trans(v)  # [E, C]
        # tokens between each one and the ends of the chunk
        until = tl.maximum(count - 1 - index, 0)
        since = index + 1
        if out_ptr is not None:
            q = load_rows(q_base, rows, stride_rs, inside, rows_d, D, ROW_BYTES)
            q_t = tl.trans(q)  # [D, C]
            arrival = factor(rate, until if REVERSE else since) * read_scale
            zeros = tl.zeros([BLOCK_E, CHUNK], tl.float32)
            out = dot_add(zeros, state, q_t, q_t.dtype, NARROW, PRECISION) * arrival[None, :]
            scores = dot(k, q_t, PRECISION, UPCAST) * weights  # [C, C]
            out = dot_add(out, v_t, scores, v_t.dtype, NARROW, PRECISION)  # [E, C]
            begins = out_base + rows.to(tl.int64)[None, :] * stride_out
            begins = tl.multiple_of(begins, [ROW_BYTES_V, ROW_BYTES_V])
            mask = inside[None, :] & (cols < E)[:, None]
            tl.store(begins + cols[:, None], out.to(out_ptr.dtype.element_ty), mask=mask)
        fading = factor(rate, since if REVERSE else until) * write_scale
        written = _written(v_t, k, fading, TERMS, NARROW, PRECISION)
        state = state * factor(rate, count) + settle(written, SETTLE)

    if last_ptr is not None:
        last_base = last_ptr + state_b * stride_last_b + place.to(tl.int64) * stride_last_s
        last_base += head_64 * stride_last_h
        offsets = state_offsets(cols, rows_d, stride_last_e, stride_last_d)
        tl.store(last_base + offsets, state, mask=inside_state)


class Walk:
    """One recurrence: what is written to the state, in which direction, and where it starts.

    It holds no tensor, and serves all calls whose tensors differ in data alone, or, packed, in the
    number of tokens.

    Args:
        x: tensors to begin with, readable.
        write_scale: factor of what is written.
        reverse: from the last token to the first.
        schedule: as the public functions take it.
        size: tokens of a segment, of the parallel schedule, whose states are asked for. Default:
            what the schedule says.
        is_exact: calls have a ``last``, even if ``x`` has none.
    """

    def __init__(
        self,
        x: Inputs,
        *,
        write_scale: float = 1.0,
        reverse: bool = False,
        schedule: str = "auto",
        size: int | None = None,
        is_exact: bool = False,
    ) -> None:
        self.write_scale, self.reverse = write_scale, reverse
        self.heads, self.d = x.key.shape[-2:]
        self.e = x.value.shape[-1]
        self.is_packed = x.cu_seqlens is not None
        self.batch = x.key.shape[0] if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
        # states that nobody sees are rounded to 16 bits as they are read: no need to write finer
        self._is_exact = is_exact or x.last is not None or size is not None
        self._tile = tile_of(x.key, self.d, self.e)
        self._schedule, self._asked_size = schedule, size
        self._plans: dict[int, WalkPlan] = {}
        # by what differs between the launches of one form; the strides of what has a row per token
        self.launches: dict[Any, Launch] = {}
        self._strides: dict[bool, tuple[int, ...]] = {}

    def plan(self, tokens: int) -> WalkPlan:
        """Return how it is run for a number of tokens, of a sequence or of all packed ones."""
        plan = self._plans.get(tokens)
        if plan is None:
            all_tokens = tokens if self.is_packed else tokens * self.batch
            batch = max(1, self.batch)
            plan = plan_walk(self._schedule, self._tile, self.e, self.heads, batch, all_tokens)
            if self._asked_size is not None:
                plan = replace(plan, size=self._asked_size)
            if len(self._plans) >= LIMIT:
                self._plans.clear()
            self._plans[tokens] = plan
        return plan

    def segments(self, tokens: int) -> int:
        """Segments of a sequence of fixed length; of packed ones, the slots that hold all."""
        size = self.plan(tokens).size
        return tokens // size + self.batch + 2 if self.is_packed else cdiv(tokens, size)

    def segment_states(self, x: Inputs, states: States | None = None) -> States:
        """Fill and return the states before each segment; the final ones go to ``last``."""
        states = states or self._state_memory(x)
        self._launch(x, None, None, States.of(None), states, 1.0, segmented=True)
        launch_combine(self, x, states)
        return states

    def out(
        self, x: Inputs, read: Tensor, read_scale: float, states: States | None = None
    ) -> Tensor:
        """Return what every token reads, in the dtype of the inputs.

        With ``states``, those before each segment; else ``first``, and then ``last`` is filled.
        """
        shape = (*x.value.shape[:-1], self.e)
        out = torch.empty(shape, dtype=x.value.dtype, device=x.value.device)
        self.fill(x, out, read, read_scale, states)
        return out

    def fill(
        self,
        x: Inputs,
        out: Tensor,
        read: Tensor,
        read_scale: float,
        states: States | None = None,
    ) -> None:
        """Write to a contiguous ``out`` what every token reads; see :meth:`out`."""
        if self.batch == 0:  # a packed call may hold nothing but padding
            out.zero_()
            return
        if states is None and self.plan(x.key.shape[-3]).segmented:
            states = self.segment_states(x)
        if states is None:
            first, last = States.of(x.first), States.of(x.last)
            self._launch(x, read, out, first, last, read_scale, segmented=False)
        else:
            self._launch(x, read, out, states, States.of(None), read_scale, segmented=True)

    def finish(self, x: Inputs) -> None:
        """Fill ``last`` alone."""
        if self.batch == 0:
            return
        if self.plan(x.key.shape[-3]).segmented:
            self.segment_states(x)
        else:
            self._launch(x, None, None, States.of(x.first), States.of(x.last), 1.0, segmented=False)

    def _state_memory(self, x: Inputs) -> States:
        """Return memory for the state before each segment."""
        segments = self.segments(x.key.shape[-3])
        pieces = segments if self.is_packed else segments * self.batch
        shape = (pieces, self.heads, self.d, self.e)
        memory = torch.empty(shape, dtype=torch.float32, device=x.key.device)
        per_piece, per_head, per_row, _ = memory.stride()
        per_sequence = 0 if self.is_packed else segments * per_piece
        return States(memory, (per_sequence, per_piece, per_head, per_row, 1))

    def _launch(
        self,
        x: Inputs,
        read: Tensor | None,
        out: Tensor | None,
        first: States,
        last: States,
        read_scale: float,
        *,
        segmented: bool,
    ) -> None:
        tokens = x.key.shape[-3]
        plan = self.plan(tokens)
        size, pieces = (plan.size, self.segments(tokens)) if segmented else (tokens, 1)
        # whole packed sequences, and all padding as one more
        programs = pieces if segmented and self.is_packed else pieces * self.batch
        programs += 1 if self.is_packed and not segmented else 0
        has_first = None if segmented else x.has_first
        kind = (
            segmented, plan.tile.block_e, read is None, first.memory is None, last.memory is None,
            has_first is None,
        )  # fmt: skip
        launch = self.launches.get(kind)
        if launch is None:
            is_exact = self._is_exact and last.memory is not None
            launch = Launch(_walk_kernel, self._constants(x, plan.tile, segmented, is_exact))
            self.launches[kind] = launch
        strides = self._strides.get(read is None)
        if strides is None:
            strides = self._strides[read is None] = (
                *((0, 0, 0) if read is None else token_strides(read)),
                *token_strides(x.key), *token_strides(x.value),
            )  # fmt: skip
        launch(
            programs * self.heads * cdiv(self.e, plan.tile.block_e),
            (
                x.key, x.value, read, out, x.decay, first.memory, last.memory,
                x.cu_seqlens, x.slots, has_first,
            ),
            (
                read_scale, self.write_scale, self.batch, self.heads, tokens, size, pieces,
                *strides, *first.strides, *last.strides,
            ),
        )  # fmt: skip

    def _constants(self, x: Inputs, tile: Tile, segmented: bool, is_exact: bool) -> dict[str, Any]:
        return {
            "D": self.d,
            "E": self.e,
            "BLOCK_D": padded(self.d),
            "BLOCK_E": tile.block_e,
            "CHUNK": tile.chunk,
            "ROW_BYTES": row_bytes(x.key),
            "ROW_BYTES_V": row_bytes(x.value),
            "REVERSE": self.reverse,
            "SEGMENTED": segmented,
            **product_constants(tile, is_exact),
            "SETTLE": detect(x.key.device).is_hopper,
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
        }


def tile_of(key: Tensor, d: int, e: int) -> Tile:
    """Return the tile for tensors like ``key``."""
    return walk_tile(detect(key.device), d, e, KINDS[key.dtype])


def product_constants(tile: Tile, is_exact: bool) -> dict[str, Any]:
    """Return how a kernel multiplies; ``is_exact``: what it writes to states is asked for."""
    return {
        "TERMS": (tile.terms if is_exact else 1) if tile.terms else 0,
        "NARROW": tile.terms is not None,
        "PRECISION": tile.precision,
        "UPCAST": is_interpreted(),
    }
