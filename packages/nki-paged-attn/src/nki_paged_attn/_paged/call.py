"""What a call is: its checked options, and the lengths of its sequences."""

from __future__ import annotations

from dataclasses import dataclass

from ..sim.arrays import Array
from .checks import FP32_MAX
from .sequences import Packed, pack_lengths

# smaller factors are multiplied into the queries, because masked scores are finite numbers, too
SMALLEST_FACTOR = 2.0**-40
# largest ratio of heads' scales if fp16 queries are multiplied by a factor so small that it rounds
# them: with keys up to 448, scores of the largest scale are off by about 2**-11
WIDEST_SCALES = 2.0**40


@dataclass(frozen=True)
class Options:
    """Checked options of a call.

    Attributes:
        softcap: 0.0 for none.
        k_scales, v_scales: of the cache, for each KV head.
        dtype: NKI name of the dtype of the operands of products.
        is_packed: whether two tokens of the cached keys are interleaved.
        turns_by_dma: whether DMA turns the probabilities of a prompt.
        largest: limit of new keys and values that are written; 0.0 for no limit.
        target: generation for which FP8 is written.
    """

    scale: float
    softcap: float
    sinks: Array | None
    k_scales: tuple[float, ...]
    v_scales: tuple[float, ...]
    has_lse: bool
    dtype: str
    is_packed: bool = False
    turns_by_dma: bool = False
    largest: float = 0.0
    target: str = "trn2"

    def __post_init__(self) -> None:
        # with a softcap the kernel limits the factor
        factor = abs(self.scale) * max(self.k_scales, default=1.0)
        if not self.softcap and factor > FP32_MAX:
            raise ValueError(f"scale times k_scale must be finite in fp32, got {factor:.3g}")
        least, most = self.least_scale, max(1.0, *self.k_scales)
        is_folded = abs(self.scale) * least < SMALLEST_FACTOR
        if self.dtype == "float16" and is_folded and most / least > WIDEST_SCALES:
            raise ValueError(
                f"k_scale of heads, and 1 for new keys, must be within {WIDEST_SCALES:.3g} of each "
                f"other with float16 queries and scale {self.scale:.3g}, got {least:.3g} and "
                f"{most:.3g}"
            )

    @classmethod
    def plain(
        cls,
        scale: float,
        kv_heads: int,
        dtype: str,
        *,
        softcap: float = 0.0,
        has_lse: bool = False,
        turns_by_dma: bool = False,
    ) -> Options:
        """Return options without sinks and scales of the cache."""
        ones = (1.0,) * kv_heads
        return cls(scale, softcap, None, ones, ones, has_lse, dtype, turns_by_dma=turns_by_dma)

    @property
    def least_scale(self) -> float:
        """The smallest scale of keys: of the cache, or 1, the scale of new keys."""
        return min(1.0, *self.k_scales)

    @property
    def is_scaled(self) -> bool:
        """Whether cached keys or values have scales other than 1."""
        return any(s != 1.0 for s in (*self.k_scales, *self.v_scales))


@dataclass(frozen=True)
class Batch:
    """Checked lengths and block numbers of a call.

    Attributes:
        table: ``[batch, max_blocks]``.
        tokens: rows of the packed queries.
        is_cached: whether the new tokens' keys and values are in the cache already; contexts count
            what was there before.
        writes: whether the call writes the new tokens into the cache.
    """

    query_lens: Array
    context_lens: Array
    table: Array
    tokens: int
    window: int | None
    is_cached: bool = False
    writes: bool = False

    def pack(self, block_size: int) -> Packed:
        """Return the sequences, as a form runs them."""
        return pack_lengths(
            self.query_lens,
            self.context_lens,
            self.table,
            block_size,
            self.tokens,
            self.window,
            is_cached=self.is_cached,
            writes=self.writes,
        )
