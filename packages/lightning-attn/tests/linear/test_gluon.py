"""The walk for Hopper, run on a CPU by ``_gluon``: numbers, padding, caches, and its barriers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attn_common import Platform
from lightning_attn import api
from lightning_attn._linear import eager, ops
from lightning_attn._linear.tiles import Tile, takes_hopper_walk
from lightning_attn._linked.host.forms import Memory

from .._numerics import Packed, Shape, check, make_case, make_packed, run
from ._varlen import cached

pytestmark = pytest.mark.skipif(not ops.interpreted(), reason="about the interpreter")

# two chunks to a segment
TILE = Tile(64, 64, 4, 3, terms=2, segment=128)
PACKED = Packed((70, 0, 130, 3), 2, 48, 80, padding=70, ahead=30)
schedules = pytest.mark.parametrize("schedule", ["sequential", "parallel"])


@pytest.fixture(params=[64, 128], ids=["narrow", "wide"])
def kernel(request, monkeypatch):
    """The kernel for Hopper, with one warpgroup or with two, for all that it takes."""
    yield from served(monkeypatch, request.param)


@pytest.fixture
def wide_kernel(monkeypatch):
    yield from served(monkeypatch, 128)


def served(monkeypatch, block_e):
    from lightning_attn._linear import launch as linear_launch
    from lightning_attn._linear.hopper import launch as hopper_launch
    from lightning_attn._linear.portable import walk_launch

    from .._linked.gluon import Kernel

    made = Kernel(hopper_launch.hopper_walk_kernel)
    real = walk_launch.Walk.__init__

    def init(walk, *arguments, **options):
        real(walk, *arguments, **options)
        if walk._is_hopper:
            walk._tile = replace(TILE, block_e=block_e)

    monkeypatch.setattr(walk_launch.Walk, "__init__", init)
    hopper = Platform.parse("nvidia:sm_90")
    monkeypatch.setattr(
        walk_launch, "takes_hopper_walk", lambda _, *dims: takes_hopper_walk(hopper, *dims)
    )
    # not of this kernel, and slow to interpret
    monkeypatch.setattr(
        linear_launch.DecayGradientPlan,
        "gradient",
        lambda plan, *given: eager.decay_gradient(*given, plan._scale),
    )
    monkeypatch.setattr(walk_launch, "_walks", Memory())
    for memory in ("_forward", "_packed"):
        monkeypatch.setattr(api, memory, Memory())
    monkeypatch.setattr(hopper_launch, "hopper_walk_kernel", made)
    yield made
    assert made.launches


@pytest.mark.parametrize(
    ("shape", "decay", "schedule"),
    [
        (Shape(1, 100, 2, 48, 80), "mixed", "parallel"),
        (Shape(2, 64, 1, 64, 128), "drawn", "sequential"),  # a chunk exactly
        (Shape(1, 193, 1, 128, 48), "none", "parallel"),  # a tail of one
        (Shape(1, 1, 1, 80, 192), "slopes", "sequential"),
        (Shape(1, 400, 1, 64, 64), "strong", "sequential"),  # more chunks than stages
    ],
    ids=str,
)
def test_fixed_length(shape, decay, schedule, kernel):
    check(make_case(shape, torch.bfloat16, "cpu", decay).on(schedule))


@schedules
def test_packed(schedule, kernel):
    check(make_packed(PACKED, torch.bfloat16, "cpu").on(schedule))


@schedules
def test_without_states(schedule, kernel):
    """What nobody sees is written in one term, and the last segment's not at all."""
    case = make_case(Shape(2, 200, 1, 64, 64), torch.bfloat16, "cpu", state=False).on(schedule)
    leaves = {name: t.clone().requires_grad_() for name, t in case.inputs.items()}
    out, _ = case.function(**leaves, **case.options)
    names = "qkv"
    grads = torch.autograd.grad(out, [leaves[n] for n in names], torch.ones_like(out))
    wide = {name: t.double().requires_grad_() for name, t in case.inputs.items()}
    options = {"scale": case.options["scale"]}
    want, _ = case.reference(**wide, **options)
    exact = torch.autograd.grad(want, [wide[n] for n in names], torch.ones_like(want))
    for got, expected in zip((out, *grads), (want, *exact), strict=True):
        assert (got.double() - expected).norm() <= 2.0**-7 * expected.norm()


@schedules
def test_caches(schedule, kernel):
    case = make_packed(PACKED, torch.bfloat16, "cpu").on(schedule)
    flags = [True, True, True, False]
    first = case.inputs["initial_state"] * torch.tensor(flags)[:, None, None, None]
    want = run(case.with_inputs(initial_state=first), grad=False)
    slots = [5, 2, -1, 6]
    inputs, options, cache = cached(case, slots, flags)
    cache[6] = float("nan")
    out, states = case.function(**inputs, **options, output_final_state=True)
    for b, slot in enumerate(slots):
        rows = PACKED.rows(b)
        assert torch.equal(out[rows], want["o"][rows] * (slot >= 0))
        assert torch.equal(states[b], want["state"][b] * (slot >= 0))
    assert not out[: PACKED.ahead].any()
    assert not out[-PACKED.padding :].any()
    assert cache[[0, 1, 3, 4]].isnan().all()


@schedules
def test_other_sequences_and_padding_are_not_read(schedule, kernel):
    case = make_packed(PACKED, torch.bfloat16, "cpu").on(schedule)
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


def test_either_order(kernel):
    """The copying partition has gone ahead of the others; here it comes last."""
    kernel.reverse = False
    check(make_packed(PACKED, torch.bfloat16, "cpu").on("parallel"))


# function, what it says, what a mistake would be
WAIT_OUT = "out = hopper.warpgroup_mma_wait(TILE.TERMS, deps=(out,))"
WAIT_SCORES = "hopper.warpgroup_mma_wait(TILE.HALVES, deps=(reads.scores,))"
ARRIVE = "barrier_arrive(EMPTY + stage, PARTIES, 4)"
MISTAKES = [
    ("produce", "barrier_sync(EMPTY + stage, PARTIES, 1)", "pass"),
    ("produce", "PANELS * maps.key", "TILE.HALVES * maps.key"),
    ("consume", "mbarrier.wait(pipeline.full.index(stage), step // TILE.STAGES & 1)", "pass"),
    ("consume", "step // TILE.STAGES & 1", "(step // TILE.STAGES & 1) ^ 1"),
    ("_add_scores", WAIT_SCORES, "reads.scores"),
    ("_add_scores", "hopper.fence_async_shared()", "pass"),
    ("consume", WAIT_OUT, "pass"),
    ("consume", WAIT_OUT, f"{WAIT_OUT}; {ARRIVE}"),
    ("consume", ARRIVE, "pass"),
    ("consume", "tma.store_wait(0)", "pass"),
    ("_send", "tma.store_wait(0)", "pass"),
    ("_send", "hopper.fence_async_shared()", "pass"),
    ("_memory", "barriers(TILE.STAGES, 1)", "barriers(TILE.STAGES, 2)"),
]


def mistaken():
    """A case that what is planted must break: more chunks than stages."""
    return make_case(Shape(1, 400, 1, 48, 80), torch.bfloat16, "cpu").on("sequential")


@pytest.mark.parametrize("reverse", [True, False], ids=["copies_first", "copies_last"])
def test_without_a_mistake(reverse, wide_kernel):
    wide_kernel.reverse = reverse
    check(mistaken())


@pytest.mark.mutation
@pytest.mark.parametrize(("function", "right", "wrong"), MISTAKES, ids=lambda x: str(x)[:40])
def test_a_mistake_is_seen(function, right, wrong, wide_kernel):
    wide_kernel.plant(function, right, wrong)
    with pytest.raises((AssertionError, RuntimeError)):
        check(mistaken())
