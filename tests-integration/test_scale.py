"""Many processes share a sequence, more than a merge has time to start."""

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


@pytest.mark.parametrize(("ranks", "data"), [(2, 1), (4, 1), (4, 2)])
def test_documents_train_alike_on_several_ranks(ranks, data):
    """The example of flash-attn-triton, with FSDP2 on a mesh of two dimensions."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = Path(__file__).resolve().parent.parent / "packages" / "flash-attn-triton"
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    example = [str(root / "examples" / "train_long_documents.py"), "--device", "cpu"]
    command = [sys.executable, *launcher, *example, "--steps", "6", "--data", str(data)]
    environment["OMP_NUM_THREADS"] = "1"
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert "largest difference" in run.stdout
