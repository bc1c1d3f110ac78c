"""triton_attention: the engines' signature over the same operators."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from attn_common import detect
from flash_attn_triton import flash_attn_varlen_func, triton_attention, varlen_attention_reference
from flash_attn_triton._dense import ops
from torch import Tensor

from ._linked.budget import DTYPES, Maker, assert_no_worse_than_eager, offsets

LENGTHS_Q, LENGTHS_K = (3, 20, 0, 17), (9, 5, 4, 17)
MAX_Q, MAX_K = 20, 17
FP8 = torch.float8_e4m3fn

rounds_fp8 = pytest.mark.skipif(
    ops.interpreted(), reason="the interpreter rounds FP8 otherwise than the hardware"
)


def make(dtype: torch.dtype, device: torch.device | str) -> list[Tensor]:
    m = Maker(device, dtype)
    return [m.randn(40, 4, 16), m.randn(35, 2, 16), m.randn(35, 2, 16)]


def call(tensors, o=None, **options):
    q, k, v = tensors
    lengths = offsets(LENGTHS_Q, q.device), offsets(LENGTHS_K, q.device), MAX_Q, MAX_K
    return triton_attention(q, k, v, o, *lengths, **options)


def reference(tensors, **options):
    device = tensors[0].device
    lengths = offsets(LENGTHS_Q, device), offsets(LENGTHS_K, device), MAX_Q, MAX_K
    return varlen_attention_reference(*tensors, *lengths, **{"softmax_scale": 1.0, **options})


def test_signature():
    parameters = inspect.signature(triton_attention).parameters
    assert list(parameters) == [
        "q",
        "k",
        "v",
        "o",
        "cu_seqlens_q",
        "cu_seqlens_k",
        "max_seqlens_q",
        "max_seqlens_k",
        "causal",
        "sm_scale",
        "bias",
        "fp8_scales",
        "fp8_out_scale",
        "invariant",
    ]
    assert parameters["sm_scale"].default == 1.0
    assert parameters["causal"].default is False


@pytest.mark.eager
def test_invariant(device):
    """The bits of a sequence are those it has alone, and those of flash_attn_varlen_func."""
    tensors = make(torch.float16, device)
    lengths = offsets(LENGTHS_Q, device), offsets(LENGTHS_K, device), MAX_Q, MAX_K
    out, _ = call(tensors, causal=True, sm_scale=0.3, invariant=True)
    want = flash_attn_varlen_func(
        *tensors, *lengths, softmax_scale=0.3, causal=True, invariant=True
    )
    assert torch.equal(out, want)
    q, k, v = tensors[0][23:40], tensors[1][18:35], tensors[2][18:35]
    one = offsets((17,), device), offsets((17,), device), 17, 17
    alone, _ = triton_attention(q, k, v, None, *one, causal=True, sm_scale=0.3, invariant=True)
    assert torch.equal(out[23:], alone)
    assert not torch.equal(out, call(tensors, causal=True, sm_scale=0.3)[0])


@pytest.mark.eager
@pytest.mark.parametrize("name", ["fp8_scales", "fp8_out_scale", "bias"])
def test_the_law_refuses(name):
    """Whatever the platform."""
    scale = torch.ones(1)
    given = {"fp8_scales": (1.0,) * 4, "fp8_out_scale": scale, "bias": torch.zeros(1, 4, 20, 17)}
    with pytest.raises(NotImplementedError, match=f"{name} must be None beside invariant=True"):
        call(make(torch.float32, "cpu"), invariant=True, **{name: given[name]})
    with pytest.raises(TypeError, match="invariant must be a bool, got str"):
        call(make(torch.float32, "cpu"), invariant="yes")


@pytest.mark.eager
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_matches_the_reference(causal, dtype, device):
    tensors = make(dtype, device)
    out, nothing = call(tensors, causal=causal)
    assert nothing is None
    assert out.dtype == dtype
    eager = reference(tensors, causal=causal)
    oracle = reference([t.double() for t in tensors], causal=causal)
    assert_no_worse_than_eager("out", out, eager, oracle)
    if causal:  # more queries than keys: the first 15 rows of the second sequence see none
        assert not out[3:18].any()


@pytest.mark.eager
def test_scale_is_one_unless_given(device):
    tensors = make(torch.float32, device)
    torch.testing.assert_close(call(tensors)[0], reference(tensors), rtol=1e-4, atol=1e-5)
    scaled, _ = call(tensors, sm_scale=0.25)
    torch.testing.assert_close(scaled, reference(tensors, softmax_scale=0.25), rtol=1e-4, atol=1e-5)


@pytest.mark.eager
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("view", ["whole", "strided"])
def test_writes_the_given_output(view, dtype, device):
    tensors = make(torch.float16, device)
    o = torch.full((40, 4, 16), math.nan, dtype=dtype, device=device)
    if view == "strided":
        o = torch.full((4, 40, 32), math.nan, dtype=dtype, device=device)[..., ::2].transpose(0, 1)
    with_grad = [t.requires_grad_() for t in tensors]
    out, _ = call(with_grad, o, causal=True)
    assert out is o
    assert not o.requires_grad
    want, _ = call([t.detach() for t in tensors], causal=True)
    torch.testing.assert_close(o.to(torch.float16), want)


@pytest.mark.eager
def test_one_bias_serves_all_sequences(device):
    tensors = make(torch.float32, device)
    bias = Maker(device, torch.float32, seed=3).randn(1, 4, MAX_Q, MAX_K)
    got, _ = call(tensors, bias=bias, sm_scale=0.25, causal=True)
    want = reference(tensors, bias=bias, softmax_scale=0.25, causal=True)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.eager
def test_is_differentiable(device):
    tensors = [t.requires_grad_() for t in make(torch.float32, device)]
    bias = Maker(device, torch.float32, seed=3).randn(1, 4, MAX_Q, MAX_K).requires_grad_()
    leaves = [*tensors, bias]
    got = torch.autograd.grad(call(tensors, bias=bias, sm_scale=0.25)[0].sin().sum(), leaves)
    want = torch.autograd.grad(
        reference(tensors, bias=bias, softmax_scale=0.25).sin().sum(), leaves
    )
    for mine, other in zip(got, want, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def quantised(tensors: list[Tensor], scales: list[float]) -> list[Tensor]:
    return [
        (t.float() / s).clamp(-448.0, 448.0).to(FP8) for t, s in zip(tensors, scales, strict=True)
    ]


@rounds_fp8
@pytest.mark.eager
@pytest.mark.parametrize("kind", ["floats", "tensors"])
def test_fp8_scales_quantise_inputs(kind, device):
    scales = [0.01, 0.02, 0.002]  # the last one saturates: 448 * 0.002 < 1
    tensors = make(torch.float16, device)
    given = [torch.tensor(s, device=device) for s in scales] if kind == "tensors" else scales
    out, _ = call(tensors, fp8_scales=(*given, 1.0), sm_scale=0.25)
    assert out.dtype == torch.float16
    fp8 = quantised(tensors, scales)
    names = ("q_descale", "k_descale", "v_descale")
    descales = {
        name: torch.tensor([s], device=device) for name, s in zip(names, scales, strict=True)
    }
    want = reference(fp8, softmax_scale=0.25, out_dtype=torch.float32, **descales)
    torch.testing.assert_close(out.float(), want, rtol=0.05, atol=0.02)
    again, _ = call(fp8, fp8_scales=(*given, 1.0), sm_scale=0.25)
    assert again.dtype == torch.bfloat16
    torch.testing.assert_close(again.float(), want, rtol=0.05, atol=0.02)


@rounds_fp8
@pytest.mark.eager
def test_fp8_inputs_saturate_in_the_platforms_encoding(monkeypatch):
    monkeypatch.setenv("ATTN_COMMON_PLATFORM", "amd:gfx942")
    detect.cache_clear()
    try:
        tensors = make(torch.float16, "cpu")
        out, _ = call(tensors, fp8_scales=(0.01, 0.01, 0.001, 1.0), sm_scale=0.25)
    finally:
        monkeypatch.undo()
        detect.cache_clear()
    # values beyond 240 * 0.001 are cut off there, and none became NaN
    assert 0.2 < out.abs().max() <= 0.2401


@rounds_fp8
@pytest.mark.eager
def test_fp8_output_is_scaled_and_saturates(device):
    tensors, scale = make(torch.float16, device), torch.tensor([0.002], device=device)
    want = reference(tensors, out_dtype=FP8, out_scale=scale).float()
    for o in (None, torch.empty(40, 4, 16, device=device).to(FP8)):
        out, _ = call(tensors, o, fp8_out_scale=scale)
        assert out.dtype == FP8
        assert out.float().abs().max() == 448
        # one unit in the last place, where rounding may go either way
        assert ((out.float() - want).abs() <= want.abs() / 8 + 2**-9).all()


@pytest.mark.eager
def test_agrees_with_the_modern_function(device):
    q, k, v = make(torch.float16, device)
    lengths = offsets(LENGTHS_Q, device), offsets(LENGTHS_K, device), MAX_Q, MAX_K
    got, _ = call([q, k, v], causal=True, sm_scale=0.3)
    want = flash_attn_varlen_func(q, k, v, *lengths, softmax_scale=0.3, causal=True)
    assert torch.equal(got, want)


def test_empty_batch():
    q, k = torch.zeros(0, 2, 16), torch.zeros(0, 1, 16)
    zero = offsets((), "cpu")
    out, _ = triton_attention(q, k, k, None, zero, zero, 0, 0)
    assert out.shape == (0, 2, 16)


@pytest.mark.eager
@pytest.mark.parametrize("given", [False, True])
def test_compiles(given, device):
    torch.compiler.reset()
    tensors = make(torch.float32, device)
    fast = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    o = torch.empty(40, 4, 16, device=device) if given else None
    with torch.no_grad():
        out, _ = fast(tensors, o, causal=True)
    torch.testing.assert_close(out, call(tensors, causal=True)[0])
    if o is not None:
        torch.testing.assert_close(o, out)
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"o": [1.0]}, TypeError, "o must be a torch.Tensor, got list"),
        (
            {"o": torch.zeros(40, 4, 8)}, ValueError,
            "o must be [tokens_q, heads_q, head_dim_v], [40, 4, 16], got [40, 4, 8]",
        ),
        (
            {"o": torch.zeros(40, 4, 16, device="meta")}, ValueError,
            "o must be on the device of q, cpu, got meta",
        ),
        (
            {"o": torch.zeros(40, 4, 16).to(FP8)}, ValueError,
            "fp8_out_scale must be given for an o of torch.float8_e4m3fn, got None",
        ),
        (
            {"o": torch.zeros(40, 4, 16), "fp8_out_scale": torch.ones(1)}, ValueError,
            "fp8_out_scale must be None unless o is FP8, which is torch.float32",
        ),
        ({"fp8_out_scale": 0.5}, TypeError, "fp8_out_scale must be a torch.Tensor, got float"),
        ({"sm_scale": None}, TypeError, "sm_scale must be a float, got NoneType"),
        ({"bias": 1.0}, TypeError, "bias must be a torch.Tensor, got float"),
        (
            {"bias": torch.zeros(4, 20, 17)}, ValueError,
            "bias must be [1, heads_q, max_seqlens_q, max_seqlens_k], got [4, 20, 17]",
        ),
        (
            {"bias": torch.zeros(4, 4, 20, 17)}, ValueError,
            "bias must be [1, heads_q, max_seqlens_q, max_seqlens_k], got [4, 4, 20, 17]",
        ),
        (
            {"fp8_scales": 0.5}, TypeError,
            "fp8_scales must be a tuple of four floats or tensors, got float",
        ),
        (
            {"fp8_scales": (1.0, 1.0, 1.0)}, ValueError,
            "fp8_scales must hold four scales (q, k, v, p), got 3",
        ),
        (
            {"fp8_scales": (1.0, "1", 1.0, 1.0)}, TypeError,
            "fp8_scales: that of k must be a float, got str",
        ),
        (
            {"fp8_scales": (torch.ones(2), 1.0, 1.0, 1.0)}, ValueError,
            "fp8_scales: that of q must have one element, got [2]",
        ),
        (
            {"fp8_scales": (1.0, 0.0, 1.0, 1.0)}, ValueError,
            "fp8_scales: that of k must be positive and finite, from 1.18e-38 to 3.4e+38, got 0.0",
        ),
        (
            {"fp8_scales": (math.nan, 1.0, 1.0, 1.0)}, ValueError,
            "fp8_scales: that of q must be positive and finite, from 1.18e-38 to 3.4e+38, got nan",
        ),
        (
            {"fp8_scales": (1.0, 1.0, 1.0, -1.0)}, ValueError,
            "fp8_scales: that of p must be positive and finite, from 1.18e-38 to 3.4e+38, got -1.0",
        ),
        (
            {"fp8_scales": (1.0, 1.0, 1.0, None)}, TypeError,
            "fp8_scales: that of p must be a float, got NoneType",
        ),
        (
            {"fp8_scales": (1.0, 1.0, 1.0, torch.ones(2))}, ValueError,
            "fp8_scales: that of p must have one element, got [2]",
        ),
        (
            {"fp8_scales": (1.0, torch.ones(1).int(), 1.0, 1.0)}, TypeError,
            "fp8_scales: that of k must be of a float dtype, got torch.int32",
        ),
        (
            {"fp8_scales": (1.0,) * 4, "bias": torch.zeros(1, 4, 20, 17).int()}, TypeError,
            "bias must be torch.float16, torch.bfloat16 or torch.float32 with fp8_scales, "
            "got torch.int32",
        ),
        (
            {"o": torch.zeros(40, 4, 16).double()}, TypeError,
            "o must be torch.float16, torch.bfloat16, torch.float32 or FP8, got torch.float64",
        ),
        (
            {"o": torch.zeros(40, 4, 16).to(torch.float8_e5m2), "fp8_out_scale": torch.ones(1)},
            TypeError,
            "o must be torch.float8_e4m3fn to be FP8 on this platform, got torch.float8_e5m2",
        ),
        (
            {"fp8_out_scale": torch.ones(2)}, ValueError,
            "fp8_out_scale must have one element, got [2]",
        ),
        (
            {"fp8_out_scale": torch.ones(1).half()}, TypeError,
            "fp8_out_scale must be torch.float32, got torch.float16",
        ),
        ({"sm_scale": math.inf}, ValueError, "sm_scale must be finite, got inf"),
        (
            {"fp8_scales": (1.0, 1.0, torch.ones(1, device="meta"), 1.0)}, ValueError,
            "fp8_scales: that of v must be on its device, cpu, got meta",
        ),
    ],
    ids=lambda x: None,
)  # fmt: skip
def test_message(changes, error, message):
    with pytest.raises(error) as caught:
        call(make(torch.float32, "cpu"), **changes)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("dtypes", "message"),
    [
        (
            (torch.float32, torch.float16, torch.float32),
            "k must have the dtype of q, torch.float32, got torch.float16",
        ),
        (
            (FP8, FP8, torch.float16),
            "v must have the dtype of q, torch.float8_e4m3fn, got torch.float16",
        ),
        (
            (torch.float64,) * 3,
            "q must be torch.float16, torch.bfloat16, torch.float32 or torch.float8_e4m3fn with "
            "fp8_scales, got torch.float64",
        ),
        (
            (torch.int8,) * 3,
            "q must be torch.float16, torch.bfloat16, torch.float32 or torch.float8_e4m3fn with "
            "fp8_scales, got torch.int8",
        ),
    ],
    ids=lambda x: None,
)
def test_fp8_scales_take_tensors_of_one_float_dtype(dtypes, message):
    tensors = [t.to(d) for t, d in zip(make(torch.float32, "cpu"), dtypes, strict=True)]
    with pytest.raises(TypeError) as caught:
        call(tensors, fp8_scales=(1.0, 1.0, 1.0, 1.0))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("lengths", "error", "message"),
    [
        ((2**63, 4), ValueError, "max_seqlens_q must fit into 64 bits"),
        ((4, 4.0), TypeError, "max_seqlens_k must be an int, got float"),
    ],
    ids=lambda x: None,
)
def test_message_of_lengths(lengths, error, message):
    q, ends = torch.zeros(4, 2, 8), offsets((4,), "cpu")
    with pytest.raises(error, match=f"^{message}"):
        triton_attention(q, q, q, None, ends, ends, *lengths)


def test_fp8_refuses_gradients():
    tensors = [t.requires_grad_() for t in make(torch.float32, "cpu")]
    with pytest.raises(NotImplementedError, match="FP8 has no gradient: q must not require one"):
        call(tensors, fp8_scales=(1.0, 1.0, 1.0, 1.0))


@pytest.mark.eager
def test_an_output_that_overlaps_itself_is_refused(device):
    tensors = make(torch.float32, device)
    expanded = tensors[0][:1].clone().expand(40, 4, 16)
    with pytest.raises(ValueError, match="o must not be expanded, for it is written"):
        call(tensors, expanded)
    rows = torch.zeros(5000, device=device).as_strided((40, 4, 16), (8, 400, 1))
    with pytest.raises(ValueError, match=r"o must not overlap itself, .* strides \[8, 400, 1\]"):
        call(tensors, rows)
    assert not rows.any()


@pytest.mark.eager
def test_an_output_may_be_the_queries(device):
    tensors = make(torch.float32, device)
    want, _ = call(tensors)
    got, _ = call(tensors, tensors[0])
    assert got is tensors[0]
    assert torch.equal(got, want)


@pytest.mark.eager
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_scales_in_tensors_are_checked_as_numbers_are(value):
    tensors = make(torch.float32, "cpu")
    for scale in (value, torch.tensor([value])):
        with pytest.raises(ValueError, match="fp8_scales: that of k must be positive and finite"):
            call(tensors, fp8_scales=(1.0, scale, 1.0, 1.0))


@pytest.mark.eager
def test_what_would_lose_a_gradient_is_named():
    tensors = make(torch.float32, "cpu")
    o = torch.zeros(40, 4, 16, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"^o must not require a gradient"):
        call(tensors, o)
    assert not o.any()
    scales = 1.0, 1.0, torch.ones(1, requires_grad=True), 1.0
    message = r"^fp8_scales: that of v must not require a gradient"
    with pytest.raises(NotImplementedError, match=message):
        call(tensors, torch.zeros(40, 4, 16), fp8_scales=scales)
