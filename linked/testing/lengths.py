"""Lengths in every form that calls take, and graphs of ``torch.compile`` that serve all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

TAKEN = (int, np.int64, np.uint8, np.array, torch.tensor, lambda n: torch.tensor(n).to(torch.int32))
REFUSED = (True, np.True_, 2.0, "2", torch.tensor(True), torch.tensor([2]), torch.tensor(2.0))


class OnGpu(Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True


def check_lengths(call: Callable[[Any], Tensor], name: str, length: int) -> None:
    """Check which lengths a call takes, and that its messages name the argument."""
    want = call(length)
    for form in TAKEN:
        assert torch.equal(call(form(length)), want), form
    for wrong in REFUSED:
        with pytest.raises(TypeError, match=rf"^{name} must be an int, got "):
            call(wrong)
    for wrong in (-1, 2**63, 10**5000):
        with pytest.raises(ValueError, match=rf"^{name} must "):
            call(wrong)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(ValueError, match=rf"^{name} must be an int while a stream captures"):
            call(torch.tensor(length).as_subclass(OnGpu))


def check_flags(call: Callable[[Any], Tensor], name: str) -> None:
    """Check that a flag may be NumPy's, and that nothing else is one."""
    for flag in (False, True):
        assert torch.equal(call(np.bool_(flag)), call(flag))
    for wrong in (1, "True", torch.tensor(True), 2**64):
        with pytest.raises(TypeError, match=rf"^{name} must be a bool, got "):
            call(wrong)


def check_one_graph(call: Callable[[Tensor, Any], Tensor], most: int) -> None:
    """Check that one graph serves all lengths; ``call`` takes offsets and the longest length."""
    for unbacked in (False, True):

        def function(offsets: Tensor, length: int, unbacked: bool = unbacked) -> Tensor:
            return call(offsets, offsets.diff().max().item() if unbacked else length)

        torch.compiler.reset()
        counter, made = CompileCounterWithBackend("aot_eager"), 0
        with torch._dynamo.config.patch(capture_scalar_outputs=True):
            fast = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
            for length in (most - 1, 0, 1, 2, most):
                offsets = torch.tensor([0, length], dtype=torch.int32)
                assert torch.equal(fast(offsets, length), call(offsets, length))
                made = counter.frame_count if length == most - 1 else made
        assert counter.frame_count == made
    torch.compiler.reset()
