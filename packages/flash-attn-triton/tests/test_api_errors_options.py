"""One test per error message about numbers, flags and windows."""

from __future__ import annotations

import math

import pytest
import torch
from flash_attn_triton._dense import ops

from .dense._calls import assert_refused, fixed, forbid_operator, fp8, one_test_each, packed


@pytest.fixture(autouse=True)
def no_operator(monkeypatch):
    forbid_operator(monkeypatch)


OPTIONS = [
    ("dropout_p must be a float, got str", TypeError, fixed, {"dropout_p": "0.1"}),
    ("dropout_p must be a float, got bool", TypeError, fixed, {"dropout_p": True}),
    ("dropout_p must be in [0, 1), got 1.0", ValueError, fixed, {"dropout_p": 1.0}),
    ("dropout_p must be in [0, 1), got -0.1", ValueError, packed, {"dropout_p": -0.1}),
    ("dropout_p must be in [0, 1), got nan", ValueError, fixed, {"dropout_p": math.nan}),
    ("dropout_p must be 0.0 for FP8 inputs, got 0.1", NotImplementedError, fp8, {"dropout_p": 0.1}),
    (
        "softmax_scale must be a float, got Tensor",
        TypeError,
        fixed,
        {"softmax_scale": torch.ones(1)},
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
        TypeError,
        fixed,
        {"window_size": (1, 2, 3)},
    ),
    (
        "window_size must be a tuple of two ints, got (1.0, 2)",
        TypeError,
        fixed,
        {"window_size": (1.0, 2)},
    ),
    (
        "window_size must be a tuple of two ints, got (True, 2)",
        TypeError,
        fixed,
        {"window_size": (True, 2)},
    ),
    (
        "window_size must hold -1 or numbers from 0 up, got (-2, 0)",
        ValueError,
        fixed,
        {"window_size": (-2, 0)},
    ),
]

FP32_RANGE = "-2.36e+38 to 2.36e+38, for fp32, got "
BEYOND = [
    (
        "window_size must hold -1 or numbers from 0 up",
        ValueError,
        fixed,
        {"window_size": (-(2**63) - 1, 0)},
    ),
    (
        "max_seqlen_q must fit into 64 bits, got 9223372036854775808",
        ValueError,
        packed,
        {"max_seqlen_q": 2**63},
    ),
    (
        "max_seqlen_k must fit into 64 bits, got an int of 33220 bits",
        ValueError,
        packed,
        {"max_seqlen_k": 10**10000},
    ),
    (
        f"softmax_scale must be from {FP32_RANGE}an int of 1329 bits",
        ValueError,
        fixed,
        {"softmax_scale": 10**400},
    ),
    (
        f"softmax_scale must be from {FP32_RANGE}-3e+38",
        ValueError,
        packed,
        {"softmax_scale": -3e38},
    ),
    ("softcap must be 0.0 or from 1.18e-38 to", ValueError, fixed, {"softcap": 1e-40}),
    ("softcap must be 0.0 or from 1.18e-38 to", ValueError, fixed, {"softcap": 10**400}),
    (
        "softcap must be large enough for softmax_scale / softcap to be finite in fp32, got "
        "softcap 1e-20 and softmax_scale -1e+20",
        ValueError,
        fixed,
        {"softcap": 1e-20, "softmax_scale": -1e20},
    ),
    (
        "dropout_p must be in [0, 1), got an int of 1329 bits",
        ValueError,
        fixed,
        {"dropout_p": 10**400},
    ),
]


@one_test_each(OPTIONS + BEYOND)
def test_message(message, error, call, changes):
    assert_refused(message, error, call, changes)


@pytest.mark.parametrize("options", [{"softmax_scale": 2**70}, {"softcap": 2**70}])
def test_numbers_of_more_than_64_bits_reach_the_operator_as_floats(options, monkeypatch):
    given = []
    monkeypatch.setattr(ops, "attention", lambda *args: given.extend(args[-1].options) or args[:2])
    fixed(**options)
    assert [type(x) for x in given if x == 2**70] == [float]
