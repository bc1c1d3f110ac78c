"""Additive biases in the kernels for Hopper, run on a CPU by ``_gluon``: numbers and mistakes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from flash_attn_triton._dense import ops
from flash_attn_triton._dense.call import Options, Tensors
from flash_attn_triton._dense.hopper import bias_launch
from flash_attn_triton._dense.portable import backward_launch
from flash_attn_triton._dense.portable.form import Form

from ..._linked.numerics import Packed
from ..._numerics import Shape, check, make_case, make_packed, run
from ._gluon import TILES, forward
from ._gluon_backward import backward
from ._gluon_bias import (
    BACKWARD,
    FORWARD,
    FULL,
    HALF,
    biased,
    gradients,
    hiding,
    in_order,
    with_bias,
)

__all__ = ["backward", "biased", "forward", "gradients"]  # fixtures

pytestmark = pytest.mark.skipif(not ops.interpreted(), reason="about the interpreter")

FORWARD["single"] = replace(TILES["stages"], stages_b=1)
# a sequence without queries, and padding on both sides
PACKED = Packed((70, 0, 40), (60, 40, 90), 2, 1, 48, padding=30)


# tile, shape, features, size of the bias, its dtype
CASES = [
    ("plain", Shape(2, 200, 100, 2, 1, 64), (), (1, 2, 200, 100), HALF),
    ("stages", Shape(2, 130, 103, 2, 1, 64), ("causal",), (2, 1, 130, 103), HALF),
    ("pipeline", Shape(2, 200, 104, 2, 2, 64), ("causal", "sinks"), (2, 2, 200, 104), FULL),
    ("share", Shape(2, 100, 140, 2, 1, 64), ("window_right",), (1, 1, 100, 140), HALF),
    ("single", Shape(1, 70, 200, 4, 2, 48), ("causal", "softcap"), (1, 4, 70, 200), HALF),
    ("plain", Shape(2, 3, 150, 4, 1, 64), ("causal", "alibi"), (2, 1, 1, 150), HALF),
    ("pipeline", Shape(1, 100, 107, 2, 1, 64), ("causal",), (1, 2, 1, 107), FULL),
]


@pytest.mark.parametrize(("tile", "shape", "features", "size", "dtype"), CASES, ids=str)
def test_forward(tile, shape, features, size, dtype, biased):
    biased(tile, reverse=shape.batch == 2)
    case = make_case(shape, torch.bfloat16, "cpu", features)
    check(with_bias(case, *size, dtype=dtype), grad=False)


PACKED_CASES = [
    ("pipeline", ("causal",), (3, 2, 70, 96), torch.float16),
    ("stages", ("window_right",), (1, 2, 70, 96), FULL),
    ("plain", ("causal",), (3, 1, 1, 90), torch.float16),
]


@pytest.mark.parametrize(("tile", "features", "size", "dtype"), PACKED_CASES, ids=str)
def test_forward_of_packed_tensors(tile, features, size, dtype, biased):
    biased(tile)
    case = make_packed(PACKED, torch.float16, "cpu", features)
    case = case.with_options(max_seqlen_k=size[3])
    check(with_bias(case, *size, dtype=dtype), grad=False)


@pytest.mark.parametrize(
    ("tile", "features"),
    [("plain", ()), ("stages", ("causal", "softcap")), ("pipeline", ("sinks",))],
    ids=str,
)
def test_keys_that_a_bias_hides(tile, features, biased):
    biased(tile)
    got = check(hiding(*features), grad=False)
    if "sinks" not in features:
        assert not got["out"][:, 70:80].any()
        assert (got["lse"][:, :, 70:80] == -torch.inf).all()


@pytest.mark.parametrize("tile", ["plain", "pipeline"])
@pytest.mark.parametrize("hidden", [-2e7, -1e30, torch.finfo(HALF).min])
def test_keys_that_large_numbers_hide(tile, hidden, biased):
    biased(tile)
    case = hiding("causal")
    want = run(case, grad=False)
    bias = case.inputs["bias"]
    got = run(case.with_inputs(bias=bias.masked_fill(bias == -torch.inf, hidden)), grad=False)
    assert all(torch.equal(got[name], x) for name, x in want.items())


def test_strides_do_not_change_a_bit(biased):
    """Rows that TMA does not read, columns that are no neighbours, and a dimension expanded."""
    biased("stages")
    case = make_case(Shape(2, 70, 75, 2, 1, 64), torch.bfloat16, "cpu")
    case = with_bias(case, 1, 2, 70, 75)
    bias = case.inputs["bias"]
    wide = torch.randn(1, 2, 70, 80).to(bias.dtype)
    wide[..., :75] = bias
    want = run(case, grad=False)
    for other in (
        wide[..., :75],
        bias.mT.contiguous().mT,
        bias.expand(2, -1, -1, -1),
        bias.repeat_interleave(2, 3)[..., ::2],
    ):
        got = run(case.with_inputs(bias=other), grad=False)
        assert torch.equal(got["out"], want["out"])
        assert torch.equal(got["lse"], want["lse"])


# ---- backward

BACKWARD_CASES = [
    ("rows", Shape(1, 130, 70, 2, 1, 64), ("window_right",), (1, 1, 130, 70), FULL),
    ("columns", Shape(1, 70, 150, 1, 1, 48), ("causal", "softcap"), (1, 1, 70, 150), HALF),
    ("columns", Shape(2, 40, 70, 2, 1, 64), ("causal",), (2, 1, 1, 70), HALF),
    ("wide", Shape(1, 70, 80, 2, 1, 160, 192), ("causal",), (1, 2, 70, 80), HALF),
]


@pytest.mark.parametrize(("tile", "shape", "features", "size", "dtype"), BACKWARD_CASES, ids=str)
def test_backward(tile, shape, features, size, dtype, gradients):
    gradients(tile)
    case = make_case(shape, torch.bfloat16, "cpu", features)
    check(with_bias(case, *size, dtype=dtype))


def test_backward_of_packed_tensors(gradients):
    gradients("columns", reverse=False)
    case = make_packed(PACKED, torch.float16, "cpu", ("window_right",))
    case = case.with_options(max_seqlen_k=96)
    check(with_bias(case, 3, 1, 70, 96, dtype=torch.float16))


def test_what_a_bias_holds_behind_a_sequence_changes_nothing(gradients):
    gradients("columns")
    case = make_packed(PACKED, torch.float16, "cpu").with_options(max_seqlen_k=96)
    case = with_bias(case, 3, 1, 70, 96, dtype=torch.float16)
    bias = case.inputs["bias"].clone()
    for b, (len_q, len_k) in enumerate(zip((70, 0, 40), (60, 40, 90), strict=True)):
        bias[b, :, len_q:], bias[b, :, :, len_k:] = torch.nan, torch.nan
    want, got = run(case), run(case.with_inputs(bias=bias))
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert torch.equal(got[name], want[name]), name


# dbias is what the kernel keeps, or its sum; rows or keys that face nobody, GQA, every broadcast.
# Some sequences, or key heads, are added up in memory; what is left of either is summed
SUMMED = [
    ("columns", Shape(2, 130, 150, 2, 1, 64), ("causal",), (1, 2, 130, 150)),
    ("columns", Shape(2, 150, 72, 2, 1, 48), ("causal",), (2, 1, 150, 72)),
    ("rows", Shape(2, 100, 150, 2, 2, 64), ("causal",), (1, 1, 100, 150)),
    ("columns", Shape(2, 70, 80, 2, 1, 64), ("window_right",), (2, 2, 70, 80)),
    ("columns", Shape(2, 70, 80, 2, 2, 64), ("causal", "dropout"), (1, 2, 70, 80)),
    ("columns", Shape(2, 70, 80, 3, 3, 64), ("causal",), (2, 1, 70, 80)),
    ("columns", Shape(4, 40, 144, 2, 2, 64), ("window_right",), (1, 2, 40, 144)),
    ("rows", Shape(2, 70, 72, 4, 4, 64), (), (2, 1, 70, 72)),
    ("columns", Shape(2, 200, 70, 12, 6, 64), ("causal",), (2, 1, 200, 70)),
    ("columns", Shape(6, 70, 40, 2, 1, 64), (), (1, 2, 70, 40)),
    ("columns", Shape(2, 150, 72, 2, 2, 48), ("causal",), (1, 2, 150, 72)),
    ("columns", Shape(1, 150, 152, 2, 1, 64), ("causal",), (1, 2, 150, 152)),
    # rows that see no key: less than a tile of them, two tiles, and more than one, of 128
    ("columns", Shape(2, 100, 72, 2, 2, 48), ("causal",), (1, 2, 100, 72)),
    ("columns", Shape(2, 200, 72, 4, 2, 64), ("causal",), (1, 4, 200, 72)),
    ("rows", Shape(1, 330, 136, 4, 4, 64), ("causal",), (1, 1, 330, 136)),
]


@pytest.mark.parametrize(("tile", "shape", "features", "size"), SUMMED, ids=str)
def test_gradient_of_the_bias(tile, shape, features, size, gradients, monkeypatch):
    monkeypatch.setattr(backward_launch, "bias_gradient_launch", lambda _: None)  # the portable one
    gradients(tile, reverse=shape.heads_k == 1)
    case = make_case(shape, torch.bfloat16, "cpu", features)
    check(with_bias(case, *size, share=0.1))


# those whose programs share a tile: all of the bias, a part of it, in panels of two key heads
SHARED = [SUMMED[i] for i in (0, 2, 6, 7, 8, 9, 10, 12, 13, 14)]


@pytest.mark.parametrize("order", ["at_once", "backwards", "by_twos"])
@pytest.mark.parametrize(("tile", "shape", "features", "size"), SHARED, ids=str)
def test_gradient_of_a_shared_bias(tile, shape, features, size, order, gradients):
    """Whoever begins first stores, whatever the order in which programs begin and go on."""
    kernel = gradients(tile, reverse=order != "by_twos")
    kernel.at_once = {"at_once": 64, "backwards": 1, "by_twos": 2}[order]
    kernel.backwards = order == "backwards"
    case = make_case(shape, torch.bfloat16, "cpu", features)
    check(with_bias(case, *size, share=0.1))


@pytest.mark.parametrize(("tile", "shape", "features", "size"), SUMMED[2:3] + SUMMED[6:9], ids=str)
def test_gradient_of_the_bias_in_order(tile, shape, features, size, gradients, monkeypatch):
    """A launch for each sequence, or key head, or for all of them."""
    monkeypatch.setattr(backward_launch, "bias_gradient_launch", lambda _: None)
    gradients(tile, reverse=False)
    case = make_case(shape, torch.bfloat16, "cpu", features).with_options(deterministic=True)
    check(with_bias(case, *size, share=0.1))


@pytest.mark.parametrize(("batch", "keys"), [(1, 260), (2, 200)])
def test_gradients_in_order(batch, keys, gradients):
    gradients("columns")
    check(in_order(batch, keys))


@pytest.mark.parametrize(
    ("size", "programs", "processors", "parts"),
    [
        ((1, 8), 4096, 132, (4, 1)),  # 32 rounds of programs, or four times eight
        ((4, 1), 4096, 132, (1, 1)),  # eight heads share it
        ((1, 1), 4096, 132, (1, 1)),  # heads would be left to be summed
        ((4, 8), 4096, 132, (1, 1)),  # nothing is shared
        ((1, 8), 32, 132, (1, 1)),  # each launch would leave most of the GPU empty
        ((1, 8), 1056, 132, (4, 1)),
        ((1, 8), 992, 132, (4, 1)),
        ((1, 8), 1152, 132, (1, 1)),  # four times three rounds, or two times five, in place of nine
    ],
)
def test_launches_leave_a_gpu_no_emptier(size, programs, processors, parts, monkeypatch):
    monkeypatch.setenv("ATTN_COMMON_PLATFORM", "nvidia:sm_90")
    keys = programs // 32 * 128
    q, k = (torch.empty(4, n, 8, 64, dtype=HALF, device="meta") for n in (128, keys))
    x = Tensors(q, k, k, bias=torch.empty(*size, 128, keys, dtype=HALF, device="meta"))
    form = Form(x, Options(0.1, -1, -1, 0.0, 0.0))
    summed = bias_launch.BiasSum(form, x, BACKWARD["columns"], processors)
    assert summed.parts == summed.together == parts
    assert not summed.constants["SHARES_DS"]
    assert summed.counters == 0


@pytest.mark.parametrize(
    ("batch", "heads", "size", "together"),
    [
        (4, 8, (1, 8), (4, 1)),
        (6, 8, (1, 8), (3, 1)),
        (5, 8, (1, 8), (1, 1)),
        (4, 8, (4, 1), (1, 4)),
        (1, 8, (1, 1), (1, 4)),
        (2, 8, (1, 1), (2, 1)),
        (2, 8, (2, 8), (1, 1)),
        (1, 8, (1, 8), (1, 1)),
    ],
)
def test_sums_of_those_side_by_side(batch, heads, size, together, monkeypatch):
    """Up to four are added up, as many as come out even, and nothing is set to zero."""
    monkeypatch.setenv("ATTN_COMMON_PLATFORM", "nvidia:sm_90")
    q = torch.empty(batch, 16, heads, 64, dtype=HALF, device="meta")
    x = Tensors(q, q, q, bias=torch.empty(*size, 16, 16, dtype=HALF, device="meta"))
    form = Form(x, Options(0.1, -1, -1, 0.0, 0.0))
    found = bias_launch.side_by_side(form, bias_launch.BiasForm(x.bias, 64, 64))
    assert found == together
    summed = bias_launch.BiasSum(form, x, BACKWARD["columns"], 132, found)
    assert summed.parts == (1, 1)
    ds = summed.new_gradients(torch.full(x.bias.shape, torch.nan))
    assert ds.shape[:2] == (batch // together[0], heads // together[1])
    is_shared = max(together) > 1
    assert summed.constants == {"SHARES_DS": is_shared, "CLEARS_DS": False}
    # two for each block of keys, of which there is one
    assert summed.counters == (2 * batch * heads // max(together) if is_shared else 0)
    if ds.shape == x.bias.shape:
        assert ds.isnan().all()


@pytest.mark.parametrize(
    ("size", "tokens", "dropout", "clears"),
    [
        ((1, 8), 16, 0.0, True),
        ((1, 8), 20, 0.0, False),  # rows that TMA does not write: what is hidden is not summed
        ((1, 8), 16, 0.5, False),
        ((1, 1), 16, 0.0, False),
    ],
)
def test_hidden_tiles_are_cleared_where_nothing_is_summed(
    size, tokens, dropout, clears, monkeypatch
):
    monkeypatch.setenv("ATTN_COMMON_PLATFORM", "nvidia:sm_90")
    q = torch.empty(4, tokens, 8, 64, dtype=HALF, device="meta")
    x = Tensors(q, q, q, bias=torch.empty(*size, tokens, tokens, dtype=HALF, device="meta"))
    form = Form(x, Options(0.1, -1, 0, 0.0, dropout))
    together = bias_launch.side_by_side(form, bias_launch.BiasForm(x.bias, 64, 64))
    summed = bias_launch.BiasSum(form, x, BACKWARD["columns"], 132, together)
    assert summed.constants == {"SHARES_DS": True, "CLEARS_DS": clears}


@pytest.mark.parametrize(
    ("batch", "tokens", "window_right", "rows"),
    [
        (4, (320, 128), 0, 0),  # 192 rows see no key: three tiles
        (4, (320, 120), 0, 8),
        (4, (320, 120), 200, 0),
        (4, (320, 120), 150, 50),
        (4, (120, 320), 0, 0),
        (4, (320, 120), -1, 0),  # no mask
        (1, (320, 128), 0, 320),  # one sequence: nobody adds, nothing is cleared by the kernel
    ],
)
def test_rows_that_fill_no_tile_are_set_to_zero(batch, tokens, window_right, rows, monkeypatch):
    """No TMA store may begin ahead of the first row; see ``clear_hidden``."""
    monkeypatch.setenv("ATTN_COMMON_PLATFORM", "nvidia:sm_90")
    q, k = (torch.empty(batch, n, 8, 64, dtype=HALF, device="meta") for n in tokens)
    x = Tensors(q, k, k, bias=torch.empty(1, 8, *tokens, dtype=HALF, device="meta"))
    form = Form(x, Options(0.1, -1, window_right, 0.0, 0.0))
    together = bias_launch.side_by_side(form, bias_launch.BiasForm(x.bias, 64, 64))
    summed = bias_launch.BiasSum(form, x, BACKWARD["columns"], 132, together)
    ds = summed.new_gradients(torch.full(x.bias.shape, torch.nan))
    assert not ds[:, :, :rows].any()
    assert ds[:, :, rows:].isnan().all()


def test_gradients_of_scores_have_a_bound(gradients, monkeypatch):
    """Above it, the portable kernel computes the gradient of the bias."""
    monkeypatch.setattr(bias_launch, "MOST_DS_BYTES", 0)
    monkeypatch.setattr(bias_launch.BiasSum, "__call__", None)
    gradients("columns")
    check(with_bias(make_case(Shape(1, 40, 50, 1, 1, 64), torch.bfloat16, "cpu"), 1, 1, 40, 50))
