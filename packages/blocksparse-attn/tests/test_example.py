"""The worked examples: a model prefilled and decoded, and one that learns what to attend to."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from blocksparse_attn._linked.host.forms import interpreted

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def load(name, monkeypatch):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def phi3_small(monkeypatch):
    return load("phi3_small", monkeypatch)


@pytest.mark.eager
@pytest.mark.skipif(interpreted(), reason="slow")
@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_selector_learns(is_sparse, monkeypatch):
    """A few steps: it knows by then that a passage comes, and not yet where from."""
    losses = load("train_selected", monkeypatch).train(is_sparse, 10)
    assert losses[-1] < losses[0]


def test_prefill_and_decode_on_the_kernels(phi3_small, device):
    config = phi3_small.Config(layers=2, heads=4, heads_k=1, max_seqlen=96, head_dim=8)
    assert phi3_small.compare(device, config, prompt=40, count=2) < 1e-4


@pytest.mark.eager
@pytest.mark.skipif(interpreted(), reason="slow: the smaller model above shows the kernels")
def test_the_example_as_it_stands(phi3_small, device, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["phi3_small.py", "--device", str(device)])
    assert phi3_small.main() == 0
    assert "largest difference" in capsys.readouterr().out
