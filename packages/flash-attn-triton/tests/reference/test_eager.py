"""CPU tensors without the interpreter: the eager operators against autograd of the definition."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from flash_attn_triton._dense import ops
from flash_attn_triton._dense.call import Options, Tensors
from flash_attn_triton._reference import eager, fused
from torch.utils._python_dispatch import TorchDispatchMode

from .._linked.budget import assert_same, offsets
from .._linked.views import VIEWS, same_values
from .._numerics import FEATURES, Case, Packed, Shape, check, make_case, make_packed, run

pytestmark = [
    pytest.mark.eager,
    pytest.mark.skipif(ops.interpreted(), reason="about a process without the interpreter"),
]

SHAPES = [
    Shape(2, 17, 23, 4, 2, 8, 6),
    Shape(1, 23, 9, 2, 1, 16),  # more queries than keys
    Shape(2, 0, 5, 2, 1, 8),
    Shape(2, 5, 0, 2, 1, 8),
    Shape(0, 5, 5, 2, 1, 8),
    Shape(1, 1, 1, 1, 1, 1),
]
PACKED = Packed((5, 0, 15, 6), (9, 3, 8, 0), 4, 2, 8, 6, padding=3)
CPU = torch.device("cpu")


@pytest.mark.parametrize("feature", [None, *FEATURES])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fixed_form(shape, feature):
    check(make_case(shape, torch.float32, CPU, [feature] if feature else []))


@pytest.mark.parametrize("feature", [None, *FEATURES])
def test_packed_form(feature):
    check(make_packed(PACKED, torch.float32, CPU, [feature] if feature else []))


MASKS = [(), ("causal",), ("window",), ("window_left",), ("window_right",)]


@pytest.mark.parametrize("features", MASKS, ids=str)
@pytest.mark.parametrize("make", [make_case, make_packed])
def test_sequences_in_parts(make, features, monkeypatch):
    """With everything that goes by a row or a column."""
    monkeypatch.setattr(eager, "ROWS", 4)
    for extras in (("bias", "alibi_batch", "sinks"), ("bias_keys", "softcap"), ("dropout",)):
        for shape in SHAPES[:2] if make is make_case else [PACKED]:
            check(make(shape, torch.float32, CPU, (*features, *extras)))


@pytest.mark.parametrize("extras", [(), ("alibi_batch",), ("alibi", "sinks"), ("scale_negative",)])
@pytest.mark.parametrize("features", MASKS, ids=str)
@pytest.mark.parametrize("make", [make_case, make_packed])
def test_fused_attention_in_parts(make, features, extras, monkeypatch):
    """The operator of PyTorch, with its mask written out for four queries at a time."""
    monkeypatch.setattr(fused, "ROWS", 4)
    for shape in SHAPES if make is make_case else [PACKED]:
        check(make(shape, torch.float32, CPU, (*features, *extras)))


@pytest.mark.parametrize("features", MASKS, ids=str)
@pytest.mark.parametrize("make", [make_case, make_packed])
def test_without_fused_attention(make, features, monkeypatch):
    """Where PyTorch has no such operator."""
    monkeypatch.setattr(fused, "_operator", None)
    for extras in ((), ("alibi_batch", "sinks")):
        check(
            make(
                SHAPES[0] if make is make_case else PACKED, torch.float32, CPU, (*features, *extras)
            )
        )


def test_fused_attention_does_not_follow_defaults_of_torch():
    q = torch.randn(1, 9, 2, 8)
    x = Tensors(q, q, q, alibi_slopes=torch.ones(2))
    arguments = x, Options(0.3, 4, 0, 0.0, 0.0), q.dtype
    want, _ = eager.attention_forward(*arguments)
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            got, _ = eager.attention_forward(*arguments)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(got, want)


class Named(TorchDispatchMode):
    """Notes which operators run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("seqlen_k", "left", "right", "softcap", "calls"),
    [
        (300, -1, -1, 0.0, 1),
        (300, -1, 0, 0.0, 1),
        (320, -1, 0, 0.0, 2),  # the mask is written out for 256 queries at a time
        (300, 5, 0, 0.0, 2),
        (300, -1, -1, 2.0, 0),
    ],
)
def test_fused_attention_runs_where_it_can(seqlen_k, left, right, softcap, calls):
    q, k = torch.randn(1, 300, 2, 8), torch.randn(1, seqlen_k, 2, 8)
    options = Options(0.3, left, right, softcap, 0.0)
    with Named() as seen:
        eager.attention_forward(Tensors(q, k, k), options, q.dtype)
    name = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert seen.names.count(name) == calls


class Widest(TorchDispatchMode):
    """Notes how many numbers the largest result has."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        several = result if isinstance(result, (list, tuple)) else [result]
        sizes = [x.numel() for x in several if isinstance(x, torch.Tensor)]
        self.most = max(self.most, *sizes)
        return result


@pytest.mark.parametrize(
    ("is_fused", "dropout_p"), [(False, 0.0), (True, 0.0), (False, 0.3)], ids=str
)
@pytest.mark.parametrize("right", [0, -1])
def test_no_whole_matrix_of_scores(right, is_fused, dropout_p, monkeypatch):
    if not is_fused:
        monkeypatch.setattr(fused, "_operator", None)
    q = torch.randn(1, 1500, 2, 8)
    x = Tensors(q, q, q, rng_state=torch.tensor([1, 2]))
    options = Options(0.3, 60 if right == 0 else -1, right, 0.0, dropout_p)
    # the scores of a part, and one column for a sink
    most = 2 * eager.ROWS * (eager.ROWS + 61 if right == 0 else 1501)
    with Widest() as widest:
        out, lse = eager.attention_forward(x, options, q.dtype)
    assert widest.most <= most
    with Widest() as widest:
        eager.attention_backward(x, options, None, lse, out, None)
    assert widest.most <= most


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [make_case, make_packed])
def test_half_precision_with_everything(make, dtype):
    features = ("causal", "softcap", "alibi_batch", "bias", "sinks", "dropout")
    check(make(SHAPES[0] if make is make_case else PACKED, dtype, CPU, features))


@pytest.mark.parametrize("shape", [Shape(4, 1, 300, 8, 2, 80), Shape(3, 33, 37, 4, 2, 24)], ids=str)
def test_a_sequence_does_not_depend_on_its_batch(shape):
    case = make_case(shape, torch.float32, CPU, ["causal"])
    got = run(case)
    for b in range(shape.batch):
        alone = case.with_inputs(**{n: t[b : b + 1] for n, t in case.inputs.items()})
        assert_same(run(alone, grad=False), {n: got[n][b : b + 1] for n in ("out", "lse")})
    packed = Case(
        {name: t.flatten(0, 1) for name, t in case.inputs.items()},
        {
            "causal": True,
            "cu_seqlens_q": offsets([shape.seqlen_q] * shape.batch, CPU),
            "cu_seqlens_k": offsets([shape.seqlen_k] * shape.batch, CPU),
            "max_seqlen_q": shape.seqlen_q,
            "max_seqlen_k": shape.seqlen_k,
        },
        packed=True,
    )
    assert torch.equal(run(packed, grad=False)["out"], got["out"].flatten(0, 1))


@pytest.mark.parametrize("view", VIEWS)
def test_strides_do_not_change_a_bit(view):
    case = make_case(Shape(2, 33, 37, 4, 2, 24), torch.float32, CPU, ["causal", "bias"])
    moved = case.with_inputs(**{n: same_values(view, t) for n, t in case.inputs.items()})
    assert_same(run(moved), run(case))


def test_autocast_does_not_round_the_gradient():
    case = make_case(SHAPES[0], torch.float32, CPU, ["bias", "sinks"])
    want = run(case)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(run(case), want)


def test_no_kernel_is_imported():
    """In a process of its own: other tests here import kernels."""
    code = """
import sys, torch
from flash_attn_triton import flash_attn_func
x = torch.randn(1, 5, 2, 16, requires_grad=True)
flash_attn_func(x, x, x, causal=True).sum().backward()
sys.exit(any(name.split(".")[-1] == "launch" or name == "triton" for name in sys.modules))
"""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0
