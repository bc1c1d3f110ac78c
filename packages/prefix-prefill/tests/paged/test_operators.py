"""The operators as PyTorch sees them: schemas, fakes, tracing, imports."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from prefix_prefill import (
    merge_attn_states,
    paged_attn_func,
    reshape_and_cache,
    shared_prefix_attn_func,
)
from prefix_prefill._paged import ops
from torch import Tensor
from torch.library import opcheck

from .._numerics import MEDIUM, PACKED, Case, Problem, make_case

RICH = ("window", "softcap", "alibi_batch", "sinks")


def operator_arguments(case: Case, *, lse: bool = True) -> tuple[Any, ...]:
    """What the API gives to the attention operator."""
    given = {**case.inputs, **case.options}
    q = given["q"]
    names = ("q", "k_cache", "v_cache", "k", "v", "block_table", "cu_seqlens_q", "seqlens_k")
    left = given.get("window_size", (-1, -1))[0]
    return (
        *(given.get(name) for name in names),
        given.get("alibi_slopes"),
        given.get("sinks"),
        None,
        None,
        None,
        given.get("k_scale_cache"),
        given.get("v_scale_cache"),
        None,
        None,
        None,
        torch.zeros_like(q),
        torch.zeros(q.shape[1], q.shape[0], device=q.device) if lse else None,
        given["max_seqlen_q"],
        given["max_seqlen_k"],
        0.25,
        left,
        0,
        given.get("softcap", 0.0),
        0,
        False,
        False,
        False,
        True,
        False,
    )


traced_alike = pytest.mark.skipif(
    ops.interpreted(), reason="tracing sees the operators alone, and the interpreter is slow"
)
UTILS = ("test_schema", "test_faketensor")


@pytest.mark.eager
@pytest.mark.parametrize("features", [(), RICH], ids=["plain", "rich"])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("lse", [False, True])
def test_attention_passes_opcheck(lse, dense, features, device):
    # the schema test compares what was not to be written, and NaN differs from itself
    case = make_case(MEDIUM._replace(dense=dense), torch.float32, device, features)
    clean = {name: t.nan_to_num(0.0) for name, t in case.inputs.items()}
    opcheck(ops.attention, operator_arguments(case.with_inputs(**clean), lse=lse), test_utils=UTILS)


@pytest.mark.eager
@pytest.mark.parametrize("layout", ["nhd", PACKED])
def test_writing_passes_opcheck(layout, device):
    case = make_case(MEDIUM._replace(layout=layout), torch.float32, device)
    new = [torch.randn(5, 2, 16, device=device) for _ in "kv"]
    caches = [case.inputs[name].nan_to_num(0.0) for name in ("k_cache", "v_cache")]
    slots = torch.tensor([3, -1, 40, 0, 7], device=device)
    opcheck(ops.reshape_and_cache, (*new, *caches, slots, *[None] * 4), test_utils=UTILS)


@pytest.mark.eager
def test_merging_passes_opcheck(device):
    outs = [torch.randn(5, 2, 16, device=device) for _ in range(3)]
    lses = [torch.randn(2, 5, device=device) for _ in range(3)]
    arguments = (outs[0], lses[0], outs[1], lses[1], None, outs[2], lses[2])
    opcheck(ops.merge_states, arguments, test_utils=UTILS)


@pytest.mark.eager
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_results_on_meta_are_what_comes(dtype, device):
    case = make_case(MEDIUM, dtype, device)
    real = case()
    on_meta = {
        name: value.to("meta") if isinstance(value, Tensor) else value
        for name, value in {**case.inputs, **case.options}.items()
    }
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        fake = {
            name: torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="cpu")
            if isinstance(t, Tensor)
            else t
            for name, t in on_meta.items()
        }
        out, lse = paged_attn_func(**fake, return_lse=True)
    for got, want in ((out, real["out"]), (lse, real["lse"])):
        assert got.shape == want.shape
        assert got.dtype == want.dtype
        assert got.stride() == want.stride()
        assert want.is_contiguous()


@pytest.fixture
def compiled():
    """A compiler that refuses graph breaks."""
    # else the limit on recompilation is shared between tests
    torch.compiler.reset()

    def compile(function):
        return torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")

    yield compile
    torch.compiler.reset()


@traced_alike
@pytest.mark.eager
def test_attention_compiles_once_for_all_lengths(device, compiled):
    def function(q, k_cache, v_cache, block_table, starts, lengths, max_q, max_k, slopes, sinks):
        out, lse = paged_attn_func(
            q * 2,
            k_cache,
            v_cache,
            block_table,
            starts,
            lengths,
            max_q,
            max_k,
            window_size=(9, -1),
            softcap=2.0,
            alibi_slopes=slopes,
            sinks=sinks,
            return_lse=True,
        )
        return out + 1, lse

    fast = compiled(function)
    # sizes that agree by chance would be taken as one
    first = ((5, 30), (1, 9), (4, 4))
    for lengths in (first, ((9, 30), (2, 8), (7, 7), (1, 40)), ((11, 60), (4, 9))):
        case = make_case(Problem(lengths, 18, 9, 16, page=6), torch.float32, device)
        names = ("block_table", "cu_seqlens_q", "seqlens_k", "max_seqlen_q", "max_seqlen_k")
        inputs = [case.inputs[name] for name in ("q", "k_cache", "v_cache")]
        inputs += [case.options[name] for name in names]
        extra = torch.rand(18, device=device), torch.randn(18, device=device)
        with torch._dynamo.config.patch(error_on_recompile=lengths != first):
            got = fast(*inputs, *extra)
        for one, want in zip(got, function(*inputs, *extra), strict=True):
            torch.testing.assert_close(one, want)


@traced_alike
@pytest.mark.eager
def test_a_step_of_an_engine_compiles(device, compiled):
    """Write into the cache, then attend to it: the order is kept."""

    def step(q, k, v, cache, slots, table, starts, lengths):
        reshape_and_cache(k, v, cache[0], cache[1], slots)
        return paged_attn_func(q, cache[0], cache[1], table, starts, lengths, 5, 5)

    m = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(5, 2, 16, generator=m).to(device) for _ in range(3))
    slots = torch.tensor([8, 9, 10, 11, 0], device=device)
    table = torch.tensor([[2, 0]], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 5], dtype=torch.int32, device=device)
    lengths = torch.tensor([5], dtype=torch.int32, device=device)
    caches = [torch.zeros(2, 4, 4, 2, 16, device=device) for _ in range(2)]
    want = step(q, k, v, caches[0], slots, table, starts, lengths)
    got = compiled(step)(q, k, v, caches[1], slots, table, starts, lengths)
    torch.testing.assert_close(got, want)
    assert torch.equal(caches[0], caches[1])
    assert caches[1].any()


@traced_alike
@pytest.mark.eager
def test_cascade_and_merge_compile(device, compiled):
    case = make_case(MEDIUM, torch.float32, device)
    pages = case.options["block_table"][0, :2]

    def function(q, other):
        options = {**case.options, "alibi_slopes": torch.ones(4, device=device)}
        inputs = {**case.inputs, "q": q}
        out, lse = shared_prefix_attn_func(
            **inputs, **options, shared_pages=pages, shared_len=14, return_lse=True
        )
        return merge_attn_states(out, lse, other, lse)

    q = case.inputs["q"]
    got, want = compiled(function)(q, q + 1), function(q, q + 1)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)


@traced_alike
@pytest.mark.eager
def test_wrong_calls_fail_under_compile_too(device, compiled):
    case = make_case(MEDIUM, torch.float32, device)
    fast = compiled(lambda q: paged_attn_func(**{**case.inputs, "q": q}, **case.options))
    with pytest.raises(Exception, match="heads_q must be a positive multiple of heads_k"):
        fast(case.inputs["q"][:, :3])


def in_a_fresh_process(code: str) -> None:
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert not done.returncode, done.stderr


@pytest.mark.eager
@pytest.mark.once
def test_import_needs_no_triton():
    in_a_fresh_process(
        """
        import os, sys
        os.environ.pop("TRITON_INTERPRET", None)
        sys.modules["triton"] = None
        before = dict(os.environ)
        import prefix_prefill, torch
        q, cache = torch.randn(3, 2, 16), torch.randn(2, 4, 1, 16)
        table, starts, lengths = (torch.tensor(x).int() for x in ([[1, 0]], [0, 3], [5]))
        prefix_prefill.paged_attn_func(q, cache, cache, table, starts, lengths, 3, 5)
        assert "prefix_prefill._paged.launch" not in sys.modules
        assert not torch.cuda.is_initialized()
        assert dict(os.environ) == before
        """
    )


@pytest.mark.eager
@pytest.mark.once
def test_the_interpreter_is_asked_for_by_triton_s_variable():
    in_a_fresh_process(
        """
        import os
        from prefix_prefill._paged import ops
        for value, expected in (("1", True), ("true", True), ("0", False)):
            os.environ["TRITON_INTERPRET"] = value
            ops.interpreted.cache_clear()
            assert ops.interpreted() is expected, value
        """
    )
