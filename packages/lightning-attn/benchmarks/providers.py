"""Tensors of a problem, who computes it, and what that is held to.

Every provider gets the same memory, ``[batch, seqlen, heads, d]`` or packed ``[tokens, heads, d]``.
"""

from __future__ import annotations

import importlib
import itertools
import os
import sys
from dataclasses import dataclass
from typing import Any

import torch
from _linked.checks import relative_error
from _linked.providers import Prepared, Provider, by_name, with_autograd
from cases import Problem, Step
from lightning_attn import (
    build_slopes,
    lightning_attention_decode_reference,
    lightning_attn_decode,
    lightning_attn_func,
    lightning_attn_varlen_func,
)
from torch import Tensor

# where the third-party package of the same name lies: a folder with its ``lightning_attn``
STRANGER = "OPENNLPLAB_LIGHTNING_ATTN"
# sequences of a decoding step that are compared
FEW = 4
# largest relative error (Frobenius) of a whole tensor
TOLERANCE = 1.5e-2

Passes = tuple[str, ...]


@dataclass
class Inputs:
    """Operands; of a step there are states and their places, of sequences their ends."""

    given: tuple[Tensor, Tensor, Tensor]
    decay: Tensor
    dout: Tensor | None = None
    starts: Tensor | None = None
    states: Tensor | None = None
    slots: Tensor | None = None


def make_inputs(problem: Problem | Step, device: str, seed: int = 0) -> Inputs:
    """Draw bf16 normal operands."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)

    decay = build_slopes(problem.heads).to(device)
    if isinstance(problem, Step):
        b, h, d = problem.batch, problem.heads, problem.d
        q, k, v = (draw(b, problem.new_tokens, h, d) for _ in range(3))
        states = torch.randn(b, h, d, d, device=device, generator=generator)
        slots = torch.arange(b, dtype=torch.int32, device=device)
        return Inputs((q, k, v), decay, states=states, slots=slots)
    leading = (problem.tokens,) if problem.packed else (problem.batch, problem.tokens)
    q, k, v, dout = (draw(*leading, problem.heads, problem.d) for _ in range(4))
    ends = [sum(problem.lengths[:i]) for i in range(problem.batch + 1)]
    starts = torch.tensor(ends, dtype=torch.int32, device=device)
    return Inputs((q, k, v), decay, dout, starts)


class Ours(Provider):
    name, label, module = "ours", "lightning-attn", "lightning_attn"
    needs_gpu = False
    compiles = True

    def prepare(self, problem: Problem | Step, x: Inputs, passes: Passes) -> Prepared:
        if isinstance(problem, Step):
            out = torch.empty_like(x.given[2])
            given = *x.given, x.states, x.decay, x.slots
            return Prepared({"": lambda: lightning_attn_decode(*given, out=out)})

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if problem.packed:
                function, further = lightning_attn_varlen_func, (x.decay, x.starts)
            else:
                function, further = lightning_attn_func, (x.decay,)
            return function(q, k, v, *further, schedule=problem.schedule)[0]

        return with_autograd(call, x.given, x.dout, passes)


class Fla(Provider):
    name, label, module = "fla", "flash-linear-attention", "fla"

    def prepare(self, problem: Problem, x: Inputs, passes: Passes) -> Prepared:
        from fla.ops.simple_gla import chunk_simple_gla

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return chunk_simple_gla(q, k, v, g_gamma=-x.decay, scale=1.0)[0]

        return with_autograd(call, x.given, x.dout, passes)


class OpenNlpLab(Provider):
    name, label = "opennlplab", "OpenNLPLab"

    def unavailable(self, device: str) -> str | None:
        if STRANGER not in os.environ:
            return f"{STRANGER} does not say where it lies"
        return super().unavailable(device)

    def prepare(self, problem: Problem, x: Inputs, passes: Passes) -> Prepared:
        function = _third_party(os.environ[STRANGER])

        # it wants heads before tokens, dense: the copies are not part of what is measured elsewhere
        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            heads_first = (t.transpose(1, 2).contiguous() for t in (q, k, v))
            return function(*heads_first, x.decay).transpose(1, 2)

        return with_autograd(call, x.given, x.dout, passes)


def _third_party(folder: str) -> Any:
    """Import the other package of this import name, and put ours back."""

    def take() -> dict[str, Any]:
        names = [n for n in sys.modules if n.partition(".")[0] == "lightning_attn"]
        return {name: sys.modules.pop(name) for name in names}

    mine = take()
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("lightning_attn.ops").lightning_attn_func
    finally:
        sys.path.remove(folder)
        take()
        sys.modules.update(mine)


PROVIDERS = by_name(Ours(), Fla(), OpenNlpLab())


def reference(problem: Problem | Step, x: Inputs, passes: Passes) -> list[Tensor]:
    """Return o, and for a backward dq, dk, dv.

    Sequences are computed in chunks, in fp32, apart from the package under test; of a step the
    first sequences, by its definition in float64.
    """
    if isinstance(problem, Step):
        few = [t[:FEW].double() for t in (*x.given, x.states)]
        return [lightning_attention_decode_reference(*few, x.decay, x.slots[:FEW]).float()]
    backward = any(one != "fwd" for one in passes)
    leaves = [t.detach().float().requires_grad_(backward) for t in x.given]
    if not problem.packed:
        out = _walk(leaves, x.decay)
    else:
        ends = itertools.pairwise(x.starts.tolist())
        out = torch.cat([_walk([t[None, a:b] for t in leaves], x.decay) for a, b in ends], 1)[0]
    gradients = torch.autograd.grad(out, leaves, x.dout.float()) if backward else ()
    return [out.detach(), *gradients]


def _walk(given: list[Tensor], decay: Tensor, chunk: int = 256) -> Tensor:
    q, v = given[0], given[2]
    rate = decay.view(-1, 1, 1)
    state = q.new_zeros((q.shape[0], q.shape[2], q.shape[3], v.shape[3]))
    parts = []
    for a in range(0, q.shape[1], chunk):
        qc, kc, vc = (t[:, a : a + chunk].transpose(1, 2) for t in given)
        i = torch.arange(qc.shape[2], device=q.device)
        weights = torch.exp(-rate * (i[:, None] - i).clamp(min=0)).tril()
        out = (qc @ kc.mT * weights) @ vc
        parts.append(out + torch.exp(-rate * (i[:, None] + 1)) * (qc @ state))
        left = torch.exp(-rate * (len(i) - 1 - i)[:, None])
        state = torch.exp(-rate * len(i)) * state + (kc * left).mT @ vc
    return torch.cat(parts, 2).transpose(1, 2)


def judge(problem: Problem | Step, one: str, got: Any, expected: Any) -> tuple[bool, list[float]]:
    """Return whether results are right, and their relative errors; NaN never passes."""
    if isinstance(problem, Step):
        got = [got[:FEW]]
    else:
        got, expected = ([got], expected[:1]) if one == "fwd" else (got, expected[1:])
    errors = [relative_error(x, y) for x, y in zip(got, expected, strict=True)]
    return all(error <= TOLERANCE for error in errors), errors
