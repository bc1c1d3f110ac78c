"""Helpers of fp8 tests that other tests use too."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from attn_common import detect, fp8_dtype
from flash_attn_triton import attention_reference
from torch import Tensor

from .._linked.bounds import attention_bounds
from .._linked.budget import Maker, assert_no_worse_than_eager
from .._linked.rounding import assert_within
from .._numerics import Case, run_eager, run_oracle, truncates


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
