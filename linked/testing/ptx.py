"""Runs inline PTX that moves and widens bytes, on tensors of 32-bit words."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor

_ALL = 2**32 - 1
_HALVES = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}


def run_on_words(text: str, words: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the 16-bit numbers that PTX code makes of words.

    All inputs of a thread are the same word, once per number. Each output holds two numbers, in
    order.
    """
    outputs = sorted(set(re.findall(r"\$\d+(?=, )", text)) & _written(text))
    group = 2 * len(outputs)
    names = {f"${n}": words[..., ::group].long() & _ALL for n in range(len(outputs), 3 * group)}
    for statement in _statements(text):
        name, *operands = re.split(r"[ ,]+", statement)
        if name != ".reg":
            target, *sources = operands
            names[target] = _OPERATIONS[name](*(_value(x, names) for x in sources))
    pairs = torch.stack([names[name] for name in outputs], -1)
    halves = torch.stack([pairs & 0xFFFF, pairs >> 16], -1)
    return _number(halves, dtype).reshape(words.shape)


def _statements(text: str) -> list[str]:
    return [x.strip() for x in text.strip().strip("{}").split(";") if x.strip()]


def _written(text: str) -> set[str]:
    return {re.split(r"[ ,]+", x)[1] for x in _statements(text)}


def _value(name: str, names: dict[str, Tensor]) -> Tensor:
    return names[name] if name in names else torch.tensor(int(name, 0))


def _number(bits: Tensor, dtype: torch.dtype) -> Tensor:
    return bits.to(torch.int32).to(torch.int16).view(dtype)


def _by_halves(dtype: torch.dtype, of: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return an operation on both 16-bit halves of words, rounded once."""

    def operation(*words: Tensor) -> Tensor:
        low, high = (
            of(*(_number(w >> shift & 0xFFFF, dtype).double() for w in words))
            .to(dtype)
            .view(torch.int16)
            .long()
            & 0xFFFF
            for shift in (0, 16)
        )
        return low | high << 16

    return operation


def _permuted(a: Tensor, b: Tensor, selector: Tensor) -> Tensor:
    both = a | b << 32
    chosen = [int(selector) >> 4 * i & 15 for i in range(4)]
    assert max(chosen) < 8, "replicated signs"
    return sum((both >> 8 * n & 255) << 8 * i for i, n in enumerate(chosen))  # type: ignore[return-value]


def _by_table(a: Tensor, b: Tensor, c: Tensor, table: Tensor) -> Tensor:
    """Return the result of ``lop3``: three bits select a bit of the table."""
    made = torch.zeros_like(a)
    for n in range(8):
        if int(table) >> n & 1:
            bits = [x if n >> place & 1 else ~x & _ALL for x, place in ((a, 2), (b, 1), (c, 0))]
            made = made | (bits[0] & bits[1] & bits[2])
    return made


_OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "mov.b32": lambda a: a,
    "shr.u32": lambda a, b: a >> b,
    "xor.b32": lambda a, b: a ^ b,
    "prmt.b32": _permuted,
    "lop3.b32": _by_table,
    **{f"fma.rn.{n}": _by_halves(t, lambda a, b, c: a * b + c) for n, t in _HALVES.items()},
    **{f"sub.rn.{n}": _by_halves(t, lambda a, b: a - b) for n, t in _HALVES.items()},
}
