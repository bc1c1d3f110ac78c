"""What travels between ranks, how gradients that come back are summed, and what comes when."""

from __future__ import annotations

import threading

import pytest
import torch
from flash_attn_triton import distributed
from flash_attn_triton._dense import ops as dense_ops
from flash_attn_triton._linked.host.forms import Memory
from flash_attn_triton._linked.parallel.cut import Layout
from flash_attn_triton._parallel import (
    backward,
    exchange,
    passes,
)
from flash_attn_triton._parallel import (
    ops as parallel_ops,
)
from flash_attn_triton._parallel.pieces import MERGED, Piece
from flash_attn_triton._parallel.shards import NO_WINDOW, Product, Rectangle, Rows, Table, _Placed

from .._linked.budget import Maker, assert_same
from ..dense._cuts import CASES, on_rank, problem
from ._ranks import Ranks

pytestmark = pytest.mark.eager

TOKENS, HEADS, D, DV = 60, 2, 16, 24
# ranges of rows, and their rasters
RANGES = {
    "none": ([(3, 3)], []),
    "one": ([(0, 7), (7, 20)], [(0, 20, 20, 1)]),
    "alike": ([(4, 8), (14, 18), (24, 28), (34, 38), (44, 48)], [(4, 4, 10, 5)]),
    "few": ([(0, 9), (20, 23), (59, 60)], [(0, 9, 9, 1), (20, 3, 3, 1), (59, 1, 1, 1)]),
    "apart": ([(0, 4), (10, 14), (21, 25)], [(0, 4, 4, 1), (10, 4, 4, 1), (21, 4, 4, 1)]),
    "many": ([(0, 9), (20, 23), (30, 31), (59, 60)], None),
}


def indices(ranges):
    return [i for ends in ranges for i in range(*ends)]


@pytest.mark.parametrize(("ranges", "rasters"), RANGES.values(), ids=RANGES)
def test_rows_travel_as_keys_and_then_values(ranges, rasters, device):
    m, rows = Maker(device, torch.bfloat16), Rows(ranges)
    assert rows.rasters == rasters
    wanted = indices(ranges)
    assert rows.count == len(wanted)
    k, v = m.randn(TOKENS, HEADS, D), m.randn(TOKENS, HEADS, DV)
    for x, y in ((k, v), (k.transpose(1, 2), v.mT.contiguous().mT)):
        message = rows.message(x, y)
        assert torch.equal(message, torch.cat([x[wanted].flatten(), y[wanted].flatten()]))
    spread = rows.spread(k[wanted], TOKENS) if wanted else None
    if spread is not None:
        assert torch.equal(spread[wanted], k[wanted])
        assert spread.count_nonzero() == k[wanted].count_nonzero()


class Arrived:
    """An exchange that is over."""

    def __init__(self, *pair):
        self._pair = pair

    def wait(self):
        return self._pair


@pytest.mark.parametrize("count", [0, 1, 3, 9])
@pytest.mark.parametrize("ranges", [r for r, _ in RANGES.values()], ids=RANGES)
def test_gradients_of_keys_are_rounded_once(ranges, count, device):
    m = Maker(device, torch.bfloat16)
    k, v = m.randn(TOKENS, HEADS, D), m.randn(TOKENS, HEADS, DV)
    # two sequences, as a product has them
    own = Product([Rectangle(NO_WINDOW, b, b + 30, b, b + 30) for b in (0, 30)])
    grads, wide = backward._KeyGradients(k, v), []
    grads.add(own, k.unflatten(0, (2, 30)).clone(), v.unflatten(0, (2, 30)).clone())
    wide = [k.double(), v.double()]
    rows, wanted = Rows(ranges), indices(ranges)
    for i in range(count):
        # the first ones are so large that each sum would round what comes after them
        pair = [m.randn(rows.count, HEADS, w) * 2.0 ** (3 - i) for w in (D, DV)]
        grads.receive(Arrived(*pair), rows)
        for whole, x in zip(wide, pair, strict=True):
            whole[wanted] += x.double()
        assert all(len(pieces._held) <= MERGED for pieces in grads._of)
    for got, want, like in zip(grads.result(), wide, (k, v), strict=True):
        assert (got.shape, got.dtype) == (like.shape, like.dtype)
        # one rounding, which the interpreter makes towards zero
        unit = torch.finfo(torch.bfloat16).eps / (1 if dense_ops.interpreted() else 2)
        error = (got.double() - want).abs()
        assert (error <= unit * want.abs() + 1e-6 * want.abs().max()).all()


def test_keys_between_rectangles_get_no_gradient(device):
    m = Maker(device, torch.float32)
    product = Product([Rectangle(NO_WINDOW, b, b + 4, b, b + 4) for b in (2, 8)])
    k, v = m.randn(14, HEADS, D), m.randn(14, HEADS, DV)
    grads = backward._KeyGradients(k, v)
    given = [m.randn(2, 4, HEADS, w) for w in (D, DV)]
    grads.add(product, *given)
    for got, x in zip(grads.result(), given, strict=True):
        want = x.new_zeros(14, *x.shape[2:])
        want[2:6], want[8:12] = x
        assert torch.equal(got, want)


def test_pieces_that_begin_between_accesses_are_copied(monkeypatch):
    """Where keys have odd widths or lengths, values arrive behind them at any address."""
    from flash_attn_triton._parallel.kernels import launch

    launched = []

    class Launch:
        def __init__(self, *_):
            pass

        def __call__(self, grid, tensors, numbers):
            launched.append([x.data_ptr() % 16 for x in tensors if x is not None])

    monkeypatch.setattr(launch, "Launch", Launch)
    monkeypatch.setattr(launch, "_launches", Memory())
    flat = torch.zeros(1 + 8 * HEADS * D)
    pieces = [Piece(x.view(8, HEADS, D), None, (0, 8, 8, 1)) for x in (flat[:-1], flat[1:])]
    launch.merge(pieces, 8, torch.bfloat16)
    assert launched == [[0, 0, 0]]


@pytest.mark.skipif(dense_ops.interpreted(), reason="the same host code")
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_last_exchange_begins_before_the_merge(ranks, monkeypatch):
    events, lock = {rank: [] for rank in range(ranks)}, threading.Lock()
    group = Ranks(ranks, monkeypatch)

    def note(owner, name, word):
        function = getattr(owner, name)

        def noting(*given, **named):
            with lock:
                events[group.rank].append(word)
            return function(*given, **named)

        monkeypatch.setattr(owner, name, noting)

    note(exchange.Channel, "send", "send")
    note(exchange.Exchange, "wait", "wait")
    note(backward, "give_way", "give way")
    note(passes.Pieces, "_merged", "merge")
    x = torch.ones(1, 8, 1, 16)

    def function(rank):
        q, k, v = (x.clone().requires_grad_() for _ in range(3))
        out = distributed.flash_attn_func(q, k, v, causal=True)
        events[rank].clear()
        out.sum().backward()

    group.run(function)
    for of_rank in events.values():
        # dq, and behind the last gradients of keys dk and dv
        assert of_rank[-6:] == ["send", "give way", "merge", "wait", "merge", "merge"]
        assert of_rank.count("give way") == 1
        assert of_rank.count("send") == 2 * (ranks - 1)


@pytest.mark.skipif(dense_ops.interpreted(), reason="the same host code")
def test_nothing_gives_way_to_an_empty_exchange(monkeypatch):
    """Of three ranks the middle one neither sends nor asks for keys in the last step."""
    gave, group = [], Ranks(3, monkeypatch)
    monkeypatch.setattr(backward, "give_way", lambda x: gave.append(group.rank))
    x = torch.ones(1, 8, 1, 16)

    def function(rank):
        q, k, v = (x.clone().requires_grad_() for _ in range(3))
        distributed.flash_attn_func(q, k, v, causal=True, shard="contiguous").sum().backward()

    group.run(function)
    assert sorted(gave) == [0, 2]


MIX = (64, 32, 16, 8, 4, 4)
LAYOUTS = {
    "zigzag": ((48,), (-1, 0), "zigzag", 4),
    "contiguous": ((48,), (-1, 0), "contiguous", 5),
    "window": ((60,), (4, 3), "zigzag", 5),
    "neighbours": ((60, 20), (3, 2), "contiguous", 6),
    "packed": (MIX * 2, (-1, 0), "balanced", 4),
    "more packed": (MIX * 4, (-1, 0), "balanced", 8),
    "some empty": ((3, 0, 2), (-1, -1), "contiguous", 6),
}


@pytest.mark.parametrize(("lengths", "window", "rule", "ranks"), LAYOUTS.values(), ids=LAYOUTS)
def test_ranks_agree_on_each_exchange(lengths, window, rule, ranks):
    tables = [Table(Layout(lengths, ranks, window, rule, rank)) for rank in range(ranks)]
    for steps in zip(*(table.steps for table in tables), strict=True):
        for rank, step in enumerate(steps):
            if step.receives:
                sender = steps[step.source]
                assert (sender.target, sender.sends.count) == (rank, step.receives)
            if step.sends.count:
                receiver = steps[step.target]
                assert (receiver.source, receiver.receives) == (rank, step.sends.count)
            assert bool(step.receives) == bool(step.products)
        assert any(step.receives for step in steps)
    for table in tables:
        # the keys of a rank come at once
        sources = [step.source for step in table.steps if step.receives]
        assert len(sources) == len(set(sources))


@pytest.mark.parametrize(
    ("name", "count"),
    [("zigzag", 3), ("contiguous", 4), ("neighbours", 2), ("packed", 1), ("more packed", 1)],
)
def test_ranks_without_common_partners_share_an_exchange(name, count):
    lengths, window, rule, ranks = LAYOUTS[name]
    table = Table(Layout(lengths, ranks, window, rule, 0))
    assert len(table.steps) == count


@pytest.mark.parametrize("apart", ["receives", "sends"])
def test_who_has_two_partners_takes_two_exchanges(apart):
    """Two sequences of two tokens, of which a rank holds one of each, and two others the rest."""
    first, second = _Placed(0, 1, 0), _Placed(1, 2, 0)
    one, other = (second, first) if apart == "receives" else (first, second)
    table = Table(Layout((1,), 3, (-1, 0), "contiguous", 0))
    table._runs = [{0: [one], 1: [one._replace(row=1)]}, {0: [other]}, {1: [other]}]
    found = [(r, x.source) for asked in table._exchanges(3) for r, x in asked.items()]
    wanted = [(0, 2), (0, 1)] if apart == "receives" else [(1, 0), (2, 0)]
    assert found == wanted
    assert len(table._exchanges(3)) == 2


@pytest.mark.skipif(dense_ops.interpreted(), reason="the same host code")
def test_a_product_is_planned_once_for_a_form(monkeypatch):
    planned = []
    monkeypatch.setattr(passes, "_plans", Memory())
    monkeypatch.setattr(
        dense_ops, "plan_of", lambda x, *_, **__: planned.append(x.q) or len(planned)
    )
    options = passes.Sharded(1.0, 0.0, False, None, [], "")
    product = Product([Rectangle((-1, -1), 1, 4, 0, 5)])
    k = torch.randn(5, 2, 16)

    def plan_of(q, k=k, sinks=None):
        known = passes.Pass.of(q, k, k, sinks, options)
        return passes.Part(product, q, k, k, sinks, known)._plan(needs_gradient=False)

    q, wide = torch.randn(5, 4, 16), torch.randn(5, 4, 32)[..., :16]
    assert [plan_of(x) for x in (q, q.clone(), wide, q)] == [1, 1, 2, 1]
    assert plan_of(q, sinks=torch.zeros(4)) == 3
    assert plan_of(q, k.transpose(0, 1).contiguous().transpose(0, 1)) == 4
    # the operators copy what does not begin with an access: the first row, or the second
    assert plan_of(torch.randn(5 * 64 + 1)[1:].view(5, 4, 16)) is None
    assert plan_of(torch.randn(5, 1, 3), torch.randn(5, 1, 3)) is None


@pytest.mark.skipif(dense_ops.interpreted(), reason="the same host code")
def test_past_the_operators_results_are_the_same(monkeypatch):
    case = CASES["packed"]
    made = problem(case)

    def run(watched):
        monkeypatch.setattr(parallel_ops, "is_watched", lambda: watched)
        monkeypatch.setattr(parallel_ops, "may_skip_operator", lambda *_: not watched)
        return Ranks(2, monkeypatch).run(lambda rank: on_rank(case, rank, 2, made))

    for one, other in zip(run(True), run(False), strict=True):
        assert_same(one, other)


@pytest.mark.skipif(dense_ops.interpreted(), reason="the same host code")
def test_results_may_be_written_to(monkeypatch):
    x = torch.randn(1, 8, 1, 16)

    def function(rank):
        q = x.clone().requires_grad_()
        plain = distributed.flash_attn_varlen_func(x[0], x[0], x[0], plan)
        out = distributed.flash_attn_varlen_func(q[0], x[0], x[0], plan)
        assert (out.requires_grad, plain.requires_grad) == (True, False)
        assert torch.equal(out.mul_(2).detach(), plain.mul_(2))

    # a sequence each, so that nothing is merged
    plan = distributed.ShardPlan([0, 8, 16], 2)
    Ranks(2, monkeypatch).run(function)
