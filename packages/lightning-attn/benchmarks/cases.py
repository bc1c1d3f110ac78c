"""The problems that the benchmark measures: shapes, memory traffic, work; bf16."""

from __future__ import annotations

from dataclasses import dataclass, replace

from _linked.cases import Case


@dataclass(frozen=True)
class Problem(Case):
    """Whole sequences.

    Attributes:
        batch: Sequences of one length; of packed problems, how many the tokens are cut into.
        tokens: Tokens of a sequence; of packed problems, of all together.
        heads: Heads.
        d: Head dimension of q, k and v.
        packed: ``[tokens, heads, d]`` with ``cu_seqlens``, of ragged lengths.
        schedule: What this package is asked for.
        passes: Which passes are measured.
    """

    batch: int
    tokens: int
    heads: int
    d: int = 128
    packed: bool = False
    schedule: str = "auto"
    passes: tuple[str, ...] = ("fwd", "bwd", "train")

    @property
    def lengths(self) -> tuple[int, ...]:
        """Ragged: from a third of the mean to five thirds, in no order, exact in sum."""
        if not self.packed:
            return (self.tokens,) * self.batch
        mean = self.tokens // self.batch
        # multiples of a number without a common factor walk through all residues
        found = [
            mean // 3 + (37 * i % self.batch) * 4 * mean // (3 * self.batch)
            for i in range(self.batch - 1)
        ]
        return (*found, self.tokens - sum(found))

    @property
    def all_tokens(self) -> int:
        return self.tokens if self.packed else self.batch * self.tokens

    def bytes(self, one: str) -> float:
        """Return the fewest bytes of a pass: each input read once, each output written once."""
        size = 2.0 * self.all_tokens * self.heads * self.d
        # q, k, v, o; q, k, v, do, dq, dk, dv
        return size * {"fwd": 4, "bwd": 7, "train": 11}[one]

    def flops(self, one: str, chunk: int = 64) -> float:
        """Return the products of a walk at this chunk: scores, values, read and write."""
        walk = 4.0 * self.all_tokens * self.heads * self.d * (chunk + self.d)
        return walk * {"fwd": 1, "bwd": 3, "train": 4}[one]

    def kind(self) -> Problem:
        """Return what problems of the same kernels have in common."""
        return replace(self, name="", family="", batch=0, tokens=0, heads=0, passes=())

    def shrunk(self) -> Problem:
        """Return a problem of the same kind that a CPU does in no time, for dry runs."""
        few = min(self.batch, 3)
        return replace(self, batch=few, tokens=60 * few, heads=2, d=16)


@dataclass(frozen=True)
class Step(Case):
    """A decoding step: a state per sequence and head, and some new tokens."""

    batch: int
    heads: int = 64
    d: int = 128
    new_tokens: int = 1

    def bytes(self, one: str) -> float:
        """Return the traffic of the states, read and written, fp32."""
        return 2.0 * 4 * self.batch * self.heads * self.d * self.d

    def flops(self, one: str) -> float:
        """Return two multiply-adds for each number of a state and token."""
        return self.bytes(one) / 2 * self.new_tokens

    def shrunk(self) -> Step:
        return replace(self, batch=min(self.batch, 2), heads=2, d=16)


GRID = tuple(
    Problem(f"b{b}-t{t}-h{h}-d128", "grid", b, t, h)
    for b, t, h in (
        (1, 8192, 96),
        (2, 16384, 16),
        (4, 2048, 16),
        (4, 4096, 64),
        (1, 8192, 64),
        (1, 32768, 64),
    )
)
PROBLEMS = (
    *GRID,
    *(
        Problem(f"{name}-t65536-h64-d128", "packed", n, 65536, 64, 128, True, passes=("fwd", "bwd"))
        for name, n in (("one", 1), ("ragged64", 64))
    ),
    *(
        Problem(
            *(f"{schedule}-h{heads}-t{tokens}", "crossover", 1, tokens, heads),
            schedule=schedule,
            passes=("fwd",),
        )
        for tokens in (4096, 32768)
        for heads in (1, 8, 16, 32, 48, 64, 96)
        for schedule in ("sequential", "parallel")
    ),
    Step("decode-b1", "decode", 1),
    Step("decode-b32", "decode", 32),
    Step("decode-1gb", "decode", 256),
    Step("decode-1gb-4tokens", "decode", 256, new_tokens=4),
)
FAMILIES: dict[str, tuple[str, ...]] = {
    "grid": ("ours", "fla", "opennlplab"),
    **dict.fromkeys(("packed", "crossover", "decode"), ("ours",)),
}
# a forward pass of a million tokens, for its memory, and small ones for the host's time
LONG = Problem("b1-t1048576-h64-d128", "long", 1, 2**20, 64, passes=("fwd",))
_HOST = Problem("host", "host", 1, 128, 8)
HOST: dict[str, tuple[Problem | Step, str]] = {
    "host: forward": (_HOST, "fwd"),
    "host: forward, parallel": (replace(_HOST, schedule="parallel"), "fwd"),
    "host: forward and backward": (_HOST, "train"),
    "host: decode": (Step("host", "host", 1, 8), ""),
}
