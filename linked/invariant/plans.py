"""Launchers of attention under the law of docs/numerics.md, one for each form of calls."""

from __future__ import annotations

import torch
from attn_common import cdiv, detect, has_gluon

from ..host.arguments import FP32_TINY, MAX_WINDOW
from ..host.forms import interpreted
from ..host.tiles import padded_head_dim
from ..launch.runtime import Launch, row_bytes, token_strides
from .call import Call, InvariantRun, KeyForm, Scores
from .kernels import invariant_kernel, invariant_merge_kernel
from .structures import MergeNumbers, MergeTensors, MergeTile, Numbers, Options, Tensors, Tile
from .tiles import invariant_tile, segment_of

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
        q, out = x.q, x.out
        self._is_packed = x.cu_seqlens_q is not None
        self._batch, self._heads_k = batch, keys.heads_k
        self._heads_q, head_dim = q.shape[-2:]
        self._group = self._heads_q // keys.heads_k
        self._head_dim_v = keys.head_dim_v
        platform = detect(q.device)
        tile = invariant_tile(platform, max(head_dim, keys.head_dim_v), q.element_size())
        self._block_m, self._segment = tile.block_m, segment_of(platform)
        self._scores = scores._replace(
            window_left=min(scores.window_left, MAX_WINDOW),
            window_right=min(scores.window_right, MAX_WINDOW),
        )
        options = Options(
            GROUP=self._group,
            HAS_LEFT=scores.window_left >= 0,
            HAS_RIGHT=scores.window_right >= 0,
            HAS_SOFTCAP=scores.softcap != 0.0,
            # a factor 0 would turn a hidden score, -inf, into NaN
            FOLD=scores.softcap == 0.0 and scores.scale >= FP32_TINY,
            DESCALE_NDIM=keys.descale_ndim,
            PAGE=keys.page,
            K_RUN=keys.k_run,
            K_BYTES=keys.k_bytes,
            V_BYTES=keys.v_bytes,
            ROW_BYTES=row_bytes(q),
            DECODE_FROM_CACHE=keys.decode_from_cache,
        )
        block_dv = padded_head_dim(keys.head_dim_v)
        shape = Tile(
            HEAD_DIM=head_dim,
            HEAD_DIM_V=keys.head_dim_v,
            BLOCK_D=padded_head_dim(head_dim),
            BLOCK_DV=block_dv,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            SEGMENT=self._segment,
            PRECISION=tile.precision,
            UPCAST=interpreted(),
        )
        # no compilation may choose what it fuses, so that all round alike
        constants = {
            **options._asdict(),
            **shape._asdict(),
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
            "enable_fp_fusion": False,
        }
        self._whole = Launch(invariant_kernel, constants)
        self._parts = Launch(invariant_kernel, constants)
        merge = MergeTile(keys.head_dim_v, block_dv, MERGE_ROWS)
        kind = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}
        self._merge = Launch(invariant_merge_kernel, {**merge._asdict(), **kind})
        self._strides_q = token_strides(q)
        self._strides_out = token_strides(out)
        new = (0, 0, 0, 0)
        if x.new_k is not None and x.new_v is not None:
            new = (*x.new_k.stride()[:2], *x.new_v.stride()[:2])
        table = (0, 0) if x.block_table is None else x.block_table.stride()
        self._strides = (*keys.strides, *new, *table)

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
        lse_strides = (0, tokens_q) if self._is_packed else (self._heads_q * tokens_q, tokens_q)
        numbers = Numbers(
            *self._scores,
            self._batch,
            self._heads_k,
            tokens_q,
            tokens_k,
            tiles,
            parts,
            *self._strides_q,
            *self._strides_out,
            *lse_strides,
            *self._strides,
        )
        if parts == 1:
            self._whole(units * self._heads_k, Tensors(*x, None, None, None), numbers)
            return
        part_out = q.new_empty((parts, rows, self._head_dim_v), dtype=torch.float32)
        sums = q.new_empty((2, parts, rows), dtype=torch.float32)
        part_max, part_sum = sums[0], sums[1]
        tensors = Tensors(*x, part_out, part_max, part_sum)
        self._parts(units * self._heads_k * parts, tensors, numbers)
        merged = MergeTensors(x.out, part_out, part_max, part_sum, x.lse, x.sinks, x.cu_seqlens_q)
        merge_numbers = MergeNumbers(
            self._batch,
            self._heads_q,
            tokens_q,
            rows,
            parts,
            *self._strides_out,
            *lse_strides,
        )
        self._merge(cdiv(rows, MERGE_ROWS), merged, merge_numbers)
