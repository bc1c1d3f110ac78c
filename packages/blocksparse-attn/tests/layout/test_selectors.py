"""Selectors, against loops over rows and blocks."""

from __future__ import annotations

import pytest
import torch
from blocksparse_attn import blocksparse_attn_func, selectors

from .._linked.budget import Maker
from ..attention._operators import compiled, traced_alike

__all__ = ["compiled"]  # a fixture

pytestmark = pytest.mark.eager


def draw(device, *shapes):
    m = Maker(device, torch.float32)
    return [m.randn(*shape) for shape in shapes]


def diagonal(row, block):
    """The first and the last block of keys that the positions of a row are in."""
    return row * block[0] // block[1], ((row + 1) * block[0] - 1) // block[1]


def chosen_by_loop(q, k, block, top_k, local, sinks, causal, offset):
    """Blocks of one head of keys, [rows, cols]; q [seqlen_q, group, d], k [seqlen_k, d]."""
    rows, cols = (-(-n // side) for n, side in zip((offset + len(q), len(k)), block, strict=True))
    kept = torch.zeros(rows, cols, dtype=torch.bool)
    for row in range(rows):
        first, last = diagonal(row, block)
        own = q[max(row * block[0] - offset, 0) : max((row + 1) * block[0] - offset, 0)]
        mean = own.mean(0).sum(0) if len(own) else torch.zeros_like(k[0])
        ranks = []
        for col in range(cols):
            score = float(mean @ k[col * block[1] : (col + 1) * block[1]].mean(0))
            if first - local < col <= last or col < sinks:
                score = float("inf")
            if not (causal and col > last):
                ranks.append((score, col))
        for _, col in sorted(ranks, reverse=True)[:top_k]:
            kept[row, col] = True
    return kept


@pytest.mark.parametrize(
    ("lengths", "block", "causal", "align"),
    [
        ((150, 150), (16, 16), True, "bottom-right"),
        ((70, 150), (32, 16), True, "bottom-right"),
        ((150, 70), (16, 16), False, "top-left"),
        ((100, 100), (16, 32), True, "bottom-right"),
    ],
    ids=str,
)
def test_topk_blocks(lengths, block, causal, align, device):
    q, k = draw(device, (2, lengths[0], 4, 8), (2, lengths[1], 2, 8))
    layout = selectors.topk_blocks(
        q, k, block, 4, local_blocks=1, sink_blocks=1, causal=causal, align=align
    )
    offset = lengths[1] - lengths[0] if align == "bottom-right" else 0
    # of rows without a query what is chosen is of no use
    first = offset // block[0]
    for b in range(2):
        for head in range(2):
            own = q[b, :, 2 * head : 2 * head + 2].cpu(), k[b, :, head].cpu()
            want = chosen_by_loop(*own, block, 4, 1, 1, causal, offset)
            assert torch.equal(layout.to_dense()[b, head, first:].cpu(), want[first:])
    blocksparse_attn_func(q, k, k, layout, causal=causal, align=align)


def slashes_by_loop(q, k, block, vertical, slash, last_queries, sinks, local):
    """Blocks of one head; q ``[seqlen_q, d]``, k ``[seqlen_k, d]``."""
    tokens = len(k)
    by_key, by_distance = torch.zeros(tokens), torch.zeros(tokens)
    for i in range(max(len(q) - last_queries, 0), len(q)):
        at = i + tokens - len(q)
        p = torch.softmax(k[: at + 1] @ q[i] * q.shape[-1] ** -0.5, 0)
        for j in range(at + 1):
            by_key[j] += p[j]
            by_distance[at - j] += p[j]
    rows, cols = (-(-tokens // side) for side in block)
    kept = torch.zeros(rows, cols, dtype=torch.bool)
    for row in range(rows):
        first, last = diagonal(row, block)
        for col in range(cols):
            kept[row, col] = col < sinks or first - local < col
        for key in by_key.topk(vertical).indices.tolist():
            kept[row, key // block[1]] = True
        for distance in by_distance.topk(slash).indices.tolist():
            for position in range(row * block[0], (row + 1) * block[0]):
                if 0 <= position - distance < tokens:
                    kept[row, (position - distance) // block[1]] = True
        kept[row, last + 1 :] = False
    return kept


@pytest.mark.parametrize(
    ("lengths", "block"),
    [((90, 90), (16, 16)), ((30, 110), (32, 16)), ((90, 90), (16, 64))],
    ids=str,
)
def test_vertical_slash_blocks(lengths, block, device):
    q, k = draw(device, (1, lengths[0], 4, 8), (1, lengths[1], 2, 8))
    layout = selectors.vertical_slash_blocks(3 * q, k, block, 2, 3, last_queries=40)
    assert (layout.batch, layout.num_heads) == (None, 4)
    for head in range(4):
        own = 3 * q[0, :, head].cpu(), k[0, :, head // 2].cpu()
        want = slashes_by_loop(*own, block, 2, 3, 40, 1, 1)
        assert torch.equal(layout.to_dense()[head].cpu(), want)
    blocksparse_attn_func(q, k, k, layout)


def test_nothing_chosen_is_behind_the_rows_first_query(device):
    """Of the keys that a row cannot see, none has a say."""
    q, k = draw(device, (1, 128, 2, 8), (1, 128, 2, 8))
    first = selectors.topk_blocks(q, k, 16, 3)
    changed = k.clone()
    changed[:, 64:] = torch.inf
    second = selectors.topk_blocks(q, changed, 16, 3)
    assert torch.equal(first.to_dense()[:, :5], second.to_dense()[:, :5])


@traced_alike
@pytest.mark.parametrize("select", ["topk", "vertical_slash"])
def test_selectors_trace_whole(select, device, compiled):
    def function(q, k):
        if select == "topk":
            layout = selectors.topk_blocks(q, k, 16, 2)
        else:
            layout = selectors.vertical_slash_blocks(q, k, 16, 2, 2, last_queries=8)
        return blocksparse_attn_func(q, k, k, layout)

    q, k = draw(device, (2, 70, 2, 8), (2, 70, 2, 8))
    torch.testing.assert_close(compiled(function)(q, k), function(q, k))


@pytest.mark.device
@pytest.mark.parametrize("select", ["topk", "vertical_slash"])
def test_graphs_choose_at_each_replay(select, device):
    q, k = draw(device, (2, 256, 2, 64), (2, 256, 2, 64))

    def call():
        if select == "topk":
            return blocksparse_attn_func(q, k, k, selectors.topk_blocks(q, k, 16, 3))
        return blocksparse_attn_func(q, k, k, selectors.vertical_slash_blocks(q, k, 16, 4, 4))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for seed in (1, 2):
        q.copy_(torch.randn(q.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        assert torch.equal(out, call())


WRONG = [
    ("q must be a torch.Tensor, got list", TypeError, {"q": [1]}),
    (r"q must be \[batch, seqlen, heads, head_dim\] .* got \[4, 8\]", ValueError,
     {"q": torch.zeros(4, 8)}),
    ("k must have the batch and head_dim of q, 1 and 8, got 2 and 8", ValueError,
     {"k": torch.zeros(2, 40, 2, 8)}),
    ("heads_q must be a multiple of heads_k, got 4 and 3", ValueError,
     {"k": torch.zeros(1, 40, 3, 8)}),
    ("q must have no more tokens than k, 30, got 40", ValueError, {"k": torch.zeros(1, 30, 2, 8)}),
    ("top_k must be at least 1, got 0", ValueError, {"top_k": 0}),
    ("local_blocks must be at least 1, got 0", ValueError, {"local_blocks": 0}),
    ("block_size must be 16, 32, 64 or 128, got 8", ValueError, {"block_size": 8}),
    ("align must be 'bottom-right' or 'top-left'", ValueError, {"align": "middle"}),
]  # fmt: skip


@pytest.mark.parametrize(("message", "error", "wrong"), WRONG, ids=[row[0][:30] for row in WRONG])
def test_wrong_arguments(message, error, wrong):
    good = {"q": torch.zeros(1, 40, 4, 8), "k": torch.zeros(1, 40, 2, 8), "block_size": 16}
    with pytest.raises(error, match=message):
        selectors.topk_blocks(**{**good, "top_k": 2, **wrong})
