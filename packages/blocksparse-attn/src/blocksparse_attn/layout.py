"""The layout: which blocks of keys each block of queries attends to, as an immutable value."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from attn_common import cdiv, detect
from torch import Tensor

from ._attention.call import Checked, ListForm, Pattern
from ._layout.checks import (
    check_alike,
    check_block_size,
    check_calls,
    check_csr,
    check_csr_values,
    check_local_strided,
    check_mask,
    is_top_left,
    validate_csr,
)
from ._layout.indices import check_columns, rows_of_indices
from ._layout.kept_lists import KeptLists, is_capturing
from ._layout.lists import by_sequence, dense_of
from ._layout.plot import draw
from ._layout.rows import dense_csr, density_of, local_strided_csr, mask_of
from ._layout.values import State, are_equal, joined, of_heads, order_sums, read, write
from ._linked.host.arguments import as_int32, as_length, check_count, check_flag
from ._linked.host.forms import Memory, checks_values
from ._linked.host.internals import is_watched
from .token_rule import TokenRule

# rows of the largest tile of queries
TALL = 128


class BlockSparseLayout:
    """A block-sparse pattern: compressed rows (CSR) of kept blocks, per query head.

    Block row r holds the queries at the positions from ``r * block_size[0]`` on, block column c the
    keys from ``c * block_size[1]`` on. A query's position counts *keys*: query i of a sequence
    stands at ``i + seqlen_k - seqlen_q``, so that prefill, a later chunk and decode address the
    same rows. With ``align="top-left"`` in a call, query i stands at ``i``. Positions outside all
    rows and columns are not attended to.

    A layout never changes. Layers, calls and threads can share it; it can be compared and used as
    a key of a dict. The first call makes the lists that kernels walk and keeps them with the
    layout.

    Args:
        crow: row pointers, ``[heads, rows + 1]``, or ``[batch, heads, rows + 1]`` if each sequence
            has its own layout. ``heads`` is the number of query heads, the number of key heads, or
            1 for all heads.
        col: columns, ``[heads, nnz]``, or ``[batch, heads, nnz]``, in any order within a row.
            Entries after the last row are padding (-1). Repeated columns count once, -1 not at all.
        block_size: tokens per block: an int, or ``(q, k)``; each 16, 32, 64 or 128.
        num_cols: number of block columns. Default: as many as cover the positions of all rows.
        max_row: upper bound of the blocks in a row; it limits how a decode splits its keys.
            Default: ``num_cols``.
        rows_alike: whether neighbouring rows keep mostly the same blocks, so that they should share
            a tile. It changes the speed, not the result. Default: False.
        token_rule: which keys of the kept blocks each query sees. Default: None (all).

    Raises:
        TypeError: if an argument has a wrong type or dtype.
        ValueError: if a shape, a device or a range is wrong. Values of ``crow`` and ``col`` are
            not read here: calls on CPU tensors raise for those out of range, and :meth:`validate`
            checks them.
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
        # copies, so that the caller cannot change them
        crow_, col_ = (as_int32(x).to(torch.int32, copy=True).flatten(0, -2) for x in (crow, col))
        batch = crow.shape[0] if crow.ndim == 3 else 0
        self._fill(
            State(crow_, col_, sides, cols, crow.shape[-2], max_row, bool(rows_alike), batch)
        )
        if token_rule is not None:
            self._fill(self._state._replace(rule=self._bounds_of(token_rule)))

    def _fill(self, state: State) -> None:
        crow, col, rule = state.crow, state.col, state.rule
        if col.shape[1] == 0:
            col = col.new_full((col.shape[0], 1), -1)
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            # autograd cannot save tensors that were made in inference mode
            with torch.inference_mode(False):
                crow, col = crow.clone(), col.clone()
                rule = None if rule is None else rule.clone()
        cols, max_row = state.num_cols, state.max_row
        max_row = cols if max_row is None else min(max_row, cols)
        # heads of all sequences, sequence by sequence
        self._crow, self._col, self._rule = crow.contiguous(), col.contiguous(), rule
        self._state = state._replace(crow=self._crow, col=self._col, max_row=max_row, rule=rule)
        is_shared = self._crow.shape[0] == max(state.batch, 1)
        sizes = self._crow.shape[1] - 1, cols, *state.block_size
        self._pattern = Pattern(is_shared, *sizes, state.rows_alike, max_row, state.batch)
        if col.device.type != "meta":
            # fill the cache of ``detect`` before any trace: torch.compile may trace a call twice,
            # and the operators' fakes would otherwise fill it in between
            detect(col.device)
        self._lists = KeptLists(self._crow, self._col, self._pattern, rule)
        self._calls: Memory[Checked] = Memory()
        # the same layout for other numbers of heads
        self._made: dict[int, BlockSparseLayout] = {}
        self._hash: int | None = None

    @classmethod
    def _make(cls, *state: Any) -> BlockSparseLayout:
        """Make a layout from the fields of ``State``; it owns their tensors."""
        layout = cls.__new__(cls)
        layout._fill(State(*state))
        return layout

    def _for_heads(self, heads_q: int) -> BlockSparseLayout:
        """Return the layout with ``heads_q`` heads, or with one head for all.

        A layout per key head is expanded to query heads once, and the result is kept.
        """
        # not ``in``: under torch.compile, ``in`` does not find a number in a tuple of symbols
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
                made._lists.keep((), ())
                self._made[heads_q] = made
        return made

    def _bounds_of(self, rule: TokenRule) -> Tensor:
        """Return the bounds of a token rule for this layout's positions."""
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
        """Return a layout of the same blocks with another token rule, or without one.

        Args:
            token_rule: which keys of the kept blocks each query sees; None: all.
        """
        return self._of_mask(None if token_rule is None else self._bounds_of(token_rule), None)

    def _of_mask(self, bounds: Tensor | None, causal: bool | None) -> BlockSparseLayout:
        """Return a layout of the same blocks with these bounds of tokens and this ``causal``."""
        return self._make(*self._state._replace(rule=bounds, causal=causal))

    def _causal_of(self, causal: bool) -> bool:
        """Return whether a call is causal; raise where that would mean another mask."""
        own = self._state.causal
        if own is None:
            return causal
        if check_flag("causal", causal) and not own:
            raise ValueError(
                "causal must be False for the layout of a block mask that shows keys after a query,"
                " got True"
            )
        return own

    @classmethod
    def from_indices(
        cls,
        indices: Tensor,
        block_size: int | Sequence[int],
        *,
        num_cols: int,
        counts: Tensor | None = None,
    ) -> BlockSparseLayout:
        """Make a layout from the columns of each row, as a selector of top-k blocks returns them.

        The host does not wait for the device. In a CUDA graph, each replay uses its own indices.

        Args:
            indices: block columns of each row, int32 or int64 ``[heads, rows, k]``, or ``[batch,
                heads, rows, k]`` if each sequence has its own; -1 means no block. ``heads`` is as
                in ``crow``. Repeated columns count once. Columns out of range raise on the CPU; on
                a GPU they are ignored, and :meth:`validate` names the first.
            block_size: tokens per block: an int, or ``(q, k)``.
            num_cols: number of block columns.
            counts: number of valid indices at the start of each row, int32 or int64, shaped as
                ``indices`` without the last dimension. Default: None (all).
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
        """Join the layouts of a batch's sequences to one layout.

        Args:
            layouts: one per sequence, on one device, with equal block size, rows, columns and
                heads.
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
            block_size: tokens per block: an int, or ``(q, k)``.
            max_nnz: upper bound of the kept blocks per head. Default: None: the blocks are counted,
                and the host waits once for the device.
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
        """Make the pattern of Phi-3-small: local blocks, and every ``vert_stride``-th column.

        In blocks of the key block size, ``(qb, kb)`` is kept iff ``kb <= qb`` and (``qb - kb <
        local_blocks`` or ``(kb + h * step + 1) % vert_stride == 0``), with ``step`` 0 for
        ``homo_head``, else ``max(1, vert_stride // num_heads)``. A query block of another size
        keeps the blocks that any of its queries keeps. The columns are computed in closed form, on
        the device.

        Args:
            num_heads: query heads of the model.
            max_seqlen: positions that the layout covers.
            block_size: tokens per block: an int, or ``(q, k)``. Default: 64.
            local_blocks: width of the band in blocks, at least 1. Default: 16.
            vert_stride: distance of the columns in blocks, at least 1. Default: 8.
            homo_head: use the same columns for every head. Default: False.
            head_range: ``(first, last + 1)``: only these heads of the model. Default: None (all).
            device: device of the layout. Default: torch's default device.
        """
        sides = check_block_size(block_size)
        max_seqlen = as_length("max_seqlen", max_seqlen)
        heads = check_local_strided(num_heads, local_blocks, vert_stride, head_range, homo_head)
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
        """Make a layout from a function of block indices, which runs on the device.

        Args:
            fn: ``fn(head, row, col)`` takes int64 tensors that broadcast against each other and
                returns a bool tensor: which blocks are kept.
            num_heads: query heads; 1 for any number.
            num_rows: number of blocks of queries.
            num_cols: number of blocks of keys.
            block_size: tokens per block: an int, or ``(q, k)``.
            device: device of the layout. Default: torch's default device.
        """
        sides = check_block_size(block_size)
        check_count("num_heads", num_heads, 1)
        check_count("num_rows", num_rows, 0)
        check_count("num_cols", num_cols, 0)
        return cls.from_dense(mask_of(fn, num_heads, num_rows, num_cols, device), sides)

    @property
    def crow(self) -> Tensor:
        """Row pointers, int32 ``[heads, rows + 1]`` or ``[batch, heads, rows + 1]``; a copy."""
        return self._of_heads(self._crow)

    @property
    def col(self) -> Tensor:
        """Columns, int32 ``[heads, nnz]`` or ``[batch, heads, nnz]``, padded with -1; a copy."""
        return self._of_heads(self._col)

    def _of_heads(self, x: Tensor) -> Tensor:
        batch = self._state.batch
        return by_sequence(of_heads(x, self.num_heads, batch), batch).clone()

    @property
    def batch(self) -> int | None:
        """Number of sequences if each has its own layout; None if one layout is for all."""
        return self._state.batch or None

    @property
    def causal(self) -> bool | None:
        """What the mask of which the layout was made says about keys after a query.

        True: it hides all of them, so that every call is causal. False: it shows some, so that
        calls with ``causal=True`` raise. None: the call says.
        """
        return self._state.causal

    @property
    def token_bounds(self) -> Tensor | None:
        """First and last key that each position sees, as ``TokenRule.bounds``; None: all keys."""
        return None if self._rule is None else self._rule.clone()

    @property
    def num_heads(self) -> int:
        """Number of heads; 1 is for any number of query heads."""
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
        """Tokens per block of queries and per block of keys."""
        return self._state.block_size

    @property
    def max_row(self) -> int:
        """Upper bound of the blocks in a row."""
        return self._pattern.max_row

    @property
    def rows_alike(self) -> bool:
        """Whether neighbouring rows share a tile."""
        return self._state.rows_alike

    @property
    def is_shared(self) -> bool:
        """Whether all heads have one pattern."""
        return self._pattern.is_shared

    @property
    def device(self) -> torch.device:
        """Device of the layout."""
        return self._crow.device

    def to(self, device: torch.device | str) -> BlockSparseLayout:
        """Return the layout on a device; itself if it is already there."""
        device = torch.device(device)
        if device.type == self.device.type and device.index in (None, self.device.index):
            return self
        moved = (x.to(device) if isinstance(x, Tensor) else x for x in self._state)
        return self._make(*moved)

    def to_dense(self) -> Tensor:
        """Return the mask of blocks, bool ``[heads, rows, cols]``, or ``[batch, heads, ...]``."""
        return self._of_heads(dense_of(self._crow, self._col, self.num_cols))

    def density(self, seqlen: int | None = None) -> float:
        """Return the kept share of the causally visible blocks; waits for the device.

        Args:
            seqlen: length of the sequence. Default: None (all rows).
        """
        if seqlen is not None:
            seqlen = as_length("seqlen", seqlen)
        return density_of(self._crow, self._col, self.num_cols, self.block_size, seqlen)

    def validate(self) -> None:
        """Check all values of rows and columns; waits for the device.

        Calls on a GPU check none; those on the CPU accept columns of -1 and repeated ones.

        Raises:
            ValueError: on the first wrong entry; the message has its index, and the expected and
                found values.
        """
        validate_csr(*self._blocks())

    def _blocks(self) -> tuple[Tensor, Tensor, int]:
        crow, col = (by_sequence(x, self._state.batch) for x in (self._crow, self._col))
        return crow, col, self.num_cols

    def _check_values(self) -> None:
        """Raise for values out of range, where calls check them; in traces operators do."""
        if checks_values(self._crow) and not is_watched():
            check_csr_values(*self._blocks())

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
        """Make the lists that kernels walk before the first call, and return the layout.

        Without this, the first call of a kind makes its lists. Use it before ``torch.compile``,
        which would otherwise make the lists within the graph, at every call.

        Args:
            heads_q: query heads of the later calls.
            heads_k: key heads of the later calls.
            head_dim: the wider of their two head dimensions.
            dtype: dtype of their tensors.
            causal: ``causal`` of the calls. Default: True.
            backward: make the lists of the backward too. Default: False.
            paged: the calls have keys in pages. Default: False.
            align: ``align`` of the calls. Default: "bottom-right".

        Raises:
            TypeError: if an argument has a wrong type or dtype.
            ValueError: if the heads do not fit the layout or each other, or a number is out of
                range.
        """
        check_calls(self.num_heads, heads_q, heads_k, head_dim, dtype)
        for name, flag in (("causal", causal), ("backward", backward), ("paged", paged)):
            check_flag(name, flag)
        causal = self._causal_of(causal)
        form = ListForm(heads_q // heads_k, head_dim, dtype.itemsize, bool(causal))
        self._check_values()
        lists = self._for_heads(heads_q)._lists
        lists.prepare(form, backward, paged, is_top_left(align))
        return self

    def _shape(self) -> tuple[Any, ...]:
        return self.block_size, self.num_cols, self.num_heads, self.num_rows, self.batch

    def __eq__(self, other: object) -> bool:
        """Compare the kept blocks, also across devices; waits for the device.

        Layouts whose ``causal`` is True and False differ; one whose is None equals both.
        """
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
        """Copy the state without lists and launchers: launchers hold compiled kernels."""
        return _restored, tuple(self._state)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the layout to a file that :meth:`load` reads."""
        write(path, self._state)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], device: torch.device | str = "cpu"
    ) -> BlockSparseLayout:
        """Read a layout that :meth:`save` wrote.

        Raises:
            ValueError: if the file is not one of :meth:`save`.
        """
        return cls._make(*read(path, device))

    def plot(self, head: int = 0, ax: Any = None) -> Any:
        """Draw one head's blocks with matplotlib; return the axes.

        Args:
            head: index of the head, in the first sequence. Default: 0.
            ax: axes to draw in. Default: None (new axes).
        """
        check_count("head", head, 0)
        if head >= self.num_heads:
            raise ValueError(f"head must be below {self.num_heads}, got {head}")
        dense = self.to_dense()
        kept = dense[0, head] if self.batch else dense[head]
        return draw(kept, self.block_size, f"head {head}", ax)


def _restored(*state: Any) -> BlockSparseLayout:
    return BlockSparseLayout._make(*state)


# torch.load makes layouts, whose tensors calls check on the CPU
torch.serialization.add_safe_globals([_restored, TokenRule])
