"""The problems that the benchmark measures: shapes, work and memory traffic. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

PASSES = ("fwd", "bwd")

# tokens and heads x head_dim of the dense grid
GRID_TOKENS = 16_384
GRID_WIDTH = 2_048

_INPUT_BYTES = {"bf16": 2, "fp8": 1}
_OUTPUT_BYTES = 2
_LSE_BYTES = 4


@dataclass(frozen=True)
class Problem:
    """One attention problem of self-attention lengths; its passes are the cases.

    Attributes:
        name: Unique; a case is called ``<name>-fwd`` or ``<name>-bwd``.
        family: ``grid``, ``long``, ``packed``, ``few`` or ``fp8``; means are taken per family and
            pass.
        lengths: Length of every sequence.
        heads_q: Query heads.
        heads_k: Key and value heads.
        head_dim: Head dimension of q, k and v.
        causal: Whether the mask is causal.
        packed: ``[tokens, heads, head_dim]`` with ``cu_seqlens`` instead of
            ``[batch, seqlen, heads, head_dim]``.
        dtype: ``bf16`` or ``fp8``.
        passes: Which passes are measured.
        queries: Queries of every sequence, where they are fewer than keys; not with a causal mask.
    """

    name: str
    family: str
    lengths: tuple[int, ...]
    heads_q: int
    heads_k: int
    head_dim: int
    causal: bool
    packed: bool = False
    dtype: str = "bf16"
    passes: tuple[str, ...] = PASSES
    queries: int = 0

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def tokens_q(self) -> int:
        return self.queries * self.batch or self.tokens

    @property
    def max_seqlen(self) -> int:
        return max(self.lengths)

    @property
    def equal_lengths(self) -> bool:
        return len(set(self.lengths)) == 1

    def case(self, direction: str) -> str:
        """Return the name of the case of one pass."""
        return f"{self.name}-{direction}"

    def flops(self, direction: str) -> float:
        """Return the usual count: 4 B H Sq Sk D, half when causal, backward 2.5 times that."""
        scores = sum((self.queries or length) * length for length in self.lengths)
        count = 4.0 * scores * self.heads_q * self.head_dim * (0.5 if self.causal else 1.0)
        return count * (2.5 if direction == "bwd" else 1.0)

    def bytes(self, direction: str) -> float:
        """Return the fewest bytes of a pass: each input read once, each output written once."""
        one_q = self.tokens_q * self.heads_q * self.head_dim
        one_k = self.tokens * self.heads_k * self.head_dim
        lse = _LSE_BYTES * self.tokens_q * self.heads_q
        if direction == "fwd":
            return _INPUT_BYTES[self.dtype] * (one_q + 2 * one_k) + _OUTPUT_BYTES * one_q + lse
        # reads q, k, v, out, dout, lse; writes dq, dk, dv
        return _OUTPUT_BYTES * (4 * one_q + 4 * one_k) + lse

    def shrunk(self) -> Problem:
        """Return a problem of the same kind that a CPU does in no time, for dry runs."""
        lengths = tuple(max(16, min(length // 64, 48)) for length in self.lengths[:3])
        heads_k = min(self.heads_k, 2)
        heads_q = heads_k * min(self.heads_q // self.heads_k, 2)
        queries = min(self.queries, 16)
        return replace(self, lengths=lengths, heads_q=heads_q, heads_k=heads_k, queries=queries)


def _mask(causal: bool) -> str:
    return "causal" if causal else "full"


def _grid() -> list[Problem]:
    return [
        Problem(
            name=f"dense-d{head_dim}-s{seqlen}-{_mask(causal)}",
            family="grid",
            lengths=(seqlen,) * (GRID_TOKENS // seqlen),
            heads_q=GRID_WIDTH // head_dim,
            heads_k=GRID_WIDTH // head_dim,
            head_dim=head_dim,
            causal=causal,
        )
        for head_dim in (64, 128, 256)
        for causal in (False, True)
        for seqlen in (1024, 4096, 16_384)
    ]


def _long() -> list[Problem]:
    return [
        Problem(f"dense-b4-d128-s8192-{_mask(causal)}", "long", (8192,) * 4, 16, 16, 128, causal)
        for causal in (False, True)
    ]


def _packed() -> list[Problem]:
    lengths = {
        "mixed": (8192, 4096, 2048, 1024, 512, 512),
        "4x4096": (4096,) * 4,
        "64x256": (256,) * 64,
    }
    return [
        Problem(f"packed-gqa-d128-{name}-causal", "packed", which, 32, 8, 128, True, packed=True)
        for name, which in lengths.items()
    ]


def _few() -> list[Problem]:
    return [
        Problem(
            name=f"few-gqa-d128-q{queries}-k8192",
            family="few",
            lengths=(8192,) * 32,
            heads_q=32,
            heads_k=4,
            head_dim=128,
            causal=False,
            passes=("fwd",),
            queries=queries,
        )
        for queries in (1, 16)
    ]


def _fp8() -> list[Problem]:
    return [
        Problem(
            name=f"fp8-d128-s{seqlen}-{_mask(causal)}",
            family="fp8",
            lengths=(seqlen,) * (GRID_TOKENS // seqlen),
            heads_q=16,
            heads_k=16,
            head_dim=128,
            causal=causal,
            dtype="fp8",
            passes=("fwd",),
        )
        for causal in (False, True)
        for seqlen in (4096, 16_384)
    ]


PROBLEMS: tuple[Problem, ...] = (*_grid(), *_long(), *_packed(), *_few(), *_fp8())

# what the host does for one call; not attention problems of a size that matters
HOST_CASES = (
    "host-fwd",
    "host-fwd-grad",
    "host-bwd",
    "host-packed-fwd",
    "host-first-call",
)


def is_quick(problem: Problem) -> bool:
    """Return whether the quick run measures a problem: d 128 at 4k and 16k."""
    return problem.family == "grid" and problem.head_dim == 128 and problem.max_seqlen >= 4096


Selected = list[tuple[Problem, tuple[str, ...]]]


def select(filters: list[str], quick: bool) -> tuple[Selected, list[str]]:
    """Return the problems with the passes asked for, and the host cases.

    Args:
        filters: Substrings; a case is taken when its name holds one of them. Empty: every case.
        quick: Only the quick problems, and no host cases unless a filter names them.
    """

    def wanted(name: str) -> bool:
        return not filters or any(part in name for part in filters)

    problems = []
    for problem in PROBLEMS:
        if quick and not is_quick(problem):
            continue
        passes = tuple(one for one in problem.passes if wanted(problem.case(one)))
        if passes:
            problems.append((problem, passes))
    host = [name for name in HOST_CASES if wanted(name) and (filters or not quick)]
    return problems, host
