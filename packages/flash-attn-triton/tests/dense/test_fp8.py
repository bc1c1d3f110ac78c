"""FP8 inputs and outputs: accuracy, descales, saturation."""

from __future__ import annotations

import pytest
import torch
from flash_attn_triton import flash_attn_varlen_func, triton_attention

from .._linked.budget import Maker, assert_no_worse_than_eager, offsets
from .._linked.tiers import INTERPRETED
from .._numerics import Case, Shape
from ._fp8 import DESCALES, assert_accurate, fp8, judged, make

__all__ = ["fp8"]  # fixtures

# on a GPU without FP8 this whole file has nothing to test; interpreted stores to FP8 lose carries
on_device = pytest.mark.skipif(INTERPRETED, reason="interpreted FP8 stores round wrongly")


FEATURES = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (9, 3)},
    "softcap": {"softcap": 2.0},
    "negative": {"softmax_scale": -0.4},
}


@pytest.mark.eager
@pytest.mark.parametrize(
    ("feature", "descales"),
    [("plain", "none"), ("plain", "scalar"), *((name, "per_head") for name in FEATURES)],
)
def test_accuracy(feature, descales, fp8, device):
    shape = Shape(2, 18, 35, 4, 2, 32)
    assert_accurate(make(shape, fp8, device, descales, **FEATURES[feature]), fp8)


@pytest.mark.eager
def test_negative_descales(fp8, device):
    """Ties at logits of hundreds of either sign, from one product each, so exact on any GPU."""
    q, k = (torch.zeros(2, n, h, 32, device=device) for n, h in ((18, 4), (35, 2)))
    for t in (q, k):
        t[:, ::3, :, 0], t[:, 1::3, :, 0], t[:, 2::3, :, 0] = -16.0, 16.0, 8.0
    v = Maker(device, torch.float32).randn(2, 35, 2, 32)
    options = {
        "softmax_scale": 1.0,
        "q_descale": torch.tensor([[-2.0, 1.0], [0.5, -1.0]], device=device),
        "k_descale": torch.tensor([[1.0, 1.0], [-3.0, -2.0]], device=device),
    }
    case = Case({n: t.to(fp8) for n, t in zip("qkv", (q, k, v), strict=True)}, options)
    assert case()[1].max() > 500
    assert_accurate(case, fp8)


@pytest.mark.device
@pytest.mark.parametrize("descales", DESCALES)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_accuracy_at_length(causal, head_dim, descales, fp8, device):
    shape = Shape(2, 1024, 1300, 8, 2, head_dim)
    assert_accurate(make(shape, fp8, device, descales, causal=causal), fp8)


@pytest.mark.eager
def test_other_features_of_the_denominator(fp8, device):
    case = make(Shape(2, 18, 35, 4, 2, 32), fp8, device, "per_head")
    m = Maker(device, torch.float32, seed=3)
    case = case.with_options(
        bias=m.randn(1, 4, 18, 35), sinks=m.randn(4), alibi_slopes=m.uniform(4, low=0.1, high=0.5)
    )
    assert_accurate(case, fp8)


@pytest.mark.eager
def test_small_probabilities_are_not_lost(fp8, device):
    """One key takes the maximum; the rest, each e**-7 of it, carry most of the output."""
    keys = 2048
    q = torch.zeros(1, 1, 1, 16, device=device)
    k = torch.zeros(1, keys, 1, 16, device=device)
    q[..., 0], k[:, 0, :, 0] = 7.0, 1.0
    v = torch.ones(1, keys, 1, 16, device=device)
    v[:, 0] = 0.0
    inputs = {name: t.to(fp8) for name, t in zip("qkv", (q, k, v), strict=True)}
    assert_accurate(Case(inputs, {"softmax_scale": 1.0}), fp8)


@pytest.mark.eager
@on_device
@pytest.mark.parametrize("inputs", ["fp8", "bfloat16"])
@pytest.mark.parametrize("scale", [0.01, 1.0])
def test_fp8_output(scale, inputs, fp8, device):
    case = make(Shape(2, 18, 35, 4, 2, 32), fp8, device, causal=True)
    if inputs != "fp8":
        case = Case({n: t.to(torch.bfloat16) for n, t in case.inputs.items()}, case.options)
    want = judged(case, fp8)
    out, _ = case(out_dtype=fp8, out_scale=torch.tensor([scale], device=device))
    assert out.dtype == fp8
    limit = torch.finfo(fp8).max
    exact, emulated = ((t / scale).clamp(-limit, limit) for t in (want.out, want.emulated_out))
    # what the probabilities cost, and one rounding: half a spacing of the largest value
    assert_no_worse_than_eager("out", out, emulated, exact, eps=torch.finfo(fp8).eps / 4)


@pytest.mark.eager
@on_device
def test_fp8_output_saturates(fp8, device):
    case = make(Shape(1, 18, 35, 2, 1, 32), fp8, device, causal=True)
    # so small that the least of the outputs saturates, too
    out, _ = case(out_dtype=fp8, out_scale=torch.tensor([1e-12], device=device))
    limit = torch.finfo(fp8).max
    exact, _ = case()
    assert torch.equal(out.float(), exact.float().sign() * limit)


@pytest.mark.eager
@on_device
def test_rows_without_a_key_are_zero(fp8, device):
    case = make(Shape(1, 40, 17, 2, 1, 32), fp8, device, causal=True)
    out, lse = case(out_dtype=fp8, out_scale=torch.ones(1, device=device))
    assert not out[:, :23].float().any()
    assert (lse[..., :23] == float("-inf")).all()


@pytest.mark.eager
def test_packed_is_bitwise_the_fixed_form(fp8, device):
    case = make(Shape(2, 18, 35, 4, 2, 32), fp8, device, "per_head", causal=True)
    want, want_lse = case()
    out, lse = flash_attn_varlen_func(
        *(t.flatten(0, 1) for t in case.inputs.values()),
        offsets((18, 18), device),
        offsets((35, 35), device),
        18,
        35,
        **case.options,
        return_lse=True,
    )
    assert torch.equal(out, want.flatten(0, 1))
    assert torch.equal(lse, want_lse.transpose(0, 1).flatten(1))


@pytest.mark.device
def test_poison_in_fp8(fp8, device):
    case = make(Shape(2, 100, 700, 4, 2, 128), fp8, device, window_size=(64, 0))
    want, _ = case()
    codes = {name: case.inputs[name].view(torch.uint8).clone() for name in "kv"}
    for t in codes.values():
        # the codes of NaN
        t[:, : 700 - 100 - 64] = 0x80 if fp8 == torch.float8_e4m3fnuz else 0x7F
    out, _ = case.with_inputs(**{name: t.view(fp8) for name, t in codes.items()})()
    assert torch.equal(out, want)


@pytest.mark.eager
def test_drop_in_quantises_and_scales(fp8, device):
    m = Maker(device, torch.bfloat16)
    q, k, v = m.randn(23, 4, 32), m.randn(40, 2, 32), m.randn(40, 2, 32)
    starts = offsets((18, 5), device), offsets((20, 20), device)
    scales = (0.02, 0.03, 0.04)
    got, nothing = triton_attention(
        q, k, v, None, *starts, 18, 20, True, 0.2, fp8_scales=(*scales, 1 / 448)
    )
    limit = torch.finfo(fp8).max
    quantised, descales = [], {}
    for name, t, scale in zip("qkv", (q, k, v), scales, strict=True):
        quantised.append((t.float() / scale).clamp(-limit, limit).to(fp8))
        descales[f"{name}_descale"] = torch.tensor([scale], device=device)
    want = flash_attn_varlen_func(
        *quantised,
        *starts,
        18,
        20,
        softmax_scale=0.2,
        causal=True,
        out_dtype=torch.bfloat16,
        **descales,
    )
    assert nothing is None
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, want)
