"""NaN and Inf where nothing may be read, and outputs that start as NaN."""

from __future__ import annotations

import pytest
import torch

from .._linked.budget import Maker, assert_same
from .._linked.fences import run_fenced
from .._linked.tiers import INTERPRETED
from .._linked.views import VIEWS
from .._numerics import Packed, Shape, check, incoming, make_case, make_packed, run

POISON = [float("nan"), float("-inf")]
poisons = pytest.mark.parametrize("poison", POISON, ids=str)
FEATURES = pytest.mark.parametrize(
    "features", [(), ("bias", "dropout"), ("softcap", "alibi", "sinks")], ids=str
)


def poisoned(case, name, rows, poison):
    """The same case with rows of one input (packed) or of every sequence (fixed) replaced."""
    t = case.inputs[name].clone()
    t[(slice(None), rows) if t.ndim == 4 else rows] = poison
    return case.with_inputs(**{name: t})


@pytest.mark.eager
def test_empty_tensors_start_as_nan():
    assert torch.empty(5).isnan().all()
    assert torch.empty(5, dtype=torch.bfloat16).isnan().all()


def test_a_nan_stays_out_of_tiles_that_do_not_see_it(device):
    """A block of queries walks no tile that is hidden from it, nor does a block of keys."""
    if device.type != "cpu":
        pytest.skip("the tiles of a GPU are other ones")
    shape = Shape(1, 33, 33, 1, 1, 16)
    case = make_case(shape, torch.float32, device, ("causal",))
    want = run(case)
    for name in ("k", "v"):
        got = run(poisoned(case, name, 32, torch.nan))  # the last query alone sees it
        for result in ("out", "dq"):
            assert torch.equal(got[result][:, :32], want[result][:, :32])
            assert got[result][:, 32].isnan().all()

    case = make_case(shape, torch.float32, device).with_options(window_size=(0, -1))
    want = run(case)
    got = run(poisoned(case, "q", 16, torch.nan))  # keys from the second tile on see it
    assert torch.equal(got["dk"][:, :16], want["dk"][:, :16])
    assert torch.equal(got["dv"][:, :16], want["dv"][:, :16])
    assert got["dk"][:, 16].isnan().all()
    got = run(poisoned(case, "k", 15, torch.nan))  # queries to the end of the first tile see it
    assert torch.equal(got["dq"][:, 16:], want["dq"][:, 16:])


# windows that begin inside a tile, and on the edge of one
@poisons
@FEATURES
@pytest.mark.parametrize("window", [(2, 0), (7, -1)], ids=str)
def test_keys_before_the_first_window(window, features, poison, device):
    case = make_case(Shape(1, 17, 40, 1, 1, 16), torch.float32, device, features)
    case = case.with_options(window_size=window)
    unseen = slice(0, 40 - 17 - window[0])
    want = run(case)
    assert not want["dk"][:, unseen].any()
    bad = poisoned(poisoned(case, "k", unseen, poison), "v", unseen, poison)
    assert_same(run(bad), want)


@poisons
@pytest.mark.parametrize(
    "features", [("causal",), ("window", "softcap"), ("sinks", "bias")], ids=str
)
def test_keys_past_seqused_k(features, poison, device):
    case = make_packed(Packed((17, 5), (33, 20), 1, 1, 16), torch.float32, device, features)
    used = torch.tensor([21, 16], dtype=torch.int32, device=device)
    case = case.with_options(seqused_k=used)
    unused = torch.cat([torch.arange(21, 33), torch.arange(33 + 16, 53)]).to(device)
    bad = poisoned(poisoned(case, "k", unused, poison), "v", unused, poison)
    assert_same(run(bad), run(case))


@pytest.mark.eager
@poisons
@pytest.mark.parametrize("features", [(), ("causal",)], ids=["full", "causal"])
def test_padding_after_the_last_sequence(features, poison, device):
    shape = Packed((18, 5), (33, 20), 2, 1, 16, padding=4)
    case = make_packed(shape, torch.float32, device, features)
    bad = case
    for name, rows in (("q", slice(23, None)), ("k", slice(53, None)), ("v", slice(53, None))):
        bad = poisoned(bad, name, rows, poison)
    assert_same(run(bad), run(case))


@pytest.mark.eager
@poisons
def test_gradient_that_arrives_at_padding(poison, device):
    shape = Packed((18, 5), (33, 20), 2, 1, 16, padding=4)
    case = make_packed(shape, torch.float32, device, ("causal", "sinks", "bias"))

    def gradients(value):
        leaves = {name: t.detach().requires_grad_() for name, t in case.inputs.items()}
        out, lse = case.function(**leaves, **case.options, return_lse=True)
        dout, dlse = incoming(out, lse)
        dout[23:], dlse[:, 23:] = value, value
        grads = torch.autograd.grad((out, lse), list(leaves.values()), (dout, dlse))
        return dict(zip(leaves, grads, strict=True))

    assert_same(gradients(poison), gradients(0.0))


@poisons
@pytest.mark.parametrize("features", [("causal",), ("window",)], ids=str)
def test_other_sequences_of_the_batch(features, poison, device):
    shape = Packed((18, 7, 5), (33, 9, 20), 2, 1, 16)
    case = make_packed(shape, torch.float32, device, features)
    want = run(case)
    bad = case
    for name, rows in (("q", slice(18, 25)), ("k", slice(33, 42)), ("v", slice(33, 42))):
        bad = poisoned(bad, name, rows, poison)
    got = run(bad)
    for name, (begin, end) in {"out": (18, 25), "dq": (18, 25), "dk": (33, 42)}.items():
        for rows in (slice(0, begin), slice(end, None)):
            assert torch.equal(got[name][rows], want[name][rows]), name
    # and the poison is where it belongs
    assert got["out"][18:25].isnan().any()


@pytest.mark.parametrize("shape", [Shape(2, 17, 20, 2, 1, 24), Shape(1, 5, 7, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("features", [(), ("causal", "bias", "sinks")], ids=["plain", "rich"])
def test_memory_around_the_inputs(features, shape, device):
    """Every input is a window into NaN: past its rows, heads, and head dimension."""
    case = make_case(shape, torch.float32, device, features)
    inside = {name: VIEWS["inside"](t) for name, t in case.inputs.items()}
    assert_same(run(case.with_inputs(**inside)), run(case))


@poisons
def test_bias_beyond_the_lengths_of_a_sequence(poison, device):
    shape = Packed((18, 3), (20, 37), 2, 1, 16)
    case = make_packed(shape, torch.float32, device, ("bias", "causal"))
    want = run(case)
    bias = case.inputs["bias"].clone()
    bias[0, :, :, 20:] = poison
    bias[1, :, 3:] = poison
    got = run(case.with_inputs(bias=bias))
    assert_same(got, want)
    assert not got["dbias"][0, :, :, 20:].any()
    assert not got["dbias"][1, :, 3:].any()


@poisons
def test_bias_of_masked_keys(poison, device):
    case = make_case(Shape(1, 18, 33, 2, 1, 16), torch.float32, device, ("bias",))
    case = case.with_options(window_size=(4, 2))
    rows, cols = torch.arange(18)[:, None], torch.arange(33)[None]
    hidden = ((cols < rows + 15 - 4) | (cols > rows + 15 + 2)).to(device)
    bias = case.inputs["bias"].masked_fill(hidden, poison)
    assert_same(run(case.with_inputs(bias=bias)), run(case))


@pytest.mark.eager
@pytest.mark.parametrize(
    "features", [("causal",), ("causal", "sinks"), ("causal", "bias")], ids=str
)
@pytest.mark.parametrize("lengths", [(40, 17), (33, 1), (5, 0), (17, 0), (0, 17)], ids=str)
def test_rows_without_a_key_are_written(lengths, features, device):
    got = run(make_case(Shape(2, *lengths, 2, 1, 16), torch.float32, device, features))
    blind = max(lengths[0] - lengths[1], 0)
    assert not got["out"][:, :blind].any()
    assert not got["dq"][:, :blind].any()
    for name, value in got.items():
        assert not value.isnan().any(), name


# a key that is NaN and seen by some rows must reach exactly those
@pytest.mark.parametrize("features", [("causal",), ("window",)], ids=str)
def test_nan_reaches_the_rows_that_see_it(features, device):
    case = make_case(Shape(1, 33, 33, 1, 1, 16), torch.float32, device, features)
    got = run(poisoned(case, "k", slice(20, 21), float("nan")), grad=False)
    rows = torch.arange(33, device=device)
    sees = (rows >= 20) if "causal" in features else (rows - 7 <= 20) & (rows + 2 >= 20)
    assert torch.equal(got["out"][0, :, 0].isnan().all(-1), sees)
    assert torch.equal(got["lse"][0, 0].isnan(), sees)


@pytest.mark.skipif(not INTERPRETED, reason="needs memory that faults on a CPU")
def test_no_read_beyond_a_tensor():
    code = """
import torch
from flash_attn_triton import flash_attn_func, flash_attn_varlen_func
def attend(function, lengths, d, **options):
    tokens_q, tokens_k = lengths
    inputs = [torch.randn(*n, d) for n in ((*tokens_q, 2), (*tokens_k, 1), (*tokens_k, 1))]
    inputs = [fenced(x).requires_grad_() for x in inputs]
    out, lse = function(*inputs, **options, return_lse=True)
    assert out.isfinite().all()
    above = [fenced(torch.randn(x.shape)) for x in (out, lse)]
    assert all(x.isfinite().all() for x in torch.autograd.grad((out, lse), inputs, above))
starts = [fenced(torch.tensor(x, dtype=torch.int32)) for x in ((0, 18, 18, 20), (0, 30, 33, 36))]
for d in (16, 24):
    fixed = (1, 20), (1, 36)
    attend(flash_attn_func, fixed, d)
    attend(flash_attn_func, fixed, d, causal=True, bias=fenced(torch.randn(1, 2, 20, 36)))
    attend(flash_attn_func, fixed, d, window_size=(5, 2), sinks=fenced(torch.randn(4))[2:])
    slopes = fenced(torch.rand(4))[2:]
    attend(flash_attn_func, fixed, d, alibi_slopes=slopes, softcap=2.0, dropout_p=0.2)
    packed = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), starts), max_seqlen_q=18, max_seqlen_k=30)
    attend(flash_attn_varlen_func, ((20,), (36,)), d, **packed)
    attend(flash_attn_varlen_func, ((20,), (36,)), d, **packed, causal=True)
    # rows behind the last sequence have no slopes
    slopes = fenced(torch.rand(8))[2:].view(3, 2)
    attend(flash_attn_varlen_func, ((24,), (40,)), d, **packed, alibi_slopes=slopes)
"""
    run_fenced(code, __file__)


@pytest.mark.device
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_poison_at_length(head_dim, dtype, device):
    shape = Packed((300, 0, 700), (900, 5, 800), 4, 2, head_dim, padding=50)
    case = make_packed(shape, dtype, device).with_options(
        window_size=(100, 0),
        seqused_k=torch.tensor([850, 3, 800], dtype=torch.int32, device=device),
    )
    want = check(case)
    # unseen: before the first row's window, past the used keys, padding
    unseen = torch.ones(1755, dtype=torch.bool, device=device)
    unseen[850 - 300 - 100 : 850] = False
    unseen[905:1705] = False
    for poison in POISON:
        bad = case
        for name, rows in (("q", slice(1000, None)), ("k", unseen), ("v", unseen)):
            bad = poisoned(bad, name, rows, poison)
        assert_same(run(bad), want)


@pytest.mark.device
def test_memory_around_the_inputs_at_length(device):
    m = Maker(device, torch.bfloat16)
    case = make_case(Shape(2, 300, 700, 4, 2, 80), m.dtype, device, ("causal", "bias"))
    inside = {name: VIEWS["inside"](t) for name, t in case.inputs.items()}
    assert_same(run(case.with_inputs(**inside)), run(case))


@pytest.mark.eager
@pytest.mark.parametrize("what", ["dout", "dlse"])
def test_gradients_that_arrive_at_rows_without_keys(what, device):
    """Merging of LSEs sends NaN there by itself: the derivative of inf - inf."""
    case = make_case(Shape(1, 40, 17, 2, 1, 16), torch.float32, device, ("causal",))
    leaves = [case.inputs[name].clone().requires_grad_() for name in "qkv"]
    out, lse = case.function(*leaves, **case.options, return_lse=True)
    dout, dlse = torch.ones_like(out), torch.ones_like(lse)
    want = torch.autograd.grad((out, lse), leaves, (dout, dlse), retain_graph=True)
    if what == "dout":
        dout[:, : 40 - 17] = float("nan")
    else:
        dlse[..., : 40 - 17] = float("nan")
    got = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g, w)
