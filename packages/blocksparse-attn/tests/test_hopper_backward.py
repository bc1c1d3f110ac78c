"""The backward kernel for Hopper: what it takes, what it builds into, and its numbers on a GPU."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import triton
from attn_common import cdiv, detect
from blocksparse_attn import BlockSparseLayout, _configs
from blocksparse_attn._call import Options, Pattern, Tensors
from blocksparse_attn._configs import has_short_rows, takes_hopper_backward
from blocksparse_attn._kernels.backward_rows import row_kernel
from blocksparse_attn._kernels.form import Form
from blocksparse_attn._kernels.hopper.backward_plans import PIECE, ROWS, HopperBackward
from blocksparse_attn._kernels.structures import RowNumbers, RowOptions, RowTensors
from blocksparse_attn._lists import SIDE, piece_of

from ._aot import Config
from ._linked.budget import assert_same
from ._linked.gpus import GPUS, absent_gpu, chosen, compiling, counting
from ._linked.views import VIEWS
from ._numerics import (
    Packed,
    Shape,
    check,
    make_case,
    make_packed,
    only_portable,
    run,
    that_repeats,
)

HOPPER = "nvidia:sm_90"

# ---- what it takes


def pattern_of(block_q: int, block_k: int, shared: bool = False) -> Pattern:
    return Pattern(shared, 16, 16, block_q, block_k, False, 16)


@pytest.fixture
def may_differ(monkeypatch):
    """Sums in any order are welcome; the tests otherwise ask for what repeats."""
    monkeypatch.setattr(_configs, "repeats", lambda: False)


@pytest.mark.eager
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "dtype", "block", "taken"),
    [
        (128, 128, torch.bfloat16, (64, 64), True),
        (64, 64, torch.float16, (128, 128), True),
        (40, 128, torch.bfloat16, (128, 64), True),
        (128, 8, torch.bfloat16, (64, 128), True),
        (128, 128, torch.bfloat16, (32, 64), True),
        (128, 128, torch.bfloat16, (64, 32), True),
        (32, 32, torch.bfloat16, (64, 64), False),  # half of a tile would be padding
        (192, 128, torch.bfloat16, (64, 64), False),
        (128, 128, torch.float32, (64, 64), False),
    ],
)
def test_serves(head_dim, head_dim_v, dtype, block, taken, may_differ):
    q, v = (torch.empty(1, 512, 2, d, dtype=dtype, device="meta") for d in (head_dim, head_dim_v))
    x, pattern = Tensors(q, q, v), pattern_of(*block)
    with absent_gpu(HOPPER):
        assert takes_hopper_backward(x, pattern) == taken
        short = Tensors(q[:, :100], q[:, :100], v[:, :100])
        # many programs would find nothing to do
        assert not takes_hopper_backward(short, pattern)
        assert not takes_hopper_backward(x, pattern._replace(rows=2**22 // block[0]))
        assert not takes_hopper_backward(x, pattern._replace(batch=x.q.shape[0]))
        with only_portable():
            assert not takes_hopper_backward(x, pattern)
    with absent_gpu("nvidia:sm_80"):
        assert not takes_hopper_backward(x, pattern)


@pytest.mark.eager
def test_leaves_the_small_blocks_of_large_layouts_to_the_portable_kernels(may_differ):
    """In making the lists of so many, memory would run out."""
    q = torch.empty(512, 2, 128, dtype=torch.bfloat16, device="meta")
    starts = torch.empty(2, dtype=torch.int32, device="meta")
    x = Tensors(q, q, q, starts, starts)
    with absent_gpu(HOPPER):
        for block, taken in (64, True), (32, False):
            large = pattern_of(block, block)._replace(rows=2**14, cols=2**14)
            assert takes_hopper_backward(x, large) == taken
            assert takes_hopper_backward(x, large._replace(cols=2**12))


def selected(k: int, rows: int = 64, block: int = 64) -> BlockSparseLayout:
    """A layout of so many slots a row, which hold nothing."""
    indices = torch.full((2, rows, k), -1)
    return BlockSparseLayout.from_indices(indices, block, num_cols=rows)


@pytest.mark.eager
def test_rows_that_are_short():
    """By the shapes of a layout: of one head's slots, kept or padding, and of its rows."""
    local = functools.partial(BlockSparseLayout.local_strided, 32, 8192, 64, device="cpu")
    kept = torch.eye(64, dtype=torch.bool)
    for layout, is_short in (
        (local(8, 16), True),
        (local(8, 16, True), True),
        (local(16, 8), False),
        (selected(13), True),
        (selected(14), False),
        (selected(13, rows=7), True),
        (BlockSparseLayout.batched([selected(13)] * 3), True),
        (BlockSparseLayout.batched([selected(14)] * 3), False),
        (selected(6, block=128), True),
        (selected(7, block=128), False),
        (selected(1, block=32), False),
        (BlockSparseLayout.from_dense(kept, (64, 32)), False),
        (BlockSparseLayout.from_dense(kept, 64), True),
        (BlockSparseLayout.from_dense(kept, 64, max_nnz=13 * 64), True),
        (BlockSparseLayout.from_dense(kept, 64, max_nnz=13 * 64 + 1), False),
    ):
        slots = layout._col.shape[1]
        assert has_short_rows(layout._pattern, slots, 128, 4) == is_short, layout
        assert not has_short_rows(layout._pattern, slots, 64, 4)
        # without groups half as many keys are few
        assert has_short_rows(layout._pattern, 2 * slots, 128, 4) == has_short_rows(
            layout._pattern, slots, 128, 1
        )


@pytest.mark.eager
def test_calls_whose_results_repeat_are_served_apart():
    """Before the switch and after it, of one form."""
    for strict in (False, True):
        torch.use_deterministic_algorithms(True, warn_only=not strict)
        assert _configs.repeats() == strict
    torch.use_deterministic_algorithms(False)
    assert not _configs.repeats()


@pytest.mark.eager
@pytest.mark.parametrize("head_dim", [64, 128])
def test_stages_of_dq_fit_the_barriers_of_the_hardware(head_dim):
    tile = _configs.hopper_dq_tile(head_dim)
    # eight numbers are left to stages; see ``pipeline.EMPTY``
    assert tile.stages_k + tile.stages_v <= 8


@pytest.mark.eager
def test_stages_fit_the_barriers_of_the_hardware():
    # four numbers are left to stages; see ``pipeline.EMPTY`` and ``backward_steps.MADE``
    # a step of either warpgroup's own queries has two, and the next one's are on their way
    assert _configs.BACKWARD_STAGES == 4


def plan_of(config, tokens, batch=2):
    """A plan, and inputs, what is known of rows, and gradients, of meta tensors."""
    dtype, width_v = getattr(torch, config.dtype), config.head_dim_v or config.head_dim
    leading = (tokens,) if config.packed else (batch, tokens)
    q, k, v, dout = (
        torch.empty(*leading, heads, width, dtype=dtype, device="meta")
        for heads, width in ((8, config.head_dim), (2, config.head_dim), (2, width_v), (8, width_v))
    )
    cu = torch.empty(batch + 1, dtype=torch.int32, device="meta") if config.packed else None
    x = Tensors(q, k, v, cu, cu)
    options = Options(0.1, config.causal, 1)
    form = Form(x, pattern_of(*config.block, config.shared), options)
    plan = HopperBackward(form)
    numbers = torch.empty(batch, 8, tokens, device="meta")
    rows = RowTensors(dout, dout, numbers, None, numbers, numbers)
    return plan, x, rows, tuple(map(torch.empty_like, (q, k, v)))


@pytest.mark.aot
@pytest.mark.parametrize(
    ("tokens", "batch", "same", "worth"),
    [
        (4096, 4, True, True),  # the layout covers 1024 tokens
        (1024, 4, True, True),
        (1000, 4, True, False),  # many programs would find nothing to do
        (4096, 4, False, False),  # where a sequence's first query stands is not known
    ],
)
def test_packed_calls_that_are_worth_it(tokens, batch, same, worth):
    with absent_gpu(HOPPER):
        plan, x, *_ = plan_of(Config(128, packed=True), tokens, batch)
        starts = torch.zeros(batch + 1, dtype=torch.int32)
        others = starts if same else starts.clone()
        x = x._replace(cu_seqlens_q=starts, cu_seqlens_k=others)
        assert plan.is_worth_it(x) == worth


# ---- sums, which lie in the order of the accumulators' registers


def in_order(sums):
    """Bring the last dimension of a tile into rows and columns, element by element."""
    width = sums.shape[-1] // 64
    lines, cols = torch.arange(64)[:, None], torch.arange(width)[None, :]
    warp, lower, line = lines // 16, lines % 16 // 8, lines % 8
    place = cols // 8 * 512 + warp * 128 + line * 16 + cols % 8 // 2 * 4 + lower * 2 + cols % 2
    return sums[..., place.to(sums.device)]


@pytest.mark.parametrize("tokens_q", [119, 100, 140])
@pytest.mark.parametrize("block_d", [64, 128])
def test_sums_are_brought_into_their_order(block_d, tokens_q, device):
    """Tiles of dq begin at positions: the first one may hold rows that there are not.

    Blocks of dk and dv are left alone that one program has written.
    """
    tokens_k, heads_q, heads_k, head_dim, head_dim_v = 119, 4, 2, block_d - 8, 128
    first = (tokens_k - tokens_q) // 64
    tiles = 2 - first
    dq_sums = torch.randn(heads_q, tiles, 2, 32 * block_d, device=device)
    sums = [torch.randn(heads_k, 2, 64 * d, device=device) for d in (block_d, head_dim_v)]
    dq, dk, dv = (
        torch.full((1, tokens, heads, width), 7.0, device=device).half()
        for tokens, heads, width in (
            (tokens_q, heads_q, head_dim),
            (tokens_k, heads_k, head_dim),
            (tokens_k, heads_k, head_dim_v),
        )
    )
    parts = torch.tensor([2, 1, 9, 0, 3, 9], device=device)
    tensors = *[None] * 6, parts, None, dq_sums, *sums, dq, dk, dv
    slots = heads_q * tiles, heads_k * 2
    numbers = RowNumbers(
        tokens_q, 0, 0, 0, 0, heads_q, 0.5, 1, heads_k, tokens_k, tiles, 2, 3, *slots
    )
    options = RowOptions(
        head_dim_v, 128, 16, ROWS, True, head_dim, True, False, 64, block_d, 128, PIECE
    )
    row_kernel[(sum(slots),)](*tensors, *numbers, **options._asdict(), num_warps=4)
    want = in_order(dq_sums).transpose(2, 3).reshape(heads_q, tiles * 64, block_d)
    ahead = tokens_k - tokens_q - first * 64
    want = want[:, ahead : ahead + tokens_q, :head_dim].transpose(0, 1)
    assert torch.equal(dq[0], (want * 0.5).half())
    for got, given, scale in zip((dk, dv), sums, (0.5, 1.0), strict=True):
        want = in_order(given).reshape(heads_k, 128, -1)[:, :tokens_k, : got.shape[-1]]
        want = want.transpose(0, 1) * scale
        want[64:, 0] = 7.0
        want[:64, 1] = 0.0  # nobody's
        assert torch.equal(got[0], want.half())


@pytest.mark.parametrize("tokens_q", [8, 150])
def test_sums_are_cleared_of_queries_and_of_keys_that_are_shared(tokens_q, device):
    """Also where there are more blocks of keys than of rows."""
    heads_q, heads_k, tiles_q = 4, 2, 3
    out = torch.zeros(1, tokens_q, heads_q, 64, device=device).half()
    lse = torch.zeros(1, heads_q, tokens_q, device=device)
    rows = RowTensors(out, out, lse, None, torch.empty_like(lse), torch.empty_like(lse))
    numbers = tokens_q, lse.numel(), *out.stride()[:3]
    dq_sums = torch.full((heads_q, tiles_q, 64 * 64), math.nan, device=device)
    sums = [torch.full((heads_k, 3, 64 * d), math.nan, device=device) for d in (64, 128)]
    parts = torch.tensor([2, 1, 0, 9, 0, 3, 1, 9], device=device)
    grid, pieces = max(cdiv(lse.numel(), ROWS), heads_k * 3), dq_sums.numel() // PIECE
    numbers = RowNumbers(
        *numbers, heads_q, 1.0, 1, heads_k, 150, 0, 3, 4, 0, heads_k * 3, cdiv(pieces, grid), pieces
    )
    options = RowOptions(64, 64, 16, ROWS, False, 64, True, False, 64, 64, 128, PIECE)
    tensors = *rows[:6], parts, None, dq_sums, *sums, None, None, None
    row_kernel[(grid,)](*tensors, *numbers, **options._asdict(), num_warps=4)
    for filled in (dq_sums, rows.delta_ptr, rows.lse2_ptr):
        assert not filled.any()
    for given in sums:
        cleared = ~given.isnan().any(2)
        assert cleared.tolist() == [[True, False, False], [False, True, False]]
        assert not given[cleared].any()


# ---- what it builds into

CONFIGS = {
    "causal": Config(128),
    "full": Config(128, causal=False),
    "packed": Config(128, packed=True),
    "shared": Config(128, shared=True),
    "wide": Config(128, block=(128, 128), packed=True, causal=False, shared=True),
    "narrow": Config(64),
    "unequal": Config(96, head_dim_v=40),
    "of 32": Config(128, block=(32, 32)),
    "of 16": Config(128, block=(16, 16)),
    "of 16 packed": Config(128, block=(64, 16), packed=True, causal=False, shared=True),
}
# bytes that may be spilled with Triton 3.6 and with later ones: numbers of the walks, of which
# small blocks without a causal mask have one more
SPILLS = {
    "causal": (32, 88),
    "full": (32, 88),
    "packed": (24, 56),
    "shared": (40, 160),
    "wide": (24, 160),
    "narrow": (0, 56),
    "unequal": (0, 0),
    "of 32": (16, 216),
    "of 16": (104, 208),
    "of 16 packed": (112, 224),
}
IS_OLD = triton.__version__.startswith("3.6.")


def lists_of(config):
    """Meta tensors in the form of ``Pairs``."""
    pieces = 2 * SIDE // piece_of(config.block)
    sizes = (65,), (32 * pieces,), (99,), (16, 1 + pieces), (1,), (99,)
    int64, int32 = torch.int64, torch.int32
    dtypes = int64, int64, int32, int32, int32, int32
    return tuple(
        torch.empty(size, dtype=dtype, device="meta")
        for size, dtype in zip(sizes, dtypes, strict=True)
    )


def launch(config, tokens=1024, repeats=False):
    plan, x, rows, grads = plan_of(config, tokens)
    by_row = config.lists("tall") if repeats else ()
    plan(x, rows, lists_of(config) + by_row, *grads)


@pytest.mark.aot
@pytest.mark.parametrize("kind", chosen(CONFIGS, ["causal", "of 16 packed"]))
def test_builds(kind, tmp_path):
    with compiling(HOPPER, tmp_path) as builds:
        launch(CONFIGS[kind])
    kernel = next(build for build in builds if build.kernel == "hopper_backward_kernel")
    assert kernel.shared <= GPUS[HOPPER].shared_limit, kernel
    assert not kernel.unset, kernel
    old, new = SPILLS[kind]
    assert kernel.spilled <= (old if IS_OLD else new), kernel
    assert all(build.spilled == 0 for build in builds if build is not kernel)
    assert len(builds) == 3
    sass = kernel.sass
    products = sass.count(" HGMMA.")
    assert products > 0
    for instruction in ("UTMALDG", "USETMAXREG"):
        assert instruction in sass, instruction
    # pieces are added to sums
    assert ("UTMASTG" in sass) == (min(CONFIGS[kind].block) >= 64)
    # serialised products have an arrival each
    assert sass.count(" WARPGROUP.ARRIVE") < products / 3


# the same of the two kernels of gradients that repeat: numbers that are needed between tiles
REPEATING_SPILLS = {"hopper_backward_kernel": (104, 224), "hopper_query_kernel": (64, 160)}


@pytest.mark.aot
@pytest.mark.parametrize("kind", chosen(CONFIGS, ["packed"]))
def test_builds_of_gradients_that_repeat(kind, tmp_path):
    with compiling(HOPPER, tmp_path) as builds:
        launch(CONFIGS[kind], repeats=True)
    assert len(builds) == 4
    for build in builds:
        spilled = REPEATING_SPILLS.get(build.kernel, (0, 0))
        assert build.spilled <= spilled[0 if IS_OLD else 1], build
        assert build.shared <= GPUS[HOPPER].shared_limit, build
        assert not build.unset, build
    for kernel in ("hopper_backward_kernel", "hopper_query_kernel"):
        sass = next(build for build in builds if build.kernel == kernel).sass
        products = sass.count(" HGMMA.")
        assert products > 0
        # serialised products have an arrival each
        assert sass.count(" WARPGROUP.ARRIVE") < products / 3


@pytest.mark.aot
@pytest.mark.parametrize("kind", ["causal", "packed"])
def test_lengths_make_one_variant(kind):
    with counting(HOPPER) as variants:
        for length in (64, 4096, 5000, 16_384, 70_001):
            launch(CONFIGS[kind], length)
    counts = {name.rpartition(".")[2]: len(keys) for name, keys in variants.items()}
    # rows are numbered before, and sums rounded after
    assert counts == {"row_kernel": 2, "hopper_backward_kernel": 1}


# ---- numbers

SHAPES = [
    Shape(2, 128, 128, 2, 2, 128),
    Shape(1, 40, 40, 1, 1, 64),
    Shape(2, 333, 900, 8, 2, 128),  # a chunk: its first block begins ahead of it
    Shape(2, 900, 333, 4, 1, 64),  # rows ahead of the first key
    Shape(2, 129, 257, 2, 1, 96),
    Shape(1, 500, 513, 2, 2, 40, 128),
    Shape(1, 200, 300, 2, 1, 128, 24),
    Shape(2, 3000, 3000, 8, 2, 128),
]
BLOCKS = [(64, 64), (128, 128), (128, 64), (64, 128), (32, 32), (16, 16), (64, 16)]


@pytest.fixture
def served(monkeypatch, device, request):
    """Hold the kernel to the budget of the package, where there is a GPU for it."""
    if not detect(device).is_hopper:
        pytest.skip(f"{detect(device)} is not Hopper")
    # rows are short here, and sums are to be tested
    monkeypatch.setattr(_configs, "SHORT_ROWS", 0)
    calls = []
    real = HopperBackward.__call__

    def launched(*arguments):
        calls.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(HopperBackward, "__call__", launched)

    def serve(case, function=check):
        calls.clear()
        got = function(case)
        assert calls
        return got

    return serve


@pytest.mark.device
@pytest.mark.parametrize("pattern", ["random", "local"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, pattern, device, served):
    served(make_case(shape, torch.bfloat16, device, pattern, (64, 64), spare=1))


@pytest.mark.device
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shared", [False, True], ids=["per_head", "shared"])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_blocks(block, shared, causal, device, served):
    shape = Shape(2, 700, 900, 4, 2, 128)
    case = make_case(
        shape, torch.float16, device, "random", block, shared=shared, causal=causal, spare=2
    )
    served(case)


@pytest.mark.device
@pytest.mark.parametrize("pattern", ["all", "none"])
def test_everything_and_nothing(pattern, device, served):
    shape = Shape(1, 700, 700, 4, 1, 128)
    got = served(make_case(shape, torch.bfloat16, device, pattern, (64, 64)))
    if pattern == "none":
        assert not any(got[name].any() for name in ("dq", "dk", "dv"))


@pytest.mark.device
@pytest.mark.parametrize("shared", [False, True], ids=["per_head", "shared"])
def test_long_walks_and_columns(shared, device, served):
    """The pattern of Phi-3-small: columns are walked by programs of their own, and cut."""
    case = make_case(Shape(1, 6000, 6000, 8, 2, 64), torch.bfloat16, device)
    layout = BlockSparseLayout.local_strided(8, 6016, 64, 4, 8, shared, device=device)
    served(case.with_options(layout=layout))


@pytest.mark.device
@pytest.mark.parametrize("shared", [False, True], ids=["per_head", "shared"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_packed(causal, shared, device, served):
    lengths = 500, 0, 629, 128, 1, 900, 900
    case = make_packed(
        Packed(lengths, lengths, 6, 3, 128, padding=7),
        torch.bfloat16,
        device,
        "random",
        (64, 64),
        shared=shared,
        causal=causal,
        spare=1,
    )
    case = case.with_options(cu_seqlens_k=case.options["cu_seqlens_q"])
    got = served(case)
    for name in ("dq", "dk", "dv"):
        assert not got[name][sum(lengths) :].any()


@pytest.mark.device
@pytest.mark.parametrize("view", sorted(VIEWS))
def test_views(view, device, served):
    case = make_case(Shape(2, 300, 333, 4, 2, 128), torch.bfloat16, device, "local", (64, 64))
    seen = {name: VIEWS[view](t) for name, t in case.inputs.items()}
    served(case.with_inputs(**seen))


@pytest.mark.device
def test_keys_that_nobody_sees(device, served):
    """NaN in blocks kept by rows that the chunk has not, behind the end, and around the inputs."""
    kept = torch.zeros(16, 16, dtype=torch.bool)
    kept[torch.arange(16), torch.arange(16)] = True
    kept[8, 2] = True  # rows from 512 on, which the chunk has not
    layout = BlockSparseLayout.from_dense(kept.expand(2, 16, 16), 64).to(device)
    case = make_case(Shape(1, 400, 980, 2, 2, 128), torch.bfloat16, device)
    case = case.with_options(layout=layout)
    want = served(case)
    bad = {name: t.clone() for name, t in case.inputs.items()}
    for name in "kv":
        bad[name][:, :576] = math.nan
    assert_same(run(case.with_inputs(**bad)), want)
    inside = {name: VIEWS["inside"](t) for name, t in case.inputs.items()}
    assert_same(run(case.with_inputs(**inside)), want)


@pytest.mark.device
def test_results_that_repeat(device):
    """Asked for by PyTorch's switch, of calls that were served without it."""
    case = make_case(Shape(1, 2000, 2000, 8, 2, 128), torch.bfloat16, device, "local", (64, 64))
    run(case)
    torch.use_deterministic_algorithms(True)
    want = run(case)
    for _ in range(20):
        assert_same(run(case), want)


@pytest.mark.device
@pytest.mark.parametrize("shared", [False, True], ids=["per_head", "shared"])
@pytest.mark.parametrize(
    ("block", "asked"), [((64, 64), True), ((16, 16), True), ((64, 64), False)], ids=str
)
def test_gradients_that_repeat(block, asked, shared, device, served, monkeypatch):
    """Of columns that several programs add to; also captured in a graph.

    They are asked for, or rows are short.
    """
    case = make_case(
        Shape(2, 3000, 3000, 8, 2, 128), torch.bfloat16, device, "local", block, shared=shared
    )
    if asked:
        case = that_repeats(case)
    else:
        monkeypatch.setattr(_configs, "SHORT_ROWS", 3000)
    served(case)
    want = run(case)
    for _ in range(20):
        assert_same(run(case), want)
    x = {name: t.detach().requires_grad_() for name, t in case.inputs.items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.function(**x, **case.options)
        grads = torch.autograd.grad(out, list(x.values()), torch.ones_like(out))
    graph.replay()
    first = [t.clone() for t in grads]
    for _ in range(5):
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(grads, first, strict=True))
