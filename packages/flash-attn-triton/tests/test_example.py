"""The worked examples: what trains with this package trains as what it replaces."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from flash_attn_triton._linked.host.forms import interpreted

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def load(name, monkeypatch):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def example(monkeypatch):
    return load("train_grouped_answers", monkeypatch)


@pytest.mark.device
def test_two_steps_on_the_kernels(example, device):
    assert max(example.train(2, 2, 20, 3, str(device))) < 1e-4


@pytest.mark.eager
def test_the_two_forms_hold_the_same_tokens(example):
    prompt, answers, _ = example.draw_group(3, 9, 4, torch.Generator().manual_seed(0))
    rows = torch.cat((prompt.expand(3, 9), answers), 1)
    for is_tree in (False, True):
        batch, labels = example.pack(prompt, answers, is_tree)
        assert torch.equal(batch.tokens[batch.gather], rows.flatten())
        assert torch.equal(batch.positions[batch.gather], torch.arange(13).repeat(3))
        wanted = labels != -100
        assert torch.equal(labels[wanted], answers.flatten())
        assert torch.equal(batch.positions[batch.gather][wanted], torch.arange(8, 12).repeat(3))
        assert len(batch.tokens) <= 21 if is_tree else len(batch.tokens) == 39


@pytest.mark.eager
@pytest.mark.skipif(interpreted(), reason="slow, and test_tree.py shows the kernels")
def test_the_example_as_it_stands(example, device, monkeypatch, capsys):
    arguments = ["train_grouped_answers.py", "--device", str(device), "--steps", "5"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert example.main() == 0
    assert "largest difference" in capsys.readouterr().out


@pytest.mark.device
@pytest.mark.parametrize("name", ["evoformer", "t5"])
def test_learned_biases_on_the_kernels(name, device, monkeypatch):
    module = load("learned_bias", monkeypatch)
    losses, apart = module.train(name, 2, 20, str(device))
    assert len(losses) == 2
    assert apart < 1e-4


@pytest.mark.device
def test_sinks_on_the_kernels(device, monkeypatch):
    losses = load("train_sinks", monkeypatch).train(2, 2, 20, str(device))
    assert losses["fused"] == pytest.approx(losses["written out"], abs=1e-4)


@pytest.mark.eager
@pytest.mark.skipif(interpreted(), reason="slow, and the tests above show the kernels")
@pytest.mark.parametrize(("name", "steps"), [("learned_bias", "20"), ("train_sinks", "40")])
def test_examples_as_they_stand(name, steps, device, monkeypatch, capsys):
    module = load(name, monkeypatch)
    monkeypatch.setattr(sys, "argv", [name, "--device", str(device), "--steps", steps])
    assert module.main() == 0
    assert "largest difference" in capsys.readouterr().out
    # what is not computed shows
    monkeypatch.setattr(module, "fused", lambda *x, **_: x[2])
    assert module.main() == 1
