"""Arguments of the Hopper kernels of multi-head latent attention."""

from __future__ import annotations

from typing import NamedTuple

from ..._cache.kernels.arguments import RowStrides, TableStrides
from ..._linked.launch.entries import Constant, Map, Number

# columns of a half of the values
HALF = 256
# rotary columns of the keys, which are no values
REST = 64


class Maps(NamedTuple):
    """Tensor maps (TMA) of a piece of a page."""

    half_desc: Map  # 256 columns
    rest_desc: Map  # the rotary columns


class Numbers(NamedTuple):
    """The scale, sizes of the batch and of the grid, and strides."""

    scale: Number
    batch: Number
    tokens: Number
    splits: Number
    q: RowStrides
    out: RowStrides
    page_rows: Number  # rows from one page of the cache to the next
    row: Number  # stride of rows of the cache
    table: TableStrides


class Tile(NamedTuple):
    """The features of a call, and how a program divides its work."""

    CAUSAL: Constant
    GROUP: Constant  # heads, all of which share the keys
    TILES: Constant  # tiles per sequence; 0: any number
    PAGE: Constant
    PIECE: Constant  # keys of one page that one copy brings
    ROWS: Constant  # heads times tokens
    BLOCK_N: Constant
    STAGES: Constant
    PARTIES: Constant  # threads at the barrier that frees half of a stage
    FOLD: Constant  # the scale is positive, and is folded into exp2
