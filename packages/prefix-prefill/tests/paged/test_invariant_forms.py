"""``invariant=True`` in ``flash_attn_with_kvcache`` and the drop-ins."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from prefix_prefill import (
    chunked_prefill_paged_decode,
    context_attention_fwd,
    flash_attn_with_kvcache,
    paged_attn_func,
)
from torch import Tensor

from .._dropin import LENGTHS, judge, own_pages, with_newest_in_cache
from .._linked.budget import assert_same, offsets
from .._numerics import NHD, PACKED, Case, Problem, make_case
from ..kvcache import _kvcache
from ..kvcache._kvcache import Call

BOTH = pytest.mark.parametrize(
    "function", [context_attention_fwd, chunked_prefill_paged_decode], ids=lambda f: f.__name__
)
CALLS = [
    (Call((9, 30, 0), 3, 3, page=16, slots=48), {}),
    (Call((9, 30, 0), 3, 3, rotary=16), {"softcap": 1.5}),
    (Call((9, 30, 5), 1, 1, pads=(2, 0, 5), rows=(3, 0, 1)), {"window_size": (7, 0)}),
    (Call((9, 30), 4, 0, page=5, slots=45), {"softmax_scale": -0.3}),
]


@pytest.mark.eager
@pytest.mark.parametrize(("call", "options"), CALLS, ids=str)
def test_a_cache_with_appended_keys_matches_the_definition(call, options, device):
    causal = {"causal": True, "invariant": True}
    _kvcache.check(call, torch.float32, device, **causal, **options)


@pytest.mark.eager
@pytest.mark.parametrize("rotary", [0, 16])
@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("options", [{}, {"window_size": (19, 0)}], ids=["all", "window"])
def test_steps_of_appending_have_the_bits_of_one_prefill(options, page, rotary, device):
    """Whole, and in chunks and decodes, in another batch each time."""
    call = Call((0, 0), 70, 70, slots=96, page=page, rotary=rotary)
    given = _kvcache.make(call, torch.float16, device)
    options = {**options, "causal": True, "invariant": True, "return_softmax_lse": True}
    begin = {name: given[name].clone() for name in ("k_cache", "v_cache")}
    want = dict(zip(("out", "lse"), flash_attn_with_kvcache(**given, **options), strict=True))
    parts: list[dict[str, Tensor]] = []
    row = slice(1, 2)  # of the batch, alone
    for first, last in ((0, 41), (41, 42), (42, 69), (69, 70)):
        step = {n: given[n][row, first:last] for n in "qkv"}
        rest = {n: x for n, x in given.items() if n.startswith("rotary")}
        if page:
            rest["block_table"] = given["block_table"][row]
        else:
            rest["cache_batch_idx"] = torch.tensor([1], device=device)
        length = torch.tensor([first], dtype=torch.int32, device=device)
        got = flash_attn_with_kvcache(**step, **begin, cache_seqlens=length, **rest, **options)
        parts.append(dict(zip(("out", "lse"), got, strict=True)))
    got = {
        "out": torch.cat([part["out"] for part in parts], 1),
        "lse": torch.cat([part["lse"] for part in parts], 2),
    }
    assert_same(got, {name: x[row] for name, x in want.items()})


@pytest.mark.eager
@pytest.mark.parametrize("pads", [(), (3, 0)], ids=["no pads", "pads"])
def test_rows_of_a_cache_have_the_bits_of_pages(pads, device):
    """Keys count from the first behind those that are none."""
    call = Call((69, 40), 2, 0, slots=96, pads=pads)
    given = _kvcache.make(call, torch.float16, device)
    out, lse = flash_attn_with_kvcache(
        **given, causal=True, return_softmax_lse=True, invariant=True
    )
    for b, length in enumerate(call.lengths):
        keys = length - (pads[b] if pads else 0)
        cache = [given[f"{n}_cache"][b, length - keys : length, None] for n in "kv"]
        table = torch.arange(keys, dtype=torch.int32, device=device)[None]
        ends = torch.tensor([keys], dtype=torch.int32, device=device)
        want = paged_attn_func(
            given["q"][b],
            *cache,
            table,
            offsets([2], device),
            ends,
            2,
            keys,
            invariant=True,
            return_lse=True,
        )
        names = "out", "lse"
        got = out[b], lse[b]
        assert_same(dict(zip(names, got, strict=True)), dict(zip(names, want, strict=True)))


# ---- drop-ins


@pytest.mark.eager
@pytest.mark.parametrize("layout", [NHD, PACKED])
@BOTH
def test_a_dropin_matches_the_definition(function, layout, device):
    problem = Problem(LENGTHS, 4, 2, 24, page=8, layout=layout, dense=True)
    case = make_case(problem, torch.float32, device, ("sinks",))
    judge(function, case, problem, invariant=True)


def in_place(
    function: Any, case: Case, o: Tensor, max_seq_len: int | None, **options: Any
) -> Tensor:
    """Call a drop-in, into ``o``."""
    x, rest = case.inputs, case.options
    function(
        x["q"],
        x.get("k"),
        x.get("v"),
        o,
        "auto",
        x["k_cache"],
        x["v_cache"],
        rest["block_table"],
        rest["cu_seqlens_q"],
        rest["seqlens_k"],
        max_seq_len,
        rest["max_seqlen_q"],
        None,
        None,
        **options,
        invariant=True,
    )
    return o


@pytest.mark.eager
@pytest.mark.parametrize("skip", [False, True], ids=["all", "skip_decode"])
def test_rows_that_a_dropin_does_not_write_stay(skip, device):
    problem = Problem(((3, 9), (1, 21), (0, 4), (17, 36), (1, 1)), 4, 2, 16, page=8, padding=5)
    case = make_case(problem, torch.float32, device)
    want = paged_attn_func(**case.inputs, **case.options, invariant=True)
    # rows of a strided output
    whole = torch.full((*want.shape[:2], 32), 7.0, device=device)
    o = in_place(context_attention_fwd, case, whole[..., ::2], None, skip_decode=skip)
    rows = torch.arange(len(want))
    kept = rows >= 22
    if skip:
        kept |= (rows == 3) | (rows == 21)
    assert torch.equal(o[~kept], want[~kept])
    assert (o[kept] == 7.0).all()
    assert (whole[..., 1::2] == 7.0).all()


@pytest.mark.eager
def test_one_query_reads_its_key_from_the_cache(device):
    problem = Problem(LENGTHS, 4, 2, 16, page=8, dense=True)
    case = own_pages(make_case(problem, torch.float32, device), problem)
    case = with_newest_in_cache(case, problem)
    want = paged_attn_func(**case.inputs, **case.options, invariant=True)
    starts = case.options["cu_seqlens_q"].tolist()
    single = [a for a, b in pairwise(starts) if b - a == 1]
    poisoned = {n: case.inputs[n].clone() for n in "kv"}
    for x in poisoned.values():
        x[single] = float("nan")
    o = torch.empty_like(want)
    in_place(chunked_prefill_paged_decode, case.with_inputs(**poisoned), o, 36)
    assert torch.equal(o, want)


def test_a_length_that_is_too_small_loses_no_segment(device, monkeypatch):
    """What a drop-in is told of the lengths is a hint."""
    from prefix_prefill._linked.invariant import plans

    monkeypatch.setattr(plans, "PROGRAMS", 10**6)
    keys = 3100 if device.type == "cuda" else 150
    problem = Problem(((2, keys), (1, keys // 2)), 4, 2, 16, page=7)
    case = make_case(problem, torch.float16, device)
    want = paged_attn_func(**case.inputs, **case.options, invariant=True)
    for length in (None, 1, 70):
        o = in_place(context_attention_fwd, case, torch.empty_like(want), length)
        assert torch.equal(o, want), length


# ---- what is refused


@pytest.mark.eager
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_splits": 2}, "num_splits must be 0 beside invariant=True"),
        ({"alibi_slopes": torch.ones(4)}, "alibi_slopes must be None beside invariant=True"),
    ],
    ids=["num_splits", "alibi_slopes"],
)
def test_a_cache_refuses_what_the_law_does_not_cover(changes, message):
    given = _kvcache.make(Call(), torch.float32, "cpu")
    before = given["k_cache"].clone()
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=message):
            flash_attn_with_kvcache(**given, **changes, invariant=True)
    assert torch.equal(given["k_cache"].isnan(), before.isnan())
    with pytest.raises(TypeError, match="invariant must be a bool, got str"):
        flash_attn_with_kvcache(**given, invariant="yes")


@pytest.mark.eager
def test_a_cache_of_few_bits_is_refused():
    q, new = torch.zeros(1, 1, 2, 16), torch.zeros(1, 1, 1, 16)
    cache, scales = torch.zeros(2, 8, 1, 16, dtype=torch.int8), torch.ones(2, 8, 1)
    with pytest.raises(NotImplementedError, match="kv_dtype must be None beside invariant=True"):
        flash_attn_with_kvcache(
            q,
            cache,
            cache,
            new,
            new,
            cache_seqlens=3,
            kv_dtype="int8",
            k_scale_cache=scales,
            v_scale_cache=scales,
            invariant=True,
        )


@pytest.mark.eager
@BOTH
def test_a_dropin_refuses_what_the_law_does_not_cover(function):
    case = make_case(Problem(LENGTHS, 4, 2, 16, page=8), torch.float32, "cpu")
    o = torch.empty_like(case.inputs["q"])
    with pytest.raises(NotImplementedError, match="alibi_slopes must be None beside"):
        in_place(function, case, o, 36, alibi_slopes=torch.ones(4))


@pytest.mark.eager
def test_new_keys_beside_an_fp8_cache_are_refused():
    """The call would see them exact, and the next one rounded: its bits would show the border."""
    problem = Problem(LENGTHS, 4, 2, 16, page=8, dense=True)
    case = make_case(problem, torch.float16, "cpu")
    fp8 = {n: case.inputs[n].to(torch.float8_e4m3fn) for n in ("k_cache", "v_cache")}
    case = case.with_inputs(**fp8)
    message = "{} and {} must be None beside an FP8 cache and invariant=True"
    with pytest.raises(NotImplementedError, match=message.format("k", "v")):
        paged_attn_func(**case.inputs, **case.options, invariant=True)
    for function, names in (
        (context_attention_fwd, ("k", "v")),
        (chunked_prefill_paged_decode, ("key", "value")),
    ):
        x, rest = case.inputs, case.options
        with pytest.raises(NotImplementedError, match=message.format(*names)):
            function(
                x["q"],
                x["k"],
                x["v"],
                torch.empty_like(x["q"]),
                "fp8",
                x["k_cache"],
                x["v_cache"],
                rest["block_table"],
                rest["cu_seqlens_q"],
                rest["seqlens_k"],
                36,
                rest["max_seqlen_q"],
                None,
                None,
                invariant=True,
            )
