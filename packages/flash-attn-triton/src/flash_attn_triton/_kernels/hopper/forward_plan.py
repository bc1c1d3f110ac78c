"""The host side of the Hopper forward: tensor maps, the order of tiles, the launch."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ..._call import Options, Tensors
from ..._configs import HopperTile, hopper_pack, hopper_tile, is_long_call, padded_head_dim
from ..forward import ForwardPlan
from ..launch.runtime import dense
from ._linked.tickets import MAX_TICKETS, kept_ticket, new_ticket
from ._linked.tma import MapForm, MapLaunch
from .forward import forward_kernel
from .values import ValuesForm

# pairs of token counts whose launches a plan keeps
MAX_COUNTS = 256


class Work(NamedTuple):
    """What a launch does for one pair of token counts."""

    # no program: not for this kernel
    grid: int
    numbers: tuple[float, ...]
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]


class HopperForwardPlan(ForwardPlan):
    """The forward pass of the calls of one form that ``takes_hopper_forward`` takes."""

    def __init__(
        self,
        x: Tensors,
        options: Options,
        out_dtype: torch.dtype,
        deterministic: bool = False,
        is_kept: bool = False,
        tile: HopperTile | None = None,
    ) -> None:
        """Take a call, and whether the plan serves others after it."""
        super().__init__(x, options, out_dtype, deterministic)
        self._ticket = kept_ticket if is_kept else new_ticket
        # by numbers of tokens, in which packed calls of one form differ
        self._work: dict[tuple[int, int], Work] = {}
        q, k, v, alibi_slopes = x.q, x.k, x.v, x.alibi_slopes
        has_right = options.window_right >= 0
        tile = tile or hopper_tile(
            self.widest_head, has_right, self.itemsize, is_long_call(x, options)
        )
        # how many tokens of a packed call are a sequence's is known on the device alone
        pack = 1 if self.is_packed else hopper_pack(q.shape[1], self.group, tile.block_m)
        self._packs = self.heads_q // pack
        self._block = tile.block_m // pack
        wide, wide_v = padded_head_dim(q.shape[-1]), padded_head_dim(self.head_dim_v)
        self._map_q = MapForm(q, tile.rows, wide, ragged=self.is_packed, heads=pack)
        self._map_k = MapForm(k, tile.block_n, wide, ragged=self.is_packed)
        if self.itemsize == 1:
            self._values = ValuesForm(self, x, tile.block_n)
        else:
            self._map_v = MapForm(v, tile.block_n, wide_v, ragged=self.is_packed)
        out = torch.empty((*q.shape[:-1], self.head_dim_v), dtype=out_dtype, device="meta")
        self._map_out = MapForm(out, tile.rows, wide_v, ragged=self.is_packed, heads=pack)
        self._head_numbers = (
            options.softmax_scale, options.softcap, *self.window, self.batch, self.heads_q,
        )  # fmt: skip
        self._stride_alibi_b = (
            self.heads_q if alibi_slopes is not None and alibi_slopes.ndim == 2 else 0
        )
        self._hopper_launch = self.launch(
            forward_kernel,
            of=MapLaunch,
            GROUP=self.group,
            PACK=pack,
            HAS_LEFT=options.window_left >= 0,
            HAS_RIGHT=has_right,
            HAS_SOFTCAP=options.softcap != 0.0,
            RAGGED=self.is_packed,
            WARPGROUPS=tile.warpgroups,
            ROWS=tile.rows,
            BLOCK_N=tile.block_n,
            HEAD_DIM=wide,
            HEAD_DIM_V=wide_v,
            STAGES_K=tile.stages_k,
            STAGES_V=tile.stages_v,
            BUFFERS_Q=tile.buffers_q,
            SHARE=tile.share and wide == wide_v,
            PIPELINE=tile.pipeline,
            LAG=tile.lag,
            num_warps=4,
            maxnreg=tile.registers,
        )

    def forward(self, x: Tensors) -> tuple[Tensor, Tensor]:
        """Return ``(out, lse)`` of tensors as ``readable`` leaves them."""
        q, k, v = x.q, x.k, x.v
        tokens_q, tokens_k = q.shape[-3], k.shape[-3]
        work = self._work.get((tokens_q, tokens_k))
        if work is None:
            work = self._count_work(q, tokens_k)
            if len(self._work) < MAX_COUNTS:
                self._work[tokens_q, tokens_k] = work
        if work.grid == 0:
            return super().forward(x)  # type: ignore[no-untyped-call, no-any-return]
        # sizes one by one: PyTorch takes longer over a tuple of them
        out = q.new_empty(*work.out_shape, dtype=self._out_dtype)
        lse = q.new_empty(*work.lse_shape, dtype=torch.float32)
        map_v, factors = self._values(x) if self.itemsize == 1 else (self._map_v(v), None)
        self._hopper_launch(
            work.grid,
            (
                self._map_q(q), self._map_k(k), map_v, self._map_out(out), lse,
                self._ticket(q.device), dense(x.alibi_slopes), dense(x.sinks), factors,
                dense(x.cu_seqlens_q), dense(x.cu_seqlens_k), dense(x.seqused_k),
            ),
            work.numbers,
        )  # fmt: skip
        return out, lse

    def _count_work(self, q: Tensor, tokens_k: int) -> Work:
        tokens_q = q.shape[-3]
        tiles = self.tiles(tokens_q, self._block)
        total = tiles * self._packs * self.grid_batch
        # empty tensors have no map, and tickets have 32 bits
        if tokens_q == 0 or tokens_k == 0 or self.batch == 0 or total > MAX_TICKETS:
            return Work(0, (), (), ())
        span = max(1, self.span_q(tokens_k) * self._packs // self.heads_q)
        last = span + self.batch * self._packs % span
        walk = tokens_q, tokens_k, tiles, span, last, total
        return Work(
            min(_multiprocessors(q.device), total),
            (*self._head_numbers, *walk, self._stride_alibi_b),
            (*q.shape[:-1], self.head_dim_v),
            (*q.shape[:-3], self.heads_q, tokens_q),
        )


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type == "meta":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count
