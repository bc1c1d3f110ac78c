"""The problems that the benchmark measures: shapes, memory traffic, work. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

PASSES = ("fwd", "bwd", "train")


@dataclass(frozen=True)
class Problem:
    """One problem in bf16; its passes are the cases.

    Attributes:
        name: Unique; a case is called ``<name>-fwd``, ``<name>-bwd`` or ``<name>-train``.
        family: ``grid``, ``packed`` or ``crossover``.
        batch: Sequences of one length; of packed problems, how many the tokens are cut into.
        tokens: Tokens of a sequence; of packed problems, of all together.
        heads: Heads.
        d: Head dimension of q, k and v.
        packed: ``[tokens, heads, d]`` with ``cu_seqlens``, of ragged lengths.
        schedule: What this package is asked for.
        passes: Which passes are measured.
    """

    name: str
    family: str
    batch: int
    tokens: int
    heads: int
    d: int = 128
    packed: bool = False
    schedule: str = "auto"
    passes: tuple[str, ...] = PASSES

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

    def bytes(self, direction: str) -> float:
        """Return the fewest bytes of a pass: each input read once, each output written once."""
        one = 2.0 * self.all_tokens * self.heads * self.d
        # q, k, v, o; q, k, v, do, dq, dk, dv
        return one * {"fwd": 4, "bwd": 7, "train": 11}[direction]

    def flops(self, direction: str, chunk: int = 64) -> float:
        """Return the products of a walk at this chunk: scores, values, read and write."""
        walk = 4.0 * self.all_tokens * self.heads * self.d * (chunk + self.d)
        return walk * {"fwd": 1, "bwd": 3, "train": 4}[direction]

    def shrunk(self) -> Problem:
        """Return a problem of the same kind that a CPU does in no time, for dry runs."""
        few = min(self.batch, 3)
        return replace(self, batch=few, tokens=60 * few, heads=2, d=16)


@dataclass(frozen=True)
class DecodeProblem:
    """A decoding step: a state per sequence and head, and some new tokens."""

    name: str
    batch: int
    heads: int = 64
    d: int = 128
    new_tokens: int = 1

    @property
    def bytes(self) -> float:
        """Return the traffic of the states, read and written, fp32."""
        return 2.0 * 4 * self.batch * self.heads * self.d * self.d

    def shrunk(self) -> DecodeProblem:
        return replace(self, batch=min(self.batch, 2), heads=2, d=16)


GRID = tuple(
    Problem(f"b{b}-t{t}-h{h}-d{d}", "grid", b, t, h, d)
    for b, t, h, d in (
        (1, 8192, 96, 128),
        (2, 16384, 16, 128),
        (4, 2048, 16, 128),
        (4, 4096, 64, 128),
        (1, 8192, 64, 128),
        (1, 32768, 64, 128),
    )
)
PACKED = (
    Problem("one-t65536-h64-d128", "packed", 1, 65536, 64, packed=True, passes=("fwd", "bwd")),
    Problem(
        "ragged64-t65536-h64-d128", "packed", 64, 65536, 64, packed=True, passes=("fwd", "bwd")
    ),
)
CROSSOVER = tuple(
    Problem(
        f"{schedule}-h{heads}-t{tokens}",
        "crossover",
        1,
        tokens,
        heads,
        schedule=schedule,
        passes=("fwd",),
    )
    for tokens in (4096, 32768)
    for heads in (1, 8, 16, 32, 48, 64, 96)
    for schedule in ("sequential", "parallel")
)
PROBLEMS = (*GRID, *PACKED, *CROSSOVER)
DECODE = (
    DecodeProblem("decode-b1", 1),
    DecodeProblem("decode-b32", 32),
    DecodeProblem("decode-1gb", 256),
    DecodeProblem("decode-1gb-4tokens", 256, new_tokens=4),
)
# a forward pass of a million tokens, for its memory
LONG = Problem("b1-t1048576-h64-d128", "long", 1, 2**20, 64, passes=("fwd",))
