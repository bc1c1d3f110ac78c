"""Chunked fp32 attention with gradients, and the comparison that every provider has to pass.

Deliberately apart from the package under test: it is the benchmark's own arbiter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from cases import Problem

# scores held at a time: 2**27 fp32 numbers are 512 MiB
CHUNK_SCORES = 2**27

# rows of one head whose error is judged together: a wrong tile must not drown in a long sequence
BLOCK_ROWS = 64

# largest relative error (Frobenius) of a whole tensor and of its worst block, by input dtype
TOLERANCES = {"bf16": (1.5e-2, 6e-2), "fp8": (8e-2, 1.5e-1)}


@dataclass
class Inputs:
    """Operands of one problem; packed ones have no batch dimension."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    cu_seqlens: torch.Tensor


def make_inputs(problem: Problem, device: str, seed: int = 0) -> Inputs:
    """Draw bf16 normal operands."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def draw(heads: int, length: int = problem.max_seqlen) -> torch.Tensor:
        leading = (problem.tokens,) if problem.packed else (problem.batch, length)
        shape = (*leading, heads, problem.head_dim)
        return torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)

    ends = [sum(problem.lengths[:i]) for i in range(problem.batch + 1)]
    queries = problem.queries or problem.max_seqlen
    return Inputs(
        draw(problem.heads_q, queries),
        draw(problem.heads_k),
        draw(problem.heads_k),
        draw(problem.heads_q, queries),
        torch.tensor(ends, dtype=torch.int32, device=device),
    )


@torch.no_grad()
def reference(
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Return ``out``, with ``dout`` also ``dq``, ``dk`` and ``dv``: fp32, [tokens, heads, D].

    Scores are formed for one sequence, one key head and a chunk of rows at a time.
    """
    flat = [t.flatten(0, -3).float() for t in (q, k, v)]
    names = ["out"]
    results = {"out": torch.zeros_like(flat[0])}
    if dout is not None:
        dout = dout.flatten(0, -3).float()
        names += ["dq", "dk", "dv"]
        results |= {name: torch.zeros_like(t) for name, t in zip(names[1:], flat, strict=True)}
    group = problem.heads_q // problem.heads_k
    scale = problem.head_dim**-0.5
    start = start_q = 0
    for length in problem.lengths:
        queries = problem.queries or length
        rows = max(1, min(queries, CHUNK_SCORES // (group * length)))
        for head in range(problem.heads_k):
            heads = slice(head * group, (head + 1) * group)
            for first in range(0, queries, rows):
                last = min(first + rows, queries)
                seen = last if problem.causal else length
                at = slice(start_q + first, start_q + last)
                keys = slice(start, start + seen)
                q_here = flat[0][at, heads].transpose(0, 1)  # [group, rows, D]
                k_here = flat[1][keys, head]  # [keys, D]
                v_here = flat[2][keys, head]
                p = torch.matmul(q_here, k_here.t()).mul_(scale)  # [group, rows, keys]
                if problem.causal:
                    row = torch.arange(first, last, device=q.device)[:, None]
                    p.masked_fill_(torch.arange(seen, device=q.device)[None] > row, -math.inf)
                p = torch.softmax(p, dim=-1)
                out = torch.matmul(p, v_here)
                results["out"][at, heads] = out.transpose(0, 1)
                if dout is None:
                    continue
                do = dout[at, heads].transpose(0, 1)
                results["dv"][keys, head] += torch.einsum("grk,grd->kd", p, do)
                ds = torch.matmul(do, v_here.t()).sub_((do * out).sum(-1, keepdim=True))
                ds.mul_(p).mul_(scale)
                results["dq"][at, heads] = torch.matmul(ds, k_here).transpose(0, 1)
                results["dk"][keys, head] += torch.einsum("grk,grd->kd", ds, q_here)
        start += length
        start_q += queries
    return results


def errors(actual: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Return the relative error of a tensor and that of its worst block of rows of one head."""
    if actual.numel() != expected.numel():
        raise ValueError(f"expected {expected.numel()} numbers, got {tuple(actual.shape)}")
    difference = actual.detach().reshape(expected.shape).float() - expected
    # [tokens, heads]: squares summed over the head dimension
    wrong, right = difference.square().sum(-1), expected.square().sum(-1)
    whole = (wrong.sum() / right.sum()).sqrt().item()
    tokens = wrong.shape[0] // BLOCK_ROWS * BLOCK_ROWS
    if tokens == 0:
        return whole, whole
    blocks = [t[:tokens].reshape(-1, BLOCK_ROWS, t.shape[1]).sum(1) for t in (wrong, right)]
    # max() passes NaN on
    return whole, (blocks[0] / blocks[1]).max().sqrt().item()


def judge(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], dtype: str
) -> tuple[bool, dict[str, tuple[float, float]]]:
    """Return whether all tensors are right, and their errors; NaN never passes."""
    most, worst = TOLERANCES[dtype]
    found = {name: errors(tensor, expected[name]) for name, tensor in actual.items()}
    return all(one <= most and block <= worst for one, block in found.values()), found
