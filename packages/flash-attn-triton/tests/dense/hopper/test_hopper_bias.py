"""Additive biases in the kernels for Hopper: what they build into, and numbers on a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch
from attn_common import detect
from flash_attn_triton._dense.call import Options, Tensors
from flash_attn_triton._dense.hopper.backward.launch import HopperBackward
from flash_attn_triton._dense.hopper.forward.launch import HopperForward
from flash_attn_triton._dense.hopper_tiles import hopper_backward_bias_tile, hopper_bias_tile
from flash_attn_triton._dense.launch import PortableForward
from flash_attn_triton._dense.portable.arguments import PIECE, Extras, Inputs
from flash_attn_triton._dense.portable.form import Form

from ..._linked.gpus import absent_gpu, chosen, compiling
from ..._linked.spills import check_builds
from ..._numerics import Case, Packed, Shape, check, make_case, make_packed

HOPPER = "nvidia:sm_90"
WIDTHS = (64, 128, 256)


@pytest.fixture(autouse=True)
def on_hopper(request):
    """Skip what runs on a GPU where that is another one."""
    if request.node.get_closest_marker("device"):
        platform = detect(request.getfixturevalue("device"))
        if not platform.is_hopper:
            pytest.skip(f"{platform} is not Hopper")


@pytest.mark.eager
@pytest.mark.parametrize("bias_bytes", [2, 4])
@pytest.mark.parametrize("head_dim", [*WIDTHS, 192])
def test_tiles_fit_the_barriers_of_the_hardware(head_dim, bias_bytes):
    for is_masked in (False, True):
        tile = hopper_bias_tile(head_dim, bias_bytes, is_masked)
        assert tile.stages_b > 0
        assert tile.stages_k + tile.stages_v + tile.stages_b <= 8
    tile = hopper_backward_bias_tile(head_dim, bias_bytes)
    assert tile.stages_b > 0
    # see ``MADE`` and ``GIVEN``
    assert tile.stages_q + tile.stages_o + tile.stages_b <= (6 if tile.block_n == 128 else 4)


# ---- builds


def kind_of(head_dim: int, causal: bool) -> str:
    return f"d{head_dim} {'causal' if causal else 'full'} bias"


def made(
    head_dim: int, causal: bool, batch: int = 2, group: int = 2, tokens: int = 1024
) -> tuple[Tensors, Form]:
    q = torch.empty(batch, tokens, 4, head_dim, dtype=torch.bfloat16, device="meta")
    k = torch.empty(batch, tokens, 4 // group, head_dim, dtype=torch.bfloat16, device="meta")
    bias = torch.empty(1, 4, tokens, tokens, dtype=torch.bfloat16, device="meta")
    x = Tensors(q, k, k, bias=bias)
    return x, Form(x, Options(0.1, -1, 0 if causal else -1, 0.0, 0.0))


@pytest.mark.aot
@pytest.mark.parametrize(
    ("head_dim", "causal"),
    chosen(itertools.product(WIDTHS, (False, True)), [(64, False)]),
)
def test_forward_builds(head_dim, causal, tmp_path):
    with compiling(HOPPER, tmp_path) as builds:
        x, form = made(head_dim, causal)
        HopperForward(form, x, x.q.dtype, PortableForward(form, x, x.q.dtype))(x)
    (build,) = builds
    check_builds(HOPPER, kind_of(head_dim, causal), builds)
    assert " LDSM." in build.sass  # as matrices, not number by number


def run_backward(x: Tensors, form: Form, *, ordered: bool = False) -> None:
    """Launch what fills the gradients, that of the bias among them."""
    rows = torch.empty(len(x.q), 4, 1024, device="meta")
    plan = HopperBackward(form, x, ordered=ordered)
    plan(
        Inputs(*x[:3], x.q, rows, rows),
        Extras(x.bias, *[None] * 5),
        *map(torch.empty_like, x[:3]),
        plan.new_sums(x.q, x.k),
        torch.empty_like(x.bias),
    )


@pytest.mark.aot
@pytest.mark.parametrize(
    ("head_dim", "causal"),
    chosen(itertools.product(WIDTHS, (False, True)), [(128, True)]),
)
def test_backward_builds(head_dim, causal, tmp_path):
    with compiling(HOPPER, tmp_path) as builds:
        run_backward(*made(head_dim, causal, batch=5))
    kernel, *others = builds
    # above head dim 128 the portable kernel sums the gradient of the bias
    assert len(others) == (1 if head_dim > 128 else 2)
    check_builds(HOPPER, kind_of(head_dim, causal), builds)
    assert " LDSM.16.MT88" in kernel.sass  # read transposed
    # serialised products have an arrival each
    assert kernel.sass.count(" WARPGROUP.ARRIVE") < kernel.sass.count(" HGMMA.") / 3
    if head_dim <= 128:
        assert " STSM.16.MT88" in kernel.sass  # gradients of scores, transposed


@pytest.mark.aot
@pytest.mark.parametrize(
    ("head_dim", "causal"), chosen(itertools.product((64, 128), (False, True)), [(64, False)])
)
def test_backward_of_a_shared_bias_builds(head_dim, causal, tmp_path):
    """Four sequences add up its gradient: one stores, and nothing is left to be summed."""
    with compiling(HOPPER, tmp_path) as builds:
        run_backward(*made(head_dim, causal, batch=1, group=1, tokens=4096))
        run_backward(*made(head_dim, causal, batch=4, group=1, tokens=4096))
    storing, _, shared, _rounding = builds
    check_builds(HOPPER, kind_of(head_dim, causal) + " shared", builds)
    assert shared.kernel == storing.kernel
    # one warp either stores or adds
    assert shared.sass.count(" UTMAREDG.") > storing.sass.count(" UTMAREDG.")
    assert shared.sass.count(" UTMASTG.") >= storing.sass.count(" UTMASTG.")
    # each copy is a group of its own, as ``_say_stored`` counts; ends of branches may be merged
    copies = shared.sass.count(" UTMAREDG.") + shared.sass.count(" UTMASTG.")
    assert shared.sass.count(" UTMACMDFLUSH") >= copies - 1
    assert " MEMBAR.ALL.GPU" in shared.sass  # the tile is there before its counter says so
    assert " MEMBAR.ALL.GPU" not in storing.sass


@pytest.mark.eager
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_counters_of_a_shared_bias_follow_the_sums(head_dim):
    """Two for each block of keys of those that share it; the row kernel sets whole pieces to 0."""
    with absent_gpu(HOPPER):
        x, form = made(head_dim, True, batch=4, group=1, tokens=1000)
        sums = HopperBackward(form, x).new_sums(x.q, x.k)
    assert sums.numel() % PIECE == 0
    tile = hopper_backward_bias_tile(head_dim, 2)
    numbers = 4 * 4 * -(-1000 // tile.block_m) * tile.block_m * head_dim
    assert sums.numel() - numbers >= 2 * 4 * -(-1000 // tile.block_n)


@pytest.mark.aot
@pytest.mark.parametrize(
    ("head_dim", "causal"), chosen(itertools.product((64, 128), (False, True)), [(64, False)])
)
def test_backward_in_order_builds(head_dim, causal, tmp_path):
    """They have a launch each."""
    with compiling(HOPPER, tmp_path) as builds:
        run_backward(*made(head_dim, causal, batch=4, group=1, tokens=4096), ordered=True)
    check_builds(HOPPER, kind_of(head_dim, causal) + " in order", builds)
    storing, *others, _rounding = builds
    assert len(others) == 3
    for adding in others:
        assert adding.kernel == storing.kernel
        # added to memory are dq and the gradients of scores
        added = adding.sass.count(" UTMAREDG.") - storing.sass.count(" UTMAREDG.")
        assert added == storing.sass.count(" UTMASTG.") - adding.sass.count(" UTMASTG.") > 0


# ---- numbers

SIZES = [(2, 4), (1, 4), (2, 1), (1, 1)]


def with_bias(case: Case, size: tuple[int, ...], dtype: torch.dtype) -> Case:
    """Return a case with a bias of that size, a tenth of which is -inf, and some rows whole."""
    device = case.inputs["q"].device
    made = torch.Generator(device).manual_seed(1)
    bias = torch.randn(size, generator=made, device=device)
    bias.masked_fill_(torch.rand(size, generator=made, device=device) < 0.1, -torch.inf)
    if size[2] > 1:
        bias[:, :, 5:9] = -torch.inf
    return case.with_inputs(bias=bias.to(dtype))


@pytest.mark.device
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("lengths", [(300, 432), (432, 301), (700, 1024)], ids=str)
@pytest.mark.parametrize(
    "names",
    [(), ("causal",), ("window",), ("causal", "softcap"), ("alibi", "sinks"), ("dropout",)],
    ids=str,
)
def test_features(names, lengths, head_dim, device):
    case = make_case(Shape(2, *lengths, 4, 2, head_dim), torch.bfloat16, device, names)
    check(with_bias(case, (1, 4, *lengths), torch.bfloat16))


@pytest.mark.device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [333, 1])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_broadcasts(head_dim, size, rows, dtype, device):
    case = make_case(Shape(2, 333, 501, 4, 2, head_dim), torch.bfloat16, device, ("causal",))
    check(with_bias(case, (*size, rows, 501), dtype))


@pytest.mark.device
@pytest.mark.parametrize("lengths", [(700, 328), (320, 128), (360, 328)], ids=str)
@pytest.mark.parametrize(("heads_k", "size"), [(2, (1, 4)), (4, (2, 1)), (4, (1, 1))], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_rows_that_see_no_key(head_dim, heads_k, size, lengths, device):
    """They end within a tile, with a tile, and before one is full; dbias is 0 there."""
    batch = 1 if size == (1, 1) else 2  # whatever is shared is added up in place
    shape = Shape(batch, *lengths, 4, heads_k, head_dim)
    case = make_case(shape, torch.bfloat16, device, ("causal",))
    unset = torch.full((2 * 4 * 704 * 328,), torch.nan, dtype=torch.bfloat16, device=device)
    del unset
    check(with_bias(case, (*size, *lengths), torch.bfloat16))


@pytest.mark.device
@pytest.mark.parametrize("names", [(), ("causal",), ("window",)], ids=str)
@pytest.mark.parametrize("size", [(5, 4, 700, 704), (1, 1, 1, 704)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_packed(head_dim, size, names, device):
    shape = Packed((128, 1, 300, 0, 700), (128, 9, 333, 5, 600), 4, 2, head_dim, padding=40)
    case = make_packed(shape, torch.bfloat16, device, names).with_options(max_seqlen_k=704)
    check(with_bias(case, size, torch.bfloat16))
