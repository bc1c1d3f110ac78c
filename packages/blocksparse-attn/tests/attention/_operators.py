"""Helpers of operators tests that other tests use too."""

from __future__ import annotations

import warnings

import pytest
import torch
from blocksparse_attn._linked.host.forms import interpreted

traced_alike = pytest.mark.skipif(
    interpreted(), reason="tracing sees the operators alone, and the interpreter is slow"
)


@pytest.fixture
def compiled():
    """A compiler that refuses graph breaks."""
    # else the limit on recompilation is shared between tests
    torch.compiler.reset()

    def compile(function):
        return torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")

    with warnings.catch_warnings():
        # dynamo makes an instance of an autograd function, against PyTorch's own advice
        warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
        yield compile
    torch.compiler.reset()
