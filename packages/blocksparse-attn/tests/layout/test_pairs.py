"""What programs of the backward for Hopper own and walk, against a loop over blocks."""

from __future__ import annotations

import pytest
import torch
from attn_common import cdiv
from blocksparse_attn import BlockSparseLayout
from blocksparse_attn._attention import ops
from blocksparse_attn._layout import lists as layout_lists
from blocksparse_attn._layout.lists import HEAD, LONGEST, SIDE, piece_of, sizes_of

from . import _definition
from ._definition import key_pairs
from ._lists import random_layout

BLOCKS = [(64, 64), (128, 64), (64, 128), (128, 128), (32, 32), (16, 16), (64, 16), (16, 128)]


def walked(layout, pairs, group):
    """Return how often each pair of pieces is walked, and by how many programs of its keys."""
    heads, rows, cols = layout.to_dense().shape
    block_q, block_k = layout.block_size
    piece = piece_of(layout.block_size)
    side = SIDE // piece
    rows, cols = rows * block_q // piece, cols * block_k // piece
    times = torch.zeros(heads, rows + side, cols, dtype=torch.int64)
    parts = torch.zeros_like(pairs.parts)
    in_list = parts.shape[0] // cdiv(heads, group)
    begin, items, owners = pairs.begin.tolist(), pairs.items.tolist(), pairs.owners.tolist()
    for program, (index, *owned) in enumerate(owners):
        bounds = begin[4 * program : 4 * program + 5]
        for one in owned:
            if one >= 0:
                parts[index * in_list + one] += 1
        for part, halves in enumerate(((0, 1), (0, 1), (0,), (1,))):
            found = items[bounds[part] : bounds[part + 1]]
            assert found == sorted(set(found))
            for place, item in enumerate(found, bounds[part]):
                for half in halves:
                    bits = int(pairs.bits[place]) >> 16 * half
                    seen = [bits >> bit & 1 for bit in range(side * side)]
                    assert sum(seen) == side * side or part
                    for bit in range(side * side):
                        one, row = owned[half * side + bit // side], item % HEAD * side + bit % side
                        if seen[bit]:
                            assert one >= 0
                            times[index * group + item // HEAD, row, one] += 1
    assert not times[:, rows:].any()
    return times[:, :rows], parts


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("kept", [1, 3, 16])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_each_block_is_walked_once(block, seed, kept, causal, monkeypatch):
    for name, value in ("KEPT", kept), ("LONGEST", 5), ("SHORTER", 2):
        monkeypatch.setattr(layout_lists, name, value)
    layout = random_layout(seed, block)
    heads = layout.to_dense().shape[0]
    for group in {1, heads}:
        pairs = key_pairs(layout._crow, layout._col, layout.num_cols, block, group, 2, causal)
        times, parts = walked(layout, pairs, group)
        want = layout.to_dense().long()
        piece = piece_of(block)
        want = want.repeat_interleave(block[0] // piece, 1).repeat_interleave(block[1] // piece, 2)
        assert torch.equal(times, want.tril() if causal else want)
        assert torch.equal(pairs.parts, parts)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_what_needs_no_mask_comes_first(causal):
    layout = BlockSparseLayout.local_strided(4, 2048, 64, 3, 4)
    pairs = key_pairs(layout._crow, layout._col, layout.num_cols, (64, 64), 2, 1, causal)
    begin = pairs.begin.tolist()
    partial = 0
    for program, (_, *owned) in enumerate(pairs.owners.tolist()):
        for part in range(2):
            for item in pairs.items[begin[4 * program + part] : begin[4 * program + part + 1]]:
                is_clear = not causal or item % HEAD > max(owned)
                assert is_clear == (part == 0)
                partial += part
    assert (partial > 0) == causal


@pytest.mark.parametrize("turns", [1, 4])
def test_walks_are_cut_and_little_is_walked_alone(turns):
    layout = BlockSparseLayout.local_strided(8, 32768, 64, 8, 16, turns > 1)
    group = 1 if turns > 1 else 4
    pairs = key_pairs(layout._crow, layout._col, layout.num_cols, (64, 64), group, turns, True)
    count = pairs.begin.diff().view(-1, 4)
    steps = count[:, :2].sum(1) + count[:, 2:].amax(1)
    # of one block alone a program has as many items as of two
    assert steps.max() <= 2 * LONGEST // turns
    kept = 2 * count[:, :2].sum() + count[:, 2:].sum()
    assert 2 * steps.sum() < 1.1 * kept
    assert 5 * count[:, 2:].sum() < kept


@pytest.mark.parametrize("tokens", [4096, 8192])
def test_programs_come_by_lists_and_the_longest_first(tokens):
    layout = BlockSparseLayout.local_strided(16, tokens, 64, 8, 16)
    pairs = key_pairs(layout._crow, layout._col, layout.num_cols, (64, 64), 4, 1, True)
    count = pairs.begin.diff().view(-1, 4)
    steps = count[:, :2].sum(1) + count[:, 2:].amax(1)
    lists = pairs.owners[:, 0]
    used = int((lists >= 0).sum())
    assert (lists[used:] == -1).all()
    assert pairs.real.tolist() == [used]
    assert not steps[used:].any()
    sections = lists[:used]
    assert (sections.diff() >= 0).all()
    windows = max(tokens // 64 // layout_lists.WINDOW, 1)
    for one in range(4):
        rises = (steps[:used][sections == one] // layout_lists.ALIKE).diff() > 0
        assert rises.sum() < windows


def test_programs_that_there_are_not_come_last():
    """Padding of ``col`` makes their bound large."""
    rows, nnz, turns = 1023, 600_000, 64
    crow = torch.arange(rows + 1)[None]
    col = torch.full((1, nnz), -1)
    col[0, :rows] = torch.arange(rows)
    pairs = key_pairs(crow, col, rows, (64, 64), 1, turns, True)
    count = int(pairs.real)
    assert count == cdiv(rows, 2)
    assert (pairs.owners[:count, 0] == 0).all()
    assert (pairs.owners[count:] == -1).all()
    assert pairs.begin[4 * count] == pairs.begin[-1] == rows


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("group", [1, 2])
def test_operators_know_the_sizes(block, group):
    layout = random_layout(3, block)  # of six heads
    arguments = (
        layout._crow,
        layout._col,
        layout.num_cols,
        *block,
        False,
        group,
        128,
        2,
        True,
        "pairs",
        None,
    )
    made = ops.plan(*arguments)
    want = sizes_of(*layout._col.shape, layout.num_cols, block, group, 1)
    assert (made[1].numel(), made[3].shape[0], made[2].numel() - 1) == want
    torch.library.opcheck(torch.ops.blocksparse_attn.plan, arguments, test_utils="test_faketensor")


def test_many_programs_of_many_rows():
    """The keys of their order fit into int64, also those of programs that there are not."""
    rows, there, bound = 2**16 - 1, 3, 2**20
    of_list = torch.full((bound,), -1)
    of_list[:there] = torch.tensor([1, 0, 1])
    program = torch.arange(there)
    row, part = torch.tensor([rows - 1, 7, 0]), torch.zeros(there, dtype=torch.int64)
    order = _definition._order(program, part, row, of_list, rows, 64)
    assert order[:there].tolist() == [1, 2, 0]
    assert torch.equal(order[there:], torch.arange(there, bound))
