"""What the definition promises at its edges, beyond agreement with the reference."""

from __future__ import annotations

import math

import pytest
import torch
from attn_common import detect, fp8_dtype
from flash_attn_triton import flash_attn_func
from flash_attn_triton._reference import fused
from flash_attn_triton._reference.philox import keep_scale

from .._linked.budget import DTYPES, Maker, assert_same
from .._numerics import FEATURES, MEDIUM, Case, Packed, Shape, check, make_case, make_packed, run

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def extreme(dtype, device):
    """Logits of exactly +-1e5 and ties: each row's output is a mean of some rows of v."""
    m = Maker(device, dtype)
    q, k = (torch.zeros(1, n, 1, 16, device=device, dtype=dtype) for n in (18, 35))
    q[..., 0] = 1000.0
    q[:, ::2, :, 0] = -1000.0
    k[..., 0] = 100.0
    k[:, 1::3, :, 0] = -100.0
    return Case({"q": q, "k": k, "v": m.randn(1, 35, 1, 16)}, {"softmax_scale": 1.0})


@dtypes
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window_size": (6, 4)}, {"softcap": 20.0}, {"softmax_scale": -1.0}],
    ids=str,
)
def test_extreme_logits(options, dtype, device):
    case = extreme(dtype, device).with_options(**options)
    check(case, grad=False)
    for name, value in run(case).items():
        assert value.isfinite().all(), name
    if not options:
        (out, lse), v = case(), case.inputs["v"].double()
        low = torch.zeros(35, dtype=torch.bool, device=device)
        low[1::3] = True
        for rows, keys in ((slice(0, None, 2), low), (slice(1, None, 2), ~low)):
            want = v[:, keys].mean(1, keepdim=True).expand_as(out[:, rows]).to(dtype)
            torch.testing.assert_close(out[:, rows], want)
            want_lse = torch.full_like(lse[..., rows], 1e5 + math.log(int(keys.sum())))
            torch.testing.assert_close(lse[..., rows], want_lse, rtol=1e-6, atol=0)


def test_a_large_softcap_loses_nothing(device):
    """A tanh that is only exact to an absolute 1e-7 would be 1e-4 off in the scores."""
    case = make_case(MEDIUM, torch.float32, device).with_options(softcap=2000.0)
    got = check(case)
    want = run(case.with_options(softcap=0.0))
    torch.testing.assert_close(got["lse"], want["lse"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("magnitude", [1e5, -1e5], ids=str)
def test_extreme_bias(magnitude, device):
    case = make_case(MEDIUM, torch.float32, device)
    bias = torch.zeros(1, 2, 17, 20, device=device)
    bias[..., 3::5] = magnitude
    check(case.with_inputs(bias=bias), grad=False)
    for name, value in run(case.with_inputs(bias=bias)).items():
        assert value.isfinite().all(), name


@pytest.mark.parametrize("slope", [20.0, -20.0], ids=str)
def test_steep_slopes(slope, device):
    """Of rows past the end of the last tile, too: their logits alone would overflow."""
    case = make_case(Shape(1, 18, 33, 2, 1, 16), torch.float32, device)
    case = case.with_options(alibi_slopes=torch.tensor([slope, slope / 4], device=device))
    check(case, grad=False)
    for name, value in run(case).items():
        assert value.isfinite().all(), name


@pytest.mark.eager
@pytest.mark.parametrize("sink", [1e5, -1e5], ids=str)
def test_extreme_sink(sink, device):
    case = make_case(MEDIUM, torch.float32, device)
    got = run(case.with_inputs(sinks=torch.full((2,), sink, device=device)))
    if sink > 0:
        assert not got["out"].any()
        assert (got["lse"] == sink).all()
    else:
        want = run(case)
        torch.testing.assert_close(got["out"], want["out"])
        torch.testing.assert_close(got["lse"], want["lse"])
        assert not got["dsinks"].any()


@pytest.mark.eager
@dtypes
def test_scale_zero_is_a_mean(dtype, device):
    case = make_case(MEDIUM, dtype, device).with_options(softmax_scale=0.0)
    got = run(case)
    want = case.inputs["v"].double().mean(1, keepdim=True).repeat_interleave(2, 2)
    want = want.expand(-1, 17, -1, -1).to(dtype)
    torch.testing.assert_close(got["out"], want)
    torch.testing.assert_close(got["lse"], torch.full_like(got["lse"], math.log(20)))
    assert not got["dq"].any()
    assert not got["dk"].any()


@pytest.mark.eager
@pytest.mark.parametrize("sink", [None, -0.5])
@pytest.mark.parametrize("lengths", [(40, 17), (17, 16), (5, 0)], ids=str)
def test_rows_that_see_no_key(lengths, sink, device):
    case = make_case(Shape(2, *lengths, 4, 2, 16), torch.float32, device, ("causal",))
    if sink is not None:
        case = case.with_inputs(sinks=torch.full((4,), sink, device=device))
    got = run(case)
    blind = lengths[0] - lengths[1]
    assert not got["out"][:, :blind].any()
    assert got["out"][:, blind:].any(-1).all()
    expected = float("-inf") if sink is None else sink
    assert (got["lse"][..., :blind] == expected).all()
    assert got["lse"][..., blind:].isfinite().all()
    assert not got["dq"][:, :blind].any()


@pytest.mark.eager
def test_a_sink_of_minus_infinity_is_none(device):
    case = make_case(Shape(1, 40, 17, 2, 1, 16), torch.float32, device, ("causal",))
    got = run(case.with_inputs(sinks=torch.full((2,), float("-inf"), device=device)))
    assert not got.pop("dsinks").any()
    for name, want in run(case).items():
        torch.testing.assert_close(got[name], want, rtol=1e-6, atol=1e-6)


def test_sinks_are_per_head_and_not_scaled(device):
    shape = MEDIUM._replace(heads_q=4)
    case = make_case(shape, torch.float32, device).with_options(softmax_scale=0.0)
    sinks = torch.tensor([0.0, 1.0, 3.0, float("-inf")], device=device)
    _, lse = case.with_inputs(sinks=sinks)()
    want = torch.log(20 + sinks.exp())[None, :, None].expand_as(lse)
    torch.testing.assert_close(lse, want)


@dtypes
def test_bias_of_minus_infinity_hides_like_a_mask(dtype, device):
    case = make_case(Shape(1, 40, 20, 2, 1, 16), dtype, device)
    rows, cols = torch.arange(40)[:, None], torch.arange(20)[None]
    hidden = (cols > rows - 20).to(device)
    bias = torch.zeros(1, 1, 40, 20, device=device).masked_fill(hidden, float("-inf"))
    got = check(case.with_inputs(bias=bias.to(dtype)))
    want = run(case.with_options(causal=True))
    assert not got["dbias"].masked_select(hidden).any()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value)


@pytest.mark.parametrize("features", [(), ("causal", "bias", "sinks", "dropout", "alibi")], ids=str)
def test_repeats_are_bitwise_equal(features, device):
    case = make_case(MEDIUM, torch.bfloat16, device, features)
    assert_same(run(case.with_options(deterministic=True)), run(case))


@pytest.mark.device
@dtypes
@pytest.mark.parametrize("feature", FEATURES)
def test_repeats_are_bitwise_equal_at_length(feature, dtype, device):
    case = make_case(Shape(2, 1000, 1300, 8, 2, 64), dtype, device, (feature,))
    for form, names in (
        (case.with_options(deterministic=True), ("out", "lse", "dq", "dk", "dv")),
        (case, ("out", "lse")),  # gradients may be added up in any order
    ):
        first = run(form)
        for _ in range(5):
            again = run(form)
            for name in names:
                assert torch.equal(again[name], first[name]), name


@pytest.mark.device
@pytest.mark.parametrize("features", [(), ("causal",)], ids=["full", "causal"])
def test_a_row_does_not_depend_on_its_batch_at_length(features, device):
    case = make_case(Shape(64, 333, 500, 8, 2, 64), torch.bfloat16, device, features)
    want = run(case, grad=False)
    one = Case({name: t[5:6] for name, t in case.inputs.items()}, case.options)
    got = run(one, grad=False)
    assert torch.equal(got["out"][0], want["out"][5])
    assert torch.equal(got["lse"][0], want["lse"][5])


# ---- dropout


def keep_mask(p, seed, device, shape=(2, 20, 32, 2)):
    """Read the mask off an output: all probabilities are equal and v is the identity."""
    batch, seqlen_q, seqlen_k, heads = shape
    q = torch.zeros(batch, seqlen_q, heads, 16, device=device)
    k = torch.zeros(batch, seqlen_k, heads, 16, device=device)
    v = torch.eye(seqlen_k, device=device)[None, :, None].expand(batch, -1, heads, -1)
    torch.manual_seed(seed)
    out = flash_attn_func(q, k, v, p) * (seqlen_k / keep_scale(p))
    torch.testing.assert_close(out, out.round(), rtol=0, atol=1e-5)  # all or nothing
    return out.round().bool().transpose(1, 2)  # [batch, heads, seqlen_q, seqlen_k]


@pytest.mark.eager
def test_dropout_follows_torchs_seed(device):
    first, second = keep_mask(0.5, 7, device), keep_mask(0.5, 7, device)
    assert torch.equal(first, second)
    assert not torch.equal(first, keep_mask(0.5, 8, device))
    case = make_case(MEDIUM, torch.float32, device)
    torch.manual_seed(3)
    one, two = (flash_attn_func(**case.inputs, dropout_p=0.5) for _ in range(2))
    assert not torch.equal(one, two)


@pytest.mark.eager
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_drops_at_its_rate_everywhere(p, device):
    mask = keep_mask(p, 1, device).double()
    deviation = math.sqrt(p * (1 - p))
    for dims in [(0, 1, 2, 3), (0, 1, 2), (0, 1, 3), (1, 2, 3), (0, 2, 3)]:
        kept = mask.mean(dims)
        count = mask.numel() / kept.numel()
        assert ((kept - (1 - p)).abs() < 5 * deviation / math.sqrt(count)).all(), dims
    # neighbours along every axis are independent
    for axis in range(4):
        a, b = (
            mask.narrow(axis, 1, mask.shape[axis] - 1),
            mask.narrow(axis, 0, mask.shape[axis] - 1),
        )
        covariance = ((a - (1 - p)) * (b - (1 - p))).mean()
        assert abs(covariance) < 5 * deviation**2 / math.sqrt(a.numel()), axis


@pytest.mark.eager
def test_nearly_everything_may_be_dropped(device):
    kept = keep_mask(0.999, 1, device).sum()
    assert 0 <= kept < 40


@pytest.mark.eager
def test_dropout_leaves_the_lse_alone(device, monkeypatch):
    # on a CPU, the definition computes what is dropped from
    monkeypatch.setattr(fused, "_operator", None)
    case = make_case(MEDIUM, torch.float32, device, ("causal",))
    assert torch.equal(case(dropout_p=0.4)[1], case()[1])


@pytest.mark.eager
@pytest.mark.parametrize("features", [(), ("causal", "sinks"), ("window", "bias")], ids=str)
def test_returned_signs_are_the_masks_of_both_passes(features, device):
    shape = Shape(2, 17, 20, 2, 1, 16, 20)
    case = make_case(shape, torch.float32, device, features)
    case = case.with_inputs(v=torch.eye(20, device=device)[None, :, None].repeat(2, 1, 1, 1))
    leaves = {name: t.detach().requires_grad_() for name, t in case.inputs.items()}
    torch.manual_seed(5)
    out, lse, s = flash_attn_func(**leaves, **case.options, dropout_p=0.3, return_attn_probs=True)
    assert s.shape == (2, 2, 17, 20)
    assert (s < 0).any()
    torch.testing.assert_close(out.transpose(1, 2), s.clamp(min=0) / 0.7, rtol=1e-4, atol=1e-6)
    # probabilities of rows that see something sum to one, with the sink's share
    total = s.detach().abs().sum(-1)
    if "sinks" in features:
        total = total + (case.inputs["sinks"][None, :, None] - lse.detach()).exp()
    torch.testing.assert_close(total, torch.ones_like(total), rtol=1e-4, atol=1e-5)
    # dv[j] collects the kept p[i, j] of the rows whose dout is a unit vector
    dout = torch.eye(17, 20, device=device)[None, :, None].expand(2, -1, 2, -1)
    (dv,) = torch.autograd.grad(out, leaves["v"], dout)
    want = s.detach().clamp(min=0).sum(1).transpose(1, 2) / 0.7
    torch.testing.assert_close(dv[:, :, 0, :17], want, rtol=1e-4, atol=1e-6)


@pytest.mark.eager
def test_dropout_of_a_packed_sequence_starts_at_its_own_row(device):
    """The mask is drawn per batch, row and column, so equal shapes give equal masks."""
    fixed = make_case(Shape(2, 18, 20, 2, 1, 16), torch.float32, device, ("dropout",))
    packed = make_packed(Packed((18, 18), (20, 20), 2, 1, 16), torch.float32, device, ("dropout",))
    flat = {name: t.flatten(0, 1) for name, t in fixed.inputs.items()}
    got, want = run(packed.with_inputs(**flat), grad=False), run(fixed, grad=False)
    torch.testing.assert_close(got["out"], want["out"].flatten(0, 1))


def test_many_queries_and_no_key(device):
    """The schedule of one side is sized by the other, which is empty."""
    q, k = torch.ones(1, 512, 16, 8, device=device), torch.ones(1, 0, 1, 8, device=device)
    out, lse = flash_attn_func(q, k, k, causal=True, return_lse=True)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


def test_saved_lse_may_come_back_in_another_layout(device):
    case = make_case(Shape(1, 8, 8, 2, 2, 16), torch.float32, device)

    def unpack(t):
        return t.transpose(1, 2).contiguous().transpose(1, 2) if t.ndim == 3 else t

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        got = run(case)
    assert_same(got, run(case))


@pytest.mark.device
def test_fp8_sums_stay_exact_over_long_contexts(device):
    """Hopper adds FP8 products to some 14 bits; sums of many ones show it."""
    if not detect(device).supports_fp8:
        pytest.skip("no FP8 on this GPU")
    fp8 = getattr(torch, fp8_dtype(detect(device)))
    q = torch.zeros(1, 128, 1, 128, device=device).to(fp8)
    k = torch.randn(1, 65536, 1, 128, device=device).to(fp8)
    v = torch.ones(1, 65536, 1, 128, device=device).to(fp8)
    assert (flash_attn_func(q, k, v, out_dtype=torch.float32) == 1).all()


@pytest.mark.device
def test_fp8_output_keeps_nan(device):
    if not detect(device).supports_fp8:
        pytest.skip("no FP8 on this GPU")
    fp8 = getattr(torch, fp8_dtype(detect(device)))
    q = torch.full((1, 16, 1, 64), float("nan"), device=device)
    out = flash_attn_func(q, q, q, out_dtype=fp8, out_scale=torch.ones(1, device=device))
    assert out.float().isnan().all()


@pytest.mark.eager
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("least", [-2e7, -1e10, -1e30, "finfo.min"])
def test_a_row_that_large_numbers_mask_sees_no_key(least, dtype, device):
    """Masks often hold the least number of their dtype where others hold -inf."""
    hidden = torch.finfo(dtype).min if least == "finfo.min" else least
    case = make_case(Shape(1, 18, 20, 2, 1, 16), dtype, device, ("bias",))
    bias = case.inputs["bias"]
    bias[:, :, 3:9] = -torch.inf
    bias[:, :, :, 5:17] = -torch.inf
    want = check(case.with_inputs(bias=bias))
    assert not want["out"][:, 3:9].any()
    assert (want["lse"][:, :, 3:9] == -torch.inf).all()
    got = run(case.with_inputs(bias=bias.masked_fill(bias == -torch.inf, hidden)))
    assert all(torch.equal(got[name], x) for name, x in want.items())


@pytest.mark.eager
@pytest.mark.parametrize("hidden", [torch.finfo(torch.float16).min, -1e6])
def test_a_row_that_smaller_numbers_mask_is_a_softmax(hidden, device):
    case = make_case(Shape(1, 18, 20, 2, 1, 16), torch.float32, device)
    bias = torch.randn(1, 1, 18, 20, device=device)
    bias[:, :, 3:9] = hidden
    x = {n: t.double() for n, t in case.inputs.items()}
    out, lse = flash_attn_func(**case.inputs, bias=bias, return_lse=True)
    scores = torch.einsum("bihd,bjd->bhij", x["q"], x["k"][:, :, 0]) / 4 + bias
    want = torch.einsum("bhij,bjd->bihd", scores.softmax(-1), x["v"][:, :, 0])
    # a score of this size has so many digits behind the point in fp32
    digits = abs(hidden) * torch.finfo(torch.float32).eps
    torch.testing.assert_close(out.double(), want, rtol=0.0, atol=4 * digits)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-6, atol=1e-5)


def test_the_kernels_draw_the_line_where_the_definition_does():
    from flash_attn_triton._dense.portable.primitives import LEAST_LOGIT
    from flash_attn_triton._reference import fixed as reference_fixed

    assert LEAST_LOGIT.value == pytest.approx(
        reference_fixed.LEAST_SCORE * math.log2(math.e), rel=1e-9
    )
