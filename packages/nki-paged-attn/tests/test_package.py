"""Public names, the command line, and the examples."""

from __future__ import annotations

import json
import runpy
import signal
import subprocess
import sys
import types
from pathlib import Path

import nki_paged_attn
import pytest
from nki_paged_attn import Bucket, count_instructions, sim
from nki_paged_attn.__main__ import _parser, main

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
    events = tmp_path / "timeline.json"
    files = ["--html", str(page), "--trace", str(events)]
    assert main(["cost", *batch, *files, "--target", "trn3", "--programs", "2"]) == 0
    printed = capsys.readouterr().out
    assert "trn3:" in printed
    shape = {"heads": 8, "kv_heads": 2, "head_dim": 128, "block_size": 32, "target": "trn3"}
    count = count_instructions(Bucket(8, 512, 4096), **shape, programs=2)
    assert f" forms of {count} instructions" in printed
    assert "nc_matmul" in printed
    assert "<svg" in page.read_text()
    found = json.loads(events.read_text())["traceEvents"]
    assert {e["pid"] for e in found} == {0, 1}
    assert {e["ph"] for e in found} == {"M", "X", "b", "e"}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("cost --queries 1,1 --contexts 5", "--contexts must be as many as --queries, 2, got 1"),
        ("cost --heads 3 --kv-heads 2", "heads must be 1 to 128 times kv_heads, 2, got 3"),
        ("cost --target trn9", "target must be one of trn1"),
        ("cost --head-dim 300", "head_dim must be from 1 to 256, got 300"),
        ("cost --html {folder}/missing/x.html", "No such file or directory"),
        ("cost --html x.json", "--html must be a file that ends in .html, got 'x.json'"),
        ("cost --trace x.txt", "--trace must be a file that ends in .json, got 'x.txt'"),
        ("plan --window 0", "window must be at least 1"),
        ("plan --block-size 0", "block_size must be at least 1, got 0"),
        ("plan --queries -1 --contexts 5", "query_lens must be at least 0, got -1"),
        ("plan --queries 1 --contexts -5", "query_lens must be at least 0"),
        ("plan --queries 1 --contexts 20000000", "a sequence may have at most 16777216 keys"),
        ("run missing.py", "file must be a Python file, got 'missing.py'"),
        ("check --backend gpu", "backend must be one of auto, nki, nki-sim, sim, got 'gpu'"),
    ],
)
def test_bad_arguments_are_a_message_and_not_a_traceback(arguments, text, capsys, tmp_path):
    assert main(arguments.format(folder=tmp_path).split()) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("plan --queries a", "must be like 512,8x1, got 'a'"),
        ("cost --dtype float64", "invalid choice: 'float64'"),
        ("cost --cache-dtype int8", "invalid choice: 'int8'"),
    ],
)
def test_arguments_that_cannot_be_read(arguments, text, capsys):
    with pytest.raises(SystemExit):
        main(arguments.split())
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("NEURON_PLATFORM_TARGET_OVERRIDE", "target must be one of"),
        ("NEURON_LOGICAL_NC_CONFIG", "NEURON_LOGICAL_NC_CONFIG must be 1 or 2"),
    ],
)
def test_an_environment_that_is_wrong_is_a_message_too(name, text, capsys, monkeypatch):
    monkeypatch.setenv(name, "trn9")
    assert main(["check", "--backend", "sim"]) == 2
    assert text in capsys.readouterr().err


def test_the_command_line_is_a_module():
    command = [sys.executable, "-m", "nki_paged_attn", "chekc"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "invalid choice" in done.stderr


@pytest.mark.skipif(not hasattr(signal, "SIGPIPE"), reason="this platform has no SIGPIPE")
def test_a_reader_that_stops_early_sees_no_traceback():
    command = [sys.executable, "-m", "nki_paged_attn", "cost", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        # before the first line is written
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == -signal.SIGPIPE


def test_every_option_has_help():
    for command in _commands().values():
        for action in command._actions:
            assert action.help, action.dest


def _commands():
    (commands,) = (a for a in _parser()._actions if a.dest == "command")
    return commands.choices


SCRIPT = """
import sys
import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

@nki.jit
def double(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=2.0)
    nisa.dma_copy(dst=out, src=tile)
    print(nisa.get_nc_version().name)
    return out

if __name__ == "__main__":
    print(nki.simulate(double)(np.ones((2, 2), np.float32)).sum(), sys.argv[1:])
"""


def test_a_file_runs_with_the_simulator_as_its_nki(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    command = [sys.executable, "-m", "nki_paged_attn", "run", "--target", "trn3", str(path), "--x"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "gen4\n8.0 ['--x']\n", done.stderr


def test_a_file_is_not_run_on_the_simulator_where_nki_is(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "nki", types.ModuleType("nki"))
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    assert main(["run", str(path)]) == 2
    assert "nki is installed: run the file with it" in capsys.readouterr().err
    assert not sim.install()


@pytest.mark.parametrize("name", ["tiled_matmul", "softmax", "rms_norm"])
def test_examples_run_as_files(name):
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{name}: largest error" in done.stdout


@pytest.mark.parametrize("target", ["trn1", "trn2", "trn3"])
@pytest.mark.parametrize("name", ["tiled_matmul", "softmax", "rms_norm"])
def test_examples(name, target, tmp_path, monkeypatch, capsys):
    page = tmp_path / "timeline.html"
    program = runpy.run_path(str(EXAMPLES / "run.py"))
    monkeypatch.setattr(sys, "argv", ["run", name, "--html", str(page), "--target", target])
    program["main"]()
    printed = capsys.readouterr().out
    assert float(printed.partition("largest error ")[2].split()[0]) < 1e-4
    assert "bound by" in printed
    assert page.read_text().startswith("<!doctype html>")
