"""A checked call: its tensors, options and layout, and what all calls of its signature share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, Protocol

from torch import Tensor

# an int that traces compile in
Fixed = Annotated[int, "int"]
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
    itemsize: Fixed  # bytes per element
    causal: bool


class Options(NamedTuple):
    """The arguments that are not tensors, without the lengths."""

    softmax_scale: float
    causal: bool
    num_splits: Fixed
    # query i stands at position i; otherwise at i + seqlen_k - seqlen_q
    top_left: bool


class Bounds(NamedTuple):
    """Upper bounds of the lengths of all sequences."""

    max_seqlen_q: int
    max_seqlen_k: int


class Blocks(NamedTuple):
    """A layout, as the operators take it."""

    crow: Tensor
    col: Tensor
    cols: int
    block_q: Fixed
    block_k: Fixed
    rows_alike: bool


class PlanCall(NamedTuple):
    """The arguments of the operator that makes lists."""

    blocks: Blocks
    form: ListForm
    kind: str
    rule: Tensor | None


class Common(NamedTuple):
    """The last arguments of both operators of attention."""

    blocks: Blocks
    max_row: int
    bounds: Bounds
    options: Options
    rule: Tensor | None

    @property
    def pattern(self) -> Pattern:
        crow = self.blocks.crow
        return Pattern(
            is_shared=crow.shape[-2] == 1,
            rows=crow.shape[-1] - 1,
            cols=self.blocks.cols,
            block_q=self.blocks.block_q,
            block_k=self.blocks.block_k,
            rows_alike=self.blocks.rows_alike,
            max_row=self.max_row,
            batch=crow.shape[0] if crow.ndim == 3 else 0,
        )

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments one by one."""
        return *self.blocks, self.max_row, *self.bounds, *self.options, self.rule


# the tensors of a list; None if no kernel walks it: AOTInductor takes no empty list
Walk = Annotated[Sequence[Tensor] | None, "Tensor[]?"]


class BackwardWalks(NamedTuple):
    """The lists that kernels of the backward walk, as :class:`.._layout.lists.Lists`."""

    by_query: Walk = None
    by_key: Walk = None
    # for the Hopper backward, as ``Pairs``; if dq has its own launch, that launch walks the
    # forward's lists, which then follow
    pairs: Walk = None

    @property
    def repeat(self) -> bool:
        """Whether the gradients of the Hopper backward repeat bit for bit."""
        return self.pairs is not None and len(self.pairs) > PAIRS


class Walks(NamedTuple):
    """The lists that kernels walk, as :class:`.._layout.lists.Lists`."""

    tall: Walk = None
    short: Walk = None
    backward: BackwardWalks = BackwardWalks()


class ForwardCall(NamedTuple):
    """The arguments of the forward operator."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    block_table: Tensor | None
    walks: Walks
    common: Common

    @property
    def tensors(self) -> Tensors:
        """The tensors of the call."""
        offsets = self.cu_seqlens_q, self.cu_seqlens_k
        return Tensors(self.q, self.k, self.v, *offsets, self.block_table, self.common.rule)


class BackwardCall(NamedTuple):
    """The arguments of the backward operator."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    dlse: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    walks: BackwardWalks
    common: Common

    @property
    def tensors(self) -> Tensors:
        """The tensors of the forward."""
        offsets = self.cu_seqlens_q, self.cu_seqlens_k
        return Tensors(self.q, self.k, self.v, *offsets, rule=self.common.rule)


class Plan(Protocol):
    """Launches calls of one signature without the operators; see ``launch.py``."""

    def forward(self, x: Tensors, walks: Walks, bounds: Bounds) -> tuple[Tensor, Tensor]:
        """Return ``(out, lse)``."""

    def fits(self, x: Tensors) -> bool:
        """Say whether saved tensors still have the strides and the alignment of the forward."""

    def backward(
        self,
        x: Tensors,
        walks: BackwardWalks,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``(dq, dk, dv)``; ``x`` must fit."""


class Checked(NamedTuple):
    """What all calls of one signature with one layout share."""

    options: Options
    walks: Walks
    # launches the call without the operators; None if the call must go through them
    plan: Plan | None = None
