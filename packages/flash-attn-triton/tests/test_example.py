"""The worked example: answers below one prompt train as answers with a prompt each."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from flash_attn_triton._linked.host.forms import interpreted

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "train_grouped_answers.py"


@pytest.fixture
def example(monkeypatch):
    spec = importlib.util.spec_from_file_location("train_grouped_answers", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "train_grouped_answers", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.device
def test_two_steps_on_the_kernels(example, device):
    assert max(example.train(2, 2, 20, 3, str(device))) < 1e-4


@pytest.mark.eager
def test_the_two_forms_hold_the_same_tokens(example):
    prompt, answers, _ = example.draw_group(3, 9, 4, torch.Generator().manual_seed(0))
    for form in (example.as_tree, example.written_out):
        batch = form(prompt, answers)
        assert torch.equal(batch.tokens[batch.answers], answers)
        assert torch.equal(batch.positions[batch.answers], torch.arange(9, 13).expand(3, 4))
        assert torch.equal(batch.positions[batch.ahead], torch.arange(8, 12).expand(3, 4))
        before = torch.cat((prompt[-1:].expand(3, 1), answers[:, :-1]), 1)
        assert torch.equal(batch.tokens[batch.ahead], before)


@pytest.mark.eager
@pytest.mark.skipif(interpreted(), reason="slow, and test_tree.py shows the kernels")
def test_the_example_as_it_stands(example, device, monkeypatch, capsys):
    arguments = ["train_grouped_answers.py", "--device", str(device), "--steps", "5"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert example.main() == 0
    assert "largest difference" in capsys.readouterr().out
