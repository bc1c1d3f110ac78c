"""The invariant kernel for Hopper, run on a CPU by ``_linked.gluon``: chunks have a prefill's bits.

Tiles of 32 keys and segments of two tiles: short sequences are to have many. In fp16, because what
merges segments is a Triton kernel, whose interpreter does not round to bf16.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from prefix_prefill import (
    api,
    chunked_prefill_paged_decode,
    flash_attn_with_kvcache,
    paged_attn_func,
)
from prefix_prefill._linked.host.forms import Memory
from prefix_prefill._paged import ops

from ..._dropin import own_pages, with_newest_in_cache
from ..._linked.budget import Maker, assert_same
from ..._numerics import NAN, PACKED, Problem, make_case
from ...kvcache import _kvcache
from ...kvcache._kvcache import Call
from .._invariant import Sequence, assert_the_same, attend, check_invariant

pytestmark = pytest.mark.skipif(not ops.interpreted(), reason="about the interpreter")


@pytest.fixture
def kernel(monkeypatch):
    """Have the kernel for Hopper serve calls, in two programs."""
    from prefix_prefill._linked.invariant import plans
    from prefix_prefill._linked.invariant.hopper import plans as hopper_plans

    from ..._linked.gluon import Kernel

    real, ticket = hopper_plans.hopper_tile, torch.zeros(1, dtype=torch.int32)
    kernel = Kernel(hopper_plans.invariant_hopper_kernel)
    monkeypatch.setattr(api, "_known", Memory())
    monkeypatch.setattr(plans, "takes_hopper", lambda *_: True)
    monkeypatch.setattr(hopper_plans, "multiprocessors", lambda _: 2)
    monkeypatch.setattr(hopper_plans, "invariant_hopper_kernel", kernel)
    monkeypatch.setattr(
        hopper_plans, "hopper_tile", lambda width: replace(real(width), block_n=32, segment=2)
    )
    for name in ("new_ticket", "kept_ticket"):
        monkeypatch.setattr(hopper_plans, name, lambda _: ticket)
    yield kernel
    assert kernel.launches
    assert kernel.faults or not ticket.any()


CASES = [
    (Problem(((40, 90), (1, 33), (0, 5), (3, 2)), 4, 2, 64, page=16, padding=3), ("sinks",)),
    (Problem(((20, 90), (33, 33)), 3, 1, 24, page=32), ("window_both", "softcap")),
    (Problem(((5, 70), (1, 33)), 2, 1, 16, page=5, dense=True, padding=2), ("scale_negative",)),
    # values with a head dimension of their own: copied by TMA, and loaded by warps
    (Problem(((20, 90), (1, 33)), 2, 1, 40, page=16, head_dim_v=128), ("window",)),
    (Problem(((5, 70), (1, 33)), 2, 1, 128, page=5, head_dim_v=40), ("sinks",)),
    (Problem(((5, 70), (1, 33)), 2, 1, 24, page=16, dense=True, head_dim_v=80), ()),
]


@pytest.mark.parametrize(("problem", "features"), CASES, ids=str)
def test_matches_reference(problem, features, kernel):
    check_invariant(make_case(problem, torch.float16, "cpu", features))


HOW: dict[str, tuple[int, tuple[Any, ...], dict[str, Any], dict[str, Any]]] = {
    "pages": (140, (32,), {"padding": 2}, {}),
    "small pages": (140, (5,), {}, {"window_size": (70, 0)}),
    "packed": (100, (16, PACKED), {}, {"softcap": 1.5}),
    "values of their own": (140, (16,), {}, {"head_dim_v": 72}),
    "values of their own, loaded": (140, (5,), {}, {"head_dim_v": 72, "window_size": (70, 0)}),
    "new keys": (100, (16,), {"dense": True}, {"sinks": torch.tensor([0.5, -1.0, 2.0, -9.0])}),
}


@pytest.mark.parametrize("how", HOW)
def test_chunks_and_decodes_have_the_bits_of_a_prefill(how, kernel):
    n, places, more, options = HOW[how]
    s = Sequence(n, torch.float16, "cpu", 1, **options)
    assert_the_same([(s, n - 1, n), (s, 0, 67), (s, 67, 68), (s, 68, n - 1)], *places, **more)


def test_segments_with_tickets_of_their_own_give_the_same_bits(kernel):
    s = Sequence(200, torch.float16, "cpu", 2, sinks=torch.tensor([0.5, -1.0, 2.0, -9.0]))
    for row in (199, 20):
        before = kernel.launches
        assert_the_same([(s, row, row + 1)], 16)
        assert kernel.launches == before + 1


def test_an_fp8_cache_gives_the_bits_of_its_rounded_keys(kernel):
    m = Maker("cpu", torch.float16, 5)
    s = Sequence.__new__(Sequence)
    s.n, s.options, s.q = 70, {}, m.randn(70, 4, 16)
    s.k, s.v = (m.randn(70, 2, 16).to(torch.float8_e4m3fn).to(torch.float16) for _ in "kv")
    names = "out", "lse"
    got = attend([(s, 60, 70)], 16, fp8=True)
    want = attend([(s, 60, 70)], 16)
    assert_same(dict(zip(names, got, strict=True)), dict(zip(names, want, strict=True)))


def test_one_query_of_a_dropin_reads_its_key_from_the_cache(kernel):
    """The newest key stands in the cache, and is NaN among the new ones."""
    problem = Problem(((1, 21), (9, 40)), 2, 1, 16, page=8, dense=True)
    case = own_pages(make_case(problem, torch.float16, "cpu"), problem)
    case = with_newest_in_cache(case, problem)
    want = case(invariant=True)["out"]
    x, rest = case.inputs, case.options
    new = [x[name].clone() for name in "kv"]
    for part in new:
        part[0] = NAN
    out = torch.empty_like(want)
    chunked_prefill_paged_decode(
        x["q"],
        *new,
        out,
        "auto",
        x["k_cache"],
        x["v_cache"],
        rest["block_table"],
        rest["cu_seqlens_q"],
        rest["seqlens_k"],
        40,
        9,
        None,
        None,
        invariant=True,
    )
    assert torch.equal(out, want)


def test_rows_of_a_cache_have_the_bits_of_pages(kernel):
    call = Call((69, 40), 2, 0, slots=96, pads=(3, 0), head_dim=64)
    given = _kvcache.make(call, torch.float16, "cpu")
    out = flash_attn_with_kvcache(**given, causal=True, invariant=True)
    for b, (pad, length) in enumerate(zip(call.pads, call.lengths, strict=True)):
        cache = [given[f"{n}_cache"][b, pad:length, None] for n in "kv"]
        table = torch.arange(length - pad, dtype=torch.int32)[None]
        ends = torch.tensor([length - pad], dtype=torch.int32)
        starts = torch.tensor([0, 2], dtype=torch.int32)
        want = paged_attn_func(
            given["q"][b], *cache, table, starts, ends, 2, length - pad, invariant=True
        )
        assert torch.equal(out[b], want)


FAULTS = [
    # a segment that begins anew without what came before
    ("_attend", "gl.fma(gl.load(parked), _as_rows(a, O), o)", "o"),
    # a pivot that follows every maximum of the tile's first row
    ("_weigh", "top - m > SLACK", "(top - m > SLACK)[0]"),
    # a mask of another tile
    ("_scores", "cols = first +", "cols = first + 1 +"),
    # the first key of a page in place of each
    ("_load_cached", "(keys % PAGE)", "(keys * 0)"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda x: x[0])
def test_faults_show(fault, kernel):
    problem = Problem(((1, 90), (9, 70)), 2, 1, 16, page=5)
    case = make_case(problem, torch.float16, "cpu", ("sinks",))
    right = case(invariant=True)
    kernel.plant(*fault)
    wrong = case(invariant=True)
    assert any(not torch.equal(right[name], wrong[name]) for name in right)


def test_what_no_row_sees_is_not_read(kernel):
    s = Sequence(90, torch.float16, "cpu", 3, window_size=(20, 0))
    s.k[:40] = s.v[:40] = NAN
    assert_the_same([(s, 60, 90)], 16)
    assert_the_same([(s, 89, 90)], 3)
