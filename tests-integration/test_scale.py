"""Many processes share a sequence, more than a merge has time to start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning_attn import lightning_attention_reference

from . import _rank

pytestmark = pytest.mark.scale


@pytest.mark.parametrize(
    "lengths", [(200,) * 8, (5, 0, 301, 17, 1, 64, 0, 128)], ids=["even", "odd"]
)
def test_ranks_equal_the_whole(lengths, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = Path(_rank.__file__)
    commands = [
        [sys.executable, str(script), str(rank), str(tmp_path), *map(str, lengths)]
        for rank in range(len(lengths))
    ]
    ranks = [subprocess.Popen(command, env=environment) for command in commands]
    assert [rank.wait(timeout=300) for rank in ranks] == [0] * len(lengths)
    parts = [torch.load(tmp_path / f"{rank}.pt") for rank in range(len(lengths))]
    got = {name: torch.cat([part[name] for part in parts], 1) for name in ("out", "q", "k", "v")}
    got["decay"] = sum(part["decay"] for part in parts)
    got["initial_state"], got["final"] = parts[0]["initial_state"], parts[-1]["final"]
    wide, narrow = (
        _rank.differentiate(lightning_attention_reference, _rank.problem(sum(lengths), dtype))
        for dtype in (torch.float64, torch.float32)
    )
    for name, value in got.items():
        error, eager = ((x - wide[name]).abs().max() for x in (value, narrow[name]))
        # sums in another order: three times the error of one process, and the last two bits
        budget = 3 * eager + 2 * torch.finfo(torch.float32).eps * wide[name].abs().max()
        assert error <= budget, f"{name}: {error} over {budget}"
