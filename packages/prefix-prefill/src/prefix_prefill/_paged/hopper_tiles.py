"""Tile sizes of the Hopper kernels; no function here needs a GPU. See ``tiles.py``."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from attn_common import cdiv

from .._linked.host.tiles import hopper_registers, padded_head_dim
from .call import Options, Tensors
from .tiles import words_of

# time of a step with three warpgroups, relative to two; rather overestimated
TALL_STEP = 1.4


@dataclass(frozen=True)
class HopperTile:
    """How a program divides its work; every MMA warpgroup has 64 rows."""

    block_n: int
    stages_k: int
    stages_v: int
    share: bool = False  # the output is staged in the queries' shared memory
    rows: int = 64
    wideners: int = 2  # warpgroups that widen a cache of 8 or 4 bits
    warpgroups: int = 2  # MMA warpgroups
    buffers_q: int = 1

    @property
    def block_m(self) -> int:
        return self.warpgroups * self.rows

    def pack(self, group: int) -> int:
        """Return how many heads of a group share a tile (GQA packing): a power of two."""
        return min(group & -group, self.rows)

    def least_tokens(self, group: int) -> int:
        """Return the fewest queries of a sequence for which the Hopper kernel is used.

        A group that does not fit one tile takes several, and few queries would leave them almost
        empty; the portable kernel packs all heads of the group into one tile. The result depends on
        nothing else, so a sequence is computed the same way in every batch.
        """
        pack = self.pack(group)
        return 1 if pack == group else self.rows // pack + 1

    def registers(self, wideners: int) -> int:
        """Return the registers per thread at the start; without ``wideners`` one warp copies."""
        return hopper_registers(self.warpgroups - 1 + max(wideners, 1))


@functools.cache
def hopper_tile(head_dim: int, words: str = "", is_tall: bool = False) -> HopperTile:
    """Return the tile for sequences with many queries; for ``words`` see ``words_of``.

    ``is_tall``: three MMA warpgroups, if the head dimension allows them: see ``is_worth_tall``.
    """
    width = padded_head_dim(head_dim)
    if width <= 64 and is_tall:
        return HopperTile(128, 3, 3, warpgroups=3, buffers_q=2)
    if width <= 64:
        return HopperTile(128, 3, 3, wideners=1, buffers_q=1 if words else 2)
    if width <= 128:
        # the scales take the rest of shared memory
        return HopperTile(128, 3, 2, share=words not in ("", "fp8"))
    # one widener: with two, a product of 256 columns has too few registers at the start
    return HopperTile(64, 3, 2, share=True, wideners=1)


def takes_tall(x: Tensors, options: Options) -> bool:
    """Return whether a call may use three MMA warpgroups: no option needs more registers."""
    return (
        padded_head_dim(x.q.shape[-1]) <= 64
        and words_of(x) == ""
        and options.window_left < 0
        and options.softcap == 0.0
        and x.alibi_slopes is None
    )


@functools.lru_cache(maxsize=4096)
def is_worth_tall(tokens: int, batch: int, packs: int, rows: int, processors: int) -> bool:
    """Return whether tiles of three MMA warpgroups take less time than tiles of two.

    A step of three warpgroups gathers the same keys for more rows, but fewer, larger tiles fill the
    last wave worse. The choice changes no bit: a row visits the same keys in the same order. The
    estimate assumes ``batch`` sequences of equal length; ``rows`` are the tokens of a warpgroup.
    """
    batch = max(batch, 1)
    length = cdiv(tokens, batch)
    two, three = (
        cdiv(batch * packs * cdiv(length, warpgroups * rows), processors) for warpgroups in (2, 3)
    )
    return three * TALL_STEP < two
