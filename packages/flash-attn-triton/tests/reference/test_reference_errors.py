"""One test per error message of the reference, and what it takes that the kernels do not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from flash_attn_triton import attention_reference, varlen_attention_reference

from ..dense._calls import FP8, lengths, zeros


def reference(**changes: Any) -> Any:
    call = {"q": zeros(2, 5, 4, 8), "k": zeros(2, 7, 2, 8), "v": zeros(2, 7, 2, 6)}
    return attention_reference(**{**call, **changes})


@pytest.mark.parametrize(
    ("message", "error", "changes"),
    [
        (
            "window_size must hold -1 or numbers from 0 up, got (-5, 3)",
            ValueError,
            {"window_size": (-5, 3)},
        ),
        ("softcap must be finite and at least 0.0, got -1", ValueError, {"softcap": -1}),
        ("dropout_p must be in [0, 1), got 1.5", ValueError, {"dropout_p": 1.5}),
        ("softmax_scale must be finite, got nan", ValueError, {"softmax_scale": math.nan}),
        ("causal must be a bool, got str", TypeError, {"causal": "yes"}),
        ("deterministic must be a bool, got int", TypeError, {"deterministic": 1}),
        ("q must be a torch.Tensor, got list", TypeError, {"q": [1.0]}),
        (
            "q must be of a float dtype, got torch.int32",
            TypeError,
            {"q": zeros(2, 5, 4, 8, dtype=torch.int32)},
        ),
        (
            "v must be of a float dtype, got torch.bool",
            TypeError,
            {"v": zeros(2, 7, 2, 6, dtype=torch.bool)},
        ),
        (
            "k must be [batch, seqlen_k, heads_k, head_dim], got [7, 2, 8]",
            ValueError,
            {"k": zeros(7, 2, 8)},
        ),
        ("head_dim of k must be that of q, 8, got 6", ValueError, {"k": zeros(2, 7, 2, 6)}),
        ("batch of k must be that of q, 2, got 1", ValueError, {"k": zeros(1, 7, 2, 8)}),
        (
            "v must have the shape of k but for head_dim, [2, 7, 2], got [2, 7, 1]",
            ValueError,
            {"v": zeros(2, 7, 1, 6)},
        ),
        (
            "heads_q must be a positive multiple of heads_k, got heads_q 4 and heads_k 3",
            ValueError,
            {"k": zeros(2, 7, 3, 8), "v": zeros(2, 7, 3, 6)},
        ),
    ],
    ids=lambda x: None,
)
def test_message_of_the_reference(message, error, changes):
    with pytest.raises(error) as caught:
        reference(**changes)
    assert str(caught.value).startswith(message)


def test_packed_reference_checks_alike():
    q, ends = zeros(5, 4, 8), lengths(0, 5)
    with pytest.raises(ValueError, match=r"^q must be \[tokens_q, heads_q, head_dim\]"):
        varlen_attention_reference(q[None], q, q, ends, ends, 5, 5)
    with pytest.raises(ValueError, match=r"^dropout_p must be in"):
        varlen_attention_reference(q, q, q, ends, ends, 5, 5, -0.5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, FP8], ids=str)
def test_reference_takes_any_float_dtype_and_head_dimension(dtype):
    q = zeros(1, 2, 2, 300, dtype=dtype)
    assert reference(q=q, k=q, v=q).shape == q.shape


def test_reference_says_that_dropout_needs_its_state():
    from flash_attn_triton._reference.fixed import dense_attention

    q = torch.zeros(1, 2, 1, 4)
    with pytest.raises(ValueError, match="dropout needs rng_state"):
        dense_attention(q, q, q, *[None] * 7, 1.0, -1, -1, 0.0, 0.5)
    assert attention_reference(q, q, q, 0.5).shape == q.shape
