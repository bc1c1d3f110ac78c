"""One argument of a right call is wrong: the call works all the same, or names an argument."""

from __future__ import annotations

import lightning_attn as package
import pytest
import torch

from ._linked.wrong_calls import arguments_of, check_wrong_calls

pytestmark = pytest.mark.eager

X4, X3, DECAY = torch.randn(2, 4, 2, 16), torch.randn(9, 2, 16), torch.rand(2)
STATES, SLOTS = torch.randn(4, 2, 16, 16), torch.tensor([0, 1], dtype=torch.int32)
STARTS = torch.tensor([0, 4, 9], dtype=torch.int32)
ONE = torch.randn(2, 2, 1, 16)
CALLS = {
    "lightning_attn_func": {"q": X4, "k": X4, "v": X4, "decay": DECAY},
    "lightning_attn_varlen_func": {
        "q": X3,
        "k": X3,
        "v": X3,
        "decay": DECAY,
        "cu_seqlens": STARTS,
        "state_cache": STATES,
        "state_indices": SLOTS,
        "has_initial_state": torch.tensor([True, False]),
    },
    "lightning_attn_decode": {
        "q": X4,
        "k": X4,
        "v": X4,
        "state_cache": STATES,
        "decay": DECAY,
        "slot_idx": SLOTS,
        "out": torch.zeros(2, 4, 2, 16),
    },
    "linear_decode_forward_triton": {
        "q": ONE,
        "k": ONE,
        "v": ONE,
        "kv_caches": STATES,
        "slope_rate": DECAY,
        "slot_idx": SLOTS,
    },
}
CALLS |= {
    "lightning_attention_reference": CALLS["lightning_attn_func"],
    "lightning_attention_varlen_reference": CALLS["lightning_attn_varlen_func"],
    "lightning_attention_decode_reference": {
        name: x for name, x in CALLS["lightning_attn_decode"].items() if name != "out"
    },
    "validate_varlen": {"q": X3, "cu_seqlens": STARTS},
    "validate_decay": {"decay": DECAY},
    "validate_slots": {"slots": SLOTS, "state_cache": STATES},
}
ARGUMENTS = [(name, x) for name in CALLS for x in arguments_of(getattr(package, name))]


@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_a_wrong_argument(name, argument):
    check_wrong_calls(getattr(package, name), CALLS[name], argument)
