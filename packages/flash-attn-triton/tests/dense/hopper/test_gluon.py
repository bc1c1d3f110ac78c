"""The forward for Hopper, run on a CPU by ``_gluon``: numbers, and that its barriers matter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
from flash_attn_triton._dense import ops
from flash_attn_triton._dense.hopper_tiles import (
    forward_panels,
    hopper_panel_tile,
    hopper_tile,
)

from ..._linked.budget import assert_same
from ..._numerics import Case, Packed, Shape, check, make_case, make_packed, run
from ._gluon import ARRIVE_V, PACKED, TILES, WAIT_K, caught, forward, reverse

__all__ = ["forward", "reverse"]  # fixtures

pytestmark = pytest.mark.skipif(not ops.interpreted(), reason="about the interpreter")

tiles = pytest.mark.parametrize("tile", TILES)
SERVED = [(64, 64), (128, 128), (256, 256), (96, 96), (192, 192), (192, 128)]


CASES = [
    ("plain", Shape(1, 200, 150, 2, 1, 64), ()),
    ("plain", Shape(1, 70, 100, 1, 1, 64), ("softcap", "causal")),
    ("stages", Shape(2, 130, 200, 2, 1, 128), ("causal",)),
    ("stages", Shape(1, 200, 100, 1, 1, 48), ("window", "alibi", "sinks")),  # rows without a key
    ("pipeline", Shape(2, 200, 100, 2, 2, 128), ()),
    ("pipeline", Shape(1, 300, 70, 1, 1, 80, 48), ("window_left", "softcap")),
    ("long", Shape(1, 500, 200, 2, 1, 64), ("causal", "softcap")),
    ("share", Shape(1, 300, 140, 2, 1, 64), ("sinks",)),
    ("plain", Shape(2, 200, 150, 2, 1, 64), ("dropout",)),
    ("stages", Shape(1, 70, 200, 2, 1, 128), ("causal", "dropout", "sinks")),
    ("pipeline", Shape(1, 300, 100, 4, 2, 64), ("causal", "softcap", "dropout")),
    ("share", Shape(2, 5, 140, 4, 1, 64), ("alibi", "dropout")),  # one head a tile
    ("plain", Shape(1, 200, 220, 1, 1, 64), ("alibi", "sinks")),  # keys on both sides of a block
    ("pipeline", Shape(1, 200, 150, 1, 1, 64), ("alibi", "causal")),
]


@pytest.mark.parametrize(("tile", "shape", "features"), CASES, ids=str)
def test_forward(tile, shape, features, forward, reverse):
    forward(TILES[tile], reverse)
    check(make_case(shape, torch.bfloat16, "cpu", features), grad=False)


@pytest.mark.parametrize(
    ("tile", "shape", "features"),
    [
        ("plain", Shape(1, 150, 300, 2, 1, 64), ()),  # tiles ahead, on both sides and behind
        ("stages", Shape(1, 200, 300, 2, 1, 48), ("window_left", "sinks")),
        ("share", Shape(2, 20, 210, 2, 1, 64), ("causal",)),  # heads share a tile
    ],
    ids=str,
)
def test_near_keys_round_as_near_ones(tile, shape, features, forward):
    """Steep slopes: a number that is as large as a tile is long would round those that weigh."""
    forward(TILES[tile])
    case = make_case(shape, torch.bfloat16, "cpu", features)
    check(case.with_options(alibi_slopes=torch.tensor([2.0, 16.0])), grad=False)


def test_a_distance_rounds_alike_in_tiles_of_one_side_and_of_both():
    """Which one it is depends on the rows that share the tile."""
    from flash_attn_triton._dense.hopper.forward import alibi

    from ..._linked.gluon import as_python, register

    functions = as_python(alibi._one_sided, alibi._two_sided)
    s, first = register(torch.zeros(64, 128)), register(256)
    slopes = register(torch.rand(64, 1))
    for kind, nearest in ((alibi.WHOLE, 127), (alibi.AHEAD, 0)):
        anchor = register(torch.full((64,), nearest))
        want = functions["_two_sided"](s, first, slopes, anchor)
        assert torch.equal(functions["_one_sided"](s, first, slopes, kind, True), want)
        for row, slope in enumerate(slopes[:, 0]):
            one = functions["_one_sided"](s, first, slope, kind, False)
            assert torch.equal(one[0], want[row])


# few queries: heads of a group share a tile, all of them or as many as fit
FEW = [
    ("plain", Shape(2, 1, 150, 8, 2, 64), ("causal", "sinks")),
    ("stages", Shape(1, 20, 70, 4, 1, 48), ("window", "alibi_batch")),
    ("stages", Shape(2, 70, 90, 12, 2, 64), ("causal", "softcap")),
    ("pipeline", Shape(2, 9, 70, 6, 3, 64, 48), ("window_left", "alibi", "sinks")),
    ("share", Shape(1, 3, 40, 32, 1, 64), ("causal",)),
    ("stages", Shape(1, 20, 132, 4, 1, 48), ("alibi",)),
]


@pytest.mark.parametrize(("tile", "shape", "features"), FEW, ids=str)
def test_forward_of_few_queries(tile, shape, features, forward, reverse):
    forward(TILES[tile], reverse)
    case = make_case(shape, torch.bfloat16, "cpu", features)
    check(case, grad=False)
    # a tile for each head: the same arithmetic
    got = run(case, grad=False)
    forward(TILES[tile], reverse)
    group = shape.heads_q // shape.heads_k
    spread = {name: case.inputs[name].repeat_interleave(group, 2) for name in "kv"}
    assert_same(run(case.with_inputs(**spread), grad=False), got)


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("function", "right", "wrong"),
    [
        ("_tokens", "index % (ROWS // PACK)", "index"),
        ("_heads", "// (ROWS // PACK)", "% PACK"),
        ("survey", "W * TOKENS", "W * TILE.ROWS"),
        ("survey", "TILE.WARPGROUPS * TOKENS", "TOKENS"),
        ("survey", "slope[:, None]", "gl.max(slope, 0)"),
        ("write_block", "W * (ROWS // PACK)", "W * ROWS"),
        ("_lse_at", "numbers.heads_q + heads", "numbers.heads_q + block.head"),
        ("finish_block", "tensors.sinks_ptr)", "None)"),
        ("next_tile", "head *= OPTIONS.PACK", "pass"),
        ("produce", "w * TOKENS", "w * TILE.ROWS"),
        ("next_tile", "numbers.heads_q // OPTIONS.PACK", "numbers.heads_q"),
    ],
)
def test_forward_of_few_queries_with_a_mistake(function, right, wrong, forward):
    def serve(reverse):
        forward(TILES["stages"], reverse).plant(function, right, wrong)

    shape = Shape(2, 50, 60, 8, 2, 48)
    case = make_case(shape, torch.bfloat16, "cpu", ("causal", "alibi", "sinks"))
    assert caught(serve, case)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), SERVED)
def test_tiles_that_serve_calls(head_dim, head_dim_v, causal, forward):
    panels = forward_panels(head_dim, head_dim_v, 2, False)
    forward(hopper_panel_tile(panels) if panels.is_cut else hopper_tile(head_dim, causal))
    shape = Shape(1, 270, 400, 1, 1, head_dim, head_dim_v)
    case = make_case(shape, torch.float16, "cpu", ["causal"] if causal else [])
    check(case, grad=False)


def test_tile_that_serves_long_calls(forward):
    forward(hopper_tile(64, True, is_long=True))
    check(make_case(Shape(1, 450, 500, 1, 1, 64), torch.float16, "cpu", ["causal"]), grad=False)


@tiles
@pytest.mark.parametrize(
    "features",
    [("causal", "sinks"), ("window", "alibi"), ("causal", "dropout")],
    ids="-".join,
)
def test_forward_of_packed_tensors(tile, features, forward, reverse):
    """Lengths end inside tiles; one sequence has no query, another more of them than keys."""
    forward(TILES[tile], reverse)
    check(make_packed(PACKED, torch.float16, "cpu", features), grad=False)


# more sequences than are looked at together, some without a query
MANY = Packed((3, 2, 0) * 44 + (90, 1), (4, 2, 3) * 44 + (60, 0), 1, 1, 48, padding=5)


def test_forward_of_many_sequences(forward):
    forward(TILES["stages"])
    check(make_packed(MANY, torch.float16, "cpu", ("causal",)), grad=False)


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("function", "right", "wrong"),
    [
        ("survey", "block.sequence * numbers.heads_q", "block.sequence"),
        ("finish_block", "weight *= numbers.keep_scale", "pass"),
        ("drop_some", "walk.block.len_k - walk.block.len_q", "0"),
        ("dropout_key", "gl.load(rng_state_ptr + 1)", "gl.load(rng_state_ptr)"),
        ("dropout_key", "seed >> 32", "seed"),
        ("drop", "c1 << 16", "c1"),
        ("drop", "upper_right, c0, ", "upper_right, c1, "),
        ("drop", "_place(rows)", "rows"),
        ("fold", "e = drop_some(e, cols, walk, program)", "pass"),
        ("start", "drop_some(e, cols, walk, program)", "e"),
    ],
)
def test_dropout_with_a_mistake(function, right, wrong, forward):
    def serve(reverse):
        forward(TILES["pipeline"], reverse).plant(function, right, wrong)

    features = ("causal", "dropout")
    assert caught(serve, make_packed(PACKED, torch.float16, "cpu", features))


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("function", "right", "wrong"),
    [
        ("find_block", "ends <= place", "ends < place"),
        ("find_block", "before = blocks", "pass"),
        ("find_block", "first += WARP", "first += WARP + 1"),
        ("find_block", "gl.maximum(before, ", "gl.maximum(0, "),
        ("_block_ends", "mask=index <= batch, other=tokens", "mask=index <= batch, other=0"),
        ("next_tile", "sequence < batch, other=numbers.tokens_q", "sequence < batch, other=0"),
    ],
)
def test_forward_of_many_sequences_with_a_mistake(function, right, wrong, forward):
    def serve(reverse):
        forward(TILES["stages"], reverse).plant(function, right, wrong)

    assert caught(serve, make_packed(MANY, torch.float16, "cpu", ("causal",)))


@tiles
def test_forward_reads_nothing_of_others(tile, forward):
    """NaN in other sequences, behind the last one and in keys that no query sees."""
    forward(TILES[tile])
    case = make_packed(PACKED, torch.bfloat16, "cpu", ("window_left",))
    want = run(case, grad=False)
    cleared = {name: t.clone() for name, t in case.inputs.items()}
    for name, starts in (("q", (0, 70, 220)), ("k", (140, 230, 263)), ("v", (140, 230, 263))):
        cleared[name][: starts[1] if name == "q" else starts[0]] = float("nan")
        cleared[name][starts[2] if name == "q" else starts[1] :] = float("nan")
    got = run(case.with_inputs(**cleared), grad=False)
    assert torch.equal(got["out"][70:220], want["out"][70:220])
    assert torch.equal(got["lse"][:, 70:220], want["lse"][:, 70:220])


# head dimensions in two panels, of queries and keys, of values, or of both
PANELS = [
    ("plain", Shape(1, 200, 150, 2, 1, 96), ("causal", "sinks")),
    ("plain", Shape(2, 20, 70, 8, 2, 96), ("causal", "alibi")),  # heads share a tile
    ("pipeline", Shape(2, 150, 100, 2, 1, 72), ("window", "softcap")),
    ("stages", Shape(1, 130, 100, 2, 1, 64, 80), ("window_left", "alibi")),
    ("stages", Shape(1, 130, 100, 1, 1, 160, 96), ()),
    ("share", Shape(1, 150, 140, 2, 1, 160), ("causal", "dropout")),
    ("share", Shape(1, 150, 140, 1, 1, 192, 128), ("causal",)),
    ("share", Shape(1, 150, 70, 1, 1, 64, 80), ()),  # not in the memory of the queries
    ("pipeline", Shape(1, 150, 140, 1, 1, 192), ()),
]


@pytest.mark.parametrize(("tile", "shape", "features"), PANELS, ids=str)
def test_forward_in_panels(tile, shape, features, forward, reverse):
    forward(TILES[tile], reverse)
    check(make_case(shape, torch.bfloat16, "cpu", features), grad=False)


def test_panels_of_a_tensor_that_is_copied(forward):
    """TMA does not read expanded tensors: both panels are those of the copy."""
    forward(TILES["stages"])
    case = make_case(Shape(1, 70, 100, 2, 2, 80), torch.bfloat16, "cpu")
    expanded = {name: case.inputs[name][:, :, :1].expand(-1, -1, 2, -1) for name in "qkv"}
    check(case.with_inputs(**expanded), grad=False)


def test_forward_of_packed_tensors_in_panels(forward):
    forward(TILES["pipeline"])
    packed = PACKED._replace(head_dim=80)
    check(make_packed(packed, torch.float16, "cpu", ("causal", "sinks")), grad=False)


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("function", "right", "wrong"),
    [
        ("_behind", "descs[0].block_type.shape[4]", "0"),
        ("expect_tiles", "nbytes + MORE", "nbytes"),
        ("multiply_rows", "gl.static_range(1, len(a))", "gl.static_range(0)"),
        ("wait_for_values", "wait_for(o, 0)", "wait_for(o, 1)"),
        ("fold", "mma_wait(len(o), ", "mma_wait(len(o) + 1, "),
        ("cross", "mma_wait(len(o), ", "mma_wait(len(o) + 1, "),
        ("copy_tile_out", "if len(descs) > 1", "if len(descs) > 2"),
        ("copy_tile_out", "buffers[1].index(number)", "buffers[1].index(0)"),
        ("fold", "barrier_arrive_after(sums, EMPTY + stage, PARTIES)", "pass"),
        ("rescale", "for panel in o]", "for panel in o[:1]] + list(o[1:])"),
        ("finish", "for panel in o]", "for panel in o[:1]] + list(o[1:])"),
    ],
)
def test_panels_with_a_mistake(function, right, wrong, forward):
    def serve(reverse):
        forward(replace(TILES["pipeline"], ordered=True), reverse).plant(function, right, wrong)

    shape = Shape(1, 300, 100, 1, 1, 96)
    assert caught(serve, make_case(shape, torch.bfloat16, "cpu"))


# function, what it says, what a mistake would be
WAIT_Q = "await_full(pipeline.q_full, count, OWNERS=TILE.WARPGROUPS, W=W)"
ARRIVE_Q = "mbarrier.arrive(pipeline.q_empty.index(buffer), count=1)"
WAIT_V = "await_full(pipeline.v_full, turn - 1)"
MISTAKES = [
    ("stages", "copy_keys", "await_readers(turn, EMPTY, TILE.STAGES_K, PARTIES)", "pass"),
    ("stages", "await_readers", "FIRST + turn % STAGES", "FIRST"),
    ("stages", "drain", "FIRST + (turns - 1 - back) % STAGES", "FIRST"),
    ("stages", "copy_values", "EMPTY + TILE.STAGES_K", "EMPTY"),
    ("stages", "produce", "EMPTY + STAGES_K", "EMPTY"),
    ("stages", "await_empty", "(turn // STAGES & 1) ^ 1", "turn // STAGES & 1"),
    ("stages", "copy_queries", "(count // TILE.BUFFERS_Q & 1) ^ 1", "count // TILE.BUFFERS_Q & 1"),
    ("stages", "produce", "high - 1 - step", "high - step"),
    ("stages", "begin", WAIT_Q, "pass"),
    ("stages", "begin", WAIT_K, "pass"),
    ("stages", "begin", "s = hopper.warpgroup_mma_wait(0, deps=(s,))", "pass"),
    ("stages", "begin", "barrier_arrive(TURN + (W + 1) % TILE.WARPGROUPS, 256, 4)", "pass"),
    ("stages", "fold", WAIT_K, WAIT_K.replace("turn", "turn + TILE.STAGES_K")),
    ("stages", "await_full", "turn // STAGES & 1", "0"),
    ("stages", "fold", WAIT_V, "pass"),
    ("plain", "fold", "mma_wait(len(o), deps=(s,))", "mma_wait(2, deps=(s,))"),
    ("stages", "fold", "o = wait_for_values(o)", "pass"),
    ("stages", "fold", ARRIVE_V, "pass"),
    ("stages", "fold", WAIT_V, WAIT_V + "; " + ARRIVE_V),
    ("stages", "hear", "await_full(pipeline.tile_full, count)", "pass"),
    ("stages", "_receive", "forget(count, program.pipeline)", "pass"),
    ("stages", "write_block", "tma.store_wait(0)", "pass"),
    ("stages", "store_tile", "hopper.fence_async_shared()", "pass"),
    ("stages", "close", ARRIVE_Q, "pass"),
    ("share", "close", "tma.store_wait(0)", "pass"),
    ("stages", "consume", "    tma.store_wait(0)\n    if W", "    if W"),
    ("stages", "consume", "        barrier_sync(TURN, 256, 4)", "        pass"),
    ("stages", "make_pipeline", "barriers(SLOTS, TILE.WARPGROUPS)", "barriers(SLOTS, 1)"),
]


def mistaken() -> Case:
    """A case that what is planted must break: more tiles than buffers, of queries and of keys."""
    return make_case(Shape(1, 700, 200, 1, 1, 48), torch.bfloat16, "cpu", ("causal",))


def growing(steepness: int) -> Case:
    """A case whose maxima grow from tile to tile: by less than a pivot may lag behind, or more."""
    case = make_case(Shape(1, 70, 400, 1, 1, 64), torch.float16, "cpu", ("causal", "sinks"))
    k = case.inputs["k"] * torch.linspace(steepness, 1, 400)[:, None, None]
    return case.with_inputs(k=k.half())


@tiles
@pytest.mark.parametrize("steepness", [20, 200])
def test_maxima_that_grow(tile, steepness, forward):
    forward(TILES[tile])
    check(growing(steepness), grad=False)


def test_builds_for_fpsan_compute_the_same(forward, monkeypatch):
    """They hide keys and multiply in Triton, where others do so in PTX."""
    shape = Shape(1, 70, 90, 1, 1, 64)
    cases = growing(200), make_case(shape, torch.float16, "cpu", ("window", "sinks"))
    forward(TILES["plain"])
    wanted = [run(case, grad=False) for case in cases]
    monkeypatch.setattr(triton.knobs.compilation, "instrumentation_mode", "fpsan")
    for case, want in zip(cases, wanted, strict=True):
        assert_same(run(case, grad=False), want)


@pytest.mark.mutation
@pytest.mark.parametrize("steepness", [20, 200])
@pytest.mark.parametrize(
    ("function", "right", "wrong"),
    [
        ("_rescale_panel", "shrink(o, factors)", "o"),
        ("fold", "l * gl.convert_layout(alpha, L)[:, None]", "l"),
        ("fold", "gl.where(top - m > SLACK, top, m)", "m"),
    ],
)
def test_maxima_that_grow_with_a_mistake(function, right, wrong, steepness, forward):
    def serve(reverse):
        forward(TILES["plain"], reverse).plant(function, right, wrong)

    assert caught(serve, growing(steepness))


@tiles
def test_forward_without_a_mistake(tile, forward, reverse):
    forward(TILES[tile], reverse)
    check(mistaken(), grad=False)


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("tile", "function", "right", "wrong"), MISTAKES, ids=lambda x: str(x)[:40]
)
def test_forward_with_a_mistake(tile, function, right, wrong, forward):
    def serve(reverse):
        forward(TILES[tile], reverse).plant(function, right, wrong)

    assert caught(serve, mistaken())
