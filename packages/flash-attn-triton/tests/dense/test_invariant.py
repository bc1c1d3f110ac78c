"""``invariant=True``: a row's bits depend on its own query and keys alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from flash_attn_triton import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from flash_attn_triton._dense.ops import interpreted
from flash_attn_triton._linked.invariant import plans
from torch import Tensor
from torch.library import opcheck

from .._linked.budget import assert_same, offsets
from .._numerics import MEDIUM, Packed, Shape, check, make_case, make_packed
from ._invariant import Sequence, assert_chunks_are_the_same, invariant

OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window_size": (21, 0)},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": torch.tensor([0.5, -1.0])},
    "scale": {"softmax_scale": -0.3, "window_size": (70, 0)},
}


FEATURES = ("causal", "window_left", "window", "softcap", "sinks", "scale_zero", "scale_negative")
SHAPES = [
    Shape(2, 33, 33, 2, 2, 32),  # a tail of one; two sequences
    Shape(1, 17, 140, 4, 2, 24),  # three segments
    Shape(1, 40, 17, 2, 1, 64),  # rows that see nothing
    Shape(1, 5, 7, 1, 1, 1),
    Shape(1, 20, 33, 2, 1, 40, 16),
    Shape(2, 0, 5, 2, 1, 16),
    Shape(2, 5, 0, 2, 1, 16),
    Shape(0, 5, 5, 2, 1, 16),
]
PACKED = [
    Packed((17, 0, 5), (70, 0, 20), 2, 1, 16),
    Packed((5, 18), (21, 18), 2, 1, 16, 24, padding=17),
    Packed((0, 0), (5, 0), 2, 1, 16, padding=2),
    Packed((), (), 2, 1, 16, padding=4),
]


@pytest.mark.eager
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape, device):
    check(invariant(make_case(shape, torch.float32, device, ("causal",))), grad=False)


@pytest.mark.eager
@pytest.mark.parametrize("shape", PACKED, ids=str)
def test_packed_matches_reference(shape, device):
    check(invariant(make_packed(shape, torch.float32, device, ("causal", "sinks"))), grad=False)


@pytest.mark.eager
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("feature", [None, *FEATURES])
def test_each_feature(feature, dtype, device):
    shape = MEDIUM._replace(seqlen_k=70)
    check(invariant(make_case(shape, dtype, device, [feature] if feature else [])), grad=False)


@pytest.mark.eager
def test_gradients_are_those_of_the_usual_backward(device):
    check(invariant(make_case(MEDIUM, torch.bfloat16, device, ("causal", "sinks"))))


def cuts(n: int, draw: random.Random) -> list[tuple[int, int]]:
    """Cut a sequence into chunks, some of them single tokens."""
    ends = sorted({n, *draw.sample(range(1, n), min(n - 1, 4)), max(1, n - 1)})
    return list(zip([0, *ends], ends, strict=False))


@pytest.mark.eager
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.bfloat16) for name in OPTIONS), ("causal", torch.float32)],
    ids=str,
)
def test_chunks_in_any_batch_have_the_bits_of_the_whole(name, dtype, device):
    options = {k: x.to(device) if isinstance(x, Tensor) else x for k, x in OPTIONS[name].items()}
    draw = random.Random(name)
    lengths = (19, 70) if interpreted() else (65, 19, 131)
    sequences = [Sequence(n, dtype, device, n, **options) for n in lengths]
    chunks = [(s, *cut) for s in sequences for cut in cuts(s.n, draw)]
    draw.shuffle(chunks)
    half = len(chunks) // 2
    assert_chunks_are_the_same(chunks[:half], padding=3)
    assert_chunks_are_the_same(chunks[half:])


@pytest.mark.eager
@pytest.mark.skipif(interpreted(), reason="takes the interpreter minutes")
def test_many_cuts(device):
    """On a GPU and in eager code; the interpreter has fewer."""
    draw = random.Random(0)
    for i in range(20):
        sequences = [Sequence(draw.randint(1, 150), torch.bfloat16, device, i) for _ in range(3)]
        chunks = [(s, *cut) for s in sequences for cut in cuts(s.n, draw)]
        draw.shuffle(chunks)
        assert_chunks_are_the_same(chunks, padding=draw.randint(0, 20))


@pytest.mark.parametrize("features", [(), ("causal", "sinks"), ("window",)], ids=str)
def test_segments_with_programs_of_their_own_give_the_same_bits(features, device, monkeypatch):
    keys = 3 * 1024 + 100 if device.type == "cuda" else 150
    case = make_case(Shape(2, 9, keys, 4, 2, 16, 24), torch.bfloat16, device, features)
    results = []
    for programs in (0, 10**6):
        monkeypatch.setattr(plans, "PROGRAMS", programs)
        out, lse = flash_attn_func(**case.inputs, **case.options, invariant=True, return_lse=True)
        results.append({"out": out, "lse": lse})
    assert_same(*results)


@pytest.mark.eager
def test_keys_that_nobody_sees_may_hold_anything(device):
    s = Sequence(40, torch.bfloat16, device, 1, window_size=(9, 0))
    k, v = s.k.clone(), s.v.clone()
    k[:10], v[:10] = float("nan"), float("inf")
    out = flash_attn_func(s.q[None, 20:], k[None], v[None], invariant=True, **s.options)
    assert torch.equal(out[0], s.out[20:])


def test_a_value_beyond_the_tiles_that_a_row_sees_may_be_anything(device):
    """A row keeps its sums where it sees nothing of a tile, though rows beside it do.

    The kernel for Hopper, which does not serve fp32, promises that for finite values alone.
    """
    s = Sequence(80, torch.float32, device, 4)
    v = s.v.clone()
    # a tile ends ahead of this key, and no segment does
    edge = 48 if interpreted() else 64
    v[edge + 2] = float("inf")
    rows = slice(edge - 4, edge + 12)
    inputs = (x[None] for x in (s.q[rows], s.k[: rows.stop], v[: rows.stop]))
    out = flash_attn_func(*inputs, invariant=True, **s.options)[0]
    assert torch.equal(out[:4], s.out[edge - 4 : edge])
    assert not torch.isfinite(out[6:]).any()


@pytest.mark.eager
@pytest.mark.parametrize("form", ["kv", "qkv", "varlen_kv", "varlen_qkv"])
def test_packed_tensors(form, device):
    s = Sequence(20, torch.float32, device, 4)
    k, v = (x.expand(-1, 2, -1) for x in (s.k, s.v[..., :16]))
    starts = offsets([20], device)
    options = {"causal": True, "invariant": True}
    if form == "kv":
        kv = torch.stack([s.k, s.v[..., :16]], 1)
        out = flash_attn_kvpacked_func(s.q[None], kv[None], **options)[0]
    elif form == "qkv":
        out = flash_attn_qkvpacked_func(torch.stack([s.q, k, v], 1)[None], **options)[0]
    elif form == "varlen_kv":
        kv = torch.stack([k, v], 1)
        out = flash_attn_varlen_kvpacked_func(s.q, kv, starts, starts, 20, 20, **options)
    else:
        qkv = torch.stack([s.q, k, v], 1)
        out = flash_attn_varlen_qkvpacked_func(qkv, starts, 20, **options)
    assert torch.equal(out, s.out[..., :16])


REFUSED = {
    "dropout_p": ({"dropout_p": 0.1}, "dropout_p must be 0.0 beside invariant=True"),
    "bias": ({"bias": torch.zeros(5, 7)}, "bias must be None beside invariant=True"),
    "alibi_slopes": ({"alibi_slopes": torch.ones(2)}, "alibi_slopes must be None beside"),
}


@pytest.mark.eager
@pytest.mark.parametrize("name", REFUSED)
def test_what_the_law_does_not_cover_is_refused(name):
    changes, message = REFUSED[name]
    case = make_case(Shape(1, 5, 7, 2, 1, 16), torch.float32, "cpu")
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=message):
            flash_attn_func(**case.inputs, **changes, invariant=True)


@pytest.mark.eager
def test_fp8_is_refused(monkeypatch):
    monkeypatch.setenv("ATTN_COMMON_PLATFORM", "nvidia:sm_90")
    x = torch.empty(1, 5, 2, 16, dtype=torch.float8_e4m3fn, device="meta")
    wide = torch.empty(1, 5, 2, 16, dtype=torch.bfloat16, device="meta")
    from attn_common import detect

    detect.cache_clear()
    try:
        if detect("cpu").supports_fp8:
            with pytest.raises(NotImplementedError, match="q must not be FP8 beside"):
                flash_attn_func(x, x, x, invariant=True)
            with pytest.raises(NotImplementedError, match="out_dtype must not be FP8 beside"):
                flash_attn_func(
                    wide,
                    wide,
                    wide,
                    invariant=True,
                    out_dtype=torch.float8_e4m3fn,
                    out_scale=torch.ones(1, device="meta"),
                )
    finally:
        detect.cache_clear()


@pytest.mark.eager
def test_it_must_be_a_bool():
    case = make_case(Shape(1, 5, 7, 2, 1, 16), torch.float32, "cpu")
    with pytest.raises(TypeError, match="invariant must be a bool, got int"):
        flash_attn_func(**case.inputs, invariant=1)


@pytest.mark.eager
def test_operator(device):
    from flash_attn_triton._dense import ops

    case = make_case(Shape(1, 5, 7, 2, 1, 16), torch.float32, device)
    q, k, v = case.inputs.values()
    arguments = (q, k, v, *[None] * 12, 5, 7, 0.25, -1, 0, 0.0, 0.0, None, False, True)
    opcheck(ops.forward, arguments, test_utils=("test_schema", "test_faketensor"))
    out, lse = ops.forward(*arguments)
    want = flash_attn_func(q, k, v, 0.0, 0.25, True, invariant=True, return_lse=True)
    assert_same({"out": out, "lse": lse}, dict(zip(("out", "lse"), want, strict=True)))
