"""One test per error message: its type, and the argument, expectation and finding it names."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from prefix_prefill import (
    chunked_prefill_paged_decode,
    context_attention_fwd,
    merge_attn_states,
    paged_attention_reference,
    paged_attn_func,
    reshape_and_cache,
    shared_prefix_attn_func,
)
from prefix_prefill._paged import ops
from torch import Tensor

FP8 = torch.float8_e4m3fn
META = torch.device("meta")


@pytest.fixture(autouse=True)
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong call never reaches an operator."""

    def operator(*_: Any) -> None:
        raise AssertionError("the operator was called")

    for name in ("attention", "reshape_and_cache", "merge_states"):
        monkeypatch.setattr(ops, name, operator)


def zeros(*shape: int, dtype: torch.dtype = torch.float16, **options: Any) -> Tensor:
    return torch.zeros(shape, dtype=torch.float32, **options).to(dtype)


def ints(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def arguments() -> dict[str, Any]:
    return {
        "q": zeros(7, 4, 16),
        "k_cache": zeros(5, 8, 2, 16),
        "v_cache": zeros(5, 8, 2, 16),
        "block_table": torch.zeros(2, 3, dtype=torch.int32),
        "cu_seqlens_q": ints(0, 5, 7),
        "seqlens_k": ints(9, 8),
        "max_seqlen_q": 5,
        "max_seqlen_k": 9,
    }


def paged(**changes: Any) -> Any:
    return paged_attn_func(**{**arguments(), **changes})


def reference(**changes: Any) -> Any:
    return paged_attention_reference(**{**arguments(), **changes})


def packed(**changes: Any) -> Any:
    caches = {"k_cache": zeros(5, 2, 2, 8, 8), "v_cache": zeros(5, 2, 16, 8)}
    return paged(**{**caches, **changes})


def cascade(**changes: Any) -> Any:
    shared = {"shared_pages": ints(0, 1), "shared_len": 16}
    return shared_prefix_attn_func(**{**arguments(), **shared, **changes})


def cache(**changes: Any) -> Any:
    call = {
        "k": zeros(7, 2, 16),
        "v": zeros(7, 2, 16),
        "k_cache": zeros(5, 8, 2, 16),
        "v_cache": zeros(5, 8, 2, 16),
        "slot_mapping": ints(*range(7)),
    }
    return reshape_and_cache(**{**call, **changes})


def merge(**changes: Any) -> Any:
    call = {name: zeros(5, 2, 16) for name in ("out_a", "out_b")}
    call |= {name: zeros(2, 5, dtype=torch.float32) for name in ("lse_a", "lse_b")}
    return merge_attn_states(**{**call, **changes})


def context(**changes: Any) -> Any:
    one = torch.ones(1)
    call = {
        "q": zeros(7, 4, 16),
        "k": zeros(7, 2, 16),
        "v": zeros(7, 2, 16),
        "o": zeros(7, 4, 16),
        "kv_cache_dtype": "auto",
        "k_cache": zeros(5, 2, 2, 8, 8),
        "v_cache": zeros(5, 2, 16, 8),
        "b_loc": torch.zeros(2, 3, dtype=torch.int32),
        "b_start_loc": ints(0, 5, 7),
        "b_seq_len": ints(9, 8),
        "max_seq_len": 9,
        "max_input_len": 5,
        "k_scale": one,
        "v_scale": one,
    }
    return context_attention_fwd(**{**call, **changes})


def chunked(**changes: Any) -> Any:
    one = torch.ones(1)
    call = {
        "query": zeros(7, 4, 16),
        "key": zeros(7, 2, 16),
        "value": zeros(7, 2, 16),
        "output": zeros(7, 4, 16),
        "kv_cache_dtype": "auto",
        "key_cache": zeros(5, 2, 2, 8, 8),
        "value_cache": zeros(5, 2, 16, 8),
        "block_table": torch.zeros(2, 3, dtype=torch.int32),
        "query_start_loc": ints(0, 5, 7),
        "seq_lens": ints(9, 8),
        "max_seq_len": 9,
        "max_query_len": 5,
        "k_scale": one,
        "v_scale": one,
    }
    return chunked_prefill_paged_decode(**{**call, **changes})


def bytes_of(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


F32 = torch.float32
CASES = [
    ("q must be a torch.Tensor, got list", TypeError, paged, {"q": [1.0]}),
    ("k_cache must be a torch.Tensor, got NoneType", TypeError, paged, {"k_cache": None}),
    ("v_cache must be a torch.Tensor, got int", TypeError, paged, {"v_cache": 3}),
    ("block_table must be a torch.Tensor, got list", TypeError, paged, {"block_table": [[1]]}),
    ("seqlens_k must be a torch.Tensor, got int", TypeError, paged, {"seqlens_k": 3}),
    ("k must be a torch.Tensor, got int", TypeError, paged, {"k": 3, "v": 3}),
    (
        "q must be torch.float16, torch.bfloat16, torch.float32 or FP8 (e4m3), got torch.float64; "
        "paged_attention_reference takes torch.float64",
        TypeError, paged, {"q": zeros(7, 4, 16, dtype=torch.float64)},
    ),
    (
        "q must be torch.float8_e4m3fn to be FP8 on this platform, got torch.float8_e5m2",
        TypeError, paged, {"q": zeros(7, 4, 16, dtype=torch.float8_e5m2)},
    ),
    (
        "k_cache must have the dtype of q, torch.float16, or be FP8 or torch.uint8, got "
        "torch.float32",
        TypeError, paged, {n: zeros(5, 8, 2, 16, dtype=F32) for n in ("k_cache", "v_cache")},
    ),
    (
        "k_cache must be torch.float8_e4m3fn or torch.float8_e5m2 to be FP8 on this platform, got "
        "torch.float8_e4m3fnuz",
        TypeError, paged,
        {n: zeros(5, 8, 2, 16, dtype=torch.float8_e4m3fnuz) for n in ("k_cache", "v_cache")},
    ),
    (
        "v_cache must have the dtype of k_cache, torch.float16, got torch.float32",
        TypeError, paged, {"v_cache": zeros(5, 8, 2, 16, dtype=F32)},
    ),
    (
        "k must have the dtype of q, torch.float16, or be torch.float16, torch.bfloat16 or "
        "torch.float32 where q is FP8, got torch.float32",
        TypeError, paged, {n: zeros(7, 2, 16, dtype=F32) for n in "kv"},
    ),
    (
        "v must have the dtype of k, torch.float16, got torch.bfloat16",
        TypeError, paged,
        {
            "q": zeros(7, 4, 16, dtype=FP8), "k": zeros(7, 2, 16),
            "v": zeros(7, 2, 16, dtype=torch.bfloat16),
        },
    ),
    ("k_cache must be on the device of q, cpu, got meta", ValueError, paged,
     {n: zeros(5, 8, 2, 16, device=META) for n in ("k_cache", "v_cache")}),
    ("v_cache must be on the device of k_cache, cpu, got meta", ValueError, paged,
     {"v_cache": zeros(5, 8, 2, 16, device=META)}),
    ("k must be on the device of q, cpu, got meta", ValueError, paged,
     {n: zeros(7, 2, 16, device=META) for n in "kv"}),
    ("q must be [tokens, heads_q, head_dim], got [7, 64]", ValueError, paged, {"q": zeros(7, 64)}),
    ("head_dim of q must be a multiple of 8 from 8 to 512, got 20", ValueError, paged,
     {"q": zeros(7, 4, 20)}),
    ("head_dim of q must be a multiple of 8 from 8 to 512, got 520", ValueError, paged,
     {"q": zeros(7, 4, 520)}),
    (
        "k_cache must be [num_blocks, block_size, heads_k, head_dim] or [num_blocks, heads_k, "
        "head_dim // x, block_size, x], got [5, 8, 16]",
        ValueError, paged, {"k_cache": zeros(5, 8, 16)},
    ),
    (
        "v_cache must be [num_blocks, block_size, heads_k, head_dim_v], [5, 8, 2, head_dim_v], got "
        "[4, 8, 2, 16]",
        ValueError, paged, {"v_cache": zeros(4, 8, 2, 16)},
    ),
    (
        "v_cache must be [num_blocks, heads_k, head_dim_v, block_size], [5, 2, head_dim_v, 8], got "
        "[5, 8, 2, 16]",
        ValueError, packed, {"v_cache": zeros(5, 8, 2, 16)},
    ),
    (
        "k_cache must have a block_size and heads_k of at least 1, got [5, 0, 2, 16]",
        ValueError, paged, {n: zeros(5, 0, 2, 16) for n in ("k_cache", "v_cache")},
    ),
    ("head_dim of k_cache must be that of q, 16, got 24", ValueError, paged,
     {n: zeros(5, 8, 2, 24) for n in ("k_cache", "v_cache")}),
    ("heads_q must be a positive multiple of heads_k, got heads_q 4 and heads_k 3", ValueError,
     paged, {n: zeros(5, 8, 3, 16) for n in ("k_cache", "v_cache")}),
    ("heads_q must be a positive multiple of heads_k, got heads_q 0 and heads_k 2", ValueError,
     paged, {"q": zeros(7, 0, 16)}),
    ("k and v must be given together or not at all, got k Tensor and v NoneType", ValueError,
     paged, {"k": zeros(7, 2, 16)}),
    ("k must be [tokens, heads_k, head_dim], [7, 2, 16], got [6, 2, 16]", ValueError, paged,
     {n: zeros(6, 2, 16) for n in "kv"}),
    ("cu_seqlens_q must be torch.int32, got torch.int16", TypeError, paged,
     {"cu_seqlens_q": ints(0, 5, 7, dtype=torch.int16)}),
    ("cu_seqlens_q must be on the device of q, cpu, got meta", ValueError, paged,
     {"cu_seqlens_q": ints(0, 5, 7).to(META)}),
    ("cu_seqlens_q must have one dimension, got [1, 3]", ValueError, paged,
     {"cu_seqlens_q": ints(0, 5, 7)[None]}),
    ("cu_seqlens_q must be [batch + 1], got [0]", ValueError, paged, {"cu_seqlens_q": ints()}),
    ("seqlens_k must be [2], got [3]", ValueError, paged, {"seqlens_k": ints(1, 2, 3)}),
    ("block_table must be torch.int32 or torch.int64, got torch.int16", TypeError, paged,
     {"block_table": torch.zeros(2, 3, dtype=torch.int16)}),
    ("block_table must have 2 dimensions, got [6]", ValueError, paged,
     {"block_table": torch.zeros(6, dtype=torch.int32)}),
    ("block_table must be [2, max_blocks], got [3, 3]", ValueError, paged,
     {"block_table": torch.zeros(3, 3, dtype=torch.int32)}),
    ("max_seqlen_q must be an int, got float", TypeError, paged, {"max_seqlen_q": 5.0}),
    ("max_seqlen_k must be at least 0, got -1", ValueError, paged, {"max_seqlen_k": -1}),
    ("max_seqlen_k must fit into 64 bits, got", ValueError, paged, {"max_seqlen_k": 2**63}),
    ("softmax_scale must be a float, got str", TypeError, paged, {"softmax_scale": "1"}),
    ("softmax_scale must be finite, got nan", ValueError, paged, {"softmax_scale": math.nan}),
    ("softmax_scale must be from -2.36e+38 to 2.36e+38, for fp32, got 1e+39", ValueError, paged,
     {"softmax_scale": 1e39}),
    ("causal must be a bool, got int", TypeError, paged, {"causal": 1}),
    ("return_lse must be a bool, got NoneType", TypeError, paged, {"return_lse": None}),
    ("window_size must be a tuple of two ints, got 5", TypeError, paged, {"window_size": 5}),
    ("window_size must be a tuple of two ints, got (1.0, 2)", TypeError, paged,
     {"window_size": (1.0, 2)}),
    ("window_size must hold -1 or numbers from 0 up, got (-2, 0)", ValueError, paged,
     {"window_size": (-2, 0)}),
    ("softcap must be a float, got bool", TypeError, paged, {"softcap": True}),
    ("softcap must be finite and at least 0.0, got -1.0", ValueError, paged, {"softcap": -1.0}),
    ("softcap must be 0.0 or from 1.18e-38", ValueError, paged, {"softcap": 1e-40}),
    ("softcap must be large enough for softmax_scale / softcap to be finite in fp32", ValueError,
     paged, {"softcap": 1e-30, "softmax_scale": 1e30}),
    ("num_splits must be an int, got float", TypeError, paged, {"num_splits": 1.0}),
    ("num_splits must be at least 0, got -1", ValueError, paged, {"num_splits": -1}),
    ("num_splits must be from 0 to 1024, where 0 decides by load, got 1025", ValueError, paged,
     {"num_splits": 1025}),
    ("alibi_slopes must be torch.float32, got torch.float16", TypeError, paged,
     {"alibi_slopes": zeros(4)}),
    ("alibi_slopes must be on the device of q, cpu, got meta", ValueError, paged,
     {"alibi_slopes": zeros(4, dtype=F32, device=META)}),
    ("alibi_slopes must be [heads_q] or [batch, heads_q], [4] or [2, 4], got [3]", ValueError,
     paged, {"alibi_slopes": zeros(3, dtype=F32)}),
    ("sinks must be torch.float16, torch.bfloat16 or torch.float32, got torch.int64", TypeError,
     paged, {"sinks": zeros(4, dtype=torch.int64)}),
    ("sinks must be [heads_q], [4], got [2]", ValueError, paged, {"sinks": zeros(2)}),
    ("sinks must be on the device of q, cpu, got meta", ValueError, paged,
     {"sinks": zeros(4, device=META)}),
    ("q_descale must be None unless q is FP8, which is torch.float16", ValueError, paged,
     {"q_descale": torch.ones(1)}),
    ("k_descale must be None unless k_cache and v_cache are FP8, which are torch.float16",
     ValueError, paged, {"k_descale": torch.ones(1)}),
    ("v_descale must be None unless k_cache and v_cache are FP8, which are torch.float16",
     ValueError, paged, {"v_descale": torch.ones(1)}),
    ("q_descale must be torch.float32, got torch.float64", TypeError, paged,
     {"q": zeros(7, 4, 16, dtype=FP8), "q_descale": torch.ones(1).double()}),
    ("q_descale must have one element or be [heads_k], [2], or [batch, heads_k], [2, 2], got [4]",
     ValueError, paged,
     {"q": zeros(7, 4, 16, dtype=FP8), "q_descale": torch.ones(4)}),
    ("q_descale must be on the device of q, cpu, got meta", ValueError, paged,
     {"q": zeros(7, 4, 16, dtype=FP8), "q_descale": torch.ones(1, device=META)}),
    ("out must be a torch.Tensor, got str", TypeError, paged, {"out": "x"}),
    ("out must be [tokens, heads_q, head_dim_v], [7, 4, 16], got [7, 64]", ValueError, paged,
     {"out": zeros(7, 64)}),
    ("out must be on the device of q, cpu, got meta", ValueError, paged,
     {"out": zeros(7, 4, 16, device=META)}),
    ("out must be torch.float16, torch.bfloat16, torch.float32 or FP8, got torch.float64",
     TypeError, paged, {"out": zeros(7, 4, 16, dtype=torch.float64)}),
    ("out must be torch.float8_e4m3fn to be FP8 on this platform, got torch.float8_e5m2",
     TypeError, paged, {"out": zeros(7, 4, 16, dtype=torch.float8_e5m2)}),
    ("out_scale must be given for an out of torch.float8_e4m3fn, got None", ValueError, paged,
     {"out": zeros(7, 4, 16, dtype=FP8)}),
    ("out_scale must be None unless out is FP8, which is torch.float16", ValueError, paged,
     {"out": zeros(7, 4, 16), "out_scale": torch.ones(1)}),
    ("out_scale must have one element, got [2]", ValueError, paged, {"out_scale": torch.ones(2)}),
    ("attention over a paged cache has no gradient", NotImplementedError, paged,
     {"q": zeros(7, 4, 16).requires_grad_()}),
    ("q must be a torch.Tensor, got NoneType", TypeError, paged,
     {"q": None, "k": zeros(7, 2, 16), "v": zeros(7, 2, 16)}),
    ("tree_mask must be a torch.Tensor, got list", TypeError, paged, {"tree_mask": [1]}),
    ("tree_mask must be torch.int64, got torch.int32", TypeError, paged,
     {"tree_mask": ints(*range(7))}),
    ("tree_mask must be [tokens], [7], got [6]", ValueError, paged,
     {"tree_mask": ints(*range(6), dtype=torch.int64)}),
    ("tree_mask must be on the device of q, cpu, got meta", ValueError, paged,
     {"tree_mask": ints(*range(7), dtype=torch.int64).to(META)}),
    ("causal must be True beside tree_mask, which takes its place, got False", ValueError, paged,
     {"tree_mask": ints(*range(7), dtype=torch.int64), "causal": False}),
    ("alibi_slopes must be None beside tree_mask", NotImplementedError, paged,
     {"tree_mask": ints(*range(7), dtype=torch.int64), "alibi_slopes": torch.ones(4)}),
    ("max_seqlen_q must be at most 64, the bits of tree_mask, got 65", ValueError, paged,
     {"tree_mask": ints(*range(7), dtype=torch.int64), "max_seqlen_q": 65}),
    # the reference
    ("q must be of a float dtype, got torch.int64", TypeError, reference,
     {"q": zeros(7, 4, 16, dtype=torch.int64)}),
    ("q must be [tokens, heads_q, head_dim], got [7, 64]", ValueError, reference,
     {"q": zeros(7, 64)}),
    ("k and v must be given together or not at all, got k NoneType and v Tensor", ValueError,
     reference, {"v": zeros(7, 2, 16)}),
    # the cascade
    ("shared_pages must be torch.int32 or torch.int64, got torch.float32", TypeError, cascade,
     {"shared_pages": torch.ones(2)}),
    ("shared_pages must have one dimension, got [1, 2]", ValueError, cascade,
     {"shared_pages": ints(0, 1)[None]}),
    ("shared_len must be an int, got Tensor", TypeError, cascade, {"shared_len": ints(3)}),
    ("shared_len must be at most what shared_pages hold, 16, got 17", ValueError, cascade,
     {"shared_len": 17}),
    # writing
    ("k must be a torch.Tensor, got NoneType", TypeError, cache, {"k": None}),
    ("k must be torch.float16, torch.bfloat16 or torch.float32, got torch.float64", TypeError,
     cache, {"k": zeros(7, 2, 16, dtype=torch.float64)}),
    ("v must have the dtype of k, torch.float16, got torch.float32", TypeError, cache,
     {"v": zeros(7, 2, 16, dtype=F32)}),
    ("v must be on the device of k, cpu, got meta", ValueError, cache,
     {"v": zeros(7, 2, 16, device=META)}),
    ("k_cache must have the dtype of k, torch.float16, or be FP8 or torch.uint8, got torch.float32",
     TypeError, cache, {n: zeros(5, 8, 2, 16, dtype=F32) for n in ("k_cache", "v_cache")}),
    ("k must be [tokens, heads_k, head_dim], [tokens, 2, 16], got [7, 3, 16]", ValueError, cache,
     {"k": zeros(7, 3, 16)}),
    ("v must be [tokens, heads_k, head_dim_v], [7, 2, 16], got [6, 2, 16]", ValueError, cache,
     {"v": zeros(6, 2, 16)}),
    ("slot_mapping must be torch.int32 or torch.int64, got torch.float32", TypeError, cache,
     {"slot_mapping": torch.ones(7)}),
    ("slot_mapping must have at most as many entries as k has tokens, 7, got 8", ValueError, cache,
     {"slot_mapping": ints(*range(8))}),
    ("k_scale must be None unless k_cache and v_cache are FP8, which are torch.float16", ValueError,
     cache, {"k_scale": torch.ones(1)}),
    ("v_scale must have one element or be [heads_k], [2], got [3]", ValueError, cache,
     {"k_cache": bytes_of(5, 8, 2, 16), "v_cache": bytes_of(5, 8, 2, 16),
      "v_scale": torch.ones(3)}),
    ("attention over a paged cache has no gradient", NotImplementedError, cache,
     {"k": zeros(7, 2, 16).requires_grad_()}),
    # merging
    ("out_a must be a torch.Tensor, got int", TypeError, merge, {"out_a": 1}),
    ("out_b must be torch.float16, torch.bfloat16 or torch.float32, got torch.int64", TypeError,
     merge, {"out_b": zeros(5, 2, 16, dtype=torch.int64)}),
    ("lse_b must be torch.float32, got torch.float16", TypeError, merge, {"lse_b": zeros(2, 5)}),
    ("lse_a must be on the device of out_a, cpu, got meta", ValueError, merge,
     {"lse_a": zeros(2, 5, dtype=F32, device=META)}),
    ("out_a must be [tokens, heads_q, head_dim], got [5, 32]", ValueError, merge,
     {"out_a": zeros(5, 32)}),
    ("out_b must have the shape of out_a, [5, 2, 16], got [4, 2, 16]", ValueError, merge,
     {"out_b": zeros(4, 2, 16)}),
    ("lse_a must be [2, 5], got [5, 2]", ValueError, merge, {"lse_a": zeros(5, 2, dtype=F32)}),
    # drop-ins
    ("kv_cache_dtype must be fp8, fp8_e4m3 or fp8_e5m2 for a k_cache of torch.uint8, got auto",
     ValueError, context, {"k_cache": bytes_of(5, 2, 2, 8, 8), "v_cache": bytes_of(5, 2, 16, 8)}),
    ("kv_cache_dtype must be 'auto', 'fp8', 'fp8_e4m3' or 'fp8_e5m2', got 'int8'", ValueError,
     context, {"kv_cache_dtype": "int8"}),
    ("k_cache must be torch.uint8 or torch.float8_e4m3fn for kv_cache_dtype fp8, got torch.float16",
     TypeError, context, {"kv_cache_dtype": "fp8"}),
    ("sliding_window must be an int or None, got float", TypeError, context,
     {"sliding_window": 3.0}),
    ("skip_decode must be a bool, got int", TypeError, context, {"skip_decode": 1}),
    ("max_input_len must be at least 0, got -1", ValueError, context, {"max_input_len": -1}),
    ("q must be a torch.Tensor, got NoneType", TypeError, context, {"q": None}),
    ("o must be a torch.Tensor, got NoneType", TypeError, context, {"o": None}),
    ("o must be [tokens, heads_q, head_dim_v], [7, 4, 16], got [7, 2, 16]", ValueError, context,
     {"o": zeros(7, 2, 16)}),
    ("b_loc must be [2, max_blocks], got [3, 3]", ValueError, context,
     {"b_loc": torch.zeros(3, 3, dtype=torch.int32)}),
    ("b_start_loc must be torch.int32, got torch.int16", TypeError, context,
     {"b_start_loc": ints(0, 5, 7, dtype=torch.int16)}),
    ("b_seq_len must be [2], got [3]", ValueError, context, {"b_seq_len": ints(9, 8, 7)}),
    ("sm_scale must be a float, got str", TypeError, context, {"sm_scale": "1"}),
    ("fp8_out_scale must have one element, got [2]", ValueError, context,
     {"fp8_out_scale": torch.ones(2)}),
    ("attention over a paged cache has no gradient", NotImplementedError, context,
     {"q": zeros(7, 4, 16).requires_grad_()}),
    ("is_block_table_ptr must be False: no more is offered, got True", NotImplementedError, context,
     {"is_block_table_ptr": True}),
    ("interleaved_v_pack_factor must be 0: no more is offered, got 8", NotImplementedError, context,
     {"interleaved_v_pack_factor": 8}),
    ("sliding_window must be an int or None, got str", TypeError, chunked,
     {"sliding_window": "all"}),
    ("query must be a torch.Tensor, got int", TypeError, chunked, {"query": 1}),
    ("key_cache must have the dtype of query, torch.float16, or be FP8 or torch.uint8, got "
     "torch.float32", TypeError, chunked,
     {"key_cache": zeros(5, 2, 2, 8, 8, dtype=F32), "value_cache": zeros(5, 2, 16, 8, dtype=F32)}),
    ("key and value must be given together or not at all, got key NoneType and value Tensor",
     ValueError, chunked, {"key": None}),
    ("query_start_loc must be torch.int32, got torch.float32", TypeError, chunked,
     {"query_start_loc": torch.zeros(3)}),
    ("seq_lens must be [2], got [1]", ValueError, chunked, {"seq_lens": ints(9)}),
    ("max_query_len must be an int, got float", TypeError, chunked, {"max_query_len": 5.0}),
    ("output must be on the device of query, cpu, got meta", ValueError, chunked,
     {"output": zeros(7, 4, 16, device=META)}),
    ("attention over a paged cache has no gradient", NotImplementedError, chunked,
     {"value": zeros(7, 2, 16).requires_grad_()}),
    ("is_block_table_ptr must be False: no more is offered, got True", NotImplementedError, chunked,
     {"is_block_table_ptr": True}),
    ("use_interleaved_v_cache must be False: no more is offered, got True", NotImplementedError,
     chunked, {"use_interleaved_v_cache": True}),
    ("output_scale must be None unless output is FP8, which is torch.float16", ValueError, chunked,
     {"output_scale": torch.ones(1)}),
]  # fmt: skip


@pytest.mark.eager
@pytest.mark.parametrize(
    ("message", "error", "function", "changes"),
    CASES,
    ids=[f"{i}-{case[2].__name__}" for i, case in enumerate(CASES)],
)
def test_error(message, error, function, changes):
    with pytest.raises(error) as caught:
        function(**changes)
    assert str(caught.value).startswith(message)


@pytest.mark.eager
@pytest.mark.parametrize("function", [paged, packed, cascade, cache, merge, context, chunked])
def test_the_calls_are_right_but_for_the_change(function):
    with pytest.raises(AssertionError, match="the operator was called"):
        function()


@pytest.mark.eager
@pytest.mark.parametrize("what", ["q", "cache", "bytes", "out", "output"])
def test_fp8_on_hardware_without_it(what, monkeypatch):
    monkeypatch.setenv("ATTN_COMMON_PLATFORM", "nvidia:sm_80")
    from attn_common import detect

    detect.cache_clear()
    eight = {n: zeros(5, 8, 2, 16, dtype=FP8) for n in ("k_cache", "v_cache")}
    changes = {
        "q": {"q": zeros(7, 4, 16, dtype=FP8)},
        "cache": eight,
        "bytes": {n: bytes_of(5, 8, 2, 16) for n in ("k_cache", "v_cache")},
        "out": {"out": zeros(7, 4, 16, dtype=FP8), "out_scale": torch.ones(1)},
        "output": {"out_scale": torch.ones(1)},
    }[what]
    try:
        with pytest.raises(NotImplementedError, match=r"FP8 needs an NVIDIA GPU of sm_89 or up"):
            paged(**changes)
    finally:
        monkeypatch.undo()
        detect.cache_clear()


@pytest.mark.eager
def test_another_device_is_not_offered():
    class Elsewhere(Tensor):
        device = torch.device("xpu")

    q = zeros(7, 4, 16).as_subclass(Elsewhere)
    with pytest.raises(NotImplementedError, match="q must be on a CPU or a CUDA or HIP device"):
        paged(q=q)
