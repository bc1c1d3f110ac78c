"""FP8 inputs and outputs: accuracy, descales, saturation."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from attn_common import detect, fp8_dtype
from flash_attn_triton import attention_reference, flash_attn_varlen_func, triton_attention
from torch import Tensor

from .._linked.bounds import attention_bounds
from .._linked.budget import Maker, assert_no_worse_than_eager, offsets
from .._linked.rounding import assert_within
from .._linked.tiers import INTERPRETED
from .._numerics import Case, Shape, run_eager, run_oracle, truncates

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


def descale_of(case, name, heads=None):
    """A descale as it multiplies a tensor of so many heads, [batch|1, 1, heads|1, 1], or 1."""
    descale = case.options.get(f"{name}_descale")
    if descale is None:
        return 1.0
    if descale.numel() == 1:
        return descale.double().view(1, 1, 1, 1)
    heads = heads or case.inputs[name].shape[2]
    return descale.double().repeat_interleave(heads // descale.shape[1], 1)[:, None, :, None]


def dequantised(case):
    """The float64 inputs that the FP8 ones stand for, and the options without descales."""
    wide = {name: t.double() * descale_of(case, name) for name, t in case.inputs.items()}
    options = {key: value for key, value in case.options.items() if "descale" not in key}
    return Case(wide, options)


class Judged(NamedTuple):
    """Exact results, and those of the arithmetic that a kernel has to make do with."""

    out: Tensor
    lse: Tensor
    emulated_out: Tensor
    emulated_lse: Tensor


def judged(case, fp8) -> Judged:
    """Return the exact results, and those with probabilities in FP8 and scores in fp32."""
    wide = dequantised(case)
    oracle = run_oracle(wide, grad=False)
    q, k, v = (wide.inputs[name] for name in "qkv")
    v = v.repeat_interleave(q.shape[2] // v.shape[2], 2)
    identity = torch.eye(k.shape[1], dtype=torch.float64, device=k.device)
    identity = identity[None, :, None].expand(k.shape[0], -1, k.shape[2], -1)
    probabilities = attention_reference(q, k, identity, **wide.options)
    largest = probabilities.amax(-1, keepdim=True).clamp(min=1e-300)
    # the largest probability is the largest power of two of the format
    top = 2.0 ** math.floor(math.log2(torch.finfo(fp8).max))
    rounded = (probabilities / largest * top).float().to(fp8).double() / top * largest
    out = torch.einsum("bqhk,bkhd->bqhd", rounded, v)
    single = Case({name: t.float() for name, t in wide.inputs.items()}, wide.options)
    lse = run_eager(single, oracle, grad=False)["lse"]
    if detect(q.device).is_hopper and case.inputs["q"].element_size() == 1:
        # the products as queries of the identity
        products = hopper_products(case.inputs["q"], case.inputs["k"]).transpose(1, 2)
        products = products * descale_of(case, "q") * descale_of(case, "k", q.shape[2])
        options = {"softmax_scale": q.shape[-1] ** -0.5, **wide.options}
        _, cut = attention_reference(products, identity, identity, **options, return_lse=True)
        lse = torch.where((cut - oracle["lse"]).abs() > (lse - oracle["lse"]).abs(), cut, lse)
    return Judged(oracle["out"], oracle["lse"], out, lse)


def hopper_products(q: Tensor, k: Tensor) -> Tensor:
    """Products of queries and keys, [batch, heads_q, seqlen_q, seqlen_k], as Hopper sums them.

    32 products at a time are brought to the exponent of the largest, lose what lies below its 13th
    fraction bit, and are added; so does the sum, which then joins others in fp32.
    """
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    q, k = q.float().transpose(1, 2), k.float().transpose(1, 2)
    batches = []
    for q_one, k_one in zip(q, k, strict=True):
        total = torch.zeros(*q_one.shape[:2], k_one.shape[1], dtype=torch.float64, device=q.device)
        for q_part, k_part in zip(q_one.split(32, -1), k_one.split(32, -1), strict=True):
            products = q_part[:, :, None] * k_part[:, None]  # exact: 8 bits
            products = cut_off(products, products.abs().amax(-1, keepdim=True))
            part = products.double().sum(-1)
            total += cut_off(part, part.abs())
        batches.append(total)
    return torch.stack(batches)


def cut_off(x: Tensor, largest: Tensor, bits: int = 13) -> Tensor:
    """Cut off what lies below so many fraction bits of ``largest``."""
    # frexp's fractions begin with a half
    unit = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 1 - bits)
    return torch.where(largest == 0, x, torch.trunc(x / unit) * unit)


def assert_accurate(case, fp8) -> None:
    out, lse = case()
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    want = judged(case, fp8)
    assert_no_worse_than_eager("out", out, want.emulated_out.to(out.dtype), want.out)
    # how sums are cut off between instructions is not documented: a unit of 13 fraction bits
    eps = 2.0**-13 if detect(lse.device).is_hopper else None
    assert_no_worse_than_eager("lse", lse, want.emulated_lse, want.lse, eps=eps)
    given = {**case.inputs, **case.options, "truncates": truncates(out)}
    assert_within({"out": out, "lse": lse}, attention_bounds(**given))


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
