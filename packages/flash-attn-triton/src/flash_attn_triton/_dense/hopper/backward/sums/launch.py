"""The host side of the fp32 sums of gradients: where they lie, and the launches that round them."""

from __future__ import annotations

import math
from typing import NamedTuple

from attn_common import cdiv

from ....._linked.launch.kernels import Kernel
from ....._linked.launch.runtime import Launch
from ....hopper_tiles import HopperBackwardTile, panels_of
from ....portable.arguments import PIECE
from ....portable.form import Form
from ..arguments import RoundingNumbers, RoundingOptions, has_panel_each

round_kernel = Kernel(__package__, ".kernel", "round_kernel")


class Roundings(NamedTuple):
    """The launches that round each gradient; those of dk and dv run if programs share keys."""

    dq: Launch
    dk: Launch
    dv: Launch


class Sums(NamedTuple):
    """The sums of a call: rows that hold a tile of dq each, cleared before the backward.

    Those of dq come first; then, if programs share keys, those of dk and dv; then counters.
    """

    shape: tuple[int, int]
    dk_at: int  # first row
    dv_at: int
    counters_at: int
    slots: int  # tiles of queries of all heads; one program rounds each
    key_slots: int  # blocks of keys of all key heads
    of_queries: RoundingNumbers
    of_keys: RoundingNumbers


def round_launches(
    form: Form, tile: HopperBackwardTile, *, has_left: bool, has_right: bool, shares: int = 1
) -> Roundings:
    """Return the launches of a signature; ``shares``: places of a block that are added up."""

    def launch(head_dim: int, block: int, has_window: bool, **others: int) -> Launch:
        wide, narrow = panels_of(head_dim)
        options = RoundingOptions(
            HAS_WINDOW=has_window,
            BLOCK=block,
            HEAD_DIM=head_dim,
            WIDE=wide,
            NARROW=narrow,
            **others,
        )
        return Launch(round_kernel, {"OPTIONS": options, "num_warps": 4})

    # a tile of 128 queries is divided by rows
    is_whole = tile.block_m == 128
    is_whole = is_whole or has_panel_each(*panels_of(form.head_dim), tile.block_m, tile.block_n)
    return Roundings(
        launch(form.head_dim, tile.block_m, has_right, COLUMN_PARTS=1 if is_whole else 2),
        launch(form.head_dim, tile.block_n, has_left, OF_KEYS=True, SHARES=shares),
        launch(form.head_dim_v, tile.block_n, has_left, OF_KEYS=True, SHARES=shares),
    )


def whole_pieces(rows: int, width: int) -> int:
    """Return so many rows or a few more: they are cleared by whole pieces, of ``PIECE`` numbers."""
    unit = PIECE // math.gcd(PIECE, width)
    return cdiv(rows, unit) * unit


def count_sums(
    form: Form,
    tile: HopperBackwardTile,
    tokens: tuple[int, int],
    places: int,
    counters: int = 0,
) -> Sums:
    """Return the sums for the token counts of queries and keys.

    ``places`` counts those of each block of keys, 0 if no programs share it.
    """
    tokens_q, tokens_k = tokens
    tiles_q, tiles_k = form.tiles(tokens_q, tile.block_m), form.tiles(tokens_k, tile.block_n)
    slots = tiles_q * form.heads_q * form.grid_batch
    key_slots = tiles_k * form.heads_k * form.grid_batch
    row = tile.block_m * sum(panels_of(form.head_dim))
    rows, rows_v = (
        cdiv(places * key_slots * tile.block_n * sum(panels_of(d)), row)
        for d in (form.head_dim, form.head_dim_v)
    )
    end = slots + rows + rows_v
    scalars = form.scalars
    queries = RoundingNumbers(
        scale=scalars.scale * scalars.keep_scale,
        window=scalars.window_right,
        batch=form.batch,
        heads=form.heads_q,
        tokens_own=tokens_q,
        tokens_other=tokens_k,
        tiles=tiles_q,
    )
    return Sums(
        shape=(whole_pieces(end + cdiv(counters, row), row), row),
        dk_at=slots,
        dv_at=slots + rows,
        counters_at=end,
        slots=slots,
        key_slots=key_slots,
        of_queries=queries,
        # the backward has scaled dk
        of_keys=queries._replace(
            scale=1.0,
            window=scalars.window_left,
            heads=form.heads_k,
            tokens_own=tokens_k,
            tokens_other=tokens_q,
            tiles=tiles_k,
        ),
    )
