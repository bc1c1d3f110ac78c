"""One argument of a right call is wrong: the call works all the same, or names an argument."""

from __future__ import annotations

import flash_attn_triton as package
import pytest
import torch

from ._linked.wrong_calls import arguments_of, check_wrong_calls

pytestmark = pytest.mark.eager

X4, X3 = torch.randn(2, 4, 2, 16), torch.randn(9, 2, 16)
STARTS = torch.tensor([0, 4, 9], dtype=torch.int32)
PACKED = {"cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS, "max_seqlen_q": 5, "max_seqlen_k": 5}
TREE = {"cu_seqlens": STARTS, "parents": torch.tensor([-1, 0], dtype=torch.int32), "max_seqlen": 5}
EXTRAS = {"bias": torch.zeros(1, 1, 4, 4), "sinks": torch.zeros(2), "alibi_slopes": torch.zeros(2)}
CALLS = {
    "flash_attn_func": {"q": X4, "k": X4, "v": X4, **EXTRAS},
    "flash_attn_varlen_func": {"q": X3, "k": X3, "v": X3, **PACKED},
    "flash_attn_qkvpacked_func": {"qkv": torch.randn(2, 4, 3, 2, 16)},
    "flash_attn_varlen_kvpacked_func": {"q": X3, "kv": torch.randn(9, 2, 2, 16), **PACKED},
    "flash_attn_tree_func": {"q": X3, "k": X3, "v": X3, **TREE},
}
REFERENCES = {
    "attention_reference": {**CALLS["flash_attn_func"], "dropout_p": 0.1},
    "varlen_attention_reference": {**CALLS["flash_attn_varlen_func"], "sinks": torch.zeros(2)},
    "tree_attention_reference": CALLS["flash_attn_tree_func"],
    "validate_varlen": {"q": X3, "k": X3, **PACKED},
    "validate_tree": {"q": X3, **TREE},
    "unpad_input": {"hidden_states": X4, "attention_mask": torch.ones(2, 4, dtype=torch.int32)},
    "pad_input": {"hidden_states": X3, "indices": torch.arange(9), "batch": 1, "seqlen": 9},
}
CALLS |= REFERENCES
ARGUMENTS = [(name, x) for name in CALLS for x in arguments_of(getattr(package, name))]


@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_a_wrong_argument(name, argument):
    check_wrong_calls(getattr(package, name), CALLS[name], argument)


@pytest.mark.parametrize("name", ["s_aux", "learnable_sink"])
@pytest.mark.parametrize("function", ["flash_attn_func", "flash_attn_varlen_func"])
def test_sinks_have_the_name_that_they_were_given_by(function, name):
    with pytest.raises(ValueError, match=rf"^{name} must be \[heads_q\]"):
        getattr(package, function)(**{**CALLS[function], "sinks": None, name: torch.zeros(3)})
