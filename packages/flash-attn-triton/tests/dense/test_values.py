"""What offsets and lengths hold is checked in every call on the CPU, eager or interpreted."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from flash_attn_triton import api, flash_attn_varlen_func, varlen_attention_reference
from flash_attn_triton._dense import ops
from flash_attn_triton._linked.host.forms import Memory

from ._operators import Watcher

pytestmark = pytest.mark.eager


def arguments(dtype=torch.int32):
    """Two sequences, 4 queries and 5 keys, and 3 and 2."""
    starts = {"cu_seqlens_q": [0, 4, 7], "cu_seqlens_k": [0, 5, 7], "seqused_k": [5, 2]}
    given = {name: torch.tensor(x, dtype=dtype) for name, x in starts.items()}
    tokens = {name: torch.randn(7, 2, 16, dtype=torch.float16) for name in "qkv"}
    return {**tokens, **given, "max_seqlen_q": 4, "max_seqlen_k": 5}


WRONG = {
    "too many queries": (
        {"max_seqlen_q": 3},
        r"cu_seqlens_q\[1\] must be at most max_seqlen_q, 3, beyond cu_seqlens_q\[0\], 0, got 4",
    ),
    "too many keys": (
        {"max_seqlen_k": 4},
        r"cu_seqlens_k\[1\] must be at most max_seqlen_k, 4, beyond cu_seqlens_k\[0\], 0, got 5",
    ),
    "decreasing queries": (
        {"cu_seqlens_q": [0, 4, 3]},
        r"cu_seqlens_q\[2\] must be at least cu_seqlens_q\[1\], 4, got 3",
    ),
    "decreasing keys": ({"cu_seqlens_k": [5, 2, 7]}, r"cu_seqlens_k\[1\] must be at least"),
    "queries beyond the end": (
        {"cu_seqlens_q": [0, 4, 8]},
        r"cu_seqlens_q\[2\] must be from 0 to the number of tokens, 7, got 8",
    ),
    "keys used beyond the sequence": (
        {"seqused_k": [5, 3]},
        r"seqused_k\[1\] must be from 0 to the length of the sequence, 2, got 3",
    ),
    "keys used below 0": ({"seqused_k": [-1, 2]}, r"seqused_k\[0\] must be from 0 to"),
}


@pytest.mark.parametrize("way", ["first", "known", "watched", "gradient", "reference"])
@pytest.mark.parametrize("case", WRONG)
def test_wrong_values_raise(case, way, monkeypatch):
    monkeypatch.setattr(api, "_known", Memory())
    changes, message = WRONG[case]
    wrong = {
        n: torch.tensor(x, dtype=torch.int32) if isinstance(x, list) else x
        for n, x in changes.items()
    }
    given = {**arguments(), **wrong}
    if way == "known":
        flash_attn_varlen_func(**arguments())
    if way == "gradient":
        given["k"].requires_grad_()
    watched = Watcher() if way == "watched" else nullcontext()
    function = varlen_attention_reference if way == "reference" else flash_attn_varlen_func
    with watched, pytest.raises(ValueError, match=message):
        function(**given)


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k", "seqused_k"])
@pytest.mark.parametrize("beyond", [2**32, -(2**32)])
def test_what_32_bits_do_not_hold_is_out_of_range(name, beyond):
    given = arguments(torch.int64)
    given[name][1] += beyond  # its lower half is right
    with pytest.raises(ValueError, match=rf"{name}\[1\] must be from 0 to"):
        flash_attn_varlen_func(**given)


def test_the_operator_checks_what_it_is_given():
    x = arguments()
    tensors = [x[n] for n in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "seqused_k")]
    numbers = 3, 5, 0.25, -1, -1, 0.0, 0.0
    with pytest.raises(ValueError, match=r"cu_seqlens_q\[1\] must be at most max_seqlen_q, 3"):
        ops.forward(*tensors, *[None] * 9, *numbers, torch.float16)
