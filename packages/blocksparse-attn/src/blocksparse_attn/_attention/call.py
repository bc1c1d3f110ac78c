"""A checked call: its tensors, options and layout, and what all calls of its signature share."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

# number of tensors in :class:`.._layout.lists.Pairs`
PAIRS = 6


class Tensors(NamedTuple):
    """The tensors of a call, in the order of the forward operator."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    block_table: Tensor | None = None
    # the layout's token rule: see ``TokenRule.bounds``
    rule: Tensor | None = None


class Pattern(NamedTuple):
    """The properties of a layout, apart from its lists, on which a launch depends."""

    is_shared: bool
    rows: int
    cols: int
    block_q: int
    block_k: int
    rows_alike: bool
    max_row: int
    # number of sequences if each has its own rows, else 0
    batch: int = 0


class ListForm(NamedTuple):
    """The properties of a call, apart from layout and kind of list, on which its lists depend."""

    group: int  # query heads per key head
    head_dim: int  # max(head_dim, head_dim_v)
    itemsize: int  # bytes per element
    causal: bool


class Options(NamedTuple):
    """The arguments that are not tensors, without the lengths."""

    softmax_scale: float
    causal: bool
    num_splits: int
    # query i stands at position i; otherwise at i + seqlen_k - seqlen_q
    top_left: bool = False


class Bounds(NamedTuple):
    """Upper bounds of the lengths of all sequences."""

    seqlen_q: int
    seqlen_k: int


class Common(NamedTuple):
    """The last arguments of both operators: layout, token rule, lengths and options."""

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
        heads, rows = self.crow.shape[-2], self.crow.shape[-1] - 1
        batch = self.crow.shape[0] if self.crow.ndim == 3 else 0
        sizes = rows, self.cols, self.block_q, self.block_k
        return Pattern(heads == 1, *sizes, self.rows_alike, self.max_row, batch)

    @property
    def options(self) -> Options:
        return Options(self.softmax_scale, self.causal, self.num_splits, self.top_left)

    @property
    def bounds(self) -> Bounds:
        return Bounds(self.max_seqlen_q, self.max_seqlen_k)


class Walks(NamedTuple):
    """The lists that kernels walk, as :class:`.._layout.lists.Lists`; empty if no kernel does."""

    tall: tuple[Tensor, ...] = ()
    short: tuple[Tensor, ...] = ()
    by_query: tuple[Tensor, ...] = ()
    by_key: tuple[Tensor, ...] = ()
    # for the Hopper backward, as ``Pairs``; if dq has its own launch, that launch walks the
    # forward's lists, which then follow
    pairs: tuple[Tensor, ...] = ()

    @property
    def repeat(self) -> bool:
        """Whether the gradients of the Hopper backward repeat bit for bit."""
        return len(self.pairs) > PAIRS


class Plan(Protocol):
    """Launches calls of one signature without the operators; see ``launch.py``."""

    def forward(self, x: Tensors, walks: Walks, bounds: Bounds) -> tuple[Tensor, Tensor]:
        """Return ``(out, lse)``."""

    def fits(self, x: Tensors) -> bool:
        """Say whether saved tensors still have the strides and the alignment of the forward."""

    def backward(
        self, x: Tensors, walks: Walks, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``(dq, dk, dv)``; ``x`` must fit."""


class Checked(NamedTuple):
    """What all calls of one signature with one layout share."""

    options: Options
    walks: Walks
    # launches the call without the operators; None if the call must go through them
    plan: Plan | None = None
