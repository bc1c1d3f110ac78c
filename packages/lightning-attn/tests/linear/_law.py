"""Helpers of law tests that other tests use too."""

from __future__ import annotations

import torch
from lightning_attn import lightning_attn_func

from .._linked.budget import TF32X3_UNIT, assert_no_worse_than_eager
from .._numerics import STATE_UNITS, run_eager, run_oracle


def judge(case, out, state):
    """Hold an output and a final state to the budget of the whole."""
    oracle = run_oracle(case, grad=False)
    eager = run_eager(case, oracle, grad=False)
    dtype = case.inputs["q"].dtype
    eps = TF32X3_UNIT if dtype == torch.float32 else None
    assert_no_worse_than_eager("o", out, eager["o"], oracle["o"], 2.0, eps)
    assert_no_worse_than_eager(
        "state", state, eager["state"], oracle["state"], 2.0, STATE_UNITS[dtype]
    )


def in_pieces(case, pieces, schedule="auto"):
    state, outputs = case.inputs.get("initial_state"), []
    for begin, end in pieces:
        part = [case.inputs[name][:, begin:end] for name in "qkv"]
        out, state = lightning_attn_func(
            *part,
            case.inputs["decay"],
            **case.options,
            initial_state=state,
            output_final_state=True,
            schedule=schedule,
        )
        outputs.append(out)
    return torch.cat(outputs, 1), state
