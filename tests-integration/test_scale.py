"""Many processes share a sequence, more than a merge has time to start."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning_attn import distributed, lightning_attention_reference

from . import _rank

pytestmark = pytest.mark.scale


@pytest.mark.parametrize(
    ("ranks", "shard", "seqlen"),
    [(8, "contiguous", 1600), (4, "zigzag", 517), (8, "zigzag", 5)],
    ids=["even", "uneven", "empty"],
)
def test_ranks_equal_the_whole(ranks, shard, seqlen, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = str(Path(_rank.__file__))
    rest = [str(ranks), str(tmp_path), shard, str(seqlen)]
    processes = [
        subprocess.Popen([sys.executable, script, str(rank), *rest], env=environment)
        for rank in range(ranks)
    ]
    assert [process.wait(timeout=300) for process in processes] == [0] * ranks
    parts = [torch.load(tmp_path / f"{rank}.pt") for rank in range(ranks)]
    got = {
        name: distributed.unshard([part[name] for part in parts], shard=shard)
        for name in ("out", "q", "k", "v")
    }
    got |= {name: sum(part[name] for part in parts) for name in ("decay", "initial_state")}
    got["final"] = parts[0]["final"]
    wide, narrow = (
        _rank.differentiate(lightning_attention_reference, _rank.problem(seqlen, dtype))
        for dtype in (torch.float64, torch.float32)
    )
    for name, value in got.items():
        error, eager = ((x - wide[name]).abs().max() for x in (value, narrow[name]))
        # sums in another order: three times the error of one process, and the last two bits
        budget = 3 * eager + 2 * torch.finfo(torch.float32).eps * wide[name].abs().max()
        assert error <= budget, f"{name}: {error} over {budget}"


@pytest.mark.parametrize(("ranks", "heads"), [(1, 1), (3, 1), (4, 1), (4, 2), (4, 4)])
def test_softmax_ranks_equal_the_whole(ranks, heads, tmp_path):
    """Each process compares its own results."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = str(Path(__file__).with_name("_attention_rank.py"))
    rest = [str(ranks), str(heads), str(tmp_path)]
    processes = [
        subprocess.Popen([sys.executable, script, str(rank), *rest], env=environment)
        for rank in range(ranks)
    ]
    assert [process.wait(timeout=300) for process in processes] == [0] * ranks


def launched(ranks, name, *command):
    """Run a script of a package under torchrun; return what it printed."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["OMP_NUM_THREADS"] = "1"
    root = Path(__file__).resolve().parent.parent / "packages" / name
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    run = subprocess.run(
        [sys.executable, "-m", *launcher, *command],
        cwd=root, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize(("ranks", "data"), [(2, 1), (4, 1), (4, 2)])
def test_documents_train_alike_on_several_ranks(ranks, data):
    """The example of flash-attn-triton, with FSDP2 on a mesh of two dimensions."""
    example = ["examples/train_long_documents.py", "--device", "cpu", "--steps", "6"]
    printed = launched(ranks, "flash-attn-triton", *example, "--data", str(data))
    assert "largest difference" in printed


def test_a_trainer_trains_alike_on_several_ranks():
    pytest.importorskip("accelerate")
    example = ["examples/train_with_trainer.py", "--device", "cpu", "--steps", "4"]
    assert "largest difference" in launched(2, "flash-attn-triton", *example)


def test_a_trainer_of_groups_trains_alike_on_trees():
    pytest.importorskip("trl")
    packages = Path(__file__).resolve().parent.parent / "packages"
    example = packages / "flash-attn-triton" / "examples" / "train_with_trl.py"
    command = [sys.executable, str(example), "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "in a tree" in done.stdout


@pytest.mark.parametrize(
    ("name", "rows", "arguments", "speed"),
    [
        ("flash-attn-triton", 12, ["--tokens", "16", "32"], "share"),
        ("lightning-attn", 2, ["--tokens", "64", "--heads", "4"], "share"),
        ("prefix-prefill", 1, ["--keys", "64"], "ratio"),
    ],
)
def test_benchmarks_compare_and_write(name, rows, arguments, speed, tmp_path):
    """Of several GPUs, where there are none: what does not come to the same ends the run."""
    file = tmp_path / "found.json"
    command = ["benchmarks/bench_parallel.py", "--json", str(file), "--device", "cpu"]
    printed = launched(2, name, *command, *arguments)
    found = json.loads(file.read_text())
    assert found["machine"]["ranks"] == 2
    assert len(found["results"]) == rows
    # rank 0 alone prints
    assert [json.loads(line) for line in printed.splitlines()] == found["results"]
    timed = [row for row in found["results"] if speed in row]
    assert all(torch.tensor([row["ms"], row["one_gpu_ms"]]).min() > 0.0 for row in timed)
    assert len(timed) == rows - (4 if name == "flash-attn-triton" else 0)
