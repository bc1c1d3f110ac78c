"""Which blocks of keys each block of queries attends to, as an immutable value."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from attn_common import cdiv, detect
from torch import Tensor

from ._attention.call import Checked, Pattern
from ._layout.checks import (
    check_alike,
    check_block_size,
    check_calls,
    check_count,
    check_csr,
    check_local_strided,
    check_mask,
    is_top_left,
    validate_csr,
)
from ._layout.indices import check_columns, rows_of_indices
from ._layout.kept_lists import Readiness, is_capturing, keep, prepare_lists
from ._layout.lists import dense_of
from ._layout.plot import draw
from ._layout.rows import dense_csr, density_of, local_strided_csr, mask_of
from ._layout.values import State, are_equal, joined, of_heads, order_sums, read, write
from ._linked.host.arguments import check_flag
from ._linked.host.forms import Memory
from .token_rule import TokenRule

# rows of queries that the largest tile holds
TALL = 128


class BlockSparseLayout:
    """A block-sparse pattern: compressed rows (CSR) of kept blocks, per query head.

    Block row r holds the queries at the positions ``r * block_size[0]`` and up, block column c the
    keys from ``c * block_size[1]`` on. A query's position is its place among the *keys*: query i of
    a sequence stands at ``i + seqlen_k - seqlen_q``, so that prefill, a later chunk of it and
    decode address the same rows; with ``align="top-left"`` in a call it stands at ``i``. What lies
    outside of all rows and columns is not attended to.

    A layout never changes. It can be shared between layers, calls and threads, compared and used as
    a key of a dict; the plans that kernels walk are made at the first call and kept with it.

    Args:
        crow: row pointers, ``[heads, rows + 1]``, or ``[batch, heads, rows + 1]`` if each sequence
            has a layout of its own. There is a head per query head, per head of keys, or one for
            all.
        col: columns, ``[heads, nnz]``, or ``[batch, heads, nnz]``, in any order within a row; what
            no row points to is padding (-1). Columns beyond ``num_cols`` are ignored, repeated ones
            count once.
        block_size: tokens of a block, one of 16, 32, 64 and 128: an int, or ``(q, k)``.
        num_cols: number of block columns. Default: as many as cover the positions of all rows.
        max_row: the most blocks in a row, if known: a bound for splitting the keys of a decode.
            Default: ``num_cols``.
        rows_alike: whether neighbouring rows keep mostly the same blocks, so that they are best
            computed together; it changes the speed, not the result. Default: False.
        token_rule: what queries see of the blocks that they keep. Default: None (all).

    Raises:
        TypeError: on an argument's type or dtype.
        ValueError: on a shape, a device or a range. Values of ``crow`` and ``col`` are not looked
            at: :meth:`validate` does that.
    """

    _rule: Tensor | None

    def __init__(
        self,
        crow: Tensor,
        col: Tensor,
        block_size: int | Sequence[int],
        *,
        num_cols: int | None = None,
        max_row: int | None = None,
        rows_alike: bool = False,
        token_rule: TokenRule | None = None,
    ) -> None:
        check_csr(crow, col)
        sides = check_block_size(block_size)
        rows = crow.shape[-1] - 1
        cols = cdiv(rows * sides[0], sides[1]) if num_cols is None else num_cols
        check_count("num_cols", cols, 0)
        if max_row is not None:
            check_count("max_row", max_row, 0)
        check_flag("rows_alike", rows_alike)
        # copies: nobody else may change them
        crow_, col_ = (x.to(torch.int32, copy=True).flatten(0, -2) for x in (crow, col))
        batch = crow.shape[0] if crow.ndim == 3 else 0
        self._fill(State(crow_, col_, sides, cols, crow.shape[-2], max_row, rows_alike, batch))
        if token_rule is not None:
            self._fill(self._state._replace(rule=self._bounds_of(token_rule)))

    def _fill(self, state: State) -> None:
        crow, col, rule = state.crow, state.col, state.rule
        if col.shape[1] == 0:
            col = col.new_full((col.shape[0], 1), -1)
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            # autograd keeps no tensors that were made there
            with torch.inference_mode(False):
                crow, col = crow.clone(), col.clone()
                rule = None if rule is None else rule.clone()
        cols, max_row = state.num_cols, state.max_row
        max_row = cols if max_row is None else min(max_row, cols)
        # heads of all sequences, those of one after the other
        self._crow, self._col, self._rule = crow.contiguous(), col.contiguous(), rule
        self._state = state._replace(crow=self._crow, col=self._col, max_row=max_row, rule=rule)
        is_shared = self._crow.shape[0] == max(state.batch, 1)
        sizes = self._crow.shape[1] - 1, cols, *state.block_size
        self._pattern = Pattern(is_shared, *sizes, state.rows_alike, max_row, state.batch)
        if col.device.type != "meta":
            # known before anything is traced: torch.compile may trace a call twice, and would meet
            # the second time what the operators' fakes have asked meanwhile
            detect(col.device)
        # ``Lists``, or ``Pairs``
        self._kept_lists: dict[Any, tuple[Tensor, ...]] = {}
        self._ready: Readiness | None = None
        self._calls: Memory[Checked] = Memory()
        # the same for other heads
        self._made: dict[int, BlockSparseLayout] = {}
        self._hash: int | None = None

    @classmethod
    def _make(cls, *state: Any) -> BlockSparseLayout:
        """Make a layout of the fields of ``State``, whose tensors nobody else holds."""
        layout = cls.__new__(cls)
        layout._fill(State(*state))
        return layout

    def _by_sequence(self, x: Tensor) -> Tensor:
        """See what there is for each head of each sequence with its dimension of sequences."""
        batch = self._state.batch
        return x.view(batch, len(x) // batch, *x.shape[1:]) if batch else x

    def _for_heads(self, heads_q: int) -> BlockSparseLayout:
        """Return a layout with as many heads as there are queries', or with one for all.

        Heads of keys are written out for their queries, once, and the result is kept.
        """
        # not by ``in``: under torch.compile a number is in no tuple of symbols
        if self.num_heads == 1 or self.num_heads == heads_q:
            return self
        made = self._made.get(heads_q)
        if made is None:
            state = self._state._replace(num_heads=heads_q)
            if not self.is_shared:
                times = heads_q // self.num_heads
                crow, col = (x.repeat_interleave(times, 0) for x in state[:2])
                state = state._replace(crow=crow, col=col)
            made = self._make(*state)
            made._calls = self._calls
            if not (torch.compiler.is_compiling() or is_capturing(self.device)):
                keep(made, (), ())
                self._made[heads_q] = made
        return made

    def _bounds_of(self, rule: TokenRule) -> Tensor:
        """Return the bounds of a rule for this layout's positions."""
        if not isinstance(rule, TokenRule):
            raise TypeError(f"token_rule must be a TokenRule, got {type(rule).__name__}")
        bounds = rule.bounds(self.num_rows * self.block_size[0], self.device)
        if self.batch and len(bounds) not in (1, self.batch):
            raise ValueError(
                f"batch of token_rule must be 1 or that of the layout, {self.batch}, "
                f"got {len(bounds)}"
            )
        return bounds

    def with_token_rule(self, token_rule: TokenRule | None) -> BlockSparseLayout:
        """Return a layout of the same blocks with a rule of its own, or without one.

        Args:
            token_rule: what queries see of the blocks that they keep; None: all.
        """
        return self._with_bounds(None if token_rule is None else self._bounds_of(token_rule))

    def _with_bounds(self, bounds: Tensor | None) -> BlockSparseLayout:
        return self._make(*self._state._replace(rule=bounds))

    @classmethod
    def from_indices(
        cls,
        indices: Tensor,
        block_size: int | Sequence[int],
        *,
        num_cols: int,
        counts: Tensor | None = None,
    ) -> BlockSparseLayout:
        """Make a layout from the columns of each row, as a selector of top-k blocks has them.

        The host does not wait for the device. In a CUDA graph each replay has its indices' layout.

        Args:
            indices: block columns of each row, int32 or int64 ``[heads, rows, k]``, or ``[batch,
                heads, rows, k]`` if each sequence has its own; -1 is none. Heads are as those of
                ``crow``. Repeated columns count once. Those that there are not raise on the CPU; on
                a GPU they are ignored, and :meth:`validate` names the first.
            block_size: tokens of a block: an int, or ``(q, k)``.
            num_cols: number of block columns.
            counts: how many of the indices of a row count, the first ones, int32 or int64 without
                the last dimension of ``indices``. Default: None (all).
        """
        check_columns(indices, counts)
        sides = check_block_size(block_size)
        check_count("num_cols", num_cols, 0)
        crow, col = rows_of_indices(indices, counts, num_cols)
        batch = indices.shape[0] if indices.ndim == 4 else 0
        heads, _, k = indices.shape[-3:]
        crow, col = crow.flatten(0, -2), col.flatten(0, -2)
        return cls._make(crow, col, sides, num_cols, heads, k, False, batch)

    @classmethod
    def batched(cls, layouts: Sequence[BlockSparseLayout]) -> BlockSparseLayout:
        """Join layouts of one form to one that has a layout for each sequence of a batch.

        Args:
            layouts: one per sequence, on one device, alike in block size, rows, columns and heads.
        """
        check_alike(layouts)
        return cls._make(*joined([one._state for one in layouts]))

    @classmethod
    def from_dense(
        cls, mask: Tensor, block_size: int | Sequence[int], *, max_nnz: int | None = None
    ) -> BlockSparseLayout:
        """Make a layout from a mask of blocks.

        Args:
            mask: bool, ``[rows, cols]`` for all heads or ``[heads, rows, cols]``.
            block_size: tokens of a block: an int, or ``(q, k)``.
            max_nnz: a bound of the kept blocks of one head. Without it they are counted, for which
                the host waits for the device once. Default: None.
        """
        check_mask(mask)
        sides = check_block_size(block_size)
        dense = mask if mask.ndim == 3 else mask[None]
        if max_nnz is not None:
            check_count("max_nnz", max_nnz, 0)
        crow, col, max_row, is_alike = dense_csr(dense, max(TALL // sides[0], 1), max_nnz)
        heads, _, cols = dense.shape
        return cls._make(crow, col, sides, cols, heads, max_row, is_alike)

    @classmethod
    def local_strided(
        cls,
        num_heads: int,
        max_seqlen: int,
        block_size: int | Sequence[int] = 64,
        local_blocks: int = 16,
        vert_stride: int = 8,
        homo_head: bool = False,
        head_range: tuple[int, int] | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> BlockSparseLayout:
        """Make the pattern of Phi-3-small: a band of local blocks, and every so-many-th column.

        In blocks of the key block size, ``(qb, kb)`` is kept iff ``kb <= qb`` and ``qb - kb <
        local_blocks`` or ``(kb + h * step + 1) % vert_stride == 0``, with ``step`` 0 for
        ``homo_head``, else ``max(1, vert_stride // num_heads)``. A query block of another size
        keeps what any of its queries keeps. The columns come from a closed form, on the device.

        Args:
            num_heads: query heads of the model.
            max_seqlen: positions that the layout covers.
            block_size: tokens of a block: an int, or ``(q, k)``. Default: 64.
            local_blocks: width of the band in blocks, from 1. Default: 16.
            vert_stride: distance of the columns in blocks, from 1. Default: 8.
            homo_head: the same columns for every head. Default: False.
            head_range: ``(first, last + 1)``: only these heads of the model. Default: None (all).
            device: where the layout lives. Default: torch's default device.
        """
        sides = check_block_size(block_size)
        heads = check_local_strided(
            num_heads, max_seqlen, local_blocks, vert_stride, head_range, homo_head
        )
        step = 0 if homo_head else max(1, vert_stride // num_heads)
        where = torch.device(torch.get_default_device() if device is None else device)
        crow, col, longest = local_strided_csr(
            *heads, step, max_seqlen, sides, local_blocks, vert_stride, where
        )
        count, cols = heads[1] - heads[0], cdiv(max_seqlen, sides[1])
        return cls._make(crow, col, sides, cols, count, longest, False)

    @classmethod
    def from_mask_mod(
        cls,
        fn: Callable[[Tensor, Tensor, Tensor], Tensor],
        num_heads: int,
        num_rows: int,
        num_cols: int,
        block_size: int | Sequence[int],
        *,
        device: torch.device | str | None = None,
    ) -> BlockSparseLayout:
        """Make a layout from a function of block indices, computed on the device.

        Args:
            fn: ``fn(head, row, col)`` takes int64 tensors that broadcast against each other and
                returns a bool tensor: which blocks are kept.
            num_heads: query heads; 1 serves any number of them.
            num_rows: blocks of queries.
            num_cols: blocks of keys.
            block_size: tokens of a block: an int, or ``(q, k)``.
            device: where the layout lives. Default: torch's default device.
        """
        sides = check_block_size(block_size)
        check_count("num_heads", num_heads, 1)
        check_count("num_rows", num_rows, 0)
        check_count("num_cols", num_cols, 0)
        return cls.from_dense(mask_of(fn, num_heads, num_rows, num_cols, device), sides)

    @property
    def crow(self) -> Tensor:
        """Row pointers, int32 ``[heads, rows + 1]``, or with a batch ahead: a copy."""
        return self._of_heads(self._crow)

    @property
    def col(self) -> Tensor:
        """Columns, int32 ``[heads, nnz]``, or with a batch ahead, padded with -1: a copy."""
        return self._of_heads(self._col)

    def _of_heads(self, x: Tensor) -> Tensor:
        return self._by_sequence(of_heads(x, self.num_heads, self._state.batch)).clone()

    @property
    def batch(self) -> int | None:
        """Number of sequences that each have a layout of their own, or None: one for all."""
        return self._state.batch or None

    @property
    def token_bounds(self) -> Tensor | None:
        """First and last key that each position sees, as of ``TokenRule.bounds``; None: all."""
        return None if self._rule is None else self._rule.clone()

    @property
    def num_heads(self) -> int:
        """Number of query heads; 1 serves any number."""
        return self._state.num_heads

    @property
    def num_rows(self) -> int:
        """Number of query blocks."""
        return self._crow.shape[1] - 1

    @property
    def num_cols(self) -> int:
        """Number of key blocks."""
        return self._state.num_cols

    @property
    def block_size(self) -> tuple[int, int]:
        """Tokens of a block of queries, and of one of keys."""
        return self._state.block_size

    @property
    def max_row(self) -> int:
        """A bound of the blocks in a row."""
        return self._pattern.max_row

    @property
    def rows_alike(self) -> bool:
        """Whether neighbouring rows are computed together."""
        return self._state.rows_alike

    @property
    def is_shared(self) -> bool:
        """Whether all heads have one pattern."""
        return self._pattern.is_shared

    @property
    def device(self) -> torch.device:
        """Where the layout lives."""
        return self._crow.device

    def to(self, device: torch.device | str) -> BlockSparseLayout:
        """Return the layout on a device: itself if it is there."""
        device = torch.device(device)
        if device.type == self.device.type and device.index in (None, self.device.index):
            return self
        moved = (x.to(device) if isinstance(x, Tensor) else x for x in self._state)
        return self._make(*moved)

    def to_dense(self) -> Tensor:
        """Return the mask of blocks, bool ``[heads, rows, cols]``, or with a batch ahead."""
        return self._of_heads(dense_of(self._crow, self._col, self.num_cols))

    def density(self, seqlen: int | None = None) -> float:
        """Return the share of the causally visible blocks that is kept; waits for the device.

        Args:
            seqlen: of how long a sequence. Default: None (all rows).
        """
        if seqlen is not None:
            check_count("seqlen", seqlen, 0)
        return density_of(self._crow, self._col, self.num_cols, self.block_size, seqlen)

    def validate(self) -> None:
        """Check the values of rows and columns, which calls trust; waits for the device.

        Raises:
            ValueError: on the first entry that is wrong: which, what was expected, what came.
        """
        csr = self._by_sequence(self._crow), self._by_sequence(self._col)
        validate_csr(*csr, self.num_cols)

    def prepare(
        self,
        heads_q: int,
        heads_k: int,
        head_dim: int,
        dtype: torch.dtype,
        *,
        causal: bool = True,
        backward: bool = False,
        paged: bool = False,
        align: str = "bottom-right",
    ) -> BlockSparseLayout:
        """Plan what kernels will walk ahead of the first call, and return the layout.

        The first call of a kind does this by itself. It is of use ahead of ``torch.compile``, which
        otherwise plans within the graph, at every call.

        Args:
            heads_q: query heads of the calls to come.
            heads_k: heads of their keys.
            head_dim: the wider of the two head dimensions.
            dtype: of their tensors.
            causal: their mask. Default: True.
            backward: plan for gradients too. Default: False.
            paged: their keys are in pages. Default: False.
            align: where their queries stand. Default: "bottom-right".

        Raises:
            TypeError, ValueError: if the numbers are no heads of calls that the layout fits, or
                another argument is of another type.
        """
        check_calls(self.num_heads, heads_q, heads_k, head_dim, dtype)
        for name, flag in (("causal", causal), ("backward", backward), ("paged", paged)):
            check_flag(name, flag)
        form = heads_q // heads_k, head_dim, dtype.itemsize, causal
        prepare_lists(self._for_heads(heads_q), form, backward, paged, is_top_left(align))
        return self

    def _shape(self) -> tuple[Any, ...]:
        return self.block_size, self.num_cols, self.num_heads, self.num_rows, self.batch

    def __eq__(self, other: object) -> bool:
        """Compare what is kept, on whatever device; waits for the device."""
        if self is other:
            return True
        if not isinstance(other, BlockSparseLayout):
            return NotImplemented
        if self._shape() != other._shape():
            return False
        return are_equal(self._state, other._state)

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash((self._shape(), *order_sums(self._state)))
        return self._hash

    def __repr__(self) -> str:
        heads = "any" if self.num_heads == 1 else self.num_heads
        size, device = self.block_size, self.device
        shown = f"{self.num_rows} x {self.num_cols} blocks of {size[0]} x {size[1]}"
        density = "" if device.type == "meta" else f", density {self.density():.3f}"
        return f"BlockSparseLayout({shown}, heads {heads}{density}, device '{device}')"

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy what is kept, and no plans: these hold compiled kernels."""
        return self._make, tuple(self._state)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the layout to a file that :meth:`load` reads."""
        write(path, self._state)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], device: torch.device | str = "cpu"
    ) -> BlockSparseLayout:
        """Read a layout that :meth:`save` wrote.

        Raises:
            ValueError: if the file holds something else.
        """
        return cls._make(*read(path, device))

    def plot(self, head: int = 0, ax: Any = None) -> Any:
        """Draw one head's blocks with matplotlib; return the axes.

        Args:
            head: which head, of the first sequence. Default: 0.
            ax: axes to draw in. Default: None (new ones).
        """
        check_count("head", head, 0)
        if head >= self.num_heads:
            raise ValueError(f"head must be below {self.num_heads}, got {head}")
        dense = self.to_dense()
        kept = dense[0, head] if self.batch else dense[head]
        return draw(kept, self.block_size, f"head {head}", ax)
