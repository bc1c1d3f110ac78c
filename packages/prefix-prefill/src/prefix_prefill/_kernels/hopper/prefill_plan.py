"""The host side of prefill on Hopper: tensor maps, the order of tiles, the launch."""

from __future__ import annotations

from torch import Tensor

from ..._call import Options, Tensors
from ..._configs import Tile, copied_keys, hopper_tile, padded_head_dim, rows_of_cache, rows_of_page
from ..._linked.host.arguments import MAX_WINDOW
from ..tiled import Tiled
from ._linked.tickets import MAX_TICKETS, kept_ticket, new_ticket
from ._linked.tma import MapForm, MapLaunch
from .attention import prefill_kernel


class HopperTiled(Tiled):
    """The long tile of the calls of one form that ``takes_hopper`` takes."""

    def __init__(
        self, x: Tensors, options: Options, tile: Tile, least: int, most: int, is_kept: bool
    ) -> None:
        """Take a call, and whether the plan serves others after it."""
        super().__init__(x, options, tile, least, most, None)
        self._ticket = kept_ticket if is_kept else new_ticket
        hopper = hopper_tile(self.head_dim)
        left, right = options.window_left, options.window_right
        page = x.k_cache.shape[1]
        piece = copied_keys(page, left, hopper.block_n)
        pack = hopper.pack(self.group)
        self._packs = x.q.shape[1] // pack
        self._block = hopper.block_m // pack
        wide = padded_head_dim(self.head_dim)
        self._map_q = MapForm(x.q, hopper.rows, wide, ragged=True, heads=pack)
        self._map_out = MapForm(x.out, hopper.rows, wide, ragged=True, heads=pack)
        self._map_k = MapForm(as_rows(x.k_cache), piece, wide, ragged=True)
        self._map_v = MapForm(as_rows(x.v_cache), piece, wide, ragged=True)
        self._head_numbers = (
            options.softmax_scale, options.softcap, min(left, MAX_WINDOW), min(right, MAX_WINDOW),
            self.batch, self._packs,
        )  # fmt: skip
        slopes_per_row = x.alibi_slopes is not None and x.alibi_slopes.ndim == 2
        self._tail_numbers = (
            rows_of_page(x.k_cache), rows_of_page(x.v_cache), *x.block_table.stride(),
            x.q.shape[1] if slopes_per_row else 0,
        )  # fmt: skip
        self._prefill = MapLaunch(
            prefill_kernel,
            {
                "GROUP": self.group,
                "PACK": pack,
                "PAGE": page,
                "PIECE": piece,
                "MIN_TOKENS": least,
                "HAS_LEFT": left >= 0,
                "HAS_RIGHT": right >= 0,
                "HAS_SOFTCAP": options.softcap != 0.0,
                "ROWS": hopper.rows,
                "BLOCK_N": hopper.block_n,
                "HEAD_DIM": wide,
                "STAGES_K": hopper.stages_k,
                "STAGES_V": hopper.stages_v,
                "SHARE": hopper.share,
                "num_warps": 4,
                "maxnreg": hopper.registers,
            },
        )

    def run(
        self,
        inputs: tuple[Tensor | None, ...],
        rest: tuple[Tensor | None, ...],
        tokens: int,
        max_seqlen_k: int,
    ) -> None:
        """Launch for one call."""
        q, k_cache, v_cache, _, _, out, lse = inputs
        total = (tokens // self._block + self.batch + 2) * self._packs
        units = tokens * self.group // self.tile.block_m + self.batch + 2
        if self.splits(units, tokens, max_seqlen_k) > 1 or total > MAX_TICKETS:
            # the portable kernel cuts sequences where they are few
            super().run(inputs, rest, tokens, max_seqlen_k)
            return
        table, starts, lengths, _, slopes, sinks, *_ = rest
        self._prefill(
            min(self.processors, total),
            (
                self._map_q(q), self._map_k(k_cache), self._map_v(v_cache), self._map_out(out),
                lse, self._ticket(q.device), table, starts, lengths, slopes, sinks,
            ),
            (*self._head_numbers, tokens, total, *self._tail_numbers),
        )  # fmt: skip


def as_rows(cache: Tensor) -> Tensor:
    """Return the view of a cache as one row of slots after the other, between pages whatever."""
    return cache.as_strided((rows_of_cache(cache), *cache.shape[2:]), cache.stride()[1:])
