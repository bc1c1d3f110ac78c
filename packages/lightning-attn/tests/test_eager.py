"""CPU tensors without the interpreter: the eager operators against the definition."""

from __future__ import annotations

import pytest
import torch
from lightning_attn import _ops

from ._budget import DTYPES
from ._numerics import DECAYS, PACKED, SMALL, Shape, check, make_case, make_packed, run

pytestmark = [
    pytest.mark.eager,
    pytest.mark.skipif(_ops.interpreted(), reason="about a process without the interpreter"),
]

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [*SMALL, Shape(2, 150, 2, 32, 48)], ids=str)
def test_fixed_form(shape):
    check(make_case(shape, torch.float32, CPU))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("decay", DECAYS)
def test_every_decay_in_every_dtype(decay, dtype):
    check(make_case(Shape(1, 70, 3, 16, 16), dtype, CPU, decay))


@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("shape", PACKED, ids=str)
def test_packed_form(shape, state):
    check(make_packed(shape, torch.float32, CPU, state=state))


def test_no_kernel_is_imported():
    import sys

    run(make_case(SMALL[0], torch.float32, CPU))
    assert "lightning_attn._kernels.entry" not in sys.modules
