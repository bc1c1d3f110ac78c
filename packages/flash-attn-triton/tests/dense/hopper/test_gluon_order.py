"""The order in which parts of dq are added: each in its turn, and nobody waits for who comes later.

The functions of the kernel are called one by one, without the kernel.
"""

from __future__ import annotations

import collections
import itertools

import pytest
import torch
from flash_attn_triton._dense import ops

pytestmark = pytest.mark.skipif(not ops.interpreted(), reason="about the interpreter")

LENGTHS = [(300, 500), (500, 300), (1, 400)]
WINDOWS = [(-1, -1), (-1, 0), (0, 0), (-1, 40), (72, -1), (73, 20), (128, 63), (5000, 5000)]


@pytest.fixture(scope="module")
def functions():
    """Functions of the kernel by name, as ordinary ones."""
    from flash_attn_triton._dense.hopper.backward import blocks as backward_blocks
    from flash_attn_triton._dense.hopper.backward import order

    from ..._linked.gluon import as_python

    return as_python(
        backward_blocks.query_tiles,
        backward_blocks.locate_keys,
        order.turn_at,
        order.tile_at,
        order.head_at,
    )


def structures(window, block_m=64, block_n=128, **numbers):
    """Return the numbers, options and tile of a call."""
    from flash_attn_triton._dense.hopper.backward.arguments import Numbers, Options, Tile

    from ..._linked.gluon import register

    left, right = window
    numbers = dict.fromkeys(Numbers._fields, 0) | numbers
    numbers |= {"window_left": left, "window_right": right}
    options = dict.fromkeys(Options._fields, False) | {"GROUP": 1}
    options |= {"HAS_LEFT": left >= 0, "HAS_RIGHT": right >= 0, "ORDERED": True}
    tile = dict.fromkeys(Tile._fields, 64) | {"BLOCK_M": block_m, "BLOCK_N": block_n}
    numbers = {name: register(value) for name, value in numbers.items()}
    return Numbers(**numbers), Options(**options), Tile(**tile)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize(("len_q", "len_k"), LENGTHS)
@pytest.mark.parametrize(("block_m", "alibi"), [(64, False), (128, True)])
def test_each_part_has_the_next_turn(block_m, alibi, len_q, len_k, window, functions):
    """Blocks of keys come one after the other; a tile's turns are 0, 1, 2, without a gap."""
    from ..._linked.gluon import register

    numbers, options, tile = structures(window, block_m)
    lengths = len_q, len_k, numbers, alibi
    diagonal = len_k - len_q
    added = collections.Counter()
    met = set()
    for first_key in range(0, len_k, tile.BLOCK_N):
        key = register(first_key)
        walk = functions["query_tiles"](key, diagonal, *lengths, options, tile)
        begin, end = int(walk.begin), int(walk.end)
        for m in (int(functions["tile_at"](i, begin, end, options)) for i in range(end - begin)):
            turn = functions["turn_at"](m, key, diagonal, numbers, options, tile)
            assert int(turn) == added[m], (m, first_key)
            added[m] += 1
            met.add((m, first_key // tile.BLOCK_N))
    assert _seen(len_q, len_k, window, tile) <= met
    assert len(met) == added.total()


def _seen(len_q, len_k, window, tile):
    """Return the pairs of tiles and blocks of which some query sees some key."""
    rows = torch.arange(len_q)[:, None] + len_k - len_q
    keys = torch.arange(len_k)
    visible = torch.ones(len_q, len_k, dtype=torch.bool)
    if window[0] >= 0:
        visible &= keys >= rows - window[0]
    if window[1] >= 0:
        visible &= keys <= rows + window[1]
    pairs = visible.nonzero() // torch.tensor([tile.BLOCK_M, tile.BLOCK_N])
    return {tuple(pair) for pair in pairs.unique(dim=0).tolist()}


def test_walks_go_from_the_last_tile_to_the_first_for_all_heads_at_once(functions):
    _, options, _ = structures((-1, -1))
    options = options._replace(GROUP=2)
    walk = (functions["head_at"](i, 5, 2, options) for i in range(4))
    walk = [(head, functions["tile_at"](step, 3, 5, options)) for head, step in walk]
    assert walk == [(10, 4), (11, 4), (10, 3), (11, 3)]


@pytest.mark.parametrize("span", [1, 2, 4, 16])
def test_programs_wait_for_earlier_ones_alone(span, functions):
    """Of each head, blocks of keys have numbers in the order of their additions."""
    batch, heads, tiles = 2, 3, 5
    numbers, _, _ = structures(
        (-1, -1), batch=batch, heads_k=heads, tiles=tiles, span=span, tokens_q=640, tokens_k=640
    )
    found = collections.defaultdict(list)
    for number in range(batch * heads * tiles):
        own = _locate(number, None, numbers, functions)
        found[int(own.sequence), int(own.head_k)].append(int(own.block))
    owners = itertools.product(range(batch), range(heads))
    assert dict(found) == {owner: list(range(tiles)) for owner in owners}


def test_programs_of_packed_calls_wait_for_earlier_ones_alone(functions):
    lengths, heads = [300, 0, 1, 128, 500], 2
    offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    tokens = sum(lengths) + 70  # and padding
    slots = tokens // 128 + len(lengths) + 2
    numbers, _, _ = structures(
        (-1, -1), batch=len(lengths), heads_k=heads, tiles=slots, tokens_q=tokens, tokens_k=tokens
    )
    found = collections.defaultdict(list)
    for number in range(slots * heads):
        own = _locate(number, offsets, numbers, functions)
        if int(own.block) >= 0 and 0 <= int(own.sequence) < len(lengths):
            found[int(own.sequence), int(own.head_k)].append(int(own.block))
    assert dict(found) == {
        (i, head): list(range(-(-n // 128)))
        for i, n in enumerate(lengths)
        for head in range(heads)
        if n
    }


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("span", [4, 8])
def test_programs_that_share_a_bias_run_side_by_side(span, by_head, functions):
    """They have one block of four sequences of a head, or of four heads of a sequence."""
    batch, heads, tiles = 4, 8, 3
    numbers, _, _ = structures(
        (-1, -1), batch=batch, heads_k=heads, tiles=tiles, span=span, tokens_q=384, tokens_k=384
    )
    own = [_locate(i, None, numbers, functions, by_head) for i in range(batch * heads * tiles)]
    found = [(int(x.block), int(x.sequence), int(x.head_k)) for x in own]
    assert len(set(found)) == len(found)
    for first in range(0, len(found), 4):
        blocks, sequences, owners = map(set, zip(*found[first : first + 4], strict=True))
        shared, apart = (owners, sequences) if by_head else (sequences, owners)
        assert len(blocks) == len(shared) == 1
        assert len(apart) == 4


def _locate(number, offsets, numbers, functions, by_head=False):
    """Return what a program with this number owns."""
    from flash_attn_triton._dense.hopper.backward.arguments import Tensors

    from ..._linked.gluon import Pointer, register

    starts = None if offsets is None else Pointer(offsets, torch.zeros((), dtype=torch.int64))
    tensors = Tensors(*[None] * len(Tensors._fields))
    tensors = tensors._replace(cu_seqlens_q_ptr=starts, cu_seqlens_k_ptr=starts)
    number = register(number)
    return functions["locate_keys"](number, tensors, numbers, True, False, 128, by_head)
