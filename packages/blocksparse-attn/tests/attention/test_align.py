"""Layouts whose rows begin with the queries: cross attention, of any rows and columns."""

from __future__ import annotations

import pytest
import torch
from blocksparse_attn import BlockSparseLayout, blocksparse_attn_func, blocksparse_attn_varlen_func

from .._linked.budget import assert_same
from .._numerics import Packed, Shape, check, make_case, make_packed, paged, run
from ._operators import traced_alike

TOP_LEFT = {"align": "top-left"}


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("shape", "block", "shared"),
    [
        (Shape(1, 70, 23, 2, 1, 16), (16, 16), False),  # more queries than keys
        (Shape(2, 21, 90, 2, 2, 16), (32, 16), True),  # and fewer
        (Shape(1, 5, 40, 2, 1, 16), (16, 32), False),  # a few alone
    ],
    ids=str,
)
def test_matches_reference(shape, block, shared, causal, device):
    case = make_case(
        shape, torch.float32, device, block=block, shared=shared, spare=1, causal=causal, **TOP_LEFT
    )
    check(case)


@pytest.mark.parametrize(("pattern", "causal"), [("random", False), ("all", True)])
def test_packed_matches_reference(pattern, causal, device):
    shape = Packed((70, 1, 0, 20), (25, 40, 5, 0), 2, 1, 16, padding=3)
    check(make_packed(shape, torch.float32, device, pattern, causal=causal, **TOP_LEFT))


def test_splits_and_pages(device):
    shape = Packed((1, 6), (70, 3), 2, 1, 16)
    case = make_packed(shape, torch.float32, device, num_splits=3, causal=False, **TOP_LEFT)
    check(case, grad=False)
    assert_same(run(paged(case, 5), grad=False), run(case, grad=False))


@pytest.mark.eager
@pytest.mark.parametrize("align", ["bottom-right", "top-left"])
def test_as_many_queries_as_keys_are_aligned_either_way(align, device):
    case = make_case(Shape(1, 20, 20, 2, 1, 16), torch.float32, device)
    assert_same(run(case.with_options(align=align)), run(case))


@pytest.mark.eager
def test_the_first_query_stands_at_position_0(device):
    kept = torch.tensor([[True, False], [False, True]], device=device)
    layout = BlockSparseLayout.from_dense(kept, 16)
    x = torch.zeros(1, 32, 1, 16, device=device)
    v = torch.arange(32.0, device=device).view(1, 32, 1, 1).expand(1, 32, 1, 16)
    out = blocksparse_attn_func(x[:, :8], x, v, layout, causal=False, align="top-left")
    torch.testing.assert_close(out, torch.full_like(out, 7.5))
    out = blocksparse_attn_func(x[:, :8], x, v, layout, causal=False)
    torch.testing.assert_close(out, torch.full_like(out, 23.5))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_keys_that_nobody_sees_may_be_nan(causal, device):
    """Behind the last query, or in columns that nobody keeps."""
    case = make_case(Shape(1, 20, 64, 1, 1, 16), torch.float32, device, causal=causal, **TOP_LEFT)
    kept = torch.tensor([[[True, True, False, False], [True, True, False, False]]], device=device)
    layout = BlockSparseLayout.from_dense(kept, 16)
    first = 20 if causal else 32
    want = run(case.with_options(layout=layout))
    for name in ("k", "v"):
        case.inputs[name][:, first:] = float("nan")
    got = run(case.with_options(layout=layout))
    assert_same(got, want)


@pytest.mark.eager
def test_rows_that_do_not_cover_the_queries_are_refused(device):
    layout = BlockSparseLayout.from_dense(torch.ones(2, 9, dtype=torch.bool, device=device), 16)
    q, k = torch.zeros(1, 40, 1, 16, device=device), torch.zeros(1, 16, 1, 16, device=device)
    message = "layout must cover the queries, 40, with its rows, got 2 rows of 16: 3 are needed"
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            blocksparse_attn_func(q, k, k, layout, align="top-left")
    starts = torch.tensor([0, 16], dtype=torch.int32, device=device)
    packed = q[0, :16], k[0], k[0], starts, starts
    blocksparse_attn_varlen_func(*packed, 32, 200, layout, align="top-left")
    with pytest.raises(ValueError, match=message):
        blocksparse_attn_varlen_func(*packed, 40, 16, layout, align="top-left")
    with pytest.raises(ValueError, match="align must be 'bottom-right' or 'top-left', got 'top'"):
        blocksparse_attn_func(q, k, k, layout, align="top")


# dynamo makes an instance of an autograd function, against PyTorch's own advice
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@traced_alike
@pytest.mark.eager
def test_traces_whole(device):
    case = make_case(Shape(1, 40, 20, 2, 1, 16), torch.float32, device, **TOP_LEFT)
    options = case.options
    compiled = torch.compile(
        lambda q, k, v: blocksparse_attn_func(q, k, v, **options),
        backend="aot_eager",
        fullgraph=True,
    )
    q, k, v = (x.clone().requires_grad_() for x in case.inputs.values())
    out = compiled(q, k, v)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    want = blocksparse_attn_func(q, k, v, **options)
    assert torch.equal(out, want)
    for got, exact in zip(grads, torch.autograd.grad(want.square().sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(got, exact)
