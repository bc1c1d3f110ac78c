"""Attention as the definition has it, in the numbers of Triton's FpSan; see docs/testing.md.

FpSan takes a floating-point number of w bits for an integer modulo ``2**w``, its payload. Payloads
are int64 tensors here, from ``-2**(w-1)`` on; where no width is named, it is 32.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

# Triton 3.9 multiplies the bits by it
ODD = 14940041
# exp2(x) is this to the power of x
BASE = 257
LOG2E = 1.4426950408889634
_BITS = {2: torch.int16, 4: torch.int32}


def wrap(x: Tensor, width: int = 32) -> Tensor:
    """Return ``x`` modulo ``2**width``: sums of payloads, or a cast to fewer bits."""
    half = 1 << (width - 1)
    return ((x + half) & (2 * half - 1)) - half


# ---- numbers and payloads


def _mixing(dtype: torch.dtype) -> tuple[int, int, int]:
    """Return all bits but the sign's, the width of the fraction, and what makes 1.0 a 1."""
    low = (1 << (8 * dtype.itemsize - 1)) - 1
    fraction = -round(math.log2(torch.finfo(dtype).eps))
    one = int(torch.ones((), dtype=dtype).view(_BITS[dtype.itemsize])) * ODD & low
    return low, fraction, pow(one ^ (one >> fraction), -1, low + 1)


def embed(x: Tensor) -> Tensor:
    """Return the payloads of bf16, fp16 or fp32 numbers."""
    low, fraction, factor = _mixing(x.dtype)
    bits = x.view(_BITS[x.dtype.itemsize]).long()
    mixed = (bits & low) * ODD & low
    mixed = (mixed ^ (mixed >> fraction)) * factor & low
    return torch.where(bits < 0, (-mixed & low) - low - 1, mixed)


def unembed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers that have these payloads."""
    low, fraction, factor = _mixing(dtype)
    mixed = x.abs() * pow(factor, -1, low + 1) & low
    shift = fraction
    while shift < 8 * dtype.itemsize:
        mixed = mixed ^ (mixed >> shift)
        shift *= 2
    bits = mixed * pow(ODD, -1, low + 1) & low
    bits = torch.where(x < 0, bits - low - 1, bits)
    return bits.to(_BITS[dtype.itemsize]).view(dtype)


def constant(x: float) -> Tensor:
    """Return the payload of a number that a kernel has in fp32."""
    return embed(torch.tensor(x, dtype=torch.float32))


# ---- arithmetic


def product(*factors: Tensor) -> Tensor:
    return functools.reduce(lambda a, b: wrap(a * b), factors)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of matrices of 16-bit payloads, whose sums float64 holds."""
    return wrap((a.double() @ b.double()).long())


def inverse(x: Tensor) -> Tensor:
    """Return ``1 / x`` of odd payloads; an even one has its odd neighbour's, less 1."""
    odd = x | 1
    found = wrap(2 - odd)
    for _ in range(4):
        found = product(found, wrap(2 - product(odd, found)))
    return found - 1 + (x & 1)


def exp2(x: Tensor) -> Tensor:
    """Return ``BASE**x``, which is odd."""
    found, power = torch.ones_like(x), torch.tensor(BASE)
    for bit in range(24):  # BASE**(2**24) is 1
        found = torch.where((x >> bit) & 1 == 1, product(found, power), found)
        power = product(power, power)
    return found


def tanh(x: Tensor) -> Tensor:
    """Return what the kernels compute, whose comparisons are of numbers; see primitives.tanh."""
    number = unembed(x, torch.float32)
    square = product(x, x)

    def series(*coefficients: float) -> Tensor:
        found = constant(coefficients[-1])
        for coefficient in reversed(coefficients[:-1]):
            found = wrap(constant(coefficient) + product(square, found))
        return found

    poly = series(-1 / 3, 2 / 15, -17 / 315, 62 / 2835, -1382 / 155925)
    near = wrap(x + product(x, square, poly))
    decay = exp2(product(embed(number.abs()), constant(-2 * LOG2E)))
    far = product(wrap(1 - decay), inverse(wrap(1 + decay)))
    far = torch.where(number < 0, wrap(-far), far)
    return torch.where(number.abs() < 0.35, near, far)


# ---- attention


def scores(q: Tensor, k: Tensor) -> Tensor:
    """Return the products ``[rows, keys]`` of one head's bf16 or fp16 queries and keys."""
    return matmul(embed(q), embed(k).T)


def logits(s: Tensor, scale: float, softcap: float = 0.0) -> Tensor:
    """Return scores to base 2."""
    if softcap == 0.0:
        return product(s, constant(scale), constant(LOG2E))
    capped = tanh(product(s, constant(scale), inverse(constant(softcap))))
    return product(capped, constant(softcap), constant(LOG2E))


def attend(logits: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    """Return the output of one head, whose sink is a key without a value."""
    weights = exp2(logits)
    total = weights.sum(1) + exp2(product(embed(sink), constant(LOG2E)))
    sums = matmul(wrap(weights, 16), embed(v))
    out = product(sums, inverse(wrap(total))[:, None])
    return unembed(wrap(out, 16), v.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, softcap: float = 0.0) -> Tensor:
    """Return ``softmax(cap(q @ k.T / sqrt(head_dim))) @ v`` of ``[tokens, heads, head_dim]``.

    The numbers are bf16 or fp16, ``sinks`` fp32, one a head of ``q``. Every row sees every key.
    """
    group = q.shape[1] // k.shape[1]
    scale = q.shape[2] ** -0.5
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    heads = zip(q.unbind(1), k.unbind(1), v.unbind(1), sinks, strict=True)
    made = [attend(logits(scores(q, k), scale, softcap), v, sink) for q, k, v, sink in heads]
    return torch.stack(made, 1)
