"""The walk on Hopper: which calls it takes, what is built, and where it differs from elsewhere.

The numerics tests run on both paths: see ``_numerics.check``.
"""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
from attn_common import Platform
from lightning_attn._linear import tiles
from lightning_attn._linear.tiles import Tile, hopper_tile, takes_hopper_walk, walk_tile

from .._linked.gpus import GPUS, chosen, compiling, recording
from .._numerics import Packed, Shape, check, make_case, make_packed, only_portable, run
from ._aot import LAUNCHERS, Config
from ._varlen import cached

HOPPER = "nvidia:sm_90"
PLATFORM = Platform.parse(HOPPER)
DIMS = (16, 32, 48, 64, 80, 96, 112, 128, 144, 192, 256)
# what the products of Hopper take at least, in tokens or in columns
SIDE = 64
# heads, by the columns of a program that they make
WIDTHS = {"narrow": 4, "wide": 96}
PACKED = Packed((70, 0, 135, 3), 2, 64, 80, padding=70, ahead=30)
schedules = pytest.mark.parametrize("schedule", ["auto", "sequential", "parallel"])


def test_which_calls_it_takes(monkeypatch):
    def takes(d, e, dtype="bf16", platform=HOPPER):
        return takes_hopper_walk(Platform.parse(platform), d, e, dtype)

    assert all(takes(d, e) for d in (48, 64, 80, 128) for e in (48, 64, 128, 192, 256))
    assert not any(takes(d, 128) for d in (16, 32, 144, 256))
    assert not any(takes(128, e) for e in (16, 32))
    assert not takes(128, 128, "fp16")
    assert not takes(128, 128, "fp32")
    assert not takes(128, 128, platform="nvidia:sm_100")
    assert not takes(128, 128, platform="amd:gfx942")
    monkeypatch.setattr(tiles, "HOPPER", False)
    assert not takes(128, 128)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_no_walk_of_one_stage_has_products_of_hopper(dtype):
    """Beside them, loads in a loop have to be asynchronous: one stage read out of range there."""

    def sides(tile: Tile):
        return max(tile.chunk, tile.block_e)

    for d in DIMS:
        for e in DIMS:
            tile = walk_tile(PLATFORM, d, e, dtype)
            widest = max(sides(tile), tile.wide[0] if tile.wide else 0)
            assert tile.num_stages > 1 or widest < SIDE, (d, e, tile)


def test_stages_of_the_kernel_for_hopper():
    assert all(hopper_tile(block_e).stages > 1 for block_e in (64, 128))


@pytest.mark.aot
@pytest.mark.parametrize(
    ("way", "width"),
    chosen(
        itertools.product(("forward", "backward", "cached"), WIDTHS),
        [("backward", "narrow"), ("cached", "wide")],
    ),
)
def test_builds(way, width, tmp_path):
    with compiling(HOPPER, tmp_path) as builds:
        LAUNCHERS[way](Config(128, packed=way == "cached", heads=WIDTHS[width]))
    assert {build.kernel for build in builds} == {"hopper_walk_kernel"}
    for build in builds:
        assert build.shared <= GPUS[HOPPER].shared_limit, build
        assert not build.unset, build
        for instruction in ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG"):
            assert instruction in build.sass, instruction


@pytest.mark.aot
def test_a_form_has_its_walk_made_once():
    from lightning_attn._linear.portable import walk_launch

    for length in (512, 1024, 512, 1024):
        with recording(HOPPER):
            LAUNCHERS["backward"](Config(112, packed=True), length)
    made = [key for key in walk_launch._walks._known if (True, 4, 112) in key]
    assert len(made) == 3  # dq, dk and dv
    with recording(HOPPER) as launches, only_portable():
        LAUNCHERS["backward"](Config(112, packed=True))
    assert {launch.kernel for launch in launches} == {"walk_kernel"}


@pytest.mark.device
@schedules
@pytest.mark.parametrize("d", [48, 64, 80, 128])
@pytest.mark.parametrize("e", [48, 64, 112, 128, 192, 256])
def test_shapes(d, e, schedule, device):
    check(make_case(Shape(2, 777, 3, d, e), torch.bfloat16, device, "mixed").on(schedule))
    packed = Packed((64, 0, 1, 700, 63, 65), 2, d, e, padding=70, ahead=30)
    check(make_packed(packed, torch.bfloat16, device, "slopes").on(schedule))


@pytest.mark.device
@schedules
def test_caches(schedule, device):
    case = make_packed(PACKED, torch.bfloat16, device).on(schedule)
    want = run(case, grad=False)
    slots = [5, 2, -1, 6]
    inputs, options, cache = cached(case, slots, device=device)
    out, states = case.function(**inputs, **options, output_final_state=True)
    for b, slot in enumerate(slots):
        rows = PACKED.rows(b)
        assert torch.equal(out[rows], want["o"][rows] * (slot >= 0))
        assert torch.equal(states[b], want["state"][b] * (slot >= 0))
    assert not out[: PACKED.ahead].any()
    assert not out[-PACKED.padding :].any()
    assert cache[[0, 1, 3, 4]].isnan().all()


@pytest.mark.device
@schedules
def test_a_state_is_used_only_where_there_is_one(schedule, device):
    case = make_packed(PACKED, torch.bfloat16, device).on(schedule)
    flags = [True, True, False, False]
    first = case.inputs["initial_state"] * torch.tensor(flags, device=device)[:, None, None, None]
    want = run(case.with_inputs(initial_state=first), grad=False)
    slots = [5, 2, 0, 6]
    inputs, options, cache = cached(case, slots, flags, device=device)
    cache[[0, 6]] = float("nan")
    out, _ = case.function(**inputs, **options)
    assert torch.equal(out, want["o"])
    assert torch.equal(cache[slots], want["state"])


@pytest.mark.device
@schedules
def test_other_sequences_and_padding_are_not_read(schedule, device):
    case = make_packed(PACKED, torch.bfloat16, device).on(schedule)
    want = run(case)
    inputs = {name: t.clone() for name, t in case.inputs.items()}
    for name in "qkv":
        for rows in (PACKED.rows(2), slice(0, PACKED.ahead), slice(-PACKED.padding, None)):
            inputs[name][rows] = float("nan")
    got = run(case.with_inputs(**inputs))
    for b in (0, 3):
        for name in ("o", "dq", "dk", "dv"):
            assert torch.equal(got[name][PACKED.rows(b)], want[name][PACKED.rows(b)]), name
        for name in ("state", "dinitial_state"):
            assert torch.equal(got[name][b], want[name][b]), name
    assert not got["o"][: PACKED.ahead].any()
    assert not got["o"][-PACKED.padding :].any()


@pytest.mark.device
def test_a_thread_that_has_not_used_the_device(device):
    """Autograd's comes to the walk before anything else; no tensor map can be made there yet."""
    code = """
import torch
from lightning_attn import build_slopes, lightning_attn_func
q, k, v = (torch.randn(1, 200, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
leaves = [t.requires_grad_() for t in (q, k, v)]
out, _ = lightning_attn_func(*leaves, build_slopes(2).cuda())
dout = torch.ones_like(out)
torch.autograd.grad(out, leaves, dout)
torch.cuda.synchronize()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
