"""The forward in FP8 for Hopper, run on a CPU by ``_gluon``: numbers, and that barriers matter."""

from __future__ import annotations

import math
import os
import random
from dataclasses import replace

import pytest
import torch
from flash_attn_triton._dense import ops
from flash_attn_triton._dense.hopper_tiles import HopperTile, hopper_tile

from ..._linked.budget import Maker, assert_same, offsets
from ..._numerics import Case, Shape, run
from .._fp8 import assert_accurate, make
from ._gluon import ARRIVE_V, WAIT_K, forward, reverse

__all__ = ["forward", "reverse"]  # fixtures

pytestmark = pytest.mark.skipif(not ops.interpreted(), reason="about the interpreter")

E4M3 = torch.float8_e4m3fn
# as the tile that serves calls, but for the keys of a step: short sequences are to have many
TILE = HopperTile(3, 32, 2, 3)
FEATURES = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (70, 20)},
    "window_left": {"window_size": (40, -1)},
    "softcap": {"causal": True, "softcap": 2.0},
}


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize(
    "shape",
    [
        Shape(1, 150, 200, 2, 1, 128),
        Shape(2, 200, 70, 1, 1, 48),
        Shape(1, 100, 128, 1, 1, 64),  # whole tiles of keys
    ],
)
def test_forward(shape, name, forward, reverse):
    forward(TILE, reverse)
    assert_accurate(make(shape, E4M3, "cpu", "per_head", **FEATURES[name]), E4M3)


@pytest.mark.parametrize("seed", range(int(os.environ.get("FLASH_ATTN_TRITON_EXAMPLES", "24"))))
def test_random_lengths_and_windows(seed, forward):
    """A warpgroup leaves out tiles of keys: where they begin and end must not matter."""
    pick = random.Random(seed)
    stages = pick.randint(2, 4), pick.randint(2, 4)
    forward(HopperTile(pick.choice((2, 3)), pick.choice((32, 64)), *stages), pick.random() < 0.5)
    tokens_q = pick.choice((1, 2, 50, 63, 64, 65, 128, 150, 192, 193, 200, 390))
    tokens_k = pick.choice((1, 31, 32, 33, 64, 70, 100, 128, 150, 200, 256))
    shape = Shape(1, tokens_q, tokens_k, pick.choice((1, 2, 4)), 1, pick.choice((48, 64, 128)))
    window = pick.choice((-1, 0, 5, 30, 100)), pick.choice((-1, 0, 3, 20, 90))
    assert_accurate(make(shape, E4M3, "cpu", "per_head", window_size=window), E4M3)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_the_tile_that_serves_calls(causal, forward):
    forward(hopper_tile(128, causal, itemsize=1))
    case = make(Shape(1, 270, 700, 2, 1, 128), E4M3, "cpu", "scalar", causal=causal)
    assert_accurate(case, E4M3)


@pytest.mark.parametrize("widths", [(256, 256), (48, 192)], ids=str)
def test_wide_heads(widths, forward, reverse):
    """Products of 64 columns of the values at a time."""
    forward(replace(hopper_tile(256, False, itemsize=1), block_n=32), reverse)
    d, dv = widths
    case = make(Shape(1, 130, 100, 2, 1, d), E4M3, "cpu", "scalar", causal=True)
    v = Maker("cpu", torch.float32, seed=7).randn(1, 100, 1, dv).to(E4M3)
    assert_accurate(case.with_inputs(v=v), E4M3)


def test_sinks_and_alibi(forward, reverse):
    forward(TILE, reverse)
    m = Maker("cpu", torch.float32, seed=3)
    case = make(
        Shape(2, 150, 200, 4, 2, 64),
        E4M3,
        "cpu",
        "per_head",
        sinks=m.randn(4),
        alibi_slopes=m.uniform(2, 4, low=0.01, high=0.1),
        causal=True,
    )
    assert_accurate(case, E4M3)


@pytest.mark.parametrize("tokens", [1, 50])
def test_few_queries(tokens, forward, reverse):
    """Heads of a group share a tile."""
    forward(TILE, reverse)
    sinks = Maker("cpu", torch.float32, seed=4).randn(8)
    shape = Shape(2, tokens, 90, 8, 2, 64)
    case = make(shape, E4M3, "cpu", "per_head", sinks=sinks, causal=True)
    assert_accurate(case, E4M3)


@pytest.mark.parametrize("sign", [(-1, 1), (1, -1), (0, 1)], ids=str)
def test_negative_and_zero_descales(sign, forward):
    forward(TILE)
    case = make(Shape(1, 150, 200, 4, 2, 64), E4M3, "cpu", "per_head", causal=True)
    changes = {
        f"{name}_descale": case.options[f"{name}_descale"] * torch.tensor([1.0, factor])
        for name, factor in zip("qk", sign, strict=True)
    }
    assert_accurate(case.with_options(**changes), E4M3)


@pytest.mark.parametrize("window_size", [(-1, -1), (-1, 0), (40, 0)], ids=str)
def test_packed_tensors_are_their_sequences(window_size, forward, reverse):
    """Bit for bit; then with NaN in keys that no query sees."""
    forward(TILE, reverse)
    lengths_q, lengths_k, used = (130, 0, 200, 70), (100, 5, 150, 40), (90, 3, 150, 33)
    m = Maker("cpu", torch.float32)
    q, k, v = (
        m.randn(sum(lengths) + 20, heads, 64).to(E4M3)
        for lengths, heads in ((lengths_q, 2), (lengths_k, 1), (lengths_k, 1))
    )
    options = {"window_size": window_size, "k_descale": m.uniform(4, 1, low=0.5, high=1.5)}
    ends = offsets(lengths_q, "cpu"), offsets(lengths_k, "cpu")
    case = Case(
        {"q": q, "k": k, "v": v},
        {
            "cu_seqlens_q": ends[0],
            "cu_seqlens_k": ends[1],
            "max_seqlen_q": 200,
            "max_seqlen_k": 150,
            "seqused_k": torch.tensor(used, dtype=torch.int32),
            **options,
        },
        packed=True,
    )
    want = run(case, grad=False)
    assert not want["out"][sum(lengths_q) :].any()
    unseen = torch.ones(len(k), dtype=torch.bool)
    for b, (n, count) in enumerate(zip(lengths_q, used, strict=True)):
        tokens = slice(int(ends[0][b]), int(ends[0][b]) + n)
        first = int(ends[1][b])
        if n:
            keys = slice(first, first + count)
            alone = Case(
                {"q": q[None, tokens], "k": k[None, keys], "v": v[None, keys]},
                {**options, "k_descale": options["k_descale"][b : b + 1]},
            )
            got = run(alone, grad=False)
            assert torch.equal(got["out"][0], want["out"][tokens])
            assert torch.equal(got["lse"][0], want["lse"][:, tokens])
        ahead = 0 if window_size[0] < 0 else max(0, count - n - window_size[0])
        unseen[first + ahead : first + count] = n == 0
    bad = {"k": k.view(torch.uint8).clone(), "v": v.view(torch.uint8).clone()}
    for t in bad.values():
        t[unseen] = 0x7F  # NaN
    poisoned = case.with_inputs(**{name: t.view(E4M3) for name, t in bad.items()})
    assert_same(run(poisoned, grad=False), want)


def test_rows_without_a_key(forward, reverse):
    forward(TILE, reverse)
    case = make(Shape(1, 300, 70, 2, 1, 64), E4M3, "cpu", "scalar", causal=True)
    got = run(case, grad=False)
    assert not got["out"][:, :230].any()
    assert (got["lse"][:, :, :230] == -math.inf).all()


WAIT_V = "await_full(pipeline.v_full, turn)"
# function, what it says, what a mistake would be
MISTAKES = [
    ("walk_fp8", "state, right, high,", "state, right, high - 1,"),
    ("walk_fp8", "walk.high - high", "0"),
    ("walk_fp8", "low - walk.low", "0"),
    ("_own_tiles", "W * TOKENS", "0"),
    ("_own_tiles", "first_row < block.len_q", "first_row + TOKENS < block.len_q"),
    ("_own_tiles", "block.len_k // TILE.BLOCK_N", "gl.cdiv(block.len_k, TILE.BLOCK_N)"),
    ("_own_tiles", "(OPTIONS.HAS_LEFT or OPTIONS.HAS_RIGHT)", "OPTIONS.HAS_RIGHT"),
    ("_pass_by", WAIT_V, "pass"),
    ("_pass_by", "turn += 1", "pass"),
    ("walk_fp8", "l * UNIT", "l"),
    ("_fold", WAIT_K, "pass"),
    ("_fold", "s = hopper.warpgroup_mma_wait(0, deps=(s,))", "pass"),
    ("_fold", WAIT_K, WAIT_K.replace("turn", "turn + TILE.STAGES_K")),
    ("_fold", WAIT_V, "pass"),
    ("_fold", ARRIVE_V, "pass"),
    ("_fold", WAIT_V, WAIT_V + "; " + ARRIVE_V),
    ("_fold", "add_product(o, alpha,", "add_product(o, alpha * 0.0 + 1.0,"),
    ("_fold", "(stop - 1 - step)", "(stop - step)"),
    ("_fold", "gl.where(m_new == NEG_INF, 0.0, m_new)", "m_new"),
    ("add_product", "part = hopper.warpgroup_mma_wait(0, deps=(part,))", "pass"),
    ("add_product", "+ part", "- part"),
    ("pack", "[0, 1, 3, 2, 4]", "[0, 1, 3, 4, 2]"),
    ("scale_queries", "-1.0, scale", "1.0, scale"),
    ("scale_queries", "hopper.fence_async_shared()", "pass"),
    ("factors_of", "// GROUP)", "// 1)"),
]


# warpgroups that pass tiles by run as far ahead as stages let them
MISTAKEN = replace(TILE, stages_v=6)


def assert_no_mistake() -> None:
    """Run what a mistake must break: more tiles than stages, rows without a key, no mask."""
    case = make(Shape(1, 500, 400, 2, 1, 48), E4M3, "cpu", "per_head", window_size=(200, 0))
    assert_accurate(case.with_options(q_descale=-case.options["q_descale"]), E4M3)
    assert_accurate(make(Shape(1, 500, 400, 1, 1, 48), E4M3, "cpu", "scalar", causal=True), E4M3)
    assert_accurate(make(Shape(1, 70, 50, 1, 1, 48), E4M3, "cpu", "scalar"), E4M3)
    left = make(Shape(1, 70, 64, 1, 1, 48), E4M3, "cpu", "scalar", window_size=(5, -1))
    assert_accurate(left, E4M3)


def test_forward_without_a_mistake(forward, reverse):
    forward(MISTAKEN, reverse)
    assert_no_mistake()


@pytest.mark.mutation
@pytest.mark.parametrize(("function", "right", "wrong"), MISTAKES, ids=lambda x: str(x)[:40])
def test_forward_with_a_mistake(function, right, wrong, forward):
    def is_seen(reverse):
        forward(MISTAKEN, reverse).plant(function, right, wrong)
        try:
            assert_no_mistake()
        except (AssertionError, RuntimeError):
            return True
        return False

    assert is_seen(True) or is_seen(False)
