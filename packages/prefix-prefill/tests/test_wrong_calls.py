"""One argument of a right call is wrong: the call works all the same, or names an argument."""

from __future__ import annotations

import prefix_prefill as package
import pytest
import torch

from ._linked.wrong_calls import arguments_of, check_wrong_calls

pytestmark = pytest.mark.eager


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


X, ONE = torch.randn(9, 2, 16), torch.randn(2, 1, 2, 16)
CACHES = {"k_cache": torch.randn(3, 16, 2, 16), "v_cache": torch.randn(3, 16, 2, 16)}
TABLE = int32(2, 0).view(2, 1)
STARTS, LENGTHS = {"cu_seqlens_q": int32(0, 4, 9)}, {"seqlens_k": int32(7, 8)}
PAGED = {"block_table": TABLE, **STARTS, **LENGTHS, "max_seqlen_q": 5, "max_seqlen_k": 8}
VLLM = {
    "kv_cache_dtype": "auto",
    **CACHES,
    "b_loc": TABLE,
    "b_start_loc": STARTS["cu_seqlens_q"],
    "b_seq_len": LENGTHS["seqlens_k"],
    "max_seq_len": 8,
    "max_input_len": 5,
    "k_scale": 1.0,  # ignored
    "v_scale": 1.0,
}
CALLS = {
    "paged_attn_func": {"q": X, **CACHES, **PAGED, "k": X, "v": X, "out": torch.zeros_like(X)},
    "reshape_and_cache": {"k": X, "v": X, **CACHES, "slot_mapping": torch.arange(9)},
    "flash_attn_with_kvcache": {
        "q": ONE,
        **CACHES,
        "k": ONE,
        "v": ONE,
        "cache_seqlens": int32(3, 4),
        "cache_batch_idx": int32(0, 1),
        "cache_leftpad": int32(0, 0),
    },
    "mla_attn_func": {"q": X, "kv_cache": torch.randn(3, 16, 16), **PAGED, "head_dim_v": 16},
    "context_attention_fwd": {"q": X, "k": X, "v": X, "o": torch.zeros_like(X), **VLLM},
}
CALLS |= {
    "paged_attention_reference": CALLS["paged_attn_func"] | {"sinks": torch.zeros(2)},
    "mla_attention_reference": CALLS["mla_attn_func"],
    "validate_paged": {"q": X, **CACHES, **PAGED},
    "validate_slot_mapping": {"slot_mapping": torch.arange(9), **CACHES},
}
ARGUMENTS = [(name, x) for name in CALLS for x in arguments_of(getattr(package, name))]


@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_a_wrong_argument(name, argument):
    check_wrong_calls(getattr(package, name), CALLS[name], argument)
