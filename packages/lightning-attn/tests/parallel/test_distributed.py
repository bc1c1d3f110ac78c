"""Sequences that are cut across ranks, against one process that holds all tokens."""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning_attn import (
    distributed,
    lightning_attention_reference,
    lightning_attention_varlen_reference,
    lightning_attn_varlen_func,
)
from lightning_attn._linear import ops as linear_ops
from lightning_attn._linked.parallel.cut import cut_by_plan
from lightning_attn._linked.parallel.groups import where
from lightning_attn._parallel import ops as parallel_ops
from torch.library import opcheck

from .._linked.budget import TF32X3_UNIT, Maker, assert_no_worse_than_eager
from ._ranks import Ranks

pytestmark = pytest.mark.eager

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


def start(ranks, names, folder, monkeypatch):
    """Start processes; return what each left."""
    # the processes import this module by its name, along the path of this one
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    mp.spawn(one_rank_of, ("gloo", ranks, str(folder), names), nprocs=ranks)
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]


def judge_errors(left):
    """Compare the errors of two ranks with what they should say."""
    for rank, found in enumerate(left):
        for (_, pattern), error in zip(DISAGREEMENTS, found["errors"], strict=False):
            wanted = pattern if isinstance(pattern, str) else pattern[rank]
            assert re.search(wanted, error), (rank, error)
    assert left[0]["errors"]


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


def given(tokens=6):
    m = Maker("cpu", torch.float32)
    q, k, v = (m.randn(1, tokens, HEADS, D).requires_grad_() for _ in range(3))
    return q, k, v, m.uniform(HEADS, low=0.1, high=0.5)


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


def packed(plan, tokens=6, **options):
    q, k, v, decay = given(tokens)
    return distributed.lightning_attn_varlen_func(q[0], k[0], v[0], decay, plan, **options)


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
