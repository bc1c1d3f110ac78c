"""Packing and padding: every token once, in order, with its gradient."""

from __future__ import annotations

import pytest
import torch
from flash_attn_triton import flash_attn_func, flash_attn_varlen_func, pad_input, unpad_input

pytestmark = pytest.mark.eager

MASK = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
X = torch.randn(3, 4, 2, 5, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8])
def test_tokens_are_packed_in_order(dtype):
    packed, indices, offsets, longest, used = unpad_input(X, MASK.to(dtype))
    assert torch.equal(packed, torch.stack([X[0, 1], X[0, 2], *X[2]]))
    assert indices.tolist() == [1, 2, 8, 9, 10, 11]
    assert offsets.tolist() == [0, 2, 2, 6]
    assert offsets.dtype == used.dtype == torch.int32
    assert (longest, used.tolist()) == (4, [2, 0, 4])


def test_unused_tokens_are_packed_but_not_counted():
    unused = torch.tensor([[0, 0, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]])
    _, indices, offsets, longest, used = unpad_input(X, MASK, unused)
    assert indices.tolist() == [1, 2, 3, 4, 8, 9, 10, 11]
    assert (offsets.tolist(), longest, used.tolist()) == ([0, 3, 4, 8], 4, [2, 0, 4])


def test_padding_is_the_inverse():
    packed, indices, *_ = unpad_input(X, MASK)
    assert torch.equal(pad_input(packed, indices, 3, 4), X * MASK[:, :, None, None])


def test_gradients_pass():
    x = X.clone().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    packed, indices, *_ = unpad_input(x, MASK)
    pad_input(packed * 3, indices, 3, 4).square().sum().backward()
    torch.testing.assert_close(x.grad, 18 * X * MASK[:, :, None, None])


def test_attention_of_packed_tokens_is_that_of_each_sequence():
    (q, indices, offsets, longest, _), k = unpad_input(X, MASK), unpad_input(X, MASK)[0]
    out = flash_attn_varlen_func(q, k, k, offsets, offsets, longest, longest, causal=True)
    padded = pad_input(out, indices, 3, 4)
    alone = flash_attn_func(X[:1, 1:3], X[:1, 1:3], X[:1, 1:3], causal=True)
    torch.testing.assert_close(padded[0, 1:3], alone[0])
    assert not padded[1].any()


@pytest.mark.parametrize("shape", [(0, 4, 2), (3, 0, 2)])
def test_empty_batches(shape):
    x = torch.zeros(shape)
    packed, indices, offsets, longest, _ = unpad_input(x, torch.ones(shape[:2], dtype=torch.bool))
    assert packed.shape == (0, 2)
    assert offsets.tolist() == [0] * (shape[0] + 1)
    assert longest == 0
    assert pad_input(packed, indices, *shape[:2]).shape == shape


INDICES = torch.arange(3)
ERRORS = [
    (
        unpad_input,
        (X[0, 0, 0], MASK),
        ValueError,
        r"hidden_states must be \[batch, seqlen, \.\.\.\]",
    ),
    (unpad_input, (X, MASK.float()), TypeError, "attention_mask must be bool or integers, got"),
    (unpad_input, (X, MASK[:2]), ValueError, r"attention_mask must be \[batch, seqlen\], \[3, 4\]"),
    (unpad_input, (X, MASK, [1]), TypeError, "unused_mask must be a torch.Tensor, got list"),
    (
        unpad_input,
        (X, MASK.to("meta")),
        ValueError,
        "attention_mask must be on the device of hidden",
    ),
    (
        pad_input,
        (X, INDICES.float(), 3, 4),
        TypeError,
        "indices must be torch.int32 or torch.int64",
    ),
    (pad_input, (X, INDICES[:2], 3, 4), ValueError, r"indices must have an entry for each token"),
    (pad_input, (X, INDICES + 10, 3, 4), ValueError, r"indices\[2\] must be from 0 to 11, got 12"),
    (pad_input, (X, INDICES, 3.0, 4), TypeError, "batch must be an int, got float"),
    (pad_input, (X, INDICES, 3, -1), ValueError, "seqlen must be at least 0, got -1"),
]


@pytest.mark.parametrize(("function", "given", "error", "words"), ERRORS)
def test_messages(function, given, error, words):
    with pytest.raises(error, match=f"^{words}"):
        function(*given)
