"""Helpers of invariant tests that other tests use too."""

from __future__ import annotations

import random
from typing import Any

import torch
from prefix_prefill import paged_attn_func
from torch import Tensor

from .._linked.budget import Maker, assert_same, offsets
from .._numerics import NHD, check, in_layout


def check_invariant(case: Any) -> None:
    """Hold a call to its budget; the reference has no such argument."""
    call = type(case).__call__

    class Invariant(type(case)):
        def __call__(self, **changes: Any) -> dict[str, Tensor]:
            return call(self, invariant=True, **changes)

    check(Invariant(case.inputs, case.options))


class Sequence:
    """The tokens of a sequence, and its result in one prefill."""

    def __init__(
        self,
        n: int,
        dtype: torch.dtype,
        device: Any,
        seed: int,
        fp8: bool = False,
        head_dim_v: int = 16,
        **options: Any,
    ) -> None:
        m = Maker(device, dtype, seed)
        self.n, self.options = n, options
        self.q, self.k, self.v = m.randn(n, 4, 16), m.randn(n, 2, 16), m.randn(n, 2, head_dim_v)
        self.out, self.lse = attend([(self, 0, n)], 16, fp8=fp8)


def attend(
    chunks: list[tuple[Sequence, int, int]],
    page: int,
    layout: str = NHD,
    *,
    dense: bool = False,
    fp8: bool = False,
    padding: int = 0,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Attend chunks of sequences, whose keys up to the chunk's end lie in pages in no order."""
    draw = random.Random(seed)
    s = chunks[0][0]
    counts = [-(-end // page) for _, _, end in chunks]
    order = draw.sample(range(sum(counts) + 2), sum(counts))
    table = torch.full((len(chunks), max(counts)), sum(counts) + 1, dtype=torch.int64)
    dtype = torch.float8_e4m3fn if fp8 else s.q.dtype
    shapes = [(sum(counts) + 2, page, *x.shape[1:]) for x in (s.k, s.v)]
    caches = [torch.full(shape, float("nan")).to(dtype) for shape in shapes]
    for b, (one, begin, end) in enumerate(chunks):
        pages = [order.pop() for _ in range(counts[b])]
        table[b, : counts[b]] = torch.tensor(pages)
        keys = torch.arange(begin if dense else end)
        slots = torch.tensor(pages)[keys // page] * page + keys % page
        k, v = one.k[: len(keys)].cpu(), one.v[: len(keys)].cpu()
        for cache, x in zip(caches, (k, v), strict=True):
            stored = x.to(dtype)
            as_bytes = (lambda t: t.view(torch.uint8)) if fp8 else (lambda t: t)
            as_bytes(cache).flatten(0, 1)[slots] = as_bytes(stored)
    q, new_k, new_v = (
        torch.cat(
            [*(x[begin:end] for x, begin, end in parts), parts[0][0][:1].expand(padding, -1, -1)]
        )
        for parts in (
            [(one.q, begin, end) for one, begin, end in chunks],
            [(one.k, begin, end) for one, begin, end in chunks],
            [(one.v, begin, end) for one, begin, end in chunks],
        )
    )
    lengths = [end - begin for _, begin, end in chunks]
    device = q.device
    k_cache, v_cache = (
        in_layout(x, layout, which).to(device) for x, which in zip(caches, "kv", strict=True)
    )
    out, lse = paged_attn_func(
        q,
        k_cache,
        v_cache,
        table.to(device),
        offsets(lengths, device),
        torch.tensor([end for _, _, end in chunks], dtype=torch.int32, device=device),
        max(lengths),
        max(end for _, _, end in chunks),
        **({"k": new_k, "v": new_v} if dense else {}),
        **s.options,
        invariant=True,
        return_lse=True,
    )
    return out, lse


def assert_the_same(chunks: list[tuple[Sequence, int, int]], *how: Any, **more: Any) -> None:
    """Require that chunks in one call give what prefills of whole sequences gave."""
    out, lse = attend(chunks, *how, **more)
    at = 0
    for s, begin, end in chunks:
        rows = slice(at, at + end - begin)
        got = {"out": out[rows], "lse": lse[:, rows]}
        assert_same(got, {"out": s.out[begin:end], "lse": s.lse[:, begin:end]}, f"{begin}-{end} ")
        at = rows.stop
