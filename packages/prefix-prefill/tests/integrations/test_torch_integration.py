"""PyTorch's ``varlen_attn`` with pages: numerics, and what is left to PyTorch.

Its operators have kernels for every device, so ours run under the CPU's key without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import prefix_prefill.integrations.torch as integration
import pytest
import torch
from prefix_prefill import paged_attention_reference
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel, varlen

from .._linked.budget import Maker, assert_no_worse_than_eager, offsets

pytestmark = [
    pytest.mark.eager,
    pytest.mark.skipif(
        not hasattr(varlen, "varlen_attn_out"), reason="varlen_attn of this torch takes no pages"
    ),
]
LENGTHS, USED = (3, 1, 0, 5), (20, 7, 4, 33)


@pytest.fixture
def key(device: torch.device) -> str:
    return "CUDA" if device.type == "cuda" else "CPU"


@pytest.fixture
def overrides(key: str) -> Iterator[Any]:
    """Our kernels under the key of the device at hand."""
    held = integration._Overrides(key)
    yield held
    held.remove()


def call(device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Any, Any]:
    """Return queries and caches, the other arguments of ``varlen_attn``, and its options."""
    m = Maker(device, dtype)
    tensors = [m.randn(sum(LENGTHS), 4, 16), m.randn(12, 16, 2, 16), m.randn(12, 16, 2, 16)]
    table = torch.randperm(12, generator=m.generator).view(4, 3).to(device, torch.int32)
    used = torch.tensor(USED, dtype=torch.int32, device=device)
    positional = offsets(LENGTHS, device), None, max(LENGTHS), max(USED)
    return tensors, positional, {"seqused_k": used, "block_table": table, "enable_gqa": True}


def reference(
    tensors: list[Tensor], positional: Any, options: Any, window: Any, **more: Any
) -> Any:
    ends, _, max_q, max_k = positional
    return paged_attention_reference(
        *tensors,
        options["block_table"],
        ends,
        options["seqused_k"],
        max_q,
        max_k,
        causal=False,
        window_size=window,
        return_lse=True,
        **more,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (4, 0), (6, 2)])
@pytest.mark.parametrize("num_splits", [None, 1])
def test_paged_calls_match_the_reference(device, overrides, window, num_splits, dtype):
    tensors, positional, options = call(device, dtype)
    aux = varlen.AuxRequest(lse=True)
    run = {"window_size": window, "num_splits": num_splits, "return_aux": aux, "scale": 0.3}
    got = varlen.varlen_attn(*tensors, *positional, **run, **options)
    assert got[0].dtype == dtype
    eager = reference(tensors, positional, options, window, softmax_scale=0.3)
    exact = [t.double() for t in tensors]
    oracle = reference(exact, positional, options, window, softmax_scale=0.3)
    for name, *values in zip(("out", "lse"), got, eager, oracle, strict=True):
        assert_no_worse_than_eager(name, *values)
    out = torch.full_like(tensors[0], float("nan"))
    again, lse = varlen.varlen_attn_out(out, *tensors, *positional, **run, **options)
    assert again is out
    assert torch.equal(out, got[0])
    assert torch.equal(lse, got[1])


def test_paged_calls_compile(device, overrides):
    tensors, positional, options = call(device)
    want = varlen.varlen_attn(*tensors, *positional, window_size=(-1, 0), **options)
    compiled = torch.compile(varlen.varlen_attn, backend="aot_eager", fullgraph=True)
    got = compiled(*tensors, *positional, window_size=(-1, 0), **options)
    assert torch.equal(got, want)


def test_values_with_a_head_dim_of_their_own_need_an_output(device, overrides):
    """Without one, PyTorch's fake of the operator gives the output the shape of the queries."""
    (q, k, v), positional, options = call(device)
    v = v[..., :8]
    message = r"value must have the head_dim of query, 16, got 8: varlen_attn_out takes"
    with pytest.raises(ValueError, match=message):
        varlen.varlen_attn(q, k, v, *positional, **options)
    out = torch.full((*q.shape[:2], 8), float("nan"), device=device)
    varlen.varlen_attn_out(out, q, k, v, *positional, **options)
    exact = [t.double() for t in (q, k, v)]
    window = (-1, -1)
    eager, _ = reference([q, k, v], positional, options, window)
    oracle, _ = reference(exact, positional, options, window)
    assert_no_worse_than_eager("out", out, eager, oracle)


def test_calls_without_pages_go_where_they_went(device, overrides, key):
    if device.type == "cuda":
        pytest.skip("on a GPU PyTorch has kernels of its own")
    tensors, (ends, _, max_q, _), options = call(device)
    seen = []

    def forward(query: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, ...]:
        seen.append(named.get("block_table"))
        lse = query.new_zeros(query.shape[1], query.shape[0], dtype=torch.float32)
        unused = torch.zeros(2, dtype=torch.uint64)
        return torch.zeros_like(query), lse, unused, unused[0].clone(), query.new_zeros(0)

    library = torch.library.Library("aten", "IMPL", key)
    library.impl("_flash_attention_forward", forward, key)
    q = tensors[0]
    varlen.varlen_attn(q, q, q, ends, ends, max_q, max_q)
    assert seen == [None]
    paged = tensors, (ends, None, max_q, max(USED))
    ours = varlen.varlen_attn(*paged[0], *paged[1], **options)
    assert len(seen) == 1
    assert ours.any()
    with sdpa_kernel(SDPBackend.MATH):
        if hasattr(varlen, "_select_backend"):
            with pytest.raises(RuntimeError, match="No viable backend"):
                varlen.varlen_attn(*paged[0], *paged[1], **options)
        else:
            varlen.varlen_attn(*paged[0], *paged[1], **options)
            assert len(seen) == 2
    overrides.remove()
    varlen.varlen_attn(*paged[0], *paged[1], **options)
    assert seen[-1] is options["block_table"]


def test_what_is_not_offered_raises(device, overrides):
    tensors, positional, options = call(device)
    with pytest.raises(ValueError, match="seqused_k must be given with block_table"):
        varlen.varlen_attn(*tensors, *positional, **{**options, "seqused_k": None})
    tensors[0].requires_grad_()
    with pytest.raises(RuntimeError, match="inference-only"):
        varlen.varlen_attn(*tensors, *positional, **options)


def test_registration_comes_and_goes():
    def dump() -> str:
        return torch._C._dispatch_dump("torch_attn::_varlen_attn")

    before = dump()
    with integration.register():
        active = dump()
        assert active != before
        integration.register()  # a second time does nothing
        assert dump() == active
    assert dump() == before
    integration.register().remove()
    assert dump() == before


def test_a_torch_without_pages_is_refused(monkeypatch):
    monkeypatch.setattr(integration, "_OPERATORS", ("_no_such_operator",))
    with pytest.raises(RuntimeError, match=r"needs PyTorch 2\.12 or newer"):
        integration.register()
    assert integration._active is None
