"""What results depend on, and what they do not; extreme inputs."""

from __future__ import annotations

import pytest
import torch
from blocksparse_attn import BlockSparseLayout, blocksparse_attn_func
from blocksparse_attn._attention.call import ListForm

from .._linked.budget import assert_same
from .._numerics import Packed, Shape, check, make_case, make_packed, run

SHAPE = Shape(1, 20, 33, 2, 1, 16)


@pytest.mark.eager
@pytest.mark.parametrize("scale", [0.0, 1, -0.7, 3.5], ids=str)
def test_scales(scale, device):
    # gradients of a steep softmax nearly cancel
    check(make_case(SHAPE, torch.float32, device, softmax_scale=scale), grad=abs(scale) <= 1)


def test_scale_of_zero_is_the_mean(device):
    case = make_case(SHAPE, torch.float32, device, "all", causal=False, softmax_scale=0.0)
    out, _ = case()
    mean = case.inputs["v"].mean(1, keepdim=True).expand_as(out)
    torch.testing.assert_close(out, mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seqlen_q", [2, 20])
@pytest.mark.parametrize("scale", [1.0, -1.0])
def test_extreme_logits(scale, seqlen_q, dtype, device):
    """Logits of exactly +-1e5 and ties: each row's output is a mean of some rows of v."""
    shape = SHAPE._replace(seqlen_q=seqlen_q, heads_q=1)
    case = make_case(shape, dtype, device, "all", softmax_scale=scale, num_splits=2)
    q, k = (torch.zeros_like(case.inputs[name]) for name in "qk")
    q[..., 0], k[..., 0] = 1000.0, 100.0
    q[:, ::2, :, 0], k[:, 1::3, :, 0] = -1000.0, -100.0
    case = case.with_inputs(q=q, k=k)
    check(case, grad=False)
    for name, value in run(case).items():
        assert value.isfinite().all(), name


@pytest.mark.eager
def test_twice_the_same_bits(device):
    case = make_packed(Packed((20, 1), (33, 40), 4, 2, 16), torch.float32, device)
    assert_same(run(case), run(case))


def test_the_order_of_columns_changes_no_bit(device):
    case = make_case(SHAPE, torch.float32, device, "local")
    layout = case.options["layout"]
    tidy = BlockSparseLayout.from_dense(layout.to_dense(), 16)
    assert not torch.equal(tidy.col, layout.col)
    for alike in (False, True):
        same = BlockSparseLayout(tidy.crow, tidy.col, 16, rows_alike=alike)
        assert_same(run(case.with_options(layout=same)), run(case))


def test_more_of_a_layout_changes_nothing(device):
    """Rows and columns behind the sequence, as a layout for the longest has."""
    for causal in (False, True):
        case = make_case(SHAPE, torch.float32, device, "local", causal=causal)
        longer = BlockSparseLayout.from_dense(
            torch.nn.functional.pad(case.options["layout"].to_dense(), (0, 3, 0, 3), value=True), 16
        )
        got, want = run(case.with_options(layout=longer)), run(case)
        for name, value in got.items():
            # a last row of blocks may have its neighbour now, and walk without a mask
            torch.testing.assert_close(value, want[name], rtol=1e-5, atol=1e-6)


def test_blocks_right_of_the_diagonal_are_skipped(device):
    case = make_case(Shape(1, 40, 40, 1, 1, 16), torch.float32, device, "all", (16, 32))
    lower = case.options["layout"].to_dense()
    rows, cols = torch.arange(3, device=device)[:, None], torch.arange(2, device=device)
    lower &= cols * 32 < (rows + 1) * 16
    tidy = BlockSparseLayout.from_dense(lower, (16, 32))
    assert_same(run(case.with_options(layout=tidy)), run(case))
    if device.type == "cuda" or case.options["layout"]._lists.known:
        layouts = tidy, case.options["layout"]
        kept = [x._lists.of("tall", ListForm(1, 16, 4, True)).begin[-1] for x in layouts]
        assert kept[0] == kept[1]


def test_a_wider_block_size_is_the_same_attention(device):
    """One pattern in blocks of 32, or of 16 with every block repeated."""
    coarse = make_case(Shape(1, 40, 50, 2, 1, 16), torch.float32, device, block=(32, 32))
    dense = coarse.options["layout"].to_dense()
    fine = dense.repeat_interleave(2, 1).repeat_interleave(2, 2)
    got = run(coarse.with_options(layout=BlockSparseLayout.from_dense(fine, 16)))
    want = run(coarse)
    for name, value in got.items():
        torch.testing.assert_close(value, want[name], rtol=1e-4, atol=1e-5)


def test_heads_that_agree_are_one(device):
    shared = make_case(Shape(1, 40, 50, 4, 2, 16), torch.float32, device, shared=True)
    dense = shared.options["layout"].to_dense().expand(4, -1, -1)
    got = run(shared.with_options(layout=BlockSparseLayout.from_dense(dense, 16)))
    want = run(shared)
    for name, value in got.items():
        torch.testing.assert_close(value, want[name], rtol=1e-4, atol=1e-5)


def test_nan_reaches_the_rows_that_see_it(device):
    case = make_case(Shape(1, 48, 48, 1, 1, 16), torch.float32, device, "local")
    k = case.inputs["k"].clone()
    k[:, 5] = float("nan")
    got = run(case.with_inputs(k=k), grad=False)
    position = torch.arange(48, device=device)
    kept = case.options["layout"].to_dense()[0][position // 16, 0]
    sees = kept & (position >= 5)
    assert torch.equal(got["out"][0, :, 0].isnan().all(-1), sees)
    assert torch.equal(got["lse"][0, 0].isnan(), sees)


@pytest.mark.eager
def test_a_layout_serves_many_calls(device):
    layout = BlockSparseLayout.local_strided(2, 128, 16, 2, 3, device=device)
    for seqlen_q, seqlen_k in ((40, 40), (1, 41), (8, 100), (9, 128)):
        shape = Shape(1, seqlen_q, seqlen_k, 2, 1, 16)
        check(make_case(shape, torch.float32, device).with_options(layout=layout), grad=False)


@pytest.mark.eager
def test_no_queries_no_heads_of_keys_too_many(device):
    q = torch.zeros(1, 0, 2, 16, device=device)
    k = torch.zeros(1, 20, 2, 16, device=device)
    layout = BlockSparseLayout.local_strided(2, 32, 16, 1, 2, device=device)
    out, lse = blocksparse_attn_func(q, k, k, layout, return_lse=True)
    assert out.shape == (1, 0, 2, 16)
    assert lse.shape == (1, 2, 0)
