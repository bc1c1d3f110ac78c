"""Token rules: which keys of its kept blocks each query sees."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._layout.checks import check_indices
from ._layout.kept_lists import NAMESPACE
from ._linked.host.arguments import check_count, is_int, kind
from ._linked.host.operators import register

# after the last key of every sequence
END = 2**31 - 1
# the first element of a part of a rule; its numbers or its tensor follow
KINDS = (("window",), ("document",), ("prefix",))


class TokenRule:
    """For each position of a query, the range of keys that it sees in its kept blocks.

    A layout with a rule hides every key outside the range. A kept block without a key in the range
    still costs time, so a layout should not keep it. Positions are those of the layout's rows: they
    count keys, or with ``align="top-left"`` queries. ``causal=True`` in a call hides the keys after
    the diagonal as well.

    :meth:`causal`, :meth:`window`, :meth:`document` and :meth:`prefix` make rules; with
    ``one & other`` a query sees the keys that both rules let it see. A rule never changes: it
    copies its tensors.
    """

    def __init__(self, *parts: tuple[Any, ...]) -> None:
        if not parts or not all(isinstance(p, tuple) and p[:1] in KINDS for p in parts):
            raise TypeError(
                "TokenRule must be made by causal(), window(), document() or prefix(), "
                f"got TokenRule{parts!r}"
            )
        self._parts = parts

    @classmethod
    def causal(cls) -> TokenRule:
        """See the keys up to the query's position."""
        return cls.window(-1, 0)

    @classmethod
    def window(cls, left: int, right: int) -> TokenRule:
        """See ``left`` keys before the query's position, the key at it, and ``right`` keys after.

        Args:
            left: number of keys before the position, or -1 for all.
            right: number of keys after the position, or -1 for all.
        """
        for name, value in (("left", left), ("right", right)):
            if not is_int(value):
                raise TypeError(f"{name} must be an int, got {kind(value)}")
            if not -1 <= value < END:
                raise ValueError(f"{name} must be from 0 to {END - 1}, or -1, got {value}")
        return cls(("window", left, right))

    @classmethod
    def document(cls, cu_seqlens: Tensor) -> TokenRule:
        """See the keys of the query's own document, for sequences of several documents.

        Positions before the first document and after the last see no key.

        Args:
            cu_seqlens: offsets of the documents within a sequence, int32 or int64
                ``[documents + 1]``, or ``[batch, documents + 1]`` if each sequence has its own.
                They must not decrease; on a GPU this is not checked.
        """
        _check_tensor("cu_seqlens", cu_seqlens, (1, 2), "[documents + 1]")
        return cls(("document", cu_seqlens.clone()))

    @classmethod
    def prefix(cls, lengths: int | Tensor) -> TokenRule:
        """See the first ``lengths`` keys, and the keys up to the query's position (a prefix LM).

        Use it with ``causal=False``: ``causal=True`` would hide the keys of the prefix after each
        query.

        Args:
            lengths: number of keys of the prefix: an int, or int32 or int64 ``[batch]``.
        """
        if isinstance(lengths, Tensor):
            _check_tensor("lengths", lengths, (1,), "[batch]")
            return cls(("prefix", lengths.clone()))
        if not is_int(lengths):
            raise TypeError(f"lengths must be an int or a torch.Tensor, got {kind(lengths)}")
        if not 0 <= lengths < END:
            raise ValueError(f"lengths must be from 0 to {END - 1}, got {lengths}")
        return cls(("prefix", lengths))

    def __and__(self, other: TokenRule) -> TokenRule:
        """See the keys that both rules let a query see."""
        if not isinstance(other, TokenRule):
            return NotImplemented
        return TokenRule(*self._parts, *other._parts)

    def __repr__(self) -> str:
        return " & ".join(f"TokenRule.{name}{values}" for name, *values in self._parts)

    def bounds(self, positions: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the first and the last key that each position sees; no key if first > last.

        Args:
            positions: number of positions.
            device: device of the result; tensors of the rule must be on it. Default: "cpu".

        Returns:
            int32 ``[batch, positions, 2]``, with a batch of 1 if all sequences share the rule.
        """
        check_count("positions", positions, 0)
        device = torch.empty(0, device=device).device  # with its index
        tables = [_table(part, positions, device) for part in self._parts]
        batch = max(len(table) for table in tables)
        for table in tables:
            if len(table) not in (1, batch):
                raise ValueError(
                    f"batch of token_rule must be one number, got {len(table)} and {batch}"
                )
        tables = [table.expand(batch, -1, -1) for table in tables]
        low = torch.stack([table[..., 0] for table in tables]).amax(0)
        high = torch.stack([table[..., 1] for table in tables]).amin(0)
        return torch.stack([low, high], -1)


def _check_tensor(name: str, x: Any, ndims: tuple[int, ...], form: str) -> None:
    check_indices(name, x)
    if x.ndim not in ndims or 0 in x.shape:
        raise ValueError(f"{name} must be {form} with one entry at least, got {list(x.shape)}")


def _table(part: tuple[Any, ...], positions: int, device: torch.device) -> Tensor:
    """Return the bounds of one part of a rule, int32 ``[batch or 1, positions, 2]``."""
    name, *values = part
    if isinstance(values[0], Tensor):
        if values[0].device != device:
            raise ValueError(
                f"tensors of token_rule must be on the device of the layout, {device}, "
                f"got {values[0].device}"
            )
        table: Tensor = token_bounds(values[0], name == "document", positions)
        return table
    position = torch.arange(positions, device=device)
    if name == "prefix":
        low, high = torch.zeros_like(position), position.clamp(min=values[0] - 1)
    else:
        left, right = values
        low = torch.zeros_like(position) if left < 0 else (position - left).clamp(min=0)
        high = torch.full_like(position, END) if right < 0 else (position + right).clamp(max=END)
    return torch.stack([low, high], -1).int()[None]


def _token_bounds(values: Tensor, of_documents: bool, positions: int) -> Tensor:
    """Return the bounds of documents, or of prefixes, int32 ``[batch, positions, 2]``."""
    position = torch.arange(positions, device=values.device)
    if not of_documents:
        high = torch.maximum(position, values[:, None].long() - 1).clamp(max=END)
        return torch.stack([torch.zeros_like(high), high], -1).int()
    starts = values.long().view(-1, values.shape[-1])
    place = position.expand(len(starts), -1).contiguous()
    # if several documents begin at one position, all but the last are empty
    after = torch.searchsorted(starts.contiguous(), place, right=True)
    last = starts.shape[1] - 1
    is_there = (after > 0) & (after <= last)
    low = torch.where(is_there, starts.gather(1, (after - 1).clamp(0, last)), END)
    high = torch.where(is_there, starts.gather(1, after.clamp(max=last)) - 1, -1)
    return torch.stack([low, high], -1).int()


def _token_bounds_fake(values: Tensor, of_documents: bool, positions: int) -> Tensor:
    batch = 1 if of_documents and values.ndim == 1 else values.shape[0]
    return values.new_empty((batch, positions, 2), dtype=torch.int32)


def _check_bounds(values: Tensor, of_documents: bool, positions: int) -> None:
    """Raise for the first value of a CPU tensor that is out of range."""
    name = "cu_seqlens" if of_documents else "lengths"
    low = torch.zeros_like(values)
    if of_documents:
        low[..., 1:] = values[..., :-1].clamp(min=0)
    wrong = (values < low).nonzero()
    if len(wrong):
        at = tuple(wrong[0].tolist())
        raise ValueError(f"{name}{list(at)} must be at least {int(low[at])}, got {int(values[at])}")


token_bounds = register(
    f"{NAMESPACE}::token_bounds",
    "(Tensor values, bool of_documents, SymInt positions) -> Tensor",
    fake=_token_bounds_fake,
    kernels=_token_bounds,
    eager=_token_bounds,
    check=_check_bounds,
)
