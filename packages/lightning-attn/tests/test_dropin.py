"""The drop-ins: layouts and meaning that engines rely on."""

from __future__ import annotations

import pytest
import torch
from lightning_attn import (
    lightning_attention,
    lightning_attention_reference,
    lightning_attn_decode,
    lightning_attn_func,
    linear_decode_forward_triton,
)

from ._linked.budget import Maker
from ._numerics import Shape, make_case, run_eager, run_oracle

pytestmark = pytest.mark.eager
SHAPE = Shape(2, 37, 2, 16, 32)


def heads_first(case):
    return [case.inputs[name].transpose(1, 2) for name in "qkv"]


@pytest.mark.parametrize("form", [(2,), (2, 1, 1), (1, 2, 1, 1)], ids=str)
def test_prefill_is_the_function_heads_first(form, device):
    case = make_case(SHAPE, torch.float32, device, scale=1.0)
    history = case.inputs["initial_state"]
    before = history.clone()
    out, kv = lightning_attention(
        *heads_first(case), case.inputs["decay"].view(form), kv_history=history
    )
    want, state = lightning_attn_func(**case.inputs, output_final_state=True)
    torch.testing.assert_close(out, want.transpose(1, 2), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(kv[:, :, -1], state, rtol=1e-5, atol=1e-5)
    assert torch.equal(history, before)
    assert kv.shape == (2, 2, 2, 16, 32)
    assert kv.dtype == torch.float32
    assert torch.equal(kv[:, :, 0], history)


@pytest.mark.parametrize(("block_size", "entries"), [(256, 2), (37, 2), (36, 3), (16, 4), (5, 9)])
def test_states_before_every_block(block_size, entries, device):
    case = make_case(SHAPE, torch.float32, device, scale=1.0)
    out, kv = lightning_attention(
        *heads_first(case),
        case.inputs["decay"],
        block_size,
        kv_history=case.inputs["initial_state"],
    )
    assert kv.shape == (2, 2, entries, 16, 32)
    for i in range(entries):
        end = min(i * block_size, SHAPE.seqlen)
        part = {n: t[:, :end] if n in "qkv" else t for n, t in case.inputs.items()}
        _, state = lightning_attention_reference(
            **{n: t.double() for n, t in part.items()}, output_final_state=True
        )
        torch.testing.assert_close(kv[:, :, i].double(), state, rtol=1e-4, atol=1e-4)
    oracle = run_oracle(case, grad=False)
    eager = run_eager(case, oracle, grad=False)
    from ._linked.budget import assert_no_worse_than_eager

    assert_no_worse_than_eager("o", out.transpose(1, 2), eager["o"], oracle["o"], eps=2.0**-21)


def test_prefill_without_history_or_tokens(device):
    case = make_case(SHAPE, torch.float32, device, state=False)
    _, kv = lightning_attention(*heads_first(case), case.inputs["decay"])
    assert not kv[:, :, 0].any()
    empty = [t[:, :, :0] for t in heads_first(case)]
    out, kv = lightning_attention(*empty, case.inputs["decay"])
    assert out.shape == (2, 2, 0, 32)
    assert kv.shape == (2, 2, 1, 16, 32)
    assert not kv.any()


def test_decoding_is_the_function_with_heads_flattened(device):
    m = Maker(device, torch.float32)
    q, k, v = m.randn(3, 2, 1, 16), m.randn(3, 2, 1, 16), m.randn(3, 2, 1, 48)
    cache, decay = m.randn(5, 2, 16, 48), m.uniform(2, low=0.1, high=1.0)
    slots = torch.tensor([4, -1, 0], dtype=torch.int64, device=device)
    other = cache.clone()
    got = linear_decode_forward_triton(q, k, v, cache, decay.view(2, 1, 1), slots, 64)
    rows = (t.transpose(1, 2) for t in (q, k, v))
    want = lightning_attn_decode(*rows, other, decay, slots)
    assert torch.equal(got, want.reshape(3, 2 * 48))
    assert torch.equal(cache, other)
    assert not got[1].any()
