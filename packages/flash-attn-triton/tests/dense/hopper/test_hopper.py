"""The forward kernel for Hopper: what it takes, what it builds into, and its numbers on a GPU."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from attn_common import detect
from flash_attn_triton._dense.call import Options, Tensors
from flash_attn_triton._dense.hopper_tiles import HopperTile, hopper_tile
from flash_attn_triton._dense.tiles import takes_hopper_forward
from flash_attn_triton._linked.hopper import tickets
from flash_attn_triton._linked.hopper.tma import MapForm

from ..._linked.budget import assert_no_worse_than_eager, assert_same
from ..._linked.gpus import absent_gpu, chosen, compiling
from ..._linked.spills import check_builds
from ..._linked.views import VIEWS
from ..._numerics import Packed, Shape, make_case, make_packed, run, run_eager, run_oracle
from ..._numerics import check as check_call
from ._hopper import HOPPER, LONG, features, hopper

TILES = [hopper_tile(d, causal) for d in (64, 128, 256) for causal in (False, True)] + [LONG]


@pytest.fixture(autouse=True)
def on_hopper(request):
    """Skip what runs on a GPU where that is another one: the kernel is launched past the rules."""
    if request.node.get_closest_marker("device"):
        platform = detect(request.getfixturevalue("device"))
        if not platform.is_hopper:
            pytest.skip(f"{platform} is not Hopper")


def check(case, **options):
    """Hold the kernel to the budget of the package; return what it gave."""
    got = run(case, functools.partial(hopper, **options), grad=False)
    oracle = run_oracle(case, grad=False)
    eager = run_eager(case, oracle, grad=False)
    for name, value in got.items():
        assert_no_worse_than_eager(name, value, eager[name], oracle[name])
    return got


# ---- what it takes


def _meta(width: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(1, 8, 2, width, dtype=dtype, device="meta")


@pytest.mark.eager
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "dtype", "taken"),
    [
        (64, 64, torch.bfloat16, True),
        (128, 128, torch.float16, True),
        (192, 128, torch.bfloat16, True),
        (40, 40, torch.bfloat16, True),
        (256, 256, torch.float16, True),
        (32, 32, torch.bfloat16, False),  # half of a tile would be padding
        (100, 100, torch.bfloat16, False),  # rows that TMA does not read
        (64, 64, torch.float32, False),
    ],
)
def test_serves(head_dim, head_dim_v, dtype, taken):
    q, v = _meta(head_dim, dtype), _meta(head_dim_v, dtype)
    x, options = Tensors(q, q, v), Options(0.1, -1, 0, 0.0, 0.0)
    with absent_gpu(HOPPER):
        assert takes_hopper_forward(x, options, dtype) == taken
        dropped = options._replace(dropout_p=0.1)
        assert takes_hopper_forward(x, dropped, dtype) == taken
        assert not takes_hopper_forward(x, dropped._replace(window_left=9), dtype)
        for scale in (0.0, -1.0, 1e-60):
            assert not takes_hopper_forward(x, options._replace(softmax_scale=scale), dtype)
        assert not takes_hopper_forward(x._replace(out_scale=q), options, dtype)
        assert not takes_hopper_forward(x, options, torch.float32)
        assert not takes_hopper_forward(x._replace(k=q[:, :0], v=v[:, :0]), options, dtype)
        on_cpu = Tensors(*(torch.empty_like(t, device="cpu") for t in (q, q, v)))
        assert not takes_hopper_forward(on_cpu, options, dtype)
    with absent_gpu("nvidia:sm_80"):
        assert not takes_hopper_forward(x, options, dtype)


@pytest.mark.eager
def test_serves_biases():
    q = _meta(64)
    bias = torch.empty(1, 2, 8, 8, dtype=q.dtype, device="meta")
    x, options = Tensors(q, q, q), Options(0.1, -1, 0, 0.0, 0.0)
    column, tiny = bias[..., :1], options._replace(softmax_scale=2.0**-11)
    with absent_gpu(HOPPER):
        for taken in (bias, bias.float(), bias[:, :, :1], bias.mT, bias[:, :1].expand_as(bias)):
            assert takes_hopper_forward(x._replace(bias=taken), options, q.dtype)
        for left in (column, column.expand_as(bias)):
            assert not takes_hopper_forward(x._replace(bias=left), options, q.dtype)
        assert not takes_hopper_forward(x._replace(bias=bias), tiny, q.dtype)
        f8 = torch.empty(1, 256, 2, 64, dtype=torch.float8_e4m3fn, device="meta")
        eight = Tensors(f8, f8, f8)
        assert takes_hopper_forward(eight, options, q.dtype)
        assert not takes_hopper_forward(eight._replace(bias=bias.float()), options, q.dtype)


@pytest.mark.eager
@pytest.mark.parametrize("token_stride", [7, 256])
def test_a_single_token_has_no_stride(token_stride):
    """None and one make one form: what lies between two tokens is anybody's guess."""
    for tokens in (0, 1):
        x = torch.empty(9, 2, 128, dtype=torch.float16)
        x = x.as_strided((tokens, 2, 128), (token_stride, 128, 1))
        assert MapForm(x, 64, x.shape[-1], ragged=True)(x).strides[1:3] == [256, 128]


@pytest.mark.eager
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tiles_fit_the_barriers_of_the_hardware(tile: HopperTile):
    # eight numbers are left to stages; see ``hopper.EMPTY``
    assert tile.stages_k + tile.stages_v <= 8
    assert tile.warpgroups in (2, 3)
    assert not (tile.share and (tile.pipeline or tile.buffers_q > 1))


# ---- what it builds into


@pytest.mark.aot
@pytest.mark.parametrize(
    ("head_dim", "kind"),
    chosen(
        [
            (d, kind)
            for d in (64, 128, 256)
            for kind in ("full", "causal", "dropout", "causal dropout", "rich")
        ]
        + [(64, "long"), (64, "packed"), (128, "packed"), (128, "left"), (64, "few"), (128, "few")]
        + [(d, kind) for d in (80, 96, 160, 192) for kind in ("full", "causal", "packed", "rich")]
        + [(96, "dropout"), (96, "few")]
        + [(d, f"merging {kind}") for d in (64, 96, 128, 192, 256) for kind in ("full", "packed")],
        [(64, "rich"), (128, "few"), (256, "causal"), (96, "causal"), (192, "causal")],
    ),
)
def test_builds(head_dim, kind, tmp_path):
    options = features(kind)
    leading = (600,) if "cu_seqlens_q" in options else (2, 300)
    q, kv = (
        torch.empty(*leading, heads, head_dim, dtype=torch.bfloat16, device="meta")
        for heads in (4, 2)
    )
    if kind == "few":  # sixteen heads share a tile
        q = q[:, :5, :1].expand(-1, -1, 16, -1).contiguous()
        kv = kv[:, :, :1]
    with compiling(HOPPER, tmp_path) as builds:
        hopper(q, kv, kv, merges=kind.startswith("merging"), **options)
    check_builds(HOPPER, f"d{head_dim} {kind}", builds)
    for instruction in ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG"):
        assert instruction in builds[-1].sass, instruction


# ---- numbers

# tiles of one panel, and of two
HEAD_DIMS = [64, 128, 256, 80, 96, 160, 192]
SHAPES = [
    Shape(2, 128, 128, 2, 2, 128),
    Shape(1, 1, 1, 1, 1, 64),
    Shape(2, 300, 333, 4, 2, 128),
    Shape(2, 333, 300, 4, 1, 64),
    Shape(1, 700, 1024, 4, 4, 256),
    Shape(2, 129, 257, 2, 1, 96),
    Shape(1, 500, 513, 2, 2, 192, 128),
    Shape(2, 333, 300, 4, 2, 72),
    Shape(1, 700, 1024, 4, 4, 160),
    Shape(1, 300, 700, 2, 1, 192),
    Shape(1, 300, 333, 2, 2, 64, 80),  # panels of the values alone
    Shape(1, 300, 333, 2, 2, 160, 96),
    Shape(1, 300, 333, 2, 2, 144, 160),
    Shape(4, 2500, 2500, 8, 8, 96),
    Shape(2, 2500, 2500, 8, 8, 192),
    Shape(1, 200, 300, 2, 1, 64, 128),
    Shape(2, 5, 700, 4, 2, 80),
    Shape(3, 1, 900, 32, 4, 128),  # heads of a group share a tile
    Shape(2, 33, 500, 24, 3, 64),
    Shape(1, 7, 300, 48, 1, 256),
    Shape(4, 3000, 3000, 8, 8, 128),  # more tiles than programs
]
FEATURES = [
    (),
    ("causal",),
    ("window",),
    ("window_left",),
    ("window_right",),
    ("causal", "softcap"),
    ("alibi",),
    ("alibi_batch", "causal"),
    ("causal", "sinks"),
    ("window", "sinks", "alibi"),
]


@pytest.mark.device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("names", [(), ("causal",)], ids=str)
def test_shapes(names, shape, dtype, device):
    check(make_case(shape, dtype, device, names))


@pytest.mark.device
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("names", FEATURES, ids=str)
def test_features(names, head_dim, device):
    check(make_case(Shape(2, 300, 433, 4, 2, head_dim), torch.bfloat16, device, names))


@pytest.mark.device
@pytest.mark.parametrize("names", [("causal",), ("window_right", "sinks")], ids=str)
def test_tile_of_long_sequences(names, device):
    shape = Shape(2, 2000, 2333, 4, 2, 64)
    check(make_case(shape, torch.bfloat16, device, names), tile=LONG)


@pytest.mark.device
@pytest.mark.parametrize("tokens", [1, 20, 70])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("names", FEATURES, ids=str)
def test_few_queries(names, head_dim, tokens, device):
    """Heads of a group share a tile; what they get is what a tile for each would give."""
    case = make_case(Shape(2, tokens, 433, 16, 2, head_dim), torch.bfloat16, device, names)
    got = check(case)
    spread = {name: case.inputs[name].repeat_interleave(8, 2) for name in "kv"}
    assert_same(run(case.with_inputs(**spread), hopper, grad=False), got)


@pytest.mark.device
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("names", [(), ("causal",), ("window", "sinks")], ids=str)
def test_packed(names, head_dim, device):
    shape = Packed((128, 1, 300, 0, 700), (128, 9, 333, 5, 0), 4, 2, head_dim, padding=40)
    case = make_packed(shape, torch.bfloat16, device, names)
    check(case)
    used = torch.tensor([100, 9, 17, 0, 0], dtype=torch.int32, device=device)
    check(case.with_options(seqused_k=used))


@pytest.mark.device
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(
    "names",
    [(), ("causal",), ("window_left",), ("causal", "softcap"), ("alibi", "sinks")],
    ids=str,
)
def test_dropout(names, head_dim, device):
    """The public function, whose gradients come from other kernels by the same mask."""
    names = *names, "dropout"
    check_call(make_case(Shape(2, 300, 433, 4, 2, head_dim), torch.bfloat16, device, names))
    check_call(make_case(Shape(2, 5, 433, 8, 2, head_dim), torch.bfloat16, device, names))
    shape = Packed((128, 1, 300, 0, 700), (128, 9, 333, 5, 0), 4, 2, head_dim, padding=40)
    check_call(make_packed(shape, torch.bfloat16, device, names))


@pytest.mark.device
@pytest.mark.parametrize("steepness", [20, 200])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_maxima_that_grow(head_dim, steepness, device):
    """From tile to tile by less than a pivot may lag behind, and by more."""
    case = make_case(Shape(1, 300, 2000, 2, 2, head_dim), torch.float16, device, ("causal",))
    growth = torch.linspace(steepness, 1, 2000, device=device)[:, None, None]
    check(case.with_inputs(k=(case.inputs["k"] * growth).half()))


@pytest.mark.device
def test_many_short_sequences(device):
    shape = Packed((5,) * 300, (9,) * 300, 4, 2, 128)
    check(make_packed(shape, torch.bfloat16, device, ("causal",)))


@pytest.mark.device
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_poison(head_dim, device):
    """NaN before the first window, past the used keys, in padding, and around the inputs."""
    shape = Packed((300, 0, 700), (900, 5, 800), 4, 2, head_dim, padding=50)
    case = make_packed(shape, torch.bfloat16, device).with_options(
        window_size=(100, 0),
        seqused_k=torch.tensor([850, 3, 800], dtype=torch.int32, device=device),
    )
    want = check(case)
    unseen = torch.ones(1755, dtype=torch.bool, device=device)
    unseen[850 - 300 - 100 : 850] = False
    unseen[905:1705] = False
    bad = {name: t.clone() for name, t in case.inputs.items()}
    bad["q"][1000:] = math.nan
    bad["k"][unseen] = bad["v"][unseen] = math.nan
    assert_same(run(case.with_inputs(**bad), hopper, grad=False), want)
    inside = {name: VIEWS["inside"](t) for name, t in case.inputs.items()}
    assert_same(run(case.with_inputs(**inside), hopper, grad=False), want)


@pytest.mark.device
@pytest.mark.parametrize("lengths", [(400, 170), (330, 1)], ids=str)
def test_rows_without_a_key(lengths, device):
    got = check(make_case(Shape(2, *lengths, 2, 1, 128), torch.bfloat16, device, ("causal",)))
    blind = lengths[0] - lengths[1]
    assert not got["out"][:, :blind].any()
    assert (got["lse"][:, :, :blind] == -math.inf).all()


@pytest.mark.device
@pytest.mark.parametrize("view", sorted(VIEWS))
def test_views(view, device):
    case = make_case(Shape(2, 300, 333, 4, 2, 128), torch.bfloat16, device, ("causal",))
    want = run(case, hopper, grad=False)
    seen = {name: VIEWS[view](t) for name, t in case.inputs.items()}
    assert_same(run(case.with_inputs(**seen), hopper, grad=False), want)


@pytest.mark.device
@pytest.mark.parametrize("names", [(), ("causal",)], ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_repeats_and_independence(head_dim, names, device):
    case = make_case(Shape(3, 1500, 1500, 6, 6, head_dim), torch.bfloat16, device, names)
    want = run(case, hopper, grad=False)
    options = {**case.options, **case.inputs}
    differing = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(1000):
        out, lse = hopper(**options)
        differing += (out != want["out"]).sum() + (lse != want["lse"]).sum()
    assert not differing
    alone = hopper(**{**case.options, **{n: t[1:2] for n, t in case.inputs.items()}})
    assert torch.equal(alone[0][0], want["out"][1])
    assert torch.equal(alone[1][0], want["lse"][1])


@pytest.mark.device
def test_graphs_do_not_share_a_counter(device):
    """Two graphs that were captured on one stream may run at once."""
    case = make_case(Shape(2, 2000, 2000, 8, 8, 128), torch.bfloat16, device, ("causal",))
    want = run(case, hopper, grad=False)
    graphs, results = [torch.cuda.CUDAGraph() for _ in range(2)], []
    for graph in graphs:
        with torch.cuda.graph(graph):
            results.append(hopper(**case.inputs, **case.options))
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(20):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for out, lse in results:
        assert torch.equal(out, want["out"])
        assert torch.equal(lse, want["lse"])
    assert all(int(t) == 0 for t in tickets._tickets.values())
