"""Sequence parallelism on two and four processes, against one process that holds all tokens."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning_attn import _ops, distributed, lightning_attention_reference, lightning_attn_func

from ._linked.budget import TF32X3_UNIT, Maker, assert_no_worse_than_eager

pytestmark = pytest.mark.eager

HEADS, D, E, BATCH = 2, 16, 32, 2
NAMES = ("o", "dq", "dk", "dv", "ddecay", "dinitial", "final")


def problem(tokens: int, device: torch.device | str = "cpu") -> tuple[torch.Tensor, ...]:
    """Everything, the same on every rank."""
    m = Maker(device, torch.float32)
    q, k = m.randn(BATCH, tokens, HEADS, D), m.randn(BATCH, tokens, HEADS, D)
    v, dout = m.randn(BATCH, tokens, HEADS, E), m.randn(BATCH, tokens, HEADS, E)
    state, dfinal = m.randn(BATCH, HEADS, D, E), m.randn(BATCH, HEADS, D, E)
    return q, k, v, dout, state, dfinal, m.uniform(HEADS, low=0.01, high=0.3)


def one_rank_of(rank: int, backend: str, lengths: tuple[int, ...], folder: str) -> None:
    """Compute a slice, and leave the results in a file."""
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    meeting = f"file://{folder}/meeting"
    limit = datetime.timedelta(seconds=120)  # a hang is a failure
    dist.init_process_group(backend, meeting, rank=rank, world_size=len(lengths), timeout=limit)
    try:
        q, k, v, dout, state, dfinal, decay = problem(sum(lengths), device)
        begin = sum(lengths[:rank])
        mine = slice(begin, begin + lengths[rank])
        leaves = [t[:, mine].clone().requires_grad_() for t in (q, k, v)]
        leaves += [decay.requires_grad_(), state.requires_grad_()]
        out, final = distributed.lightning_attn_func(
            *leaves[:4], scale=0.5, initial_state=leaves[4], output_final_state=True
        )
        # the gradient of the final state belongs to the last rank
        is_last = rank == len(lengths) - 1
        arriving = dfinal if is_last else torch.zeros_like(dfinal)
        grads = torch.autograd.grad(
            (out, final), leaves, (dout[:, mine], arriving), allow_unused=True
        )
        results = dict(zip(NAMES, (out, *grads, final), strict=True))
        torch.save(
            {name: t.detach().cpu() for name, t in results.items() if t is not None},
            Path(folder) / f"{rank}.pt",
        )
    finally:
        dist.destroy_process_group()


def whole(function, dtype, tokens, device):
    """The same on one process."""
    q, k, v, dout, state, dfinal, decay = (t.to(dtype) for t in problem(tokens, device))
    leaves = [t.clone().requires_grad_() for t in (q, k, v, decay, state)]
    out, final = function(*leaves[:4], scale=0.5, initial_state=leaves[4], output_final_state=True)
    grads = torch.autograd.grad((out, final), leaves, (dout, dfinal))
    return dict(zip(NAMES, (t.cpu() for t in (out, *grads, final)), strict=True))


def judge_parts(folder, lengths, device):
    """Compare the slices that the ranks left with one process that holds all tokens."""
    parts = [torch.load(folder / f"{rank}.pt") for rank in range(len(lengths))]
    got = {name: torch.cat([part[name] for part in parts], 1) for name in ("o", "dq", "dk", "dv")}
    got["ddecay"] = torch.stack([part["ddecay"] for part in parts]).sum(0)
    got["dinitial"], got["final"] = parts[0]["dinitial"], parts[-1]["final"]
    tokens = sum(lengths)
    eager = whole(lightning_attention_reference, torch.float32, tokens, device)
    oracle = whole(lightning_attention_reference, torch.float64, tokens, device)
    alone = whole(lightning_attn_func, torch.float32, tokens, device)
    for name in NAMES:
        # sums in another order: three times the error, as for gradients
        given = eager[name], oracle[name], 3.0, TF32X3_UNIT
        assert_no_worse_than_eager(name, got[name], *given)
        assert_no_worse_than_eager(f"{name} alone", alone[name], *given)


@pytest.mark.parametrize("lengths", [(20, 13), (9, 0, 17, 5)], ids=str)
def test_equals_one_process(lengths, tmp_path, monkeypatch):
    # the processes import this module by its name, along the path of this one
    monkeypatch.syspath_prepend(Path(__file__).parent.parent)
    if len(lengths) == 4 and _ops.interpreted():
        pytest.skip("four processes do as two of them do, and take most of a minute to start")
    mp.spawn(one_rank_of, ("gloo", lengths, str(tmp_path)), nprocs=len(lengths))
    judge_parts(tmp_path, lengths, "cpu")
