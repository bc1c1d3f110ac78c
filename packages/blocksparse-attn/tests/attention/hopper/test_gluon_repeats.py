"""Gradients that repeat, of the kernels for Hopper, run on a CPU by ``_gluon``."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from attn_common import Platform
from blocksparse_attn import BlockSparseLayout
from blocksparse_attn._attention import tiles
from blocksparse_attn._attention.reference import visible_keys
from blocksparse_attn._attention.tiles import suits_hopper
from blocksparse_attn._layout import kept_lists
from blocksparse_attn._linked.host.forms import interpreted
from torch import Tensor

from ..._linked.budget import assert_same
from ..._linked.numerics import compare, run_eager, run_oracle
from ..._numerics import Case, Shape, check, make_case, run, that_repeats, treat_as_short
from ._gluon_backward import both_ways, eager_forward, self_attention

__all__ = ["both_ways", "eager_forward"]  # fixtures

pytestmark = pytest.mark.skipif(not interpreted(), reason="about the interpreter")


@pytest.fixture
def sums(both_ways, eager_forward, monkeypatch):
    """Return a function that has the kernel with sums of dq serve calls, if the choice is that."""
    hopper = Platform.parse("nvidia:sm_90")
    for module in (tiles, kept_lists):
        monkeypatch.setattr(module, "suits_hopper", lambda _, *form: suits_hopper(hopper, *form))
    return both_ways


@pytest.fixture
def repeating(sums, monkeypatch):
    """Return a function that has the kernels serve every backward call, and returns both."""
    from blocksparse_attn._attention.hopper.backward import launch as backward_launch
    from blocksparse_attn._attention.hopper.queries import launch as queries_launch

    from ..._linked.gluon import Kernel

    ticket = torch.zeros(1, dtype=torch.int32)
    real = backward_launch.hopper_query_kernel
    monkeypatch.setattr(queries_launch, "processors", lambda _: 2)
    monkeypatch.setattr(backward_launch, "new_ticket", lambda _: ticket)
    served = []

    def serve(reverse=True):
        rows = Kernel(real, reverse)
        monkeypatch.setattr(backward_launch, "hopper_query_kernel", rows)
        keys = sums(reverse)
        served.extend((keys, rows))
        return keys, rows

    yield serve
    if not any(kernel.faults for kernel in served):
        assert all(kernel.launches for kernel in served)
        assert not ticket.any()


# columns that several programs add to; a chunk, whose first block begins ahead of it; two heads a
# tile, rows ahead of key 0; blocks put together of small ones
CASES = [
    (Shape(1, 260, 260, 2, 1, 64), "local", (64, 64), False, True),
    (Shape(1, 70, 150, 2, 2, 48, 80), "random", (64, 64), True, True),
    (Shape(1, 150, 120, 2, 1, 64), "random", (64, 128), True, False),
    (Shape(1, 130, 130, 2, 1, 64), "local", (16, 16), False, True),
]


def repeating_case(shape, pattern, block, shared, causal) -> Case:
    options = {"shared": shared, "spare": 1, "causal": causal}
    return that_repeats(make_case(shape, torch.bfloat16, "cpu", pattern, block, **options))


@pytest.mark.parametrize(("shape", "pattern", "block", "shared", "causal"), CASES, ids=str)
def test_fixed_length(shape, pattern, block, shared, causal, repeating):
    repeating()
    check(repeating_case(shape, pattern, block, shared, causal))


def test_packed(repeating):
    """Lengths end inside blocks; what no sequence has gets gradients of 0."""
    repeating()
    lengths = 77, 0, 90, 5
    case = self_attention(lengths, 2, 1, 64, torch.float16, "cpu", "random", (64, 64))
    got = check(that_repeats(case))
    for name in ("dq", "dk", "dv"):
        assert not got[name][sum(lengths) :].any()


def test_the_switch_of_pytorch_asks_for_the_same(repeating, monkeypatch):
    repeating()
    monkeypatch.setattr(tiles, "repeats", lambda: True)
    check(make_case(Shape(1, 70, 70, 2, 1, 64), torch.bfloat16, "cpu", "local", (64, 64)))


def any_case(**options) -> Case:
    """A case of short rows, columns in them that several programs add to."""
    return make_case(
        Shape(1, 260, 260, 2, 1, 80), torch.bfloat16, "cpu", "local", (64, 64), spare=1, **options
    )


def test_short_rows_repeat_unasked(repeating):
    """They have the bits of gradients that are to repeat, whichever partition comes first."""
    repeating()
    want = run(that_repeats(any_case()))
    for copies_first in (True, False):
        repeating(copies_first)
        # of a layout that has no plans yet
        assert_same(check(any_case()), want)


def test_short_rows_of_a_packed_call(repeating):
    repeating()
    check(self_attention((77, 90, 5), 2, 1, 80, torch.float16, "cpu", "local", (64, 64)))


def test_short_rows_compile(repeating):
    repeating()
    want = run(any_case())
    case = any_case()
    repeating()
    traced = torch.compile(case.function, fullgraph=True, dynamic=True, backend="aot_eager")
    assert_same(run(case, traced), want)


@pytest.mark.parametrize("way", ["long", "padded", "refused"])
def test_rows_that_have_sums(way, sums, monkeypatch):
    """Long ones, ones with so many slots that they may be, and ones that the forward refuses."""
    from blocksparse_attn._attention.hopper.backward.launch import RowGradients

    def refuse(*_):
        raise AssertionError("dq has a launch of its own")

    monkeypatch.setattr(RowGradients, "__init__", refuse)
    case = any_case(softmax_scale=-0.1 if way == "refused" else 0.1)
    layout = case.options["layout"]
    if way == "long":
        treat_as_short(monkeypatch, 64)
    if way == "padded":
        padded = BlockSparseLayout.from_dense(layout.to_dense(), 64, max_nnz=14 * layout.num_rows)
        case = case.with_options(layout=padded)
    sums()
    check(case)


def test_what_nobody_sees_may_be_nan(repeating):
    """Keys that no row keeps, and queries that see none."""
    repeating()
    block = 16, 16
    kept = torch.rand(2, 10, 10, generator=torch.Generator().manual_seed(0)) < 0.5
    kept[:, 1::3] = False
    kept[..., 2::4] = False
    tokens = 160
    layout = BlockSparseLayout.from_dense(kept, block)
    case = make_case(Shape(1, tokens, tokens, 2, 1, 64), torch.bfloat16, "cpu")
    case = that_repeats(case.with_options(layout=layout))
    seen = visible_keys(layout.to_dense(), block, tokens, tokens, True)
    want = run(case)
    bad = {name: t.clone() for name, t in case.inputs.items()}
    for name in "kv":
        bad[name][:, ~seen.flatten(0, 1).any(0)] = math.nan
    bad["q"][0, ~seen.any(-1).T] = math.nan
    assert_same(run(case.with_inputs(**bad)), want)


ARRIVE_K = "barrier_arrive(EMPTY + stage, PARTIES, 4)"
ARRIVE_V = "barrier_arrive(EMPTY + OPTIONS.STAGES_K + stage_v, PARTIES, 4)"
WAIT_K = "mbarrier.wait(pipeline.k_full.index(stage), turn // OPTIONS.STAGES_K & 1)"
WAIT_V = "mbarrier.wait(pipeline.v_full.index(stage_v), turn // OPTIONS.STAGES_V & 1)"
WAIT_DP = "dp = hopper.warpgroup_mma_wait(0, deps=(dp,))"
WAIT_DQ = "dq = hopper.warpgroup_mma_wait(0, deps=(dq,))"
TURN_OF_0 = "turn = program.index * 0"
# whether the kernel is that of dq
MISTAKES = [
    (True, "copy_blocks", "barrier_sync(ROOM + stage, PARTIES, 1)", "pass"),
    (True, "copy_blocks", "= EMPTY + OPTIONS.STAGES_K if OF_V", "= EMPTY if OF_V"),
    (True, "copy_queries", "mbarrier.wait(pipeline.q_empty.index(w), (count & 1) ^ 1)", "pass"),
    (True, "copy_queries", "+ tensors.dout_desc.block_type.nbytes", ""),
    (True, "produce", "items = coming", "pass"),
    (True, "_walk", WAIT_K, "pass"),
    (True, "_walk", WAIT_V, "pass"),
    (True, "_walk", "s = hopper.warpgroup_mma_wait(1, deps=(s,))", "pass"),
    (True, "_walk", "s = hide(s, entries, rows, OPTIONS)", "pass"),
    (True, "_walk", WAIT_DP, "pass"),
    (True, "_walk", WAIT_DP, ARRIVE_V + "; " + WAIT_DP),
    (True, "_walk", WAIT_DQ, ARRIVE_K + "; " + WAIT_DQ),
    (True, "_walk", WAIT_DQ, "pass"),
    (True, "make_dq", "mbarrier.wait(pipeline.q_full.index(W), tile_count & 1)", "pass"),
    (True, "make_dq", "mbarrier.arrive(pipeline.q_empty.index(W), count=1)", "pass"),
    (True, "make_dq", "dq * numbers.scale", "dq"),
    (True, "send", "hopper.fence_async_shared()", "pass"),
    (False, "walk", "dk, s = hopper.warpgroup_mma_wait(0, deps=(dk, s))", "pass"),
    (False, "walk", "dv = hopper.warpgroup_mma_wait(1, deps=(dv,))", "pass"),
    (False, "walk_apart", "dk = hopper.warpgroup_mma_wait(1, deps=(dk,))\n            b", "b"),
    (False, "_leave", "pass_pieces(W, program, tensors, numbers, OPTIONS)", "pass"),
    (False, "turn_of", "first = program.index", "first = program.index - 1"),
]


def mistaken() -> Case:
    """A case that what is planted must break: of more steps than stages."""
    shape = Shape(1, 600, 700, 2, 1, 48)
    return repeating_case(shape, "local", (64, 64), False, True)


@functools.cache
def wanted() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return what the oracle gives of that case, and what eager code does."""
    oracle = run_oracle(mistaken())
    return oracle, run_eager(mistaken(), oracle)


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("of_dq", "function", "right", "wrong"), MISTAKES, ids=lambda x: str(x)[:40]
)
def test_a_mistake_is_seen(of_dq, function, right, wrong, repeating):
    """By one order of the partitions or the other."""
    results = wanted()
    for copies_first in (True, False):
        keys, rows = repeating(copies_first)
        (rows if of_dq else keys).plant(function, right, wrong)
        try:
            case = mistaken()
            compare(case, run(case), *results)
        except (AssertionError, RuntimeError):
            return
    raise AssertionError("not seen")
