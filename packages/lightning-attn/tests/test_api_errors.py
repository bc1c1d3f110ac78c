"""One test per message: what is wrong, what was expected, what came; nothing reaches a kernel."""

from __future__ import annotations

import pytest
import torch
from lightning_attn import (
    build_slopes,
    lightning_attention,
    lightning_attention_reference,
    lightning_attn_decode,
    lightning_attn_func,
    lightning_attn_varlen_func,
    linear_decode_forward_triton,
    validate_decay,
    validate_slots,
    validate_varlen,
)
from lightning_attn._linear import ops

pytestmark = pytest.mark.eager

BF16, FP64 = torch.bfloat16, torch.float64
INT16 = torch.int16


def zeros(*size, dtype=torch.float32):
    return torch.zeros(size, dtype=dtype)


@pytest.fixture(autouse=True)
def no_kernel(monkeypatch):
    """A wrong call must not get as far as an operator."""

    def fail(*_):
        raise AssertionError("an operator was called")

    names = ("attention", "advance", "step", "forward_with_states")
    for name in names:
        monkeypatch.setattr(ops, name, fail)


def fixed(**changes):
    made = {
        "q": zeros(2, 5, 3, 16),
        "k": zeros(2, 5, 3, 16),
        "v": zeros(2, 5, 3, 32),
        "decay": zeros(3),
    }
    return lightning_attn_func(**{**made, **changes})


def packed(**changes):
    made = {
        "q": zeros(10, 3, 16),
        "k": zeros(10, 3, 16),
        "v": zeros(10, 3, 32),
        "decay": zeros(3),
        "cu_seqlens": torch.tensor([0, 4, 10], dtype=torch.int32),
    }
    return lightning_attn_varlen_func(**{**made, **changes})


def decode(**changes):
    made = {
        "q": zeros(2, 1, 3, 16),
        "k": zeros(2, 1, 3, 16),
        "v": zeros(2, 1, 3, 32),
        "state_cache": zeros(4, 3, 16, 32),
        "decay": zeros(3),
        "slot_idx": torch.tensor([0, 1], dtype=torch.int32),
    }
    return lightning_attn_decode(**{**made, **changes})


def prefill(**changes):
    made = {
        "q": zeros(2, 3, 5, 16),
        "k": zeros(2, 3, 5, 16),
        "v": zeros(2, 3, 5, 32),
        "ed": zeros(3),
    }
    return lightning_attention(**{**made, **changes})


def engine_decode(**changes):
    made = {
        "q": zeros(2, 3, 1, 16),
        "k": zeros(2, 3, 1, 16),
        "v": zeros(2, 3, 1, 32),
        "kv_caches": zeros(4, 3, 16, 32),
        "slope_rate": zeros(3),
        "slot_idx": torch.tensor([0, 1], dtype=torch.int32),
    }
    return linear_decode_forward_triton(**{**made, **changes})


META = torch.empty(2, 5, 3, 16, device="meta")
CACHE = zeros(4, 3, 16, 32)
GRAD = zeros(2, 5, 3, 16).requires_grad_()

CASES = [
    # types and dtypes of the main tensors
    (fixed, {"q": 1}, TypeError, r"q must be a torch.Tensor, got int"),
    (fixed, {"k": None}, TypeError, r"k must be a torch.Tensor, got NoneType"),
    (fixed, {"q": zeros(2, 5, 3, 16, dtype=FP64)}, TypeError,
     r"q must be torch.float16, torch.bfloat16 or torch.float32, got torch.float64; lightning_att"),
    (fixed, {"k": zeros(2, 5, 3, 16, dtype=BF16)}, TypeError,
     r"k must have the dtype of q, torch.float32, got torch.bfloat16"),
    (fixed, {"v": zeros(2, 5, 3, 32, dtype=BF16)}, TypeError,
     r"v must have the dtype of q, torch.float32, got torch.bfloat16"),
    (fixed, {"k": META}, ValueError, r"k must be on the device of q, cpu, got meta"),
    # shapes
    (fixed, {"q": zeros(5, 3, 16)}, ValueError,
     r"q must be \[batch, seqlen, heads, d\], got \[5, 3, 16\]"),
    (fixed, {"v": zeros(5, 3, 16)}, ValueError,
     r"v must be \[batch, seqlen, heads, e\], got \[5, 3, 16\]"),
    (packed, {"q": zeros(2, 5, 3, 16)}, ValueError,
     r"q must be \[tokens, heads, d\], got \[2, 5, 3, 16\]"),
    (fixed, {"k": zeros(2, 4, 3, 16)}, ValueError,
     r"k must have the shape of q, \[2, 5, 3, 16\], got \[2, 4, 3, 16\]"),
    (fixed, {"v": zeros(2, 4, 3, 16)}, ValueError,
     r"v must have the shape of q but for the last dimension, \[2, 5, 3\], got \[2, 4, 3\]"),
    (fixed, {"q": zeros(2, 5, 0, 16)}, ValueError, r"q must have at least one head, got \[2, 5, 0"),
    (fixed, {"q": zeros(2, 5, 3, 24), "k": zeros(2, 5, 3, 24)}, ValueError,
     r"d, the last dimension of q, must be a multiple of 16 from 16 to 256, got 24"),
    (fixed, {"v": zeros(2, 5, 3, 272)}, ValueError,
     r"e, the last dimension of v, must be a multiple of 16 from 16 to 256, got 272"),
    # decays
    (fixed, {"decay": 0.5}, TypeError, r"decay must be a torch.Tensor, got float"),
    (fixed, {"decay": zeros(3, dtype=BF16)}, TypeError,
     r"decay must be torch.float32, got torch.bfloat16"),
    (fixed, {"decay": torch.empty(3, device="meta")}, ValueError,
     r"decay must be on the device of q, cpu, got meta"),
    (fixed, {"decay": zeros(2)}, ValueError,
     r"decay must be \[heads\], \[heads, 1, 1\] or \[1, heads, 1, 1\] with heads 3, got \[2\]"),
    # options
    (fixed, {"scale": "1"}, TypeError, r"scale must be a float, got str"),
    (fixed, {"scale": True}, TypeError, r"scale must be a float, got bool"),
    (fixed, {"scale": float("nan")}, ValueError, r"scale must be finite, got nan"),
    (fixed, {"scale": 1e39}, ValueError, r"scale must be from -2.36e\+38 to .* fp32, got 1e\+39"),
    (fixed, {"scale": 10**400}, ValueError, r"scale must be from .* fp32, got an int of 1329 bits"),
    (fixed, {"output_final_state": 1}, TypeError, r"output_final_state must be a bool, got int"),
    (fixed, {"schedule": 1}, TypeError, r"schedule must be a str, got int"),
    (fixed, {"schedule": "fast"}, ValueError,
     r"schedule must be one of auto, sequential, parallel, got 'fast'"),
    # states
    (fixed, {"initial_state": 1}, TypeError, r"initial_state must be a torch.Tensor, got int"),
    (fixed, {"initial_state": zeros(2, 3, 16, 32, dtype=BF16)}, TypeError,
     r"initial_state must be torch.float32, got torch.bfloat16"),
    (fixed, {"initial_state": zeros(2, 3, 32, 16)}, ValueError,
     r"initial_state must be \[batch, heads, d, e\], \[2, 3, 16, 32\], got \[2, 3, 32, 16\]"),
    (fixed, {"initial_state": torch.empty(2, 3, 16, 32, device="meta")}, ValueError,
     r"initial_state must be on the device of q, cpu, got meta"),
    # packed
    (packed, {"cu_seqlens": [0, 10]}, TypeError, r"cu_seqlens must be a torch.Tensor, got list"),
    (packed, {"cu_seqlens": torch.tensor([0, 10], dtype=INT16)}, TypeError,
     r"cu_seqlens must be torch.int32, got torch.int16"),
    (packed, {"cu_seqlens": zeros(2, 2).int()}, ValueError,
     r"cu_seqlens must have one dimension, got \[2, 2\]"),
    (packed, {"cu_seqlens": zeros(0).int()}, ValueError,
     r"cu_seqlens must be \[batch \+ 1\], got \[0\]"),
    (packed, {"cu_seqlens": zeros(6).int()[::2]}, ValueError,
     r"cu_seqlens must be contiguous, got stride 2"),
    (packed, {"cu_seqlens": torch.empty(3, dtype=torch.int32, device="meta")}, ValueError,
     r"cu_seqlens must be on the device of q, cpu, got meta"),
    (packed, {"state_indices": zeros(2).int()}, ValueError,
     r"state_indices must be None without a state_cache, got a tensor"),
    (packed, {"state_cache": CACHE, "initial_state": zeros(2, 3, 16, 32)}, ValueError,
     r"initial_state must be None with a state_cache, got a tensor"),
    (packed, {"state_cache": CACHE.bfloat16()}, TypeError,
     r"state_cache must be torch.float32, got torch.bfloat16"),
    (packed, {"state_cache": zeros(4, 3, 32, 16)}, ValueError,
     r"state_cache must be \[slots, heads, d, e\], \[slots, 3, 16, 32\], got \[4, 3, 32, 16\]"),
    (packed, {"state_cache": CACHE[:1]}, ValueError,
     r"state_cache must have a slot for each of 2 sequences where state_indices is None, got 1"),
    (packed, {"state_cache": zeros(1, 3, 16, 32).expand(4, 3, 16, 32)}, ValueError,
     r"state_cache must not be expanded, for it is written, got a stride of 0"),
    (packed, {"state_cache": CACHE, "state_indices": [0, 1]}, TypeError,
     r"state_indices must be a torch.Tensor, got list"),
    (packed, {"state_cache": CACHE, "state_indices": zeros(2)}, TypeError,
     r"state_indices must be torch.int32 or torch.int64, got torch.float32"),
    (packed, {"state_cache": CACHE, "state_indices": zeros(3).int()}, ValueError,
     r"state_indices must be \[batch\], \[2\], got \[3\]"),
    (packed, {"has_initial_state": [True, True]}, TypeError,
     r"has_initial_state must be a torch.Tensor, got list"),
    (packed, {"has_initial_state": zeros(2)}, TypeError,
     r"has_initial_state must be torch.bool, got torch.float32"),
    (packed, {"has_initial_state": zeros(3).bool()}, ValueError,
     r"has_initial_state must be \[batch\], \[2\], got \[3\]"),
    (packed, {"state_cache": CACHE, "q": zeros(10, 3, 16).requires_grad_()}, NotImplementedError,
     r"state_cache has no gradient: its inputs must not require one, got requires_grad=True"),
    # decoding
    (decode, {"q": zeros(2, 3, 16)}, ValueError,
     r"q must be \[batch, tokens, heads, d\], got \[2, 3, 16\]"),
    (decode, {"q": zeros(2, 0, 3, 16), "k": zeros(2, 0, 3, 16), "v": zeros(2, 0, 3, 32)},
     ValueError, r"q must hold from 1 to 8 tokens of each sequence, got 0"),
    (decode, {"q": zeros(2, 9, 3, 16), "k": zeros(2, 9, 3, 16), "v": zeros(2, 9, 3, 32)},
     ValueError, r"q must hold from 1 to 8 tokens of each sequence, got 9"),
    (decode, {"out": 1}, TypeError, r"out must be a torch.Tensor, got int"),
    (decode, {"out": zeros(2, 1, 3, 32, dtype=BF16)}, TypeError,
     r"out must have the dtype of q, torch.float32, got torch.bfloat16"),
    (decode, {"out": zeros(2, 3, 32)}, ValueError,
     r"out must be \[batch, tokens, heads, e\], \[2, 1, 3, 32\], got \[2, 3, 32\]"),
    (decode, {"out": zeros(1, 1, 3, 32).expand(2, 1, 3, 32)}, ValueError,
     r"out must not be expanded, for it is written, got a stride of 0"),
    (decode, {"states_out": zeros(2, 1, 3, 16, 32, dtype=BF16)}, TypeError,
     r"states_out must be torch.float32, got torch.bfloat16"),
    (decode, {"states_out": zeros(2, 3, 16, 32)}, ValueError,
     r"states_out must be \[batch, tokens, heads, d, e\], \[2, 1, 3, 16, 32\], got \[2, 3, 16"),
    (decode, {"slot_idx": None}, TypeError, r"slot_idx must be a torch.Tensor, got NoneType"),
    (decode, {"slot_idx": zeros(2)}, TypeError,
     r"slot_idx must be torch.int32 or torch.int64, got torch.float32"),
    (decode, {"slot_idx": zeros(3).int()}, ValueError,
     r"slot_idx must be \[batch\], \[2\], got \[3\]"),
    (decode, {"q": zeros(2, 1, 3, 16).requires_grad_()}, NotImplementedError,
     r"lightning_attn_decode has no gradient: its inputs must not require one"),
    # drop-ins
    (prefill, {"q": zeros(3, 5, 16)}, ValueError, r"q must be \[B, H, N, D\], got \[3, 5, 16\]"),
    (prefill, {"ed": zeros(3, dtype=BF16)}, TypeError, r"ed must be torch.float32, got torch.bfl"),
    (prefill, {"block_size": 2.0}, TypeError, r"block_size must be an int, got float"),
    (prefill, {"block_size": 0}, ValueError, r"block_size must be at least 1, got 0"),
    (prefill, {"kv_history": zeros(2, 3, 32, 16)}, ValueError,
     r"kv_history must be \[batch, heads, d, e\], \[2, 3, 16, 32\], got \[2, 3, 32, 16\]"),
    (prefill, {"q": GRAD.transpose(1, 2)}, NotImplementedError,
     r"lightning_attention has no gradient: its inputs must not require one"),
    (engine_decode, {"q": zeros(2, 3, 2, 16)}, ValueError,
     r"q must be \[B, H, 1, D\], got \[2, 3, 2, 16\]"),
    (engine_decode, {"v": zeros(2, 3, 32)}, ValueError, r"v must be \[B, H, 1, E\], got \[2, 3"),
    (engine_decode, {"kv_caches": None}, TypeError, r"kv_caches must be a torch.Tensor, got None"),
    (engine_decode, {"slope_rate": 1.0}, TypeError, r"slope_rate must be a torch.Tensor, got flo"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "changes", "error", "message"), CASES)
def test_message(call, changes, error, message):
    with pytest.raises(error, match=message):
        call(**changes)


def reference(**changes):
    made = {"q": zeros(2, 5, 3, 4), "k": zeros(2, 5, 3, 4), "v": zeros(2, 5, 3, 7)}
    return lightning_attention_reference(**{**made, **changes}, decay=zeros(3))


VALUES = torch.tensor
OTHERS = [
    (lambda: reference(q=1), TypeError, r"q must be a torch.Tensor, got int"),
    (lambda: reference(k=zeros(2, 5, 3, 4).int()), TypeError, r"k must be of a float dtype, got"),
    (lambda: reference(v=zeros(2, 5)), ValueError, r"v must be \[batch, seqlen, heads, e\], got"),
    (lambda: build_slopes(2.0), TypeError, r"num_heads must be an int, got float"),
    (lambda: build_slopes(0), ValueError, r"num_heads must be at least 1, got 0"),
    (lambda: build_slopes(2, 1.0, 2), TypeError, r"layer_idx must be an int, got float"),
    (lambda: build_slopes(2, 1), ValueError, r"layer_idx and num_layers must be given together"),
    (lambda: build_slopes(2, 0, 0), ValueError, r"num_layers must be at least 1, got 0"),
    (lambda: build_slopes(2, 2, 2), ValueError, r"layer_idx must be from 0 to 1, got 2"),
    (lambda: validate_decay(1.0), TypeError, r"decay must be a torch.Tensor, got float"),
    (
        lambda: validate_decay(VALUES([0.1, -0.5])),
        ValueError,
        r"decay\[1\] must be at least 0, got -0.5",
    ),
    (lambda: validate_decay(VALUES([float("nan")])), ValueError, r"decay\[0\] must be at least 0"),
    (
        lambda: validate_varlen(zeros(2, 3), VALUES([0, 1]).int()),
        ValueError,
        r"q must be \[tokens, heads, d\], got \[2, 3\]",
    ),
    (
        lambda: validate_varlen(zeros(9, 1, 1), VALUES([0, 10]).int()),
        ValueError,
        r"cu_seqlens\[1\] must be from 0 to the number of tokens, 9, got 10",
    ),
    (
        lambda: validate_varlen(zeros(9, 1, 1), VALUES([0, 5, 4]).int()),
        ValueError,
        r"cu_seqlens\[2\] must be at least 5, as before it, got 4",
    ),
    (lambda: validate_slots([0], CACHE), TypeError, r"slots must be a torch.Tensor, got list"),
    (lambda: validate_slots(VALUES([0]), 1), TypeError, r"state_cache must be a torch.Tensor"),
]


@pytest.mark.parametrize(("call", "error", "message"), OTHERS)
def test_message_of_the_others(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_what_is_right_passes():
    validate_decay(torch.tensor([[0.0, 3.5]]))
    validate_varlen(zeros(9, 1, 1), torch.tensor([0, 5, 5, 9], dtype=torch.int32))
    validate_slots(torch.tensor([2, -1, 0, -1]), CACHE)


def test_no_gradient_is_asked_for_without_grad_mode():
    with torch.no_grad(), pytest.raises(AssertionError, match="an operator was called"):
        decode(q=zeros(2, 1, 3, 16).requires_grad_())
