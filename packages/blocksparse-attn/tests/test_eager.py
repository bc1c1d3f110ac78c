"""The CPU implementation, which users without a GPU get: all of the forms, at sizes of use."""

from __future__ import annotations

import pytest
from blocksparse_attn._linked.host.forms import interpreted

from ._linked.budget import DTYPES
from ._numerics import PATTERNS, Packed, Shape, check, make_case, make_packed

pytestmark = [
    pytest.mark.eager,
    # there the same is in the tests of each feature
    pytest.mark.skipif(interpreted(), reason="too long for the interpreter"),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_fixed(causal, pattern, dtype, device):
    shape = Shape(2, 130, 170, 4, 2, 32, 24)
    check(make_case(shape, dtype, device, pattern, (64, 32), causal=causal))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed(dtype, device):
    shape = Packed((100, 0, 1, 40), (130, 5, 99, 40), 4, 2, 32, padding=3)
    check(make_packed(shape, dtype, device, "local", (16, 64)))
