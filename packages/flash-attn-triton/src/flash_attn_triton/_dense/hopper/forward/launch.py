"""The host side of the Hopper forward: tensor maps, the order of tiles, the launches."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple

import torch
from attn_common import cdiv
from torch import Tensor

from ...._linked.hopper.tickets import MAX_TICKETS, kept_ticket, new_ticket
from ...._linked.hopper.tma import MapForm, MappingLaunch, is_mappable
from ...._linked.host.forms import ACCESS_BYTES, Memory
from ...._linked.host.tiles import padded_head_dim
from ...._linked.launch.entries import flat
from ...._linked.launch.kernels import Kernel
from ...._linked.launch.runtime import MAX_COUNTS, Launch, dense, token_strides
from ...._linked.portable.strides import Strides
from ...call import Forward, Tensors
from ...hopper_tiles import (
    ForwardPanels,
    HopperTile,
    forward_panels,
    hopper_bias_tile,
    hopper_pack,
    hopper_panel_tile,
    hopper_tile,
    is_long_call,
)
from ...portable.form import Form, expand_descales
from ..bias_launch import BiasForm, dimensions_of, once
from .arguments import (
    Maps,
    Numbers,
    Options,
    PanelMaps,
    Tile,
    ValuesNumbers,
    ValuesOptions,
    ValuesTensors,
)

forward_kernel = Kernel(__package__, ".kernel", "forward_kernel")
transpose_values = Kernel(__package__, ".values", "transpose_values")

# 256 GiB: larger than any tensor, and still a legal stride of a tensor map (40 bits)
MOST_BYTES = 1 << 38


class Work(NamedTuple):
    """Arguments of a launch that depend on the token counts of queries and keys."""

    grid: int
    numbers: Numbers
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]


class Merging(NamedTuple):
    """A launch that merges its results into earlier results."""

    launch: MappingLaunch
    grid: int
    numbers: Numbers


class HopperForward:
    """The forward launcher of one signature for which ``takes_hopper_forward`` is true."""

    def __init__(
        self,
        form: Form,
        x: Tensors,
        out_dtype: torch.dtype,
        portable: Forward,
        *,
        is_kept: bool = False,
        tile: HopperTile | None = None,
    ) -> None:
        """Prepare the launches; ``is_kept``: the launcher will be reused.

        ``portable`` runs empty calls and calls with too many tiles.
        """
        self._form = form
        self._out_dtype = out_dtype
        self._portable = portable
        self._ticket = kept_ticket if is_kept else new_ticket
        # by token counts, which the signature of a packed call does not fix
        self._work: Memory[Work] = Memory(MAX_COUNTS)
        q, ragged = x.q, form.is_packed
        has_right = form.constants.HAS_RIGHT
        panels = _forward_panels(form, x)
        tile = tile or _forward_tile(form, x, panels)
        # heads share a tile (GQA packing) only if its rows have one length, one dropout key and
        # one bias
        is_apart = ragged or form.options.dropout_p > 0.0 or x.bias is not None
        pack = 1 if is_apart else hopper_pack(q.shape[1], form.group, tile.block_m)
        self._packs = form.heads_q // pack
        self._block = tile.block_m // pack
        (wide, narrow), (wide_v, narrow_v) = panels
        self._values = ValuesForm(form, x, tile.block_n) if form.itemsize == 1 else None
        out = torch.empty((*q.shape[:-1], form.head_dim_v), dtype=out_dtype, device="meta")

        def map_of(t: Tensor, rows: int, columns: int, heads: int = 1) -> MapForm | None:
            return MapForm(t, rows, columns, ragged=ragged, heads=heads) if columns else None

        bias = None if x.bias is None else BiasForm(x.bias, tile.rows, tile.block_n)
        # for q, k, v and out
        self._narrow = narrow, narrow, narrow_v, narrow_v
        self._is_cut = panels.is_cut

        def maps_of_out(out: Tensor) -> tuple[MapForm | None, MapForm | None]:
            return map_of(out, tile.rows, wide_v, pack), map_of(out, tile.rows, narrow_v, pack)

        out_map, narrow_out_map = maps_of_out(out)
        self._maps = Maps(
            wide=PanelMaps(
                q=map_of(q, tile.rows, wide, pack),
                k=map_of(x.k, tile.block_n, wide),
                v=self._values.map if self._values else map_of(x.v, tile.block_n, wide_v),
                out=out_map,
            ),
            narrow=PanelMaps(
                q=map_of(q, tile.rows, narrow, pack),
                k=map_of(x.k, tile.block_n, narrow),
                v=map_of(x.v, tile.block_n, narrow_v),
                out=narrow_out_map,
            ),
            bias=bias,
        )
        # for merging: how to make the output's maps, and the launches by the strides of out
        self._maps_of_out = maps_of_out
        self._launches: Memory[MappingLaunch] = Memory(MAX_COUNTS)
        options = Options(
            GROUP=form.group,
            PACK=pack,
            HAS_LEFT=form.constants.HAS_LEFT,
            HAS_RIGHT=has_right,
            HAS_SOFTCAP=form.constants.HAS_SOFTCAP,
            RAGGED=ragged,
            **dimensions_of(bias),
        )
        shape = Tile(
            WARPGROUPS=tile.warpgroups,
            ROWS=tile.rows,
            BLOCK_N=tile.block_n,
            HEAD_DIM=wide,
            NARROW=narrow,
            HEAD_DIM_V=wide_v,
            NARROW_V=narrow_v,
            BUFFERS_Q=tile.buffers_q,
            STAGES_K=tile.stages_k,
            STAGES_V=tile.stages_v,
            STAGES_B=tile.stages_b,
            SHARE=tile.share and panels.can_share,
            PIPELINE=tile.pipeline,
            LAG=tile.lag,
            ORDERED=tile.ordered,
        )
        kind = {"num_warps": 4, "maxnreg": tile.registers}
        self._options = options
        self._constants = {"OPTIONS": options, "TILE": shape, **kind}
        self._launch = MappingLaunch(forward_kernel, self._constants, flat(self._maps))
        # by token counts and the strides of results
        self._merging: Memory[Merging] = Memory(MAX_COUNTS)

    def __call__(self, x: Tensors) -> tuple[Tensor, Tensor]:
        """Return ``(out, lse)``; the tensors have passed ``readable``."""
        q = x.q
        work = self._work_of(x)
        if work is None:
            return self._portable(x)
        # PyTorch is faster with sizes one by one, and without a dtype if it is that of q
        if self._out_dtype == q.dtype:
            out = q.new_empty(*work.out_shape)
        else:
            out = q.new_empty(*work.out_shape, dtype=self._out_dtype)
        lse = q.new_empty(*work.lse_shape, dtype=torch.float32)
        self._launch(work.grid, self._tensors(x, out, lse), work.numbers)
        return out, lse

    def merge(self, x: Tensors, out: Tensor, lse: Tensor) -> bool:
        """Merge results over this call's keys into ``out`` and ``lse``, which cover other keys.

        The call has no sinks. ``out`` and ``lse`` may be views of larger tensors, each with tokens
        in order. Return whether the kernel can do it; if not, nothing is done.
        """
        counts = x.q.shape[-3], x.k.shape[-3]
        key = *counts, out.stride(), lse.stride()
        merging = self._merging.get(key)
        if merging is None:
            merging = self._new_merging(x, out, lse)
            if merging is None:
                return False
            self._merging.keep(key, merging)
        # a misaligned output would be copied, and the merged result would stay in the copy
        if out.data_ptr() % ACCESS_BYTES:
            return False
        launch, grid, numbers = merging
        launch(grid, self._tensors(x, out, lse), numbers)
        return True

    def _new_merging(self, x: Tensors, out: Tensor, lse: Tensor) -> Merging | None:
        """Return the launch that merges into tensors with these strides; None if there is none."""
        work = self._work_of(x)
        if work is None or self._values is not None or not is_mappable(out):
            return None
        strides = out.stride()
        launch = self._launches.get(strides)
        if launch is None:
            wide, narrow = self._maps_of_out(out)
            maps = self._maps._replace(
                wide=self._maps.wide._replace(out=wide),
                narrow=self._maps.narrow._replace(out=narrow),
            )
            constants = self._constants | {"OPTIONS": self._options._replace(MERGES=True)}
            launch = self._launches.keep(
                strides, MappingLaunch(forward_kernel, constants, flat(maps))
            )
        of_batch, of_head = (0, lse.stride(0)) if lse.ndim == 2 else lse.stride()[:2]
        numbers = work.numbers._replace(stride_lse_b=of_batch, stride_lse_h=of_head)
        return Merging(launch, work.grid, numbers)

    def _tensors(self, x: Tensors, out: Tensor, lse: Tensor) -> tuple[Tensor | None, ...]:
        """Return the fields of ``Maps`` and ``arguments.Tensors``."""
        v, factors = self._values(x) if self._values else (x.v, None)
        wide = x.q, x.k, v, out
        return (
            *wide,
            *(narrow_panels(wide, self._narrow) if self._is_cut else NO_PANELS),
            x.bias,
            lse,
            self._ticket(x.q.device),
            *(NO_EXTRAS if self._form.is_plain and factors is None else _extras(x, factors)),
        )

    def _work_of(self, x: Tensors) -> Work | None:
        """Return the ``Work`` of a call; None if this kernel does not run it."""
        counts = x.q.shape[-3], x.k.shape[-3]
        work = self._work.get(counts)
        if work is None:
            work = self._count_work(x.q, *counts)
            if work is not None:
                self._work.keep(counts, work)
        return work

    def _count_work(self, q: Tensor, tokens_q: int, tokens_k: int) -> Work | None:
        form, scalars = self._form, self._form.scalars
        tiles = form.tiles(tokens_q, self._block)
        total = tiles * self._packs * form.grid_batch
        # empty tensors have no map, and the tile counter has 32 bits
        if tokens_q == 0 or tokens_k == 0 or form.batch == 0 or total > MAX_TICKETS:
            return None
        span = max(1, form.span_q(tokens_k) * self._packs // form.heads_q)
        numbers = Numbers(
            scale=scalars.scale,
            softcap=scalars.softcap,
            keep_scale=scalars.keep_scale,
            dropout_threshold=scalars.dropout_threshold,
            window_left=scalars.window_left,
            window_right=scalars.window_right,
            batch=form.batch,
            heads_q=form.heads_q,
            tokens_q=tokens_q,
            tokens_k=tokens_k,
            tiles=tiles,
            span=span,
            last=span + form.batch * self._packs % span,
            total=total,
            stride_alibi_b=form.strides.alibi,
            stride_lse_b=0,
            stride_lse_h=0,
        )
        return Work(
            min(multiprocessors(q.device), total),
            numbers,
            (*q.shape[:-1], form.head_dim_v),
            (*q.shape[:-3], form.heads_q, tokens_q),
        )


# head dimensions in one panel
NO_PANELS = (None,) * 4
# calls with only q, k and v
NO_EXTRAS = (None,) * 7


def _extras(x: Tensors, factors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the fields of ``arguments.Tensors`` after the tile counter."""
    return (
        dense(x.alibi_slopes),
        dense(x.sinks),
        factors,
        x.rng_state,
        dense(x.cu_seqlens_q),
        dense(x.cu_seqlens_k),
        dense(x.seqused_k),
    )


def narrow_panels(
    tensors: tuple[Tensor, ...], widths: tuple[int, ...]
) -> tuple[Tensor | None, ...]:
    """Return the tensors that have a narrow panel, None for others: they are mapped once more."""
    return tuple(t if width else None for t, width in zip(tensors, widths, strict=True))


def _has_bias_of_rows(x: Tensors) -> bool:
    """Tell whether there is a bias with tiles of several rows: one row takes hardly any memory."""
    return x.bias is not None and once(x.bias).shape[2] > 1


def _forward_panels(form: Form, x: Tensors) -> ForwardPanels:
    """Return the panels of calls with a signature."""
    dims = form.head_dim, form.head_dim_v
    return forward_panels(*dims, form.itemsize, _has_bias_of_rows(x))


def _forward_tile(form: Form, x: Tensors, panels: ForwardPanels) -> HopperTile:
    """Return the tile of calls with a signature."""
    has_right = form.constants.HAS_RIGHT
    if _has_bias_of_rows(x):
        is_masked = has_right or form.constants.HAS_LEFT
        return hopper_bias_tile(form.widest_head, x.bias.element_size(), is_masked)
    if panels.is_cut:
        tile = hopper_panel_tile(panels)
    else:
        is_long = is_long_call(x, form.options)
        # ALiBi has as many loops as a mask, and needs as many registers
        has_loops = has_right or x.alibi_slopes is not None
        tile = hopper_tile(form.widest_head, has_loops, form.itemsize, is_long)
    return tile if x.bias is None else replace(tile, stages_b=2)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    if device.type == "meta":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


# ---- values in FP8


class ValuesForm:
    """The launch that transposes the FP8 values of one signature."""

    def __init__(self, form: Form, x: Tensors, block_n: int) -> None:
        self._form = form
        self._block_n = block_n
        self._width = padded_head_dim(form.head_dim_v)
        tile = form.heads_k * self._width * block_n
        shape = (MOST_BYTES // tile, form.heads_k, self._width, block_n)
        most = torch.empty(shape, dtype=x.v.dtype, device="meta").transpose(1, 2)
        self.map = MapForm(most, self._width, block_n, ragged=False)
        descales = x.q_descale, x.k_descale, x.v_descale
        options = ValuesOptions(
            HEAD_DIM=form.head_dim_v,
            HAS_LEFT=form.constants.HAS_LEFT,
            DESCALE_PER_HEAD=any(d is not None and d.numel() != 1 for d in descales),
            BLOCK_N=block_n,
            BLOCK_D=self._width,
        )
        # by token counts, which the signature of a packed call does not fix
        self._work: Memory[tuple[int, tuple[float, ...]]] = Memory(MAX_COUNTS)
        self._launch = Launch(transpose_values, {"OPTIONS": options, "num_warps": 4})

    def __call__(self, x: Tensors) -> tuple[Tensor, Tensor]:
        """Return the transposed values and the factors of the heads, ``[batch, heads_k, 2]``."""
        form, v = self._form, x.v
        counts = x.q.shape[-3], v.shape[-3]
        slots, numbers = self._work.get(counts) or self._work.keep(counts, self._count(v, *counts))
        out = v.new_empty((slots, form.heads_k, self._width, self._block_n))
        factors = v.new_empty((form.batch, form.heads_k, 2), dtype=torch.float32)
        descales = expand_descales(
            (x.q_descale, x.k_descale, x.v_descale), (form.batch, form.heads_k)
        )
        tensors = ValuesTensors(
            v.view(torch.uint8),
            out.view(torch.uint8),
            factors,
            *descales,
            dense(x.cu_seqlens_q),
            dense(x.cu_seqlens_k),
            dense(x.seqused_k),
        )
        self._launch(slots * form.heads_k, tensors, numbers)
        return out, factors

    def _count(self, v: Tensor, tokens_q: int, tokens_k: int) -> tuple[int, tuple[float, ...]]:
        """Return the number of tiles, and the numbers of the launch."""
        form = self._form
        tiles = cdiv(tokens_k, self._block_n)
        slots = form.batch * tiles
        if form.is_packed:
            slots = tokens_k // self._block_n + form.batch + 1
        numbers = ValuesNumbers(
            window_left=form.scalars.window_left,
            batch=form.batch,
            heads_k=form.heads_k,
            tokens_q=tokens_q,
            tokens_k=tokens_k,
            tiles=tiles,
            v=Strides(*token_strides(v)),
        )
        return slots, flat(numbers)
