"""Ranks that are processes, or GPUs: their results, DTensors, and what they raise together."""

from __future__ import annotations

import datetime
import functools
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from flash_attn_triton import distributed, flash_attn_func
from flash_attn_triton._dense import ops
from flash_attn_triton.integrations import dtensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from .._linked.budget import Maker
from ..dense._cuts import CASES, Case, D, differentiate, judge, on_rank, problem

pytestmark = pytest.mark.eager

IN_PROCESSES = ("zigzag", "empty", "window", "packed", "bf16")
AMONG_HEADS = ("zigzag", "packed-window", "packed", "one-token", "packed-one-token")


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
            made = problem(case, device)
            parts = on_rank(case, rank, ranks, made, validate=True)
            found[name] = {key: value.cpu() for key, value in parts.items()}
        for name in AMONG_HEADS if ranks == 2 else ():
            parts = among_heads(CASES[name], rank, problem(CASES[name], device))
            found[f"{name} among heads"] = {key: value.cpu() for key, value in parts.items()}
        for tokens in (9, 100):
            check_placements(device, ranks, tokens)
        with device:
            found["errors"] = [error_of(one, rank) for one in disagreements(device, ranks)]
        torch.save(found, Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


# how a call is computed: where out, dq, dk, dv and the gradients of sinks and bias lie then
WAYS = {
    "whole": [Replicate()] * 6,
    "batch": [Shard(0)] * 4 + [Partial()] * 2,
    "heads": [Shard(2)] * 4 + [Shard(0), Shard(1)],
}
# where q, k, v, sinks and bias lie, and the ways to go on
CUTS = [
    ([Shard(0)] * 3 + [Replicate()] * 2, ["batch"]),
    ([Shard(2)] * 3 + [Shard(0), Shard(1)], ["heads"]),
    # DTensor compares estimates, by sizes and ranks: tokens are gathered, or exchanged for others
    ([Shard(1)] * 3 + [Replicate()] * 2, ["whole", "batch", "heads"]),
]


def check_placements(device, ranks, tokens):
    """Compute with DTensors: batch and heads stay cut, and tokens do not."""
    dtensor.register()
    mesh = init_device_mesh(device.type, (ranks,))
    m = Maker(device, torch.float32)
    given = [m.randn(2 * ranks, tokens, heads, D) for heads in (4 * ranks, 2 * ranks, 2 * ranks)]
    given += [m.randn(4 * ranks), m.randn(1, 4 * ranks, tokens, tokens)]
    dout = m.randn(2 * ranks, tokens, 4 * ranks, D)

    def run(tensors, dout):
        leaves = [x.detach().requires_grad_() for x in tensors]
        q, k, v, sinks, bias = leaves
        out = flash_attn_func(q, k, v, causal=True, sinks=sinks, bias=bias)
        return [out, *torch.autograd.grad(out, leaves, dout)]

    want = run(given, dout)
    for placements, ways in CUTS:
        cut = [distribute_tensor(x, mesh, [p]) for x, p in zip(given, placements, strict=True)]
        got = run(cut, distribute_tensor(dout, mesh, placements[:1]))
        if ranks > 1:
            found = [x.placements[0] for x in got]
            assert found[:1] in [WAYS[way][:1] for way in ways], (placements, found)
            assert found[1:] in [WAYS[way][1:] for way in ways], (placements, found)
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x.full_tensor(), y)


def among_heads(case, rank, made):
    """Compute a case with each rank alone in its group, and two ranks that share the heads."""
    alone = [dist.new_group([one]) for one in range(2)][rank]
    own = dict(made)
    cut = functools.partial(distributed.shard, group_size=2, rank=rank, shard="contiguous")
    for name in ("q", "k", "v", "dout"):
        own[name] = cut(made[name], dim=0 if case.is_packed else 1)
    own["dlse"] = cut(made["dlse"], dim=case.lse_dim)
    options = {"group": alone, "head_group": dist.group.WORLD}
    if case.is_packed:
        plan = case.plan(1)
        return differentiate(distributed.flash_attn_varlen_func, case, own, plan, **options)
    options |= {"shard": case.shard, "seqlen": case.seqlen, **case.mask}
    return differentiate(distributed.flash_attn_func, case, own, **options)


def joined(case, parts):
    """Return results of ranks that share heads as those of one rank."""
    dims = {"lse": case.lse_dim, "sinks": None}
    whole = {}
    for name in parts[0]:
        several, dim = [part[name] for part in parts], dims.get(name, int(not case.is_packed))
        whole[name] = sum(several) if dim is None else torch.cat(several, dim)
    return whole


# on several GPUs, so long that all paths of the kernels are taken
SIZES = {
    "large": Case(3001, causal=True, batch=2, dtype=torch.bfloat16, dim=64),
    "large-window": Case(3001, causal=True, window=(500, 0), dtype=torch.bfloat16, dim=64),
    "large-packed": Case(
        lengths=(2000, 0, 37, 801), shard="balanced", causal=True, dtype=torch.bfloat16, dim=64
    ),
}


def call(rank, **changes):
    """Call with one token on each of two ranks."""
    x = torch.ones(1, 1, 1, 16)
    given = {"q": x, "k": x, "v": x, "validate": not x.is_cpu}
    return distributed.flash_attn_func(**given | changes)


def heads_call(rank, function=distributed.flash_attn_func, **changes):
    """Call with one token on each of two ranks that share heads."""
    if not ALONE:
        ALONE.extend(dist.new_group([one]) for one in range(2))
    x = torch.ones(1, 1, 2, 16)
    given = {"q": x, "k": x, "v": x} | {n: y for n, y in changes.items() if y is not None}
    return function(**given, group=ALONE[rank], head_group=dist.group.WORLD)


def traced(*arguments, **named):
    """Call in a graph."""
    function = torch.compile(distributed.flash_attn_func, fullgraph=True, backend="eager")
    return function(*arguments, **named)


def plan_call(rank, group_size):
    """Call with one token on each of two ranks, by a plan of some size."""
    x = torch.ones(1, 1, 16)
    plan = distributed.ShardPlan([0, 2], group_size)
    return distributed.flash_attn_varlen_func(x, x, x, plan)


ALONE = []
HALF = torch.ones(1, 1, 1, 16, dtype=torch.bfloat16)
DISAGREEMENTS = [
    (lambda rank: call(rank, softmax_scale=1.0 + rank),
     r"softmax_scale must be the same on every rank, got 1.0 on rank 0; 2.0 on rank 1"),
    (lambda rank: call(rank, softcap=1.0 * rank), r"softcap must be the same on every rank"),
    (lambda rank: call(rank, shard=("zigzag", "contiguous")[rank]), r"the shards must be the same"),
    (lambda rank: call(rank, causal=rank == 0), r"the shards must be the same .* window \(-1, 0\)"),
    (lambda rank: call(rank, sinks=torch.full((1,), float(rank))),
     r"sinks must be the same on every rank, got \[0.0\] on rank 0; \[1.0\] on rank 1"),
    (lambda rank: call(rank, sinks=torch.ones(1) if rank else None), r"sinks must be the same"),
    (lambda rank: call(rank, deterministic=rank == 0), r"deterministic must be the same"),
    (lambda rank: call(rank, q=torch.ones(1, 1, 1, 16, requires_grad=rank == 0)),
     r"whether a gradient is asked for must be the same"),
    (lambda rank: call(rank, q=torch.ones(1, 1, 1 + rank, 16)), r"the heads and head dimensions"),
    (lambda rank: call(rank, q=HALF if rank else torch.ones(1, 1, 1, 16)),
     (r"rank 1 of the group refused: k must have the dtype", r"^k must have the dtype of q")),
    (lambda rank: heads_call(rank, softcap=1.0 * rank), r"softcap must be the same on every rank"),
    (lambda rank: heads_call(rank, traced, softcap=1.0 + rank), r"softcap must be the same on ev"),
    (lambda rank: heads_call(rank, v=HALF.expand(1, 1, 2, 16) if rank else None),
     (r"rank 1 of the group refused: v must have the dtype", r"^v must have the dtype of q")),
    (lambda rank: heads_call(rank, k=torch.ones(1, 1, 1, 16), v=torch.ones(1, 1, 1, 16)),
     r"heads_k must be a multiple of the ranks of head_group, 2, got 1"),
    (lambda rank: plan_call(rank, 2 + rank),
     (r"rank 1 of the group refused: plan must be of 2 ranks", r"^plan must be of 2 ranks, as ")),
    (lambda rank: call(rank, q=None if rank else torch.ones(1, 1, 1, 16)),
     (r"rank 1 of the group refused: q must be a torch.Tensor", r"^q must be a torch.Tensor")),
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


def start(ranks, backend, names, folder, monkeypatch):
    """Start processes; return what each left."""
    # the processes import this module by its name, along the path of this one
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    mp.spawn(one_rank_of, (backend, ranks, str(folder), names), nprocs=ranks)
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]


def judge_errors(left):
    """Compare the errors of two ranks with what they should say."""
    for rank, found in enumerate(left):
        for (_, pattern), error in zip(DISAGREEMENTS, found["errors"], strict=False):
            wanted = pattern if isinstance(pattern, str) else pattern[rank]
            assert re.search(wanted, error), (rank, error)
    assert left[0]["errors"]


@pytest.mark.skipif(ops.interpreted(), reason="the eager tier starts processes")
def test_processes_equal_one_and_raise_alike(tmp_path, monkeypatch):
    left = start(2, "gloo", IN_PROCESSES, tmp_path, monkeypatch)
    for name in IN_PROCESSES:
        judge(CASES[name], [found[name] for found in left])
    for name in AMONG_HEADS:
        case = CASES[name]
        judge(case, [joined(case, [found[f"{name} among heads"] for found in left])])
    judge_errors(left)


@pytest.mark.device
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="takes two GPUs")
def test_gpus_equal_one(tmp_path, monkeypatch):
    ranks = min(4, torch.cuda.device_count())
    left = start(ranks, "nccl", (*CASES, *SIZES), tmp_path, monkeypatch)
    for name, case in {**CASES, **SIZES}.items():
        judge(case, [found[name] for found in left])
    if ranks == 2:
        judge_errors(left)
