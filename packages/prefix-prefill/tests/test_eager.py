"""CPU tensors without the interpreter: the eager operators against the definition in float64."""

from __future__ import annotations

import pytest
import torch
from prefix_prefill import _ops

from ._budget import assert_same
from ._numerics import DENSE_SMALL, FEATURES, PACKED_SMALL, SMALL, check, make_case, run

if _ops.interpreted():
    # once for all: as so many skipped tests, they would hide what else is skipped
    pytest.skip("about a process without the interpreter", allow_module_level=True)

pytestmark = pytest.mark.eager
CPU = torch.device("cpu")


@pytest.mark.parametrize("feature", [None, *FEATURES])
@pytest.mark.parametrize("problem", [*SMALL, *PACKED_SMALL, *DENSE_SMALL], ids=str)
def test_features(problem, feature):
    check(make_case(problem, torch.float32, CPU, [feature] if feature else []))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("problem", [SMALL[5], DENSE_SMALL[0]], ids=str)
def test_half_precision_with_everything(problem, dtype):
    features = ("window", "softcap", "alibi_batch", "sinks")
    check(make_case(problem, dtype, CPU, features))


def test_autocast_does_not_round():
    case = make_case(SMALL[5], torch.float32, CPU, ["sinks"])
    want = run(case)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(run(case), want)


def test_no_kernel_is_imported():
    run(make_case(SMALL[5], torch.float32, CPU))
    import sys

    assert "prefix_prefill._kernels.forward" not in sys.modules
