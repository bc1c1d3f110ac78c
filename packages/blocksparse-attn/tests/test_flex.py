"""Layouts from and to FlexAttention's block masks."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from blocksparse_attn import (
    BlockSparseLayout,
    TokenRule,
    blocksparse_attention_reference,
    blocksparse_attn_func,
    blocksparse_attn_varlen_func,
    patterns,
)
from blocksparse_attn.integrations import flex_attention as from_module
from blocksparse_attn.integrations.flex_attention import from_block_mask, to_block_mask
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from ._linked.budget import Maker

pytestmark = pytest.mark.eager


def causal(b, h, q, k):
    return q >= k


def window(b, h, q, k):
    return (q >= k) & (q - k < 64)


@pytest.mark.parametrize("heads", [None, 3])
def test_from_a_block_mask(heads, device):
    block_mask = create_block_mask(
        window, None, heads, 256, 256, device=device, BLOCK_SIZE=(32, 64)
    )
    layout = from_block_mask(block_mask, approximate=True)
    layout.validate()
    assert layout.block_size == (32, 64)
    assert layout.num_heads == (heads or 1)
    assert torch.equal(layout.to_dense(), block_mask.to_dense()[0].bool())


def blocks(b, h, q, k):
    return (q // 32 + k // 64 + h) % 2 == 0


def banded_beyond(b, h, q, k):
    return (k - q < 20) & (q - k < 64)


def documents(b, h, q, k):
    """Documents that end within blocks, of which the layout skips every third."""
    of = [(x >= 50).int() + (x >= 99).int() for x in (q, k)]
    return (of[0] == of[1]) & ((q // 32 + k // 64) % 3 > 0)


def prefix(b, h, q, k):
    return (k < 70) | (q >= k)


def causal_blocks(b, h, q, k):
    return (q >= k) & ((q // 32 + k // 64) % 2 == 0)


def above_and_below(b, h, q, k):
    """Cut as a causal mask, but for a block that is whole and lies right of the diagonal."""
    return (q >= k) | (k >= 192)


def with_a_sink(b, h, q, k):
    return (k < 4) | ((q >= k) & (q - k < 20))


def of_each_head(b, h, q, k):
    return (q >= k) & (q - k < 20 + h)


@pytest.mark.parametrize("seqlen", [200])
@pytest.mark.parametrize("rule", [above_and_below, with_a_sink, of_each_head])
def test_masks_that_no_layout_says(rule, seqlen, device):
    block_mask = create_block_mask(
        rule, None, 2, seqlen, seqlen, device=device, BLOCK_SIZE=(32, 64)
    )
    with pytest.raises(ValueError, match=r"block_mask must leave one range .* of head 0"):
        from_block_mask(block_mask)
    layout = from_block_mask(block_mask, approximate=True)
    assert torch.equal(layout.to_dense(), block_mask.to_dense()[0].bool())
    with pytest.raises(TypeError, match="approximate must be a bool, got int"):
        from_block_mask(block_mask, approximate=1)


@pytest.mark.parametrize(("seqlen", "few"), [(256, 2**24), (200, 1)])
@pytest.mark.parametrize(
    "rule", [blocks, causal, causal_blocks, window, banded_beyond, documents, prefix]
)
def test_masks_that_a_layout_says(rule, seqlen, few, device, monkeypatch):
    monkeypatch.setattr(from_module, "AT_ONCE", few)
    block_mask = create_block_mask(
        rule, None, 2, seqlen, seqlen, device=device, BLOCK_SIZE=(32, 64)
    )
    layout = from_block_mask(block_mask)
    m = Maker(device, torch.float64)
    q, k, v = (m.randn(1, seqlen, 2, 16).double() for _ in range(3))
    head, position = torch.arange(2, device=device), torch.arange(seqlen, device=device)
    kept = rule(0, head[:, None, None], position[:, None], position).expand(2, -1, -1)
    want = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), kept
    ).transpose(1, 2)
    is_causal = rule in (causal, causal_blocks)
    assert (layout.token_bounds is None) == (is_causal or rule is blocks)
    # a row that sees no key is NaN there
    shows_later = bool((kept & (position > position[:, None])).any())
    assert layout.causal is (True if is_causal else False if shows_later else None)
    for flag in (False,) if shows_later else (False, True):
        got = blocksparse_attention_reference(q, k, v, layout, causal=flag)
        torch.testing.assert_close(got, want.nan_to_num(), rtol=1e-12, atol=1e-12)
    if shows_later:
        with pytest.raises(ValueError, match="causal must be False for the layout of a block mask"):
            blocksparse_attention_reference(q, k, v, layout)


def causal_in_blocks(b, h, q, k):
    return q // 32 >= k // 32


def of_32(rule, device):
    return create_block_mask(rule, None, None, 128, 128, device=device, BLOCK_SIZE=32)


def test_a_causal_mask_and_one_of_whole_blocks_differ(device):
    """They keep the same blocks; each is right with the call's ``causal=False``."""
    layouts = {rule: from_block_mask(of_32(rule, device)) for rule in (causal, causal_in_blocks)}
    first, second = layouts.values()
    assert torch.equal(first.to_dense(), second.to_dense())
    assert first != second
    m = Maker(device, torch.float32)
    q, k, v = (m.randn(1, 128, 2, 32) for _ in range(3))
    position = torch.arange(128, device=device)
    for rule, layout in layouts.items():
        kept = rule(0, 0, position[:, None], position)
        x = (t.transpose(1, 2) for t in (q, k, v))
        want = torch.nn.functional.scaled_dot_product_attention(*x, kept).transpose(1, 2)
        got = blocksparse_attn_func(q, k, v, layout, causal=False)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    starts = torch.tensor([0, 128], dtype=torch.int32, device=device)
    packed = q[0], k[0], v[0], starts, starts, 128, 128
    calls = (
        lambda layout: blocksparse_attn_func(q, k, v, layout),
        lambda layout: blocksparse_attn_func(q, k, v, layout, causal=np.True_),
        lambda layout: blocksparse_attn_varlen_func(*packed, layout),
        lambda layout: layout.prepare(2, 2, 32, torch.float32),
        lambda layout: to_block_mask(layout, 128),
    )
    for call in calls:
        call(first)
        with pytest.raises(ValueError, match="causal must be False for the layout of a block mask"):
            call(second)
    want = blocksparse_attn_func(q, k, v, first, causal=False)
    assert torch.equal(blocksparse_attn_func(q, k, v, first, causal=np.False_), want)


def test_what_a_mask_says_of_later_keys_stays_with_the_layout(device, tmp_path):
    made = [from_block_mask(of_32(rule, device)) for rule in (causal, causal_in_blocks)]
    for layout in made:
        layout.save(tmp_path / "layout.pt")
        copies = pickle.loads(pickle.dumps(layout)), BlockSparseLayout.load(tmp_path / "layout.pt")
        assert {one.causal for one in copies} == {layout.causal}
        assert layout.to("meta").causal is layout.causal
        assert BlockSparseLayout.batched([layout, layout]).causal is layout.causal
        assert layout.with_token_rule(None).causal is None
        # what is made of blocks alone leaves it to the call
        assert BlockSparseLayout.from_dense(layout.to_dense(), 32) == layout
    with pytest.raises(ValueError, match=r"causal of layouts\[1\] must be that of the first, True"):
        BlockSparseLayout.batched(made)
    assert from_block_mask(of_32(causal_in_blocks, device), approximate=True).causal is None


def test_a_mask_that_looks_tokens_up(device):
    """Blocks at the end hold places that there are no tokens for."""
    of = torch.arange(200, device=device) // 64

    def documents(b, h, q, k):
        return of[q] == of[k]

    block_mask = create_block_mask(
        documents, None, None, 200, 200, device=device, BLOCK_SIZE=(32, 64)
    )
    assert from_block_mask(block_mask).to_dense().sum() == 7


def attend_flex(q, k, v, block_mask):
    x = (t.transpose(1, 2) for t in (q, k, v))
    return flex_attention(*x, block_mask=block_mask).transpose(1, 2)


@pytest.mark.filterwarnings("ignore:.*without torch.compile")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("seqlen", "rule"), [(256, None), (200, None), (200, TokenRule.window(99, 9))]
)
def test_to_a_block_mask_is_the_same_attention(seqlen, rule, is_causal, device):
    layout = BlockSparseLayout.local_strided(2, 256, (32, 64), 1, 3, device=device)
    layout = layout.with_token_rule(rule)
    block_mask = to_block_mask(layout, seqlen, causal=is_causal)
    m = Maker(device, torch.float64)
    q, k, v = (m.randn(1, seqlen, 2, 16).double() for _ in range(3))
    # flex in eager mode looks at the mask function alone, so the blocks are asked for as well
    dense = block_mask.to_dense()[0].bool()
    position = torch.arange(seqlen, device=device)
    kept = dense[:, position // 32][:, :, position // 64]
    if is_causal or rule is not None:
        kept &= block_mask.mask_mod(0, 0, position[:, None], position)
    want = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), kept
    ).transpose(1, 2)
    got = blocksparse_attention_reference(q, k, v, layout, causal=is_causal)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
def test_there_and_back(is_causal, device):
    layout = patterns.sliding_window(256, 2, 1, 32, device=device)
    back = from_block_mask(to_block_mask(layout, 256, causal=is_causal))
    assert back == layout


def test_whole_blocks_are_told_from_cut_ones(device):
    layout = patterns.sliding_window(128, 4, block_size=32, device=device)
    block_mask = to_block_mask(layout, 128)
    assert block_mask.kv_num_blocks.tolist() == [[[1, 1, 1, 1]]]
    assert block_mask.full_kv_num_blocks.tolist() == [[[0, 1, 2, 3]]]
    assert block_mask.BLOCK_SIZE == (32, 32)


@pytest.mark.device
def test_compiled_flex_agrees(device):
    layout = BlockSparseLayout.local_strided(4, 1024, 128, 2, 3, device=device)
    m = Maker(device, torch.bfloat16)
    q, k, v = (m.randn(1, 1024, 4, 64) for _ in range(3))
    want = torch.compile(attend_flex)(q, k, v, to_block_mask(layout, 1024))
    got = blocksparse_attn_func(q, k, v, layout)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_wrong_masks(device):
    with pytest.raises(TypeError, match="block_mask must be a BlockMask, got int"):
        from_block_mask(1)
    two = create_block_mask(causal, 2, None, 128, 128, device=device)
    with pytest.raises(ValueError, match="block_mask must have one batch entry"):
        from_block_mask(two)
    wide = create_block_mask(causal, None, None, 512, 512, device=device, BLOCK_SIZE=256)
    with pytest.raises(ValueError, match="block_size must be 16, 32, 64 or 128"):
        from_block_mask(wide)
    layout = patterns.sliding_window(64, 1, block_size=32, device=device)
    with pytest.raises(ValueError, match="layout must cover seqlen, 65, with its rows, got 2"):
        to_block_mask(layout, 65)
