"""The problems that the benchmark measures: shapes, work and memory traffic."""

from __future__ import annotations

from dataclasses import dataclass, replace

from _linked.cases import Case

# of a number in the cache, and of the scales (fp16) of a key and its value, for each head
BYTES = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
SCALES_BYTES = {"int8": 4.0, "int4": 4.0}
# new tokens of a sequence that are no chunk
FEW = 16


@dataclass(frozen=True)
class Problem(Case):
    """One call over a paged cache.

    Attributes:
        lengths: New tokens and cached ones of every sequence.
        page: Slots of a page.
        head_dim_v: Head dimension of values; 0 is that of keys.
        window: Keys to the left that a query sees; -1 is all.
        layout: ``nhd`` or ``packed``.
        cache: Format of the cache, ``bf16``; ``fp8``, with a scale for all keys and one for all
            values; ``int8`` or ``int4``, with a scale for each key, each value and head.
        dense: Whether the new keys lie beside the cache, in bf16.
        invariant: Whether a row has the same bits in any call.
    """

    lengths: tuple[tuple[int, int], ...]
    page: int = 16
    heads_q: int = 32
    heads_k: int = 8
    head_dim: int = 128
    head_dim_v: int = 0
    window: int = -1
    layout: str = "nhd"
    cache: str = "bf16"
    dense: bool = False
    invariant: bool = False

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
    def columns(self) -> int:
        """Return the numbers of a key and its value."""
        return self.head_dim + (self.head_dim_v or self.head_dim)

    @property
    def is_plain(self) -> bool:
        """Say whether all keys are in a bf16 cache of the usual layout."""
        return (self.layout, self.cache, self.dense) == ("nhd", "bf16", False)

    def flops(self, one: str = "") -> float:
        """Return the usual count: 2 H (D + Dv) for each pair of query and visible key."""
        pairs = 0.0
        for new, cached in self.lengths:
            seen = new * cached + new * new / 2
            pairs += seen if self.window < 0 else min(seen, new * (self.window + 1.0))
        return 2.0 * self.heads_q * self.columns * pairs

    def bytes(self, one: str = "") -> float:
        """Return the bytes of keys, values and their scales that have to be read once."""
        found = 0.0
        a_key = self.columns * BYTES[self.cache] + SCALES_BYTES.get(self.cache, 0.0)
        for new, cached in self.lengths:
            keys = new + cached if self.window < 0 else min(new + cached, new + self.window)
            fresh = min(new, keys) if self.dense else 0
            found += (keys - fresh) * a_key + fresh * self.columns * BYTES["bf16"]
        return found * self.heads_k

    @property
    def all_bytes(self) -> float:
        """Return the bytes of queries and the output as well."""
        return self.bytes() + self.tokens * self.heads_q * self.columns * BYTES["bf16"]

    def kind(self) -> tuple[Problem, bool]:
        """Return what problems of the same kernels have in common."""
        return replace(self, name="", family="", lengths=()), self.max_new < FEW

    def shrunk(self) -> Problem:
        """Return a tiny problem of the same kind, to try the script without a GPU."""
        lengths = tuple((min(new, 9), min(cached, 40)) for new, cached in self.lengths[:3])
        head_dim_v = 8 if self.head_dim_v else 0
        return replace(
            self, lengths=lengths, heads_q=4, heads_k=2, head_dim=16, head_dim_v=head_dim_v
        )


_DECODE = {
    "decode-64x8192": ((1, 8191),) * 64,
    "decode-256x2048": ((1, 2047),) * 256,
    "decode-16x32768": ((1, 32767),) * 16,
    "decode-4x32768": ((1, 32767),) * 4,
    "decode-1x65536": ((1, 65535),),
}
_PREFILL = {
    "prefill-8x1024+7168": ((1024, 7168),) * 8,
    "prefill-8x512+4096": ((512, 4096),) * 8,
    "prefill-1x2048+14336": ((2048, 14336),),
    "prefill-4x1024+0": ((1024, 0),) * 4,
}
_USUAL = _DECODE["decode-64x8192"]
_LONGEST, _CHUNK = _PREFILL["prefill-8x1024+7168"], _PREFILL["prefill-8x512+4096"]
_SMALL = ((256, 2000),) * 16
_DECODES, _CHUNKS = ((1, 8191),) * 32, ((512, 4096),) * 4
_CACHES = ("fp8", "int8", "int4")

# what the aims are of comes first
PROBLEMS = (
    *(Problem(name, "decode", lengths) for name, lengths in _DECODE.items()),
    *(
        Problem(f"{name}-{cache}", "decode", lengths, cache=cache)
        for cache in _CACHES
        for name, lengths in _DECODE.items()
    ),
    Problem("decode-64x8192-packed", "decode", _USUAL, layout="packed"),
    # a window in a long context, and a context of the window's length
    Problem("window-8x65536-w4096", "window", ((1, 65535),) * 8, window=4095),
    Problem("window-8x4096", "window", ((1, 4095),) * 8),
    *(Problem(name, "prefill", lengths) for name, lengths in _PREFILL.items()),
    *(Problem(f"{name}-p64", "prefill", lengths, page=64) for name, lengths in _PREFILL.items()),
    *(
        Problem(f"prefill-16x256+2000-d{d}-p{page}", "prefill", _SMALL, page, 16, 2, head_dim=d)
        for d in (64, 128)
        for page in (16, 64)
    ),
    *(
        Problem(f"prefill-8x1024+7168-d64-p{page}", "prefill", _LONGEST, page, head_dim=64)
        for page in (16, 64)
    ),
    # chunks that are not all in a bf16 cache
    *(
        Problem(f"prefill-8x1024+7168-{cache}", "prefill", _LONGEST, cache=cache)
        for cache in _CACHES
    ),
    Problem("prefill-8x1024+7168-dense", "prefill", _LONGEST, dense=True),
    Problem("prefill-8x1024+7168-dense-fp8", "prefill", _LONGEST, cache="fp8", dense=True),
    Problem("prefill-8x512+4096-packed", "prefill", _CHUNK, layout="packed"),
    Problem("prefill-8x512+4096-packed-dense", "prefill", _CHUNK, layout="packed", dense=True),
    # rows that have the same bits in any call
    *(
        Problem(f"{name}-invariant", "prefill", lengths, invariant=True)
        for name, lengths in _PREFILL.items()
    ),
    Problem("prefill-8x1024+7168-d64-invariant", "prefill", _LONGEST, head_dim=64, invariant=True),
    *(
        Problem(f"{name}-invariant", "decode", _DECODE[name], invariant=True)
        for name in ("decode-64x8192", "decode-256x2048", "decode-1x65536")
    ),
    # other head dimensions
    Problem("prefill-8x512+4096-d192:128", "prefill", _CHUNK, head_dim=192, head_dim_v=128),
    Problem("decode-64x8192-d192:128", "decode", _USUAL, head_dim=192, head_dim_v=128),
    Problem("prefill-8x512+4096-d512", "prefill", _CHUNK, 16, 16, 2, head_dim=512),
    Problem("decode-64x8192-d512", "decode", _USUAL, 16, 16, 2, head_dim=512),
    # other pages
    Problem("prefill-8x1024+7168-p128", "prefill", _LONGEST, page=128),
    Problem("decode-64x8192-p1", "decode", _USUAL, page=1),
    Problem("decode-64x8192-p1056", "decode", _USUAL, page=1056),
    Problem("drafts-32x4+8192", "decode", ((4, 8188),) * 32),
    # a mixture, and its parts
    Problem("mixed-32x8192,4x512+4096", "mixed", _DECODES + _CHUNKS),
    Problem("mixed-32x8192", "mixed", _DECODES),
    Problem("mixed-4x512+4096", "mixed", _CHUNKS),
    Problem("window-8x512+65024-w4096", "window", ((512, 65024),) * 8, window=4095),
    Problem("window-8x512+3584", "window", ((512, 3584),) * 8),
)
BY_NAME = {problem.name: problem for problem in PROBLEMS}
# tokens that are written into a cache
WRITES = (1000, 8192)


def in_bf16(problem: Problem) -> Problem | None:
    """Return the problem of the same work over a bf16 cache of the usual layout, if another is."""

    def work(p: Problem) -> Problem:
        plain = replace(p, name="", cache="bf16", layout="nhd", dense=False)
        return replace(plain, invariant=False)

    usual = (p for p in PROBLEMS if replace(p, name="") == work(problem) and p != problem)
    return next(usual, None)
