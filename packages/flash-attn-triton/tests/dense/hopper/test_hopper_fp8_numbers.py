"""The forward in FP8 on Hopper: numbers, on the device."""

from __future__ import annotations

import math

import pytest
import torch
from attn_common import detect
from flash_attn_triton import varlen_attention_reference

from ..._linked.budget import Maker, assert_no_worse_than_eager, assert_same, offsets
from ..._linked.views import VIEWS
from ..._numerics import Case, Shape, only_portable
from .._fp8 import DESCALES, assert_accurate, judged, make
from ._hopper_fp8 import E4M3, launch, plan


@pytest.fixture
def e4m3(device):
    if not detect(device).is_hopper:
        pytest.skip("not Hopper")
    return E4M3


SHAPES = [
    Shape(2, 129, 128, 2, 2, 128),
    Shape(2, 300, 333, 4, 2, 128),
    Shape(1, 200, 1, 2, 1, 64),
    Shape(2, 333, 300, 4, 1, 64),
    Shape(2, 300, 433, 4, 2, 96),
    Shape(1, 200, 300, 2, 1, 64, 128),
    Shape(1, 500, 513, 2, 2, 128, 48),
    Shape(1, 200, 300, 2, 1, 32, 64),
    Shape(1, 200, 300, 2, 1, 128, 16),
    Shape(2, 1, 2100, 4, 2, 128),
    Shape(1, 700, 4100, 2, 1, 128),
    Shape(2, 300, 433, 4, 2, 256),
    Shape(1, 300, 333, 2, 1, 192, 128),
    Shape(1, 200, 300, 2, 1, 48, 256),
]
FEATURES = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (90, 30)},
    "window_left": {"window_size": (70, -1)},
    "window_right": {"window_size": (-1, 3)},
    "softcap": {"causal": True, "softcap": 2.0},
}


@pytest.mark.device
@pytest.mark.parametrize("path", ["hopper", "portable"])
@pytest.mark.parametrize("name", ["plain", "causal"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, name, path, e4m3, device):
    case = make_case(shape, device, "per_head", **FEATURES[name])
    judge(case, path)


@pytest.mark.device
@pytest.mark.parametrize("path", ["hopper", "portable"])
@pytest.mark.parametrize("descales", DESCALES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", FEATURES)
def test_features(name, head_dim, descales, path, e4m3, device):
    shape = Shape(2, 300, 433, 4, 2, head_dim)
    judge(make_case(shape, device, descales, **FEATURES[name]), path)


@pytest.mark.device
@pytest.mark.parametrize("path", ["hopper", "portable"])
def test_sinks_and_alibi(path, e4m3, device):
    m = Maker(device, torch.float32, seed=3)
    case = make_case(
        Shape(2, 300, 433, 4, 2, 128),
        device,
        "per_head",
        sinks=m.randn(4),
        alibi_slopes=m.uniform(2, 4, low=0.01, high=0.1),
        causal=True,
    )
    judge(case, path)


def make_case(shape: Shape, device: str, descales: str, **options) -> Case:
    """Return a case of ``test_fp8.make`` whose values may have a head dimension of their own."""
    case = make(shape, E4M3, device, descales, **options)
    if shape.head_dim_v is not None:
        m = Maker(device, torch.float32, seed=7)
        size = shape.batch, shape.seqlen_k, shape.heads_k, shape.head_dim_v
        case = case.with_inputs(v=(m.randn(*size) * 20.0).to(E4M3))
    return case


def judge(case: Case, path: str) -> None:
    """Hold a path to the budget of ``test_fp8``."""
    if path == "hopper":
        plan(case)
        assert_accurate(case, E4M3)
    else:
        with only_portable():
            assert_accurate(case, E4M3)


@pytest.mark.device
@pytest.mark.parametrize("sign", [(-1, 1), (1, -1), (-1, -1), (0, 1)], ids=str)
def test_negative_and_zero_descales(sign, e4m3, device):
    case = make_case(Shape(2, 300, 433, 4, 2, 128), device, "per_head", causal=True)
    changes = {
        f"{name}_descale": case.options[f"{name}_descale"]
        * torch.tensor([1.0, factor], device=device)
        for name, factor in zip("qk", sign, strict=True)
    }
    judge(case.with_options(**changes), "hopper")


@pytest.mark.device
@pytest.mark.parametrize("name", ["q_descale", "k_descale", "v_descale"])
def test_a_descale_of_nan_shows(name, e4m3, device):
    """In the rows of its heads that see a key, and nowhere else."""
    case = make_case(Shape(2, 400, 170, 4, 2, 128), device, "per_head", causal=True)
    want = launch(case)
    descale = case.options[name].clone()
    descale[0, 1] = math.nan
    got = launch(case.with_options(**{name: descale}))
    want["out"][0, 230:, 2:] = math.nan
    if name != "v_descale":
        want["lse"][0, 2:, 230:] = math.nan
    for result, value in got.items():
        torch.testing.assert_close(value, want[result], rtol=0, atol=0, equal_nan=True)


@pytest.mark.device
@pytest.mark.parametrize("window_size", [(-1, -1), (-1, 0), (100, 0)], ids=str)
def test_packed_and_poison(window_size, e4m3, device):
    """Against each sequence alone, bit for bit; then with NaN where nobody looks."""
    lengths_q, lengths_k, used = (300, 0, 700, 130), (900, 5, 800, 40), (850, 3, 800, 40)
    m = Maker(device, torch.float32)
    q, k, v = (
        m.randn(sum(lengths) + 50, heads, 128).to(E4M3)
        for lengths, heads in ((lengths_q, 4), (lengths_k, 2), (lengths_k, 2))
    )
    descales = {f"{name}_descale": m.uniform(4, 2, low=0.5, high=1.5) for name in "qkv"}
    counts = torch.tensor(used, dtype=torch.int32, device=device)
    case = Case(
        {"q": q, "k": k, "v": v},
        {
            "cu_seqlens_q": offsets(lengths_q, device),
            "cu_seqlens_k": offsets(lengths_k, device),
            "max_seqlen_q": 700,
            "max_seqlen_k": 900,
            "seqused_k": counts,
            "window_size": window_size,
            **descales,
        },
        packed=True,
    )
    want = launch(case)
    assert not want["out"][sum(lengths_q) :].any()
    unseen = torch.ones(len(k), dtype=torch.bool, device=device)
    start_q = start_k = 0
    for b, (n, size) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        tokens, keys = slice(start_q, start_q + n), slice(start_k, start_k + used[b])
        if n > 128:
            alone = Case(
                {"q": q[None, tokens], "k": k[None, keys], "v": v[None, keys]},
                {"window_size": window_size, **{a: d[b : b + 1] for a, d in descales.items()}},
            )
            got = launch(alone)
            assert torch.equal(got["out"][0], want["out"][tokens])
            assert torch.equal(got["lse"][0], want["lse"][:, tokens])
            judge(alone, "hopper")
        first = 0 if window_size[0] < 0 else max(0, used[b] - n - window_size[0])
        unseen[start_k + first : start_k + used[b]] = n == 0
        start_q, start_k = start_q + n, start_k + size
    bad = {"k": k.view(torch.uint8).clone(), "v": v.view(torch.uint8).clone()}
    for t in bad.values():
        t[unseen] = 0x7F  # NaN
    poisoned = {name: t.view(E4M3) for name, t in bad.items()}
    assert_same(launch(case.with_inputs(**poisoned)), want)


@pytest.mark.device
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_many_short_sequences(out_dtype, e4m3, device):
    m = Maker(device, torch.float32)
    q, k, v = (m.randn(300 * n, h, 64).to(E4M3) for n, h in ((5, 4), (9, 2), (9, 2)))
    ends = offsets((5,) * 300, device), offsets((9,) * 300, device)
    case = Case({"q": q, "k": k, "v": v}, {"cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1]}, True)
    made, x = plan(case, out_dtype)
    out, _ = made(x)
    assert out.dtype == out_dtype
    wide = (t.double() for t in (q, k, v))
    exact = varlen_attention_reference(*wide, *ends, 5, 9)
    fixed = Case({n: t.unflatten(0, (300, -1)) for n, t in case.inputs.items()})
    emulated = judged(fixed, E4M3).emulated_out.flatten(0, 1)
    assert_no_worse_than_eager("out", out, emulated.to(out_dtype), exact)


@pytest.mark.device
@pytest.mark.parametrize("lengths", [(400, 170), (330, 1)], ids=str)
def test_rows_without_a_key(lengths, e4m3, device):
    case = make_case(Shape(2, *lengths, 2, 1, 128), device, "scalar", causal=True)
    got = launch(case)
    blind = lengths[0] - lengths[1]
    assert not got["out"][:, :blind].any()
    assert (got["lse"][:, :, :blind] == -math.inf).all()
    judge(case, "hopper")


@pytest.mark.device
def test_long_sums_do_not_drift(e4m3, device):
    """Values that are all one, under weights that are all alike: the sums only grow."""
    q, k = (torch.zeros(1, n, 1, 128, device=device).to(E4M3) for n in (130, 60_000))
    got = launch(Case({"q": q, "k": k, "v": torch.ones(k.shape, device=device).to(E4M3)}))
    assert (got["out"] == 1).all()
    want = torch.full_like(got["lse"], math.log(60_000))
    torch.testing.assert_close(got["lse"], want)


@pytest.mark.device
@pytest.mark.parametrize("view", sorted(VIEWS))
def test_views(view, e4m3, device):
    case = make_case(Shape(2, 300, 333, 4, 2, 128), device, "per_head", causal=True)
    want = launch(case)
    seen = {name: VIEWS[view](t) for name, t in case.inputs.items()}
    assert_same(launch(case.with_inputs(**seen)), want)


@pytest.mark.device
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_repeats_and_independence(head_dim, causal, e4m3, device):
    case = make_case(Shape(3, 1500, 1500, 6, 6, head_dim), device, "per_head", causal=causal)
    want = launch(case)
    made, x = plan(case)
    differing = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(1000):
        out, lse = made(x)
        differing += (out != want["out"]).sum() + (lse != want["lse"]).sum()
    assert not differing
    one = {name: t[1:2] for name, t in case.inputs.items()}
    descales = {f"{name}_descale": case.options[f"{name}_descale"][1:2] for name in "qkv"}
    alone = launch(case.with_inputs(**one).with_options(**descales))
    assert torch.equal(alone["out"][0], want["out"][1])
    assert torch.equal(alone["lse"][0], want["lse"][1])
