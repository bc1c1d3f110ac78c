"""A checked call: its tensors, its options, its layout, and what the checks of its form came to."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

# tensors of ``Pairs`` of ``_layout/lists.py``
PAIRS = 6


class Tensors(NamedTuple):
    """The tensors of a call, in the order of the forward operator."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    block_table: Tensor | None = None
    # of the layout: see ``TokenRule.bounds``
    rule: Tensor | None = None


class Pattern(NamedTuple):
    """What a launch depends on of a layout, besides its lists."""

    is_shared: bool
    rows: int
    cols: int
    block_q: int
    block_k: int
    rows_alike: bool
    max_row: int
    # sequences that each have rows of their own, or 0
    batch: int = 0


class ListForm(NamedTuple):
    """What lists depend on of a call, besides their layout and their kind."""

    group: int  # query heads per key head
    head_dim: int  # the wider of the two
    itemsize: int  # bytes of a number
    causal: bool


class Options(NamedTuple):
    """What is no tensor; the lengths are not among them."""

    softmax_scale: float
    causal: bool
    num_splits: int
    # query i stands at position i, and not so that the last one stands at the last key
    top_left: bool = False


class Bounds(NamedTuple):
    """What no sequence is longer than."""

    seqlen_q: int
    seqlen_k: int


class Common(NamedTuple):
    """The last arguments of both operators: a layout with its rule, and what is no tensor."""

    crow: Tensor
    col: Tensor
    cols: int
    block_q: int
    block_k: int
    rows_alike: bool
    max_row: int
    max_seqlen_q: int
    max_seqlen_k: int
    softmax_scale: float
    causal: bool
    num_splits: int
    top_left: bool
    rule: Tensor | None

    @property
    def pattern(self) -> Pattern:
        """What a launch depends on of the layout."""
        heads, rows = self.crow.shape[-2], self.crow.shape[-1] - 1
        batch = self.crow.shape[0] if self.crow.ndim == 3 else 0
        sizes = rows, self.cols, self.block_q, self.block_k
        return Pattern(heads == 1, *sizes, self.rows_alike, self.max_row, batch)

    @property
    def options(self) -> Options:
        """What is no tensor, besides the lengths."""
        return Options(self.softmax_scale, self.causal, self.num_splits, self.top_left)

    @property
    def bounds(self) -> Bounds:
        """What no sequence is longer than."""
        return Bounds(self.max_seqlen_q, self.max_seqlen_k)


class Walks(NamedTuple):
    """The lists that kernels walk, as ``Lists`` of ``_layout/lists.py``; empty where none will."""

    tall: tuple[Tensor, ...] = ()
    short: tuple[Tensor, ...] = ()
    by_query: tuple[Tensor, ...] = ()
    by_key: tuple[Tensor, ...] = ()
    # of the backward for Hopper: ``Pairs`` of ``_layout/lists.py``; if dq has a launch of its own,
    # the forward's lists follow, by which it is made
    pairs: tuple[Tensor, ...] = ()

    @property
    def repeat(self) -> bool:
        """Whether the backward for Hopper makes gradients that repeat bit for bit."""
        return len(self.pairs) > PAIRS


class Plan(Protocol):
    """How calls of one form are launched past the operators; see ``launch.py``."""

    def forward(self, x: Tensors, walks: Walks, bounds: Bounds) -> tuple[Tensor, Tensor]:
        """Return ``(out, lse)``."""

    def fits(self, x: Tensors) -> bool:
        """Say whether tensors that were put away since still lie in memory as they did."""

    def backward(
        self, x: Tensors, walks: Walks, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``(dq, dk, dv)`` of tensors that fit."""


class Checked(NamedTuple):
    """What is known of every call of one form with one layout."""

    options: Options
    walks: Walks
    # how to launch it past the operators; None where they have to be asked
    plan: Plan | None = None
