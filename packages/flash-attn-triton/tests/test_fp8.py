"""FP8 inputs and outputs: accuracy, descales, saturation."""

from __future__ import annotations

import pytest
import torch
from attn_common import detect, fp8_dtype
from flash_attn_triton import (
    attention_reference,
    flash_attn_func,
    flash_attn_varlen_func,
    triton_attention,
)

from ._budget import Maker, assert_no_worse_than_eager, offsets
from ._numerics import Case, Shape
from .conftest import INTERPRETED

# on a GPU without FP8 this whole file has nothing to test; interpreted stores to FP8 lose carries
on_device = pytest.mark.skipif(INTERPRETED, reason="interpreted FP8 stores round wrongly")


@pytest.fixture
def fp8(device):
    platform = detect(device)
    if not platform.supports_fp8:
        pytest.skip(f"{platform} has no FP8")
    return getattr(torch, fp8_dtype(platform))


DESCALES = ["none", "scalar", "per_head"]


def make(shape, fp8, device, descales="none", **options):
    """FP8 inputs whose codes reach far, and descales that bring them to order one."""
    m = Maker(device, torch.float32)
    b, sq, sk, hq, hk, d, _ = shape
    factor = 1.0 if descales == "none" else 20.0
    inputs = {
        name: (m.randn(b, n, h, d) * factor).to(fp8)
        for name, n, h in (("q", sq, hq), ("k", sk, hk), ("v", sk, hk))
    }
    for name in "qkv":
        if descales == "scalar":
            options[f"{name}_descale"] = m.uniform(1, low=0.02, high=0.08)
        elif descales == "per_head":
            options[f"{name}_descale"] = m.uniform(b, hk, low=0.02, high=0.08)
    return Case(inputs, options)


def dequantised(case):
    """The float64 inputs that the FP8 ones stand for, and the options without descales."""
    wide = {}
    heads_k = case.inputs["k"].shape[2]
    for name, t in case.inputs.items():
        wide[name] = t.double()
        descale = case.options.get(f"{name}_descale")
        if descale is not None and descale.numel() > 1:
            descale = descale.repeat_interleave(t.shape[2] // heads_k, 1)[:, None, :, None]
        if descale is not None:
            wide[name] = wide[name] * descale.double()
    options = {key: value for key, value in case.options.items() if "descale" not in key}
    return Case(wide, options)


def oracle_and_budget(case, fp8, out_dtype=torch.bfloat16):
    """Return the exact result, and one whose probabilities went through FP8 as the kernel's do."""
    wide = dequantised(case)
    out, lse = attention_reference(**wide.inputs, **wide.options, return_lse=True)
    q, v = wide.inputs["q"], wide.inputs["v"]
    identity = torch.eye(v.shape[1], dtype=torch.float64, device=v.device)
    identity = identity[None, :, None].expand(v.shape[0], -1, v.shape[2], -1)
    probabilities = attention_reference(q, wide.inputs["k"], identity, **wide.options)
    largest = probabilities.amax(-1, keepdim=True).clamp(min=1e-300)
    steps = torch.finfo(fp8).max / 2  # a power of two or less than one above it
    steps = 2.0 ** int(torch.tensor(steps).log2())
    rounded = (probabilities / largest * steps).float().to(fp8).double() / steps * largest
    v = v.repeat_interleave(q.shape[2] // v.shape[2], 2)
    emulated = torch.einsum("bqhk,bkhd->bqhd", rounded, v).to(out_dtype)
    return out, lse, emulated


def lse_unit(device):
    """Return the unit of a sum of FP8 products: Hopper's tensor cores keep 13 bits of fraction."""
    return 2.0**-13 if device.type == "cuda" else 1e-6


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
    case = make(Shape(2, 18, 35, 4, 2, 32), fp8, device, descales, **FEATURES[feature])
    out, lse = case()
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    want, want_lse, emulated = oracle_and_budget(case, fp8)
    assert_no_worse_than_eager("out", out, emulated, want)
    assert_no_worse_than_eager("lse", lse, want_lse.float(), want_lse, eps=lse_unit(device))


@pytest.mark.device
@pytest.mark.parametrize("descales", DESCALES)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_accuracy_at_length(causal, head_dim, descales, fp8, device):
    shape = Shape(2, 1024, 1300, 8, 2, head_dim)
    case = make(shape, fp8, device, descales, causal=causal)
    out, lse = case()
    want, want_lse, emulated = oracle_and_budget(case, fp8)
    assert_no_worse_than_eager("out", out, emulated, want)
    assert_no_worse_than_eager("lse", lse, want_lse.float(), want_lse, eps=lse_unit(device))


@pytest.mark.eager
def test_other_features_of_the_denominator(fp8, device):
    case = make(Shape(2, 18, 35, 4, 2, 32), fp8, device, "per_head")
    m = Maker(device, torch.float32, seed=3)
    case = case.with_options(
        bias=m.randn(1, 4, 18, 35), sinks=m.randn(4), alibi_slopes=m.uniform(4, low=0.1, high=0.5)
    )
    want, want_lse, emulated = oracle_and_budget(case, fp8)
    out, lse = case()
    assert_no_worse_than_eager("out", out, emulated, want)
    assert_no_worse_than_eager("lse", lse, want_lse.float(), want_lse, eps=lse_unit(device))


@pytest.mark.eager
def test_small_probabilities_are_not_lost(fp8, device):
    """One key takes the maximum; the rest, each e**-7 of it, carry most of the output."""
    keys = 2048
    q = torch.zeros(1, 1, 1, 16, device=device)
    k = torch.zeros(1, keys, 1, 16, device=device)
    q[..., 0], k[:, 0, :, 0] = 7.0, 1.0
    v = torch.ones(1, keys, 1, 16, device=device)
    v[:, 0] = 0.0
    out = flash_attn_func(q.to(fp8), k.to(fp8), v.to(fp8), softmax_scale=1.0)
    rest = (keys - 1) * torch.tensor(-7.0).exp()
    want = (rest / (1 + rest)).to(out).expand_as(out)
    torch.testing.assert_close(out, want, rtol=0.05, atol=0)


@pytest.mark.eager
@on_device
@pytest.mark.parametrize("inputs", ["fp8", "bfloat16"])
@pytest.mark.parametrize("scale", [0.01, 1.0])
def test_fp8_output(scale, inputs, fp8, device):
    case = make(Shape(2, 18, 35, 4, 2, 32), fp8, device, causal=True)
    if inputs != "fp8":
        case = Case({n: t.to(torch.bfloat16) for n, t in case.inputs.items()}, case.options)
    want, _, emulated = oracle_and_budget(case, fp8, torch.float32)
    out_scale = torch.tensor([scale], device=device)
    out, _ = case(out_dtype=fp8, out_scale=out_scale)
    assert out.dtype == fp8
    limit = torch.finfo(fp8).max
    eager = (emulated / scale).clamp(-limit, limit).to(fp8)
    want = (want / scale).clamp(-limit, limit)
    assert_no_worse_than_eager("out", out, eager, want, eps=torch.finfo(fp8).eps / 2)


@pytest.mark.eager
@on_device
def test_fp8_output_saturates(fp8, device):
    case = make(Shape(1, 18, 35, 2, 1, 32), fp8, device, causal=True)
    out, _ = case(out_dtype=fp8, out_scale=torch.tensor([1e-6], device=device))
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
        offsets((18, 18), device), offsets((35, 35), device), 18, 35,
        **case.options, return_lse=True,
    )  # fmt: skip
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
        *quantised, *starts, 18, 20, softmax_scale=0.2, causal=True,
        out_dtype=torch.bfloat16, **descales,
    )  # fmt: skip
    assert nothing is None
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, want)
