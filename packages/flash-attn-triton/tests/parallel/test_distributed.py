"""Sequences that are cut across ranks, against one process that holds all tokens."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.distributed as dist
from flash_attn_triton import distributed, flash_attn_varlen_func
from flash_attn_triton._dense import ops as dense_ops
from flash_attn_triton._linked.parallel.cut import cut_alike, cut_by_plan
from flash_attn_triton._linked.parallel.groups import where
from flash_attn_triton._parallel import (
    exchange,
    pieces,
)
from flash_attn_triton._parallel import (
    ops as parallel_ops,
)
from torch.library import opcheck

from .._linked.budget import Maker, assert_same
from ..dense._cuts import CASES, DV, HEADS_K, Case, D, judge, on_rank, problem
from ._ranks import Ranks

pytestmark = pytest.mark.eager

# kernels are interpreted for what differs in the calls of them
by_definition = pytest.mark.skipif(dense_ops.interpreted(), reason="takes long in the interpreter")


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
@pytest.mark.parametrize(("backward", "bound"), [(False, 2), (True, 2 + pieces.MERGED)])
def test_few_keys_of_others_are_in_memory(backward, bound, monkeypatch):
    """Those of two ranks at a time, and gradients from a few, whatever the number of ranks."""
    ranks, held, most = 9, [0] * 9, [0] * 9
    group = Ranks(ranks, monkeypatch)

    class Counted(exchange.Exchange):
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

    monkeypatch.setattr(exchange, "Exchange", Counted)
    x = torch.ones(1, 4, 1, 16)

    def function(rank):
        q, k, v = (x.clone().requires_grad_(backward) for _ in range(3))
        out = distributed.flash_attn_func(q, k, v)
        if backward:
            out.sum().backward()

    group.run(function)
    assert most == [bound] * ranks
    assert held == [0] * ranks


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
    out, lse = parallel_ops.sharded_forward(q, k, v, sinks, *options, None)
    x = q, k, v, sinks
    for operator, arguments in (
        (parallel_ops.compare_calls, (*x, *options, False, [options[-1]])),
        (parallel_ops.sharded_forward, (*x, *options, None)),
        (parallel_ops.sharded_backward, (out, *x, out, lse, None, *options)),
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
