"""Helpers of invariant tests that other tests use too."""

from __future__ import annotations

from typing import Any

import torch
from flash_attn_triton import (
    flash_attn_func,
    flash_attn_varlen_func,
)

from .._linked.budget import Maker, assert_same, offsets
from .._numerics import Case


class InvariantCase(Case):
    """A case whose function keeps the law; its reference has no such argument."""

    @property
    def function(self) -> Any:
        function = super().function
        return lambda *inputs, **options: function(*inputs, **options, invariant=True)


def invariant(case: Case) -> InvariantCase:
    return InvariantCase(case.inputs, case.options, case.packed)


class Sequence:
    """One sequence, and its result in one call."""

    def __init__(self, n: int, dtype: torch.dtype, device: Any, seed: int, **options: Any) -> None:
        m = Maker(device, dtype, seed)
        self.n, self.options = n, {"causal": True, **options}
        self.q, self.k, self.v = m.randn(n, 2, 16), m.randn(n, 1, 16), m.randn(n, 1, 24)
        inputs = (x[None] for x in (self.q, self.k, self.v))
        out, lse = flash_attn_func(*inputs, **self.options, invariant=True, return_lse=True)
        self.out, self.lse = out[0], lse[0]


def assert_chunks_are_the_same(chunks: list[tuple[Sequence, int, int]], padding: int = 0) -> None:
    """Require that chunks of sequences in one packed call give what the whole ones gave."""
    empty = chunks[0][0].q[:0]
    q = [s.q[begin:end] for s, begin, end in chunks]
    k = [s.k[:end] for s, _, end in chunks]
    v = [s.v[:end] for s, _, end in chunks]
    starts_q = offsets([len(x) for x in q], empty.device)
    starts_k = offsets([len(x) for x in k], empty.device)
    q.append(torch.full_like(chunks[0][0].q, float("nan"))[:padding])
    most = max(len(x) for x in q), max(len(x) for x in k)
    out, lse = flash_attn_varlen_func(
        *map(torch.cat, (q, k, v)),
        starts_q,
        starts_k,
        *most,
        **chunks[0][0].options,
        invariant=True,
        return_lse=True,
    )
    for (s, begin, end), at in zip(chunks, starts_q.tolist(), strict=False):
        rows = slice(at, at + end - begin)
        got = {"out": out[rows], "lse": lse[:, rows]}
        assert_same(got, {"out": s.out[begin:end], "lse": s.lse[:, begin:end]}, f"{begin}-{end} ")
