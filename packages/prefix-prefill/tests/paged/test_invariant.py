"""``invariant=True``: a token's bits depend on its own query and keys alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from prefix_prefill import paged_attn_func
from prefix_prefill._linked.invariant import plans
from prefix_prefill._paged.ops import interpreted
from torch import Tensor

from .._linked.budget import Maker, assert_same, offsets
from .._numerics import NHD, PACKED, Problem, make_case
from ._invariant import Sequence, assert_the_same, check_invariant

FEATURES = ("full", "window", "window_both", "softcap", "sinks", "scale_zero", "scale_negative")
PROBLEMS = [
    Problem(((16, 16), (1, 70)), 1, 1, 16),
    Problem(((5, 20), (0, 9), (1, 33)), 4, 2, 24, page=7, padding=5),
    Problem(((5, 20), (1, 33), (18, 18)), 2, 1, 16, page=5, dense=True, padding=3),
    Problem(((3, 40), (1, 0)), 2, 1, 32, page=3, layout=PACKED),
    Problem(((9, 4),), 2, 1, 16),  # rows that see nothing
    Problem((), 2, 1, 16, padding=3),
    Problem(((5, 20), (1, 33), (18, 18)), 2, 1, 16, page=5, dense=True, head_dim_v=40),
]


@pytest.mark.eager
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_matches_reference(problem, device):
    check_invariant(make_case(problem, torch.float32, device))


@pytest.mark.eager
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature(feature, dtype, device):
    check_invariant(make_case(PROBLEMS[1], dtype, device, (feature,)))


def cuts(n: int, draw: random.Random) -> list[tuple[int, int]]:
    """Cut a sequence into chunks, some of them single tokens."""
    ends = sorted({n, *draw.sample(range(1, n), min(n - 1, 3)), max(1, n - 1)})
    return list(zip([0, *ends], ends, strict=False))


HOW: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "page 1": ((1,), {"padding": 2}),
    "page 48": ((48,), {}),
    "packed": ((7, PACKED), {}),
    "dense": ((5,), {"dense": True}),
    "packed dense": ((16, PACKED), {"dense": True, "padding": 3}),
}


@pytest.mark.eager
@pytest.mark.parametrize("how", HOW)
def test_chunks_and_decodes_have_the_bits_of_a_prefill(how, device):
    places, more = HOW[how]
    draw = random.Random(how)
    sequences = [Sequence(n, torch.bfloat16, device, n) for n in (23, 67)]
    chunks = [(s, *cut) for s in sequences for cut in cuts(s.n, draw)]
    draw.shuffle(chunks)
    half = len(chunks) // 2
    assert_the_same(chunks[:half], *places, **more)
    assert_the_same(chunks[half:], *places, **more)


@pytest.mark.eager
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.float16, {"window_size": (19, 0)}),
        (torch.bfloat16, {"softcap": 1.5, "sinks": torch.tensor([0.5, -1.0, 2.0, -9.0])}),
    ],
    ids=["fp32", "window", "softcap and sinks"],
)
def test_each_option(dtype, options, device):
    options = {k: x.to(device) if isinstance(x, Tensor) else x for k, x in options.items()}
    s = Sequence(67, dtype, device, 3, **options)
    assert_the_same([(s, 66, 67), (s, 0, 9), (s, 40, 66)], 16, padding=1)


@pytest.mark.eager
def test_an_fp8_cache_gives_the_bits_of_its_rounded_keys(device):
    # the interpreter cuts numbers off where bf16 rounds
    dtype = torch.float16 if interpreted() else torch.bfloat16
    m = Maker(device, dtype, 5)
    k, v = (m.randn(40, 2, 16).to(torch.float8_e4m3fn) for _ in "kv")
    q = m.randn(20, 4, 16)
    k_descale = torch.tensor([0.3, 1.7], device=device)
    v_descale = torch.tensor([0.6], device=device)
    wide_k = (k.float() * k_descale[:, None]).to(dtype)
    wide_v = (v.float() * v_descale).to(dtype)
    table = torch.arange(5, dtype=torch.int32, device=device)[None]
    rest = offsets([20], device), torch.tensor([40], dtype=torch.int32, device=device), 20, 40
    call: dict[str, Any] = {"invariant": True, "return_lse": True}
    cached = (x.unflatten(0, (5, 8)) for x in (k, v))
    descales = {"k_descale": k_descale, "v_descale": v_descale}
    try:
        got = paged_attn_func(q, *cached, table, *rest, **call, **descales)
    except NotImplementedError:
        pytest.skip("no FP8 here")
    cached = (x.unflatten(0, (5, 8)) for x in (wide_k, wide_v))
    want = paged_attn_func(q, *cached, table, *rest, **call)
    names = "out", "lse"
    assert_same(dict(zip(names, got, strict=True)), dict(zip(names, want, strict=True)))


def test_segments_with_programs_of_their_own_give_the_same_bits(device, monkeypatch):
    keys = 3100 if device.type == "cuda" else 150
    problem = Problem(((9, keys), (1, keys // 2), (0, 3), (2, 5)), 4, 2, 16, page=7, padding=2)
    case = make_case(problem, torch.bfloat16, device, ("sinks",))
    results = []
    for programs in (0, 10**6):
        monkeypatch.setattr(plans, "PROGRAMS", programs)
        results.append(case(invariant=True))
    assert_same(*results)


@pytest.mark.eager
@pytest.mark.skipif(interpreted(), reason="takes the interpreter minutes")
def test_many_cuts(device):
    """On a GPU and in eager code; the interpreter has fewer."""
    draw = random.Random(0)
    for i in range(20):
        sequences = [Sequence(draw.randint(1, 130), torch.bfloat16, device, i) for _ in range(3)]
        chunks = [(s, *cut) for s in sequences for cut in cuts(s.n, draw)]
        draw.shuffle(chunks)
        page, layout = draw.choice([1, 3, 16, 32, 48]), draw.choice([NHD, PACKED])
        dense = draw.random() < 0.5
        assert_the_same(chunks, page, layout, dense=dense, padding=draw.randint(0, 9), seed=i)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "num_splits": ({"num_splits": 1}, "num_splits must be 0 beside invariant=True"),
    "alibi_slopes": ({"alibi_slopes": torch.ones(2)}, "alibi_slopes must be None beside"),
    "tree_mask": ({"tree_mask": torch.ones(5, dtype=torch.int64)}, "tree_mask must be None beside"),
}


@pytest.mark.eager
@pytest.mark.parametrize("name", REFUSED)
def test_what_the_law_does_not_cover_is_refused(name):
    changes, message = REFUSED[name]
    case = make_case(Problem(((5, 20),), 2, 1, 16), torch.float32, "cpu")
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=message):
            paged_attn_func(**case.inputs, **case.options, **changes, invariant=True)


@pytest.mark.eager
def test_scales_of_keys_are_refused():
    q = torch.zeros(5, 2, 16)
    cache = torch.zeros(2, 16, 1, 16, dtype=torch.int8)
    scales = torch.ones(2, 16, 1)
    rest = torch.tensor([[0, 1]]), offsets([5], "cpu"), torch.tensor([20]), 5, 20
    options: dict[str, Any] = {"kv_dtype": "int8", "k_scale_cache": scales, "v_scale_cache": scales}
    with pytest.raises(NotImplementedError, match="kv_dtype must be None beside invariant=True"):
        paged_attn_func(q, cache, cache, *rest, **options, invariant=True)


@pytest.mark.eager
def test_it_must_be_a_bool():
    case = make_case(Problem(((5, 20),), 2, 1, 16), torch.float32, "cpu")
    with pytest.raises(TypeError, match="invariant must be a bool, got int"):
        paged_attn_func(**case.inputs, **case.options, invariant=1)
