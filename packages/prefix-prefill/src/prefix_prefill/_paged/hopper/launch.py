"""Launcher of prefill on Hopper: tensor maps, numbers, grid."""

from __future__ import annotations

from torch import Tensor

from ..._cache.kernels.addressing import descale_ndim, row_strides, strides_of
from ..._cache.kernels.arguments import SlotStrides, TableStrides
from ..._linked.hopper.tickets import MAX_TICKETS, kept_ticket, new_ticket
from ..._linked.hopper.tma import MapForm, MapLaunch, TensorMap
from ..._linked.host.forms import Memory
from ..._linked.launch.entries import flat
from ..._linked.launch.kernels import Kernel
from ..._linked.launch.runtime import MAX_COUNTS
from .. import call
from ..hopper_tiles import HopperTile, hopper_tile, is_worth_tall, takes_tall
from ..portable.tile_launch import TilePlan, scores_of, stride_of_slopes
from ..tiles import copied_keys, padded_head_dim, rows_of_cache, rows_of_page
from .arguments import (
    CacheStrides,
    Numbers,
    Options,
    Tensors,
    Tile,
    WideNumbers,
    WideTensors,
)

prefill_kernel = Kernel(__package__, ".attention", "prefill_kernel")
prefill_wide_kernel = Kernel(__package__, ".wide", "prefill_wide_kernel")

WARP, WARPGROUP = 32, 128


class HopperPlan:
    """Launcher of the long tile for the calls that ``takes_hopper`` accepts, with one signature."""

    def __init__(
        self, x: call.Tensors, options: call.Options, portable: TilePlan, is_kept: bool
    ) -> None:
        """Prepare calls like ``x``; ``portable`` runs splits, ``is_kept``: it is reused."""
        self.portable, self.least = portable, portable.least
        self._ticket = kept_ticket if is_kept else new_ticket
        group = portable.group
        hopper = hopper_tile(portable.head_dim, portable.words)
        left = options.window_left
        page = x.k_cache.shape[1]
        piece = copied_keys(page, left, hopper.block_n)
        pack = hopper.pack(group)
        self._packs = x.q.shape[1] // pack
        self._rows = hopper.rows // pack
        wide = padded_head_dim(portable.head_dim)
        self._map_q = MapForm(x.q, hopper.rows, wide, ragged=True, heads=pack)
        # an fp32 output is stored from registers: it does not fit shared memory
        self._map_out = None
        if x.out.dtype == x.q.dtype:
            self._map_out = MapForm(x.out, hopper.rows, wide, ragged=True, heads=pack)
        # consecutive tokens hold the new keys, so a piece is not limited by pages
        new_piece = copied_keys(hopper.block_n, left, hopper.block_n)
        self._new_maps = None
        if x.k is not None and x.v is not None:
            self._new_maps = [MapForm(t, new_piece, wide, ragged=True) for t in (x.k, x.v)]
        self._is_wide = x.k_cache.element_size() == 1
        self._numbers = Numbers(
            scores=scores_of(options),
            batch=portable.batch,
            packs=self._packs,
            tokens=0,
            total=0,
            page_rows_k=rows_of_page(x.k_cache),
            page_rows_v=rows_of_page(x.v_cache),
            out=row_strides(x.out),
            table=TableStrides(*x.block_table.stride()),
            slopes=stride_of_slopes(x),
        )
        # all numbers, by the counts of a call
        self._counted: Memory[tuple[float, ...]] = Memory(MAX_COUNTS)
        self._wide_numbers: WideNumbers | tuple[()] = ()
        if self._is_wide:
            self._wide_numbers = WideNumbers(
                k_cache=CacheStrides(*x.k_cache.stride()[1:3]),
                v_cache=CacheStrides(*x.v_cache.stride()[1:3]),
                k_scales=strides_of(SlotStrides, x.k_scale_cache),
                v_scales=strides_of(SlotStrides, x.v_scale_cache),
                heads_k=portable.heads_k,
            )
        else:
            self._map_k = MapForm(as_rows(x.k_cache), piece, wide, ragged=True)
            self._map_v = MapForm(as_rows(x.v_cache), piece, wide, ragged=True)
        asked = Options(
            HAS_LEFT=left >= 0,
            HAS_RIGHT=options.window_right >= 0,
            HAS_SOFTCAP=options.softcap != 0.0,
            HAS_NEW=self._new_maps is not None,
            DESCALE_NDIM=descale_ndim(x.k_descale, x.v_descale),
        )
        warps = WARPGROUP // WARP if self._is_wide else 1
        wideners = hopper.wideners if self._is_wide else 0

        def launch_of(hopper: HopperTile) -> MapLaunch:
            tile = Tile(
                GROUP=group,
                PACK=pack,
                PAGE=page,
                PIECE=piece,
                NEW_PIECE=new_piece,
                MIN_TOKENS=portable.least,
                ROWS=hopper.rows,
                BLOCK_N=hopper.block_n,
                HEAD_DIM=wide,
                WIDTH=portable.head_dim,
                STAGES_K=hopper.stages_k,
                STAGES_V=hopper.stages_v,
                BUFFERS_Q=hopper.buffers_q,
                WARPGROUPS=hopper.warpgroups,
                SHARE=hopper.share and self._map_out is not None,
                WARPS=warps,
                WIDENERS=wideners,
                PARTIES=hopper.warpgroups * WARPGROUP + warps * WARP,
            )
            kernel = prefill_wide_kernel if self._is_wide else prefill_kernel
            kind = {"num_warps": 4, "maxnreg": hopper.registers(wideners)}
            return MapLaunch(kernel, {"OPTIONS": asked, "TILE": tile, **kind})

        self._prefill, self._tall = launch_of(hopper), None
        if takes_tall(x, options):
            self._tall = launch_of(hopper_tile(portable.head_dim, portable.words, True))

    def run(self, x: call.Tensors, tokens: int, max_seqlen_k: int) -> None:
        """Launch one call."""
        portable, launch, block = self.portable, self._prefill, 2 * self._rows
        size = portable.batch, self._packs, self._rows, portable.processors
        if self._tall is not None and is_worth_tall(tokens, *size):
            launch, block = self._tall, 3 * self._rows
        total = (tokens // block + portable.batch + 2) * self._packs
        splits = portable.count_splits(portable.count_units(tokens), tokens, max_seqlen_k)
        if splits > 1 or total > MAX_TICKETS:
            # few sequences: the portable kernel splits their keys
            portable.run(x, tokens, max_seqlen_k)
            return
        q, out, out_ptr = self._map_q(x.q), None, x.out
        if self._map_out is not None:
            out, out_ptr = self._map_out(x.out), None
        new: list[TensorMap | None] = [None, None]
        if self._new_maps is not None and x.k is not None and x.v is not None:
            new = [self._new_maps[0](x.k), self._new_maps[1](x.v)]
        tensors = Tensors(
            q_desc=q,
            k_desc=None if self._is_wide else self._map_k(x.k_cache),
            v_desc=None if self._is_wide else self._map_v(x.v_cache),
            new_k_desc=new[0],
            new_v_desc=new[1],
            out_desc=out,
            out_ptr=out_ptr,
            lse_ptr=x.lse,
            ticket_ptr=self._ticket(x.q.device),
            block_table_ptr=x.block_table,
            cu_seqlens_q_ptr=x.cu_seqlens_q,
            seqlens_k_ptr=x.seqlens_k,
            alibi_slopes_ptr=x.alibi_slopes,
            sinks_ptr=x.sinks,
        )
        cache: WideTensors | tuple[()] = ()
        if self._is_wide:
            scales = x.k_descale, x.v_descale, x.k_scale_cache, x.v_scale_cache
            cache = WideTensors(x.k_cache, x.v_cache, *scales)
        counts = tokens, total
        numbers = self._counted.get(counts) or self._counted.keep(counts, self._count(*counts))
        launch(min(portable.processors, total), tensors + cache, numbers)

    def _count(self, tokens: int, total: int) -> tuple[float, ...]:
        return flat(self._numbers._replace(tokens=tokens, total=total), self._wide_numbers)


def as_rows(cache: Tensor) -> Tensor:
    """Return a view of a cache as ``[slots, heads, d]``; gaps between pages stay in the view."""
    return cache.as_strided((rows_of_cache(cache), *cache.shape[2:]), cache.stride()[1:])
