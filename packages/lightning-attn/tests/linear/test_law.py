"""The law of this package: whole = pieces with carried state = token by token = decoding.

All ways compute the same sums in other orders, so each is held to the oracle's error budget.
"""

from __future__ import annotations

import random

import pytest
import torch
from lightning_attn import lightning_attn_decode, lightning_attn_varlen_func
from lightning_attn._linear import ops

from .._linked.budget import offsets
from .._numerics import SCHEDULES, Shape, make_case
from ._law import in_pieces, judge

pytestmark = pytest.mark.eager

SHAPE = Shape(2, 43, 2, 16, 32)


def splits(tokens, seed):
    """Cut into pieces at random."""
    draw = random.Random(seed)
    cuts = sorted(draw.sample(range(1, tokens), draw.randint(1, 4)))
    return list(zip([0, *cuts], [*cuts, tokens], strict=True))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_pieces_with_a_carried_state(seed, dtype, schedule, device):
    case = make_case(SHAPE, dtype, device, ["drawn", "none", "strong"][seed])
    judge(case, *in_pieces(case, splits(SHAPE.seqlen, seed), schedule))


@pytest.mark.skipif(
    not ops.interpreted(), reason="builds may round otherwise, and so does eager code"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pieces_that_begin_with_a_chunk_have_the_bits_of_the_whole(dtype, device):
    """Chunks of the interpreter's tile have 16 tokens."""
    case = make_case(SHAPE._replace(seqlen=75), dtype, device)
    whole, state = in_pieces(case, [(0, 75)], "sequential")
    for ends in ((16, 75), (32, 48, 75)):
        pieces = list(zip((0, *ends), ends, strict=False))
        out, last = in_pieces(case, pieces, "sequential")
        assert torch.equal(out, whole), ends
        assert torch.equal(last, state), ends
    assert not torch.equal(in_pieces(case, [(0, 40), (40, 75)], "sequential")[1], state)


def test_token_by_token(device):
    case = make_case(SHAPE._replace(seqlen=9), torch.float32, device)
    judge(case, *in_pieces(case, [(t, t + 1) for t in range(9)]))


@pytest.mark.parametrize("step", [1, 3, 8])
def test_decoding(step, device):
    case = make_case(SHAPE._replace(seqlen=11), torch.float32, device)
    slots = torch.tensor([3, 1], device=device)
    cache = torch.full((5, 2, 16, 32), float("nan"), device=device)
    cache[slots] = case.inputs["initial_state"]
    outputs = []
    for begin in range(0, 11, step):
        part = [case.inputs[name][:, begin : begin + step] for name in "qkv"]
        outputs.append(
            lightning_attn_decode(*part, cache, case.inputs["decay"], slots, **case.options)
        )
    judge(case, torch.cat(outputs, 1), cache[slots])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_packed_prefill_then_decoding(schedule, device):
    """What an engine does: chunks of a prompt through a cache, then one token at a time."""
    case = make_case(SHAPE, torch.float32, device)
    slots = torch.tensor([2, 0], dtype=torch.int32, device=device)
    cache = torch.full((4, 2, 16, 32), float("nan"), device=device)
    cache[slots.long()] = case.inputs["initial_state"]
    outputs = []
    for begin, end in ((0, 18), (18, 40)):
        flat = [case.inputs[name][:, begin:end].flatten(0, 1) for name in "qkv"]
        out, _ = lightning_attn_varlen_func(
            *flat,
            case.inputs["decay"],
            offsets([end - begin] * 2, device),
            **case.options,
            state_cache=cache,
            state_indices=slots,
            schedule=schedule,
        )
        outputs.append(out.view(2, end - begin, 2, 32))
    for t in range(40, 43):
        part = [case.inputs[name][:, t : t + 1] for name in "qkv"]
        outputs.append(
            lightning_attn_decode(*part, cache, case.inputs["decay"], slots, **case.options)
        )
    judge(case, torch.cat(outputs, 1), cache[slots.long()])


def test_schedules_agree(device):
    case = make_case(SHAPE, torch.float32, device)
    for schedule in SCHEDULES:
        out, state = case.on(schedule).function(
            **case.inputs, **case.on(schedule).options, output_final_state=True
        )
        judge(case, out, state)


@pytest.mark.device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pieces_at_length(dtype, device):
    case = make_case(Shape(1, 9000, 4, 128, 128), dtype, device, "slopes")
    for schedule in SCHEDULES:
        judge(case, *in_pieces(case, splits(9000, 5), schedule))
