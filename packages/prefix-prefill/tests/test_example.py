"""The worked example: an engine whose answers are those of a model without a cache."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from prefix_prefill._paged import ops

SCRIPT = Path(__file__).parent.parent / "examples" / "engine.py"

pytestmark = [
    pytest.mark.eager,
    pytest.mark.skipif(ops.interpreted(), reason="an interpreted model takes minutes"),
]


@pytest.fixture
def engine(monkeypatch):
    spec = importlib.util.spec_from_file_location("engine", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "engine", module)
    spec.loader.exec_module(module)
    return module


def test_answers_are_those_without_a_cache(engine, capsys):
    assert engine.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "token for token what the model says without a cache"
    steps = [line for line in lines if line.startswith("step")]
    # decoding and a chunk of a prompt in one step
    assert any("[0.." in step and step.count("|") > 2 for step in steps)


def test_pages_are_reused_and_shared(engine):
    found = engine.Engine(engine.Decoder())
    requests = engine.make_requests()
    found.run(requests)
    assert all(request.is_done for request in requests)
    assert found.reused > 0
    assert found.shared_steps > 0
    assert sorted(found.free) == list(range(engine.PAGES))
    assert not any(found.users)
    # a prompt of one token, prompts in several chunks, and more tokens than the cache holds
    total = sum(len(request.tokens) for request in requests)
    assert total > engine.PAGES * engine.PAGE
    assert max(len(request.prompt) for request in requests) > 2 * engine.TOKENS_PER_STEP


def test_a_cache_that_is_too_small_for_all_serves_them_in_turn(engine):
    """The youngest gives up its pages, and its answer is what it would have been."""
    model = engine.Decoder()
    found = engine.Engine(model, pages=9)
    requests = engine.make_requests()
    found.run(requests)
    assert found.preempted > 0
    assert sorted(found.free) == list(range(9))
    assert not any(found.users)
    for request in requests:
        assert request.answer == engine.without_cache(model, request.prompt, request.most)
    with pytest.raises(ValueError, match="request z is longer than the cache"):
        found.add(engine.Request("z", [8] * 70, 4))


@pytest.mark.parametrize("fault", ["slots", "lengths", "pages"])
def test_a_fault_shows(engine, fault, monkeypatch):
    """Answers depend on what is checked: with a fault in the engine they differ."""
    if fault == "slots":
        write = engine.reshape_and_cache
        monkeypatch.setattr(
            engine, "reshape_and_cache", lambda k, v, a, b, slots: write(k, v.flip(0), a, b, slots)
        )
    elif fault == "lengths":
        attend = engine.paged_attn_func
        monkeypatch.setattr(
            engine,
            "paged_attn_func",
            lambda q, k, v, table, starts, lengths, *rest: attend(
                q, k, v, table, starts, (lengths - 1).clamp(min=1), *rest
            ),
        )
    else:
        attend = engine.paged_attn_func
        monkeypatch.setattr(
            engine,
            "paged_attn_func",
            lambda q, k, v, table, *rest: attend(q, k, v, table.clamp(min=0).flip(1), *rest),
        )
    assert engine.main(["--quiet"]) == 1


@pytest.fixture
def speculative(engine, monkeypatch):
    path = SCRIPT.parent / "speculative.py"
    spec = importlib.util.spec_from_file_location("speculative", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "speculative", module)
    spec.loader.exec_module(module)
    return module


def test_drafted_trees_give_the_answers_of_greedy_decoding(speculative, capsys):
    assert speculative.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].endswith("token for token those of greedy decoding")
    accepted = [int(line.split(", ")[1].split()[0]) for line in lines if line.startswith("step")]
    # whole paths, and drafts that the model does not follow
    assert max(accepted) == len(speculative.WIDTHS)
    assert min(accepted) < max(accepted)


@pytest.mark.parametrize("fault", ["tree", "keys", "accept"])
def test_a_fault_in_speculation_shows(speculative, fault, monkeypatch):
    if fault == "tree":
        attend = speculative.paged_attn_func
        monkeypatch.setattr(speculative, "paged_attn_func", lambda *rest, tree_mask: attend(*rest))
    elif fault == "keys":
        monkeypatch.setattr(speculative.Cached, "keep", lambda *_: None)
    else:
        accept = speculative.accept
        monkeypatch.setattr(
            speculative, "accept", lambda tree, logits: accept(tree, logits.roll(1, 0))
        )
    assert speculative.main(["--quiet"]) == 1
