"""How walks are run: their plans, which serve all calls of one form, and their launches."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch
from attn_common import cdiv, detect
from torch import Tensor

from .._configs import Tile, WalkPlan, padded_head_dim, plan_walk, takes_hopper_walk, walk_tile
from .._linked.host.forms import LIMIT, Memory, interpreted
from .combine import launch_combine
from .common import KINDS, Inputs, States
from .launch.runtime import Launch, row_bytes, token_strides
from .walk import walk_kernel


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
        dims = self.d, self.e, KINDS[x.key.dtype]
        # segments that somebody else chose need not hold whole chunks
        self._is_hopper = size is None and takes_hopper_walk(detect(x.key.device), *dims)
        self._schedule, self._asked_size = schedule, size
        self._plans: dict[int, WalkPlan] = {}
        # by what differs between the launches of one form; the strides of what has a row per token
        self.launches: dict[Any, Launch] = {}
        self._strides: dict[bool, tuple[int, ...]] = {}
        if self._is_hopper:
            from .hopper.walk_plan import HopperWalk  # Triton may have no Gluon

            self._hopper = HopperWalk(self)

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
        grid = programs * self.heads * cdiv(self.e, plan.tile.block_e)
        has_first = None if segmented else x.has_first
        others = x.decay, first.memory, last.memory, x.cu_seqlens, x.slots, has_first
        numbers = read_scale, self.write_scale, self.batch, self.heads, tokens, size, pieces
        is_hopper = self._is_hopper and tokens > 0  # an empty tensor has no map
        kind = (
            is_hopper, segmented, plan.tile.block_e, read is None, x.last is None,
            *[other is None for other in others],
        )  # fmt: skip
        launch = self.launches.get(kind)
        if launch is None:
            is_exact = self._is_exact and last.memory is not None
            if is_hopper:
                # the states between segments are filled by a walk that nobody reads
                skip = segmented and read is None and x.last is None
                launch = self._hopper.launch(plan.tile, segmented, skip, is_exact)
            else:
                launch = Launch(walk_kernel, self._constants(x, plan.tile, segmented, is_exact))
            self.launches[kind] = launch
        if is_hopper:
            maps = self._hopper.maps(x.key, x.value, read, out)
            launch(grid, (*maps, out, *others), (*numbers, *first.strides, *last.strides))
            return
        strides = self._strides.get(read is None)
        if strides is None:
            strides = self._strides[read is None] = (
                *((0, 0, 0) if read is None else token_strides(read)),
                *token_strides(x.key), *token_strides(x.value),
            )  # fmt: skip
        launch(
            grid,
            (x.key, x.value, read, out, *others),
            (*numbers, *strides, *first.strides, *last.strides),
        )

    def _constants(self, x: Inputs, tile: Tile, segmented: bool, is_exact: bool) -> dict[str, Any]:
        return {
            "D": self.d,
            "E": self.e,
            "BLOCK_D": padded_head_dim(self.d),
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
        "UPCAST": interpreted(),
    }


# walks of gradients, and of what comes through the operators, by form
_walks: Memory[Walk] = Memory()


def walk_of(
    x: Inputs,
    read: Tensor,
    *,
    write_scale: float = 1.0,
    reverse: bool = False,
    schedule: str = "auto",
) -> Walk:
    """Return the walk of readable tensors, made when those of their form came first."""
    packed = x.cu_seqlens is not None  # then the number of tokens is no part of the form
    form: list[Hashable] = [
        write_scale, reverse, schedule, x.last is None, x.key.dtype, x.key.device,
        detect(x.key.device), None if x.cu_seqlens is None else x.cu_seqlens.shape[0],
        None if x.slots is None else x.slots.dtype,
    ]  # fmt: skip
    for t in (x.key, x.value, read):
        # strides between tokens matter only where there are several
        form += [(t.shape[0] > 1, *t.shape[1:]) if packed else t.shape, t.stride()]
    key = tuple(form)
    walk = _walks.get(key)
    if walk is None:
        walk = Walk(x, write_scale=write_scale, reverse=reverse, schedule=schedule)
        _walks.keep(key, walk)
    return walk
