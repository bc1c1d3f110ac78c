"""Implementations under measurement behind one interface; an absent one says so and is skipped.

Every provider gets the same memory, ``[batch, seqlen, heads, d]`` or packed ``[tokens, heads, d]``.
"""

from __future__ import annotations

import importlib
import itertools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from cases import Problem
from torch import Tensor

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]

# where the third-party package of the same name lies: a folder with its ``lightning_attn``
STRANGER = "OPENNLPLAB_LIGHTNING_ATTN"


class UnsupportedError(Exception):
    """A provider cannot do a problem, for a reason that is no fault."""


def ours(problem: Problem, decay: Tensor, starts: Tensor) -> Forward:
    import lightning_attn

    if problem.packed:
        return lambda q, k, v: lightning_attn.lightning_attn_varlen_func(
            q, k, v, decay, starts, schedule=problem.schedule
        )[0]
    return lambda q, k, v: lightning_attn.lightning_attn_func(
        q, k, v, decay, schedule=problem.schedule
    )[0]


def flash_linear_attention(problem: Problem, decay: Tensor, starts: Tensor) -> Forward:
    from fla.ops.simple_gla import chunk_simple_gla

    if problem.packed or problem.schedule != "auto":
        raise UnsupportedError("measured on the grid alone")
    gamma = -decay
    return lambda q, k, v: chunk_simple_gla(q, k, v, g_gamma=gamma, scale=1.0)[0]


def opennlplab(problem: Problem, decay: Tensor, starts: Tensor) -> Forward:
    if problem.packed or problem.schedule != "auto":
        raise UnsupportedError("takes no packed sequences")
    function = _third_party()
    # it wants heads before tokens, dense: the copies are not part of what is measured elsewhere
    return lambda q, k, v: function(
        *(t.transpose(1, 2).contiguous() for t in (q, k, v)), decay
    ).transpose(1, 2)


def _third_party() -> Any:
    """Import the other package of this import name, and put ours back."""
    folder = os.environ.get(STRANGER)
    if folder is None:
        raise ImportError(f"{STRANGER} does not say where it lies")

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


PROVIDERS: dict[str, Callable[[Problem, Tensor, Tensor], Forward]] = {
    "ours": ours,
    "fla": flash_linear_attention,
    "opennlplab": opennlplab,
}


def copies_of(inputs: list[Tensor], requires_grad: bool) -> list[Tensor]:
    """Return leaves over the same memory."""
    return [t.detach().requires_grad_(requires_grad) for t in inputs]


def reference(
    problem: Problem, inputs: list[Tensor], dout: Tensor | None, decay: Tensor, chunk: int = 256
) -> list[Tensor]:
    """Return o, and with ``dout`` dq, dk, dv: chunked, fp32, apart from the package under test."""
    leaves = [t.detach().float().requires_grad_(dout is not None) for t in inputs]
    outputs = []
    bounds = [sum(problem.lengths[:i]) for i in range(problem.batch + 1)]
    pieces = (
        [[t[None, a:b] for t in leaves] for a, b in itertools.pairwise(bounds)]
        if problem.packed
        else [leaves]
    )
    rate = decay.view(-1, 1, 1)
    for q, k, v in pieces:
        state = q.new_zeros((q.shape[0], q.shape[2], q.shape[3], v.shape[3]))
        parts = []
        for a in range(0, q.shape[1], chunk):
            qc, kc, vc = (t[:, a : a + chunk].transpose(1, 2) for t in (q, k, v))
            i = torch.arange(qc.shape[2], device=q.device)
            weights = torch.exp(-rate * (i[:, None] - i).clamp(min=0)).tril()
            out = (qc @ kc.mT * weights) @ vc
            parts.append(out + torch.exp(-rate * (i[:, None] + 1)) * (qc @ state))
            left = torch.exp(-rate * (len(i) - 1 - i)[:, None])
            state = torch.exp(-rate * len(i)) * state + (kc * left).mT @ vc
        outputs.append(torch.cat(parts, 2).transpose(1, 2))
    out = torch.cat(outputs, 1)[0] if problem.packed else outputs[0]
    if dout is None:
        return [out]
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.float())]
