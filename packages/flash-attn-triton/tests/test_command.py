"""``python -m flash_attn_triton``: what it says of the kernels on Hopper."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from attn_common import Platform
from flash_attn_triton import __main__ as command
from flash_attn_triton.__main__ import PORTABLE, describe
from flash_attn_triton._dense import tiles
from flash_attn_triton._dense.call import Options, Tensors
from flash_attn_triton._dense.portable.backward_launch import BackwardPlan
from flash_attn_triton._dense.portable.form import Form
from flash_attn_triton._dense.tiles import (
    takes_hopper_backward,
    takes_hopper_forward,
    takes_short_backward,
)

from ._linked.gpus import absent_gpu

pytestmark = pytest.mark.eager

HOPPER = "nvidia:sm_90"
PAGE = Path(__file__).resolve().parent.parent / "docs" / "how-it-works.md"
PLAIN = Options(0.125, -1, -1, 0.0, 0.0)
LEFT = PLAIN._replace(window_left=9)
BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


def empty(*size, dtype=BF16):
    return torch.empty(size, dtype=dtype, device="meta")


def call(tokens=256, head_dim=64, head_dim_v=None, dtype=BF16, bias=None):
    q, v = (empty(1, tokens, 2, d, dtype=dtype) for d in (head_dim, head_dim_v or head_dim))
    return Tensors(q, q, v, bias=bias)


BIAS = empty(1, 2, 256, 256)
ONE = BIAS[..., :1]


def forward(x, options=PLAIN, out_dtype=None):
    out_dtype = out_dtype or (BF16 if x.q.dtype == FP8 else x.q.dtype)
    return takes_hopper_forward(x, options, out_dtype)


def backward(x, options=PLAIN):
    """Say whether the kernel for Hopper makes the gradients of q, k and v."""
    if takes_short_backward(x, options, x.q.dtype) or not takes_hopper_backward(x, options):
        return False
    plan = BackwardPlan(Form(x, options), x, x.q.dtype, False)
    return plan._hopper.is_worth_it(x.q.shape[1])


def bias_gradient(x, options=PLAIN):
    hopper = BackwardPlan(Form(x, options), x, x.q.dtype, False)._hopper
    return hopper is not None and hopper.makes_dbias


def starts(x):
    """Return the call packed, as one sequence."""
    q, k, v = (t[0] for t in x[:3])
    offsets = empty(2, dtype=torch.int32)
    return x._replace(q=q, k=k, v=v, cu_seqlens_q=offsets, cu_seqlens_k=offsets)


# by the first words of a row: calls next to each other, of which Hopper's kernels serve the first
BESIDE = {
    "fp32": [(forward, call(), call(dtype=FP32)), (backward, call(), call(dtype=FP32))],
    "forward, head dims": [
        (forward, call(head_dim=40), call(head_dim=32)),
        (forward, call(head_dim=32, head_dim_v=40), call(head_dim=32)),
        (backward, call(head_dim=40), call(head_dim=32, head_dim_v=64)),
    ],
    "FP8, head dim": [
        (forward, call(head_dim=32, head_dim_v=256, dtype=FP8), call(64, 16, 64, dtype=FP8))
    ],
    "FP8, fixed": [
        (forward, call(129, dtype=FP8), call(128, dtype=FP8)),
        (forward, call(2048, dtype=FP8), call(128, dtype=FP8)),
    ],
    "forward, out_dtype": [
        (forward, call(), (call(), PLAIN, FP32)),
        (forward, (call(dtype=FP8), PLAIN, torch.float16), (call(dtype=FP8), PLAIN, FP32)),
    ],
    "forward, softmax_scale": [
        (forward, call(), (call(), PLAIN._replace(softmax_scale=scale)))
        for scale in (0.0, -1.0, 2.0**-127)
    ],
    "forward and backward, spans": [
        (which, call(), call()._replace(spans=empty(1, 256, 1, 2, dtype=torch.int32)))
        for which in (forward, backward)
    ],
    "forward, dropout": [
        (forward, (call(), LEFT), (call(), LEFT._replace(dropout_p=0.1))),
        (forward, (call(), PLAIN._replace(dropout_p=0.1)), (call(), LEFT._replace(dropout_p=0.1))),
    ],
    "forward and backward, bias with a window": [
        (which, (call(bias=BIAS), PLAIN._replace(window_right=9)), (call(bias=BIAS), LEFT))
        for which in (forward, backward)
    ],
    "forward and backward, bias with one": [
        (which, call(bias=BIAS), call(bias=ONE)) for which in (forward, backward)
    ],
    "forward, bias": [
        (
            forward,
            (call(bias=BIAS), PLAIN._replace(softmax_scale=2.0**-10)),
            (call(bias=BIAS), PLAIN._replace(softmax_scale=2.0**-11)),
        )
    ],
    "FP8, bias": [(forward, call(dtype=FP8), call(dtype=FP8, bias=BIAS.float()))],
    "gradient of a bias": [
        (bias_gradient, call(bias=BIAS), call(bias=BIAS[:, :, :1])),
        (bias_gradient, call(bias=BIAS), call(bias=BIAS[:, :1].expand(1, 2, 256, 256))),
        (bias_gradient, call(bias=BIAS), call(bias=BIAS.float())),
        (bias_gradient, call(bias=BIAS), starts(call(bias=BIAS))),
        (bias_gradient, call(bias=BIAS), (call(bias=BIAS), PLAIN._replace(softcap=9.0))),
        (bias_gradient, call(head_dim=128, bias=BIAS), call(head_dim=136, bias=BIAS)),
        (
            bias_gradient,
            (call(32768, bias=empty(1, 2, 32768, 32768)), PLAIN._replace(dropout_p=0.1)),
            (call(32896, bias=empty(1, 2, 32896, 32896)), PLAIN._replace(dropout_p=0.1)),
        ),
    ],
    "backward, fixed lengths to": [
        (backward, call(129), call(128)),
        (backward, call(128, 72), call(128, 64)),
        (backward, call(128)._replace(sinks=empty(2)), call(128)),
    ],
    "backward, fixed lengths,": [
        (backward, call(32, 72), call(31, 72)),
        (backward, call(64)._replace(sinks=empty(2)), call(63)._replace(sinks=empty(2))),
    ],
}


@pytest.mark.parametrize("row", range(len(PORTABLE)), ids=[calls for calls, _ in PORTABLE])
def test_a_row_names_what_the_rules_leave_to_portable_kernels(row):
    calls, _ = PORTABLE[row]
    if calls == "backward of trees, deterministic":
        return  # tests/test_tree.py
    pairs = [found for words, found in BESIDE.items() if calls.startswith(words)][-1]
    with absent_gpu(HOPPER):
        for judge, served, left in pairs:
            served, left = (c if isinstance(c[0], Tensors) else (c,) for c in (served, left))
            assert judge(*served)
            assert not judge(*left)


def test_on_hopper_each_row_is_printed(capsys):
    with absent_gpu(HOPPER):
        describe(Platform.parse(HOPPER))
    shown = capsys.readouterr().out
    for calls, reason in PORTABLE:
        assert f"  {calls}: {reason}\n" in shown
    assert "head_dim to 192: forward 128 queries x 64 keys" in shown


def test_elsewhere_all_is_portable(capsys, monkeypatch):
    describe(Platform.parse("nvidia:sm_80"))
    monkeypatch.setattr(tiles, "HOPPER", False)
    describe(Platform.parse(HOPPER))
    shown = capsys.readouterr().out
    assert shown.count("every feature runs on the portable Triton kernels") == 2
    assert PORTABLE[0][0] + ":" not in shown


def test_the_page_gives_a_reason_beside_each_portable_call():
    page = PAGE.read_text(encoding="utf-8")
    table = page.split("why portable |\n")[1].split("\n\n")[0]
    rows = [re.split(r" ?\| ?", line)[1:-1] for line in table.splitlines()[1:]]
    assert len(rows) > 10
    for name, *passes, reason in rows:
        left = [cell for cell in passes if re.search("portable|but |to 256|bf16", cell)]
        assert bool(left) == bool(reason.strip()), name


def test_a_gpu_is_checked_on_calls_that_hopper_serves_in_both_passes(monkeypatch):
    """On a machine without one, the calls alone are looked at."""
    found = []

    def look(name, function, reference, tensors, options, dout):
        q, k, v = tensors
        window = options.get("window_size", (-1, -1))
        softcap = options.get("softcap", 0.0)
        asked = Options(0.1, window[0], window[1], softcap, 0.0)
        offsets = options.get("cu_seqlens_q")
        x = Tensors(q, k, v, offsets, offsets, bias=options.get("bias"))
        found.append((name, q.dtype, forward(x, asked) and backward(x, asked)))
        return True

    monkeypatch.setattr(command, "check_gradients", look)
    monkeypatch.setattr(command.torch, "randn", lambda shape, **_: empty(*shape))
    monkeypatch.setattr(torch.Tensor, "to", lambda x, device, dtype: empty(*x.shape, dtype=dtype))
    monkeypatch.setattr(command.torch, "tensor", lambda ends, **_: empty(len(ends)))
    with absent_gpu(HOPPER):
        assert command.check(torch.device("cuda"))
    assert sum(served for _, dtype, served in found if dtype != FP32) == 11
