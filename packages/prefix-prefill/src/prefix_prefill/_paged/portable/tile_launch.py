"""Launcher of one tile of the portable kernel, with or without splits."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from attn_common import cdiv, detect, fp8_info

from ..._cache.kernels.addressing import CacheForm, descale_ndim, row_strides, strides_of
from ..._cache.kernels.arguments import SlotStrides, TableStrides
from ..._cache.layout import cache_sizes, is_packed
from ..._linked.host.arguments import MAX_WINDOW
from ..._linked.host.forms import ACCESS_BYTES, Memory, interpreted
from ..._linked.host.tiles import MIN_TILE
from ..._linked.launch.entries import flat
from ..._linked.launch.kernels import Kernel
from ..._linked.launch.runtime import MAX_COUNTS, Launch, row_bytes
from .. import tiles as portable_tiles
from ..call import Options, Tensors
from ..tiles import choose_splits, padded_head_dim, processors, words_of
from . import arguments
from .arguments import (
    Numbers,
    Schedule,
    Scores,
    SourceLayout,
    SplitMergeNumbers,
    SplitMergeTensors,
    SplitMergeTile,
    Tile,
    ValueStrides,
)
from .structures import Columns, VectorLayout

paged_kernel = Kernel(__package__, ".attention", "paged_kernel")
split_merge_kernel = Kernel(__package__, ".merge", "split_merge_kernel")

# padding tokens that one program zeroes
FILL_TOKENS = 64
# sizes of a merge step: numbers for a short tile, rows for a long one
MERGE_NUMBERS = 8192
MERGE_ROWS = 8


class Work(NamedTuple):
    """Grids and numbers of the launches for one token count and number of splits."""

    grid: int
    numbers: tuple[float, ...]
    rows: int  # of partial results; 0: one split
    merge_grid: int
    merge_numbers: tuple[float, ...]


class TilePlan:
    """Launcher of one tile, for sequences of ``least`` to ``most`` queries."""

    def __init__(
        self,
        x: Tensors,
        options: Options,
        tile: portable_tiles.Tile,
        least: int,
        most: int,
        has_any: bool | None,
    ) -> None:
        """Prepare calls; ``has_any``: None is a long tile, False a short one that only fills."""
        self.tile, self.num_splits, self.least = tile, options.num_splits, least
        self.is_short = has_any is not None
        self.batch, self.heads_k = x.seqlens_k.shape[0], cache_sizes(x.k_cache).heads_k
        self.head_dim, self.head_dim_v = x.q.shape[2], x.out.shape[2]
        self.group = x.q.shape[1] // self.heads_k
        self.processors = count_processors(x.q.device)
        tiles = cdiv(max(1, most) * self.group, tile.block_m) if self.is_short else 0
        self.units = self.batch * tiles if has_any else 0
        self.fill_tokens = FILL_TOKENS if self.is_short and options.fill_padding else 0
        # rows of a tile that can hold queries
        self.rows = min(tile.block_m, most * self.group)
        self.words = words_of(x)
        cache = CacheForm(x.k_cache, x.v_cache, tile.block_n, in_words=self.words != "")
        scores = scores_of(options)
        # most keys that the rows of a tile see under a window with two ends
        self._most_seen = None
        if scores.window_left >= 0 and scores.window_right >= 0:
            self._most_seen = scores.window_left + scores.window_right + tile.block_m
        # but for counts that depend on a call
        self._numbers = _numbers_of(x, options, cache)
        self._work: Memory[Work] = Memory(MAX_COUNTS)
        schedule = Schedule(
            GROUP=self.group, MIN_TOKENS=least, MAX_TOKENS=most, TILES=tiles, BLOCK_M=tile.block_m
        )
        block_d, block_dv = (
            max(padded_head_dim(n, x.q.element_size()), MIN_TILE * cache.slices)
            for n in (self.head_dim, self.head_dim_v)
        )
        platform = detect(x.q.device)
        overlap = platform.is_hopper or platform.is_blackwell
        shape = Tile(
            HEAD_DIM=self.head_dim,
            HEAD_DIM_V=self.head_dim_v,
            BLOCK_N=tile.block_n,
            BLOCK_D=block_d,
            BLOCK_DV=block_dv,
            FILL_TOKENS=self.fill_tokens,
            PRECISION=tile.precision,
            UPCAST=interpreted(),
            PTX=platform.vendor == "nvidia" and not interpreted(),
            OVERLAP=overlap,
        )
        in_order = self._is_in_order(x, cache)
        asked = _options_of(x, options, cache, shape, self.is_short, in_order)
        constants = {
            "OPTIONS": asked,
            "SCHEDULE": schedule,
            "TILE": shape,
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
        }
        self._whole = Launch(paged_kernel, constants)
        self._split = Launch(paged_kernel, constants)
        chunk = min(64, MERGE_NUMBERS // block_dv)
        self._merged_rows, chunk = (1, chunk) if self.is_short else (MERGE_ROWS, 2)
        if interpreted():
            self._merged_rows, chunk = 16, 2
        merged = SplitMergeTile(
            HEAD_DIM=self.head_dim_v,
            OUT_MAX=asked.OUT_MAX,
            BLOCK_D=block_dv,
            ROWS=self._merged_rows,
            CHUNK=chunk,
            OVERLAP=overlap,
        )
        constants = {"SCHEDULE": schedule, "TILE": merged, "num_warps": 4, "num_stages": 1}
        constants |= {"launch_pdl": True} if overlap else {}
        self._merge = Launch(split_merge_kernel, constants)

    def _is_in_order(self, x: Tensors, cache: CacheForm) -> bool:
        """Return whether a short tile reads a packed cache in memory order: see in_order.py."""
        run = cache.layout.K_RUN
        lies = is_packed(x.k_cache) and cache.layout.K_UNIT and cache.v_column_run > 0
        is_asked = self.is_short and detect(x.q.device).vendor != "amd"
        return is_asked and lies and run & (run - 1) == 0 and x.q.element_size() <= 2

    def count_units(self, tokens: int) -> int:
        """Return how many tiles of rows this many tokens may need."""
        if self.is_short:
            return self.units
        return tokens * self.group // self.tile.block_m + self.batch + 2

    def count_splits(self, units: int, tokens: int, max_seqlen_k: int) -> int:
        """Return the number of splits of a call."""
        if self.num_splits:
            return self.num_splits
        block_m = self.tile.block_m
        seen = max_seqlen_k
        if self._most_seen is not None:
            seen = min(seen, self._most_seen)
        busy = units if self.is_short else cdiv(tokens * self.group, block_m)
        return choose_splits(
            busy * self.heads_k,
            self.is_short,
            seen // self.tile.block_n,
            units * self.heads_k * block_m * (self.head_dim_v + 1) * 4,
            self.processors,
            self.words,
        )

    def run(self, x: Tensors, tokens: int, max_seqlen_k: int) -> None:
        """Launch one call."""
        splits = self.count_splits(self.count_units(tokens), tokens, max_seqlen_k)
        counts = tokens, splits
        work = self._work.get(counts) or self._work.keep(counts, self._count(*counts))
        if work.rows == 0:
            self._whole(work.grid, (*x, None, None), work.numbers)
            return
        part_out = x.out.new_empty((work.rows, self.head_dim_v), dtype=torch.float32)
        part_lse = x.out.new_empty((work.rows,), dtype=torch.float32)
        self._split(work.grid, (*x, part_out, part_lse), work.numbers)
        merged = SplitMergeTensors(part_out, part_lse, x.out, x.lse, x.cu_seqlens_q, x.out_scale)
        self._merge(work.merge_grid, merged, work.merge_numbers)

    def _count(self, tokens: int, splits: int) -> Work:
        heads_k, units = self.heads_k, self.count_units(tokens)
        fills = -(-tokens // self.fill_tokens) if self.fill_tokens else 0
        numbers = self._numbers._replace(tokens=tokens, units=units, splits=splits)
        merged = SplitMergeNumbers(
            batch=self.batch,
            heads_k=heads_k,
            tokens=tokens,
            splits=splits,
            rows=self.rows,
            out=numbers.out,
        )
        return Work(
            grid=(units * splits + fills) * heads_k,
            numbers=flat(numbers),
            rows=units * heads_k * splits * self.tile.block_m if splits > 1 else 0,
            merge_grid=units * heads_k * cdiv(self.rows, self._merged_rows),
            merge_numbers=flat(merged),
        )


def scores_of(options: Options) -> Scores:
    """Return the kernels' ``Scores``."""
    # windows beyond any length are equal; clamped, int32 sums in the kernels do not overflow
    left, right = min(options.window_left, MAX_WINDOW), min(options.window_right, MAX_WINDOW)
    return Scores(options.softmax_scale, options.softcap, left, right)


def stride_of_slopes(x: Tensors) -> int:
    """Return the stride of ALiBi slopes per sequence or token; 0 if slopes are per head only."""
    return x.q.shape[1] if x.alibi_slopes is not None and x.alibi_slopes.ndim == 2 else 0


def _numbers_of(x: Tensors, options: Options, cache: CacheForm) -> Numbers:
    v = cache.v
    return Numbers(
        scores=scores_of(options),
        batch=x.seqlens_k.shape[0],
        heads_k=cache_sizes(x.k_cache).heads_k,
        tokens=0,
        units=0,
        splits=0,
        q=row_strides(x.q),
        out=row_strides(x.out),
        k_cache=cache.k,
        v_cache=ValueStrides(v.page, v.slot, v.head, v.number),
        k=row_strides(x.k),
        v=row_strides(x.v),
        table=TableStrides(*x.block_table.stride()),
        slopes=stride_of_slopes(x),
        k_scales=strides_of(SlotStrides, x.k_scale_cache),
        v_scales=strides_of(SlotStrides, x.v_scale_cache),
    )


def _options_of(
    x: Tensors, options: Options, cache: CacheForm, tile: Tile, is_short: bool, in_order: bool
) -> arguments.Options:
    lie, slices = cache.layout, cache.slices
    row = min(row_bytes(t) for t in (x.q, x.k, x.v) if t is not None)
    in_cache = SourceLayout(
        PAGE=lie.PAGE,
        K=VectorLayout(lie.K_RUN, lie.K_UNIT, lie.K_BYTES, 0),
        V=VectorLayout(tile.HEAD_DIM_V // slices, lie.V_UNIT, lie.V_BYTES, cache.v_column_run),
        V_AS_K=cache.values_lie_as_keys,
        K_WORDS=Columns(tile.HEAD_DIM // slices, tile.BLOCK_D // slices),
        V_WORDS=Columns(tile.HEAD_DIM_V // slices, tile.BLOCK_DV // slices),
        IN_ORDER=in_order,
        SLICES=slices,
        WORD_BITS=cache.word_bits,
        SCALED=x.k_scale_cache is not None,
        ZERO_POINTS=options.zero_points,
    )
    new = None
    if x.k is not None and x.v is not None:
        new = SourceLayout(
            PAGE=0,
            K=VectorLayout(tile.HEAD_DIM, True, row, 0),
            V=VectorLayout(tile.HEAD_DIM_V, True, row, 0),
            V_AS_K=x.k.stride(0) == x.v.stride(0),
            K_WORDS=Columns(tile.HEAD_DIM, tile.BLOCK_D),
            V_WORDS=Columns(tile.HEAD_DIM_V, tile.BLOCK_DV),
        )
    # Narrow stores need an address per number, for which long tiles have no registers. Wide stores
    # exchange numbers between threads first, for which short tiles have no registers.
    wide = not is_short and detect(x.q.device).vendor == "nvidia"
    # only a scale between products and softmax
    has_scale_alone = x.alibi_slopes is None and options.softcap == 0.0 and x.positions is None
    no_factor = x.q_descale is x.k_descale is None
    # FP8 probabilities: the largest power of two is 2**8 in e4m3fn, 2**7 in e4m3fnuz
    is_fp8 = x.q.element_size() == 1 and x.v_cache.dtype == x.q.dtype
    return arguments.Options(
        CACHE=in_cache,
        NEW=new,
        ROW_BYTES=row,
        OUT_BYTES=row_bytes(x.out) if wide else x.out.element_size(),
        PART_BYTES=ACCESS_BYTES if wide else 4,
        HAS_LEFT=options.window_left >= 0,
        HAS_RIGHT=options.window_right >= 0,
        HAS_SOFTCAP=options.softcap != 0.0,
        SIGNED_ALIBI=options.signed_alibi,
        FOLD=has_scale_alone and no_factor and options.softmax_scale >= 0,
        DESCALE_NDIM=descale_ndim(x.q_descale, x.k_descale, x.v_descale),
        SHIFT=int(math.log2(fp8_info(x.q.dtype).max)) if is_fp8 else 0,
        OUT_MAX=fp8_info(x.out.dtype).max if x.out.element_size() == 1 else 0.0,
        DECODE_FROM_CACHE=options.decode_from_cache,
    )


_processors: dict[torch.device, int] = {}


def count_processors(device: torch.device) -> int:
    """Return how many SMs a GPU has; without a GPU, a typical number."""
    if device.type != "cuda":
        return processors(detect(device))
    if device not in _processors:
        _processors[device] = torch.cuda.get_device_properties(device).multi_processor_count
    return _processors[device]
