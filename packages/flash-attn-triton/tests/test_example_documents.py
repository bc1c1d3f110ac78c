"""The worked example: packs of documents train alike on one rank and on several."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from flash_attn_triton._linked.host.forms import interpreted

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "train_long_documents.py"


@pytest.mark.eager
@pytest.mark.skipif(interpreted(), reason="slow, and test_distributed.py shows the kernels")
def test_the_example_on_one_rank(monkeypatch, device, capsys):
    spec = importlib.util.spec_from_file_location("train_long_documents", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "train_long_documents", example)
    spec.loader.exec_module(example)
    arguments = ["train_long_documents.py", "--steps", "2", "--device", str(device)]
    monkeypatch.setattr(sys, "argv", [*arguments, "--longest", "40"])
    assert example.main() == 0
    assert "largest difference" in capsys.readouterr().out
