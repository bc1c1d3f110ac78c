"""Forward results against the float64 reference, on a GPU or in the interpreter."""

from __future__ import annotations

import sys

import pytest
import torch
from flash_attn_triton import flash_attn_func

from .._linked.budget import DTYPES, assert_same
from .._linked.views import VIEWS
from .._numerics import FEATURES, LARGE, MEDIUM, SMALL, Case, Shape, check, make_case, run

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
causal = pytest.mark.parametrize("features", [(), ("causal",)], ids=["full", "causal"])


@causal
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_matches_reference(shape, features, device):
    check(make_case(shape, torch.float32, device, features), grad=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_half_precision(shape, dtype, device):
    check(make_case(shape, dtype, device, ("causal",)), grad=False)


@pytest.mark.device
@dtypes
@causal
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_matches_reference_at_length(shape, dtype, features, device):
    check(make_case(shape, dtype, device, features), grad=False)


# bf16 is in the tests of gradients
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature(feature, dtype, device):
    check(make_case(MEDIUM, dtype, device, (feature,)), grad=False)


@pytest.mark.device
@dtypes
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("shape", [LARGE[0], LARGE[-1]], ids=str)
def test_each_feature_at_length(shape, feature, dtype, device):
    check(make_case(shape, dtype, device, (feature,)), grad=False)


# no row sees the first keys, some rows see nothing, windows end inside a tile or on its edge
WINDOWS = [(0, -1), (14, -1), (15, 0), (16, 0), (17, 15), (16, 16), (-1, 0), (-1, 14), (-1, 16)]
WINDOWS += [(3, 40)]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("lengths", [(18, 70), (50, 33)], ids=str)
def test_windows_at_tile_edges(window, lengths, device):
    shape = Shape(1, *lengths, 1, 1, 16)
    check(make_case(shape, torch.float32, device).with_options(window_size=window), grad=False)


@pytest.mark.eager
@pytest.mark.parametrize("window", [(4, 3), (-1, 3), (4, -1)], ids=str)
def test_causal_closes_the_right_of_a_window(window, device):
    case = make_case(Shape(1, 18, 21, 2, 1, 16), torch.float32, device)
    got = run(case.with_options(causal=True, window_size=window))
    assert_same(got, run(case.with_options(window_size=(window[0], 0))))


@pytest.mark.eager
@pytest.mark.parametrize("size", [2**31 - 1, 2**31, sys.maxsize, 2**63, 10**400])
def test_window_larger_than_the_sequence_hides_nothing(size, device):
    case = make_case(Shape(1, 18, 21, 2, 1, 16), torch.float32, device)
    got = run(case.with_options(window_size=(size, size)))
    want = run(case)
    for name, value in got.items():
        # the tiles may be walked in another order
        torch.testing.assert_close(value, want[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("view", VIEWS)
def test_strides_do_not_change_a_bit(view, device):
    features = ("causal", "bias", "sinks")
    case = make_case(Shape(1, 17, 5, 4, 2, 24), torch.float16, device, features)
    viewed = {name: VIEWS[view](t) for name, t in case.inputs.items()}
    for name, t in viewed.items():
        assert torch.equal(t, case.inputs[name])
        assert t.ndim == 1 or t.stride() != case.inputs[name].stride()
    assert_same(run(case.with_inputs(**viewed)), run(case))


def test_fused_qkv_projection(device):
    want = make_case(Shape(2, 17, 17, 2, 2, 24), torch.float16, device)
    fused = torch.stack([want.inputs[name] for name in "qkv"], dim=2)
    q, k, v = fused.unbind(dim=2)
    assert not q.is_contiguous()
    got = want.with_inputs(q=q, k=k, v=v)
    assert_same(run(got), run(want))


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_each_tensor_has_its_own_strides(name, device):
    case = make_case(Shape(2, 17, 5, 2, 2, 24), torch.float32, device)
    viewed = {name: VIEWS["heads_first"](case.inputs[name])}
    assert_same(run(case.with_inputs(**viewed)), run(case))


@pytest.mark.eager
def test_broadcast_keys_are_not_copied_wrongly(device):
    case = make_case(Shape(1, 18, 21, 2, 2, 16), torch.float32, device)
    q = torch.cat([case.inputs["q"], case.inputs["q"].flip(1)])
    k, v = (case.inputs[name].expand(2, -1, -1, -1) for name in "kv")
    got = case.with_inputs(q=q, k=k, v=v)()
    want = case.with_inputs(q=q, k=k.clone(), v=v.clone())()
    assert_same(dict(enumerate(got)), dict(enumerate(want)))


@pytest.mark.eager
@pytest.mark.parametrize("requires_grad", [False, True])
def test_what_is_returned(requires_grad, device):
    case = make_case(Shape(1, 5, 7, 2, 1, 16), torch.float32, device)
    q, k, v = (t.requires_grad_(requires_grad) for t in case.inputs.values())
    out = flash_attn_func(q, k, v)
    assert isinstance(out, torch.Tensor)
    pair = flash_attn_func(q, k, v, return_lse=True)
    triple = flash_attn_func(q, k, v, return_attn_probs=True)
    assert (len(pair), len(triple), triple[2]) == (2, 3, None)
    assert torch.equal(out, pair[0])
    assert torch.equal(out, triple[0])
    assert torch.equal(pair[1], triple[1])
    assert out.requires_grad == requires_grad


@pytest.mark.eager
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
def test_output_dtype(out_dtype, device):
    case = make_case(Shape(1, 18, 21, 2, 1, 16), torch.float16, device, ("causal",))
    check(case.with_options(out_dtype=out_dtype))


@pytest.mark.eager
@pytest.mark.parametrize("head_dims", [(4, 4), (9, 5), (5, 12)], ids=str)
def test_rows_of_a_narrower_output_need_not_be_whole_accesses(head_dims, device):
    case = make_case(Shape(1, 18, 21, 2, 1, *head_dims), torch.float32, device, ("causal",))
    check(case.with_options(out_dtype=torch.float16))


def every_other(x):
    """The same values with a stride of two, NaN or the largest integer between them."""
    filler = float("nan") if x.is_floating_point() else torch.iinfo(x.dtype).max
    return torch.stack([x, torch.full_like(x, filler)], -1)[..., 0]


@pytest.mark.eager
@pytest.mark.parametrize("feature", ["sinks", "alibi", "alibi_batch"])
def test_strides_of_the_small_tensors(feature, device):
    case = make_case(MEDIUM, torch.float32, device, (feature,))
    inputs = {n: every_other(t) if n == "sinks" else t for n, t in case.inputs.items()}
    options = {n: every_other(t) if "alibi" in n else t for n, t in case.options.items()}
    assert_same(run(Case(inputs, options)), run(case))


@pytest.mark.eager
def test_slopes_expanded_over_the_batch(device):
    case = make_case(MEDIUM, torch.float32, device, ("alibi",))
    slopes = case.options["alibi_slopes"].expand(2, 2)
    assert_same(run(case.with_options(alibi_slopes=slopes)), run(case))
