"""Inputs of a problem, and the comparison with fp32 attention over the mask of its tokens."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from _linked.checks import attend, relative_error
from blocksparse_attn import BlockSparseLayout
from cases import Problem
from torch import Tensor

# rows of queries at a time
CHUNK = 512
# largest relative error (Frobenius) of the heads that are compared
TOLERANCE = 2e-2
# tokens up to which every head is compared; of longer sequences the first and the last group
ALL_HEADS = 4096


@dataclass
class Inputs:
    """Operands, the layout and what is known of it."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    layout: BlockSparseLayout
    density: float

    @property
    def given(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v


def first_keys(density: float, seqlen: int) -> int:
    """Return how many keys come to about as many products: steps of 128, as of tiles."""
    return max(round(density * seqlen / 2 / 128), 1) * 128


def make_inputs(problem: Problem, device: str, seed: int = 0) -> Inputs:
    """Draw bf16 normal operands."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def draw(tokens: int, heads: int) -> Tensor:
        shape = (problem.batch, tokens, heads, problem.head_dim)
        return torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)

    queries = problem.queries or problem.seqlen
    layout = problem.layout(device)
    q, k, v = draw(queries, problem.heads_q), *(draw(problem.seqlen, problem.heads_k) for _ in "kv")
    return Inputs(q, k, v, draw(queries, problem.heads_q), layout, layout.density(problem.seqlen))


def compared(problem: Problem) -> list[int]:
    """Return the heads of keys whose groups are compared."""
    if problem.seqlen > ALL_HEADS:
        return [0, problem.heads_k - 1]
    return list(range(problem.heads_k))


@torch.no_grad()
def reference(
    problem: Problem, inputs: Inputs, passes: tuple[str, ...], sees: str = "layout"
) -> dict[str, Tensor]:
    """Return ``out``, and for the backward ``dq``, ``dk`` and ``dv``, in fp32.

    Args:
        problem: What to compute.
        inputs: Its tensors.
        passes: ``bwd`` among them if gradients are wanted.
        sees: What queries see: the ``layout``, the ``causal`` whole, or the ``first`` keys.
    """
    q, k, v, dout = (x.float() for x in (*inputs.given, inputs.dout))
    backward = "bwd" in passes
    names = ["out", "dq", "dk", "dv"] if backward else ["out"]
    results = {name: torch.zeros_like(x) for name, x in zip(names, (dout, q, k, v), strict=False)}
    blocks = inputs.layout.to_dense()
    blocks = blocks.expand(problem.heads_q, *blocks.shape[1:])
    key = torch.arange(problem.seqlen, device=q.device)
    offset = problem.seqlen - q.shape[1]
    first = first_keys(inputs.density, problem.seqlen)
    for b in range(problem.batch):
        for head in compared(problem):
            heads = slice(head * problem.group, (head + 1) * problem.group)
            for begin in range(0, q.shape[1], CHUNK):
                rows = slice(begin, min(begin + CHUNK, q.shape[1]))
                position = torch.arange(rows.start, rows.stop, device=q.device) + offset
                hidden = (key > position[:, None])[None]
                if sees == "first":
                    hidden = (key >= first).expand_as(hidden)
                if sees == "layout":
                    kept = blocks[heads][:, position // problem.block]
                    hidden = hidden | ~kept[:, :, key // problem.block]
                found = attend(
                    q[b, rows, heads].transpose(0, 1),
                    k[b, :, head],
                    v[b, :, head],
                    dout[b, rows, heads].transpose(0, 1) if backward else None,
                    problem.head_dim**-0.5,
                    hidden=hidden,
                )
                results["out"][b, rows, heads] = found.out.transpose(0, 1)
                if backward:
                    results["dq"][b, rows, heads] = found.dq.transpose(0, 1)
                    results["dk"][b, :, head] += found.dk
                    results["dv"][b, :, head] += found.dv
    return results


@functools.lru_cache(maxsize=4)
def _causal(problem: Problem, device: str, passes: tuple[str, ...]) -> dict[str, Tensor]:
    return reference(problem, make_inputs(problem, device), passes, "causal")


def dense_reference(problem: Problem, inputs: Inputs, passes: tuple[str, ...]) -> dict[str, Tensor]:
    """Return what dense providers are held to: cases that differ in their layout share it."""
    plain = {"name": "", "family": "dense", "block": 64, "local": 0, "stride": 0}
    alike = replace(problem, homo=False, density=1.0, **plain)
    return _causal(alike, inputs.q.device.type, passes)


def judge(problem: Problem, one: str, got: Any, expected: dict[str, Tensor]) -> tuple[bool, float]:
    """Return whether a result is right, and its largest relative error; NaN never passes."""
    names, tensors = (("out",), (got,)) if one == "fwd" else (("dq", "dk", "dv"), got)
    found = []
    for name, x in zip(names, tensors, strict=True):
        heads = compared(problem)
        if name in ("out", "dq"):
            heads = [h * problem.group + i for h in heads for i in range(problem.group)]
        want = expected[name][:, : x.shape[1], heads]
        found.append(relative_error(x[:, :, heads], want))
    return all(error <= TOLERANCE for error in found), max(found)
