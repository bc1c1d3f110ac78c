"""What the backward kernel for Hopper builds into, with each mask, feature and head dimension."""

from __future__ import annotations

import itertools

import pytest
import torch
from flash_attn_triton._dense.call import Options, Tensors
from flash_attn_triton._dense.hopper.backward.launch import HopperBackward
from flash_attn_triton._dense.hopper_tiles import hopper_backward_tile
from flash_attn_triton._dense.portable.arguments import Extras, Inputs
from flash_attn_triton._dense.portable.form import Form

from ..._linked.gpus import chosen, compiling
from ..._linked.spills import check_builds
from ._hopper_backward import HOPPER, extras_of


@pytest.mark.aot
@pytest.mark.parametrize(
    ("head_dim", "causal", "ordered"),
    chosen(
        itertools.product((64, 80, 96, 128, 160, 192, 256), (False, True), (False, True)),
        [(128, True, False), (64, True, True), (96, True, False), (192, False, False)],
    ),
)
def test_builds_for_hopper(head_dim, causal, ordered, tmp_path):
    tile = hopper_backward_tile(head_dim, False, not ordered)
    with compiling(HOPPER, tmp_path) as builds:
        q = torch.empty(3, 1024, 8, head_dim, dtype=torch.bfloat16, device="meta")
        k = torch.empty(3, 1024, 2, head_dim, dtype=torch.bfloat16, device="meta")
        rows = torch.empty(3, 8, 1024, device="meta")
        x = Tensors(q, k, k)
        form = Form(x, Options(0.1, -1, 0 if causal else -1, 0.0, 0.0))
        plan = HopperBackward(form, x, tile, ordered=ordered, shares=1)
        inputs = Inputs(q, k, k, q, rows, rows)
        plan(inputs, Extras(*[None] * 6), q, k, k, plan.new_sums(q, k))
    kernel, *values, _rounding = builds
    assert len(values) == tile.is_apart
    order = " in order" if ordered else ""
    check_builds(HOPPER, f"d{head_dim} {'causal' if causal else 'full'}{order}", builds)
    for build in (kernel, *values):
        sass = build.sass
        products = sass.count(" HGMMA.")
        assert products > 0
        assert " UTMALDG." in sass
        assert " UTMASTG." in sass
        # serialised products have an arrival each
        assert sass.count(" WARPGROUP.ARRIVE") < products / 3
    # who adds to dq: TMA, or the threads
    is_by_threads = tile.block_n == 64 or tile.is_apart
    assert (" UTMAREDG." in kernel.sass) != is_by_threads


@pytest.mark.aot
@pytest.mark.parametrize(
    ("head_dim", "ordered"),
    chosen(
        itertools.product((64, 80, 96, 128, 160, 192, 256), (False, True)),
        [(128, False), (256, True)],
    ),
)
def test_builds_of_shared_keys(head_dim, ordered, tmp_path):
    """The parts of dk and dv are added, not stored, and two more launches round them."""
    with compiling(HOPPER, tmp_path) as builds:
        q = torch.empty(3, 1024, 8, head_dim, dtype=torch.bfloat16, device="meta")
        k = torch.empty(3, 1024, 2, head_dim, dtype=torch.bfloat16, device="meta")
        rows = torch.empty(3, 8, 1024, device="meta")
        x = Tensors(q, k, k)
        form = Form(x, Options(0.1, -1, 0, 0.0, 0.0))
        plan = HopperBackward(form, x, ordered=ordered, shares=4)
        plan(Inputs(q, k, k, q, rows, rows), Extras(*[None] * 6), q, k, k, plan.new_sums(q, k))
    *kernels, _dq, _dk, _dv = builds
    check_builds(HOPPER, f"d{head_dim} causal shared{' in order' if ordered else ''}", builds)
    for kernel in kernels:
        assert " UTMASTG." not in kernel.sass
        assert " RED.E.ADD.F32" in kernel.sass or " REDG.E.ADD.F32" in kernel.sass


@pytest.mark.aot
@pytest.mark.parametrize(
    ("head_dim", "causal", "feature"),
    chosen(
        itertools.product((64, 128, 256), (False, True), ("dropout", "alibi")),
        [(128, True, "dropout")],
    ),
)
def test_builds_with_features(head_dim, causal, feature, tmp_path):
    """Of fixed lengths; packed and causal, dropout draws twice as often."""
    has_dropout = feature == "dropout"
    with compiling(HOPPER, tmp_path) as builds:
        q = torch.empty(3, 1024, 8, head_dim, dtype=torch.bfloat16, device="meta")
        k = torch.empty(3, 1024, 2, head_dim, dtype=torch.bfloat16, device="meta")
        rows = torch.empty(3, 8, 1024, device="meta")
        slopes = torch.empty(8, device="meta")
        state = torch.empty(2, dtype=torch.int64, device="meta")
        x = Tensors(q, k, k)
        x = x._replace(rng_state=state) if has_dropout else x._replace(alibi_slopes=slopes)
        options = Options(0.1, -1, 0 if causal else -1, 0.0, 0.1 if has_dropout else 0.0)
        plan = HopperBackward(Form(x, options), x, shares=1)
        plan(Inputs(q, k, k, q, rows, rows), extras_of(x), q, k, k, plan.new_sums(q, k))
    kernel, _rounding = builds
    check_builds(HOPPER, f"d{head_dim} {'causal' if causal else 'full'} {feature}", builds)
    products = kernel.sass.count(" HGMMA.")
    assert kernel.sass.count(" WARPGROUP.ARRIVE") < products / 3


@pytest.mark.aot
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), chosen([(64, 256), (40, 136)], [(256, 64), (192, 128)]), ids=str
)
def test_builds_of_two_head_dims(head_dim, head_dim_v, tmp_path):
    """Packed, with a window: every feature that costs registers but softcap."""
    (q, dout), (k, v) = (
        [
            torch.empty(2048, heads, d, dtype=torch.float16, device="meta")
            for d in (head_dim, head_dim_v)
        ]
        for heads in (8, 2)
    )
    rows = torch.empty(8, 2048, device="meta")
    starts = torch.empty(3, dtype=torch.int32, device="meta")
    with compiling(HOPPER, tmp_path) as builds:
        x = Tensors(q, k, v, starts, starts)
        plan = HopperBackward(Form(x, Options(0.1, 100, 0, 0.0, 0.0)), x, shares=1)
        inputs = Inputs(q, k, v, dout, rows, rows)
        extras = Extras(None, None, None, starts, starts, None)
        plan(inputs, extras, *map(torch.empty_like, (q, k, v)), plan.new_sums(q, k))
    check_builds(HOPPER, f"d{head_dim}:{head_dim_v} packed window", builds)
    # dv has a launch of its own above head dim 128, and dq is rounded
    assert len(builds) == (3 if 128 < max(head_dim, head_dim_v) <= 192 else 2)
