"""Which lists the kernels of a platform want: the tiles decide."""

from __future__ import annotations

from attn_common import Platform

from ._configs import backward_dkdv_tile, backward_dq_shape, short_shape, tall_shape
from ._lists import ListSpec

KINDS = ("tall", "short", "dq", "dkdv")


def spec_of(
    kind: str,
    platform: Platform,
    head_dim: int,
    itemsize: int,
    block_q: int,
    group: int,
    is_shared: bool,
    rows_alike: bool,
    causal: bool,
) -> ListSpec:
    """Return what the lists of one kernel are made from, besides the layout.

    Args:
        kind: "tall" and "short", the forward's tiles of many queries and of a few; "dq"; "dkdv".
        platform: where the kernel runs.
        head_dim: the wider of the two head dimensions.
        itemsize: bytes of a number.
        block_q: queries of a block.
        group: query heads per key head.
        is_shared: whether all heads have one pattern.
        rows_alike: whether neighbouring rows resemble each other.
        causal: whether what lies right of the diagonal is left out.
    """
    if kind == "dkdv":
        tile = backward_dkdv_tile(platform, head_dim, itemsize)
        return ListSpec(True, tile.block_n, 1 if is_shared else group, 1, causal)
    if kind == "short":
        shape = short_shape(platform, head_dim, itemsize, block_q, group, is_shared)
    else:
        choose = tall_shape if kind == "tall" else backward_dq_shape
        shape = choose(platform, head_dim, itemsize, block_q, group, is_shared, rows_alike)
    return ListSpec(False, shape.span, shape.group, shape.pack, causal)
