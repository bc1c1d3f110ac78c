"""The problems that the benchmark measures: shapes, work and memory traffic."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

from _linked.cases import Case
from _linked.shapes import FAMILY

PASSES = ("fwd", "bwd")
# tokens and heads x head_dim of the dense grid
GRID_TOKENS = 16_384
GRID_WIDTH = 2_048

_INPUT_BYTES = {"bf16": 2, "fp8": 1}
_OUTPUT_BYTES = 2
_LSE_BYTES = 4


@dataclass(frozen=True)
class Problem(Case):
    """One attention problem of self-attention lengths.

    Attributes:
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
        window: How many keys before its own a query sees; 0: all. Causal.
    """

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
    window: int = 0

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
    def fp8(self) -> bool:
        return self.dtype == "fp8"

    @property
    def bias_shape(self) -> tuple[int, int, int, int]:
        """Return ``[batch, heads, seqlen, seqlen]``, 1 where the bias is broadcast."""
        batch = 1 if self.bias == "batch" else self.batch
        heads = 1 if self.bias == "heads" else self.heads_q
        return batch, heads, self.max_seqlen, self.max_seqlen

    @property
    def pairs(self) -> float:
        """Return the visible pairs of a query and a key per head; those on the diagonal are half.

        The usual count: seqlen_q seqlen_k, half of it under a causal mask; under a window those
        that it leaves.
        """
        if self.window:
            inner = [max(0, length - self.window - 1) for length in self.lengths]
            corners = (length - more for length, more in zip(self.lengths, inner, strict=True))
            return sum(corner**2 / 2 for corner in corners) + sum(inner) * (self.window + 0.5)
        own = sum((self.queries or length) * length for length in self.lengths)
        pairs = own * (0.5 if self.causal else 1.0)
        return pairs + (sum(self.lengths[1:]) * self.lengths[0] if self.tree else 0)

    def flops(self, one: str) -> float:
        """Return two operations per pair and product: two products forward, five backward."""
        over_d, over_dv = (1, 1) if one == "fwd" else (3, 2)
        width = over_d * self.head_dim + over_dv * self.head_dim_v
        return 2.0 * self.pairs * self.heads_q * width

    def bytes(self, one: str) -> float:
        """Return the fewest bytes of a pass: each input read once, each output written once."""
        q, out = (self.tokens_q * self.heads_q * d for d in (self.head_dim, self.head_dim_v))
        k, v = (self.tokens * self.heads_k * d for d in (self.head_dim, self.head_dim_v))
        batch, heads, rows, columns = self.bias_shape
        bias = _OUTPUT_BYTES * batch * heads * rows * columns if self.bias else 0
        lse = _LSE_BYTES * self.tokens_q * self.heads_q
        if one == "fwd":
            return _INPUT_BYTES[self.dtype] * (q + k + v) + _OUTPUT_BYTES * out + lse + bias
        # reads q, k, v, out, dout, lse and the bias; writes dq, dk, dv, and the bias's gradient
        return _OUTPUT_BYTES * 2 * (q + k + v + out) + lse + bias * (1 + self.learned)

    def base(self) -> Problem:
        """Return the problem that shows what a feature costs: the same without it."""
        if self.tree:
            return replace(self, lengths=(self.tokens,), tree=False, packed=False)
        if self.learned:
            return replace(self, learned=False)
        plain: dict[str, Any] = {"bias": "", "dropout": 0.0, "alibi": False, "used": False}
        return replace(self, deterministic=False, invariant=False, dtype="bf16", **plain)

    def kind(self) -> Problem:
        """Return what problems of the same kernels have in common."""
        heads = {"heads_q": self.heads_q // self.heads_k, "heads_k": 1}
        some = {"window": min(self.window, 1), **heads}
        return replace(self, name="", family="", lengths=(), passes=(), **some)

    def shrunk(self) -> Problem:
        """Return a problem of the same kind that a CPU does in no time, for dry runs."""
        lengths = tuple(length and max(16, min(length // 64, 48)) for length in self.lengths[:3])
        lengths = lengths if any(lengths) else (16, *lengths[1:])
        heads_k = min(self.heads_k, 2)
        heads_q = heads_k * min(self.heads_q // self.heads_k, 2)
        few = {"queries": min(self.queries, 16), "window": min(self.window, 7)}
        return replace(self, lengths=lengths, heads_q=heads_q, heads_k=heads_k, **few)


def dense(name: str, seqlen: int, d: int, causal: bool, family: str = "", **more: Any) -> Problem:
    """Return a problem of 16k tokens whose heads x head_dim is that of the grid, or just below."""
    heads = GRID_WIDTH // d
    lengths = (seqlen,) * (GRID_TOKENS // seqlen)
    name, family = f"{name}-d{d}-s{seqlen}-{_MASKS[causal]}", family or name
    return Problem(name, family, lengths, heads, heads, d, causal, **more)


def grid(
    name: str,
    dims: tuple[int, ...],
    seqlens: tuple[int, ...] = (4096, 16_384),
    family: str = "",
    masks: tuple[bool, ...] = (False, True),
    **more: Any,
) -> list[Problem]:
    """Return dense problems of each head dimension, mask and length."""
    every = itertools.product(dims, masks, seqlens)
    return [dense(name, seqlen, d, causal, family, **more) for d, causal, seqlen in every]


def grouped(name: str, family: str, lengths: tuple[int, ...], **more: Any) -> Problem:
    """Return a packed causal problem of 32 query heads and 8 of keys."""
    options = {"causal": True, "packed": True, **more}
    return Problem(name, family, lengths, 32, 8, 128, **options)


_MASKS = ("full", "causal")
_MIXED = (8192, 4096, 2048, 1024, 512, 512)
_PACKED = {"mixed": _MIXED, "4x4096": (4096,) * 4, "64x256": (256,) * 64}
# the name says what of [batch, heads, seqlen, seqlen] a bias has
_BIASES = [(d, s, over) for d in (64, 128) for s, over in (("h", "batch"), ("b", "heads"))]
_FORWARD: dict[str, Any] = {"passes": ("fwd",)}
_BACKWARD: dict[str, Any] = {"passes": ("bwd",)}
_FEW = (8192,) * 32, 32, 4, 128, False
_LONG = (8192,) * 4, 16, 16, 128

PROBLEMS: tuple[Problem, ...] = (
    *grid("dense", (64, 128, 256), (1024, 4096, 16_384), "grid"),
    *(Problem(f"dense-b4-d128-s8192-{_MASKS[c]}", "long", *_LONG, c) for c in (False, True)),
    *(grouped(f"packed-gqa-d128-{name}-causal", "packed", x) for name, x in _PACKED.items()),
    *(Problem(f"few-gqa-d128-q{n}-k8192", "few", *_FEW, queries=n, **_FORWARD) for n in (1, 16)),
    *grid("fp8", (128,), dtype="fp8", **_FORWARD),
    # head dims beside the powers of two
    *grid("dims", (72, 80, 96, 112, 160, 192)),
    *grid("dims-v128", (192,), family="dims", values=128),
    *grid("dropout", (64, 128, 256), (4096,), dropout=0.1),
    *(dense(f"bias-{s}", 4096, d, False, "bias", bias=over) for d, s, over in _BIASES),
    *(
        dense(f"dbias-{s}", 4096, d, False, "dbias", bias=over, learned=True, **_BACKWARD)
        for d, s, over in _BIASES
    ),
    # features that the kernel itself must hide
    *grid("alibi", (64, 128), (4096,), "extras", alibi=True),
    *grid("used", (64, 128), (4096,), "extras", used=True, packed=True),
    *grid("repeats", (64, 96, 128), (8192,), deterministic=True, **_BACKWARD),
    *grid("invariant", (64, 128, 256), masks=(True,), invariant=True, **_FORWARD),
    # a prompt and its sampled answers
    *(
        grouped(f"tree-gqa-d128-p8192-{n}x1024", "tree", (8192, *(1024,) * n), tree=True)
        for n in (8, 16)
    ),
    # what other GPUs run, on this one
    *grid("portable", (64, 128, 256)),
)
# d 128 at 4k and 16k
QUICK = frozenset(
    p.name for p in PROBLEMS if p.family == "grid" and p.head_dim == 128 and p.max_seqlen >= 4096
)

# by family: whose figures they are, and beside whom; "base" is ours without the feature
_ALL = ("ours", "fa3", "cudnn", "fa2")
FAMILIES: dict[str, tuple[str, ...]] = {
    FAMILY: ("ours", "fa3"),
    **dict.fromkeys(("grid", "long", "packed", "few"), _ALL),
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

# what the host does for one call, all of one size, small enough for the launch to be all there is:
# by case, the problem and the pass
_HOST = Problem("host", "host", (128,), 16, 16, 128, True)
_SMALL = Problem("host-small", "host", (128,), 8, 8, 64, False)
_TWO = Problem("host-packed", "host", (64, 64), 16, 16, 128, True, packed=True)
HOST: dict[str, tuple[Problem, str]] = {
    "host-fwd": (_HOST, "fwd"),
    "host-fwd-grad": (_HOST, "fwd-grad"),
    "host-bwd": (_HOST, "bwd"),
    "host-step": (_HOST, "step"),
    "host-small-step": (_SMALL, "step"),
    "host-packed-fwd": (_TWO, "fwd"),
}
