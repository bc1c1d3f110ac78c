"""Tiles of the kernels for Hopper: functions that need no GPU; see ``tiles.py``."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from attn_common import cdiv

from .._linked.host.tiles import hopper_registers, padded_head_dim
from .call import Options, Tensors
from .tiles import words_of

# how long a step of three warpgroups takes, in steps of two, taken too long rather than too short
TALL_STEP = 1.4


@dataclass(frozen=True)
class HopperTile:
    """How a program divides its work; every warpgroup that multiplies has 64 rows."""

    block_n: int
    stages_k: int
    stages_v: int
    share: bool = False  # the output leaves through the queries' memory
    rows: int = 64
    wideners: int = 2  # warpgroups that widen a cache of 8 or 4 bits
    warpgroups: int = 2  # that multiply
    buffers_q: int = 1

    @property
    def block_m(self) -> int:
        return self.warpgroups * self.rows

    def pack(self, group: int) -> int:
        """Return how many heads of a group lie side by side in a tile: a power of two."""
        return min(group & -group, self.rows)

    def least_tokens(self, group: int) -> int:
        """Return the least queries of a sequence that is worth tiles of two warpgroups.

        A group that is not packed whole takes several tiles, which few queries leave all but empty;
        the portable kernel has every head of the group in one. It depends on nothing else: a
        sequence is computed in the same way whatever shares its batch.
        """
        pack = self.pack(group)
        return 1 if pack == group else self.rows // pack + 1

    def registers(self, wideners: int) -> int:
        """Return the registers a thread at the start, with one warp or warpgroup that copies.

        Or with as many as widen.
        """
        return hopper_registers(self.warpgroups - 1 + max(wideners, 1))


@functools.cache
def hopper_tile(head_dim: int, words: str = "", is_tall: bool = False) -> HopperTile:
    """Return the tile for sequences with many queries.

    ``words`` is what the cache holds, see ``words_of``; ``is_tall`` asks for the tile that
    ``is_worth_tall`` is about.
    """
    width = padded_head_dim(head_dim)
    if width <= 64 and is_tall:
        return HopperTile(128, 3, 3, warpgroups=3, buffers_q=2)
    if width <= 64:
        return HopperTile(128, 3, 3, wideners=1, buffers_q=1 if words else 2)
    if width <= 128:
        # the scales take what else is left of shared memory
        return HopperTile(128, 3, 2, share=words not in ("", "fp8"))
    # one widens: with two, a product of 256 columns has too few registers at the start
    return HopperTile(64, 3, 2, share=True, wideners=1)


def takes_tall(x: Tensors, options: Options) -> bool:
    """Say whether tiles of three warpgroups may serve a call: no feature wants more registers."""
    return (
        padded_head_dim(x.q.shape[-1]) <= 64
        and words_of(x) == ""
        and options.window_left < 0
        and options.softcap == 0.0
        and x.alibi_slopes is None
    )


@functools.lru_cache(maxsize=4096)
def is_worth_tall(tokens: int, batch: int, packs: int, rows: int, processors: int) -> bool:
    """Say whether tiles of three warpgroups are done sooner than those of two.

    A step of theirs gathers as many keys for more rows, but fewer tiles fill the last wave less.
    No result's bits depend on it: a row meets the same keys in the same order.

    Args:
        tokens: queries of all sequences, which are taken to be of one length.
        batch: sequences.
        packs: tiles side by side, of one range of tokens.
        rows: tokens of a warpgroup.
        processors: how many the GPU has.
    """
    batch = max(batch, 1)
    length = cdiv(tokens, batch)
    two, three = (
        cdiv(batch * packs * cdiv(length, warpgroups * rows), processors) for warpgroups in (2, 3)
    )
    return three * TALL_STEP < two
