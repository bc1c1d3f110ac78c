"""The backward pass of one rank: the steps of the forward, with the LSE over all keys.

Gradients of keys are sent back while the next steps run. All gradients are summed in fp32 and
rounded once, with up to ``MERGED`` summands per pass; only gradients that are sent are rounded
before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._dense.call import Tensors
from .exchange import Exchange, give_way
from .passes import Fetch, Part, Pass, Pieces, Sharded
from .pieces import summand
from .shards import Product, Rows, Step, table_of


def backward(
    x: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, options: Sharded
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dq, dk, dv, and this rank's share of the gradient of the sinks."""
    table = table_of(options.layout)
    q, k, v, sinks = x.q, x.k, x.v, x.sinks
    fetch = Fetch(k, v, table.steps, options, gives_way=False)
    rank = _Rank(q, (out, lse, dout, dlse), Pass.of(q, k, v, sinks, options))
    dsinks = q.new_empty((0,)) if sinks is None else torch.zeros_like(sinks)
    own = _KeyGradients(k, v)
    # the first product has every row, so it gets the sinks
    of_sinks = rank.differentiate(table.local, k, v, own, sinks)
    returning: tuple[Exchange, Rows] | None = None
    for i, step in enumerate(table.steps):
        message = _sent_back(step, fetch.wait(i), rank)
        fetch.forget(i)
        if returning is not None:
            own.receive(*returning)
        exchange = fetch.channel.send(message, step.source, step.target, step.sends.count)
        del message
        returning = exchange, step.sends
        fetch.begin_next()
    if returning is not None and (step.receives or step.sends.count):
        give_way(q)
    # runs while the last gradients of keys are in flight
    dq = rank.dq.result()[0] if table.local else torch.zeros_like(q)
    if returning is not None:
        own.receive(*returning)
    dk, dv = own.result() if table.local else (torch.zeros_like(k), torch.zeros_like(v))
    return dq, dk, dv, dsinks if of_sinks is None else of_sinks


class _KeyGradients:
    """Gradients of some keys and values, from several products and ranks."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self._tokens = k.shape[0]
        self._of = [Pieces(self._tokens, x.dtype) for x in (k, v)]

    def add(self, product: Product, *grads: Tensor) -> None:
        """Take dk and dv of a product."""
        for pieces, grad in zip(self._of, grads, strict=True):
            pieces.add(summand(grad, product.key_raster))

    def receive(self, exchange: Exchange, rows: Rows) -> None:
        """Take the gradients of rows that a rank sends back."""
        for pieces, grad in zip(self._of, exchange.wait(), strict=True):
            if rows.rasters is None:
                grad = rows.spread(grad, self._tokens)
                pieces.add(summand(grad, (0, self._tokens, self._tokens, 1)))
                continue
            begin = 0
            for raster in rows.rasters:
                count = raster[1] * raster[3]
                pieces.add(summand(grad[begin : begin + count], raster))
                begin += count

    def result(self) -> list[Tensor]:
        """Return dk and dv, ``[tokens, heads, d]``."""
        return [pieces.result()[0] for pieces in self._of]


class _Rank:
    """A rank's queries, their results, and their gradient so far."""

    def __init__(
        self,
        q: Tensor,
        results: tuple[Tensor, Tensor, Tensor, Tensor | None],
        known: Pass,
    ) -> None:
        self._q, self._results, self._known = q, results, known
        self.dq = Pieces(q.shape[0], q.dtype)

    def differentiate(
        self,
        products: tuple[Product, ...],
        k: Tensor,
        v: Tensor,
        grads: _KeyGradients,
        sinks: Tensor | None = None,
    ) -> Tensor | None:
        """Add the gradients of some products; return the gradient of the sinks of the first one."""
        of_sinks = None
        for i, product in enumerate(products):
            part = Part(product, self._q, k, v, None if i else sinks, self._known)
            dq, dk, dv, found = part.backward(*self._results)
            of_sinks = of_sinks if i else found
            self.dq.add(summand(dq, product.row_raster))
            grads.add(product, dk, dv)
        return of_sinks


def _sent_back(step: Step, kv: tuple[Tensor, Tensor], rank: _Rank) -> Tensor:
    """Compute the gradients of a step's products; return dk and dv as a message to send back."""
    if not step.products:
        return kv[0].new_empty(0)
    grads = _KeyGradients(*kv)
    rank.differentiate(step.products, *kv, grads)
    return torch.cat([grad.flatten() for grad in grads.result()])
