"""The forward in FP8 on Hopper: what it takes, its transposed values, builds, and numbers."""

from __future__ import annotations

import functools
import math
import subprocess
from pathlib import Path

import pytest
import torch
import triton
from attn_common import cdiv, detect
from flash_attn_triton import varlen_attention_reference
from flash_attn_triton._call import Options, Tensors
from flash_attn_triton._configs import takes_hopper_forward
from flash_attn_triton._kernels.hopper_launch import HopperForwardPlan
from flash_attn_triton._kernels.hopper_values import transpose_values
from flash_attn_triton._kernels.launch import readable

from ._budget import Maker, assert_no_worse_than_eager, assert_same, offsets
from ._gpus import GPUS, absent_gpu, compiling, counting
from ._numerics import Case, Shape, only_portable
from ._views import VIEWS
from .test_fp8 import DESCALES, assert_accurate, judged, make

HOPPER = "nvidia:sm_90"
E4M3 = torch.float8_e4m3fn
BLOCK_N = 128


def plan(case: Case, out_dtype: torch.dtype = torch.bfloat16) -> tuple[HopperForwardPlan, Tensors]:
    """Return the plan of a case that the kernel takes, and its tensors."""
    options = dict(case.options)
    for name in ("max_seqlen_q", "max_seqlen_k"):
        options.pop(name, None)
    left, right = options.pop("window_size", (-1, -1))
    if options.pop("causal", False):
        right = 0
    scale = options.pop("softmax_scale", case.inputs["q"].shape[-1] ** -0.5)
    numbers = Options(scale, left, right, options.pop("softcap", 0.0), 0.0)
    x = readable(Tensors(**case.inputs, **options))
    assert takes_hopper_forward(x, numbers, out_dtype)
    return HopperForwardPlan(x, numbers, out_dtype, is_kept=x.q.is_cuda), x


def launch(case: Case) -> dict[str, torch.Tensor]:
    """Launch the kernel with the arguments of the public functions."""
    made, x = plan(case)
    return dict(zip(("out", "lse"), made.forward(x), strict=True))


# ---- what it takes


def _meta(tokens: int, width: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return torch.empty(2, tokens, 2, width, dtype=dtype, device="meta")


@pytest.mark.eager
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "taken"),
    [
        (128, 128, True),
        (64, 64, True),
        (96, 48, True),
        (128, 16, True),
        (32, 64, True),
        (16, 64, False),  # one product sums 32 columns
        (32, 32, False),  # half of a tile would be padding
        (256, 256, False),  # sums of a tile and of all tiles take the registers
        (128, 256, False),
        (104, 104, False),  # rows that the copy engine does not read
    ],
)
def test_serves(head_dim, head_dim_v, taken):
    q, v = _meta(200, head_dim), _meta(200, head_dim_v)
    x, options = Tensors(q, q, v), Options(0.1, -1, 0, 0.0, 0.0)
    with absent_gpu(HOPPER):
        for out_dtype in (torch.bfloat16, torch.float16):
            assert takes_hopper_forward(x, options, out_dtype) == taken
        for out_dtype in (torch.float32, E4M3):
            assert not takes_hopper_forward(x, options, out_dtype)
        assert not takes_hopper_forward(x, options._replace(softmax_scale=-0.1), torch.bfloat16)
        for name in ("bias", "out_scale"):
            extra = x._replace(**{name: q})
            assert not takes_hopper_forward(extra, options, torch.bfloat16)
    with absent_gpu("nvidia:sm_80"):
        assert not takes_hopper_forward(x, options, torch.bfloat16)


@pytest.mark.eager
@pytest.mark.parametrize(
    ("tokens_q", "tokens_k", "packed", "taken"),
    [
        (1, 1024, False, False),
        (128, 2047, False, False),
        (128, 2048, False, True),
        (129, 16, False, True),
        (1, 1024, True, True),  # lengths of packed sequences may not decide
    ],
)
def test_few_queries_are_not_worth_a_copy_of_the_values(tokens_q, tokens_k, packed, taken):
    q, k = _meta(tokens_q, 128), _meta(tokens_k, 128)
    x = Tensors(q, k, k)
    if packed:
        ends = torch.empty(3, dtype=torch.int32, device="meta")
        x = Tensors(q.flatten(0, 1), k.flatten(0, 1), k.flatten(0, 1), ends, ends)
    with absent_gpu(HOPPER):
        assert takes_hopper_forward(x, Options(0.1, -1, 0, 0.0, 0.0), torch.bfloat16) == taken


# ---- transposed values


def transposed(v: torch.Tensor) -> torch.Tensor:
    """Return ``[tokens, heads, width]`` as ``[tiles, heads, 2**n columns, BLOCK_N keys]``."""
    tokens, heads, width = v.shape
    tiles, wide = max(1, cdiv(tokens, BLOCK_N)), triton.next_power_of_2(width)
    padded = v.new_zeros(tiles * BLOCK_N, heads, wide)
    padded[:tokens, :, :width] = v
    # sixteen keys as two of eight, those as four of two, in the order of the accumulators
    halves = padded.view(tiles, BLOCK_N // 16, 2, 4, 2, heads, wide)
    return halves.permute(0, 5, 6, 1, 3, 2, 4).reshape(tiles, heads, wide, BLOCK_N)


def run_transposition(v, descales=(None,) * 3, *, window_left=-1, starts=None, used=None):
    """Launch the kernel on codes; return what it wrote, and the factors."""
    heads, width = v.shape[-2:]
    if starts is None:
        batch, tokens = v.shape[:2]
        starts, tiles = (None, None), cdiv(tokens, BLOCK_N)
        slots, strides = batch * tiles, v.stride()[:3]
    else:
        tokens, batch, tiles = len(v), len(starts[0]) - 1, 0
        slots, strides = tokens // BLOCK_N + batch + 1, (0, *v.stride()[:2])
    wide = triton.next_power_of_2(width)
    out = torch.full((slots, heads, wide, BLOCK_N), 7, dtype=torch.uint8, device=v.device)
    factors = torch.full((batch, heads, 2), math.nan, device=v.device)
    transpose_values[(slots * heads,)](
        v, out, factors, *descales, *starts, used, window_left, batch, heads, 10, tokens, tiles,
        *strides, HEAD_DIM=width, HAS_LEFT=window_left >= 0,
        DESCALE_PER_HEAD=any(d is not None and d.numel() > 1 for d in descales),
        BLOCK_N=BLOCK_N, BLOCK_D=wide,
    )  # fmt: skip
    return out, factors


@pytest.fixture
def codes(device):
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randint(0, 256, size, generator=generator, dtype=torch.uint8).to(device)

    return draw


@pytest.mark.parametrize("tokens", [1, 16, 300])
@pytest.mark.parametrize("width", [48, 128])
def test_values_are_transposed(width, tokens, codes):
    v = codes(2, tokens, 3, width)
    out, factors = run_transposition(v)
    assert torch.equal(out, torch.cat([transposed(one) for one in v]))
    assert (factors == 1).all()


def test_values_of_strided_tensors(codes):
    v = codes(2, 3, 50, 80)[..., 16:64].transpose(1, 2)
    assert torch.equal(run_transposition(v)[0], torch.cat([transposed(one) for one in v]))


def test_descales_become_factors(codes, device):
    m = Maker(device, torch.float32)
    q, k, v = (m.uniform(2, 3, low=-1.0, high=1.0) for _ in range(3))
    _, factors = run_transposition(codes(2, 20, 3, 16), (q, k, v))
    assert torch.equal(factors, torch.stack([q * k, v], -1))
    one = m.uniform(1, low=0.1, high=1.0)
    _, factors = run_transposition(codes(2, 20, 3, 16), (None, one, None))
    assert torch.equal(factors[..., 0], one.expand(2, 3))
    assert (factors[..., 1] == 1).all()


def test_packed_values_and_what_nobody_sees(codes, device):
    lengths_q, lengths_k, used = (5, 0, 30, 1), (0, 137, 260, 1), (0, 100, 251, 1)
    v = codes(3 + sum(lengths_k) + 9, 2, 48)
    starts = offsets(lengths_q, device), offsets(lengths_k, device) + 3
    counts = torch.tensor(used, dtype=torch.int32, device=device)
    out, factors = run_transposition(v, window_left=40, starts=starts, used=counts)
    for b, start in enumerate(starts[1][:-1].tolist()):
        seen = v[start : start + used[b]].clone()
        seen[: max(0, used[b] - lengths_q[b] - 40)] = 0
        want = transposed(seen)
        first = start // BLOCK_N + b
        assert torch.equal(out[first : first + len(want)], want)
    assert (factors == 1).all()


# ---- what it builds into


def features(name: str) -> dict[str, object]:
    meta = functools.partial(torch.empty, device="meta")
    ends = meta(3, dtype=torch.int32)
    return {
        "full": {},
        "causal": {"causal": True},
        "packed": {"causal": True, "cu_seqlens_q": ends, "cu_seqlens_k": ends},
        "rich": {
            "window_size": (100, 0), "softcap": 30.0, "sinks": meta(4), "alibi_slopes": meta(4),
            "cu_seqlens_q": ends, "cu_seqlens_k": ends, "seqused_k": meta(2, dtype=torch.int32),
        },
    }[name]  # fmt: skip


def absent_case(head_dim: int, kind: str, length: int = 300) -> Case:
    """Return meta tensors with descales per head."""
    options = features(kind)
    leading = (2 * length,) if "cu_seqlens_q" in options else (2, length)
    q, kv = (torch.empty(*leading, heads, head_dim, dtype=E4M3, device="meta") for heads in (4, 2))
    descale = torch.empty(2, 2, device="meta")
    descales = {f"{name}_descale": descale for name in "qkv"}
    return Case({"q": q, "k": kv, "v": kv}, {**options, **descales})


# Bytes that may be spilled with Triton 3.6 and with later ones: numbers of the walk between tiles
# of queries, and with every feature at once some of the loop.
SPILLS = {
    (128, "full"): (0, 120),
    (128, "causal"): (0, 128),
    (128, "packed"): (0, 128),
    (128, "rich"): (120, 288),
}
IS_OLD = triton.__version__.startswith("3.6.")


@pytest.mark.aot
@pytest.mark.parametrize(
    ("head_dim", "kind"),
    [(d, kind) for d in (64, 128) for kind in ("full", "causal")]
    + [(128, "packed"), (128, "rich")],
)
def test_builds(head_dim, kind, tmp_path):
    with compiling(HOPPER, tmp_path) as builds:
        launch(absent_case(head_dim, kind))
    first, build = builds
    assert (first.kernel, first.spilled) == ("transpose_values", 0)
    assert build.shared <= GPUS[HOPPER].shared_limit, build
    assert not build.unset, build
    old, new = SPILLS.get((head_dim, kind), (0, 0))
    assert build.spilled <= (old if IS_OLD else new), build
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    command = [str(tool), "-c", str(tmp_path / f"{build.kernel}.cubin")]
    sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for instruction in ("UTMALDG", "UTMASTG", "USETMAXREG"):
        assert instruction in sass, instruction
    assert "QGMMA.64x128x32.F32.E4M3.E4M3" in sass
    assert "HGMMA" not in sass
    # two products in the loop and one at either end, of two warpgroups: else ptxas has them wait
    # for one another
    assert sass.count("WARPGROUP.ARRIVE") == 8
    if kind != "rich":
        # probabilities stay where they are and become words of four at once
        assert "PRMT" not in loop_of(sass)
        assert loop_of(sass).count("F2FP.SATFINITE.E4M3") == BLOCK_N // 4


def loop_of(sass: str) -> str:
    """Return the shortest loop of a disassembly that holds exponentials and products."""
    lines = sass.splitlines()
    labels = {line.split(":")[0]: i for i, line in enumerate(lines) if line.startswith(".L_x_")}
    found = []
    for end, line in enumerate(lines):
        for label in labels:
            if f"({label})" in line and "BRA" in line and labels[label] < end:
                body = "\n".join(lines[labels[label] : end + 1])
                if "QGMMA" in body and "MUFU.EX2" in body:
                    found.append(body)
    return min(found, key=len)


@pytest.mark.aot
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(32, 64), (128, 16)], ids=str)
def test_builds_with_the_smallest_of_either_head_dim(head_dim, head_dim_v, tmp_path):
    case = absent_case(head_dim, "causal")
    v = torch.empty(2, 300, 2, head_dim_v, dtype=E4M3, device="meta")
    with compiling(HOPPER, tmp_path) as builds:
        launch(case.with_inputs(v=v))
    assert [build.spilled for build in builds] == [0, 0]
    assert not builds[1].unset, builds[1]


@pytest.mark.aot
@pytest.mark.parametrize("kind", ["causal", "packed"])
def test_lengths_make_one_variant(kind):
    with counting(HOPPER) as variants:
        for length in (300, 4096, 5000, 70_001):
            launch(absent_case(128, kind, length))
    assert {name: len(keys) for name, keys in variants.items()} == {
        "transpose_values": 1,
        "forward_kernel": 1,
    }


# ---- numbers


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
        Shape(2, 300, 433, 4, 2, 128), device, "per_head",
        sinks=m.randn(4), alibi_slopes=m.uniform(2, 4, low=0.01, high=0.1), causal=True,
    )  # fmt: skip
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
            "cu_seqlens_q": offsets(lengths_q, device), "cu_seqlens_k": offsets(lengths_k, device),
            "max_seqlen_q": 700, "max_seqlen_k": 900, "seqused_k": counts,
            "window_size": window_size, **descales,
        },
        packed=True,
    )  # fmt: skip
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
    out, _ = made.forward(x)
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
        out, lse = made.forward(x)
        differing += (out != want["out"]).sum() + (lse != want["lse"]).sum()
    assert not differing
    one = {name: t[1:2] for name, t in case.inputs.items()}
    descales = {f"{name}_descale": case.options[f"{name}_descale"][1:2] for name in "qkv"}
    alone = launch(case.with_inputs(**one).with_options(**descales))
    assert torch.equal(alone["out"][0], want["out"][1])
    assert torch.equal(alone["lse"][0], want["lse"][1])
