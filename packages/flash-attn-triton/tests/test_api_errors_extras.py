"""One test per error message about biases, slopes and sinks, and about FP8."""

from __future__ import annotations

import pytest
import torch

from .dense._calls import (
    FP8,
    META,
    assert_refused,
    fixed,
    forbid_operator,
    fp8,
    one_test_each,
    packed,
    zeros,
)


@pytest.fixture(autouse=True)
def no_operator(monkeypatch):
    forbid_operator(monkeypatch)


EXTRAS = [
    ("bias must be a torch.Tensor, got float", TypeError, fixed, {"bias": 0.5}),
    (
        "bias must have the dtype of q, torch.float16, or be torch.float32, got torch.bfloat16",
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

GRADIENTS = [
    *(
        (
            f"{name} must not require a gradient, which is not computed; got requires_grad=True",
            NotImplementedError,
            fp8,
            {name: torch.ones(1, requires_grad=True)},
        )
        for name in ("q_descale", "k_descale", "v_descale")
    ),
    (
        "out_scale must not require a gradient, which is not computed; got requires_grad=True",
        NotImplementedError,
        packed,
        {"out_dtype": FP8, "out_scale": torch.ones(1, requires_grad=True)},
    ),
]


@one_test_each(EXTRAS + LOW_PRECISION + GRADIENTS)
def test_message(message, error, call, changes):
    assert_refused(message, error, call, changes)


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
