"""Tensors of a problem, fp32 attention over what a cache stands for, and the comparison with it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from cases import Problem
from prefix_prefill import reshape_and_cache

FP8 = torch.float8_e4m3fn
# a cache's dtype, by its format
STORED = {"bf16": torch.bfloat16, "fp8": FP8, "int8": torch.int8, "int4": torch.uint8}
# of an FP8 cache: its largest number, 448, stands for 7 standard deviations
FP8_SCALE = 2.0**-6
# rows of every sequence that a result is judged by
ROWS = 64
# largest relative error (Frobenius) of all these rows, and of the worst sequence
TOLERANCES = (1.5e-2, 3e-2)


@dataclass
class Inputs:
    """Tensors of one problem; ``k`` and ``v`` lie beside the cache, or are None.

    ``scales`` are arguments of ``paged_attn_func`` that say what numbers of the cache mean.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k: torch.Tensor | None
    v: torch.Tensor | None
    table: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    scales: dict[str, Any]

    @property
    def given(self) -> tuple[torch.Tensor, ...]:
        """Return what every paged call takes first."""
        return self.q, self.k_cache, self.v_cache, self.table, self.starts, self.lengths


def make_inputs(problem: Problem, device: str, seed: int = 0) -> Inputs:
    """Draw bf16 normal operands, and pages in no order."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)

    cached = [old if problem.dense else new + old for new, old in problem.lengths]
    counts = [-(-n // problem.page) for n in cached]
    order = torch.randperm(max(1, sum(counts)), device=device, generator=generator)
    table = torch.zeros((len(counts), max(1, *counts)), dtype=torch.int32, device=device)
    for b, count in enumerate(counts):
        table[b, :count] = order[sum(counts[:b]) : sum(counts[: b + 1])]
    head_dims = problem.head_dim, problem.head_dim_v or problem.head_dim
    caches = [draw(len(order), problem.page, problem.heads_k, d) for d in head_dims]
    scales: dict[str, Any] = {}
    if problem.cache != "bf16":
        caches, scales = _stored(caches, problem.cache)
    if problem.layout == "packed":
        x = 16 // caches[0].element_size()
        caches[0] = caches[0].unflatten(3, (-1, x)).permute(0, 2, 3, 1, 4).contiguous()
        caches[1] = caches[1].permute(0, 2, 3, 1).contiguous()
    q = draw(problem.tokens, problem.heads_q, problem.head_dim)
    new = [None, None]
    if problem.dense:
        new = [draw(problem.tokens, problem.heads_k, d) for d in head_dims]
    ends = [sum(n for n, _ in problem.lengths[:b]) for b in range(len(counts) + 1)]
    keys = [new + old for new, old in problem.lengths]
    return Inputs(
        q,
        caches[0],
        caches[1],
        new[0],
        new[1],
        table,
        torch.tensor(ends, dtype=torch.int32, device=device),
        torch.tensor(keys, dtype=torch.int32, device=device),
        scales,
    )


def _stored(drawn: list[torch.Tensor], kind: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Let the package write keys and values into caches of a format; return its scales, too."""
    device, (pages, page, heads_k, _) = drawn[0].device, drawn[0].shape
    per_byte = 2 if kind == "int4" else 1
    caches = [torch.empty_like(t[..., ::per_byte], dtype=STORED[kind]) for t in drawn]
    slots = torch.arange(pages * page, device=device)
    rows = [t.flatten(0, 1) for t in drawn]
    if kind == "fp8":
        scale = torch.full((1,), FP8_SCALE, device=device)
        reshape_and_cache(*rows, *caches, slots, k_scale=scale, v_scale=scale)
        return caches, {"k_descale": scale, "v_descale": scale}
    scales: dict[str, Any] = {
        name: torch.empty(pages, page, heads_k, dtype=torch.float16, device=device)
        for name in ("k_scale_cache", "v_scale_cache")
    }
    scales["kv_dtype"] = kind
    reshape_and_cache(*rows, *caches, slots, **scales)
    return caches, scales


def _in_order(x: Inputs, problem: Problem, b: int) -> list[torch.Tensor]:
    """Return the keys and values of one sequence, fp32 ``[heads_k, keys, D]``."""
    new, old = problem.lengths[b]
    cached = old if problem.dense else new + old
    pages = x.table[b, : -(-cached // problem.page)].long()
    found = []
    for name, cache, fresh in (("k", x.k_cache, x.k), ("v", x.v_cache, x.v)):
        # indexing knows no FP8
        raw = cache.view(torch.uint8) if cache.dtype == FP8 else cache
        part = raw[pages].view(cache.dtype)
        if part.ndim == 5:
            part = part.permute(0, 3, 1, 2, 4).flatten(3)
        elif problem.layout == "packed":
            part = part.permute(0, 3, 1, 2)
        if problem.cache == "int4":
            part = torch.stack([part & 15, part >> 4], -1).flatten(3).to(torch.int8)
            part = (part ^ 8) - 8  # in two's complement
        part = part.float()
        if problem.cache == "fp8":
            part = part * x.scales[f"{name}_descale"]
        elif problem.cache != "bf16":
            part = part * x.scales[f"{name}_scale_cache"][pages].float()[..., None]
        part = part.flatten(0, 1)[:cached]
        if fresh is not None:
            at = int(x.starts[b])
            part = torch.cat([part, fresh[at : at + new].float()])
        found.append(part.transpose(0, 1))
    return found


class Expected(NamedTuple):
    """Some rows of a sequence, and what fp32 attention makes of them, ``[rows, heads_q, Dv]``."""

    rows: torch.Tensor
    out: torch.Tensor


@torch.no_grad()
def reference(problem: Problem, x: Inputs, passes: tuple[str, ...] = ("",)) -> list[Expected]:
    """Return fp32 attention over the numbers that the cache stands for, of every sequence."""
    found = []
    group = problem.heads_q // problem.heads_k
    for b, (new, old) in enumerate(problem.lengths):
        k, v = _in_order(x, problem, b)
        rows = torch.linspace(0, new - 1, min(new, ROWS), device=x.q.device).long()
        at = int(x.starts[b]) + rows
        q = x.q[at].float().unflatten(1, (-1, group)).permute(1, 2, 0, 3)  # [heads_k, group, n, D]
        s = torch.matmul(q, k[:, None].transpose(2, 3)) * problem.head_dim**-0.5
        key = torch.arange(new + old, device=x.q.device)
        position = (rows + old)[:, None]
        hidden = key > position
        if problem.window >= 0:
            hidden |= key < position - problem.window
        p = s.masked_fill_(hidden, -math.inf).softmax(-1)
        found.append(Expected(at, torch.matmul(p, v[:, None]).permute(2, 0, 1, 3).flatten(1, 2)))
    return found


def judge(
    problem: Problem, one: str, out: torch.Tensor, expected: list[Expected]
) -> tuple[bool, float]:
    """Compare an output with the reference; return the error of the worst sequence."""
    wrong = [(out[one.rows].float() - one.out).square().sum() for one in expected]
    right = [one.out.square().sum() for one in expected]
    errors, sizes = torch.stack([torch.stack(wrong), torch.stack(right)]).cpu().double()
    whole = math.sqrt(errors.sum() / sizes.sum())
    worst = math.sqrt((errors / sizes).max())
    # NaN passes no comparison
    return whole <= TOLERANCES[0] and worst <= TOLERANCES[1], worst
