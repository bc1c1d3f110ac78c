"""Heads in two groups, whose states travel one after the other: the same bits, and when it is."""

from __future__ import annotations

import datetime
import itertools
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from attn_common import Platform
from lightning_attn import _configs, _ops, _sharded, _shards, distributed
from lightning_attn._linked.parallel.cut import Layout

from ._ranks import Ranks
from .test_distributed import Case, judge, on_rank, problem

pytestmark = pytest.mark.eager

# an odd number of heads, whose decays differ, and initial states where there are any
HEADS = 3
CASES = {
    "zigzag": Case(39, "zigzag", "parallel", batch=2, e=32, heads=HEADS),
    "contiguous": Case(35, "contiguous", "sequential", heads=HEADS),
    "packed": Case(0, "balanced", "parallel", (70, 0, 5, 19), heads=HEADS),
    # a run that is not sent ahead of those that are, and on the other rank behind them
    "packed-mixed": Case(0, "balanced", "sequential", (9, 31, 5), final=False, heads=HEADS),
}


def in_groups(monkeypatch, count):
    """Take so many groups, whatever the sizes are."""
    monkeypatch.setattr(
        _sharded, "head_groups_of", lambda k, *_: _sharded.cut_heads(k.shape[-2], count)
    )


def outputs(case, rank, ranks, made):
    """Return what a rank computes in a forward pass."""
    x = [case.cut(made[name], ranks, rank) for name in "qkv"]
    options = {"initial_state": made["initial_state"], "output_final_state": case.final}
    options |= {"schedule": case.schedule, "scale": 0.5}
    function, rest = distributed.lightning_attn_func, ()
    if case.lengths is not None:
        function, rest = distributed.lightning_attn_varlen_func, (case.plan(ranks),)
    else:
        options |= {"shard": case.shard, "seqlen": case.seqlen}
    return [t for t in function(*x, made["decay"], *rest, **options) if t is not None]


def assert_alike(whole, halves):
    """Compare bits of kernels; on a CPU, products go by strides."""
    for one, other in zip(whole, halves, strict=True):
        if _ops.interpreted() or one.is_cuda:
            assert torch.equal(one, other)
        else:
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("zigzag", 2), ("zigzag", 3), ("contiguous", 3), ("packed", 2), ("packed-mixed", 2)],
)
def test_groups_change_no_bit(name, ranks, monkeypatch, device):
    case = CASES[name]
    made = problem(case, device)
    found = []
    for count in (1, 2):
        in_groups(monkeypatch, count)
        threads = Ranks(ranks, monkeypatch)
        found.append(threads.run(partial(outputs, case, ranks=ranks, made=made)))
        assert threads.exchanges == count
    for whole, halves in zip(*found, strict=True):
        assert_alike(whole, halves)


def test_gradients_are_those_of_one_process(monkeypatch):
    """States for the backward pass come from both groups."""
    in_groups(monkeypatch, 2)
    case = CASES["contiguous"]
    made = problem(case)
    judge(case, Ranks(2, monkeypatch).run(lambda rank: on_rank(case, rank, 2, made)))


@pytest.mark.parametrize("shard", ["zigzag", "contiguous"])
def test_segments_beside_an_exchange_are_the_definition(shard, monkeypatch):
    """Groups that are chosen go by segments of their own."""
    monkeypatch.setattr(_configs, "BESIDE", 8)
    monkeypatch.setattr(_configs, "SMALLEST_SEGMENT", 16)
    in_groups(monkeypatch, 2)
    case = Case(150, shard, heads=HEADS, inputs=("q", "k", "v"))
    made = problem(case)
    judge(case, Ranks(2, monkeypatch).run(lambda rank: on_rank(case, rank, 2, made)))


def one_rank_of(rank, ranks, folder):
    """Compute in one group of heads and in two, as one of several processes."""
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=120)  # a hang is a failure
    dist.init_process_group(
        "gloo", f"file://{folder}/meeting", rank=rank, world_size=ranks, timeout=limit
    )
    monkeypatch = pytest.MonkeyPatch()
    try:
        for case in CASES.values():
            found = []
            for count in (1, 2):
                in_groups(monkeypatch, count)
                found.append(outputs(case, rank, ranks, problem(case)))
            assert_alike(*found)
    finally:
        monkeypatch.undo()
        dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, 3])
def test_processes_come_to_the_same_bits(ranks, tmp_path, monkeypatch):
    """Over gloo; the kernels where this process interprets them."""
    # the processes import this module by its name, along the path of this one
    monkeypatch.syspath_prepend(Path(__file__).parent.parent)
    mp.spawn(one_rank_of, (ranks, str(tmp_path)), nprocs=ranks)


def test_states_travel_while_the_other_group_is_walked(monkeypatch):
    """The order on the GPU's stream; it is that of the collectives, which all ranks share."""
    done = []

    class Exchange:
        def __init__(self, message, *_):
            self.heads = message.shape[1]
            self.every = torch.cat([message, message])
            done.append(("start", self.heads))

        def wait(self):
            done.append(("wait", self.heads))
            return self.every

    def note(name):
        return lambda *x: done.append((name, heads_of(x)))

    def heads_of(x):
        return next(t for t in x if hasattr(t, "key")).key.shape[1]

    backend = SimpleNamespace(
        write_runs=note("write"), read_runs=note("read"), arrive=lambda *_: done.append("arrive")
    )
    monkeypatch.setattr(_sharded, "Exchange", Exchange)
    in_groups(monkeypatch, 2)
    x = torch.zeros(8, 3, 16)
    options = _sharded.Sharded(1.0, "auto", False, False, None, [2, 0, 1, -1, -1, 1, 16], 2, "")
    _sharded.forward(backend, x, x, x, torch.ones(3), None, options)
    assert done == [
        *[("write", 2), ("start", 2), ("write", 1), ("start", 1)],
        *[("wait", 2), "arrive", ("read", 2), ("wait", 1), "arrive", ("read", 1)],
    ]


def groups_of(tokens, heads, shard, ranks=2, d=128, e=128, schedule="auto", lengths=None):
    """Return how many groups each rank takes."""
    found = []
    for rank in range(ranks):
        layout = Layout(lengths or (tokens * ranks,), ranks, (-1, -1), shard, rank)
        k, v = (torch.empty(0, heads, width, device="meta") for width in (d, e))
        options = _sharded.Sharded(1.0, schedule, False, False, None, [], 2, "")
        table = _shards.table_of(layout, False)
        found.append(_sharded.head_groups_of(k, v, options, table))
    assert found == ranks * found[:1], "ranks differ"
    bounds = [(heads.start, heads.stop) for heads in found[0]]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == heads
    assert all(one[1] == other[0] for one, other in itertools.pairwise(bounds))
    return len(bounds)


def test_large_passes_take_two_groups():
    for shard in ("zigzag", "contiguous"):
        for ranks in (2, 3, 8):
            assert groups_of(65536, 32, shard, ranks) == 2
        assert groups_of(65536, 33, "contiguous") == 2
        assert groups_of(16384, 64, shard) == 1  # too short to hide what it costs
        assert groups_of(65536, 16, shard) == 1
        assert groups_of(1 << 22, 1, shard) == 1
    # half of the heads would leave no place for the exchange, or a part of the GPU idle
    assert groups_of(65536, 64, "zigzag") == 1
    assert groups_of(65536, 34, "zigzag") == 1
    assert groups_of(65536, 32, "zigzag", e=256) == 1
    assert groups_of(65536, 32, "zigzag", schedule="parallel") == 1
    assert groups_of(131072, 32, "zigzag", ranks=1) == 1
    assert groups_of(0, 32, "zigzag", lengths=(8192,) * 16) == 1
    assert groups_of(0, 32, "balanced", lengths=(131072, 5)) == 2


def test_walks_beside_an_exchange_leave_room():
    hopper = Platform.parse("nvidia:sm_90")
    tile = _configs.walk_tile(hopper, 128, 128, "bf16")
    for heads, runs in ((16, 1), (16, 2), (17, 1), (8, 3), (1, 2), (50, 1)):
        plan = _configs.plan_walk("beside", tile, 128, heads, runs, 65536)
        assert plan.segmented
        assert plan.size % tile.chunk == 0
        assert plan.tile.block_e == 128
        pieces = runs * -(-65536 // runs // plan.size)
        assert 0.8 * _configs.BESIDE <= heads * pieces <= _configs.BESIDE
    # however many there are, segments: they cost nothing, where states are made anyway
    assert _configs.plan_walk("beside", tile, 128, 96, 2, 65536).size == 16384
    assert not _configs.plan_walk("beside", tile, 128, 8, 1, 200).segmented
