"""Helpers of distributed tests that other tests use too."""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from lightning_attn import (
    distributed,
    lightning_attention_reference,
    lightning_attention_varlen_reference,
)

from .._linked.budget import TF32X3_UNIT, Maker, assert_no_worse_than_eager

HEADS, D = 2, 16


INPUTS = ("q", "k", "v", "decay", "initial_state")


class Case(NamedTuple):
    """Sequences of one length, or with ``lengths`` packed ones, and the rule of their shards."""

    seqlen: int
    shard: str
    schedule: str = "auto"
    lengths: tuple[int, ...] | None = None
    batch: int = 1
    e: int = 16
    inputs: tuple[str, ...] = INPUTS
    dtype: torch.dtype = torch.float32
    final: bool = True

    @property
    def cu_seqlens(self):
        return [0, *torch.tensor(self.lengths).cumsum(0).tolist()]

    def plan(self, ranks):
        return distributed.ShardPlan(self.cu_seqlens, ranks, causal=True, shard=self.shard)

    def cut(self, x, ranks, rank):
        """Return the tokens of a rank."""
        if self.lengths is not None:
            return self.plan(ranks).shard(x, rank)
        return distributed.shard(x, ranks, rank, shard=self.shard)

    def join(self, parts):
        if self.lengths is not None:
            return self.plan(len(parts)).unshard(parts)
        return distributed.unshard(parts, shard=self.shard)


WITHOUT_DECAY = ("q", "k", "v", "initial_state")


CASES = {
    "zigzag": Case(17, "zigzag", "sequential", batch=2),
    "contiguous": Case(70, "contiguous", "parallel", e=32, inputs=WITHOUT_DECAY),
    "empty": Case(2, "contiguous", inputs=WITHOUT_DECAY),
    "packed": Case(0, "balanced", "parallel", (70, 0, 5, 9), inputs=WITHOUT_DECAY),
    # a run that is not sent ahead of those that are
    "packed-first": Case(
        0, "balanced", "sequential", (5, 31, 16), inputs=WITHOUT_DECAY, final=False
    ),
    # likewise, behind them
    "packed-last": Case(
        0, "balanced", "sequential", (31, 16, 5), inputs=WITHOUT_DECAY, final=False
    ),
    "packed-zigzag": Case(0, "zigzag", "sequential", (9, 0, 11), inputs=WITHOUT_DECAY),
}


def problem(case, device="cpu", dtype=None):
    """Everything, the same on every rank."""
    m = Maker(device, dtype or case.dtype)
    batch, tokens = (case.batch,), (case.batch, case.seqlen)
    if case.lengths is not None:
        batch, tokens = (len(case.lengths),), (sum(case.lengths),)
    made = {name: m.randn(*tokens, HEADS, D) for name in ("q", "k")}
    made |= {name: m.randn(*tokens, HEADS, case.e) for name in ("v", "dout")}
    wide = {"dtype": torch.float32}
    made |= {
        name: m.randn(*batch, HEADS, D, case.e, **wide) for name in ("initial_state", "dfinal")
    }
    made["decay"] = m.uniform(HEADS, low=0.01, high=0.3)
    return made


def differentiate(function, case, made, *rest, **options):
    """Return outputs and gradients of a call."""
    leaves = {name: made[name].clone().requires_grad_() for name in case.inputs}
    q, k, v, decay, state = ((made | leaves)[name] for name in INPUTS)
    given = {"scale": 0.5, "initial_state": state, "output_final_state": case.final, **options}
    out, final = function(q, k, v, decay, *rest, **given)
    made_of, arriving = (out, final), (made["dout"], made["dfinal"])
    if not case.final:
        assert final is None
        made_of, arriving = (out,), (made["dout"],)
    grads = torch.autograd.grad(made_of, list(leaves.values()), arriving)
    found = {"o": out.detach(), **dict(zip(case.inputs, grads, strict=True))}
    return {**found, "final": final.detach()} if case.final else found


def on_rank(case, rank, ranks, made, **options):
    """Compute what one rank does; every rank has its share of the final states' gradient."""
    own = dict(made)
    for name in ("q", "k", "v", "dout"):
        own[name] = case.cut(made[name], ranks, rank)
    own["dfinal"] = made["dfinal"] * (2 * (rank + 1) / (ranks * (ranks + 1)))
    options["schedule"] = case.schedule
    if case.lengths is not None:
        rest = (case.plan(ranks),)
        return differentiate(distributed.lightning_attn_varlen_func, case, own, *rest, **options)
    options |= {"shard": case.shard, "seqlen": case.seqlen}
    return differentiate(distributed.lightning_attn_func, case, own, **options)


def whole(case, function, dtype, device):
    """The same on one process."""
    made = {name: t.to(dtype) for name, t in problem(case, device).items()}
    if case.lengths is None:
        return differentiate(function, case, made)
    starts = torch.tensor(case.cu_seqlens, dtype=torch.int32, device=device)
    return differentiate(function, case, made, starts)


def judge(case, parts, device="cpu"):
    """Compare what the ranks have with one process that holds all tokens."""
    got = {name: case.join([part[name] for part in parts]) for name in ("o", "q", "k", "v")}
    for name in set(case.inputs) - {"q", "k", "v"}:
        got[name] = torch.stack([part[name] for part in parts]).sum(0)
    if case.final:
        got["final"] = parts[0]["final"]
        for part in parts:
            assert torch.equal(part["final"], got["final"])
    reference = lightning_attention_reference
    if case.lengths is not None:
        reference = lightning_attention_varlen_reference
    eager, oracle = (whole(case, reference, t, device) for t in (torch.float32, torch.float64))
    for name, value in got.items():
        # sums in another order: three times the error, as for gradients
        unit = TF32X3_UNIT
        assert_no_worse_than_eager(
            name, value, eager[name].to(device), oracle[name].to(device), 3.0, unit
        )


def one_rank_of(rank, backend, ranks, folder, names):
    """Compute cases as one of several processes, and leave the results in a file."""
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    limit = datetime.timedelta(seconds=120)  # a hang is a failure
    dist.init_process_group(
        backend, f"file://{folder}/meeting", rank=rank, world_size=ranks, timeout=limit
    )
    try:
        found = {}
        for name in names:
            case = SIZES.get(name) or CASES[name]
            parts = on_rank(case, rank, ranks, problem(case, device), validate=True)
            found[name] = {key: value.cpu() for key, value in parts.items()}
        with device:
            found["errors"] = [error_of(one, rank) for one in disagreements(device, ranks)]
        torch.save(found, Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


# on two GPUs, so long that all paths of the kernels are taken
SIZES = {
    "large": Case(3001, "zigzag", batch=2, e=128),
    "large-packed": Case(0, "balanced", lengths=(2000, 0, 37, 801), e=64),
}


def call(rank, **changes):
    """Call with one token on each of two ranks."""
    x = torch.ones(1, 1, 1, 16)
    given = {"q": x, "k": x, "v": x, "decay": torch.ones(1), "validate": not x.is_cpu}
    return distributed.lightning_attn_func(**given | changes)


def plan_call(rank, group_size):
    """Call with one token on each of two ranks, by a plan of some size."""
    x = torch.ones(1, 1, 16)
    plan = distributed.ShardPlan([0, 2], group_size)
    return distributed.lightning_attn_varlen_func(x, x, x, torch.ones(1), plan)


HALF = torch.ones(1, 1, 1, 16, dtype=torch.bfloat16)


DISAGREEMENTS = [
    (lambda rank: call(rank, scale=1.0 + rank),
     r"scale must be the same on every rank, got 1.0 on rank 0; 2.0 on rank 1"),
    (lambda rank: call(rank, shard=("zigzag", "contiguous")[rank]), r"the shards must be the same"),
    (lambda rank: call(rank, decay=torch.full((1,), float(rank))),
     r"decay must be the same on every rank, got \[0.0\] on rank 0; \[1.0\] on rank 1"),
    (lambda rank: call(rank, output_final_state=rank == 0), r"output_final_state must be the same"),
    (lambda rank: call(rank, q=torch.ones(1, 1, 1, 16, requires_grad=rank == 0)),
     r"whether a gradient is asked for must be the same"),
    (lambda rank: call(rank, q=HALF if rank else torch.ones(1, 1, 1, 16)),
     (r"rank 1 of the group refused: k must have the dtype", r"^k must have the dtype of q")),
    (lambda rank: call(rank, decay=torch.full((1,), 1.0 - 2 * rank)),
     (r"rank 1 of the group refused: decay\[0\] must be at least 0", r"^decay\[0\] must be at l")),
    (lambda rank: plan_call(rank, 2 + rank),
     (r"rank 1 of the group refused: plan must be of 2 ranks", r"^plan must be of 2 ranks, as ")),
    (lambda rank: call(rank, group=dist.new_group([0]), seqlen=1),
     ("^no error", r"^group must hold this rank, 1, which is not in it")),
    (lambda rank: call(rank, seqlen=3 + rank), (r"rank 1.*refused: q must hold|^q must hold",) * 2),
]  # fmt: skip


def disagreements(device, ranks):
    """Return what two ranks disagree about, on a GPU in options alone."""
    return DISAGREEMENTS[: None if device.type == "cpu" else 2] if ranks == 2 else []


def error_of(disagreement, rank):
    function, _ = disagreement
    try:
        function(rank)
    except (TypeError, ValueError) as error:
        return str(error)
    return "no error"


def judge_errors(left):
    """Compare the errors of two ranks with what they should say."""
    for rank, found in enumerate(left):
        for (_, pattern), error in zip(DISAGREEMENTS, found["errors"], strict=False):
            wanted = pattern if isinstance(pattern, str) else pattern[rank]
            assert re.search(wanted, error), (rank, error)
    assert left[0]["errors"]


def given(tokens=6):
    m = Maker("cpu", torch.float32)
    q, k, v = (m.randn(1, tokens, HEADS, D).requires_grad_() for _ in range(3))
    return q, k, v, m.uniform(HEADS, low=0.1, high=0.5)


def packed(plan, tokens=6, **options):
    q, k, v, decay = given(tokens)
    return distributed.lightning_attn_varlen_func(q[0], k[0], v[0], decay, plan, **options)
