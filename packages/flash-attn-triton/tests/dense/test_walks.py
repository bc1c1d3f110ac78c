"""Which tiles a block visits, with a mask and without: each that is needed, once, and no other.

A tile too many costs time alone, so that no result would tell.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import triton
import triton.language as tl
from flash_attn_triton._dense.portable.arguments import Options
from flash_attn_triton._linked.portable.mask import (
    Mask,
    count_steps,
    key_range,
    query_range,
    step_start,
)

BLOCK = 16
LENGTHS = [(50, 18), (18, 50), (33, 47), (1, 40), (32, 16)]
# around whole tiles, and one, two before them
SIZES = [0, 1, 2, 13, 14, 15, 16, 17, 30, 31, 32, 33, 60]
WINDOWS = [(-1, -1), *((n, -1) for n in SIZES), *((-1, n) for n in SIZES)]
WINDOWS += [*itertools.product((0, 14, 15, 17), repeat=2), (3, 40), (40, 3), (40, 40)]
# more than any of the lengths has; what lies outside is counted in the last
SLOTS = 6


@triton.jit
def _walk_kernel(
    cases_ptr,
    visits_ptr,
    BY_KEY: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Count the visits to each tile, [case, masked, SLOTS]; cases are [5, case]."""
    case, count = tl.program_id(0), tl.num_programs(0)
    first = tl.load(cases_ptr + case) * BLOCK
    seqlen_q = tl.load(cases_ptr + count + case)
    seqlen_k = tl.load(cases_ptr + 2 * count + case)
    left = tl.load(cases_ptr + 3 * count + case)
    right = tl.load(cases_ptr + 4 * count + case)
    OPTIONS: tl.constexpr = Options(1, HAS_LEFT, HAS_RIGHT, False, 0)
    mask = Mask(seqlen_q, seqlen_k, seqlen_k - seqlen_q, left, right)
    if BY_KEY:
        walk = query_range(first, first + BLOCK - 1, mask, OPTIONS, BLOCK)
    else:
        last = tl.minimum(first + BLOCK, seqlen_q) - 1
        walk = key_range(first, last, mask, OPTIONS, BLOCK)
    for masked in tl.static_range(2):
        for step in tl.range(0, count_steps(walk, BLOCK, masked == 1)):
            tile = step_start(step, walk, BLOCK, masked == 1) // BLOCK
            slot = tl.where((tile < 0) | (tile >= SLOTS), SLOTS - 1, tile)
            at = visits_ptr + (case * 2 + masked) * SLOTS + slot
            tl.store(at, tl.load(at) + 1)


def needed(tile: int, lengths: tuple[int, int], window: tuple[int, int], by_key: bool):
    """Visits as the definition has them, [masked, SLOTS]: tiles seen whole, and those seen in part.

    A block's own rows past the end call for no mask: their results are not stored.
    """
    seqlen_q, seqlen_k = lengths
    rows, cols = (torch.arange(SLOTS * BLOCK).view(shape) for shape in ((-1, 1), (1, -1)))
    place = rows + seqlen_k - seqlen_q
    seen = cols < seqlen_k
    if window[0] >= 0:
        seen = seen & (cols >= place - window[0])
    if window[1] >= 0:
        seen = seen & (cols <= place + window[1])
    real = seen & (rows < seqlen_q)
    if by_key:
        seen = real = real.T
    else:
        seen = seen | (rows >= seqlen_q)
    block = slice(tile * BLOCK, (tile + 1) * BLOCK)
    whole = seen[block].unflatten(1, (SLOTS, BLOCK)).all(2).all(0)
    some = real[block].unflatten(1, (SLOTS, BLOCK)).any(2).any(0)
    return torch.stack([whole & some, some & ~whole]).int()


@pytest.mark.parametrize("by_key", [False, True], ids=["keys_of_queries", "queries_of_keys"])
@pytest.mark.parametrize("sides", [*itertools.product((False, True), repeat=2)], ids=str)
def test_each_tile_that_is_seen_is_visited_once(sides, by_key, device):
    cases, want = [], []
    for lengths, window in itertools.product(LENGTHS, WINDOWS):
        if sides != (window[0] >= 0, window[1] >= 0):
            continue
        for tile in range(-(-lengths[by_key] // BLOCK)):
            cases.append((tile, *lengths, *window))
            want.append(needed(tile, lengths, window, by_key))
    arguments = torch.tensor(cases, dtype=torch.int32, device=device).T.contiguous()
    visits = torch.zeros(len(cases), 2, SLOTS, dtype=torch.int32, device=device)
    _walk_kernel[(len(cases),)](
        arguments, visits, by_key, *sides, BLOCK, SLOTS, num_warps=1, enable_fp_fusion=True
    )
    wrong = (visits.cpu() != torch.stack(want)).flatten(1).any(1).nonzero().flatten().tolist()
    assert not wrong, [cases[i] for i in wrong[:5]]
