"""The forward pass of one rank: its own keys first, then the keys of other ranks as they arrive.

Keys and values of the next ranks are exchanged while products run; memory holds the keys of at most
two other ranks. Partial results are merged by their LSE. ``backward.py`` has the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from .._dense.call import Options, Plan, Tensors
from .._linked.host.forms import Memory, form_of, interpreted
from .._linked.parallel.cut import Layout, layout_by
from .exchange import Channel, Exchange, give_way
from .pieces import MERGED, Piece, merge_eagerly
from .shards import Product, Step, table_of

# exchanges of keys that are in memory, or in flight, at a time
AHEAD = 2


class Sharded(NamedTuple):
    """The options of a call, in the order of the operators."""

    softmax_scale: float
    softcap: float
    deterministic: bool
    # the cut of the sequences; see ``Cut``
    lengths: Tensor | None
    numbers: list[int]
    group: str

    @property
    def layout(self) -> Layout:
        """The cut of the sequences."""
        return layout_by(self.lengths, self.numbers)


class Pass(NamedTuple):
    """The common part of the products of one pass.

    ``form`` is the signature of the rank's own tensors. Together with a product it determines a
    launch, except for addresses. None if calls must go through the operators.
    """

    options: Sharded
    form: Hashable | None

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, options: Sharded) -> Pass:
        """Take the tensors of a rank, ``[tokens, heads, d]``."""
        return cls(options, form_of((q, k, v), (sinks,), options[:3], True))


class Fetch:
    """The keys and values of all steps, some of them in flight.

    ``gives_way``: the next kernel occupies the whole GPU, and must let exchanges begin first.
    """

    def __init__(
        self, k: Tensor, v: Tensor, steps: tuple[Step, ...], options: Sharded, gives_way: bool
    ) -> None:
        self._kv, self._steps = (k, v), steps
        self.channel = Channel(k, v, options.numbers[0], options.group)
        self._gives_way = gives_way
        self._begun: list[Exchange] = []
        self.begin_next(AHEAD)

    def begin_next(self, count: int = 1) -> None:
        """Begin the exchanges of the next ``count`` steps."""
        asked = self._steps[len(self._begun) :][:count]
        for step in asked:
            message = step.sends.message(*self._kv)
            self._begun.append(self.channel.send(message, step.target, step.source, step.receives))
        if asked and self._gives_way:
            give_way(self._kv[0])

    def wait(self, i: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a step."""
        return self._begun[i].wait()

    def forget(self, i: int) -> None:
        """Free the memory of a step."""
        self._begun[i] = None  # type: ignore[call-overload]


class Pieces:
    """The results so far: at most ``MERGED`` pieces in memory.

    Pieces that are merged before the end stay in fp32. A kernel that merges into a piece rounds it
    each time, so at most ``MERGED`` products go into one piece. So the number of roundings does not
    grow with the number of ranks.
    """

    def __init__(self, tokens: int, dtype: torch.dtype) -> None:
        self._tokens, self._dtype = tokens, dtype
        self._held: list[Piece] = []
        # products in the last piece
        self.joined = 0

    def add(self, piece: Piece) -> None:
        """Take one more piece."""
        if len(self._held) == MERGED:
            whole = self._tokens
            out, lse = self._merged(torch.float32)
            self._held = [Piece(out, lse, (0, whole, whole, 1))]
        self._held.append(piece)
        self.joined = 1

    def whole(self) -> tuple[Tensor, Tensor] | None:
        """Return output and LSE of the last piece if a product may be merged into it, else None.

        The caller that merges a product into it raises ``joined``.
        """
        if not self._held or self.joined == MERGED:
            return None
        out, lse, raster = self._held[-1]
        is_whole = raster == (0, self._tokens, self._tokens, 1) and out.dtype == self._dtype
        if lse is None or not is_whole:
            return None
        # a piece of one group may have one more dimension
        return (out, lse) if out.ndim == 3 else (out[0], lse[0])

    def result(self) -> tuple[Tensor, Tensor | None]:
        """Return ``[tokens, heads, d]``, and the LSE as ``[heads, tokens]`` if there is one.

        There must be a piece. Tokens in no piece get 0.
        """
        out, lse, _ = self._held[0]
        if len(self._held) > 1 or not self._held[0].has_all(self._tokens):
            return self._merged(self._dtype)
        if lse is not None and lse.ndim == 3:
            lse = lse.transpose(0, 1).flatten(1)
        return (out.flatten(0, 1) if out.ndim == 4 else out), lse

    def _merged(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        merge: Callable[..., tuple[Tensor, Tensor | None]]
        if self._held[0].out.is_cpu and not interpreted():
            merge = merge_eagerly
        else:
            from .kernels.launch import merge
        return merge(self._held, self._tokens, dtype)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    options: Sharded,
) -> tuple[Tensor, Tensor]:
    """Return the output, and the LSE over the keys of all ranks."""
    table = table_of(options.layout)
    fetch = Fetch(k, v, table.steps, options, gives_way=True)
    if not table.local:
        out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
        lse = q.new_full(q.shape[1::-1], -math.inf, dtype=torch.float32)
    pieces = Pieces(q.shape[0], q.dtype)
    known = Pass.of(q, k, v, sinks, options)
    for i, product in enumerate(table.local):
        _attend(Part(product, q, k, v, None if i else sinks, known), pieces)
    for i, step in enumerate(table.steps):
        kv = fetch.wait(i)
        for product in step.products:
            _attend(Part(product, q, *kv, None, known), pieces)
        del kv
        # free the memory of these keys before the next keys begin to arrive
        fetch.forget(i)
        fetch.begin_next()
    if table.local:
        out, of_all = pieces.result()
        lse = lse if of_all is None else of_all
    return out, lse


def _attend(part: Part, pieces: Pieces) -> None:
    """Compute a product, merged into an earlier piece if a kernel can do that."""
    if not part.merge_into(pieces):
        pieces.add(part.piece(*part.forward()))


class Part:
    """A product, and the tensors that it reads."""

    def __init__(
        self,
        product: Product,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        known: Pass,
    ) -> None:
        options = known.options
        self._product, self._options, self._form = product, options, known.form
        self.rows = product.rows[0], product.size[0], product.q_step
        self.keys = product.keys[0], product.size[1], product.k_step
        scale, softcap, *_ = options
        self._given = Options(scale, *product.window, softcap, 0.0)
        own = self._of(q, self.rows), self._of(k, self.keys), self._of(v, self.keys)
        cu_q, cu_k = (None, None) if product.batch else product.cu_seqlens(q.device)
        self._x = Tensors(*own, cu_q, cu_k, sinks=sinks)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return the output and the LSE in the shapes of the kernels."""
        x = self._x
        plan = self._plan(needs_gradient=False)
        if plan is not None:
            return plan.forward(x)
        from .._dense.ops import forward

        return forward(  # type: ignore[no-any-return]
            *x, *self._longest(), *self._given, x.q.dtype, self._options.deterministic
        )

    def merge_into(self, pieces: Pieces) -> bool:
        """Merge the product into earlier results, in place; return whether a kernel did."""
        x = self._x
        there = pieces.whole()
        if there is None or x.sinks is not None:
            return False
        plan = self._plan(needs_gradient=False)
        if plan is None or plan.merge is None:
            return False
        out, lse = there
        is_merged = plan.merge(x, self._of(out, self.rows), self._of_lse(lse))
        pieces.joined += is_merged
        return is_merged

    def backward(
        self, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the gradients of queries, keys, values and sinks."""
        x, deterministic = self._x, self._options.deterministic
        out, dout = self._of(out, self.rows), self._of(dout, self.rows)
        lse = self._of_lse(lse).contiguous()
        dlse = None if dlse is None else self._of_lse(dlse).contiguous()
        if x.q.is_cpu and not interpreted():
            from .._reference.eager import attention_backward

            dq, dk, dv, _, of_sinks = attention_backward(x, self._given, out, lse, dout, dlse)
            return dq, dk, dv, of_sinks
        plan = self._plan(needs_gradient=True)
        if plan is not None and plan.backward is not None:
            dq, dk, dv, _, dsinks = plan.backward(x, out, lse, dout, dlse, False)
        else:
            from .._dense.ops import backward

            dq, dk, dv, _, dsinks = backward(
                dout,
                x.q,
                x.k,
                x.v,
                out,
                lse,
                dlse,
                x.cu_seqlens_q,
                x.cu_seqlens_k,
                x.seqused_k,
                x.bias,
                x.alibi_slopes,
                x.sinks,
                None,
                None,
                *self._longest(),
                *self._given,
                deterministic,
                False,
            )
        return dq, dk, dv, dsinks

    def piece(self, out: Tensor, lse: Tensor | None) -> Piece:
        """Return results with the raster of their tokens."""
        return Piece(out, lse, self._product.row_raster)

    def _plan(self, *, needs_gradient: bool) -> Plan | None:
        """Return the launcher of this product; None if it must go through the operators."""
        if self._form is None:
            return None
        key = self._product, self._form, needs_gradient
        plan = _plans.get(key)
        if plan is not None:
            return plan
        plan = _plan_of(self._x, self._given, self._options.deterministic, needs_gradient)
        return plan if plan is None else _plans.keep(key, plan)

    def _longest(self) -> tuple[int, int]:
        return self._product.size if self._product.batch else self._product.longest

    def _of(self, x: Tensor, raster: tuple[int, int, int]) -> Tensor:
        """Return rows of ``[tokens, heads, d]``; for a batch as ``[batch, rows, heads, d]``."""
        begin, size, step = raster
        batch = self._product.batch
        if not batch:
            ends = self._product.rows if raster is self.rows else self._product.keys
            return x if ends == (0, x.shape[0]) else x[ends[0] : ends[1]]
        if batch == 1:
            return (x if size == x.shape[0] else x[begin : begin + size]).unsqueeze(0)
        row = x.stride(0)
        return x.as_strided(
            (batch, size, *x.shape[1:]),
            (step * row, *x.stride()),
            x.storage_offset() + begin * row,
        )

    def _of_lse(self, x: Tensor) -> Tensor:
        """Return columns of ``[heads, tokens]``; for a batch as ``[batch, heads, rows]``."""
        begin, size, step = self.rows
        batch = self._product.batch
        if not batch:
            ends = self._product.rows
            return x if ends == (0, x.shape[1]) else x[:, ends[0] : ends[1]]
        if batch == 1:
            return (x if size == x.shape[1] else x[:, begin : begin + size]).unsqueeze(0)
        head, row = x.stride()
        return x.as_strided(
            (batch, x.shape[0], size), (step * row, head, row), x.storage_offset() + begin * row
        )


# by product, and by signature, which products of several lengths share
_plans: Memory[Plan] = Memory()


def _plan_of(
    x: Tensors, options: Options, deterministic: bool, needs_gradient: bool
) -> Plan | None:
    """Return the launcher of calls with a signature; None if they must go through the operators."""
    is_packed = x.cu_seqlens_q is not None
    others = x.cu_seqlens_q, x.cu_seqlens_k, x.sinks
    # None if tensors are misaligned
    form = form_of(x[:3], others, (*options, deterministic, needs_gradient), is_packed)
    plan = None if form is None else _plans.get(form)
    if form is None or plan is not None:
        return plan
    from .._dense.ops import plan_of

    plan = plan_of(x, options, x.q.dtype, deterministic, needs_gradient=needs_gradient)
    return plan if plan is None else _plans.keep(form, plan)
