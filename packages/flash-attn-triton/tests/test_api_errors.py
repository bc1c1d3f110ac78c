"""One test per error message: its type, and the argument, expectation and finding it names."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from flash_attn_triton import (
    _ops,
    attention_reference,
    flash_attn_func,
    flash_attn_varlen_func,
    varlen_attention_reference,
)
from torch import Tensor

FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong call never reaches an operator."""

    def attention(*_: Any) -> None:
        raise AssertionError("the operator was called")

    monkeypatch.setattr(_ops, "attention", attention)


def zeros(*shape: int, dtype: torch.dtype = torch.float16, **options: Any) -> Tensor:
    return torch.zeros(shape, dtype=torch.float32, **options).to(dtype)


def fixed(**changes: Any) -> Any:
    call = {"q": zeros(2, 5, 4, 8), "k": zeros(2, 7, 2, 8), "v": zeros(2, 7, 2, 6)}
    return flash_attn_func(**{**call, **changes})


def lengths(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def packed(**changes: Any) -> Any:
    call = {
        "q": zeros(10, 4, 8), "k": zeros(14, 2, 8), "v": zeros(14, 2, 6),
        "cu_seqlens_q": lengths(0, 5, 10), "cu_seqlens_k": lengths(0, 7, 14),
        "max_seqlen_q": 5, "max_seqlen_k": 7,
    }  # fmt: skip
    return flash_attn_varlen_func(**{**call, **changes})


def fp8(**changes: Any) -> Any:
    call = {name: zeros(2, 5, 2, 8, dtype=FP8) for name in "qkv"}
    return flash_attn_func(**{**call, **changes})


META = torch.device("meta")
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

OPTIONS = [
    ("dropout_p must be a float, got str", TypeError, fixed, {"dropout_p": "0.1"}),
    ("dropout_p must be a float, got bool", TypeError, fixed, {"dropout_p": True}),
    ("dropout_p must be in [0, 1), got 1.0", ValueError, fixed, {"dropout_p": 1.0}),
    ("dropout_p must be in [0, 1), got -0.1", ValueError, packed, {"dropout_p": -0.1}),
    ("dropout_p must be in [0, 1), got nan", ValueError, fixed, {"dropout_p": math.nan}),
    ("dropout_p must be 0.0 for FP8 inputs, got 0.1", NotImplementedError, fp8, {"dropout_p": 0.1}),
    (
        "softmax_scale must be a float, got Tensor",
        TypeError, fixed, {"softmax_scale": torch.ones(1)},
    ),
    ("softmax_scale must be finite, got inf", ValueError, fixed, {"softmax_scale": math.inf}),
    ("softmax_scale must be finite, got nan", ValueError, fixed, {"softmax_scale": math.nan}),
    ("softcap must be a float, got Tensor", TypeError, fixed, {"softcap": torch.ones(4)}),
    ("softcap must be finite and at least 0.0, got -1.0", ValueError, fixed, {"softcap": -1.0}),
    ("softcap must be finite and at least 0.0, got inf", ValueError, fixed, {"softcap": math.inf}),
    ("softcap must be finite and at least 0.0, got nan", ValueError, fixed, {"softcap": math.nan}),
    ("causal must be a bool, got int", TypeError, fixed, {"causal": 1}),
    ("deterministic must be a bool, got NoneType", TypeError, fixed, {"deterministic": None}),
    ("return_attn_probs must be a bool, got str", TypeError, packed, {"return_attn_probs": "no"}),
    ("return_lse must be a bool, got int", TypeError, fixed, {"return_lse": 0}),
    ("window_size must be a tuple of two ints, got 5", TypeError, fixed, {"window_size": 5}),
    (
        "window_size must be a tuple of two ints, got (1, 2, 3)",
        TypeError, fixed, {"window_size": (1, 2, 3)},
    ),
    (
        "window_size must be a tuple of two ints, got (1.0, 2)",
        TypeError, fixed, {"window_size": (1.0, 2)},
    ),
    (
        "window_size must be a tuple of two ints, got (True, 2)",
        TypeError, fixed, {"window_size": (True, 2)},
    ),
    (
        "window_size must hold -1 or numbers from 0 up, got (-2, 0)",
        ValueError, fixed, {"window_size": (-2, 0)},
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
        "cu_seqlens_k must be torch.int32, got torch.int64",
        TypeError, packed, {"cu_seqlens_k": lengths(0, 7, 14, dtype=torch.int64)},
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
        "seqused_k must be torch.int32, got torch.int64",
        TypeError, packed, {"seqused_k": lengths(7, 7, dtype=torch.int64)},
    ),
    (
        "seqused_k must be on the device of q, cpu, got meta",
        ValueError, packed, {"seqused_k": lengths(7, 7).to(META)},
    ),
    ("seqused_k must be [2], got [3]", ValueError, packed, {"seqused_k": lengths(7, 7, 7)}),
]  # fmt: skip

EXTRAS = [
    ("bias must be a torch.Tensor, got float", TypeError, fixed, {"bias": 0.5}),
    (
        "bias must have the dtype of q, torch.float16, or torch.float32, got torch.bfloat16",
        TypeError, fixed, {"bias": zeros(5, 7, dtype=torch.bfloat16)},
    ),
    (
        "bias must be torch.float32 for FP8 inputs, got torch.float8_e4m3fn",
        TypeError, fp8, {"bias": zeros(5, 5, dtype=FP8)},
    ),
    (
        "bias must be on the device of q, cpu, got meta",
        ValueError, fixed, {"bias": zeros(5, 7, device=META)},
    ),
    (
        "bias must broadcast to [batch, heads_q, seqlen_q, seqlen_k], [2, 4, 5, 7], got [5, 6]",
        ValueError, fixed, {"bias": zeros(5, 6)},
    ),
    (
        "bias must broadcast to [batch, heads_q, seqlen_q, seqlen_k], [2, 4, 5, 7], "
        "got [1, 2, 4, 5, 7]",
        ValueError, fixed, {"bias": zeros(1, 2, 4, 5, 7)},
    ),
    (
        "bias must broadcast to [batch, heads_q, seqlen_q, seqlen_k], [2, 4, 5, 7], "
        "got [2, 2, 5, 7]",
        ValueError, packed, {"bias": zeros(2, 2, 5, 7)},
    ),
    (
        "alibi_slopes must be a torch.Tensor, got list",
        TypeError, fixed, {"alibi_slopes": [0.1] * 4},
    ),
    (
        "alibi_slopes must be torch.float32, got torch.float16",
        TypeError, fixed, {"alibi_slopes": zeros(4)},
    ),
    (
        "alibi_slopes must be on the device of q, cpu, got meta",
        ValueError, fixed, {"alibi_slopes": zeros(4, dtype=torch.float32, device=META)},
    ),
    (
        "alibi_slopes must be [heads_q] or [batch, heads_q], [4] or [2, 4], got [2]",
        ValueError, fixed, {"alibi_slopes": torch.zeros(2)},
    ),
    (
        "alibi_slopes must not require a gradient, which is not computed; got requires_grad=True",
        NotImplementedError, fixed, {"alibi_slopes": torch.zeros(4, requires_grad=True)},
    ),
    ("sinks must be a torch.Tensor, got int", TypeError, fixed, {"sinks": 0}),
    (
        "sinks must be torch.float16, torch.bfloat16 or torch.float32, got torch.float64",
        TypeError, fixed, {"sinks": zeros(4, dtype=torch.float64)},
    ),
    (
        "sinks must be on the device of q, cpu, got meta",
        ValueError, fixed, {"sinks": zeros(4, device=META)},
    ),
    ("sinks must be [heads_q], [4], got [2]", ValueError, packed, {"sinks": zeros(2)}),
]  # fmt: skip

LOW_PRECISION = [
    (
        "q_descale must be None unless q, k and v are FP8, which are torch.float16",
        ValueError, fixed, {"q_descale": torch.ones(1)},
    ),
    ("k_descale must be a torch.Tensor, got float", TypeError, fp8, {"k_descale": 0.5}),
    (
        "v_descale must be torch.float32, got torch.float16",
        TypeError, fp8, {"v_descale": zeros(1)},
    ),
    (
        "k_descale must be on the device of q, cpu, got meta",
        ValueError, fp8, {"k_descale": torch.ones(1, device=META)},
    ),
    (
        "q_descale must have one element or be [batch, heads_k], [2, 2], got [2]",
        ValueError, fp8, {"q_descale": torch.ones(2)},
    ),
    ("out_dtype must be a torch.dtype, got str", TypeError, fixed, {"out_dtype": "float16"}),
    (
        "out_dtype must be torch.float16, torch.bfloat16, torch.float32 or FP8, got torch.float64",
        TypeError, fixed, {"out_dtype": torch.float64},
    ),
    (
        "out_dtype must be torch.float8_e4m3fn to be FP8 on this platform, got torch.float8_e5m2",
        TypeError, fixed, {"out_dtype": torch.float8_e5m2, "out_scale": torch.ones(1)},
    ),
    (
        "out_scale must be given for the FP8 out_dtype torch.float8_e4m3fn, got None",
        ValueError, fixed, {"out_dtype": FP8},
    ),
    (
        "out_scale must be None unless out_dtype is FP8, got out_dtype None",
        ValueError, fixed, {"out_scale": torch.ones(1)},
    ),
    (
        "out_scale must be None unless out_dtype is FP8, which is torch.float32",
        ValueError, packed, {"out_dtype": torch.float32, "out_scale": torch.ones(1)},
    ),
    (
        "out_scale must be a torch.Tensor, got float",
        TypeError, fixed, {"out_dtype": FP8, "out_scale": 1.0},
    ),
    (
        "out_scale must be torch.float32, got torch.float16",
        TypeError, fixed, {"out_dtype": FP8, "out_scale": zeros(1)},
    ),
    (
        "out_scale must be on the device of q, cpu, got meta",
        ValueError, fixed, {"out_dtype": FP8, "out_scale": torch.ones(1, device=META)},
    ),
    (
        "out_scale must have one element, got [2]",
        ValueError, fixed, {"out_dtype": FP8, "out_scale": torch.ones(2)},
    ),
    (
        "FP8 has no gradient: inputs must not require one with FP8 inputs or an FP8 out_dtype, got "
        "requires_grad=True",
        NotImplementedError, fixed,
        {"q": zeros(2, 5, 4, 8).requires_grad_(), "out_dtype": FP8, "out_scale": torch.ones(1)},
    ),
    (
        "FP8 has no gradient",
        NotImplementedError, fp8, {"sinks": torch.zeros(2, requires_grad=True)},
    ),
]  # fmt: skip

FP32_RANGE = "-2.36e+38 to 2.36e+38, for fp32, got "
BEYOND = [
    (
        "window_size must hold -1 or numbers from 0 up",
        ValueError, fixed, {"window_size": (-(2**63) - 1, 0)},
    ),
    (
        "max_seqlen_q must fit into 64 bits, got 9223372036854775808",
        ValueError, packed, {"max_seqlen_q": 2**63},
    ),
    (
        "max_seqlen_k must fit into 64 bits, got an int of 33220 bits",
        ValueError, packed, {"max_seqlen_k": 10**10000},
    ),
    (
        f"softmax_scale must be from {FP32_RANGE}an int of 1329 bits",
        ValueError, fixed, {"softmax_scale": 10**400},
    ),
    (
        f"softmax_scale must be from {FP32_RANGE}-3e+38",
        ValueError, packed, {"softmax_scale": -3e38},
    ),
    ("softcap must be 0.0 or from 1.18e-38 to", ValueError, fixed, {"softcap": 1e-40}),
    ("softcap must be 0.0 or from 1.18e-38 to", ValueError, fixed, {"softcap": 10**400}),
    (
        "softcap must be large enough for softmax_scale / softcap to be finite in fp32, got "
        "softcap 1e-20 and softmax_scale -1e+20",
        ValueError, fixed, {"softcap": 1e-20, "softmax_scale": -1e20},
    ),
    (
        "dropout_p must be in [0, 1), got an int of 1329 bits",
        ValueError, fixed, {"dropout_p": 10**400},
    ),
]  # fmt: skip

GRADIENTS = [
    *(
        (
            f"{name} must not require a gradient, which is not computed; got requires_grad=True",
            NotImplementedError, fp8, {name: torch.ones(1, requires_grad=True)},
        )
        for name in ("q_descale", "k_descale", "v_descale")
    ),
    (
        "out_scale must not require a gradient, which is not computed; got requires_grad=True",
        NotImplementedError, packed,
        {"out_dtype": FP8, "out_scale": torch.ones(1, requires_grad=True)},
    ),
]  # fmt: skip

CASES = BEYOND + GRADIENTS + TENSORS + OPTIONS + LENGTHS + EXTRAS + LOW_PRECISION


@pytest.mark.parametrize(("message", "error", "call", "changes"), CASES, ids=lambda x: None)
def test_message(message, error, call, changes):
    with pytest.raises(error) as caught:
        call(**changes)
    assert str(caught.value).startswith(message)


def test_other_kinds_of_device_are_refused(monkeypatch):
    monkeypatch.setattr("flash_attn_triton._checks._DEVICES", ("cuda",))
    with pytest.raises(
        NotImplementedError, match="q must be on a CPU or a CUDA or HIP device, got cpu"
    ):
        fixed()


@pytest.mark.parametrize(("arch", "name"), [("nvidia:sm_80", "q"), ("amd:gfx90a", "q")])
def test_fp8_needs_its_hardware(arch, name, monkeypatch):
    from attn_common import detect

    monkeypatch.setenv("ATTN_COMMON_PLATFORM", arch)
    detect.cache_clear()
    try:
        with pytest.raises(NotImplementedError, match=f"^{name}: FP8 needs an NVIDIA GPU of sm_89"):
            fp8()
        with pytest.raises(NotImplementedError, match="^out_dtype: FP8 needs .* got " + arch):
            fixed(out_dtype=FP8, out_scale=torch.ones(1))
    finally:
        monkeypatch.undo()
        detect.cache_clear()


def test_fp8_encoding_is_that_of_the_platform(monkeypatch):
    from attn_common import detect

    monkeypatch.setenv("ATTN_COMMON_PLATFORM", "amd:gfx942")
    detect.cache_clear()
    try:
        with pytest.raises(TypeError, match=r"^q must be torch\.float8_e4m3fnuz to be FP8"):
            fp8()
    finally:
        monkeypatch.undo()
        detect.cache_clear()


def test_alibi_slopes_may_require_grad_where_none_is_taken():
    with torch.no_grad(), pytest.raises(AssertionError, match="the operator was called"):
        fixed(alibi_slopes=torch.zeros(4, requires_grad=True))


def test_scales_may_require_grad_where_none_is_taken():
    with torch.no_grad(), pytest.raises(AssertionError, match="the operator was called"):
        fp8(q_descale=torch.ones(1, requires_grad=True))


@pytest.mark.parametrize("options", [{"softmax_scale": 2**70}, {"softcap": 2**70}])
def test_numbers_of_more_than_64_bits_reach_the_operator_as_floats(options, monkeypatch):
    given = []
    monkeypatch.setattr(_ops, "attention", lambda *args: given.extend(args) or args[:2])
    fixed(**options)
    numbers = [x for x in given if isinstance(x, (int, float)) and x == 2**70]
    assert [type(x) for x in numbers] == [float]


def reference(**changes: Any) -> Any:
    call = {"q": zeros(2, 5, 4, 8), "k": zeros(2, 7, 2, 8), "v": zeros(2, 7, 2, 6)}
    return attention_reference(**{**call, **changes})


@pytest.mark.parametrize(
    ("message", "error", "changes"),
    [
        (
            "window_size must hold -1 or numbers from 0 up, got (-5, 3)",
            ValueError, {"window_size": (-5, 3)},
        ),
        ("softcap must be finite and at least 0.0, got -1", ValueError, {"softcap": -1}),
        ("dropout_p must be in [0, 1), got 1.5", ValueError, {"dropout_p": 1.5}),
        ("softmax_scale must be finite, got nan", ValueError, {"softmax_scale": math.nan}),
        ("causal must be a bool, got str", TypeError, {"causal": "yes"}),
        ("deterministic must be a bool, got int", TypeError, {"deterministic": 1}),
        ("q must be a torch.Tensor, got list", TypeError, {"q": [1.0]}),
        (
            "q must be of a float dtype, got torch.int32",
            TypeError, {"q": zeros(2, 5, 4, 8, dtype=torch.int32)},
        ),
        (
            "v must be of a float dtype, got torch.bool",
            TypeError, {"v": zeros(2, 7, 2, 6, dtype=torch.bool)},
        ),
        (
            "k must be [batch, seqlen_k, heads_k, head_dim], got [7, 2, 8]",
            ValueError, {"k": zeros(7, 2, 8)},
        ),
        ("head_dim of k must be that of q, 8, got 6", ValueError, {"k": zeros(2, 7, 2, 6)}),
        ("batch of k must be that of q, 2, got 1", ValueError, {"k": zeros(1, 7, 2, 8)}),
        (
            "v must have the shape of k but for head_dim, [2, 7, 2], got [2, 7, 1]",
            ValueError, {"v": zeros(2, 7, 1, 6)},
        ),
        (
            "heads_q must be a positive multiple of heads_k, got heads_q 4 and heads_k 3",
            ValueError, {"k": zeros(2, 7, 3, 8), "v": zeros(2, 7, 3, 6)},
        ),
    ],
    ids=lambda x: None,
)  # fmt: skip
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
    from flash_attn_triton.reference import dense_attention

    q = torch.zeros(1, 2, 1, 4)
    with pytest.raises(ValueError, match="dropout needs rng_state"):
        dense_attention(q, q, q, *[None] * 7, 1.0, -1, -1, 0.0, 0.5)
    assert attention_reference(q, q, q, 0.5).shape == q.shape
