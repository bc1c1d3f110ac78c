"""Sequences that are cut across ranks, against one process that holds all tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning_attn import (
    distributed,
    lightning_attn_varlen_func,
)
from lightning_attn._linear import ops as linear_ops
from lightning_attn._linked.parallel.cut import cut_by_plan
from lightning_attn._linked.parallel.groups import where
from lightning_attn._parallel import ops as parallel_ops
from torch.library import opcheck

from .._linked.budget import Maker
from ._distributed import (
    CASES,
    HEADS,
    D,
    given,
    judge,
    judge_errors,
    on_rank,
    one_rank_of,
    packed,
    problem,
)
from ._ranks import Ranks

pytestmark = pytest.mark.eager


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("zigzag", 3),
        ("contiguous", 2),
        ("empty", 3),
        ("packed", 2),
        ("packed-zigzag", 2),
        ("packed-first", 2),
        ("packed-last", 2),
        ("zigzag", 1),
    ],
)
def test_equals_one_process(name, ranks, monkeypatch):
    case = CASES[name]
    made = problem(case)
    judge(case, Ranks(ranks, monkeypatch).run(lambda rank: on_rank(case, rank, ranks, made)))


def start(ranks, names, folder, monkeypatch):
    """Start processes; return what each left."""
    # the processes import this module by its name, along the path of this one
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    mp.spawn(one_rank_of, ("gloo", ranks, str(folder), names), nprocs=ranks)
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]


@pytest.mark.skipif(linear_ops.interpreted(), reason="the eager tier starts processes")
def test_processes_equal_one_and_raise_alike(tmp_path, monkeypatch):
    left = start(2, tuple(CASES), tmp_path, monkeypatch)
    for name, case in CASES.items():
        judge(case, [found[name] for found in left])
    judge_errors(left)


@pytest.fixture
def one_rank():
    """A group of this process alone."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_traces_hold_the_exchange(one_rank):
    q, k, v, decay = given()

    def function(q, k, v):
        scaled = distributed.lightning_attn_func(q, k, v * 2, decay, output_final_state=True)
        return scaled[0].sum() + scaled[1].sum()

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

    def dense(q, k, v, decay):
        return distributed.lightning_attn_func(q, k, v, decay, output_final_state=True)

    def of_plan(q, k, v, decay, plan):
        return distributed.lightning_attn_varlen_func(
            q[0], k[0], v[0], decay, plan, output_final_state=True
        )

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
            for got, want in zip(compiled(*x), function(*x), strict=True):
                assert torch.equal(got, want)
        assert len(graphs) == 2


@pytest.mark.parametrize("has_final", [False, True])
def test_operators_are_what_they_say(has_final, one_rank):
    *x, decay = (t.detach() for t in given())
    x = [t[0] for t in x]
    cut = cut_by_plan(distributed.ShardPlan([0, 4, 4, 6], 1, causal=True), 0)
    # a run more than there are, as where ranks have none of a sequence
    options = 0.5, "auto", True, has_final, *cut, 3, where(None).group
    utils = ("test_schema", "test_faketensor")
    initial = torch.ones(3, HEADS, D, D)
    out, states, final = parallel_ops.sharded_forward(*x, decay, initial, *options, None)
    assert states.shape[0] == 3 + final.shape[0] == 3 + 3 * has_final
    arriving = out, *x, decay, states, final if has_final else None, [True] * 5
    for operator, arguments in (
        (parallel_ops.compare_calls, (x[0], x[2], decay, *options, False)),
        (parallel_ops.sharded_forward, (*x, decay, initial, *options, None)),
        (parallel_ops.sharded_backward, (*arriving, *options)),
    ):
        opcheck(operator, arguments, test_utils=utils)


def test_a_second_derivative_raises(one_rank):
    q, k, v, decay = given()
    out, _ = distributed.lightning_attn_func(q, k, v, decay)
    with pytest.raises(NotImplementedError, match="second derivatives are not offered across"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


PLAN = distributed.ShardPlan([0, 6], 1)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: distributed.lightning_attn_func(*given(), shard="balanced"), ValueError,
         "shard must be one of zigzag, contiguous, got 'balanced'"),
        (lambda: distributed.lightning_attn_func(*given(), shard=None), TypeError,
         "shard must be a string, got NoneType"),
        (lambda: distributed.lightning_attn_func(*given(), seqlen=7), ValueError,
         "q must hold 7 of 7 tokens on rank 0 of 1, zigzag, got 6"),
        (lambda: distributed.lightning_attn_func(*given(), seqlen=6.0), TypeError,
         "seqlen must be an int, got float"),
        (lambda: distributed.lightning_attn_func(*given(), validate=1), TypeError,
         "validate must be a bool, got int"),
        (lambda: distributed.lightning_attn_func(*given(), group="all"), TypeError,
         "group must be a torch.distributed.ProcessGroup, got str"),
        (lambda: distributed.lightning_attn_func(None, *given()[1:]), TypeError,
         "q must be a torch.Tensor, got NoneType"),
        (lambda: packed([0, 6]), TypeError, "plan must be a ShardPlan, got list"),
        (lambda: packed(distributed.ShardPlan([0, 6], 2)), ValueError,
         "plan must be of 1 ranks, as the group is, got 2"),
        (lambda: packed(PLAN, 5), ValueError, "q must hold the 6 tokens of rank 0, got 5"),
        (lambda: packed(PLAN, initial_state=torch.zeros(2, HEADS, D, D)), ValueError,
         r"initial_state must be \[batch, heads, d, e\], \[1, 2, 16, 16\]"),
    ],
)  # fmt: skip
def test_wrong_arguments_raise(call, error, message, one_rank):
    with pytest.raises(error, match=message):
        call()


def test_a_group_is_needed():
    with pytest.raises(ValueError, match=r"group must be a process group, but torch.distributed"):
        distributed.lightning_attn_func(*given())


def test_whole_sequences_cost_no_exchange(monkeypatch):
    """Nor does their plan, whose package may be another one."""
    made = distributed.ShardPlan([0, 20, 40], 2)

    class ShardPlan:
        group_size, window, shard_rule = made.group_size, made.window, made.shard_rule
        host_lengths, counts, run_counts = made.host_lengths, made.counts, made.run_counts

    ranks = Ranks(2, monkeypatch)

    def function(rank):
        q, k, v, decay = given(40)
        own = [made.shard(x[0], rank) for x in (q, k, v)]
        return distributed.lightning_attn_varlen_func(*own, decay, ShardPlan())[0]

    out = made.unshard(ranks.run(function))
    assert ranks.exchanges == 0
    q, k, v, decay = given(40)
    starts = torch.tensor([0, 20, 40], dtype=torch.int32)
    want, _ = lightning_attn_varlen_func(q[0], k[0], v[0], decay, starts)
    assert torch.equal(out, want)


def test_kernels_add_what_the_eager_code_adds(device):
    """States so large that what is left of them shows until it is 0 in fp32."""
    from lightning_attn._parallel import eager as parallel_eager
    from lightning_attn._parallel import shards

    if device.type == "cpu" and not linear_ops.interpreted():
        pytest.skip("the same code twice")
    from lightning_attn._parallel.kernels import launch

    layout = shards.Layout((40, 130), 2, (-1, 0), "contiguous", 1)
    table = shards.table_of(layout, True)
    m = Maker(device, torch.float32)
    every = 1e20 * m.randn(2 * (table.sends + table.finals), HEADS, D, 48)
    decay = torch.tensor([2.0, 0.1], device=device)
    base = 1e20 * m.randn(table.rows, HEADS, D, 48)
    # a GPU may take a factor below fp32's normal numbers for 0
    least = torch.finfo(torch.float32).tiny * float(every.abs().amax())
    found = []
    for backend, target in ((parallel_eager, "cpu"), (launch, device)):
        on = table.on(torch.device(target))
        x, rates, added = every.to(target), decay.to(target), base.to(target)
        states = backend.arrive(x, rates, added, on.earlier)
        found.append((states.cpu(), backend.arrive(x, rates, None, on.later).cpu()))
    for got, want in zip(*found, strict=True):
        # of each row's largest: the last ones have decayed to 0
        unit = want.abs().amax(-1, keepdim=True)
        assert ((got - want).abs() <= 1e-5 * unit + least).all()


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("schedule", ["sequential", "parallel"])
def test_runs_that_stay_are_not_written(schedule, reverse, device):
    """A message has no row for them: other memory may lie behind it."""
    from lightning_attn._parallel import (
        eager as parallel_eager,
    )
    from lightning_attn._parallel import (
        passes,
        shards,
    )

    backend = parallel_eager
    if device.type != "cpu" or linear_ops.interpreted():
        from lightning_attn._parallel.kernels import launch as backend
    table = shards.table_of(shards.Layout((31, 16, 5), 2, (-1, 0), "balanced", 0), False)
    assert table.sends_first
    assert table.sends == len(table.runs) - 1
    m = Maker(device, torch.float32)
    k, v = (m.randn(table.tokens, HEADS, D) for _ in "kv")
    decay = m.uniform(HEADS, low=0.01, high=0.3)
    x = passes.Inputs(k, k, v, decay, table.on(device).cu_seqlens)
    memory = torch.full((len(table.runs), HEADS, D, D), float("nan"), device=device)
    options = passes.Sharded(1.0, schedule, False, False, None, [], len(table.runs), "")
    passes._write(backend, x, memory[: table.sends], table, options, reverse=reverse)
    assert not memory[: table.sends].isnan().any()
    assert memory[table.sends :].isnan().all()
