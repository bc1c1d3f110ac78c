"""A message for every wrong call: the argument, what was expected, what came."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from blocksparse_attn import (
    BlockSparseLayout,
    blocksparse_attn_func,
    blocksparse_attn_varlen_func,
    validate_varlen,
)

pytestmark = pytest.mark.eager

META = "meta"


def zeros(*size: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(*size, dtype=dtype, device=device)


def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def layout_of(heads: int = 1, tokens: int = 16) -> BlockSparseLayout:
    return BlockSparseLayout.local_strided(max(heads, 1), tokens, 16, homo_head=heads == 0)


def fixed(**changes: Any) -> Any:
    layout = BlockSparseLayout.from_dense(torch.ones(1, 1, dtype=torch.bool), 16)
    given = {"q": zeros(2, 5, 4, 8), "k": zeros(2, 7, 2, 8), "v": zeros(2, 7, 2, 6)}
    return blocksparse_attn_func(**{**given, "layout": layout, **changes})


def packed(**changes: Any) -> Any:
    layout = BlockSparseLayout.from_dense(torch.ones(1, 1, dtype=torch.bool), 16)
    given: dict[str, Any] = {"q": zeros(10, 4, 8), "k": zeros(14, 2, 8), "v": zeros(14, 2, 6)}
    given |= {"cu_seqlens_q": ints(0, 5, 10), "cu_seqlens_k": ints(0, 7, 14)}
    given |= {"max_seqlen_q": 5, "max_seqlen_k": 7, "layout": layout}
    return blocksparse_attn_varlen_func(**{**given, **changes})


def paged(**changes: Any) -> Any:
    given = {"k": zeros(4, 4, 2, 8), "v": zeros(4, 4, 2, 6)}
    given["block_table"] = torch.zeros(2, 2, dtype=torch.int32)
    return packed(**{**given, **changes})


ERRORS = [
    ("q must be a torch.Tensor, got list", TypeError, fixed, {"q": [1]}),
    ("k must be a torch.Tensor, got NoneType", TypeError, fixed, {"k": None}),
    ("v must be a torch.Tensor, got float", TypeError, packed, {"v": 1.0}),
    (
        "q must be torch.float16, torch.bfloat16 or torch.float32, got torch.float64; "
        "the reference takes torch.float64",
        TypeError, fixed, {"q": zeros(2, 5, 4, 8).double()},
    ),
    ("k must have the dtype of q, torch.float32, got torch.float16", TypeError, fixed,
     {"k": zeros(2, 7, 2, 8).half()}),
    ("v must have the dtype of q, torch.float32, got torch.bfloat16", TypeError, packed,
     {"v": zeros(14, 2, 6).bfloat16()}),
    ("k must be on the device of q, cpu, got meta", ValueError, fixed,
     {"k": zeros(2, 7, 2, 8, device=META)}),
    (
        "q must be [batch, seqlen_q, heads_q, head_dim], got [5, 4, 8]; packed sequences go to "
        "blocksparse_attn_varlen_func, one sequence is q[None]", ValueError, fixed,
     {"q": zeros(5, 4, 8)}),
    ("k must be [batch, seqlen_k, heads_k, head_dim], got [7, 2, 8]", ValueError, fixed,
     {"k": zeros(7, 2, 8)}),
    (
        "q must be [tokens_q, heads_q, head_dim], got [2, 5, 4, 8]; sequences of one length go to "
        "blocksparse_attn_func", ValueError, packed,
     {"q": zeros(2, 5, 4, 8)}),
    ("v must be [tokens_k, heads_k, head_dim], got [2, 7, 2, 6]", ValueError, packed,
     {"v": zeros(2, 7, 2, 6)}),
    ("k must be [pages, page_size, heads_k, head_dim], got [14, 2, 8]", ValueError, paged,
     {"k": zeros(14, 2, 8)}),
    ("head_dim of q must be from 1 to 256, got 257", ValueError, fixed,
     {"q": zeros(2, 5, 4, 257), "k": zeros(2, 7, 2, 257)}),
    ("head_dim of v must be from 1 to 256, got 0", ValueError, fixed, {"v": zeros(2, 7, 2, 0)}),
    ("head_dim of k must be that of q, 8, got 6", ValueError, fixed, {"k": zeros(2, 7, 2, 6)}),
    ("v must have the shape of k but for head_dim, [2, 7, 2], got [2, 9, 2]", ValueError, fixed,
     {"v": zeros(2, 9, 2, 6)}),
    ("batch of k must be that of q, 2, got 3", ValueError, fixed,
     {"k": zeros(3, 7, 2, 8), "v": zeros(3, 7, 2, 6)}),
    ("heads_q must be a positive multiple of heads_k, got heads_q 4 and heads_k 3", ValueError,
     fixed, {"k": zeros(2, 7, 3, 8), "v": zeros(2, 7, 3, 6)}),
    ("heads_q must be a positive multiple of heads_k, got heads_q 4 and heads_k 0", ValueError,
     fixed, {"k": zeros(2, 7, 0, 8), "v": zeros(2, 7, 0, 6)}),
    ("causal must be a bool, got int", TypeError, fixed, {"causal": 1}),
    ("return_lse must be a bool, got NoneType", TypeError, packed, {"return_lse": None}),
    ("deterministic must be a bool, got int", TypeError, packed, {"deterministic": 1}),
    ("num_splits must be an int, got bool", TypeError, fixed, {"num_splits": True}),
    ("num_splits must be from 0 to 128, got -1", ValueError, fixed, {"num_splits": -1}),
    ("num_splits must be from 0 to 128, got 129", ValueError, packed, {"num_splits": 129}),
    ("softmax_scale must be a float, got str", TypeError, fixed, {"softmax_scale": "1"}),
    ("softmax_scale must be finite, got nan", ValueError, fixed,
     {"softmax_scale": float("nan")}),
    ("softmax_scale must be from -2.36e+38 to 2.36e+38, for fp32, got 1e+39", ValueError, fixed,
     {"softmax_scale": 1e39}),
    ("layout must be a BlockSparseLayout, got NoneType", TypeError, fixed, {"layout": None}),
    ("layout must be on the device of q, cpu, got meta; layout.to(device) moves it", ValueError,
     fixed, {"layout": layout_of().to(META)}),
    ("heads of layout must be 1 or those of q, 4, or of k, 2, got 3", ValueError, fixed,
     {"layout": layout_of(3)}),
    ("layout must cover the keys, 7, with its rows, got 0 rows of 16: 1 are needed", ValueError,
     fixed, {"layout": layout_of(4, 0)}),
    ("layout must cover the keys, 17, with its rows, got 1 rows of 16: 2 are needed", ValueError,
     packed, {"max_seqlen_k": 17}),
    ("cu_seqlens_q must be a torch.Tensor, got list", TypeError, packed, {"cu_seqlens_q": [0]}),
    ("cu_seqlens_k must be torch.int32, got torch.int16", TypeError, packed,
     {"cu_seqlens_k": ints(0, 7, 14, dtype=torch.int16)}),
    ("cu_seqlens_q must be on the device of q, cpu, got meta", ValueError, packed,
     {"cu_seqlens_q": ints(0, 5, 10).to(META)}),
    ("cu_seqlens_q must be [batch + 1], got [0]", ValueError, packed, {"cu_seqlens_q": ints()}),
    ("cu_seqlens_k must have one dimension, got [1, 3]", ValueError, packed,
     {"cu_seqlens_k": ints(0, 7, 14)[None]}),
    ("cu_seqlens_k must be as long as cu_seqlens_q, [3], got [2]", ValueError, packed,
     {"cu_seqlens_k": ints(0, 14)}),
    ("cu_seqlens_q must be contiguous, got stride 2", ValueError, packed,
     {"cu_seqlens_q": ints(0, 0, 5, 0, 10)[::2]}),
    ("max_seqlen_q must be an int, got float", TypeError, packed, {"max_seqlen_q": 5.0}),
    ("max_seqlen_k must be at least 0, got -1", ValueError, packed,
     {"max_seqlen_k": -1}),
    ("block_table must be a torch.Tensor, got list", TypeError, paged, {"block_table": [[0]]}),
    ("block_table must be torch.int32 or torch.int64, got torch.float32", TypeError, paged,
     {"block_table": zeros(2, 2)}),
    ("block_table must be on the device of q, cpu, got meta", ValueError, paged,
     {"block_table": zeros(2, 2, dtype=torch.int32, device=META)}),
    ("block_table must be [batch, max_pages] with batch 2, got [3, 2]", ValueError, paged,
     {"block_table": zeros(3, 2, dtype=torch.int32)}),
    ("block_table must hold max_seqlen_k, 7, in pages of 4, got 1 pages", ValueError, paged,
     {"block_table": zeros(2, 1, dtype=torch.int32)}),
    ("page_size of k must be at least 1, got 0", ValueError, paged,
     {"k": zeros(4, 0, 2, 8), "v": zeros(4, 0, 2, 6)}),
    (
        "block_table has no gradient: q, k and v must not require one with paged keys and values, "
        "got requires_grad=True; train on packed k and v, without block_table",
        NotImplementedError, paged, {"q": zeros(10, 4, 8).requires_grad_()},
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("message", "error", "call", "changes"),
    ERRORS,
    ids=[f"{e[2].__name__}: {e[0]}" for e in ERRORS],
)
def test_message(message, error, call, changes, monkeypatch):
    from blocksparse_attn._attention import ops

    def reached(*_arguments):
        raise AssertionError("a wrong call reached the operator")

    monkeypatch.setattr(ops, "attention", reached)
    with pytest.raises(error) as caught:
        call(**changes)
    assert str(caught.value) == message


@pytest.mark.parametrize("call", [fixed, packed, paged])
def test_the_calls_are_right_without_changes(call):
    assert call().shape[-1] == 6


def test_other_devices():
    q = torch.zeros(2, 5, 4, 8, device="meta")
    layout = layout_of(4).to("meta")
    out = blocksparse_attn_func(q, q[:, :, :2], q[:, :, :2], layout)
    assert out.device.type == "meta"


VALUES = [
    ("cu_seqlens_q[0] must be from 0 to the number of tokens, 10, got -1", (-1, 5, 10), (0, 7, 14)),
    ("cu_seqlens_q[2] must be at least cu_seqlens_q[1], 5, got 4", (0, 5, 4), (0, 7, 14)),
    ("cu_seqlens_k[2] must be from 0 to the number of tokens, 14, got 15", (0, 5, 10), (0, 7, 15)),
    (
        "cu_seqlens_q[1] must be at most max_seqlen_q, 5, beyond cu_seqlens_q[0], 0, got 6",
        (0, 6, 10),
        (0, 7, 14),
    ),
]


@pytest.mark.parametrize(("message", "starts_q", "starts_k"), VALUES, ids=[v[0] for v in VALUES])
def test_values_that_only_the_device_knows(message, starts_q, starts_k):
    with pytest.raises(ValueError, match="must") as caught:
        validate_varlen(zeros(10, 4, 8), zeros(14, 2, 8), ints(*starts_q), ints(*starts_k), 5, 7)
    assert str(caught.value) == message


def test_values_of_a_block_table():
    arguments = zeros(10, 4, 8), zeros(4, 4, 2, 8), ints(0, 5, 10), ints(0, 7, 14), 5, 7
    # what lies past a sequence's keys is not looked at
    validate_varlen(*arguments, torch.tensor([[0, 3, 99], [2, 1, -1]]))
    with pytest.raises(ValueError, match=r"block_table\[1, 1\] must be from 0 to 3, a page, got 4"):
        validate_varlen(*arguments, torch.tensor([[0, 3], [2, 4]]))
    with pytest.raises(ValueError, match="block_table must hold max_seqlen_k"):
        validate_varlen(*arguments, torch.tensor([[0], [2]]))
