"""How many of the package's functions a warm call is in when it reaches the launch."""

from __future__ import annotations

import sys
from pathlib import Path

import flash_attn_triton
import pytest
import torch
from flash_attn_triton import flash_attn_func, flash_attn_varlen_func
from flash_attn_triton._dense import ops
from flash_attn_triton._linked.launch.runtime import Launch

pytestmark = pytest.mark.skipif(not ops.interpreted(), reason="a GPU's calls are the same ones")

MOST = 5
PACKAGE = str(Path(flash_attn_triton.__file__).parent)


def depths(call):
    """Return the package's frames that are open at each launch of a call, the launch's included."""
    found = []

    def profile(frame, event, _):
        if event != "call" or frame.f_code is not Launch.__call__.__code__:
            return
        open_frames = 0
        while frame is not None:
            open_frames += frame.f_code.co_filename.startswith(PACKAGE)
            frame = frame.f_back
        found.append(open_frames)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    assert found
    return found


def tensors(*size, grad=False):
    return [torch.randn(size, dtype=torch.float16, requires_grad=grad) for _ in "qkv"]


@pytest.mark.parametrize("grad", [False, True])
def test_a_warm_call_reaches_its_launch(grad):
    q, k, v = tensors(1, 16, 1, 16, grad=grad)
    flash_attn_func(q, k, v)
    assert max(depths(lambda: flash_attn_func(q, k, v))) <= MOST
    assert max(depths(lambda: flash_attn_func(q, k, v))) > 2


def test_a_warm_packed_call_reaches_its_launch():
    q, k, v = tensors(16, 1, 16)
    starts = torch.tensor([0, 5, 16], dtype=torch.int32)

    def call():
        flash_attn_varlen_func(q, k, v, starts, starts, 11, 11, causal=True)

    call()
    assert max(depths(call)) <= MOST


@pytest.mark.parametrize("bias", [False, True])
def test_the_backward_of_a_warm_call_reaches_its_launches(bias):
    q, k, v = tensors(1, 16, 1, 16, grad=True)
    added = torch.randn(1, 1, 16, 16, dtype=torch.float16, requires_grad=True) if bias else None
    leaves = [q, k, v, added] if bias else [q, k, v]
    for _ in range(2):
        out = flash_attn_func(q, k, v, bias=added)
        found = depths(lambda out=out: torch.autograd.grad(out.sum(), leaves))
    assert len(found) == 3 + bias
    assert max(found) <= MOST
