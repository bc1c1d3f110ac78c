"""Caches of integers, and new keys beside the cache, in the kernels for Hopper, run on a CPU."""

from __future__ import annotations

import pytest
import torch
from prefix_prefill._paged import ops

from ..._linked.budget import Maker, assert_same
from ..._numerics import NAN, Case, Problem, check, make_case, run, run_oracle
from .._quantised import quantise

pytestmark = pytest.mark.skipif(not ops.interpreted(), reason="about the interpreter")

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FEW = ((70, 150), (1, 90), (0, 5), (40, 20))
WIDE = "prefill_wide_kernel"
HALF, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
INTEGERS = [
    (Problem(FEW, 4, 2, 64, page=16, padding=7), BF16, "int8", HALF, (), (-1, -1)),
    (Problem(FEW[:2], 3, 1, 80, page=1), HALF, "int8", FP32, ("full", "sinks"), (40, 3)),
    (Problem(FEW, 2, 2, 128, page=48), BF16, "int4", BF16, ("alibi",), (-1, 0)),
    (Problem(FEW[1:], 4, 1, 256, page=64), HALF, "int4", HALF, ("softcap",), (20, 0)),
    (Problem(FEW[::3], 5, 1, 96, page=544), BF16, "int4", FP32, ("sinks", "softcap"), (-1, -1)),
    (Problem(FEW[:2], 2, 1, 48, page=5), BF16, "int8", FP32, ("full",), (7, 7)),
]


@pytest.mark.parametrize(
    ("problem", "dtype", "kind", "scale_dtype", "features", "window"), INTEGERS, ids=str
)
def test_a_cache_of_integers(problem, dtype, kind, scale_dtype, features, window, serve):
    serve(problem.page < 48, name=WIDE, wideners=1 + (problem.page in (1, 64, 544)))
    case = quantise(make_case(problem, dtype, "cpu", features), kind, scale_dtype)
    check(case.with_options(num_splits=1, window_size=window))


@pytest.mark.parametrize("dense", [False, True])
def test_tiles_of_integers_that_serve_calls(dense, serve):
    serve(block_n=128, name=WIDE, wideners=1 + dense)
    problem = Problem(((70, 400), (17, 17)), 2, 1, 128, 16, dense=dense)
    case = quantise(make_case(problem, HALF, "cpu"), "int8", HALF)
    check(case.with_options(num_splits=1, window_size=(150, 0)))


# of values, by pages of 16 from the last one on, which is walked first
SIZES = [
    (1e-30,),
    (1e30,),
    (1e-9, 1e-9, 1e3, 1e3),
    (1e10, 1e10, 1e-20, 1e-20),
    (1.0, 1.0, *[0.0] * 8, 1.0, 1.0, 1e-3),
    (1.0, *[0.0] * 12),
    (0.0,),
]


@pytest.mark.parametrize("sizes_of_pages", SIZES, ids=str)
def test_scales_of_values_of_any_size(sizes_of_pages, serve):
    """Weights in fp16 hold few such sizes; here they change from tile to tile, too."""
    serve(name=WIDE)
    case = quantise(make_case(Problem(((40, 208),), 2, 1, 48), HALF, "cpu"), "int8", FP32)
    sizes = torch.ones(case.inputs["v_scale_cache"].shape)
    for n, page in enumerate(case.options["block_table"][0, :13].flip(0).tolist()):
        sizes[page] = sizes_of_pages[n % len(sizes_of_pages)]
    case = case.with_inputs(v_scale_cache=case.inputs["v_scale_cache"] * sizes)
    case = case.with_options(num_splits=1)
    got = case(out=torch.empty(40, 2, 48))["out"].double()
    want = run_oracle(case)["out"]
    assert (got - want).abs().max() <= 2e-3 * want.abs().max()


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("dense", [False, True])
def test_poison_of_a_cache_of_integers(kind, dense, serve):
    """NaN in scales of slots that nobody sees, and pages that are gone."""
    serve(name=WIDE)
    problem = Problem(((70, 200),), 2, 1, 64, 16, dense=dense)
    case = quantise(make_case(problem, BF16, "cpu"), kind)
    case = case.with_options(num_splits=1, window_size=(50, 0))
    want = run(case)
    unseen = 200 - 70 - 50
    table = case.options["block_table"].clone()
    bad = {name: case.inputs[name].clone() for name in ("k_scale_cache", "v_scale_cache")}
    assert all(scales.isnan().any() for scales in bad.values())
    for scales in bad.values():
        for key in range(unseen):
            scales[table[0, key // 16], key % 16] = NAN
    table[0, : unseen // 16] = 2**24
    table[0, -(-problem.cached(0) // 16) :] = -(2**24)
    assert_same(run(case.with_inputs(**bad).with_options(block_table=table)), want)


# ---- new keys beside the cache

CHUNKS = ((130, 300), (1, 90), (0, 5), (33, 33), (70, 71), (40, 200))
NEW = [
    (Problem(CHUNKS, 4, 2, 64, page=16, padding=7), (), (-1, -1)),
    (Problem(CHUNKS, 3, 1, 48, page=48), ("alibi", "sinks"), (-1, 0)),
    (Problem(CHUNKS[:4], 8, 1, 128, page=64), ("full", "softcap"), (-1, -1)),
    (Problem(CHUNKS, 2, 2, 80, page=16), (), (14, -1)),
    (Problem(CHUNKS, 4, 1, 256, page=48), ("full", "sinks"), (61, 3)),
    (Problem(CHUNKS[2:], 2, 1, 64, page=544, padding=3), ("full", "alibi_batch"), (30, 14)),
    (Problem(CHUNKS, 16, 1, 64, page=16), ("full",), (33, -1)),
]


@pytest.mark.parametrize(("problem", "features", "window"), NEW, ids=str)
def test_new_keys(problem, features, window, serve, reverse):
    serve(reverse)
    case = make_case(problem._replace(dense=True), BF16, "cpu", features)
    check(case.with_options(num_splits=1, window_size=window))


@pytest.mark.parametrize("left", [14, 17, 20, 31, 40])
@pytest.mark.parametrize("context", [1, 15, 16, 37, 64])
def test_a_window_that_begins_where_the_cache_ends(context, left, serve):
    """Copies leave out what is ahead of the window and, in the same slots, behind the context."""
    serve()
    lengths = ((100, 100 + context), (20, 20 + context))
    case = make_case(Problem(lengths, 8, 1, 64, 32, dense=True), HALF, "cpu")
    case = case.with_options(num_splits=1, window_size=(left, 0))
    check(case)
    want = run(case)
    bad = {name: case.inputs[name].clone() for name in ("k_cache", "v_cache")}
    table = case.options["block_table"]
    for b in range(2):
        for key in range(max(0, context - left)):
            for cache in bad.values():
                cache[table[b, key // 32], key % 32] = NAN
    assert_same(run(case.with_inputs(**bad)), want)


@pytest.mark.parametrize(
    ("stored", "scales", "features"),
    [
        (E4M3, "sequences", ()),
        (E5M2, "one", ("softcap", "sinks")),
        (E4M3, "none", ("alibi",)),
        ("int8", None, ("sinks",)),
        ("int4", None, ("full",)),
    ],
    ids=str,
)
@pytest.mark.parametrize("window", [(-1, -1), (40, 2)], ids=str)
def test_new_keys_beside_a_cache_of_fewer_bits(stored, scales, features, window, serve):
    """New keys and values have no scale."""
    serve(window[0] < 0, name=WIDE, wideners=1 + (features == () or stored == "int8"))
    problem = Problem(CHUNKS, 4, 2, 64, page=7, dense=True)
    if scales is None:
        case = quantise(make_case(problem, HALF, "cpu", features), stored)
    else:
        case = make_case(problem, BF16, "cpu", features, cache_dtype=stored)
    if scales in ("sequences", "one"):
        m = Maker("cpu", torch.float32, 7)
        scale = m.uniform(len(CHUNKS), 2, low=0.5, high=2.0)
        scale[::2] *= -1
        scale = scale if scales == "sequences" else scale[:1, :1].flatten()
        case = case.with_options(k_descale=scale, v_descale=-2.0 * scale)
    check(
        case.with_options(
            num_splits=1, window_size=window if "full" in features else (window[0], -1)
        )
    )


def test_the_new_keys_of_others_are_not_read(serve):
    serve()
    problem = Problem(((130, 300), (70, 200), (40, 100)), 2, 1, 64, 16, dense=True, padding=9)
    case = make_case(problem, BF16, "cpu").with_options(num_splits=1)
    want = run(case)
    bad = {name: case.inputs[name].clone() for name in "qkv"}
    for x in bad.values():
        x[:130] = x[200:] = NAN
    got = run(case.with_inputs(**bad))
    assert torch.equal(got["out"][130:200], want["out"][130:200])
    assert torch.equal(got["lse"][:, 130:200], want["lse"][:, 130:200])


# ---- mistakes


def chunks_beside_integers() -> Case:
    """Heads, tiles, and slots differ in their scales; there are more tiles than buffers."""
    problem = Problem(((150, 350), (70, 115)), 4, 2, 48, 16, dense=True)
    case = quantise(make_case(problem, HALF, "cpu"), "int8", FP32)
    size = torch.rand(case.inputs["k_scale_cache"].shape, generator=torch.Generator()) * 4
    scales = {name: case.inputs[name] * size for name in ("k_scale_cache", "v_scale_cache")}
    case.options["block_table"][:, 13:] = 2**24
    return case.with_inputs(**scales).with_options(num_splits=1, window_size=(170, -1))


def chunks_beside_fp8() -> Case:
    case = make_case(Problem(((150, 350), (70, 115)), 4, 2, 48, 16, dense=True), BF16, "cpu")
    case = case.with_inputs(**{n: case.inputs[n].to(E4M3) for n in ("k_cache", "v_cache")})
    scale = torch.tensor([[0.5, -2.0], [1.5, 0.25]])
    return case.with_options(num_splits=1, k_descale=scale, v_descale=scale)


def chunks() -> Case:
    case = make_case(Problem(((150, 350), (70, 115)), 8, 1, 48, 16, dense=True), BF16, "cpu")
    case.options["block_table"][:, 13:] = 2**24
    return case.with_options(num_splits=1, window_size=(55, -1))


MISTAKES = [
    (chunks_beside_integers, "read_scales", "(key < seen.last)", "(key < 2**20)"),
    (chunks_beside_integers, "read_scales", "(key % TILE.PAGE)", "(key * 0)"),
    (chunks_beside_integers, "_pointers_to", "head * strides.head", "0"),
    (chunks_beside_integers, "_bring", "(last - step - 1) * N", "(last - step) * N"),
    (chunks_beside_integers, "put_scales", "2 * stage + 1", "1"),
    (chunks_beside_integers, "put_scales", "2 * stage)", "0)"),
    (chunks_beside_integers, "_scores_of", "s * k_scale[None, :]", "s"),
    (chunks_beside_integers, "_weighted", "e * scale[None, :]", "e"),
    (chunks_beside_integers, "_weighted", "index(2 * stage + 1)", "index(2 * stage)"),
    (chunks_beside_integers, "_attend", "alpha * (unit / new_unit)", "alpha"),
    (chunks_beside_integers, "_finish", "weight * softmax.unit", "weight"),
    (chunks_beside_integers, "_attend", "unit, top = new_unit, new_top", "top = new_top"),
    (chunks_beside_integers, "_bring_new", "(ones, ones, stage,", "(ones, ones, 0,"),
    (chunks_beside_integers, "_bring_new", "= _wait(half, turn, TILE)", "= turn % half.stages"),
    (chunks_beside_integers, "_bring", "= _wait(half, turn, TILE)", "= turn % half.stages"),
    (chunks_beside_fp8, "_attend", "step == tiles.cached", "step == tiles.cached + 1"),
    (chunks_beside_fp8, "_scores_of", "flips & (tile < tiles.new)", "flips"),
    (chunks_beside_fp8, "_scores_of", "gl.where(tile < tiles.new, scale, scores.scale)", "scale"),
    (chunks, "tile_of", "tiles.new - 1 - step", "tiles.new - step"),
    (chunks, "tile_of", "tile + tiles.cached", "tile"),
    (chunks, "keys_of", "tiles.context - tiles.new * N", "0"),
    (chunks, "keys_of", "tiles.shift", "0"),
    (chunks, "keys_of", "gl.where(tile < tiles.new, tiles.context, len_k)", "len_k"),
    (chunks, "_tiles_with_new", "first % PIECE", "0"),
    (chunks, "_tiles_with_new", "first += gl.where(first < context, 0, gap)", "first += gap"),
    (chunks, "_tiles_with_new", "whole += gl.where(whole < context, 0, gap)", "whole += gap - N"),
    (chunks, "_tiles_with_new", "gl.minimum(gl.cdiv(whole, N), right)", "0"),
    (chunks, "_copy_half", "+ walk.tiles.shift", ""),
    (chunks, "_copy_half", "number >= 0", "number > 0"),
    (chunks, "copy_new", "q_start + key", "key"),
    (chunks, "copy_new", "number * TILE.BLOCK_N", "0"),
    (chunks, "seen_of", "first - last, len_k - last", "first - last, len_k"),
    (chunks, "seen_of", "first - last, len_k - last", "first, len_k - last"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "wideners"),
    [
        (chunks, 0),
        (chunks_beside_fp8, 1),
        (chunks_beside_fp8, 2),
        (chunks_beside_integers, 1),
        (chunks_beside_integers, 2),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_without_a_mistake(make, wideners, serve, reverse):
    serve(reverse, name="prefill_kernel" if make is chunks else WIDE, wideners=wideners)
    check(make())


# of two warpgroups that widen
TWO = [
    ("bring_values", "drain(turn, EMPTY + TILE.STAGES_K", "drain(0, EMPTY + TILE.STAGES_K"),
    ("bring_values", "turn = _bring(", "_bring("),
    ("pipeline_of", "TILE.WARPGROUPS + (TILE.WIDENERS == 2)", "2"),
    ("receive", "mbarrier.wait(pipeline.tile_full.index(slot), count // SLOTS & 1)", "pass"),
]


@pytest.mark.mutation
@pytest.mark.parametrize(("function", "right", "wrong"), TWO, ids=lambda x: x[:40])
def test_a_mistake_of_two_that_widen_is_seen(function, right, wrong, serve):
    seen = False
    for reverse in (True, False):
        serve(reverse, name=WIDE, wideners=2).plant(function, right, wrong)
        try:
            check(chunks_beside_fp8())
        except (AssertionError, RuntimeError):
            seen = True
    assert seen


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("make", "function", "right", "wrong"), MISTAKES, ids=lambda x: getattr(x, "__name__", x)[:40]
)
def test_a_mistake_is_seen(make, function, right, wrong, serve):
    seen = False
    name = "prefill_kernel" if make is chunks else WIDE
    for reverse in (True, False):
        serve(reverse, name=name).plant(function, right, wrong)
        try:
            check(make())
        except (AssertionError, RuntimeError):
            seen = True
    assert seen
