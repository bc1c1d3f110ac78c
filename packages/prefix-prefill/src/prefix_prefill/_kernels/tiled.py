"""The launches of one tile: all keys of a sequence by one program, or split and merged."""

from __future__ import annotations

import math
from typing import Any

import torch
from attn_common import cdiv, detect, fp8_info
from torch import Tensor

from .._call import Options, Tensors
from .._configs import Tile, choose_splits, padded_head_dim, processors
from .._layout import cache_sizes
from .._linked.host.arguments import MAX_WINDOW
from .._linked.host.forms import ACCESS_BYTES, interpreted
from .attention import _paged_kernel
from .common import CacheForm
from .launch.runtime import Launch, row_bytes
from .merge import _split_merge_kernel

# tokens that one program clears of padding
FILL_TOKENS = 64
# splits of one row of a short tile, and rows of a long one, that are merged at once
MERGE_CHUNK = 16
MERGE_ROWS = 8


class Tiled:
    """The launches of one tile, for sequences of ``least`` to ``most`` queries."""

    def __init__(
        self,
        x: Tensors,
        options: Options,
        tile: Tile,
        least: int,
        most: int,
        has_any: bool | None,
    ) -> None:
        """``has_any``: whether sequences of few queries are served; None for those of many."""
        self.tile, self.num_splits, self.least = tile, options.num_splits, least
        self.is_short = has_any is not None
        self.batch, self.heads_k = x.seqlens_k.shape[0], cache_sizes(x.k_cache).heads_k
        self.head_dim = x.q.shape[2]
        self.group = x.q.shape[1] // self.heads_k
        self.processors = _count_processors(x.q.device)
        tiles = cdiv(max(1, most) * self.group, tile.block_m) if self.is_short else 0
        self.units = self.batch * tiles if has_any else 0
        self.fill_tokens = FILL_TOKENS if self.is_short and options.fill_padding else 0
        # of a short tile, the group's rows of few tokens alone can be there
        self.rows = min(tile.block_m, most * self.group)
        cache = CacheForm(x.k_cache, x.v_cache, tile.block_n)
        left, right = options.window_left, options.window_right
        self._scalars = (
            options.softmax_scale, options.softcap, min(left, MAX_WINDOW), min(right, MAX_WINDOW),
            self.batch, self.heads_k,
        )  # fmt: skip
        slopes_per_row = x.alibi_slopes is not None and x.alibi_slopes.ndim == 2
        new_strides = (0, 0, 0, 0)
        if x.k is not None and x.v is not None:
            new_strides = (*x.k.stride()[:2], *x.v.stride()[:2])
        self._out_strides = x.out.stride()[:2]
        self._strides = (
            *x.q.stride()[:2], *self._out_strides, *cache.k_strides, *cache.v_strides,
            *new_strides, *x.block_table.stride(), x.q.shape[1] if slopes_per_row else 0,
        )  # fmt: skip
        shared: dict[str, Any] = {
            "GROUP": self.group,
            "HEAD_DIM": self.head_dim,
            "OUT_MAX": fp8_info(x.out.dtype).max if x.out.element_size() == 1 else 0.0,
            "MIN_TOKENS": least,
            "MAX_TOKENS": most,
            "TILES": tiles,
            "BLOCK_M": tile.block_m,
            "BLOCK_D": padded_head_dim(self.head_dim, x.q.element_size()),
        }
        descales = x.q_descale, x.k_descale, x.v_descale
        # nothing between the products and the softmax but the scale
        has_scale_alone = x.alibi_slopes is None and options.softcap == 0.0 and x.positions is None
        no_factor = x.q_descale is x.k_descale is None
        # FP8 probabilities: e4m3fn holds 2**8, e4m3fnuz 2**7
        is_fp8 = x.q.element_size() == 1 and x.v_cache.dtype == x.q.dtype
        # Numbers written one by one have an address each, for which the long tile of Hopper has no
        # registers; other tiles have none for the exchange that wider stores take.
        wide = not self.is_short and detect(x.q.device).is_hopper
        constants = {
            **shared,
            **cache.constants,
            "V_AS_K": cache.k_strides[:2] == cache.v_strides[:2],
            "NEW_V_AS_K": new_strides[0] == new_strides[2],
            "ROW_BYTES": row_bytes(x.q) if x.k is None else min(row_bytes(x.q), row_bytes(x.k)),
            "OUT_BYTES": row_bytes(x.out) if wide else x.out.element_size(),
            "PART_BYTES": ACCESS_BYTES if wide else 4,
            "V_COLUMN_RUN": cache.v_column_run,
            "HAS_LEFT": left >= 0,
            "HAS_RIGHT": right >= 0,
            "HAS_SOFTCAP": options.softcap != 0.0,
            "SIGNED_ALIBI": options.signed_alibi,
            "FOLD": has_scale_alone and no_factor and options.softmax_scale >= 0,
            "DESCALE_PER_HEAD": any(d is not None and d.numel() != 1 for d in descales),
            "SHIFT": int(math.log2(fp8_info(x.q.dtype).max)) if is_fp8 else 0,
            "DECODE_FROM_CACHE": options.decode_from_cache,
            "FILL_TOKENS": self.fill_tokens,
            "BLOCK_N": tile.block_n,
            "PRECISION": tile.precision,
            "UPCAST": interpreted(),
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
        }
        self._whole = Launch(_paged_kernel, constants)
        self._split = Launch(_paged_kernel, constants)
        self._merged_rows, chunk = (1, MERGE_CHUNK) if self.is_short else (MERGE_ROWS, 2)
        if interpreted():
            self._merged_rows, chunk = 16, 2
        merge = {"ROWS": self._merged_rows, "CHUNK": chunk, "num_warps": 4, "num_stages": 1}
        self._merge = Launch(_split_merge_kernel, {**shared, **merge})

    def splits(self, units: int, tokens: int, max_seqlen_k: int) -> int:
        """Return into how many parts one call's sequences are cut."""
        if self.num_splits:
            return self.num_splits
        block_m = self.tile.block_m
        busy = units if self.is_short else cdiv(tokens * self.group, block_m)
        return choose_splits(
            busy * self.heads_k, self.is_short, max_seqlen_k // self.tile.block_n,
            units * self.heads_k * block_m * (self.head_dim + 1) * 4, self.processors,
        )  # fmt: skip

    def run(
        self,
        inputs: tuple[Tensor | None, ...],
        rest: tuple[Tensor | None, ...],
        tokens: int,
        max_seqlen_k: int,
    ) -> None:
        """Launch for one call."""
        block_m, heads_k = self.tile.block_m, self.heads_k
        units = self.units
        if not self.is_short:
            units = tokens * self.group // block_m + self.batch + 2
        splits = self.splits(units, tokens, max_seqlen_k)
        fills = -(-tokens // self.fill_tokens) if self.fill_tokens else 0
        grid = (units * splits + fills) * heads_k
        numbers = (*self._scalars, tokens, units, splits, *self._strides)
        if splits == 1 or units == 0:
            self._whole(grid, (*inputs, None, None, *rest), numbers)
            return
        out, lse = inputs[5], inputs[6]
        count = units * heads_k * splits * block_m
        part_out = out.new_empty((count, self.head_dim), dtype=torch.float32)
        part_lse = out.new_empty((count,), dtype=torch.float32)
        self._split(grid, (*inputs, part_out, part_lse, *rest), numbers)
        self._merge(
            units * heads_k * cdiv(self.rows, self._merged_rows),
            (part_out, part_lse, out, lse, rest[1], rest[9]),
            (self.batch, heads_k, tokens, splits, self.rows, *self._out_strides),
        )


_processors: dict[torch.device, int] = {}


def _count_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return processors(detect(device))
    if device not in _processors:
        _processors[device] = torch.cuda.get_device_properties(device).multi_processor_count
    return _processors[device]
