"""What benchmarks on several GPUs share: whose turn it is, which time counts, who writes."""

import json
import sys

import pytest
import torch

from .conftest import ROOT

sys.path.insert(0, str(ROOT / "linked"))
from benchmarks import ranks

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    """Seconds that functions take, on a clock that nothing else moves; the calls in their order."""
    now, called = [0.0], []

    def takes(name, seconds):
        """Return a function whose calls take so long, one after the other."""
        left = iter(seconds)

        def function():
            called.append(name)
            now[0] += next(left)

        return function

    monkeypatch.setattr(ranks.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(ranks.dist, "barrier", lambda: called.append("barrier"))
    monkeypatch.setattr(ranks.dist, "all_reduce", longest)
    return takes, called


def longest(x, operation):
    """Another rank takes twice as long."""
    assert operation == torch.distributed.ReduceOp.MAX
    x *= 2


def test_functions_take_turns(clock):
    takes, called = clock
    functions = [takes(name, [1.0] * 99) for name in "ab"]
    assert ranks.in_turns(functions, CPU, 2) == [2000.0, 2000.0]
    assert called == [*"aaabbb", *["barrier", *"aa", "barrier", *"bb"] * 7]


def test_the_median_counts(clock):
    takes, _ = clock
    # three calls to warm up, then seven times two, in no order
    seconds = [90.0] * 3 + [half for time in (7, 1, 5, 60, 2, 4, 3) for half in (time, 0.0)]
    assert ranks.in_turns([takes("a", seconds)], CPU, 2) == [4000.0]


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_prints_and_writes(rank, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(ranks.dist, "get_rank", lambda: rank)
    file = tmp_path / "found.json"
    results = ranks.Results({"ranks": 2}, file)
    rows = [{"ms": 1.5}, {"ms": 2.5}]
    for row in rows:
        results.add(row)
    printed = capsys.readouterr().out.splitlines()
    if rank:
        assert not printed
        assert not file.exists()
    else:
        assert [json.loads(line) for line in printed] == rows
        assert json.loads(file.read_text()) == {"machine": {"ranks": 2}, "results": rows}
        ranks.Results({}, None).add(rows[0])
