"""Launchers of multi-head latent attention: what calls with one signature share on the host."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from attn_common import cdiv, detect, fp8_info
from torch import Tensor

from .._cache.kernels.addressing import CacheForm, row_strides
from .._cache.kernels.arguments import TableStrides
from .._linked.host.forms import Memory, interpreted
from .._linked.launch.entries import flat
from .._linked.launch.kernels import Kernel
from .._linked.launch.runtime import MAX_COUNTS, Launch, aligned, dense, is_aligned, row_bytes
from .._paged.launch import MAX_TOKENS, is_writable
from .._paged.portable.arguments import (
    Schedule,
    SplitMergeNumbers,
    SplitMergeTensors,
    SplitMergeTile,
)
from .._paged.portable.tile_launch import MERGE_NUMBERS, count_processors
from .._paged.tiles import choose_splits, padded_head_dim
from .call import MlaOptions, MlaTensors, MlaWriteTensors
from .portable import arguments
from .portable.arguments import CacheStrides, Numbers, Tile, WriteNumbers, WriteOptions
from .tiles import mla_tile, takes_hopper_mla

split_merge_kernel = Kernel(__package__, ".._paged.portable.merge", "split_merge_kernel")
mla_kernel = Kernel(__package__, ".portable.kernel", "mla_kernel")
mla_write_kernel = Kernel(__package__, ".portable.kernel", "mla_write_kernel")

# tokens that a program writes
BLOCK_T = 8
# small tensors that must be contiguous for the kernels
_DENSE = ("cu_seqlens_q", "seqlens_k", "q_descale", "kv_descale")


def launch_mla(x: MlaTensors, max_seqlen_q: int, max_seqlen_k: int, options: MlaOptions) -> None:
    """Run the attention operator on checked inputs; see ``ops.py`` for its schema."""
    out = x.out if is_writable(x.out) else x.out.new_empty(x.out.shape)
    given = x._replace(q=aligned(x.q), out=out)
    MlaAttentionPlan(given, options).run(given, max_seqlen_q, max_seqlen_k)
    if out is not x.out:
        x.out.copy_(out)


def plan_of(x: MlaTensors, options: MlaOptions) -> MlaAttentionPlan | None:
    """Return a launcher for calls like ``x``, or None if tensors have to be copied first."""
    fits = is_aligned(x.q) and is_writable(x.out)
    return MlaAttentionPlan(x, options) if fits else None


class MlaLaunch(Protocol):
    """Launcher of one kernel, with or without splits."""

    rows: int  # rows of a tile
    block_n: int

    def __call__(
        self, grid: int, x: MlaTensors, parts: tuple[Tensor | None, ...], splits: int
    ) -> None:
        """Launch ``grid`` programs; ``parts`` are the partial results of splits, or None."""


class MlaAttentionPlan:
    """Launcher of the calls with one signature; it depends on no data and on no token count."""

    def __init__(self, x: MlaTensors, options: MlaOptions) -> None:
        """Prepare calls like ``x``, whose tensors are aligned (see ``aligned``)."""
        small = (getattr(x, name) for name in _DENSE)
        self._is_dense = all(t is None or t.is_contiguous() for t in small)
        # sequences of one token each, and of any number
        self._single = SchedulePlan(x, options, is_single=True)
        self._any = SchedulePlan(x, options, is_single=False)

    def run(self, x: MlaTensors, max_seqlen_q: int, max_seqlen_k: int) -> None:
        """Launch one call."""
        tokens = x.q.shape[0]
        if tokens == 0:
            return
        if not self._is_dense:
            x = x._replace(**{name: dense(getattr(x, name)) for name in _DENSE})
        # serve sequences even if max_seqlen_q understates them, where the token count proves it
        is_single = max_seqlen_q <= 1 and tokens <= x.seqlens_k.shape[0]
        (self._single if is_single else self._any).run(x, tokens, max_seqlen_k)


class SchedulePlan:
    """Launcher of one schedule: one query per sequence (``is_single``), or any number."""

    def __init__(self, x: MlaTensors, options: MlaOptions, is_single: bool) -> None:
        """Prepare calls like ``x``."""
        self._batch, self._heads = x.seqlens_k.shape[0], x.q.shape[1]
        self._num_splits, self._is_single = options.num_splits, is_single
        self._head_dim_v = x.out.shape[2]
        self._processors = count_processors(x.q.device)
        self._launch = _launch_of(x, options, is_single)
        rows = self._launch.rows
        self._tiles = cdiv(self._heads, rows)
        # rows of a tile that can hold queries
        self._most_rows = min(rows, self._heads) if is_single else rows
        schedule = schedule_of(self._heads, rows, is_single)
        block = padded_head_dim(self._head_dim_v)
        self._merged_rows, chunk = 1, min(64, MERGE_NUMBERS // block)
        if interpreted():
            self._merged_rows, chunk = 16, 2
        tile = SplitMergeTile(
            HEAD_DIM=self._head_dim_v,
            OUT_MAX=0.0,
            BLOCK_D=block,
            ROWS=self._merged_rows,
            CHUNK=chunk,
            OVERLAP=False,
        )
        constants = {"SCHEDULE": schedule, "TILE": tile, "num_warps": 4, "num_stages": 1}
        self._merge = Launch(split_merge_kernel, constants)
        self._form = SplitMergeNumbers(
            batch=self._batch,
            heads_k=1,
            tokens=0,
            splits=0,
            rows=self._most_rows,
            out=row_strides(x.out),
        )
        # by token count and splits
        self._numbers: Memory[tuple[float, ...]] = Memory(MAX_COUNTS)

    def run(self, x: MlaTensors, tokens: int, max_seqlen_k: int) -> None:
        """Launch one call."""
        rows, width = self._launch.rows, self._head_dim_v
        busy = units = self._batch * self._tiles
        if not self._is_single:
            busy = cdiv(tokens * self._heads, rows)
            units = tokens * self._heads // rows + self._batch + 2
        splits = self._num_splits
        if splits == 0:
            steps, scratch = max_seqlen_k // self._launch.block_n, units * rows * (width + 1) * 4
            splits = choose_splits(busy, False, steps, scratch, self._processors)
        # at least one program, which fills rows outside every sequence
        grid = max(1, units * splits)
        if splits == 1 or units == 0:
            self._launch(grid, x, (None, None), splits)
            return
        part_out = x.out.new_empty((units * splits * rows, width), dtype=torch.float32)
        part_lse = x.out.new_empty((units * splits * rows,), dtype=torch.float32)
        self._launch(grid, x, (part_out, part_lse), splits)
        numbers = self._numbers.get((tokens, splits)) or self._count(tokens, splits)
        self._merge(
            units * cdiv(self._most_rows, self._merged_rows),
            SplitMergeTensors(part_out, part_lse, x.out, x.lse, x.cu_seqlens_q, None),
            numbers,
        )

    def _count(self, tokens: int, splits: int) -> tuple[float, ...]:
        numbers = flat(self._form._replace(tokens=tokens, splits=splits))
        return self._numbers.keep((tokens, splits), numbers)


def _launch_of(x: MlaTensors, options: MlaOptions, is_single: bool) -> MlaLaunch:
    if takes_hopper_mla(x, options):
        from .hopper.launch import HopperLaunch

        return HopperLaunch(x, options, is_single)
    return PortableLaunch(x, options, is_single)


def schedule_of(heads: int, rows: int, is_single: bool) -> Schedule:
    """Return the constants with which programs find their tiles: see ``locate``."""
    return Schedule(
        GROUP=heads,
        MIN_TOKENS=1,
        MAX_TOKENS=1 if is_single else MAX_TOKENS,
        TILES=cdiv(heads, rows) * is_single,
        BLOCK_M=rows,
    )


class PortableLaunch:
    """Launcher of the portable kernel."""

    def __init__(self, x: MlaTensors, options: MlaOptions, is_single: bool) -> None:
        """Prepare calls like ``x`` for one schedule."""
        platform = detect(x.q.device)
        heads, head_dim = x.q.shape[1:]
        head_dim_v = x.out.shape[2]
        itemsize = 4 if torch.float32 in (x.q.dtype, x.kv_cache.dtype) else 2
        tile = mla_tile(platform, itemsize, heads)
        self.rows, self.block_n = tile.block_m, tile.block_n
        cache = x.kv_cache[:, :, None]
        form = CacheForm(cache, cache)
        rest = head_dim_v * x.kv_cache.element_size()
        asked = arguments.Options(
            HEAD_DIM=head_dim,
            HEAD_DIM_V=head_dim_v,
            PAGE=form.page,
            KV_UNIT=form.layout.K_UNIT,
            KV_BYTES=math.gcd(form.layout.K_BYTES, rest),
            ROW_BYTES=math.gcd(row_bytes(x.q), head_dim_v * x.q.element_size()),
            CAUSAL=options.causal,
        )
        shape = Tile(
            **schedule_of(heads, self.rows, is_single)._asdict(),
            BLOCK_N=tile.block_n,
            BLOCK_V=padded_head_dim(head_dim_v),
            BLOCK_R=padded_head_dim(max(1, head_dim - head_dim_v)),
            PRECISION=tile.precision,
            UPCAST=interpreted(),
        )
        constants = {
            "OPTIONS": asked,
            "TILE": shape,
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
        }
        self._form = Numbers(
            scale=options.softmax_scale,
            batch=x.seqlens_k.shape[0],
            tokens=0,
            splits=0,
            q=row_strides(x.q),
            out=row_strides(x.out),
            kv=CacheStrides(*x.kv_cache.stride()),
            table=TableStrides(*x.block_table.stride()),
        )
        # by token count and splits
        self._numbers: Memory[tuple[float, ...]] = Memory(MAX_COUNTS)
        self._whole, self._split = Launch(mla_kernel, constants), Launch(mla_kernel, constants)

    def __call__(
        self, grid: int, x: MlaTensors, parts: tuple[Tensor | None, ...], splits: int
    ) -> None:
        """Launch ``grid`` programs; ``parts`` are the partial results of splits, or None."""
        launch = self._whole if parts[0] is None else self._split
        counts = x.q.shape[0], splits
        launch(grid, (*x, *parts), self._numbers.get(counts) or self._count(*counts))

    def _count(self, tokens: int, splits: int) -> tuple[float, ...]:
        numbers = flat(self._form._replace(tokens=tokens, splits=splits))
        return self._numbers.keep((tokens, splits), numbers)


# ---- writing into a cache


def launch_mla_write(x: MlaWriteTensors) -> None:
    """Run the operator that writes into a cache on checked inputs; see ``ops.py``."""
    tokens = x.slot_mapping.shape[0]
    x = x._replace(kv_c=aligned(x.kv_c[:tokens]), k_pe=aligned(x.k_pe[:tokens]))
    MlaCacheWritePlan(x).run(x)


def write_plan_of(x: MlaWriteTensors) -> MlaCacheWritePlan | None:
    """Return a launcher for writes like ``x``, or None if tensors have to be copied first."""
    return MlaCacheWritePlan(x) if is_aligned(x.kv_c) and is_aligned(x.k_pe) else None


class MlaCacheWritePlan:
    """Launcher of the writes with one signature; it depends on no data and on no token count."""

    def __init__(self, x: MlaWriteTensors) -> None:
        """Prepare writes like ``x``, whose new columns are aligned (see ``aligned``)."""
        cache = x.kv_cache
        is_fp8 = cache.element_size() == 1
        asked = WriteOptions(
            PAGE=cache.shape[1],
            HEAD_DIM_V=x.kv_c.shape[1],
            ROTARY=x.k_pe.shape[1],
            ROW_BYTES=math.gcd(row_bytes(x.kv_c), row_bytes(x.k_pe)),
            FP8_MAX=fp8_info(cache.dtype).max if is_fp8 else 0.0,
            BLOCK_T=BLOCK_T,
            BLOCK_V=padded_head_dim(x.kv_c.shape[1]),
            BLOCK_R=padded_head_dim(max(1, x.k_pe.shape[1])),
        )
        self._form = WriteNumbers(
            tokens=0,
            slots=cache.shape[0] * cache.shape[1],
            slot_mapping=x.slot_mapping.stride(0),
            kv_c=x.kv_c.stride(0),
            k_pe=x.k_pe.stride(0),
            kv=CacheStrides(*cache.stride()),
        )
        # by token count
        self._numbers: Memory[tuple[int, ...]] = Memory(MAX_COUNTS)
        constants = {"OPTIONS": asked, "num_warps": 4, "num_stages": 1}
        self._write = Launch(mla_write_kernel, constants)

    def run(self, x: MlaWriteTensors) -> None:
        """Launch one write."""
        tokens = x.slot_mapping.shape[0]
        numbers = self._numbers.get(tokens) or self._count(tokens)
        self._write(cdiv(tokens, BLOCK_T), x, numbers)

    def _count(self, tokens: int) -> tuple[int, ...]:
        return self._numbers.keep(tokens, flat(self._form._replace(tokens=tokens)))
