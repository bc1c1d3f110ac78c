"""One test per error message about q, k, v and the lengths of packed sequences."""

from __future__ import annotations

import pytest
import torch

from .dense._calls import (
    META,
    assert_refused,
    fixed,
    forbid_operator,
    lengths,
    one_test_each,
    packed,
    zeros,
)


@pytest.fixture(autouse=True)
def no_operator(monkeypatch):
    forbid_operator(monkeypatch)


TENSORS = [
    ("q must be a torch.Tensor, got list", TypeError, fixed, {"q": [1.0]}),
    ("k must be a torch.Tensor, got NoneType", TypeError, fixed, {"k": None}),
    ("v must be a torch.Tensor, got int", TypeError, packed, {"v": 3}),
    (
        "q must be torch.float16, torch.bfloat16, torch.float32 or FP8 (e4m3), got torch.float64; "
        "attention_reference takes torch.float64",
        TypeError, fixed, {"q": zeros(2, 5, 4, 8, dtype=torch.float64)},
    ),
    ("q must be torch.float16", TypeError, fixed, {"q": zeros(2, 5, 4, 8, dtype=torch.int32)}),
    (
        "q must be torch.float8_e4m3fn to be FP8 on this platform, got torch.float8_e5m2",
        TypeError, fixed, {"q": zeros(2, 5, 4, 8, dtype=torch.float8_e5m2)},
    ),
    (
        "k must have the dtype of q, torch.float16, got torch.float32",
        TypeError, fixed, {"k": zeros(2, 7, 2, 8, dtype=torch.float32)},
    ),
    (
        "v must have the dtype of q, torch.float16, got torch.bfloat16",
        TypeError, fixed, {"v": zeros(2, 7, 2, 6, dtype=torch.bfloat16)},
    ),
    (
        "k must be on the device of q, cpu, got meta",
        ValueError, fixed, {"k": zeros(2, 7, 2, 8, device=META)},
    ),
    (
        "v must be on the device of q, cpu, got meta",
        ValueError, fixed, {"v": zeros(2, 7, 2, 6, device=META)},
    ),
    (
        "q must be [batch, seqlen_q, heads_q, head_dim], got [5, 4, 8]",
        ValueError, fixed, {"q": zeros(5, 4, 8)},
    ),
    (
        "k must be [batch, seqlen_k, heads_k, head_dim], got [7, 2, 8]",
        ValueError, fixed, {"k": zeros(7, 2, 8)},
    ),
    (
        "v must be [batch, seqlen_k, heads_k, head_dim], got [7, 2, 6]",
        ValueError, fixed, {"v": zeros(7, 2, 6)},
    ),
    (
        "q must be [tokens_q, heads_q, head_dim], got [2, 5, 4, 8]",
        ValueError, packed, {"q": zeros(2, 5, 4, 8)},
    ),
    (
        "q must be [tokens_q, heads_q, head_dim], got []",
        ValueError, packed, {"q": zeros()},
    ),
    (
        "k must be [tokens_k, heads_k, head_dim], got [2, 7, 2, 8]",
        ValueError, packed, {"k": zeros(2, 7, 2, 8)},
    ),
    (
        "v must be [tokens_k, heads_k, head_dim], got [14, 8]",
        ValueError, packed, {"v": zeros(14, 8)},
    ),
    (
        "head_dim of q must be from 1 to 256, got 257",
        ValueError, fixed, {"q": zeros(2, 5, 4, 257), "k": zeros(2, 7, 2, 257)},
    ),
    (
        "head_dim of q must be from 1 to 256, got 0",
        ValueError, fixed, {"q": zeros(2, 5, 4, 0), "k": zeros(2, 7, 2, 0)},
    ),
    (
        "head_dim of k must be that of q, 8, got 6",
        ValueError, fixed, {"k": zeros(2, 7, 2, 6)},
    ),
    (
        "head_dim of v must be from 1 to 256, got 0",
        ValueError, fixed, {"v": zeros(2, 7, 2, 0)},
    ),
    (
        "head_dim of v must be from 1 to 256, got 300",
        ValueError, packed, {"v": zeros(14, 2, 300)},
    ),
    ("batch of k must be that of q, 2, got 3", ValueError, fixed, {"k": zeros(3, 7, 2, 8)}),
    (
        "v must have the shape of k but for head_dim, [2, 7, 2], got [2, 9, 2]",
        ValueError, fixed, {"v": zeros(2, 9, 2, 6)},
    ),
    (
        "heads_q must be a positive multiple of heads_k, got heads_q 4 and heads_k 3",
        ValueError, fixed, {"k": zeros(2, 7, 3, 8), "v": zeros(2, 7, 3, 6)},
    ),
    (
        "heads_q must be a positive multiple of heads_k, got heads_q 4 and heads_k 0",
        ValueError, fixed, {"k": zeros(2, 7, 0, 8), "v": zeros(2, 7, 0, 6)},
    ),
    (
        "heads_q must be a positive multiple of heads_k, got heads_q 0 and heads_k 2",
        ValueError, fixed, {"q": zeros(2, 5, 0, 8)},
    ),
]  # fmt: skip

LENGTHS = [
    (
        "block_table must be None: paged keys and values are served by paged_attn_func of the "
        "package prefix-prefill, got Tensor",
        NotImplementedError, packed, {"block_table": torch.zeros(2, 1, dtype=torch.int32)},
    ),
    (
        "cu_seqlens_q must be a torch.Tensor, got list",
        TypeError, packed, {"cu_seqlens_q": [0, 5, 10]},
    ),
    (
        "cu_seqlens_k must be torch.int32, got torch.int16",
        TypeError, packed, {"cu_seqlens_k": lengths(0, 7, 14, dtype=torch.int16)},
    ),
    (
        "cu_seqlens_q must be on the device of q, cpu, got meta",
        ValueError, packed, {"cu_seqlens_q": lengths(0, 5, 10).to(META)},
    ),
    (
        "cu_seqlens_q must have one dimension, got [1, 3]",
        ValueError, packed, {"cu_seqlens_q": lengths(0, 5, 10)[None]},
    ),
    (
        "cu_seqlens_k must be contiguous, got stride 2",
        ValueError, packed, {"cu_seqlens_k": lengths(0, 0, 7, 0, 14)[::2]},
    ),
    (
        "cu_seqlens_q must be [batch + 1], got [0]",
        ValueError, packed, {"cu_seqlens_q": lengths()},
    ),
    (
        "cu_seqlens_k must be as long as cu_seqlens_q, [3], got [2]",
        ValueError, packed, {"cu_seqlens_k": lengths(0, 14)},
    ),
    ("max_seqlen_q must be an int, got Tensor", TypeError, packed, {"max_seqlen_q": lengths(5)}),
    ("max_seqlen_q must be an int, got bool", TypeError, packed, {"max_seqlen_q": True}),
    ("max_seqlen_k must be an int, got NoneType", TypeError, packed, {"max_seqlen_k": None}),
    ("max_seqlen_k must be at least 0, got -1", ValueError, packed, {"max_seqlen_k": -1}),
    ("seqused_k must be a torch.Tensor, got int", TypeError, packed, {"seqused_k": 7}),
    (
        "seqused_k must be torch.int32, got torch.int16",
        TypeError, packed, {"seqused_k": lengths(7, 7, dtype=torch.int16)},
    ),
    (
        "seqused_k must be on the device of q, cpu, got meta",
        ValueError, packed, {"seqused_k": lengths(7, 7).to(META)},
    ),
    ("seqused_k must be [2], got [3]", ValueError, packed, {"seqused_k": lengths(7, 7, 7)}),
]  # fmt: skip


@one_test_each(TENSORS + LENGTHS)
def test_message(message, error, call, changes):
    assert_refused(message, error, call, changes)


def test_other_kinds_of_device_are_refused(monkeypatch):
    monkeypatch.setattr("flash_attn_triton._linked.host.arguments.DEVICES", ("cuda",))
    with pytest.raises(
        NotImplementedError, match="q must be on a CPU or a CUDA or HIP device, got cpu"
    ):
        fixed()
