"""Rows that begin alike become a tree of segments, and a tree's logits the rows' probabilities.

:func:`pack` stores each common beginning once, :func:`flash_attn_triton.flash_attn_tree_func`
attends over the result, and :func:`log_probs` reads what each row of it predicts::

    batch = trees.pack([prompt + answer for answer in answers]).to(device)
    logits = model(batch)  # [tokens, vocabulary]
    labels = batch.tokens[batch.gather].roll(-1)  # the next token; of a row's last one, any
    found = trees.log_probs(logits, batch, labels)  # [tokens of all rows]
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._linked.host.arguments import check_tensor, is_int, kind, shown

__all__ = ["IGNORED", "TreeBatch", "log_probs", "pack"]

# a label without a prediction, as in cross_entropy
IGNORED = -100
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
# how many logits are in fp32 at a time
_AT_ONCE = 2**24


class TreeBatch(NamedTuple):
    """Rows as a tree of segments: what ``flash_attn_tree_func`` and a model need of it."""

    tokens: Tensor  # int64 [tokens]: every segment once, a segment after all those above it
    positions: Tensor  # int64 [tokens]: each token's place in its rows, from 0
    cu_seqlens: Tensor  # int32 [segments + 1]
    parents: Tensor  # int32 [segments]: -1 for a root
    max_seqlen: int  # the longest segment
    gather: Tensor  # int64 [tokens of all rows]: where each row's tokens stand in ``tokens``

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TreeBatch:
        """Return the batch with its tensors on a device."""
        moved = (x.to(device, non_blocking=non_blocking) for x in self if isinstance(x, Tensor))
        tokens, positions, cu_seqlens, parents, gather = moved
        return TreeBatch(tokens, positions, cu_seqlens, parents, self.max_seqlen, gather)


class _Run:
    """Tokens ``source[start:stop]`` of some row, and the runs that follow, by their first token."""

    __slots__ = ("children", "first", "source", "start", "stop")

    def __init__(
        self, source: list[int], start: int, stop: int, children: dict[Hashable, _Run]
    ) -> None:
        self.source, self.start, self.stop, self.children = source, start, stop, children
        self.first = 0  # where the run stands among all tokens

    def cut(self, at: int) -> None:
        """Keep the tokens ahead of a position; the others become the only run that follows."""
        rest = _Run(self.source, at, self.stop, self.children)
        self.stop, self.children = at, {self.source[at]: rest}


def pack(
    sequences: Sequence[Sequence[int] | Tensor], *, group: Sequence[Hashable] | Tensor | None = None
) -> TreeBatch:
    """Pack rows of tokens as a tree in which equal beginnings stand once, at any depth.

    Rows share tokens from their first one up to where they differ: a prompt with its answers, a
    conversation with its continuations. A row that equals another one, or begins another one, adds
    no token. The time grows with the number of tokens, and does not depend on how rows are ordered.

    Args:
        sequences: the rows: lists or tuples of ints, or 1-D integer tensors on the CPU. A row may
            be empty, and there may be no row.
        group: an id for each row: a list of ints, strings or other hashable objects, or a 1-D
            integer tensor on the CPU. Rows share only with rows of their id.
            Default: None, all rows may share.

    Returns:
        A :class:`TreeBatch` of tensors on the CPU; ``to`` moves them. Its segments are in preorder.
        Tokens of row i are ``tokens[gather[start:end]]`` if ``start`` and ``end`` are the numbers
        of tokens of the rows before and up to it.

    Raises:
        TypeError: on a row that is neither a list, a tuple nor a tensor, on tokens that are no
            integers, and on ids that are not hashable.
        ValueError: on a tensor of another shape or another device, on a token beyond 64 bits, and
            on more or fewer ids than rows.
    """
    rows = _as_rows(sequences)
    roots: dict[Hashable, _Run] = {}
    tops = [roots.setdefault(name, _Run([], 0, 0, {})) for name in _as_ids(group, len(rows))]
    for row, top in zip(rows, tops, strict=True):
        _insert(row, top)

    tokens: list[int] = []
    starts, parents, pieces = [0], [], []
    for run, parent in _preorder(roots.values()):
        run.first = len(tokens)
        tokens += run.source[run.start : run.stop]
        pieces.append((run.start, run.stop))
        starts.append(len(tokens))
        parents.append(parent)
    places = [place for row, top in zip(rows, tops, strict=True) for place in _places(row, top)]
    return TreeBatch(
        torch.tensor(tokens, dtype=torch.int64),
        _ranges(pieces),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(parents, dtype=torch.int32),
        max(map(int.__sub__, starts[1:], starts), default=0),
        _ranges(places),
    )


def _ranges(pieces: list[tuple[int, int]]) -> Tensor:
    """Return the numbers from the first one up to the second one of each pair, joined."""
    start, stop = torch.tensor(pieces, dtype=torch.int64).view(-1, 2).unbind(1)
    lengths = stop - start
    shift = start - lengths.cumsum(0) + lengths
    return shift.repeat_interleave(lengths) + torch.arange(int(lengths.sum()))


def _as_rows(sequences: Any) -> list[list[int]]:
    if not isinstance(sequences, (list, tuple)):
        raise TypeError(f"sequences must be a list of rows, got {kind(sequences)}")
    return [_as_row(f"sequences[{i}]", row) for i, row in enumerate(sequences)]


def _as_row(name: str, row: Any) -> list[int]:
    if isinstance(row, Tensor):
        _check_integers(name, row)
        return row.tolist()
    if not isinstance(row, (list, tuple)):
        raise TypeError(f"{name} must be a list of ints or a 1-D integer tensor, got {kind(row)}")
    if set(map(type, row)) - {int}:
        for i, token in enumerate(row):
            if not is_int(token):
                raise TypeError(f"{name}[{i}] must be an int, got {kind(token)}")
    if row and not -(2**63) <= min(row) <= max(row) < 2**63:
        at = next(i for i, x in enumerate(row) if not -(2**63) <= x < 2**63)
        raise ValueError(f"{name}[{at}] must fit 64 bits, got {shown(row[at])}")
    return list(row)


def _check_integers(name: str, x: Tensor) -> None:
    check_tensor(name, x)
    if x.dtype not in _INTEGERS:
        raise TypeError(f"{name} must be of an integer dtype, got {x.dtype}")
    if x.ndim != 1:
        raise ValueError(f"{name} must be 1-D, got {list(x.shape)}")
    if x.device.type != "cpu":
        raise ValueError(f"{name} must be on the CPU, where rows are compared, got {x.device}")


def _as_ids(group: Any, rows: int) -> list[Hashable]:
    if group is None:
        return [None] * rows
    if isinstance(group, Tensor):
        _check_integers("group", group)
        group = group.tolist()
    elif not isinstance(group, (list, tuple)):
        raise TypeError(
            f"group must be a list with an id for each row or a 1-D integer tensor, "
            f"got {kind(group)}"
        )
    if len(group) != rows:
        raise ValueError(f"group must have one id per row of sequences, {rows}, got {len(group)}")
    for i, name in enumerate(group):
        try:
            hash(name)
        except TypeError:
            raise TypeError(f"group[{i}] must be hashable, got {kind(name)}") from None
    return list(group)


def _insert(row: list[int], run: _Run) -> None:
    """Add a row below the empty run of its group."""
    while run.stop < len(row):
        following = run.children.get(row[run.stop])
        if following is None:
            if run.children or not run.stop:
                run.children[row[run.stop]] = _Run(row, run.stop, len(row), {})
            else:
                # nothing follows: the run goes on
                run.source, run.stop = row, len(row)
            return
        run = following
        alike = _alike(row, run)
        if alike < min(run.stop, len(row)):
            run.cut(alike)


def _alike(row: list[int], run: _Run) -> int:
    """Return the position up to which a row equals a run of its path."""
    low, high = run.start, min(run.stop, len(row))
    if row[low:high] == run.source[low:high]:
        return high
    # halves, whose comparison costs less than a step for each token
    while high - low > 1:
        middle = (low + high) // 2
        if row[low:middle] == run.source[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _preorder(tops: Collection[_Run]) -> Iterator[tuple[_Run, int]]:
    """Yield the runs below empty ones, each with the index of the run that it follows."""
    left = [(run, -1) for top in reversed(list(tops)) for run in reversed(top.children.values())]
    for index in itertools.count():
        if not left:
            return
        run, parent = left.pop()
        yield run, parent
        left += ((child, index) for child in reversed(run.children.values()))


def _places(row: list[int], run: _Run) -> Iterator[tuple[int, int]]:
    """Yield where the tokens of a row stand, run by run."""
    while run.stop < len(row):
        run = run.children[row[run.stop]]
        yield run.first, run.first + min(run.stop, len(row)) - run.start


def log_probs(logits: Tensor, batch: TreeBatch, labels: Tensor) -> Tensor:
    """Return the logarithm of the probability that each token of the rows gives to its label.

    A token that several rows share has one row of logits, and a label for each of them: the last
    token of a prompt predicts the first one of every answer. The rows' logits are not written out.

    Args:
        logits: what the model returns for ``batch.tokens``, ``[tokens, vocabulary]`` or
            ``[1, tokens, vocabulary]``; fp16, bf16, fp32 or fp64. Has a gradient.
        batch: what :func:`pack` returned, with its tensors on the device of ``logits``.
        labels: for each token of the rows, in the order of ``batch.gather``, the token that follows
            it: integers, ``[tokens of all rows]``. -100 is no label; its result is 0.

    Returns:
        ``log_softmax(logits)[batch.gather, labels]``, ``[tokens of all rows]``, in fp32; in fp64
        for fp64 logits.

    Raises:
        TypeError: on an argument's type or dtype.
        ValueError: on a shape or a device; on the CPU also on a label beyond the vocabulary.
        NotImplementedError: on a second derivative.
    """
    check_tensor("logits", logits)
    if not isinstance(batch, TreeBatch):
        raise TypeError(f"batch must be a TreeBatch, which pack returns, got {kind(batch)}")
    check_tensor("labels", labels)
    tokens, rows = batch.tokens.shape[0], batch.gather.shape[0]
    if logits.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(f"logits must be of a float dtype, got {logits.dtype}")
    shape = tuple(logits.shape)
    if len(shape) not in (2, 3) or shape[-2] != tokens or (len(shape) == 3 and shape[0] != 1):
        raise ValueError(
            f"logits must be [{tokens}, vocabulary] or [1, {tokens}, vocabulary], with a row for "
            f"each of batch.tokens, got {list(shape)}"
        )
    if labels.dtype not in _INTEGERS:
        raise TypeError(f"labels must be of an integer dtype, got {labels.dtype}")
    if labels.shape != (rows,):
        raise ValueError(
            f"labels must be [{rows}], one for each of batch.gather, got {list(labels.shape)}"
        )
    for name, x in (("batch", batch.gather), ("labels", labels)):
        if x.device != logits.device:
            raise ValueError(
                f"{name} must be on the device of logits, {logits.device}, got {x.device}"
            )
    logits, labels = logits.reshape(shape[-2:]), labels.long()
    if torch.compiler.is_compiling():
        # a compiler fuses this by itself
        return _forward(logits, batch.gather, labels)[0]
    if labels.device.type == "cpu":
        _check_labels(labels, shape[-1])
    found: Tensor = _LogProbs.apply(logits, batch.gather, labels)[0]  # type: ignore[no-untyped-call]
    return found


def _check_labels(labels: Tensor, vocabulary: int) -> None:
    wrong = (labels != IGNORED) & ((labels < 0) | (labels >= vocabulary))
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        raise ValueError(
            f"labels[{at}] must be from 0 to {vocabulary - 1}, or {IGNORED} for none, "
            f"got {int(labels[at])}"
        )


class _LogProbs(torch.autograd.Function):
    """The gradient is written in the logits' dtype, once, without fp32 logits of all tokens."""

    @staticmethod
    def forward(logits: Tensor, gather: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return _forward(logits, gather, labels)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs, output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "second derivatives are not offered: differentiate without create_graph=True"
            )
        logits, gather, labels, lse = ctx.saved_tensors
        return _gradient(logits, gather, labels, lse, grad), None, None


def _forward(logits: Tensor, gather: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the results, and the log-sum-exp of each token."""
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    if torch.compiler.is_compiling():
        logits = logits.to(wide)
        lse = logits.logsumexp(1)
    else:
        parts = torch.split(logits, _tokens_at_once(logits))
        lse = torch.cat([part.to(wide).logsumexp(1) for part in parts])
    kept = labels != IGNORED
    chosen = logits[gather, labels.where(kept, 0)].to(wide)
    return (chosen - lse[gather]).where(kept, 0.0), lse


def _tokens_at_once(logits: Tensor) -> int:
    return max(1, _AT_ONCE // max(1, logits.shape[1]))


def _gradient(logits: Tensor, gather: Tensor, labels: Tensor, lse: Tensor, grad: Tensor) -> Tensor:
    """Return ``(is label - softmax) * grad``, whose sum over a token's rows is rounded once."""
    kept = labels != IGNORED
    grad, labels = grad.where(kept, 0.0), labels.where(kept, 0)
    of_tokens = torch.zeros_like(lse).index_add(0, gather, grad)
    # rows that give the same token the same label are neighbours in this order
    pairs, order = (gather * logits.shape[1] + labels).sort()
    number = torch.nn.functional.pad(pairs.diff() != 0, (1, 0))[: len(pairs)].cumsum(0)
    of_pairs = torch.zeros_like(grad).index_add(0, number, grad[order])[number]
    gather, labels = gather[order], labels[order]

    found = torch.empty_like(logits)
    step = _tokens_at_once(logits)
    for out, x, norm, total in zip(
        *(torch.split(t, step) for t in (found, logits, lse, of_tokens)), strict=True
    ):
        out.copy_((x.to(lse.dtype) - norm[:, None]).exp_().mul_(-total[:, None]))
    softmax = (logits[gather, labels].to(lse.dtype) - lse[gather]).exp()
    found[gather, labels] = (of_pairs - softmax * of_tokens[gather]).to(logits.dtype)
    return found
