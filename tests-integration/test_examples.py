"""Examples that need several packages."""

import importlib.util
from pathlib import Path

import pytest

for name in ("flash_attn_triton", "prefix_prefill"):
    pytest.importorskip(name)

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def test_sampler_and_trainer_have_the_same_bits(capsys):
    spec = importlib.util.spec_from_file_location("same_bits", EXAMPLES / "same_bits.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.PROMPT, example.ANSWER = 18, 3
    assert example.train(1, 2, "cpu", invariant=True) == [0.0]
    assert "equal" in capsys.readouterr().out
