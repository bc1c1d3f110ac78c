"""Launchers of walks, for calls of one form."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from attn_common import cdiv, detect
from torch import Tensor

from ..._linked.host.forms import Memory, interpreted
from ..._linked.launch.entries import flat
from ..._linked.launch.kernels import Kernel
from ..._linked.launch.runtime import Launch, aligned, dense, row_bytes, token_strides
from ..._linked.portable.strides import Strides
from ..call import Inputs
from ..tiles import Tile, WalkPlan, padded_head_dim, plan_walk, takes_hopper_walk, walk_tile
from .arguments import (
    CombineNumbers,
    Lengths,
    Numbers,
    Options,
    Rows,
    RowStrides,
    Scales,
    StateStrides,
    StateTile,
    Tensors,
    WalkTile,
)

combine_kernel = Kernel(__package__, ".combine", "combine_kernel")
walk_kernel = Kernel(__package__, ".walk", "walk_kernel")

KINDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# the tile of a state per program of the scan over segments
BLOCK_ROWS, BLOCK_COLS = 16, 64


# a launch with its grid, tensors and numbers; and without tensors
Call = tuple[Launch, int, tuple[Any, ...], tuple[float, ...]]
Prepared = tuple[Launch, int, tuple[float, ...]]


def launch_all(calls: Iterable[Call]) -> None:
    """Make the launches, in order."""
    for launch, grid, tensors, numbers in calls:
        launch(grid, tensors, numbers)


class States(NamedTuple):
    """A state per piece of tokens."""

    memory: Tensor | None
    strides: StateStrides

    @classmethod
    def of(cls, state: Tensor | None) -> States:
        """Describe ``[batch, heads, d, e]``."""
        if state is None:
            return NO_STATES
        batch, head, row, column = state.stride()
        return cls(state, StateStrides(batch, 0, head, row, column))

    @property
    def transposed(self) -> States:
        strides = self.strides
        return States(self.memory, strides._replace(d=strides.e, e=strides.d))


NO_STATES = States(None, StateStrides(0, 0, 0, 0, 0))


def readable(x: Inputs) -> Inputs:
    """Return the tensors, copied if kernels cannot read them."""
    return x._replace(
        read=None if x.read is None else aligned(x.read),
        key=aligned(x.key),
        value=aligned(x.value),
        decay=x.decay.contiguous(),
        slots=dense(x.slots),
        has_first=dense(x.has_first),
    )


class Walk:
    """The launcher of one recurrence, without tensors of its own.

    It serves all calls whose tensors differ only in data or, if packed, in the number of tokens.

    Args:
        x: readable tensors of the first call.
        write_scale: factor of the writes.
        reverse: from the last token to the first.
        schedule: the schedule of the public functions.
        size: tokens per segment of the parallel schedule if segments' states are needed. Default:
            chosen by the schedule.
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
        # states that are not returned are rounded to 16 bits when read: write no more precision
        self._is_exact = is_exact or x.last is not None or size is not None
        self._tile = tile_of(x.key, self.d, self.e)
        dims = self.d, self.e, KINDS[x.key.dtype]
        # segments of a given size may not be whole chunks
        self._is_hopper = size is None and takes_hopper_walk(detect(x.key.device), *dims)
        self._schedule, self._asked_size = schedule, size
        # by tokens
        self._plans: Memory[WalkPlan] = Memory()
        # by the differences between launches of one form
        self._launches: dict[Hashable, Launch] = {}
        # launches, their grids and their numbers, by what these depend on
        self._prepared: Memory[Prepared] = Memory()
        if self._is_hopper:
            from ..hopper.launch import HopperWalk  # Triton may have no Gluon

            self._hopper = HopperWalk(self.d, self.e, reverse, self.is_packed)

    def plan(self, tokens: int) -> WalkPlan:
        """Return tile and schedule for a number of tokens per sequence, packed: in total."""
        plan = self._plans.get(tokens)
        if plan is None:
            all_tokens = tokens if self.is_packed else tokens * self.batch
            batch = max(1, self.batch)
            plan = plan_walk(self._schedule, self._tile, self.e, self.heads, batch, all_tokens)
            if self._asked_size is not None:
                plan = replace(plan, size=self._asked_size)
            self._plans.keep(tokens, plan)
        return plan

    def segments(self, tokens: int) -> int:
        """Return the segments of a fixed-length sequence; packed: slots for all segments."""
        size = self.plan(tokens).size
        return tokens // size + self.batch + 2 if self.is_packed else cdiv(tokens, size)

    def reads(
        self, x: Inputs, out: Tensor, read_scale: float, states: States | None = None
    ) -> tuple[Call, ...]:
        """Return the launches that write the reads of all tokens to a contiguous ``out``.

        They start from ``states`` before each segment, or from ``first``, and then fill ``last``.
        """
        if self.batch == 0:  # a packed call may hold only padding
            out.zero_()
            return ()
        before: tuple[Call, ...] = ()
        if states is None:
            if not self.plan(x.key.shape[-3]).segmented:
                first, last = States.of(x.first), States.of(x.last)
                return (self._pass(x, out, first, last, read_scale, segmented=False),)
            states = self._state_memory(x)
            before = self._state_calls(x, states)
        return *before, self._pass(x, out, states, NO_STATES, read_scale, segmented=True)

    def out(self, x: Inputs, read_scale: float, states: States | None = None) -> Tensor:
        """Return the reads of all tokens, in the dtype of the inputs; see :meth:`reads`."""
        shape = (*x.value.shape[:-1], self.e)
        out = torch.empty(shape, dtype=x.value.dtype, device=x.value.device)
        launch_all(self.reads(x, out, read_scale, states))
        return out

    def segment_states(self, x: Inputs, states: States | None = None) -> States:
        """Fill and return the states before each segment; fill ``last``."""
        states = states or self._state_memory(x)
        launch_all(self._state_calls(x, states))
        return states

    def written_states(self, x: Inputs, slots: Tensor | None) -> States:
        """Return the state that each segment writes from zero; fill ``last`` except slots of -1."""
        states = self._state_memory(x)
        written = self._pass(x, None, NO_STATES, states, 1.0, segmented=True)
        launch_all([written, self._combine(x._replace(slots=slots), states, replace=False)])
        return states

    def combine(self, x: Inputs, states: States) -> None:
        """Turn the states that segments wrote into the states before them; fill ``last``."""
        launch_all([self._combine(x, states)])

    def finish(self, x: Inputs) -> None:
        """Fill only ``last``."""
        if self.batch == 0:
            return
        if self.plan(x.key.shape[-3]).segmented:
            self.segment_states(x)
        else:
            first, last = States.of(x.first), States.of(x.last)
            launch_all([self._pass(x, None, first, last, 1.0, segmented=False)])

    def _state_memory(self, x: Inputs) -> States:
        """Return memory for the state before each segment."""
        segments = self.segments(x.key.shape[-3])
        pieces = segments if self.is_packed else segments * self.batch
        shape = (pieces, self.heads, self.d, self.e)
        memory = torch.empty(shape, dtype=torch.float32, device=x.key.device)
        per_piece, per_head, per_row, _ = memory.stride()
        per_sequence = 0 if self.is_packed else segments * per_piece
        return States(memory, StateStrides(per_sequence, per_piece, per_head, per_row, 1))

    def _state_calls(self, x: Inputs, states: States) -> tuple[Call, Call]:
        """Return the launches that fill the states before each segment, and ``last``."""
        written = self._pass(x, None, NO_STATES, states, 1.0, segmented=True)
        return written, self._combine(x, states)

    def _pass(
        self,
        x: Inputs,
        out: Tensor | None,
        first: States,
        last: States,
        read_scale: float,
        *,
        segmented: bool,
    ) -> Call:
        """Return one launch of the walk; without ``out`` it has no reads."""
        read = None if out is None else x.read
        tokens = x.key.shape[-3]
        has_first = None if segmented else x.has_first
        tensors = Tensors(x.decay, first.memory, last.memory, x.cu_seqlens, x.slots, has_first)
        is_hopper = self._is_hopper and tokens > 0  # an empty tensor has no map
        kind = is_hopper, segmented, read is None, x.last is None, *[t is None for t in tensors]
        form = tokens, kind, read_scale, first.strides, last.strides
        prepared = self._prepared.get(form)
        if prepared is None:
            is_exact = self._is_exact and last.memory is not None
            launch, lengths, grid = self._launch_of(
                x, kind, segmented=segmented, has_reads=read is not None, is_exact=is_exact
            )
            scales = Scales(read_scale, self.write_scale)
            given = flat(Numbers(scales, lengths, first.strides, last.strides))
            if not is_hopper:
                read_strides = Strides(0, 0, 0) if read is None else strides_of(read)
                given += flat(RowStrides(strides_of(x.key), strides_of(x.value), read_strides))
            prepared = self._prepared.keep(form, (launch, grid, given))
        launch, grid, given = prepared
        if is_hopper:
            maps = self._hopper.maps(x.key, x.value, read, out)
            return launch, grid, (*maps, out, *tensors), given
        return launch, grid, (*Rows(x.key, x.value, read, out), *tensors), given

    def _launch_of(
        self, x: Inputs, kind: Hashable, *, segmented: bool, has_reads: bool, is_exact: bool
    ) -> tuple[Launch, Lengths, int]:
        """Return the launch of a kind, its lengths and its grid."""
        tokens = x.key.shape[-3]
        plan = self.plan(tokens)
        tile = plan.tile
        size, pieces = (plan.size, self.segments(tokens)) if segmented else (tokens, 1)
        lengths = Lengths(self.batch, self.heads, tokens, size, pieces)
        # whole packed sequences have one more program, for all padding
        programs = pieces if segmented and self.is_packed else pieces * self.batch
        programs += 1 if self.is_packed and not segmented else 0
        grid = programs * self.heads * cdiv(self.e, tile.block_e)
        form = tile.block_e, kind
        launch = self._launches.get(form)
        if launch is None:
            if self._is_hopper and tokens > 0:
                # without reads and ``last``, the last segment's state is not needed
                skip = segmented and not has_reads and x.last is None
                launch = self._hopper.launch(tile, segmented, skip, is_exact)
            else:
                constants = {
                    "OPTIONS": Options(self.d, self.e, self.reverse, segmented),
                    "TILE": tile_constants(tile, x.key, x.value, is_exact),
                    "num_warps": tile.num_warps,
                    "num_stages": tile.num_stages,
                }
                launch = Launch(walk_kernel, constants)
            self._launches[form] = launch
        return launch, lengths, grid

    def _combine(self, x: Inputs, states: States, *, replace: bool = True) -> Call:
        """Return the launch of the scan over segments; not ``replace``: it only fills ``last``."""
        tensors = Tensors(x.decay, x.first, x.last, x.cu_seqlens, x.slots, x.has_first)
        tokens = x.key.shape[-3]
        first, last = States.of(x.first).strides, States.of(x.last).strides
        kind = "combine", replace, *[t is None for t in tensors]
        form = tokens, kind, states.strides, first, last
        prepared = self._prepared.get(form)
        if prepared is None:
            block_d, block_e = min(BLOCK_ROWS, self.d), min(BLOCK_COLS, 16 * (self.e // 16))
            block_e = 1 << (block_e.bit_length() - 1)
            grid = self.batch * self.heads * cdiv(self.d, block_d) * cdiv(self.e, block_e)
            launch = self._launches.get(kind)
            if launch is None:
                constants = {
                    "OPTIONS": Options(self.d, self.e, self.reverse, REPLACE=replace),
                    "TILE": StateTile(block_d, block_e),
                    "num_warps": 4,
                    "num_stages": 2,
                }
                launch = self._launches[kind] = Launch(combine_kernel, constants)
            size, segments = self.plan(tokens).size, self.segments(tokens)
            lengths = Lengths(self.batch, self.heads, tokens, size, segments)
            given = flat(CombineNumbers(lengths, states.strides, first, last))
            prepared = self._prepared.keep(form, (launch, grid, given))
        launch, grid, given = prepared
        return launch, grid, (states.memory, *tensors), given


def tile_of(key: Tensor, d: int, e: int) -> Tile:
    """Return the tile for tensors like ``key``."""
    return walk_tile(detect(key.device), d, e, KINDS[key.dtype])


def tile_constants(tile: Tile, key: Tensor, value: Tensor, is_exact: bool) -> WalkTile:
    """Return a kernel's constants; ``is_exact``: its states are returned."""
    return WalkTile(
        BLOCK_D=padded_head_dim(key.shape[-1]),
        BLOCK_E=tile.block_e,
        CHUNK=tile.chunk,
        ROW_BYTES=row_bytes(key),
        ROW_BYTES_V=row_bytes(value),
        TERMS=(tile.terms if is_exact else 1) if tile.terms else 0,
        NARROW=tile.terms is not None,
        PRECISION=tile.precision,
        UPCAST=interpreted(),
        SETTLE=detect(key.device).is_hopper,
    )


def strides_of(x: Tensor) -> Strides:
    """Return the strides between a tensor's rows."""
    return Strides(*token_strides(x))


# walks of the operators and of gradients, by form
_walks: Memory[Walk] = Memory()


def walk_of(
    x: Inputs,
    *,
    write_scale: float = 1.0,
    reverse: bool = False,
    schedule: str = "auto",
) -> Walk:
    """Return the walk of readable tensors, kept by form."""
    packed = x.cu_seqlens is not None  # the form then leaves out the number of tokens
    form: list[Hashable] = [
        write_scale,
        reverse,
        schedule,
        x.last is None,
        x.key.dtype,
        x.key.device,
        detect(x.key.device),
        None if x.cu_seqlens is None else x.cu_seqlens.shape[0],
        None if x.slots is None else x.slots.dtype,
    ]
    for t in (x.key, x.value, x.read):
        # strides between tokens matter only if there are several tokens
        form += [(t.shape[0] > 1, *t.shape[1:]) if packed else t.shape, t.stride()]
    key = tuple(form)
    walk = _walks.get(key)
    if walk is None:
        walk = Walk(x, write_scale=write_scale, reverse=reverse, schedule=schedule)
        _walks.keep(key, walk)
    return walk
