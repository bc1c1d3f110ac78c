"""The kernels for trees on Hopper, run on a CPU: numbers, and that what they hand over matters."""

from __future__ import annotations

import pytest
import torch
from flash_attn_triton._dense import ops as dense_ops
from flash_attn_triton._dense.hopper_tiles import HopperBackwardTile
from flash_attn_triton._linked.host.forms import Memory
from flash_attn_triton._linked.host.operators import structured
from flash_attn_triton._tree import ops as tree_ops
from flash_attn_triton._tree.call import TreeCall
from flash_attn_triton._tree.eager import tree_forward

from .._linked.numerics import compare, run, run_eager, run_oracle
from ..dense.hopper._gluon import TILES
from ._trees import Case, Tree, make

NAN = float("nan")

pytestmark = pytest.mark.skipif(not dense_ops.interpreted(), reason="about the interpreter")

# lengths are against tiles of 32 keys, and of 128 or 192 queries
CHAIN = Tree((40, 1, 64, 140), (-1, 0, 1, 2), 1, 1, 48)
STAR = Tree((70, 33, 0, 130, 1), (-1, 0, 0, 0, 0), 2, 1, 64, padding=3)
# numbered level by level, with two roots and an empty segment in between
LEVELS = Tree((33, 64, 2, 40, 0, 96, 20), (-1, -1, 0, 1, 0, 2, 4), 2, 2, 40, 56)
# more segments than a search looks at together
MANY = Tree((3, 2, 0) * 11 + (70,), (-1, *(0,) * 31, 30, 4), 1, 1, 48, padding=5)


@pytest.fixture
def serve(monkeypatch):
    """Return a function that has the kernels for Hopper serve every call, in two programs."""
    from flash_attn_triton._tree import launch as tree_launch
    from flash_attn_triton._tree.hopper import launch as hopper_launch

    from .._linked.gluon import Kernel

    real = hopper_launch.tree_forward_kernel
    ticket = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(tree_launch, "takes_hopper_forward", lambda *_: True)
    monkeypatch.setattr(hopper_launch, "multiprocessors", lambda _: 2)
    monkeypatch.setattr(hopper_launch, "new_ticket", lambda _: ticket)
    kernels = []

    def serve(tile, reverse=True):
        monkeypatch.setattr(tree_launch, "_plans", Memory())
        kernels.append(Kernel(real, reverse))
        monkeypatch.setattr(hopper_launch, "hopper_tile", lambda *_: tile)
        monkeypatch.setattr(hopper_launch, "tree_forward_kernel", kernels[-1])
        return kernels[-1]

    yield serve
    assert all(kernel.launches for kernel in kernels)
    assert not ticket.any() or any(kernel.faults for kernel in kernels)


@pytest.fixture
def serve_gradients(monkeypatch):
    """Return a function that has the kernel for Hopper serve every backward call."""
    from flash_attn_triton._tree import launch as tree_launch
    from flash_attn_triton._tree.hopper import launch as hopper_launch

    from .._linked.gluon import Kernel

    def eager(*arguments):
        call = structured(TreeCall, arguments)
        return tree_forward(call, call.cu_seqlens.tolist(), call.parents.tolist())

    real = hopper_launch.tree_backward_kernel
    monkeypatch.setattr(tree_ops, "_forward_triton", eager)
    monkeypatch.setattr(tree_launch, "takes_hopper_backward", lambda *_, **__: True)
    kernels = []

    def serve(tile, reverse=True, shares=1):
        monkeypatch.setattr(tree_launch, "_plans", Memory())
        kernels.append(Kernel(real, reverse))
        monkeypatch.setattr(hopper_launch, "least_shares", lambda *_: shares)
        monkeypatch.setattr(hopper_launch, "hopper_backward_tile", lambda *_: tile)
        monkeypatch.setattr(hopper_launch, "tree_backward_kernel", kernels[-1])
        return kernels[-1]

    yield serve
    assert all(kernel.launches for kernel in kernels)


def check(case: Case, grad: bool) -> None:
    """Hold the results to their budgets."""
    oracle = run_oracle(case, grad=grad)
    compare(case, run(case, grad=grad), oracle, run_eager(case, oracle, grad=grad))


FORWARD = [
    ("stages", CHAIN, (), True),
    ("stages", CHAIN, (), False),
    ("plain", STAR, ("sinks",), True),
    ("share", LEVELS, (), False),
    ("pipeline", LEVELS, ("sinks", "softcap"), True),
    ("stages", MANY, (), True),
]


@pytest.mark.parametrize(("tile", "tree", "features", "reverse"), FORWARD, ids=str)
def test_forward(tile, tree, features, reverse, serve):
    serve(TILES[tile], reverse)
    check(make(tree, torch.bfloat16, "cpu", features), grad=False)


def test_forward_reads_nothing_of_others(serve):
    """NaN beside a path and in the padding, and a path alone: not one bit changes."""
    serve(TILES["pipeline"])
    case = make(STAR, torch.bfloat16, "cpu")
    want = run(case, grad=False)
    path = torch.cat([torch.arange(70), torch.arange(103, 233)])
    others = torch.ones(len(case.inputs["q"]), dtype=torch.bool)
    others[path] = False
    inputs = {name: t.masked_fill(others[:, None, None], NAN) for name, t in case.inputs.items()}
    got = run(case.with_inputs(**inputs), grad=False)
    alone = make(Tree((70, 130), (-1, 0)), torch.bfloat16, "cpu").options
    inputs = {name: t[path] for name, t in case.inputs.items()}
    apart = run(Case(inputs, alone, packed=True), grad=False)
    for name, rows in (("out", path), ("lse", (slice(None), path))):
        assert torch.equal(got[name][rows], want[name][rows])
        assert torch.equal(apart[name], want[name][rows])


# ---- backward

KINDS = {
    # either warpgroup has half of the rows of dq, or of its columns
    "rows": HopperBackwardTile(128, 3, 2),
    "columns": HopperBackwardTile(64, 2, 2),
    "wide": HopperBackwardTile(64, 2, 2, block_n=64),
}
BACKWARD = [
    ("columns", CHAIN, (), True),
    ("columns", CHAIN, (), False),
    ("rows", STAR, ("sinks",), True),
    ("wide", CHAIN, ("softcap",), False),
    ("wide", LEVELS, (), True),
]


@pytest.mark.parametrize(("tile", "tree", "features", "reverse"), BACKWARD, ids=str)
def test_backward(tile, tree, features, reverse, serve_gradients):
    serve_gradients(KINDS[tile], reverse)
    check(make(tree, torch.bfloat16, "cpu", features), grad=True)


SHARED = [
    ("columns", Tree((70, 130, 20, 3), (-1, 0, 0, 1), 2, 1, 48), 2),
    ("rows", Tree((150, 20, 3), (-1, 0, 0), 6, 2, 64, padding=3), 3),
    # a program walks two of four heads
    ("wide", Tree((40, 0, 70, 33), (-1, 0, 0, 2), 4, 1, 72), 2),
]


@pytest.mark.parametrize(("tile", "tree", "shares"), SHARED, ids=str)
def test_backward_of_shared_keys(tile, tree, shares, serve_gradients):
    serve_gradients(KINDS[tile], shares=shares)
    check(make(tree, torch.bfloat16, "cpu"), grad=True)


@pytest.mark.parametrize("tile", ["columns", "wide"])
def test_backward_reads_nothing_of_others(tile, serve_gradients):
    """NaN in a segment beside those that are looked at, which the root sees no gradient of."""
    serve_gradients(KINDS[tile])
    case = make(Tree((20, 70, 30), (-1, 0, -1), 1, 1, 48, padding=3), torch.bfloat16, "cpu")
    want = run(case)
    inputs = {name: t.clone() for name, t in case.inputs.items()}
    for t in inputs.values():
        t[90:] = NAN
    got = run(case.with_inputs(**inputs))
    for name in ("dk", "dv"):
        assert torch.equal(got[name][:90], want[name][:90]), name
    assert (got["dq"][:90] - want["dq"][:90]).norm() <= 2.0**-8 * want["dq"].norm()


def far_below_zero(case: Case) -> Case:
    """Move all scores so far down that a key of 0 would have a probability beyond fp32."""
    return case.with_inputs(q=case.inputs["q"] + 8, k=case.inputs["k"] - 8)


def test_scores_far_below_zero(serve_gradients):
    serve_gradients(KINDS["columns"])
    case = make(Tree((150, 20, 3), (-1, 0, 0), 2, 1, 48), torch.bfloat16, "cpu")
    check(far_below_zero(case), grad=True)


# ---- mistakes

WAIT_K = "await_full(pipeline.k_full, state.turn)"
MISTAKES = [
    ("_copy_keys", "await_readers(turn, EMPTY, TILE.STAGES_K, PARTIES)", "pass"),
    (
        "_copy_keys",
        "program.tails_s.index(stage).store(keys)",
        "program.tails_s.index(0).store(keys)",
    ),
    ("_copy_keys", "program.tails_s.index(stage).store(keys)", "pass"),
    ("_attend", WAIT_K, "pass"),
    ("_attend", "own.rows * 0 + BEHIND", "own.rows"),
    ("_attend", "0, 1, tail", "0, 1, own"),
    ("_attend", "own.high - 1,", "own.high,"),
    ("count_above", "run.length % TILE.BLOCK_N > 0", "run.length > 0"),
    ("count_above", "wholes += run.length // TILE.BLOCK_N", "wholes += 1"),
    ("next_block", "count_above(segment", "count_above(segment - 1"),
    ("find_block", "sequence = batch - 1 - sequence", "pass"),
    ("_block_ends", "index = batch + 1 - number", "index = batch - number"),
    ("produce", "above.wholes + right", "above.wholes"),
    ("produce", "last_row = row", "last_row = 0"),
    ("produce", "last_start = run.start\n", "last_start = task.k_start\n"),
    ("parent_of", "parent < segment", "parent < 0"),
    ("run_of", "end - start", "end - start - 1"),
]
MISTAKES_BACK = [
    ("_find_block", "own.begin + below) * OPTIONS.GROUP", "own.begin) * OPTIONS.GROUP"),
    ("_find_block", "masked = tiles", "pass"),
    ("_copy_step", "run.start + row", "run.start"),
    ("_copy_step", "other=0.0", "other=INF"),
    ("_copy_step", "2 * stage + FIRST_ROW", "FIRST_ROW"),
    ("produce", "gl.where(is_below, BEHIND, row)", "row"),
    ("produce", "+ slot + tile", "+ slot"),
    ("produce", "step // tiles", "0"),
    ("produce", "gl.where(is_below, 0, own.end)", "end"),
    ("next_below", "gl.load(links_ptr + segments + segment)", "gl.load(links_ptr + segment)"),
    ("walk_tiles", "row = head.dq_at + place_of", "row = head.dq_at + 0 * place_of"),
    ("place_of", "2 * stage + NUMBER", "NUMBER"),
]


def caught(serve, case: Case, grad: bool) -> bool:
    """Say whether either order of the partitions shows what is wrong."""
    for reverse in (True, False):
        serve(reverse)
        try:
            check(case, grad=grad)
        except (AssertionError, RuntimeError):
            return True
    return False


@pytest.mark.mutation
@pytest.mark.parametrize(("function", "right", "wrong"), MISTAKES, ids=lambda x: str(x)[:40])
def test_forward_with_a_mistake(function, right, wrong, serve):
    def faulty(reverse):
        serve(TILES["stages"], reverse).plant(function, right, wrong)

    # two tails and none, and two blocks of queries
    tree = Tree((72, 32, 33, 130), (-1, 0, 1, 2), 1, 1, 48)
    assert caught(faulty, make(tree, torch.bfloat16, "cpu"), grad=False)


@pytest.mark.mutation
@pytest.mark.parametrize(("function", "right", "wrong"), MISTAKES_BACK, ids=lambda x: str(x)[:40])
def test_backward_with_a_mistake(function, right, wrong, serve_gradients):
    def faulty(reverse):
        serve_gradients(KINDS["columns"], reverse).plant(function, right, wrong)

    # a block of keys that is whole and one that is not, and siblings below
    case = make(Tree((150, 20, 3), (-1, 0, 0), 2, 1, 48), torch.bfloat16, "cpu")
    assert caught(faulty, far_below_zero(case), grad=True) or caught(faulty, case, grad=True)
