"""The backward kernel for Hopper: what it takes, and what it builds into."""

from __future__ import annotations

import functools
import types

import pytest
import torch
from blocksparse_attn import BlockSparseLayout
from blocksparse_attn._attention import tiles
from blocksparse_attn._attention.call import Options, Pattern, Tensors
from blocksparse_attn._attention.hopper.backward.launch import HopperBackward
from blocksparse_attn._attention.portable.arguments import RowTensors
from blocksparse_attn._attention.portable.form import Form
from blocksparse_attn._attention.tiles import has_short_rows, takes_hopper_backward
from blocksparse_attn._layout.lists import SIDE, piece_of

from ..._linked.gpus import absent_gpu, chosen, compiling, counting
from ..._linked.spills import check_builds
from ..._numerics import only_portable
from .._aot import Config

HOPPER = "nvidia:sm_90"

# ---- what it takes


def pattern_of(block_q: int, block_k: int, shared: bool = False) -> Pattern:
    return Pattern(shared, 16, 16, block_q, block_k, False, 16)


@pytest.fixture
def may_differ(monkeypatch):
    """Sums in any order are welcome; the tests otherwise ask for what repeats."""
    monkeypatch.setattr(tiles, "repeats", lambda: False)


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
        pattern, on = layout._pattern, torch.device("cpu")
        assert has_short_rows(pattern, slots, 128, 4, on) == is_short, layout
        assert not has_short_rows(pattern, slots, 64, 4, on)
        # without groups half as many keys are few
        assert has_short_rows(pattern, 2 * slots, 128, 4, on) == has_short_rows(
            pattern, slots, 128, 1, on
        )


@pytest.mark.eager
@pytest.mark.parametrize(
    ("clock", "width", "most", "most_alone"),
    [(2_619_000, 5120, 13, 6), (3_201_000, 6016, 8, 0)],
    ids=["H100", "H200"],
)
def test_rows_that_are_short_on_a_gpu(clock, width, most, most_alone, monkeypatch):
    """By how many bytes a second its memory brings to each multiprocessor."""
    gpu = types.SimpleNamespace(
        memory_clock_rate=clock, memory_bus_width=width, multi_processor_count=132
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(tiles, "_FAST", {})
    on = torch.device("cuda", 0)
    for blocks in range(1, 20):
        layout = selected(blocks)
        short = functools.partial(has_short_rows, layout._pattern, layout._col.shape[1], 128)
        assert short(4, on) == (blocks <= most)
        assert short(1, on) == (blocks <= most_alone)


@pytest.mark.eager
def test_calls_whose_results_repeat_are_served_apart():
    """Before the switch and after it, of one form."""
    for strict in (False, True):
        torch.use_deterministic_algorithms(True, warn_only=not strict)
        assert tiles.repeats() == strict
    torch.use_deterministic_algorithms(False)
    assert not tiles.repeats()


@pytest.mark.eager
@pytest.mark.parametrize("head_dim", [64, 128])
def test_stages_of_dq_fit_the_barriers_of_the_hardware(head_dim):
    tile = tiles.hopper_dq_tile(head_dim)
    # eight numbers are left to stages; see ``pipeline.EMPTY``
    assert tile.stages_k + tile.stages_v <= 8


@pytest.mark.eager
def test_stages_fit_the_barriers_of_the_hardware():
    # four numbers are left to stages; see ``pipeline.EMPTY`` and ``backward_steps.MADE``
    # a step of either warpgroup's own queries has two, and the next one's are on their way
    assert tiles.BACKWARD_STAGES == 4


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
    options = Options(0.1, config.causal, 1, False)
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
    check_builds(HOPPER, kind, builds)
    assert len(builds) == 3
    sass = kernel.sass
    products = sass.count(" HGMMA.")
    assert products > 0
    for instruction in ("UTMALDG", "UTMASTG", "USETMAXREG"):
        assert instruction in sass, instruction
    # serialised products have an arrival each
    assert sass.count(" WARPGROUP.ARRIVE") < products / 3


@pytest.mark.aot
@pytest.mark.parametrize("kind", chosen(CONFIGS, ["packed"]))
def test_builds_of_gradients_that_repeat(kind, tmp_path):
    with compiling(HOPPER, tmp_path) as builds:
        launch(CONFIGS[kind], repeats=True)
    assert len(builds) == 4
    check_builds(HOPPER, f"{kind} repeating", builds)
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
