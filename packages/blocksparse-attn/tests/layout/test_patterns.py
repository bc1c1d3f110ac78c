"""The common patterns against a loop over blocks, and attention over them against a dense mask."""

from __future__ import annotations

import math

import pytest
import torch
from blocksparse_attn import BlockSparseLayout, blocksparse_attention_reference, patterns
from torch.nn.functional import scaled_dot_product_attention

from .._linked.budget import Maker

pytestmark = pytest.mark.eager

# name: how to make it, whether (row, col) is kept, and whether it goes with a causal mask
CASES = {
    "sliding_window": (
        lambda device: patterns.sliding_window(200, 2, 1, 32, device=device),
        lambda r, c: c <= r and (r - c < 2 or c < 1),
        True,
    ),
    "dilated": (
        lambda device: patterns.dilated(200, 2, 3, 32, device=device),
        lambda r, c: r - c in (0, 3),
        True,
    ),
    "block_causal": (
        lambda device: patterns.block_causal(200, 2, 32, device=device),
        lambda r, c: c // 2 <= r // 2,
        False,
    ),
    "vertical_slash": (
        lambda device: patterns.vertical_slash(200, [[2]], [[0, 4]], 32, device=device),
        lambda r, c: c <= r and (c == 2 or r - c in (0, 4)),
        True,
    ),
    "local_strided": (
        lambda device: BlockSparseLayout.local_strided(1, 200, 32, 2, 3, True, device=device),
        lambda r, c: c <= r and (r - c < 2 or (c + 1) % 3 == 0),
        True,
    ),
}


def dense_of(layout, seqlen, causal):
    """The mask of tokens."""
    side = layout.block_size[0]
    position = torch.arange(seqlen, device=layout.device)
    mask = layout.to_dense()[:, position // side][:, :, position // side]
    return mask & (position <= position[:, None]) if causal else mask


@pytest.mark.parametrize("name", CASES)
def test_blocks_are_the_rule(name, device):
    make, rule, _ = CASES[name]
    layout = make(device)
    layout.validate()
    want = [[rule(r, c) for c in range(7)] for r in range(7)]
    assert layout.to_dense()[0].tolist() == want
    assert layout.block_size == (32, 32)
    assert layout.device.type == device.type


@pytest.mark.parametrize("name", CASES)
def test_attention_is_that_over_a_dense_mask(name, device):
    make, _, causal = CASES[name]
    layout = make(device)
    m = Maker(device, torch.float64)
    q, k, v = (m.randn(1, 200, 2, 8).double() for _ in range(3))
    got = blocksparse_attention_reference(q, k, v, layout, causal=causal)
    mask = dense_of(layout, 200, causal)
    want = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), mask)
    torch.testing.assert_close(got, want.transpose(1, 2), rtol=1e-12, atol=1e-12)


def test_bigbird(device):
    layout = patterns.bigbird(3, 320, 2, 1, 2, 32, seed=5, device=device)
    layout.validate()
    dense = layout.to_dense()
    row, col = torch.arange(10, device=device)[:, None], torch.arange(10, device=device)
    always = ((row - col).abs() < 2) | (row < 1) | (col < 1)
    assert bool((dense | ~always).all())
    extra = (dense & ~always).sum(-1)
    assert int(extra.max()) <= 2
    assert int(extra.sum()) > 0
    assert not torch.equal(dense[0], dense[1])
    assert layout == patterns.bigbird(3, 320, 2, 1, 2, 32, seed=5, device=device)
    assert layout != patterns.bigbird(3, 320, 2, 1, 2, 32, seed=6, device=device)
    assert patterns.bigbird(1, 0, 1, 0, 1, device=device).num_rows == 0


def test_vertical_slash_is_per_head(device):
    layout = patterns.vertical_slash(96, [[0], [], [9]], [[], [0], [1]], 32, device=device)
    want = [
        [[1, 0, 0], [1, 0, 0], [1, 0, 0]],
        [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
        [[0, 0, 0], [1, 0, 0], [0, 1, 0]],
    ]
    assert layout.to_dense().int().tolist() == want


WRONG = [
    ("window_blocks must be at least 1, got 0", lambda: patterns.sliding_window(64, 0)),
    ("sink_blocks must be at least 0, got -1", lambda: patterns.sliding_window(64, 1, -1)),
    ("dilation must be at least 1, got 0", lambda: patterns.dilated(64, 1, 0)),
    ("chunk_blocks must be at least 1, got 0", lambda: patterns.block_causal(64, 0)),
    ("random_blocks must be at least 0, got -1", lambda: patterns.bigbird(1, 64, 1, 0, -1)),
    ("block_size must be 16, 32, 64 or 128, got 8", lambda: patterns.dilated(64, 1, 1, 8)),
    (
        "vertical and slash must have one entry per head, got 1 and 2",
        lambda: patterns.vertical_slash(64, [[0]], [[0], [1]]),
    ),
]


@pytest.mark.parametrize(("message", "call"), WRONG, ids=[m for m, _ in WRONG])
def test_wrong_patterns(message, call):
    with pytest.raises(ValueError, match="must") as caught:
        call()
    assert str(caught.value) == message


def test_a_row_of_no_column_gives_nothing(device):
    layout = patterns.vertical_slash(64, [[]], [[1]], 32, device=device)
    q = torch.ones(1, 64, 1, 8, device=device)
    out, lse = blocksparse_attention_reference(q, q, q, layout, return_lse=True)
    assert not out[:, :32].any()
    assert (lse[..., :32] == -math.inf).all()
    assert out[:, 32:].all()
