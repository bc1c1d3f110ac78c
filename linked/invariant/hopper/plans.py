"""Launcher of the invariant kernel for Hopper, with its tensor maps."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from attn_common import cdiv
from torch import Tensor

from ...hopper.tickets import MAX_TICKETS, kept_ticket, new_ticket
from ...hopper.tma import MapForm, MapLaunch
from ...host.forms import Memory
from ...host.tiles import padded_head_dim
from ...launch.entries import flat
from ...launch.kernels import Kernel
from ...launch.runtime import MAX_COUNTS
from ..arguments import MergeTensors, Scores
from ..call import Call, InvariantRun, KeyForm
from ..filling import (
    clamped,
    merge_launch,
    merge_numbers,
    new_strides,
    options_of,
    table_strides,
)
from .arguments import Counts, Numbers, Places, Tensors, Tile
from .copies import copied_keys, is_copied

invariant_hopper_kernel = Kernel(__package__, ".attention", "invariant_hopper_kernel")

# keys and values that concurrent programs should read together
L2_BYTES = 32 * 2**20
# limit of the memory for sums of segments
PART_BYTES = 2**28
MERGE_ROWS = 4
# time to write and merge sums, relative to the walk
MERGING = 0.05
ROWS = 64


@dataclass(frozen=True)
class HopperTile:
    """Tile sizes, which are part of the law, and buffers, which are not."""

    block_n: int
    segment: int  # tiles of keys
    stages_k: int
    stages_v: int
    share: bool  # the output is staged in the queries' memory


@functools.cache
def hopper_tile(width: int) -> HopperTile:
    """Return the tile for the wider of the padded head dimensions."""
    if width <= 64:
        return HopperTile(128, 32, 3, 3, False)
    if width <= 128:
        return HopperTile(128, 32, 3, 2, False)
    return HopperTile(64, 64, 3, 2, True)


class HopperInvariantPlan:
    """The launcher of the Hopper kernel for calls of one form."""

    def __init__(
        self,
        x: Call,
        scores: Scores,
        keys: KeyForm,
        batch: int,
        portable: InvariantRun,
        is_kept: bool = False,
    ) -> None:
        """``portable``: launcher of empty calls; ``is_kept``: this launcher will be reused."""
        self._portable = portable
        q, out = x.q, x.out
        self._batch, self._head_dim_v = batch, keys.head_dim_v
        self._heads_q, head_dim = q.shape[-2:]
        self._is_packed = x.cu_seqlens_q is not None
        self._ticket = kept_ticket if is_kept else new_ticket
        group = self._heads_q // keys.heads_k
        pack = min(group & -group, ROWS)
        self._packs, self._tokens = self._heads_q // pack, ROWS // pack
        self._heads_k = keys.heads_k
        wide = max(64, padded_head_dim(head_dim))
        wide_v = max(64, padded_head_dim(keys.head_dim_v))
        tile = hopper_tile(max(wide, wide_v))
        self._segment = tile.segment * tile.block_n
        self._processors = multiprocessors(q.device)
        piece = copied_keys(keys.page or tile.block_n, scores.window_left, tile.block_n)
        if not is_copied(x, scores, keys):
            piece = 0
        self._map_q = MapForm(q, ROWS, wide, ragged=self._is_packed, heads=pack)
        self._map_out = MapForm(out, ROWS, wide_v, ragged=self._is_packed, heads=pack)
        self._map_k = self._map_v = None
        if piece > 0:
            self._map_k = MapForm(as_rows(x.k), piece, wide, ragged=True)
            self._map_v = MapForm(as_rows(x.v), piece, wide_v, ragged=True)
        self._scores = clamped(scores)
        self._token_bytes = (head_dim + keys.head_dim_v) * q.element_size()
        self._places = Places(
            page_rows_k=rows_of_page(x.k) if piece > 0 else 0,
            page_rows_v=rows_of_page(x.v) if piece > 0 else 0,
            table=table_strides(x),
            k=keys.k,
            v=keys.v,
            new_k=new_strides(x.new_k),
            new_v=new_strides(x.new_v),
        )
        # numbers of both kernels, by the counts of a call
        self._numbers: Memory[tuple[tuple[float, ...], tuple[float, ...]]] = Memory(MAX_COUNTS)
        options = options_of(x, scores, keys, piece)
        # if a warpgroup loads keys, registers suffice for one consumer warpgroup only
        self._most_warpgroups = 2 if piece > 0 else 1
        self._launches = {}
        for warpgroups in range(1, self._most_warpgroups + 1):
            shape = Tile(
                PACK=pack,
                WARPGROUPS=warpgroups,
                ROWS=ROWS,
                BLOCK_N=tile.block_n,
                HEAD_DIM=wide,
                HEAD_DIM_V=wide_v,
                WIDTH=head_dim,
                WIDTH_V=keys.head_dim_v,
                STAGES_K=tile.stages_k,
                STAGES_V=3 if warpgroups == 1 else tile.stages_v,
                SHARE=tile.share and wide == wide_v,
                SEGMENT=tile.segment,
            )
            constants = {
                "OPTIONS": options,
                "TILE": shape,
                "num_warps": 4,
                "maxnreg": 168 if piece > 0 else 240,
                # no build may choose what it fuses, so that all round alike
                "enable_fp_fusion": False,
            }
            whole = MapLaunch(invariant_hopper_kernel, constants)
            parts = MapLaunch(invariant_hopper_kernel, constants)
            self._launches[warpgroups] = whole, parts
        self._merge = merge_launch(keys.head_dim_v, MERGE_ROWS)

    def count_parts(self, units: int, rows: int, most_keys: int) -> int:
        """Return the number of tickets per tile of rows: one, or one per segment of keys.

        The attention result does not depend on it.
        """
        parts = cdiv(most_keys, self._segment)
        if parts < 2 or parts * rows * (self._head_dim_v + 2) * 4 > PART_BYTES:
            return 1
        whole = cdiv(units, self._processors) * parts * (1.0 - MERGING)
        return parts if cdiv(units * parts, self._processors) < whole else 1

    def run(self, x: Call, tokens_k: int, most_queries: int, most_keys: int) -> None:
        """Launch for one call of the form.

        Args:
            x: its tensors.
            tokens_k: keys per sequence, if no tensor holds the lengths.
            most_queries: the expected largest number of queries of a sequence.
            most_keys: upper bound of the keys of a sequence; 0: unknown.
        """
        q = x.q
        tokens_q = q.shape[-3]
        rows = (1 if self._is_packed else self._batch) * tokens_q * self._heads_q
        if rows == 0 or x.k.numel() == 0:  # empty tensors have no map
            self._portable.run(x, tokens_k, most_queries, most_keys)
            return
        warpgroups = 1 if most_queries <= self._tokens else self._most_warpgroups
        block = warpgroups * self._tokens
        tiles = cdiv(tokens_q, block)
        slots = tokens_q // block + self._batch + 2 if self._is_packed else tiles * self._batch
        busy = cdiv(tokens_q, block) if most_queries > 1 or not self._is_packed else tokens_q
        busy = max(busy, self._batch) if self._is_packed else slots
        parts = self.count_parts(busy * self._packs, rows, most_keys)
        total = slots * self._packs * parts
        if total > MAX_TICKETS:
            raise NotImplementedError(f"q is too large for one launch: {total} tiles")
        sizes = tokens_q, tokens_k, tiles, parts, total
        numbers, merged = self._numbers.get(sizes) or self._numbers.keep(
            sizes, self._count(x, *sizes[1:])
        )
        keys: tuple[Any, ...] = None, None
        loaded: tuple[Any, ...] = x.k, x.v, x.new_k, x.new_v, x.k_descale, x.v_descale
        if self._map_k is not None and self._map_v is not None:
            keys = self._map_k(as_rows(x.k)), self._map_v(as_rows(x.v))
            loaded = (None,) * 6
        k_ptr, v_ptr, new_k_ptr, new_v_ptr, k_descale_ptr, v_descale_ptr = loaded
        tensors = Tensors(
            q_desc=self._map_q(q),
            k_desc=keys[0],
            v_desc=keys[1],
            out_desc=self._map_out(x.out) if parts == 1 else None,
            k_ptr=k_ptr,
            v_ptr=v_ptr,
            new_k_ptr=new_k_ptr,
            new_v_ptr=new_v_ptr,
            k_descale_ptr=k_descale_ptr,
            v_descale_ptr=v_descale_ptr,
            lse_ptr=x.lse if parts == 1 else None,
            part_out_ptr=None,
            part_max_ptr=None,
            part_sum_ptr=None,
            park_ptr=None,
            ticket_ptr=self._ticket(q.device),
            sinks_ptr=x.sinks,
            block_table_ptr=x.block_table,
            cu_seqlens_q_ptr=x.cu_seqlens_q,
            cu_seqlens_k_ptr=x.cu_seqlens_k,
            seqlens_k_ptr=x.seqlens_k,
        )
        grid = min(self._processors, total)
        whole, one = self._launches[warpgroups]
        if parts == 1:
            parked = grid * warpgroups * ROWS * max(64, padded_head_dim(self._head_dim_v))
            if 0 < most_keys <= self._segment:
                parked = 1
            park = q.new_empty((parked,), dtype=torch.float32)
            whole(grid, tensors._replace(park_ptr=park), numbers)
            return
        part_out = q.new_empty((parts, rows, self._head_dim_v), dtype=torch.float32)
        # the kernel does not write segments without visible keys
        part_max = q.new_full((parts, rows), float("-inf"), dtype=torch.float32)
        part_sum = q.new_empty((parts, rows), dtype=torch.float32)
        sums = {"part_out_ptr": part_out, "part_max_ptr": part_max, "part_sum_ptr": part_sum}
        one(grid, tensors._replace(**sums), numbers)
        results = MergeTensors(x.out, part_out, part_max, part_sum, x.lse, x.sinks, x.cu_seqlens_q)
        self._merge(cdiv(rows, MERGE_ROWS), results, merged)

    def _count(
        self, x: Call, tokens_k: int, tiles: int, parts: int, total: int
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        merged = merge_numbers(x, self._batch, parts)
        # the last section of heads is at most twice as large as each other section
        heads = self._batch * self._packs
        span = self._heads_k * L2_BYTES // max(1, self._heads_k * tokens_k * self._token_bytes)
        span = min(max(1, span * self._packs // self._heads_k), heads)
        counts = Counts(
            batch=self._batch,
            packs=self._packs,
            heads_k=self._heads_k,
            tokens_q=merged.tokens_q,
            tokens_k=tokens_k,
            tiles=tiles,
            span=span,
            last=heads % span + span if heads > span else heads,
            parts=parts,
            total=total,
        )
        return flat(Numbers(self._scores, counts, self._places)), flat(merged)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


def rows_of_page(x: Tensor) -> int:
    """Return the rows from one page, or sequence, to the next; 0 if there is only one."""
    if x.ndim == 3 or x.shape[0] <= 1:
        return 0
    return x.stride(0) // x.stride(1) if _is_in_rows(x) else x.shape[1]


def as_rows(x: Tensor) -> Tensor:
    """Return a cache or dense keys as ``[slots, heads, width]``; gaps between pages stay rows.

    A copy if the distance of pages or sequences is no whole number of rows.
    """
    if x.ndim == 3:
        return x
    if not _is_in_rows(x):
        x = x.contiguous()
    rows = (x.shape[0] - 1) * rows_of_page(x) + x.shape[1]
    return x.as_strided((rows, *x.shape[2:]), x.stride()[1:])


def _is_in_rows(x: Tensor) -> bool:
    return x.shape[0] <= 1 or (x.stride(1) > 0 and x.stride(0) % x.stride(1) == 0)
