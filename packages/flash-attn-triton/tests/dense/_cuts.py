"""Cases of sequences that are cut across ranks, and what they have to come to."""

from __future__ import annotations

from typing import NamedTuple

import torch
from flash_attn_triton import attention_reference, distributed, varlen_attention_reference

from .._linked.budget import TF32X3_UNIT, Maker, assert_no_worse_than_eager

HEADS_Q, HEADS_K, D, DV = 4, 2, 16, 24
INPUTS = ("q", "k", "v", "sinks")


class Case(NamedTuple):
    """Sequences of one length, or with ``lengths`` packed ones, their mask and their cut."""

    seqlen: int = 0
    shard: str = "zigzag"
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    lengths: tuple[int, ...] = ()
    batch: int = 1
    softcap: float = 0.0
    has_sinks: bool = True
    dtype: torch.dtype = torch.float32
    dim: int = D

    @property
    def is_packed(self):
        return bool(self.lengths)

    @property
    def cu_seqlens(self):
        return [0, *torch.tensor(self.lengths).cumsum(0).tolist()]

    @property
    def mask(self):
        return {"causal": self.causal, "window_size": self.window}

    def plan(self, ranks):
        return distributed.ShardPlan(self.cu_seqlens, ranks, shard=self.shard, **self.mask)

    def cut(self, x, ranks, rank, dim=None):
        """Return the tokens of a rank."""
        if self.is_packed:
            dim = dim or 0
            return self.plan(ranks).shard(x.movedim(dim, 0), rank).movedim(0, dim)
        return distributed.shard(x, ranks, rank, dim=dim or 1, shard=self.shard)

    def join(self, parts, dim=None):
        if self.is_packed:
            dim = dim or 0
            moved = [x.movedim(dim, 0) for x in parts]
            return self.plan(len(parts)).unshard(moved).movedim(0, dim)
        return distributed.unshard(parts, dim=dim or 1, shard=self.shard)

    @property
    def lse_dim(self):
        return 1 if self.is_packed else 2


def problem(case, device="cpu"):
    """Everything, the same on every rank."""
    m = Maker(device, case.dtype)
    tokens = (sum(case.lengths),) if case.is_packed else (case.batch, case.seqlen)
    made = {"q": m.randn(*tokens, HEADS_Q, case.dim), "k": m.randn(*tokens, HEADS_K, case.dim)}
    made |= {"v": m.randn(*tokens, HEADS_K, DV), "dout": m.randn(*tokens, HEADS_Q, DV)}
    made["dlse"] = m.randn(*tokens[:-1], HEADS_Q, tokens[-1], dtype=torch.float32)
    made["sinks"] = m.randn(HEADS_Q) if case.has_sinks else None
    return made


def differentiate(function, case, made, *rest, **options):
    """Return outputs and gradients of a call."""
    leaves = {n: made[n].clone().requires_grad_() for n in INPUTS if made[n] is not None}
    q, k, v, sinks = (leaves.get(name) for name in INPUTS)
    out, lse = function(
        q, k, v, *rest, sinks=sinks, softcap=case.softcap, return_lse=True, **options
    )
    grads = torch.autograd.grad((out, lse), list(leaves.values()), (made["dout"], made["dlse"]))
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(leaves, grads, strict=True))}


def on_rank(case, rank, ranks, made, **options):
    """Compute what one rank does."""
    own = {name: case.cut(made[name], ranks, rank) for name in ("q", "k", "v", "dout")}
    own["dlse"] = case.cut(made["dlse"], ranks, rank, case.lse_dim)
    own["sinks"] = made["sinks"]
    if case.is_packed:
        plan = case.plan(ranks)
        return differentiate(distributed.flash_attn_varlen_func, case, own, plan, **options)
    options |= {"shard": case.shard, "seqlen": case.seqlen, **case.mask}
    return differentiate(distributed.flash_attn_func, case, own, **options)


def whole(case, dtype, device):
    """The same on one process, by the reference."""
    made = {
        name: x if x is None or (name == "dlse" and dtype != torch.float64) else x.to(dtype)
        for name, x in problem(case, device).items()
    }
    if not case.is_packed:
        return differentiate(attention_reference, case, made, **case.mask)
    starts = torch.tensor(case.cu_seqlens, dtype=torch.int32, device=device)
    longest = max(case.lengths)
    rest = starts, starts, longest, longest
    return differentiate(varlen_attention_reference, case, made, *rest, **case.mask)


def judge(case, parts, device="cpu"):
    """Compare what the ranks have with one process that holds all tokens."""
    got = {name: case.join([part[name] for part in parts]) for name in ("out", "q", "k", "v")}
    got["lse"] = case.join([part["lse"] for part in parts], case.lse_dim)
    if case.has_sinks:
        got["sinks"] = torch.stack([part["sinks"] for part in parts]).sum(0)
    eager, oracle = (whole(case, t, device) for t in (case.dtype, torch.float64))
    unit = TF32X3_UNIT if case.dtype == torch.float32 else torch.finfo(case.dtype).eps
    for name, value in got.items():
        # sums of rounded parts: three times the error, as for gradients
        found = eager[name].to(device), oracle[name].to(device)
        assert_no_worse_than_eager(name, value, *found, 3.0, None if name == "lse" else unit)


CASES = {
    "zigzag": Case(17, causal=True, batch=2),
    "full": Case(37, softcap=3.0),
    "contiguous": Case(40, "contiguous", causal=True, has_sinks=False),
    "empty": Case(2, "contiguous", causal=True),
    "one-token": Case(1, "contiguous", causal=True, batch=2),
    "packed-one-token": Case(lengths=(1, 0), causal=True),
    "window": Case(61, causal=True, window=(20, -1), batch=2),
    "window-both": Case(53, window=(6, 3)),
    "window-left": Case(37, window=(13, -1)),
    "window-right": Case(37, window=(-1, 3)),
    "window-contiguous": Case(64, "contiguous", causal=True, window=(5, 0)),
    "packed": Case(lengths=(70, 0, 5, 9), shard="balanced", causal=True),
    "packed-zigzag": Case(lengths=(9, 0, 11, 1), causal=True, window=(3, 0)),
    "packed-many": Case(lengths=(9, 14, 30, 6, 12), causal=True),
    "packed-alike": Case(lengths=(16,) * 4, causal=True, softcap=3.0),
    "packed-full": Case(lengths=(9, 1, 30, 6), shard="contiguous"),
    "packed-window": Case(lengths=(16, 16, 31), window=(7, 2), has_sinks=False),
    "bf16": Case(lengths=(50, 3, 20), shard="balanced", causal=True, dtype=torch.bfloat16),
}
