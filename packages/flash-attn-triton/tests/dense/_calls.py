"""Calls that are right, to be made wrong in one argument, and what a wrong one has to say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flash_attn_triton import flash_attn_func, flash_attn_varlen_func
from flash_attn_triton._dense import ops
from torch import Tensor

FP8 = torch.float8_e4m3fn
META = torch.device("meta")


def forbid_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """See to it that a wrong call never reaches an operator."""

    def attention(*_: Any) -> None:
        raise AssertionError("the operator was called")

    monkeypatch.setattr(ops, "attention", attention)


def zeros(*shape: int, dtype: torch.dtype = torch.float16, **options: Any) -> Tensor:
    return torch.zeros(shape, dtype=torch.float32, **options).to(dtype)


def fixed(**changes: Any) -> Any:
    call = {"q": zeros(2, 5, 4, 8), "k": zeros(2, 7, 2, 8), "v": zeros(2, 7, 2, 6)}
    return flash_attn_func(**{**call, **changes})


def lengths(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def packed(**changes: Any) -> Any:
    call = {
        "q": zeros(10, 4, 8),
        "k": zeros(14, 2, 8),
        "v": zeros(14, 2, 6),
        "cu_seqlens_q": lengths(0, 5, 10),
        "cu_seqlens_k": lengths(0, 7, 14),
        "max_seqlen_q": 5,
        "max_seqlen_k": 7,
    }
    return flash_attn_varlen_func(**{**call, **changes})


def fp8(**changes: Any) -> Any:
    call = {name: zeros(2, 5, 2, 8, dtype=FP8) for name in "qkv"}
    return flash_attn_func(**{**call, **changes})


def one_test_each(cases: list[tuple[Any, ...]]) -> Any:
    """Parametrize by message, error, call and changes."""
    names = ("message", "error", "call", "changes")
    return pytest.mark.parametrize(names, cases, ids=lambda _: None)


def assert_refused(message: str, error: type[Exception], call: Any, changes: Any) -> None:
    """Require that error, beginning with that message."""
    with pytest.raises(error) as caught:
        call(**changes)
    assert str(caught.value).startswith(message)
