"""The problems that the benchmark measures: shapes, work and memory traffic. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

BYTES = {"bf16": 2, "fp8": 1}


@dataclass(frozen=True)
class Problem:
    """One call over a paged cache.

    Attributes:
        name: Unique.
        family: ``prefill``, ``decode``, ``mixed`` or ``window``; what the rate is counted in.
        lengths: New tokens and cached ones of every sequence.
        page: Slots of a page.
        window: Keys to the left that a query sees; -1 is all.
        layout: ``nhd`` or ``packed``.
        cache: Dtype of the cache, ``bf16`` or ``fp8``.
        dense: Whether the new keys lie beside the cache.
    """

    name: str
    family: str
    lengths: tuple[tuple[int, int], ...]
    page: int = 16
    heads_q: int = 32
    heads_k: int = 8
    head_dim: int = 128
    window: int = -1
    layout: str = "nhd"
    cache: str = "bf16"
    dense: bool = False

    @property
    def tokens(self) -> int:
        return sum(new for new, _ in self.lengths)

    @property
    def max_new(self) -> int:
        return max(new for new, _ in self.lengths)

    @property
    def max_keys(self) -> int:
        return max(new + cached for new, cached in self.lengths)

    @property
    def flops(self) -> float:
        """Return the usual count: 4 H D for each pair of query and visible key."""
        pairs = 0.0
        for new, cached in self.lengths:
            seen = new * cached + new * new / 2
            pairs += seen if self.window < 0 else min(seen, new * (self.window + 1.0))
        return 4.0 * self.heads_q * self.head_dim * pairs

    @property
    def bytes(self) -> float:
        """Return the bytes of keys and values that have to be read once."""
        keys = 0
        for new, cached in self.lengths:
            keys += new + cached if self.window < 0 else min(new + cached, new + self.window)
        return 2.0 * keys * self.heads_k * self.head_dim * BYTES[self.cache]

    def shrunk(self) -> Problem:
        """Return a tiny problem of the same kind, to try the script without a GPU."""
        lengths = tuple((min(new, 9), min(cached, 40)) for new, cached in self.lengths[:3])
        return replace(self, lengths=lengths, heads_q=4, heads_k=2, head_dim=16)


_DECODE = {
    "decode-64x8192": ((1, 8191),) * 64,
    "decode-1x65536": ((1, 65535),),
    "decode-256x2048": ((1, 2047),) * 256,
}
_PREFILL = {
    "prefill-8x1024+7168": ((1024, 7168),) * 8,
    "prefill-8x512+4096": ((512, 4096),) * 8,
    "prefill-1x2048+14336": ((2048, 14336),),
    "prefill-4x1024+0": ((1024, 0),) * 4,
}
_DECODES, _CHUNKS = ((1, 8191),) * 32, ((512, 4096),) * 4

PROBLEMS = (
    *(Problem(name, "prefill", lengths) for name, lengths in _PREFILL.items()),
    *(Problem(name, "decode", lengths) for name, lengths in _DECODE.items()),
    Problem("prefill-8x1024+7168-p128", "prefill", ((1024, 7168),) * 8, page=128),
    Problem("prefill-8x1024+7168-dense", "prefill", ((1024, 7168),) * 8, dense=True),
    Problem("prefill-8x512+4096-packed", "prefill", ((512, 4096),) * 8, layout="packed"),
    Problem(
        "prefill-8x512+4096-packed-dense",
        "prefill",
        _PREFILL["prefill-8x512+4096"],
        layout="packed",
        dense=True,
    ),
    Problem("decode-64x8192-packed", "decode", _DECODE["decode-64x8192"], layout="packed"),
    Problem("decode-64x8192-fp8", "decode", _DECODE["decode-64x8192"], cache="fp8"),
    Problem("decode-64x8192-p1", "decode", _DECODE["decode-64x8192"], page=1),
    Problem("decode-64x8192-p1056", "decode", _DECODE["decode-64x8192"], page=1056),
    Problem("drafts-32x4+8192", "decode", ((4, 8188),) * 32),
    # a mixture, and its parts
    Problem("mixed-32x8192,4x512+4096", "mixed", _DECODES + _CHUNKS),
    Problem("mixed-32x8192", "mixed", _DECODES),
    Problem("mixed-4x512+4096", "mixed", _CHUNKS),
    # a window in a long context, and a context of the window's length
    Problem("window-8x65536-w4096", "window", ((1, 65535),) * 8, window=4095),
    Problem("window-8x4096", "window", ((1, 4095),) * 8),
    Problem("window-8x512+65024-w4096", "window", ((512, 65024),) * 8, window=4095),
    Problem("window-8x512+3584", "window", ((512, 3584),) * 8),
)
# tokens that are written into a cache
WRITES = (1000, 8192)


def select(parts: list[str]) -> list[Problem]:
    """Return the problems whose names hold one of the parts; all without any."""
    return [p for p in PROBLEMS if not parts or any(part in p.name for part in parts)]
