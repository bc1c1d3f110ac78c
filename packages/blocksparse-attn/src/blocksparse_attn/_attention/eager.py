"""Eager attention for CPU tensors: tiles of queries, each with the keys that its queries see.

A tile belongs to one sequence and holds the query heads of one key head, or of several key heads
if it has few queries or few scores. Each tile has its own products, as a larger batched product
may round differently. No tensor has the size queries times keys. The derivative is written out
because an operator may run without autograd; tests compare it with autograd of the reference.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .._layout.lists import dense_of
from .call import Common, Tensors
from .reference import (
    of_sequence,
    own_blocks,
    own_rule,
    sequences,
    softmax,
    starts_of,
    visible_at,
)

Grads = tuple[Tensor, Tensor, Tensor]

# positions of a tile
TILE = 128
# key heads share a tile of up to so many scores: more arithmetic is cheaper than more calls
FEW = 2**17


class Tile(NamedTuple):
    """A tile of queries of a sequence, and the keys that they see."""

    rows: slice
    heads: slice  # query heads
    heads_k: slice  # key heads
    keys: Tensor  # int64 [keys]
    visible: Tensor  # bool [heads, rows, keys]


class Sequence(NamedTuple):
    """A sequence: its slices of the packed tokens, and its tensors in fp32, heads first."""

    rows: slice
    keys: slice
    q: Tensor
    k: Tensor
    v: Tensor
    tiles: Iterator[Tile]


def attention_forward(x: Tensors, call: Common) -> tuple[Tensor, Tensor]:
    """Return the output, and the log-sum-exp in fp32."""
    q = _packed(x.q)
    out = q.new_zeros((*q.shape[:-1], x.v.shape[-1]))
    lse = q.new_full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.float32)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        for one in _sequences(x, call):
            own = one.q.new_zeros((*one.q.shape[:-1], one.v.shape[-1]))
            own_lse = lse[:, one.rows]
            for tile in one.tiles:
                s, _, values = _scores(one, tile, call.options.softmax_scale)
                p, own_lse[tile.heads, tile.rows] = softmax(s)
                own[tile.heads, tile.rows] = _times(p, values)
            out[one.rows] = own.transpose(0, 1).to(out.dtype)
    out = out.view(*x.q.shape[:-1], out.shape[-1])
    if x.q.ndim == 4:
        lse = lse.view(len(lse), *x.q.shape[:2]).transpose(0, 1).contiguous()
    return out, lse


def attention_backward(
    x: Tensors, call: Common, dout: Tensor, lse: Tensor, dlse: Tensor | None
) -> Grads:
    """Return the gradients of q, k and v, each in the dtype of its tensor."""
    if dlse is None:
        dlse = torch.zeros_like(lse)
    if x.q.ndim == 4:
        lse, dlse = (t.transpose(0, 1).flatten(1) for t in (lse, dlse))
    dout = _packed(dout)
    grads = [t.new_zeros(_packed(t).shape) for t in (x.q, x.k, x.v)]
    with torch.no_grad(), torch.autocast(x.q.device.type, enabled=False):
        for one in _sequences(x, call):
            own_dout = _by_head(dout[one.rows])
            own_lse, own_dlse = (t[:, one.rows] for t in (lse, dlse))
            found = dq, dk, dv = [torch.zeros_like(t) for t in (one.q, one.k, one.v)]
            for tile in one.tiles:
                s, keys, values = _scores(one, tile, call.options.softmax_scale)
                at = tile.heads, tile.rows
                sees = tile.visible.any(-1, keepdim=True)
                p = torch.exp(s - own_lse[at].masked_fill(~sees[..., 0], 0.0)[..., None])
                # dout of a fully masked row is ignored, even if it is NaN
                arrived = own_dout[at].masked_fill(~sees, 0.0)
                dp = _times(arrived, values.mT)
                # the terms that all logits of a row share: the normalisation's and the lse's
                common = own_dlse[at].masked_fill(~sees[..., 0], 0.0)[..., None]
                ds = p * (dp - (p * dp).sum(-1, keepdim=True) + common) * call.options.softmax_scale
                dq[at] = _times(ds, keys)
                queries, count = one.q[at].masked_fill(~sees, 0.0), len(values)
                for grad, to, by in (dk, ds, queries), (dv, p, arrived):
                    added = _grouped(to, count).mT @ _grouped(by, count)
                    grad[tile.heads_k].index_add_(1, tile.keys, added)
            for grad, own, place in zip(grads, found, (one.rows, one.keys, one.keys), strict=True):
                grad[place] = own.transpose(0, 1).to(grad.dtype)
    dq, dk, dv = (grad.view(t.shape) for grad, t in zip(grads, (x.q, x.k, x.v), strict=True))
    return dq, dk, dv


def _scores(one: Sequence, tile: Tile, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores of a tile (-inf where a query does not see a key), its keys and values.

    Keys that no query of their head sees are set to 0: they may hold NaN, and ``0 * NaN`` is NaN.
    """
    keys, values = (t[tile.heads_k, tile.keys] for t in (one.k, one.v))
    unseen = ~_grouped(tile.visible, len(keys)).any(1)[..., None]
    keys, values = (t.masked_fill_(unseen, 0.0) for t in (keys, values))
    s = _times(one.q[tile.heads, tile.rows], keys.mT) * scale
    return s.masked_fill(~tile.visible, -math.inf), keys, values


def _times(x: Tensor, y: Tensor) -> Tensor:
    """Multiply the rows of each query head by the matrix of its key head."""
    return (_grouped(x, len(y)) @ y).view(*x.shape[:-1], y.shape[-1])


def _grouped(x: Tensor, heads_k: int) -> Tensor:
    """View the rows of query heads as rows of their key heads."""
    return x.reshape(heads_k, -1, x.shape[-1])


def _sequences(x: Tensors, call: Common) -> Iterator[Sequence]:
    q, k, v = _packed(x.q), x.k, x.v
    if x.block_table is None:
        k, v = _packed(k), _packed(v)
    if x.cu_seqlens_q is None or x.cu_seqlens_k is None:
        starts = starts_of(x.q), starts_of(x.k)
    else:
        starts = x.cu_seqlens_q.tolist(), x.cu_seqlens_k.tolist()
    dense = dense_of(call.blocks.crow, call.blocks.col, call.blocks.cols)
    for b, (rows, keys) in enumerate(sequences(*starts)):
        own_k, own_v = (_by_head(of_sequence(t, keys, b, x.block_table)) for t in (k, v))
        tiles = _tiles(
            own_blocks(dense, b),
            call,
            (rows.stop - rows.start, keys.stop - keys.start),
            (q.shape[1], k.shape[-2]),
            own_rule(x.rule, b),
        )
        yield Sequence(rows, keys, _by_head(q[rows]), own_k, own_v, tiles)


def _tiles(
    dense: Tensor,
    call: Common,
    lengths: tuple[int, int],
    heads: tuple[int, int],
    rule: Tensor | None,
) -> Iterator[Tile]:
    """Yield the tiles of a sequence that see keys; ``dense`` is the sequence's mask of blocks."""
    (seqlen_q, seqlen_k), group = lengths, heads[0] // heads[1]
    causal, block_q, block_k = call.options.causal, call.blocks.block_q, call.blocks.block_k
    diagonal = 0 if call.options.top_left else seqlen_k - seqlen_q
    tokens = torch.arange(block_k, device=dense.device)
    starts = range(diagonal // TILE * TILE, diagonal + seqlen_q, TILE) if seqlen_q else ()
    for start in starts:
        low, high = max(start, diagonal), min(start + TILE, diagonal + seqlen_q)
        position = torch.arange(low, high, device=dense.device)
        # the blocks that some row keeps
        first, last = max(low, 0) // block_q, max(high - 1, -1) // block_q + 1
        end = min(high, seqlen_k) if causal else seqlen_k
        # key heads that share a tile
        few = FEW // max((high - low) * group * max(end, 1), 1)
        step = min(max(TILE // (high - low), few, 1), heads[1])
        for head in range(0, heads[1], step):
            own_k = slice(head, min(head + step, heads[1]))
            own = slice(own_k.start * group, own_k.stop * group)
            if head == 0 or len(dense) > 1:
                kept = dense[own] if len(dense) > 1 else dense
                col = kept[:, first:last].any(1).any(0).nonzero()
                keys = (col * block_k + tokens).flatten()
                keys = keys[keys < end]
                visible = visible_at(position, keys, kept, (block_q, block_k), causal, rule)
                seen = visible.any(1).any(0)
                keys, visible = keys[seen], visible[..., seen]
            if len(keys):
                there = visible.expand(own.stop - own.start, -1, -1)
                yield Tile(slice(low - diagonal, high - diagonal), own, own_k, keys, there)


def _by_head(x: Tensor) -> Tensor:
    """Return a contiguous copy in fp32 with heads first."""
    return x.transpose(0, 1).to(torch.float32, memory_format=torch.contiguous_format, copy=True)


def _packed(x: Tensor) -> Tensor:
    return x if x.ndim == 3 else x.reshape(-1, *x.shape[2:])
