"""flash_attn_with_kvcache over caches of int8 and int4: what it writes, and what it reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from prefix_prefill import flash_attn_with_kvcache
from prefix_prefill._paged.reference import quantised, unpacked
from torch import Tensor
from torch.library import opcheck

from .._linked.budget import assert_no_worse_than_eager
from .._linked.tiers import INTERPRETED
from ._kvcache import Call, by_hand, make, places, turned

LARGEST = {"int8": 127, "int4": 7}
# the interpreter truncates what it stores as bf16
SCALE = torch.float16

pytestmark = pytest.mark.eager


def stored(call: Call, kind: str, dtype: torch.dtype, device: Any) -> dict[str, Any]:
    """Return arguments whose caches are codes; slots without a key have a scale that is NaN."""
    given = make(call, dtype, device)
    for x in "kv":
        codes, scales = quantised(given[f"{x}_cache"].float(), LARGEST[kind], SCALE)
        given |= {f"{x}_cache": codes, f"{x}_scale_cache": scales}
    return given | {"kv_dtype": kind}


def values_of(given: dict[str, Any], x: str) -> Tensor:
    """Return what a cache holds, in float64."""
    codes = given[f"{x}_cache"]
    codes = unpacked(codes) if given["kv_dtype"] == "int4" else codes
    return codes.double() * given[f"{x}_scale_cache"].double()[..., None]


def check(call: Call, kind: str, dtype: torch.dtype, device: Any, **options: Any) -> Tensor:
    given = stored(call, kind, dtype, device)
    before = {x: values_of(given, x) for x in "kv"}
    # the second call of a form is launched past the operators
    for _ in range(1 if INTERPRETED else 2):
        out, lse = flash_attn_with_kvcache(**given, **options, return_softmax_lse=True)
    after = {x: values_of(given, x) for x in "kv"}
    q, table = given["q"], given.get("block_table")
    rotations = [given.get(name) for name in ("rotary_cos", "rotary_sin")]
    style = options.get("rotary_interleaved", True)
    turned_q, moving = q.double(), options.get("causal") or "window_size" in options
    for b, length in enumerate(call.lengths):
        at = places(call, table, b, length + torch.arange(call.new, device=q.device))
        for x in "kv" if call.new else "":
            new = given[x][b].double()
            if call.rotary and x == "k":
                tables = [t.double() for t in rotations]
                step = length + torch.arange(call.new, device=q.device)
                new = turned(new, *tables, step, style)
                step = torch.arange(call.queries, device=q.device)
                where = length + (step if moving else 0 * step)
                turned_q[b] = turned(turned_q[b], *tables, where, style)
            # half a code from what is stored, and what the roundings before it come to
            scale = new.abs().amax(-1, keepdim=True) / LARGEST[kind]
            slack = 2 * torch.finfo(dtype).eps * new.abs().amax()
            # an upper code may lie beyond the scale that was rounded down
            room = scale * (0.5 + LARGEST[kind] * torch.finfo(SCALE).eps)
            assert ((after[x][at] - new).abs() <= room + slack).all()
            codes, scales = quantised(given[x][b].float(), LARGEST[kind], SCALE)
            if not (call.rotary and x == "k"):
                assert torch.equal(given[f"{x}_cache"][at], codes)
                assert torch.equal(given[f"{x}_scale_cache"][at], scales)
            before[x][at] = after[x][at]
    for x in "kv":
        assert torch.equal(before[x].isnan(), after[x].isnan()), "another slot is written"
        assert torch.equal(before[x].nan_to_num(), after[x].nan_to_num())
    # all keys are in the cache by now, and what it holds is what is attended to
    lengths = tuple(n + call.new for n in call.lengths)
    read = call._replace(lengths=lengths, new=0, rotary=0)
    plain = {n: x for n, x in given.items() if n in ("block_table", "cache_leftpad")}
    plain |= {"q": turned_q.to(dtype), "k_cache": after["k"], "v_cache": after["v"]}
    want, eager = (by_hand(read, plain, options, wide) for wide in (torch.float64, torch.float32))
    eps = torch.finfo(dtype).eps if call.rotary else None
    got = {"out": out, "lse": lse}
    eager["out"] = eager["out"].to(dtype)
    for name in ("out", "lse"):
        assert_no_worse_than_eager(name, got[name], eager[name], want[name], eps=eps)
    return out


ROWS = Call()
CALLS = [
    (ROWS, "int8"),
    (ROWS._replace(page=7), "int4"),
    (ROWS._replace(page=16, rotary=16), "int8"),
    (ROWS._replace(rotary=12, head_dim=24, heads_q=5, heads_k=1), "int4"),
    (ROWS._replace(new=0, queries=1, lengths=(9, 48)), "int4"),
    (ROWS._replace(lengths=(33, 16), pads=(1, 16), rows=(2, 0)), "int8"),
    (ROWS._replace(lengths=(40,), slots=150, queries=1, new=90), "int4"),  # over two pages
]


@pytest.mark.parametrize(("call", "kind"), CALLS, ids=str)
def test_matches_a_loop(call, kind, device):
    check(call, kind, torch.float32, device, causal=call.queries > 1)


@pytest.mark.parametrize("kind", LARGEST)
def test_half_precision_and_halves_of_rotations(kind, device):
    call = ROWS._replace(page=7, rotary=16)
    check(call, kind, torch.bfloat16, device, window_size=(6, 0), rotary_interleaved=False)


@pytest.mark.parametrize("kind", LARGEST)
def test_a_scale_is_that_of_its_row_alone(kind, device):
    """Rows of small numbers, in tiles that are wider than their heads."""
    call = ROWS._replace(head_dim=24)
    given = stored(call, kind, torch.float32, device)
    for x in "kv":
        given[x] *= 0.01
    flash_attn_with_kvcache(**given)
    for b, length in enumerate(call.lengths):
        for x in "kv":
            got = given[f"{x}_scale_cache"][b, length : length + call.new]
            want = given[x][b].abs().amax(-1).double() / LARGEST[kind]
            assert ((got.double() - want).abs() <= want * torch.finfo(SCALE).eps).all()


@pytest.mark.parametrize(("kind", "both"), [("int8", True), ("int4", False)])
def test_strides_of_scales_are_free(kind, both, device):
    """Rows of scales as many slots apart as those of keys, or not: the same bits."""
    want = flash_attn_with_kvcache(**stored(ROWS, kind, torch.float32, device))
    given = stored(ROWS, kind, torch.float32, device)
    for name in ("k_scale_cache", "v_scale_cache") if both else ("v_scale_cache",):
        x = given[name]
        wide = torch.full((*x.shape[:2], 3), float("nan"), dtype=x.dtype, device=device)
        if not both:
            wide = torch.full((x.shape[0], x.shape[1] + 1, 2), float("nan"), device=device)
            wide = wide.to(x.dtype)
        given[name] = wide[:, : x.shape[1], : x.shape[2]].copy_(x)
    for _ in range(1 if INTERPRETED else 2):
        assert torch.equal(flash_attn_with_kvcache(**given), want)


@pytest.mark.parametrize("kind", LARGEST)
def test_operators_pass_opcheck(kind, device, monkeypatch):
    from prefix_prefill._paged import ops

    seen = {}
    for name in ("append_kvcache", "attend_kvcache"):
        monkeypatch.setattr(ops, name, lambda *x, name=name: seen.update({name: x}))
    monkeypatch.setattr(ops, "kvcache_plans_of", lambda *_: None)
    flash_attn_with_kvcache(**stored(ROWS._replace(rotary=16), kind, torch.float32, device))
    for name, arguments in seen.items():
        operator = getattr(getattr(torch.ops, ops.NAMESPACE), name).default
        # NaN in slots without a key would differ from itself
        clean = tuple(x.nan_to_num() if isinstance(x, Tensor) else x for x in arguments)
        opcheck(operator, clean, test_utils=("test_schema", "test_faketensor"))
    assert len(seen) == 2


WRONG = [
    ({"kv_dtype": "int2"}, ValueError, "kv_dtype must be None, 'int8' or 'int4', got 'int2'"),
    ({"kv_dtype": None}, TypeError, "k_cache must have the dtype of q, torch.float32"),
    ({"kv_dtype": "int4"}, TypeError, "k_cache must have the dtype of kv_dtype 'int4'"),
    ({"k_scale_cache": None}, ValueError, "k_scale_cache must be given for kv_dtype 'int8'"),
    ({"v_scale_cache": torch.zeros(4, 48, 1)}, ValueError, "v_scale_cache must be .num_blocks"),
    ({"v_scale_cache": torch.zeros(4, 48, 2)}, TypeError, "v_scale_cache must have the dtype of k"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG)
def test_wrong_calls_are_named(changes, error, message):
    given = stored(ROWS, "int8", torch.float32, "cpu")
    with pytest.raises(error, match=message):
        flash_attn_with_kvcache(**{**given, **changes})


def test_scales_without_a_kind_and_half_the_head_dim():
    plain = make(ROWS, torch.float32, "cpu")
    with pytest.raises(ValueError, match="k_scale_cache must be None unless kv_dtype is given"):
        flash_attn_with_kvcache(**plain, k_scale_cache=torch.zeros(4, 48, 2))
    given = stored(ROWS, "int4", torch.float32, "cpu")
    given["k_cache"] = given["k_cache"].repeat(1, 1, 1, 2)
    with pytest.raises(ValueError, match="half the head_dim of q, 8, got"):
        flash_attn_with_kvcache(**given)
