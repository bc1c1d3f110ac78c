"""Gradients against float64 autograd, and every pair of features, forward and backward."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
from flash_attn_triton import api
from flash_attn_triton._linked.host.forms import Memory
from flash_attn_triton._linked.host.tiles import Tile

from .._linked.budget import DTYPES, Maker, assert_no_worse_than_eager, assert_same
from .._numerics import (
    FEATURES,
    LARGE,
    MEDIUM,
    SMALL,
    Packed,
    Shape,
    check,
    compatible,
    incoming,
    make_case,
    make_packed,
    run,
    run_eager,
    run_oracle,
)

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
causal = pytest.mark.parametrize("features", [(), ("causal",)], ids=["full", "causal"])

PAIRS = [pair for pair in itertools.combinations(FEATURES, 2) if compatible(pair)]
# two key tiles with a tail
PAIR_SHAPE = Shape(1, 7, 18, 1, 1, 16)
# with one sequence in fp32 these are others of the list once more, or have no part in a mask
SAME = {"alibi_batch", "bias_fp32", "window_self", "window_wide"}
SMALL_PAIRS = [pair for pair in PAIRS if not SAME & set(pair)]

# every pair meets every shape and dtype of the device tier along a diagonal, as each combination is
# a compilation; the whole product on request
DEVICE_SHAPES = [Shape(2, 300, 430, 4, 2, 64), Shape(1, 430, 300, 2, 1, 80), *SMALL[:5]]
PRODUCT = list(itertools.product(PAIRS, DEVICE_SHAPES, DTYPES))
if os.environ.get("FLASH_ATTN_TRITON_FULL") != "1":
    PRODUCT = [
        (pair, DEVICE_SHAPES[i % len(DEVICE_SHAPES)], DTYPES[i % len(DTYPES)])
        for i, pair in enumerate(PAIRS)
    ]


@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_gradients_match_reference(shape, device):
    check(make_case(shape, torch.float32, device, ("causal",)))


@pytest.mark.parametrize("shape", [*SMALL[:5], *SMALL[-3:]], ids=str)
def test_gradients_without_a_mask(shape, device):
    check(make_case(shape, torch.float32, device))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [SMALL[i] for i in (2, 3, 5, 9)], ids=str)
def test_gradients_in_half_precision(shape, dtype, device):
    check(make_case(shape, dtype, device, ("causal",)))


@pytest.mark.device
@dtypes
@causal
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_gradients_match_reference_at_length(shape, dtype, features, device):
    check(make_case(shape, dtype, device, features))


# in fp32 they are all in the pairs below
@pytest.mark.parametrize("feature", FEATURES)
def test_gradients_with_each_feature(feature, device):
    check(make_case(MEDIUM, torch.bfloat16, device, (feature,)))


@pytest.mark.device
@dtypes
@pytest.mark.parametrize("feature", FEATURES)
def test_gradients_with_each_feature_at_length(feature, dtype, device):
    check(make_case(LARGE[0], dtype, device, (feature,)))


@pytest.mark.parametrize("pair", SMALL_PAIRS, ids="+".join)
def test_each_pair_of_features(pair, device):
    check(make_case(PAIR_SHAPE, torch.float32, device, pair))


@pytest.mark.device
@pytest.mark.parametrize(("pair", "shape", "dtype"), PRODUCT, ids=str)
def test_pairs_over_shapes(pair, shape, dtype, device):
    check(make_case(shape, dtype, device, pair))


# rows before the first key, windows that cut tiles on both sides, from the keys' point of view
@pytest.mark.parametrize(
    "window",
    [(0, 0), (14, -1), (15, 0), (16, 16), (17, -1), (-1, 14), (-1, 16), (3, 40)],
    ids=str,
)
@pytest.mark.parametrize("lengths", [(18, 50), (50, 18)], ids=str)
def test_gradients_of_windows_at_tile_edges(window, lengths, device):
    case = make_case(Shape(1, *lengths, 1, 1, 16), torch.float32, device)
    check(case.with_options(window_size=window))


# neither side needs to be a multiple of the other
@pytest.mark.parametrize("tile", [(16, 32), (32, 16), (64, 16), (16, 64)], ids=str)
@pytest.mark.parametrize("features", [("causal",), ("window", "bias_keys"), ("dropout",)], ids=str)
def test_tiles_that_are_not_square(features, tile, device, monkeypatch):
    if device.type != "cpu":
        pytest.skip("the tiles of a GPU are not square as they are")
    from flash_attn_triton._dense import launch
    from flash_attn_triton._dense.portable import backward_launch

    chosen = Tile(*tile, 1, 1)
    monkeypatch.setattr(launch, "forward_tile", lambda *_: chosen)
    for name in ("backward_dkdv_tile", "backward_dq_tile", "bias_gradient_tile"):
        monkeypatch.setattr(backward_launch, name, lambda *_: chosen)
    monkeypatch.setattr(api, "_known", Memory())
    check(make_case(Shape(1, 39, 70, 1, 1, 16), torch.float32, device, features))


@pytest.mark.parametrize("heads", [(3, 3), (6, 2), (5, 1)], ids=str)
def test_heads_that_do_not_fill_the_last_section(heads, device, monkeypatch):
    """Under a causal mask heads run in sections that fit a cache, here of a few kilobytes."""
    from flash_attn_triton._dense.portable import form

    shape = Shape(1, 20, 20, *heads, 16)
    monkeypatch.setattr(form, "L2_BYTES", 2 * 20 * 32 * 4)  # keys and values of two heads
    check(make_case(shape, torch.float32, device, ("causal",)))


@pytest.mark.parametrize("form", ["".join(f) for f in itertools.product("b1", "h1", "m1", "n1")])
def test_gradient_of_a_broadcast_bias(form, device):
    size = [1 if axis == "1" else n for axis, n in zip(form, (2, 2, 17, 5), strict=True)]
    case = make_case(Shape(2, 17, 5, 2, 1, 16), torch.float32, device, ("causal",))
    check(case.with_inputs(bias=Maker(device, torch.float32, seed=2).randn(*size)))


# what differs between sequences, and two key heads with a group each
@pytest.mark.parametrize("bias", ["bias", "bias_fp32", "bias_keys"])
@pytest.mark.parametrize("form", ["fixed", "packed"])
def test_bias_gradient_over_several_sequences(form, bias, device):
    features = (bias, "dropout", "alibi_batch")
    if form == "fixed":
        case = make_case(Shape(2, 17, 20, 4, 2, 16), torch.float32, device, features)
    else:
        shape = Packed((17, 5), (18, 20), 4, 2, 16, padding=2)
        case = make_packed(shape, torch.float32, device, features)
    check(case)


@pytest.mark.parametrize(
    ("dtype", "bias_dtype"),
    [
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [(2, 2, 17, 20), (1, 1, 17, 1)], ids=str)
def test_bias_dtypes(size, bias_dtype, dtype, device):
    case = make_case(MEDIUM, dtype, device)
    got = check(case.with_inputs(bias=Maker(device, bias_dtype, seed=2).randn(*size)))
    assert got["dbias"].dtype == bias_dtype
    assert got["dbias"].shape == size


@pytest.mark.eager
def test_expanded_bias_gets_the_summed_gradient(device):
    case = make_case(MEDIUM, torch.float32, device)
    small = Maker(device, torch.float32, seed=2).randn(1, 2, 1, 20)
    got = run(case.with_inputs(bias=small.expand(2, 2, 17, 20)))["dbias"]
    want = run(case.with_inputs(bias=small))["dbias"]
    assert got.shape == (2, 2, 17, 20)
    torch.testing.assert_close(got.sum((0, 2), keepdim=True), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sink_dtype", DTYPES, ids=str)
def test_sink_dtypes(sink_dtype, dtype, device):
    case = make_case(MEDIUM, dtype, device, ("causal",))
    sinks = Maker(device, sink_dtype, seed=2).randn(2)
    assert check(case.with_inputs(sinks=sinks))["dsinks"].dtype == sink_dtype


@pytest.mark.parametrize("wanted", ["q", "k", "v", "bias", "sinks", "qk", "vsinks"])
def test_gradients_asked_for_one_by_one(wanted, device):
    case = make_case(PAIR_SHAPE, torch.float32, device, ("causal", "bias", "sinks"))
    want = run(case)
    names = [name for name in case.inputs if name in wanted]
    leaves = {n: t.detach().requires_grad_(n in names) for n, t in case.inputs.items()}
    out, lse = case.with_inputs(**leaves)()
    grads = torch.autograd.grad((out, lse), [leaves[n] for n in names], incoming(out, lse))
    for name, grad in zip(names, grads, strict=True):
        assert torch.equal(grad, want[f"d{name}"]), name


@pytest.mark.parametrize("which", ["out", "lse"])
@pytest.mark.parametrize("features", [("causal",), ("sinks", "softcap", "bias")], ids="+".join)
def test_gradient_through_one_output_alone(which, features, device):
    case = make_case(PAIR_SHAPE, torch.float32, device, features)

    def gradients(case, function):
        leaves = {n: t.detach().requires_grad_() for n, t in case.inputs.items()}
        out, lse = function(**leaves, **case.options, return_lse=True)
        dout, dlse = incoming(out, lse)
        chosen, grad = (out, dout) if which == "out" else (lse, dlse)
        grads = torch.autograd.grad(chosen, list(leaves.values()), grad, allow_unused=True)
        return {
            n: torch.zeros_like(t) if g is None else g
            for (n, t), g in zip(leaves.items(), grads, strict=True)
        }

    wide = case.with_inputs(**{n: t.double() for n, t in case.inputs.items()})
    got, eager = gradients(case, case.function), gradients(case, case.reference)
    oracle = gradients(wide, case.reference)
    for name, value in got.items():
        assert_no_worse_than_eager(f"d{name}", value, eager[name], oracle[name], 3.0)


@pytest.mark.eager
def test_lse_not_asked_for_has_no_gradient(device):
    case = make_case(PAIR_SHAPE, torch.float32, device, ("causal",))
    leaves = [t.detach().requires_grad_() for t in case.inputs.values()]
    out = case.function(*leaves, **case.options)
    dout, _ = incoming(out, out)
    got = torch.autograd.grad(out, leaves, dout)
    leaves = [t.detach().requires_grad_() for t in case.inputs.values()]
    out, lse = case.function(*leaves, **case.options, return_lse=True)
    want = torch.autograd.grad((out, lse), leaves, (dout, torch.zeros_like(lse)))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.eager
@pytest.mark.parametrize("form", ["expanded", "last_dim_strided", "heads_first"])
def test_strides_of_the_incoming_gradient(form, device):
    case = make_case(Shape(1, 17, 5, 2, 1, 24), torch.float32, device, ("causal",))
    leaves = [t.detach().requires_grad_() for t in case.inputs.values()]
    out = case.function(*leaves, **case.options)
    dout = torch.randn_like(out)
    if form == "expanded":  # what out.sum() sends
        dout = torch.ones((), device=device).expand(out.shape)
    elif form == "last_dim_strided":
        dout = torch.stack([dout, dout.new_full(dout.shape, float("nan"))], -1)[..., 0]
    else:
        dout = dout.transpose(1, 2).contiguous().transpose(1, 2)
    got = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    want = torch.autograd.grad(out, leaves, dout.clone(memory_format=torch.contiguous_format))
    assert_same(dict(enumerate(got)), dict(enumerate(want)))


@pytest.mark.eager
def test_inputs_are_left_as_they_were(device):
    case = make_case(PAIR_SHAPE, torch.float16, device, ("causal", "bias", "sinks", "alibi"))
    tensors = {**case.inputs, "alibi_slopes": case.options["alibi_slopes"]}
    before = {name: t.clone() for name, t in tensors.items()}
    run(case)
    assert_same(tensors, before)


def test_budget_sees_a_wrong_gradient(device):
    """The oracle of another mask is out of budget: the comparison has teeth."""
    case = make_case(PAIR_SHAPE, torch.bfloat16, device, ("causal",))
    other = case.with_options(window_size=(-1, 1), causal=False)
    got, oracle = run(case), run_oracle(other)
    eager = run_eager(other, oracle)
    for name in ("out", "dq", "dk", "dv"):
        with pytest.raises(AssertionError, match="over budget"):
            assert_no_worse_than_eager(name, got[name], eager[name], oracle[name], 3.0)
