"""Public names, the command line, and the examples."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nki_paged_attn
import pytest
from nki_paged_attn import sim
from nki_paged_attn.__main__ import main

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_all_names_exist_and_are_sorted():
    for module in (nki_paged_attn, sim):
        classes = [n for n in module.__all__ if n[0].isupper()]
        assert module.__all__ == sorted(classes, key=lambda n: (not n.isupper(), n)) + sorted(
            n for n in module.__all__ if not n[0].isupper()
        )
        for name in module.__all__:
            assert getattr(module, name) is not None


@pytest.mark.parametrize("arguments", [[], ["check"]])
def test_check(arguments, capsys, monkeypatch):
    monkeypatch.setenv("NKI_PAGED_ATTN_BACKEND", "sim")
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert f"nki-paged-attn {nki_paged_attn.__version__}" in printed
    assert printed.count(", ok") == 12
    assert "target trn2" in printed


def test_check_fails_on_a_mismatch(capsys, monkeypatch):
    from nki_paged_attn import __main__

    monkeypatch.setenv("NKI_PAGED_ATTN_BACKEND", "sim")
    right = __main__.paged_attention
    monkeypatch.setattr(__main__, "paged_attention", lambda *a, **o: right(*a, **o) * 1.1)
    assert main(["check"]) == 1
    assert "MISMATCH" in capsys.readouterr().out


def test_cost_and_plan(capsys, tmp_path):
    batch = ["--queries", "40,2x1", "--contexts", "0,2x300", "--kv-heads", "2"]
    assert main(["plan", *batch]) == 0
    assert "2 sequences with keys on the partitions, 1 with queries" in capsys.readouterr().out
    page = tmp_path / "timeline.html"
    assert main(["cost", *batch, "--html", str(page), "--target", "trn3", "--programs", "2"]) == 0
    assert "trn3:" in capsys.readouterr().out
    assert "<svg" in page.read_text()


def test_cost_wants_as_many_contexts_as_queries(capsys):
    assert main(["cost", "--queries", "1,1", "--contexts", "5"]) == 2
    assert "--contexts must be as many as --queries, 2, got 1" in capsys.readouterr().err


def test_the_command_line_is_a_module():
    command = [sys.executable, "-m", "nki_paged_attn", "chekc"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "invalid choice" in done.stderr


@pytest.mark.parametrize("target", ["trn1", "trn2", "trn3"])
@pytest.mark.parametrize("name", ["tiled_matmul", "softmax", "rms_norm"])
def test_examples(name, target, tmp_path):
    page = tmp_path / "timeline.html"
    command = [
        sys.executable,
        str(EXAMPLES / "run.py"),
        name,
        "--html",
        str(page),
        "--target",
        target,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    error = float(done.stdout.partition("largest error ")[2].split()[0])
    assert error < 1e-4
    assert "bound by" in done.stdout
    assert page.read_text().startswith("<!doctype html>")
