"""The problems that the benchmark measures: shapes, work and memory traffic. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
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
        family: One of ``RIVALS``; means are taken per family and pass.
        lengths: Length of every sequence; of a tree, the prompt's and its answers'.
        heads_q: Query heads.
        heads_k: Key and value heads.
        head_dim: Head dimension of q and k.
        causal: Whether the mask is causal.
        packed: ``[tokens, heads, head_dim]`` with ``cu_seqlens`` instead of
            ``[batch, seqlen, heads, head_dim]``.
        dtype: ``bf16`` or ``fp8``.
        passes: Which passes are measured.
        queries: Queries of every sequence, where they are fewer than keys; not with a causal mask.
        values: Head dimension of v; 0: that of q and k.
        dropout: Probability of dropping an element.
        bias: What an additive bias, ``[batch, heads, seqlen, seqlen]`` in bf16, is broadcast over:
            ``batch`` or ``heads``; empty: there is none.
        learned: Whether the bias has a gradient.
        alibi: Whether there are ALiBi slopes.
        used: Whether ``seqused_k`` is given, at its largest; packed.
        deterministic: Whether the gradients repeat bit for bit.
        invariant: Whether a row has the same bits in any call.
        tree: Whether the sequences after the first are answers that see all of it; packed, causal.
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
    values: int = 0
    dropout: float = 0.0
    bias: str = ""
    learned: bool = False
    alibi: bool = False
    used: bool = False
    deterministic: bool = False
    invariant: bool = False
    tree: bool = False

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
    def head_dim_v(self) -> int:
        return self.values or self.head_dim

    @property
    def equal_lengths(self) -> bool:
        return len(set(self.lengths)) == 1

    @property
    def bias_shape(self) -> tuple[int, int, int, int]:
        """Return ``[batch, heads, seqlen, seqlen]``, 1 where the bias is broadcast."""
        batch = 1 if self.bias == "batch" else self.batch
        heads = 1 if self.bias == "heads" else self.heads_q
        return batch, heads, self.max_seqlen, self.max_seqlen

    @property
    def pairs(self) -> float:
        """Return the visible pairs of a query and a key per head; those on the diagonal are half.

        The usual count: seqlen_q seqlen_k, half of it under a causal mask.
        """
        own = sum((self.queries or length) * length for length in self.lengths)
        pairs = own * (0.5 if self.causal else 1.0)
        if self.tree:
            pairs += sum(self.lengths[1:]) * self.lengths[0]
        return pairs

    def case(self, direction: str) -> str:
        """Return the name of the case of one pass."""
        return f"{self.name}-{direction}"

    def flops(self, direction: str) -> float:
        """Return two operations per pair and product: two products forward, five backward."""
        over_d, over_dv = (1, 1) if direction == "fwd" else (3, 2)
        width = over_d * self.head_dim + over_dv * self.head_dim_v
        return 2.0 * self.pairs * self.heads_q * width

    def bytes(self, direction: str) -> float:
        """Return the fewest bytes of a pass: each input read once, each output written once."""
        q, out = (self.tokens_q * self.heads_q * d for d in (self.head_dim, self.head_dim_v))
        k, v = (self.tokens * self.heads_k * d for d in (self.head_dim, self.head_dim_v))
        batch, heads, rows, columns = self.bias_shape
        bias = _OUTPUT_BYTES * batch * heads * rows * columns if self.bias else 0
        lse = _LSE_BYTES * self.tokens_q * self.heads_q
        if direction == "fwd":
            return _INPUT_BYTES[self.dtype] * (q + k + v) + _OUTPUT_BYTES * out + lse + bias
        # reads q, k, v, out, dout, lse and the bias; writes dq, dk, dv, and the bias's gradient
        return _OUTPUT_BYTES * 2 * (q + k + v + out) + lse + bias * (1 + self.learned)

    def base(self) -> Problem:
        """Return the problem that shows what a feature costs: the same without it."""
        if self.tree:
            return replace(self, lengths=(self.tokens,), tree=False, packed=False)
        if self.learned:
            return replace(self, learned=False)
        plain = {"bias": "", "dropout": 0.0, "alibi": False, "used": False, "dtype": "bf16"}
        return replace(self, deterministic=False, invariant=False, **plain)  # type: ignore[arg-type]

    def shrunk(self) -> Problem:
        """Return a problem of the same kind that a CPU does in no time, for dry runs."""
        lengths = tuple(max(16, min(length // 64, 48)) for length in self.lengths[:3])
        heads_k = min(self.heads_k, 2)
        heads_q = heads_k * min(self.heads_q // self.heads_k, 2)
        queries = min(self.queries, 16)
        return replace(self, lengths=lengths, heads_q=heads_q, heads_k=heads_k, queries=queries)


def _mask(causal: bool) -> str:
    return "causal" if causal else "full"


def _dense(
    name: str, family: str, seqlen: int, head_dim: int, causal: bool, **more: object
) -> Problem:
    """Return a problem of 16k tokens whose heads x head_dim is that of the grid, or just below."""
    heads = GRID_WIDTH // head_dim
    lengths = (seqlen,) * (GRID_TOKENS // seqlen)
    name = f"{name}-d{head_dim}-s{seqlen}-{_mask(causal)}"
    return Problem(name, family, lengths, heads, heads, head_dim, causal, **more)  # type: ignore[arg-type]


def _grid() -> list[Problem]:
    return [
        _dense("dense", "grid", seqlen, head_dim, causal)
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
        _dense("fp8", "fp8", seqlen, 128, causal, dtype="fp8", passes=("fwd",))
        for causal in (False, True)
        for seqlen in (4096, 16_384)
    ]


def _dims() -> list[Problem]:
    """Head dims beside the powers of two."""
    dims = [(d, 0) for d in (72, 80, 96, 112, 160, 192)] + [(192, 128)]
    return [
        _dense(
            f"dims-v{values}" if values else "dims", "dims", seqlen, head_dim, causal, values=values
        )
        for head_dim, values in dims
        for causal in (False, True)
        for seqlen in (4096, 16_384)
    ]


def _dropout() -> list[Problem]:
    return [
        _dense("dropout", "dropout", 4096, head_dim, causal, dropout=0.1)
        for head_dim in (64, 128, 256)
        for causal in (False, True)
    ]


def _bias() -> list[Problem]:
    """Additive biases; the name says what of ``[batch, heads, seqlen, seqlen]`` they have."""
    shapes = [
        (d, shape, over) for d in (64, 128) for shape, over in (("h", "batch"), ("b", "heads"))
    ]
    given = [_dense(f"bias-{s}", "bias", 4096, d, False, bias=over) for d, s, over in shapes]
    more = {"learned": True, "passes": ("bwd",)}
    learned = [
        _dense(f"dbias-{s}", "dbias", 4096, d, False, bias=over, **more) for d, s, over in shapes
    ]
    return given + learned


def _extras() -> list[Problem]:
    """Features that the kernel itself must hide; beside the same without them."""
    both = [(d, causal) for d in (64, 128) for causal in (False, True)]
    alibi = [_dense("alibi", "extras", 4096, d, causal, alibi=True) for d, causal in both]
    used = [_dense("used", "extras", 4096, d, causal, used=True, packed=True) for d, causal in both]
    return alibi + used


def _deterministic() -> list[Problem]:
    return [
        _dense("repeats", "repeats", 8192, d, causal, deterministic=True, passes=("bwd",))
        for d in (64, 96, 128)
        for causal in (False, True)
    ]


def _invariant() -> list[Problem]:
    return [
        _dense("invariant", "invariant", seqlen, d, True, invariant=True, passes=("fwd",))
        for d in (64, 128, 256)
        for seqlen in (4096, 16_384)
    ]


def _tree() -> list[Problem]:
    """A prompt and its sampled answers."""
    return [
        Problem(
            name=f"tree-gqa-d128-p8192-{answers}x1024",
            family="tree",
            lengths=(8192, *(1024,) * answers),
            heads_q=32,
            heads_k=8,
            head_dim=128,
            causal=True,
            packed=True,
            tree=True,
        )
        for answers in (8, 16)
    ]


def _portable() -> list[Problem]:
    """What other GPUs run, on this one."""
    return [
        _dense("portable", "portable", seqlen, head_dim, causal)
        for head_dim in (64, 128, 256)
        for causal in (False, True)
        for seqlen in (4096, 16_384)
    ]


_FAMILIES: tuple[Callable[[], list[Problem]], ...] = (
    _grid,
    _long,
    _packed,
    _few,
    _fp8,
    _dims,
    _dropout,
    _bias,
    _extras,
    _deterministic,
    _invariant,
    _tree,
    _portable,
)
PROBLEMS: tuple[Problem, ...] = tuple(problem for make in _FAMILIES for problem in make())

# by family: whose figures they are, and beside whom; "base" is ours without the feature
_ALL = ("ours", "fa3", "cudnn", "fa2")
PROVIDERS_OF: dict[str, tuple[str, ...]] = {
    "grid": _ALL,
    "long": _ALL,
    "packed": _ALL,
    "few": _ALL,
    "fp8": ("ours", "base"),
    "dims": ("ours", "fa3"),
    "dropout": ("ours", "cudnn", "fa2"),
    "bias": ("ours", "cudnn"),
    "dbias": ("ours", "base"),
    "extras": ("ours", "base"),
    "repeats": ("ours", "base", "fa3", "fa3-repeats"),
    "invariant": ("ours", "base"),
    "tree": ("ours", "base", "flex", "fa3"),
    "portable": ("portable", "ours", "flex"),
}

# what the host does for one call; not attention problems of a size that matters
HOST_CASES = (
    "host-fwd",
    "host-fwd-grad",
    "host-bwd",
    "host-step",
    "host-small-step",
    "host-packed-fwd",
    "host-first-call",
)


def is_quick(problem: Problem) -> bool:
    """Return whether the quick run measures a problem: d 128 at 4k and 16k."""
    return problem.family == "grid" and problem.head_dim == 128 and problem.max_seqlen >= 4096


Selected = list[tuple[Problem, tuple[str, ...]]]


def select(filters: list[str], families: list[str], quick: bool) -> tuple[Selected, list[str]]:
    """Return the problems with the passes asked for, and the host cases.

    Args:
        filters: Substrings; a case is taken when its name holds one of them. Empty: every case.
        families: Names of families, ``host`` among them. Empty: every family.
        quick: Only the quick problems, and no host cases unless they are asked for.
    """

    def wanted(name: str) -> bool:
        return not filters or any(part in name for part in filters)

    problems = []
    for problem in PROBLEMS:
        if (quick and not is_quick(problem)) or (families and problem.family not in families):
            continue
        passes = tuple(one for one in problem.passes if wanted(problem.case(one)))
        if passes:
            problems.append((problem, passes))
    asked = "host" in families if families else bool(filters) or not quick
    return problems, [name for name in HOST_CASES if asked and wanted(name)]
