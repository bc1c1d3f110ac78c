"""The passes of one rank: its own keys first, then those of the others, as they arrive.

Forward: keys and values of the next ranks travel while products run, in memory for two ranks' keys
at most; partial results are merged by their log-sum-exp. Backward: the same walk, with the
log-sum-exp of the whole; gradients of keys travel back while it goes on, and are added up in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ._call import Options, Plan, Tensors
from ._linked.host.forms import Memory, form_of, interpreted
from ._linked.parallel.cut import Layout, layout_by
from ._linked.parallel.groups import group_named
from ._pieces import MERGED, Piece, merge_eagerly
from ._shards import Product, Rows, Step, table_of

# other ranks' keys that are in memory, or on their way, at a time
AHEAD = 2


class Sharded(NamedTuple):
    """What is not multiplied, in the order of the operators."""

    softmax_scale: float
    softcap: float
    deterministic: bool
    # how sequences are cut; see ``Cut``
    lengths: Tensor | None
    numbers: list[int]
    group: str

    @property
    def layout(self) -> Layout:
        """How sequences are cut."""
        return layout_by(self.lengths, self.numbers)


class Exchange:
    """Rows on their way from one rank of a group to another one."""

    def __init__(
        self, message: Tensor, target: int, received: int, source: int, options: Sharded
    ) -> None:
        group = group_named(options.group)
        sent_sizes = [0] * dist.get_world_size(group)
        received_sizes = list(sent_sizes)
        sent_sizes[target] = message.shape[0]
        received_sizes[source] = received
        self._arriving = message.new_empty((received, *message.shape[1:]))
        self._work = dist.all_to_all_single(
            self._arriving, message, received_sizes, sent_sizes, group=group, async_op=True
        )

    def wait(self) -> Tensor:
        """Return the rows; a GPU's stream waits, the host does not."""
        if self._work is not None:
            self._work.wait()
        return self._arriving


class _Fetch:
    """The keys and values of all steps, some of them under way.

    ``gives_way``: what is launched next stays on all of a GPU, and has to let exchanges begin.
    """

    def __init__(
        self, k: Tensor, v: Tensor, steps: tuple[Step, ...], options: Sharded, gives_way: bool
    ) -> None:
        self._kv, self._steps, self._options = (k, v), steps, options
        self._gives_way = gives_way and k.is_cuda
        self._begun: list[Exchange] = []
        self.begin_next(AHEAD)

    def begin_next(self, count: int = 1) -> None:
        """Send what the next steps ask for."""
        asked = self._steps[len(self._begun) :][:count]
        for step in asked:
            message = torch.cat([step.sends.of(x) for x in self._kv], -1)
            self._begun.append(
                Exchange(message, step.target, step.receives, step.source, self._options)
            )
        if asked and self._gives_way:
            from ._kernels.sharded_plans import give_way

            give_way(self._kv[0])

    def wait(self, i: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a step."""
        return _apart(self._begun[i].wait(), self._kv[0].shape[-1])

    def forget(self, i: int) -> None:
        """Let the memory of a step go."""
        self._begun[i] = None  # type: ignore[call-overload]


class Pieces:
    """What has been computed so far: never more than ``MERGED`` pieces are in memory.

    Results are rounded once, at the end; what is merged before stays in fp32.
    """

    def __init__(self, tokens: int, dtype: torch.dtype) -> None:
        self._tokens, self._dtype = tokens, dtype
        self._held: list[Piece] = []

    def add(self, piece: Piece) -> None:
        """Take one more piece."""
        if len(self._held) == MERGED:
            whole = self._tokens
            out, lse = self._merged(torch.float32)
            self._held = [Piece(out, lse, (0, whole, whole, 1))]
        self._held.append(piece)

    def whole(self) -> tuple[Tensor, Tensor] | None:
        """Return output and LSE if they are one piece of all tokens, and more may go into it."""
        if len(self._held) != 1:
            return None
        out, lse, raster = self._held[0]
        is_whole = raster == (0, self._tokens, self._tokens, 1) and out.dtype == self._dtype
        if lse is None or not is_whole:
            return None
        return out.view(-1, *out.shape[-2:]), lse.view(-1, self._tokens)

    def result(self) -> tuple[Tensor, Tensor | None]:
        """Return ``[tokens, heads, d]``, and the LSE as ``[heads, tokens]`` if there is one.

        The first piece has all tokens.
        """
        out, lse, _ = self._held[0]
        if len(self._held) > 1:
            return self._merged(self._dtype)
        if lse is not None and lse.ndim == 3:
            lse = lse.transpose(0, 1).flatten(1)
        return (out.flatten(0, 1) if out.ndim == 4 else out), lse

    def _merged(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        merge: Callable[..., tuple[Tensor, Tensor | None]]
        if self._held[0].out.is_cpu and not interpreted():
            merge = merge_eagerly
        else:
            from ._kernels.sharded_plans import merge
        return merge(self._held, self._tokens, dtype)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    options: Sharded,
) -> tuple[Tensor, Tensor]:
    """Return the output, and the log-sum-exp over the keys of all ranks."""
    table = table_of(options.layout)
    fetch = _Fetch(k, v, table.steps, options, gives_way=True)
    if not table.local:
        out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
        lse = q.new_full(q.shape[1::-1], -math.inf, dtype=torch.float32)
    pieces = Pieces(q.shape[0], q.dtype)
    for i, product in enumerate(table.local):
        _attend(_Part(product, q, k, v, None if i else sinks, options), pieces)
    for i, step in enumerate(table.steps):
        kv = fetch.wait(i)
        for product in step.products:
            _attend(_Part(product, q, *kv, None, options), pieces)
        del kv
        # the memory of these keys goes before others begin to arrive
        fetch.forget(i)
        fetch.begin_next()
    if table.local:
        out, of_all = pieces.result()
        lse = lse if of_all is None else of_all
    return out, lse


def _attend(part: _Part, pieces: Pieces) -> None:
    """Compute what the keys of a product give: into what is there, if a kernel can."""
    if not part.merge_into(pieces):
        pieces.add(part.piece(*part.forward()))


def backward(
    x: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, options: Sharded
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dq, dk, dv, and this rank's share of the gradient of the sinks."""
    table = table_of(options.layout)
    q, k, v, sinks = x.q, x.k, x.v, x.sinks
    fetch = _Fetch(k, v, table.steps, options, gives_way=False)
    dq, dk, dv = (torch.zeros_like(t) for t in (q, k, v)) if not table.local else (q, k, v)
    dsinks = q.new_empty((0,)) if sinks is None else torch.zeros_like(sinks)
    pieces = Pieces(q.shape[0], q.dtype)
    results = out, lse, dout, dlse
    for i, product in enumerate(table.local):
        part = _Part(product, q, k, v, None if i else sinks, options)
        found = part.backward(*results)
        pieces.add(part.piece(found[0], None))
        if i:
            part.add_to(found[1], dk, part.keys)
            part.add_to(found[2], dv, part.keys)
            continue
        dk, dv = (g.reshape(t.shape) for g, t in zip(found[1:3], (k, v), strict=True))
        if sinks is not None and found[3] is not None:
            dsinks = found[3]
        if len(table.local) - 1 + table.sends > 1:
            # one addition rounds once, several would several times
            dk, dv = dk.float(), dv.float()
    returning: list[tuple[Exchange, Rows]] = []
    for i, step in enumerate(table.steps):
        message = _differentiate(step, fetch.wait(i), q, results, pieces, options)
        fetch.forget(i)
        if returning:
            _receive(*returning.pop(), dk, dv)
        exchange = Exchange(message, step.source, step.sends.count, step.target, options)
        del message
        returning.append((exchange, step.sends))
        fetch.begin_next()
    if table.local:
        # while the last gradients of keys are under way
        dq, _ = pieces.result()
    for one in returning:
        _receive(*one, dk, dv)
    return dq, dk.to(k.dtype), dv.to(v.dtype), dsinks


def _differentiate(
    step: Step,
    kv: tuple[Tensor, Tensor],
    q: Tensor,
    results: tuple[Tensor, Tensor, Tensor, Tensor | None],
    pieces: Pieces,
    options: Sharded,
) -> Tensor:
    """Compute the gradients by the keys of a step; return those of the keys, to be sent back."""
    parts = [_Part(product, q, *kv, None, options) for product in step.products]
    grads = [part.backward(*results) for part in parts]
    for part, found in zip(parts, grads, strict=True):
        pieces.add(part.piece(found[0], None))
    return _sent_back(parts, grads, *kv)


def _sent_back(parts: list[_Part], grads: list[Any], keys: Tensor, values: Tensor) -> Tensor:
    """Return the gradients of a step's keys and values side by side, in their dtype."""
    width = keys.shape[-1] + values.shape[-1]
    if len(parts) == 1 and parts[0].has_all_keys(keys.shape[0]):
        _, dk, dv, _ = grads[0]
        return torch.cat([dk, dv], -1).view(*keys.shape[:-1], width)
    summed = keys.new_zeros((*keys.shape[:-1], width), dtype=torch.float32)
    dk, dv = _apart(summed, keys.shape[-1])
    for part, found in zip(parts, grads, strict=True):
        part.add_to(found[1], dk, part.keys)
        part.add_to(found[2], dv, part.keys)
    return summed.to(keys.dtype)


def _receive(exchange: Exchange, rows: Rows, dk: Tensor, dv: Tensor) -> None:
    """Add the gradients that come back from a rank."""
    arrived = _apart(exchange.wait(), dk.shape[-1])
    if rows.count:
        for grad, part in zip((dk, dv), arrived, strict=True):
            rows.add(grad, part)


def _apart(both: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return keys and values that lie side by side."""
    return both[..., :width], both[..., width:]


class _Part:
    """A product, and the tensors that it reads."""

    def __init__(
        self,
        product: Product,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        options: Sharded,
    ) -> None:
        self._product, self._options = product, options
        self.rows = product.rows[0], product.size[0], product.q_step
        self.keys = product.keys[0], product.size[1], product.k_step
        scale, softcap, *_ = options
        self._given = Options(scale, *product.window, softcap, 0.0)
        own = self._of(q, self.rows), self._of(k, self.keys), self._of(v, self.keys)
        cu_seqlens = (None, None) if product.batch else product.cu_seqlens(q.device)
        self._x = Tensors(*own, *cu_seqlens)._replace(sinks=sinks)

    def has_all_keys(self, count: int) -> bool:
        """Say whether the product has a gradient for each of so many keys, in their order."""
        begin, end = self._product.keys
        _, size, step = self.keys
        return (begin, end) == (0, count) and (not self._product.batch or size == step)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return the output and the log-sum-exp, as the kernels shape them."""
        x, deterministic = self._x, self._options.deterministic
        plan = _plan_of(x, self._given, deterministic, needs_gradient=False)
        if plan is not None:
            return plan.forward(x)
        from ._ops import forward

        return forward(  # type: ignore[no-any-return]
            *x, *self._longest(), *self._given, x.q.dtype, deterministic
        )

    def merge_into(self, pieces: Pieces) -> bool:
        """Merge results into those over other keys, in place; return whether a kernel did."""
        x = self._x
        there = pieces.whole()
        if there is None or x.sinks is not None:
            return False
        plan = _plan_of(x, self._given, self._options.deterministic, needs_gradient=False)
        if plan is None or plan.merge is None:
            return False
        out, lse = there
        return plan.merge(x, self._of(out, self.rows), self._of_lse(lse))

    def backward(
        self, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the gradients of queries, keys, values and sinks."""
        x, deterministic = self._x, self._options.deterministic
        out, dout = self._of(out, self.rows), self._of(dout, self.rows)
        lse = self._of_lse(lse).contiguous()
        dlse = None if dlse is None else self._of_lse(dlse).contiguous()
        if x.q.is_cpu and not interpreted():
            from ._eager_sharded import backward as eager_backward

            dq, dk, dv, _, of_sinks = eager_backward(x, self._given, out, lse, dout, dlse)
            return dq, dk, dv, of_sinks
        plan = _plan_of(x, self._given, deterministic, needs_gradient=True)
        if plan is not None and plan.backward is not None:
            dq, dk, dv, _, dsinks = plan.backward(x, out, lse, dout, dlse, False)
        else:
            from ._ops import backward

            dq, dk, dv, _, dsinks = backward(
                dout,
                x.q,
                x.k,
                x.v,
                out,
                lse,
                dlse,
                *x.optional,
                None,
                *self._longest(),
                *self._given,
                deterministic,
                False,
            )
        return dq, dk, dv, dsinks

    def piece(self, out: Tensor, lse: Tensor | None) -> Piece:
        """Return results with the tokens that they belong to."""
        begin, size, step = self.rows
        if self._product.batch:
            return Piece(out, lse, (begin, size, step, self._product.batch))
        begin, end = self._product.rows
        return Piece(out, lse, (begin, end - begin, end - begin, 1))

    def add_to(self, grad: Tensor, x: Tensor, raster: tuple[int, int, int]) -> None:
        """Add a gradient to that of the rows or keys that the product reads."""
        self._of(x, raster).add_(grad)

    def _longest(self) -> tuple[int, int]:
        return self._product.size if self._product.batch else self._product.longest

    def _of(self, x: Tensor, raster: tuple[int, int, int]) -> Tensor:
        """Return rows of ``[tokens, heads, d]``; with a raster ``[batch, rows, heads, d]``."""
        begin, size, step = raster
        batch = self._product.batch
        if not batch:
            ends = self._product.rows if raster is self.rows else self._product.keys
            return x[ends[0] : ends[1]]
        if batch == 1:
            return x[begin : begin + size].unsqueeze(0)
        row = x.stride(0)
        return x.as_strided(
            (batch, size, *x.shape[1:]),
            (step * row, *x.stride()),
            x.storage_offset() + begin * row,
        )

    def _of_lse(self, x: Tensor) -> Tensor:
        """Return columns of ``[heads, tokens]``; with a raster ``[batch, heads, rows]``."""
        begin, size, step = self.rows
        batch = self._product.batch
        if not batch:
            return x[:, self._product.rows[0] : self._product.rows[1]]
        if batch == 1:
            return x[:, begin : begin + size].unsqueeze(0)
        head, row = x.stride()
        return x.as_strided(
            (batch, x.shape[0], size), (step * row, head, row), x.storage_offset() + begin * row
        )


_plans: Memory[Plan] = Memory()


def _plan_of(
    x: Tensors, options: Options, deterministic: bool, *, needs_gradient: bool
) -> Plan | None:
    """Return how to launch calls of a form; None where the operators have to be asked."""
    is_packed = x.cu_seqlens_q is not None
    others = x.cu_seqlens_q, x.cu_seqlens_k, x.sinks
    form = form_of(x[:3], others, (*options, deterministic, needs_gradient), is_packed)
    plan = None if form is None else _plans.get(form)
    if form is None or plan is not None:
        return plan
    from ._ops import plan_of

    plan = plan_of(x, options, x.q.dtype, deterministic, needs_gradient=needs_gradient)
    return plan if plan is None else _plans.keep(form, plan)
