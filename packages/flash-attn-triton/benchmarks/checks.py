"""Tensors of a problem, fp32 attention with gradients, and the comparison with it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from _linked.checks import attend, errors
from cases import Problem
from torch import Tensor

# scores held at a time: 2**27 fp32 numbers are 512 MiB
CHUNK_SCORES = 2**27

# largest relative error (Frobenius) of a whole tensor and of its worst block, by input dtype
TOLERANCES = {"bf16": (1.5e-2, 6e-2), "fp8": (8e-2, 1.5e-1)}
# with dropout: of what it adds, by its expectation, and of its mean; a block of zeros has 1
DROPOUT_SPREAD, DROPOUT_MEAN, DROPOUT_BLOCK = 0.15, 0.04, 0.95


@dataclass
class Inputs:
    """Operands of one problem; packed ones have no batch dimension."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    cu_seqlens: Tensor
    bias: Tensor | None
    slopes: Tensor | None

    @property
    def given(self) -> tuple[Tensor, ...]:
        """Return the arguments of a function of q, k, v and perhaps a bias."""
        return (self.q, self.k, self.v, *(() if self.bias is None else (self.bias,)))


def make_inputs(problem: Problem, device: str, seed: int = 0) -> Inputs:
    """Draw bf16 normal operands."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)

    def leading(length: int) -> tuple[int, ...]:
        return (problem.tokens,) if problem.packed else (problem.batch, length)

    ends = [sum(problem.lengths[:i]) for i in range(problem.batch + 1)]
    tokens_q = leading(problem.queries or problem.max_seqlen)
    tokens_k = leading(problem.max_seqlen)
    slopes = None
    if problem.alibi:
        # a geometric series, as its authors have it
        steps = torch.arange(1, problem.heads_q + 1, device=device)
        slopes = torch.exp2(-8.0 * steps / problem.heads_q)
    return Inputs(
        draw(*tokens_q, problem.heads_q, problem.head_dim),
        draw(*tokens_k, problem.heads_k, problem.head_dim),
        draw(*tokens_k, problem.heads_k, problem.head_dim_v),
        draw(*tokens_q, problem.heads_q, problem.head_dim_v),
        torch.tensor(ends, dtype=torch.int32, device=device),
        draw(*problem.bias_shape) if problem.bias else None,
        slopes,
    )


def sequences(problem: Problem, device: str | torch.device) -> Iterator[tuple[slice, Tensor]]:
    """Yield each sequence's queries and the keys that face them; masks end at the last key."""
    start = start_q = 0
    for number, length in enumerate(problem.lengths):
        queries = problem.queries or length
        keys = torch.arange(start, start + length, device=device)
        if problem.tree and number > 0:
            keys = torch.cat((torch.arange(problem.lengths[0], device=device), keys))
        yield slice(start_q, start_q + queries), keys
        start += length
        start_q += queries


@torch.no_grad()
def reference(
    problem: Problem, inputs: Inputs, passes: tuple[str, ...], operands: tuple[Tensor, ...] = ()
) -> dict[str, Tensor]:
    """Return ``out``, and for a backward ``dq``, ``dk``, ``dv`` and ``dbias``: fp32.

    All are [tokens, heads, D], but ``dbias``, which is shaped like the bias. Scores are formed for
    one sequence, one key head and a chunk of rows at a time. Of dropout it is the expectation.

    Args:
        problem: What to compute.
        inputs: Its tensors.
        passes: ``bwd`` among them if gradients are wanted.
        operands: q, k and v in place of those of the inputs.
    """
    q, k, v = (t.flatten(0, -3).float() for t in operands or (inputs.q, inputs.k, inputs.v))
    dout = inputs.dout.flatten(0, -3).float()
    results = {"out": torch.zeros_like(dout)}
    backward = "bwd" in passes
    if backward:
        results |= {"dq": torch.zeros_like(q), "dk": torch.zeros_like(k)}
        results["dv"] = torch.zeros_like(v)
        if inputs.bias is not None:
            results["dbias"] = torch.zeros_like(inputs.bias, dtype=torch.float32)
    group = problem.heads_q // problem.heads_k
    for number, (queries, keys) in enumerate(sequences(problem, q.device)):
        if len(keys) == 0:
            continue
        length = queries.stop - queries.start
        diagonal = len(keys) - length
        rows = max(1, min(length, CHUNK_SCORES // (group * len(keys))))
        for head in range(problem.heads_k):
            heads = slice(head * group, (head + 1) * group)
            for first in range(0, length, rows):
                last = min(first + rows, length)
                at = slice(queries.start + first, queries.start + last)
                start = max(0, first + diagonal - problem.window) if problem.window else 0
                seen = keys[start : last + diagonal] if problem.causal else keys
                row = torch.arange(first, last, device=q.device)[:, None] + diagonal
                column = torch.arange(start, start + len(seen), device=q.device)[None]
                part = slice(first, last), slice(start, start + len(seen))
                hidden = column > row if problem.causal else None
                if problem.window:
                    hidden = hidden | (column < row - problem.window)
                # what is added to scores: [group, rows, keys], or [rows, keys] for all heads
                added: Tensor | float = 0.0
                if inputs.bias is not None:
                    added = _bias_of(inputs.bias, number, heads)[(..., *part)]
                if inputs.slopes is not None:
                    added = added - inputs.slopes[heads, None, None] * (row - column).abs()
                found = attend(
                    q[at, heads].transpose(0, 1),
                    k[seen, head],
                    v[seen, head],
                    dout[at, heads].transpose(0, 1) if backward else None,
                    problem.head_dim**-0.5,
                    added,
                    hidden,
                )
                results["out"][at, heads] = found.out.transpose(0, 1)
                if backward:
                    results["dq"][at, heads] = found.dq.transpose(0, 1)
                    results["dk"][:, head].index_add_(0, seen, found.dk)
                    results["dv"][:, head].index_add_(0, seen, found.dv)
                    if "dbias" in results:
                        dbias = _bias_of(results["dbias"], number, heads)
                        dbias[(..., *part)] += found.ds.sum(0) if dbias.ndim == 2 else found.ds
    return results


def _bias_of(bias: Tensor, sequence: int, heads: slice) -> Tensor:
    """Return a sequence's part of a bias: [group, rows, keys], or [rows, keys] for all heads."""
    own = bias[0 if bias.shape[0] == 1 else sequence]
    return own[0] if own.shape[0] == 1 else own[heads]


def judge(
    actual: dict[str, Tensor], expected: dict[str, Tensor], problem: Problem
) -> tuple[bool, dict[str, tuple[float, float]]]:
    """Return whether all tensors are right, and their errors; NaN never passes.

    With dropout, whose draws are each provider's own, results must be off by as much as it takes,
    and on the expectation in the mean.
    """
    found = {name: errors(tensor, expected[name]) for name, tensor in actual.items()}
    if problem.dropout:
        spread = math.sqrt(problem.dropout / (1.0 - problem.dropout))
        sample = 3.0 / math.sqrt(problem.tokens)
        off = [abs(whole / spread - 1.0) for whole, _ in found.values()]
        blocks = [block for _, block in found.values()]
        means = [_share(tensor, expected[name]) for name, tensor in actual.items()]
        right = all(one <= DROPOUT_SPREAD + sample for one in off)
        right &= all(one <= DROPOUT_BLOCK for one in blocks)
        return right and all(abs(one - 1.0) <= DROPOUT_MEAN + sample for one in means), found
    most, worst = TOLERANCES[problem.dtype]
    return all(one <= most and block <= worst for one, block in found.values()), found


def _share(actual: Tensor, expected: Tensor) -> float:
    """Return how much of what is expected is there."""
    x = actual.detach().reshape(expected.shape).float()
    return ((x * expected).sum() / expected.square().sum()).item()
