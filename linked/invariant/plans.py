"""Launchers of attention under the law of docs/numerics.md, one for each form of calls."""

from __future__ import annotations

import torch
from attn_common import cdiv, detect, has_gluon

from ..host.forms import Memory, interpreted
from ..host.tiles import padded_head_dim
from ..launch.entries import flat
from ..launch.kernels import Kernel
from ..launch.runtime import MAX_COUNTS, Launch, token_strides
from ..portable.strides import Strides
from .arguments import (
    LseStrides,
    MergeTensors,
    Numbers,
    Scores,
    Tensors,
    Tile,
)
from .call import Call, InvariantRun, KeyForm
from .filling import (
    clamped,
    merge_launch,
    merge_numbers,
    new_strides,
    options_of,
    table_strides,
)
from .tiles import invariant_tile, segment_of

invariant_kernel = Kernel(__package__, ".kernels", "invariant_kernel")

# fewer programs than this leave a GPU idle: then each segment gets its own program
PROGRAMS = 512
# limit of the memory for sums of segments
PART_BYTES = 2**28
MERGE_ROWS = 16


def plan_invariant(
    x: Call, scores: Scores, keys: KeyForm, batch: int, *, is_kept: bool, hopper: bool
) -> InvariantRun:
    """Return the launcher of calls like this one; ``is_kept``: it will be reused.

    The GPU, the head dimensions and the dtype of q decide its kernel; ``hopper`` allows Hopper's.
    """
    portable = InvariantPlan(x, scores, keys, batch)
    if hopper and takes_hopper(x, keys):
        from .hopper.plans import HopperInvariantPlan

        return HopperInvariantPlan(x, scores, keys, batch, portable, is_kept)
    return portable


def takes_hopper(x: Call, keys: KeyForm) -> bool:
    """Return whether the Hopper kernel serves a form of calls."""
    return (
        x.q.device.type != "cpu"
        and detect(x.q.device).is_hopper
        and x.q.dtype in (torch.float16, torch.bfloat16)
        and max(x.q.shape[-1], keys.head_dim_v) <= 256
        and has_gluon()
    )


class InvariantPlan:
    """The launcher of the portable kernel for calls of one form."""

    def __init__(self, x: Call, scores: Scores, keys: KeyForm, batch: int) -> None:
        """Prepare for calls like this one; ``batch`` is its number of sequences."""
        q = x.q
        self._is_packed = x.cu_seqlens_q is not None
        self._batch, self._heads_k = batch, keys.heads_k
        self._heads_q, head_dim = q.shape[-2:]
        self._group = self._heads_q // keys.heads_k
        self._head_dim_v = keys.head_dim_v
        platform = detect(q.device)
        tile = invariant_tile(platform, max(head_dim, keys.head_dim_v), q.element_size())
        self._block_m, self._segment = tile.block_m, segment_of(platform)
        shape = Tile(
            HEAD_DIM=head_dim,
            HEAD_DIM_V=keys.head_dim_v,
            BLOCK_D=padded_head_dim(head_dim),
            BLOCK_DV=padded_head_dim(keys.head_dim_v),
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            SEGMENT=self._segment,
            PRECISION=tile.precision,
            UPCAST=interpreted(),
        )
        # no compilation may choose what it fuses, so that all round alike
        constants = {
            "OPTIONS": options_of(x, scores, keys),
            "TILE": shape,
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
            "enable_fp_fusion": False,
        }
        self._whole = Launch(invariant_kernel, constants)
        self._parts = Launch(invariant_kernel, constants)
        self._merge = merge_launch(keys.head_dim_v, MERGE_ROWS)
        # but for counts that depend on a call
        self._form = Numbers(
            scores=clamped(scores),
            batch=batch,
            heads_k=keys.heads_k,
            tokens_q=0,
            tokens_k=0,
            tiles=0,
            parts=0,
            q=Strides(*token_strides(q)),
            out=Strides(*token_strides(x.out)),
            lse=LseStrides(0, 0),
            k=keys.k,
            v=keys.v,
            new_k=new_strides(x.new_k),
            new_v=new_strides(x.new_v),
            table=table_strides(x),
        )
        # numbers of both kernels, by the counts of a call
        self._numbers: Memory[tuple[tuple[float, ...], tuple[float, ...]]] = Memory(MAX_COUNTS)

    def count_parts(self, units: int, rows: int, most_keys: int) -> int:
        """Return the number of programs per tile of rows: one, or one per segment of keys.

        The attention result does not depend on it.
        """
        parts = cdiv(most_keys, self._segment)
        room = parts * rows * (self._head_dim_v + 2) * 4
        is_idle = units * self._heads_k < PROGRAMS
        return parts if parts > 1 and is_idle and room <= PART_BYTES else 1

    def run(self, x: Call, tokens_k: int, most_queries: int, most_keys: int) -> None:
        """Launch for one call of the form.

        Args:
            x: its tensors.
            tokens_k: keys per sequence, if no tensor holds the lengths.
            most_queries: upper bound of the queries of a sequence; not used here.
            most_keys: upper bound of the keys of a sequence.
        """
        q = x.q
        tokens_q = q.shape[-3]
        tiles = cdiv(tokens_q * self._group, self._block_m)
        units = self._batch * tiles
        if self._is_packed:
            units = tokens_q * self._group // self._block_m + self._batch + 2
        rows = (1 if self._is_packed else self._batch) * tokens_q * self._heads_q
        if rows == 0:
            return
        parts = self.count_parts(units, rows, most_keys)
        counts = tokens_q, tokens_k, parts
        numbers, merged = self._numbers.get(counts) or self._numbers.keep(
            counts, self._count(x, tokens_k, tiles, parts)
        )
        if parts == 1:
            self._whole(units * self._heads_k, Tensors(*x, None, None, None), numbers)
            return
        part_out = q.new_empty((parts, rows, self._head_dim_v), dtype=torch.float32)
        sums = q.new_empty((2, parts, rows), dtype=torch.float32)
        tensors = Tensors(*x, part_out, sums[0], sums[1])
        self._parts(units * self._heads_k * parts, tensors, numbers)
        results = MergeTensors(x.out, part_out, sums[0], sums[1], x.lse, x.sinks, x.cu_seqlens_q)
        self._merge(cdiv(rows, MERGE_ROWS), results, merged)

    def _count(
        self, x: Call, tokens_k: int, tiles: int, parts: int
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        merged = merge_numbers(x, self._batch, parts)
        numbers = self._form._replace(
            tokens_q=merged.tokens_q, tokens_k=tokens_k, tiles=tiles, parts=parts, lse=merged.lse
        )
        return flat(numbers), flat(merged)
