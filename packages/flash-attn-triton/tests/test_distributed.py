"""Sequences that are cut across ranks, against one process that holds all tokens."""

from __future__ import annotations

import datetime
import functools
import re
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from flash_attn_triton import (
    _exchange,
    _ops,
    _pieces,
    _sharded_ops,
    distributed,
    flash_attn_func,
    flash_attn_varlen_func,
)
from flash_attn_triton._linked.parallel.cut import cut_alike, cut_by_plan
from flash_attn_triton._linked.parallel.groups import where
from flash_attn_triton.integrations import dtensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.library import opcheck

from ._cuts import CASES, DV, HEADS_K, Case, D, differentiate, judge, on_rank, problem
from ._linked.budget import Maker, assert_same
from ._ranks import Ranks

pytestmark = pytest.mark.eager

# kernels are interpreted for what differs in the calls of them
by_definition = pytest.mark.skipif(_ops.interpreted(), reason="takes long in the interpreter")
IN_PROCESSES = ("zigzag", "empty", "window", "packed", "bf16")
AMONG_HEADS = ("zigzag", "packed-window", "packed")


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("zigzag", 2),
        ("packed-window", 2),
        *(
            pytest.param(*given, marks=by_definition)
            for given in [
                ("zigzag", 3), ("full", 2), ("contiguous", 3), ("empty", 3), ("window", 3),
                ("window-both", 2), ("window-left", 3), ("window-right", 2),
                ("window-contiguous", 4), ("packed", 2), ("packed-zigzag", 3),
                ("packed-alike", 2), ("packed-many", 3), ("packed-full", 3), ("bf16", 2),
                ("zigzag", 1),
            ]
        ),
    ],
)  # fmt: skip
def test_equals_one_process(name, ranks, monkeypatch, device):
    case = CASES[name]
    made = problem(case, device)
    found = Ranks(ranks, monkeypatch).run(lambda rank: on_rank(case, rank, ranks, made))
    judge(case, found, device)


@by_definition
def test_deterministic_runs_repeat(monkeypatch, device):
    case = CASES["full"]
    made = problem(case, device)
    first, second = (
        Ranks(3, monkeypatch).run(lambda rank: on_rank(case, rank, 3, made, deterministic=True))
        for _ in range(2)
    )
    for one, other in zip(first, second, strict=True):
        assert_same(one, other)


def sent_by(case, ranks, monkeypatch):
    """Return what each rank sends in a forward pass: targets and rows."""
    made = problem(case)
    group = Ranks(ranks, monkeypatch)

    def function(rank):
        q, k, v = (case.cut(made[name], ranks, rank) for name in ("q", "k", "v"))
        if case.is_packed:
            distributed.flash_attn_varlen_func(q, k, v, case.plan(ranks))
        else:
            given = {"shard": case.shard, "seqlen": case.seqlen, **case.mask}
            distributed.flash_attn_func(q, k, v, **given)

    group.run(function)
    token = HEADS_K * (case.dim + DV)
    return [[(target, count // token) for target, count in sent if count] for sent in group.sent]


@by_definition
def test_windows_ask_neighbours_alone(monkeypatch):
    case = Case(80, "contiguous", causal=True, window=(5, 0))
    assert sent_by(case, 4, monkeypatch) == [[(1, 5)], [(2, 5)], [(3, 5)], []]


@by_definition
def test_zigzag_sends_what_is_seen(monkeypatch):
    # parts of 10: a later rank sees the first part alone, an earlier one both
    sent = sent_by(Case(60, causal=True), 3, monkeypatch)
    assert sent == [[(1, 10), (2, 10)], [(2, 10), (0, 20)], [(0, 20), (1, 20)]]


@by_definition
def test_whole_sequences_are_not_sent(monkeypatch):
    case = Case(lengths=(20, 20), shard="balanced", causal=True)
    assert sent_by(case, 2, monkeypatch) == [[], []]
    cut = Case(lengths=(70, 0, 5, 9), shard="balanced", causal=True)
    assert sum(rows for sent in sent_by(cut, 2, monkeypatch) for _, rows in sent) < 70


@by_definition
@pytest.mark.parametrize(("backward", "bound"), [(False, 2), (True, 2 + _pieces.MERGED)])
def test_few_keys_of_others_are_in_memory(backward, bound, monkeypatch):
    """Those of two ranks at a time, and gradients from a few, whatever the number of ranks."""
    ranks, held, most = 9, [0] * 9, [0] * 9
    group = Ranks(ranks, monkeypatch)

    class Counted(_exchange.Exchange):
        """Memory that arrives, from when it is asked for until it is free."""

        def __init__(self, *given):
            super().__init__(*given)
            held[group.rank] += 1
            most[group.rank] = max(most[group.rank], held[group.rank])

        def wait(self):
            rank = group.rank
            self._work.wait()
            rows = self._arriving.numpy().copy()
            weakref.finalize(rows, lambda: held.__setitem__(rank, held[rank] - 1))
            self._arriving, self._work = torch.from_numpy(rows), None
            return super().wait()

    monkeypatch.setattr(_exchange, "Exchange", Counted)
    x = torch.ones(1, 4, 1, 16)

    def function(rank):
        q, k, v = (x.clone().requires_grad_(backward) for _ in range(3))
        out = distributed.flash_attn_func(q, k, v)
        if backward:
            out.sum().backward()

    group.run(function)
    assert most == [bound] * ranks
    assert held == [0] * ranks


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
        check_placements(device, ranks)
        with device:
            found["errors"] = [error_of(one, rank) for one in disagreements(device, ranks)]
        torch.save(found, Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


CUTS = {
    "batch": ([Shard(0)] * 3 + [Replicate()] * 2, Shard(0), [Shard(0)] * 3 + [Partial()] * 2),
    "heads": ([Shard(2)] * 3 + [Shard(0), Shard(1)], Shard(2), None),
    "tokens": ([Shard(1)] * 3 + [Replicate()] * 2, Replicate(), [Replicate()] * 5),
}


def check_placements(device, ranks):
    """Compute with DTensors: batch and heads stay cut, tokens are gathered."""
    dtensor.register()
    mesh = init_device_mesh(device.type, (ranks,))
    m = Maker(device, torch.float32)
    given = [m.randn(2 * ranks, 9, heads, D) for heads in (4 * ranks, 2 * ranks, 2 * ranks)]
    given += [m.randn(4 * ranks), m.randn(1, 4 * ranks, 9, 9)]
    dout = m.randn(2 * ranks, 9, 4 * ranks, D)

    def run(tensors, dout):
        leaves = [x.detach().requires_grad_() for x in tensors]
        q, k, v, sinks, bias = leaves
        out = flash_attn_func(q, k, v, causal=True, sinks=sinks, bias=bias)
        return [out, *torch.autograd.grad(out, leaves, dout)]

    want = run(given, dout)
    for placements, of_out, of_grads in CUTS.values():
        cut = [distribute_tensor(x, mesh, [p]) for x, p in zip(given, placements, strict=True)]
        got = run(cut, distribute_tensor(dout, mesh, placements[:1]))
        expected = [of_out, *(of_grads or placements)]
        if ranks > 1:
            assert [x.placements for x in got] == [(p,) for p in expected]
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
    monkeypatch.syspath_prepend(Path(__file__).parent.parent)
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


@pytest.mark.skipif(_ops.interpreted(), reason="the eager tier starts processes")
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


@pytest.fixture
def one_rank():
    """A group of this process alone."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def given(tokens=6):
    m = Maker("cpu", torch.float32)
    return tuple(m.randn(1, tokens, 2, D).requires_grad_() for _ in range(3))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_traces_hold_the_exchange(one_rank):
    q, k, v = given()

    def function(q, k, v):
        out, lse = distributed.flash_attn_func(q, k, v * 2, causal=True, return_lse=True)
        return out.sum() + lse.sum()

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    results = []
    for one in (compiled, function):
        value = one(q, k, v)
        results.append([value, *torch.autograd.grad(value, (q, k, v))])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_traces_serve_other_lengths(one_rank):
    """A second graph has symbols for what differs, and the batches to come need no third."""

    def dense(q, k, v):
        return distributed.flash_attn_func(q, k, v, causal=True)

    def of_plan(q, k, v, plan):
        return distributed.flash_attn_varlen_func(q[0], k[0], v[0], plan)

    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    for function in (dense, of_plan):
        torch._dynamo.reset()
        graphs.clear()
        compiled = torch.compile(function, fullgraph=True, backend=backend)
        for tokens in (6, 9, 10, 12):
            lengths = [0, 4, tokens, tokens + tokens // 2][: tokens - 4]
            plan = distributed.ShardPlan(lengths, 1, causal=True)
            x = *given(lengths[-1]), *[plan][: function is of_plan]
            assert torch.equal(compiled(*x), function(*x))
        assert len(graphs) == 2


@pytest.mark.parametrize("lengths", [None, (4, 0, 2)], ids=str)
def test_operators_are_what_they_say(lengths, one_rank):
    q, k, v = (x.detach()[0] for x in given())
    cut = cut_alike(1, 6, 1, (-1, 0), "zigzag", 0)
    if lengths:
        cut = cut_by_plan(distributed.ShardPlan([0, 4, 4, 6], 1, causal=True), 0)
    options = 0.25, 0.0, False, *cut, where(None).group
    sinks, utils = torch.zeros(2), ("test_schema", "test_faketensor")
    out, lse = _sharded_ops.sharded_forward(q, k, v, sinks, *options, None)
    x = q, k, v, sinks
    for operator, arguments in (
        (_sharded_ops.compare_calls, (*x, *options, False, [options[-1]])),
        (_sharded_ops.sharded_forward, (*x, *options, None)),
        (_sharded_ops.sharded_backward, (out, *x, out, lse, None, *options)),
    ):
        opcheck(operator, arguments, test_utils=utils)


def test_a_second_derivative_raises(one_rank):
    q, k, v = given()
    out = distributed.flash_attn_func(q, k, v)
    with pytest.raises(NotImplementedError, match="second derivatives are not offered across"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


def test_checkpoints_compute_again(one_rank):
    from torch.utils.checkpoint import checkpoint

    q, k, v = given()
    grads = []
    for one in (
        distributed.flash_attn_func,
        lambda *x: checkpoint(distributed.flash_attn_func, *x, use_reentrant=False),
    ):
        grads.append(torch.autograd.grad(one(q, k, v).square().sum(), (q, k, v)))
    for got, want in zip(*grads, strict=True):
        assert torch.equal(got, want)


def packed(plan, tokens=6, **options):
    q, k, v = (x[0] for x in given(tokens))
    return distributed.flash_attn_varlen_func(q, k, v, plan, **options)


PLAN = distributed.ShardPlan([0, 6], 1)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: distributed.flash_attn_func(*given(), shard="balanced"), ValueError,
         "shard must be one of zigzag, contiguous, got 'balanced'"),
        (lambda: distributed.flash_attn_func(*given(), shard=None), TypeError,
         "shard must be a string, got NoneType"),
        (lambda: distributed.flash_attn_func(*given(), seqlen=7), ValueError,
         "q must hold 7 of 7 tokens on rank 0 of 1, zigzag, got 6"),
        (lambda: distributed.flash_attn_func(*given(), seqlen=6.0), TypeError,
         "seqlen must be an int, got float"),
        (lambda: distributed.flash_attn_func(given()[0], *given(5)[1:]), ValueError,
         "k must hold the tokens of q, 6, got 5"),
        (lambda: distributed.flash_attn_func(*given(), validate=1), TypeError,
         "validate must be a bool, got int"),
        (lambda: distributed.flash_attn_func(*given(), group="all"), TypeError,
         "group must be a torch.distributed.ProcessGroup, got str"),
        (lambda: distributed.flash_attn_func(None, *given()[1:]), TypeError,
         "q must be a torch.Tensor, got NoneType"),
        (lambda: distributed.flash_attn_func(*(x.double() for x in given())), TypeError,
         "q must be torch.float16"),
        (lambda: distributed.flash_attn_func(*given(), sinks=torch.zeros(3)), ValueError,
         r"sinks must be \[heads_q\], \[2\], got \[3\]"),
        (lambda: distributed.flash_attn_func(*given(), window_size=(-2, 0)), ValueError,
         "window_size must hold -1"),
        (lambda: distributed.flash_attn_func(*given(), head_group=dist.group.WORLD), ValueError,
         "group must be given with head_group, got None"),
        (lambda: distributed.flash_attn_func(*given(), group=dist.group.WORLD, head_group=0),
         TypeError, "head_group must be a torch.distributed.ProcessGroup, got int"),
        (lambda: packed([0, 6]), TypeError, "plan must be a ShardPlan, got list"),
        (lambda: packed(distributed.ShardPlan([0, 6], 2)), ValueError,
         "plan must be of 1 ranks, as the group is, got 2"),
        (lambda: packed(PLAN, 5), ValueError, "q must hold the 6 tokens of rank 0, got 5"),
    ],
)  # fmt: skip
def test_wrong_arguments_raise(call, error, message, one_rank):
    with pytest.raises(error, match=message):
        call()


def test_a_group_is_needed():
    with pytest.raises(ValueError, match=r"group must be a process group, but torch.distributed"):
        distributed.flash_attn_func(*given())


def test_one_rank_has_the_bits_of_the_plain_function(one_rank):
    lengths = torch.tensor([0, 4, 6], dtype=torch.int32)
    q, k, v = (x[0] for x in given())
    plain = flash_attn_varlen_func(q, k, v, lengths, lengths, 4, 4, causal=True)
    plan = distributed.ShardPlan(lengths, 1, causal=True)
    assert torch.equal(distributed.flash_attn_varlen_func(q, k, v, plan), plain)
