"""What the kernels that plan make, bit for bit as plain PyTorch makes it."""

from __future__ import annotations

import itertools

import pytest
import torch
from blocksparse_attn import BlockSparseLayout
from blocksparse_attn._layout import lists as layout_lists
from blocksparse_attn._layout.kernels import planning
from blocksparse_attn._layout.lists import ListSpec
from blocksparse_attn._linked.host.forms import interpreted

from .._linked.fences import run_fenced
from .._linked.gpus import GPUS, chosen, compiling
from .._linked.spills import check_builds
from .._linked.tiers import INTERPRETED
from ._definition import defined_lists
from ._lists import random_layout
from ._planning import assert_planned_alike

SIDES = (16, 32, 64)
BLOCKS = list(itertools.product(SIDES, SIDES))


def query_specs(heads, block_q, causal):
    """Tiles of one row of blocks, of several, and of the heads of a group, also of a part of it."""
    yield ListSpec(False, 32, 1, 1, causal)
    yield ListSpec(False, 128, 1, 1, causal)
    yield ListSpec(False, 128, 1, 1, causal, halves=True)
    for pack in {4, 16, min(heads, 2)}:
        yield ListSpec(False, block_q, heads, pack, causal)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_lists(block, seed, causal, device):
    layout = random_layout(seed, block)
    heads = layout._crow.shape[0]
    by_key = [ListSpec(True, span, group, 1, causal) for span, group in ((32, 1), (64, heads))]
    assert_planned_alike(layout, *query_specs(heads, block[0], causal), *by_key, device=device)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_lists_of_one_group_of_heads_after_the_other(causal, device, monkeypatch):
    """The last one has fewer heads."""
    monkeypatch.setattr(planning, "BYTES", 1)
    kept = torch.rand(5, 4, 7, generator=torch.Generator().manual_seed(0)) < 0.5
    layout = BlockSparseLayout.from_dense(kept, 16)
    specs = ListSpec(False, 16, 2, 2, causal), ListSpec(True, 32, 2, 1, causal)
    assert_planned_alike(layout, *specs, ListSpec(False, 32, 1, 1, causal), device=device)


@pytest.mark.skipif(not INTERPRETED, reason="needs memory that faults on a CPU")
def test_nothing_is_read_or_written_beyond_a_tensor():
    """The last group has fewer heads, and the last program fewer items than others."""
    code = """
import torch
from blocksparse_attn import BlockSparseLayout, TokenRule
from blocksparse_attn._layout.kernels import planning
from blocksparse_attn._layout.lists import ListSpec, common_bounds
from tests.layout._definition import defined_lists
planning.BLOCK = 16
planning.common_bounds = lambda *arguments: fenced(common_bounds(*arguments))
kept = torch.rand(7, 3, 20, generator=torch.Generator().manual_seed(0)) < 0.5
layout = BlockSparseLayout.from_dense(kept, 16).with_token_rule(TokenRule.window(15, 31))
rule, layout = layout._rule, (fenced(layout._crow), fenced(layout._col), 20, (16, 16))
for spec in ((False, 16, 4, 2, False), (False, 32, 1, 1, True), (True, 32, 4, 1, True)):
    spec = ListSpec(*spec)
    made, want = (make(*layout, spec, rule) for make in (planning.make_lists, defined_lists))
    assert all(map(torch.equal, made, want)), spec
"""
    run_fenced(code, __file__)


@pytest.mark.skipif(not INTERPRETED, reason="needs memory that faults on a CPU")
def test_no_pair_is_read_or_written_beyond_a_tensor():
    code = """
import torch
from blocksparse_attn import BlockSparseLayout
from blocksparse_attn._layout.kernels import planning
from blocksparse_attn._layout.lists import ListSpec
from tests.layout._definition import defined_lists
kept = torch.rand(3, 2, 5, generator=torch.Generator().manual_seed(0)) < 0.5
layout = BlockSparseLayout.from_dense(kept, 32)
spec = ListSpec(True, 128, 2, 1, True, True)
arguments = fenced(layout._crow), fenced(layout._col), 5, (32, 32), spec
made, want = (make(*arguments) for make in (planning.make_pairs, defined_lists))
assert all(map(torch.equal, made, want))
"""
    run_fenced(code, __file__)


def test_the_example_of_the_docs(device):
    """What ``docs/how-it-works.md`` says of four rows."""
    kept = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [1, 1, 0, 1]]).bool()
    layout = BlockSparseLayout.from_dense(kept, 64)
    forward = ListSpec(False, 128, 1, 1, True)
    backward, pairs = ListSpec(True, 64, 1, 1, True), ListSpec(True, 128, 1, 1, True, True)
    assert_planned_alike(layout, forward, backward, pairs, device=device)

    def lists(spec):
        return defined_lists(layout._crow, layout._col, 4, (64, 64), spec)

    begin, whole, items, members = map(torch.Tensor.tolist, lists(forward))
    assert (begin, whole) == ([0, 2, 6], [0, 1])
    assert items[:6] == [0, 1, 1, 0, 2, 3]
    assert members[:6] == [3, 2, 3, 2, 1, 2]
    begin, whole, items, _ = map(torch.Tensor.tolist, lists(backward))
    assert (begin, whole) == ([0, 3, 6, 7, 8], [2, 2, 0, 0])
    assert items[:8] == [1, 3, 0, 2, 3, 1, 2, 3]
    made = lists(pairs)
    assert int(made.real) == 2
    assert made.owners[:2].tolist() == [[0, 0, 1], [0, 2, 3]]
    assert made.begin[:9].tolist() == [0, 1, 2, 3, 4, 4, 4, 5, 6]
    assert made.items[:6].tolist() == [3, 1, 0, 2, 2, 3]


def some_layout(kind):
    """Layouts with something odd."""
    generator = torch.Generator().manual_seed(5)
    if kind == "empty":
        return BlockSparseLayout.from_dense(torch.zeros(2, 3, 4, dtype=torch.bool), 16)
    if kind == "full":
        return BlockSparseLayout.from_dense(torch.ones(2, 5, 7, dtype=torch.bool), 16)
    if kind == "no rows":
        crow, col = (torch.zeros(2, n, dtype=torch.int32) for n in (1, 0))
        return BlockSparseLayout(crow, col, 16, num_cols=3)
    if kind == "nothing":
        return BlockSparseLayout(torch.zeros(1, 1).int(), torch.zeros(1, 0).int(), 16, num_cols=0)
    if kind == "long":  # several chunks of items and of slots
        kept = torch.rand(2, 9, 75, generator=generator) < 0.3
        return BlockSparseLayout.from_dense(kept | (torch.arange(9) % 7 == 3)[:, None], 16)
    if kind == "tall":
        kept = torch.rand(2, 40, 5, generator=generator) < 0.3
        return BlockSparseLayout.from_dense(kept, (16, 64))
    if kind == "wide":
        kept = torch.rand(2, 3, 9, generator=generator) < 0.5
        return BlockSparseLayout.from_dense(kept, (64, 16))
    if kind == "selected":
        indices = torch.randint(-1, 9, (2, 4, 6, 5), generator=generator)
        return BlockSparseLayout.from_indices(indices, 32, num_cols=9)
    # columns that there are not, and slots that no row points to
    crow = torch.tensor([[1, 3, 3, 7], [0, 0, 2, 5]], dtype=torch.int32)
    col = torch.randint(-3, 9, (2, 9), generator=generator).int()
    return BlockSparseLayout(crow, col, 32, num_cols=5)


KINDS = ["empty", "full", "nothing", "no rows", "long", "tall", "wide", "selected", "stray"]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("kind", KINDS)
def test_odd_layouts(kind, causal, device, monkeypatch):
    if interpreted():
        monkeypatch.setattr(planning, "BLOCK", 32)
    layout = some_layout(kind)
    heads = layout.num_heads
    specs = [
        ListSpec(False, 128, 1, 1, causal),
        ListSpec(False, layout.block_size[0], heads, 4, causal),
        ListSpec(True, 64, heads, 1, causal),
        ListSpec(True, 128, heads, 1, causal, True),
    ]
    assert_planned_alike(layout, *specs, device=device)


@pytest.mark.parametrize("shared", [False, True])
def test_pairs_of_a_band_and_columns(shared, device, monkeypatch):
    """Whole programs, in whose midst walks are cut; a column is walked beside another."""
    monkeypatch.setattr(planning, "ENTRIES", 32)
    layout = BlockSparseLayout.local_strided(2, 16384, 64, 4, 32, shared)
    spec = ListSpec(True, 128, *((1, 2) if shared else (2, 1)), True, True)
    assert_planned_alike(layout, spec, device=device)


@pytest.mark.parametrize("side", [16, 32])
def test_pairs_of_small_blocks(side, device, monkeypatch):
    """Columns of several heads, which are put together to blocks."""
    monkeypatch.setattr(layout_lists, "KEPT", 2)
    layout = BlockSparseLayout.local_strided(2, 36 * side, side, 1, 7)
    specs = [ListSpec(True, 128, 1, 1, False, True), ListSpec(True, 128, 2, 1, True, True)]
    assert_planned_alike(layout, *specs, device=device)


@pytest.mark.aot
@pytest.mark.parametrize("kind", ["tall", "short", "dkdv"])
@pytest.mark.parametrize("gpu", chosen(GPUS, ["nvidia:sm_90", "amd:gfx942"]))
def test_builds(gpu, kind, tmp_path):
    """Three launches, which fit."""
    spec = {
        "tall": ListSpec(False, 128, 1, 1, True),
        "short": ListSpec(False, 64, 4, 4, True),
        "dkdv": ListSpec(True, 64, 4, 1, True),
    }[kind]
    crow, col = (torch.empty(8, n, dtype=torch.int32, device="meta") for n in (17, 64))
    with compiling(gpu, tmp_path) as builds:
        planning.make_lists(crow, col, 16, (64, 64), spec)
    assert [build.kernel for build in builds] == ["bit_kernel", "list_kernel", "list_kernel"]
    check_builds(gpu, f"{kind} lists", builds)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "block",
    [(64, 64), (128, 64), (32, 32), (64, 16), (16, 128)],
    ids=lambda block: f"{block[0]}x{block[1]}",
)
def test_pairs(block, seed, causal, device, monkeypatch):
    """With programs so short that there are several of an owner, and entries in several chunks."""
    kept = (1, 2)[seed % 2]
    longest, shorter = ((5, 2), (1, 1))[seed % 2]
    for name, value in ("KEPT", kept), ("LONGEST", longest), ("SHORTER", shorter):
        monkeypatch.setattr(layout_lists, name, value)
    monkeypatch.setattr(planning, "BLOCK", 16)
    monkeypatch.setattr(planning, "ENTRIES", 4)
    layout = random_layout(seed, block)
    heads = layout._crow.shape[0]
    specs = [
        ListSpec(True, 128, group, turns, causal, True) for group, turns in ((1, 2), (heads, 1))
    ]
    assert_planned_alike(layout, *specs, device=device)


@pytest.mark.aot
@pytest.mark.parametrize("block", [(64, 64), (16, 16)], ids=str)
@pytest.mark.parametrize("gpu", chosen(GPUS, ["nvidia:sm_90"]))
def test_pairs_build(gpu, block, tmp_path):
    """A launch for each stage, which fits."""
    crow, col = (torch.empty(8, n, dtype=torch.int32, device="meta") for n in (17, 64))
    with compiling(gpu, tmp_path) as builds:
        planning.make_pairs(crow, col, 16, block, ListSpec(True, 128, 4, 1, True, True))
    assert len(builds) == (9 if block[0] == 64 else 12)
    check_builds(gpu, f"pairs b{block[0]}:{block[1]}", builds)
