"""The kernel that makes :class:`..lists.Pairs`, for the Hopper backward.

Each launch runs one stage. The stages that find the pairs of blocks are in :mod:`.pair_blocks`; the
stages that make programs of them are here.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..._linked.launch.entries import entry
from .arguments import PairNumbers, PairOptions, PairTensors
from .pair_blocks import (
    compare,
    fill_cells,
    find_alone,
    find_apart,
    owned,
    owns,
    put_in_order,
    walked,
)


@triton.jit
def _weight(owner, first, second, numbers):
    """Return half steps per item: neighbours walk their lists of single blocks in parallel."""
    one = tl.where(owner >= numbers.pairs, 2, 1)
    weight = tl.where((first != 0) & (second != 0), 2, one)
    return tl.where((first | second) != 0, weight, 0)


@triton.jit
def _count(pid, tensors, numbers, OPTIONS: tl.constexpr):
    """Count the entries of a chunk of an owner's items, and their weights."""
    owner = pid // numbers.chunks
    item = pid % numbers.chunks * OPTIONS.BLOCK + tl.arange(0, OPTIONS.BLOCK)
    inside = item < numbers.items
    first = walked(owner, 0, item, inside, tensors, numbers, OPTIONS.SIDE)
    second = walked(owner, 1, item, inside, tensors, numbers, OPTIONS.SIDE)
    used = ((first | second) != 0).to(tl.int32)
    weight = _weight(owner, first, second, numbers)
    tl.store(tensors.counts_ptr + pid, tl.sum(used, 0).to(tl.int64))
    behind = 2 * numbers.pairs.to(tl.int64) * numbers.chunks
    tl.store(tensors.counts_ptr + behind + pid, tl.sum(weight, 0).to(tl.int64))


@triton.jit
def _weights(owner, inside, tensors, numbers):
    """Return the sum of the weights before owners, and the owners' weights."""
    # the weights follow all counts, so there is a sum before the first weight
    at = 2 * numbers.pairs.to(tl.int64) * numbers.chunks + owner.to(tl.int64) * numbers.chunks
    ahead = tl.load(tensors.ends_ptr + at - 1, mask=inside, other=0)
    return ahead, tl.load(tensors.ends_ptr + at + numbers.chunks - 1, mask=inside, other=0) - ahead


@triton.jit
def _cut(tensors, numbers):
    """Number the programs that each owner's entries are cut into."""
    OWNERS: tl.constexpr = 1024
    ahead = tl.zeros([], tl.int32)
    for begin in range(0, 2 * numbers.pairs, OWNERS):
        owner = begin + tl.arange(0, OWNERS)
        inside = owner < 2 * numbers.pairs
        _, weights = _weights(owner, inside, tensors, numbers)
        most = tl.where(owner < numbers.pairs, numbers.most, numbers.most_apart)
        cuts = ((weights + most - 1) // most).to(tl.int32)
        tl.store(tensors.first_ptr + owner, ahead + tl.cumsum(cuts, 0) - cuts, mask=inside)
        ahead += tl.sum(cuts, 0)
    tl.store(tensors.first_ptr + 2 * numbers.pairs, ahead)
    tl.store(tensors.made.real_ptr, ahead)


@triton.jit
def _share(ahead, cuts, weights):
    """Return ``ahead * cuts // weights``; 64-bit division takes several times as long as 32-bit."""
    product = ahead * cuts
    if weights * cuts < 1 << 30:
        share = (product.to(tl.int32) // weights.to(tl.int32)).to(tl.int64)
    else:
        share = product // weights
    return share


@triton.jit
def _write(pid, tensors, numbers, OPTIONS: tl.constexpr):
    """Write the entries of a chunk, and the entries at which programs begin."""
    owner = pid // numbers.chunks
    chunk = pid % numbers.chunks
    item = chunk * OPTIONS.BLOCK + tl.arange(0, OPTIONS.BLOCK)
    inside = item < numbers.items
    first = walked(owner, 0, item, inside, tensors, numbers, OPTIONS.SIDE)
    second = walked(owner, 1, item, inside, tensors, numbers, OPTIONS.SIDE)
    used = (first | second) != 0
    weight = _weight(owner, first, second, numbers)
    start = tl.load(tensors.ends_ptr + pid - 1, mask=pid > 0, other=0)
    place = start + tl.cumsum(used.to(tl.int32), 0) - 1
    tl.store(tensors.entries_ptr + place, item, mask=used)
    tl.store(tensors.seen_ptr + place, first | second << 16, mask=used)

    program = tl.load(tensors.first_ptr + owner)
    cuts = tl.load(tensors.first_ptr + owner + 1) - program
    before, weights = _weights(owner, owner >= 0, tensors, numbers)
    behind = 2 * numbers.pairs.to(tl.int64) * numbers.chunks
    ahead = tl.load(tensors.ends_ptr + behind + pid - 1) - before
    ahead += tl.cumsum(weight, 0) - weight
    weights = tl.maximum(weights, 1)
    # a program begins after the entry that completes the share before it; an entry weighs no more
    # than the smallest program, so at most one program begins at an entry
    mine = _share(ahead, cuts, weights)
    next_one = tl.minimum(_share(ahead + weight, cuts, weights), cuts - 1)
    begins = used & (next_one > mine)
    tl.store(tensors.starts_ptr + program + next_one, place + 1, mask=begins)
    if chunk == 0:
        for begin in range(0, cuts, OPTIONS.BLOCK):
            cut = begin + tl.arange(0, OPTIONS.BLOCK)
            tl.store(tensors.owner_ptr + program + cut, cut * 0 + owner, mask=cut < cuts)
        if cuts > 0:
            tl.store(tensors.starts_ptr + program, start)
        for half in tl.static_range(2):
            block, moved = owned(owner, half, tensors, numbers)
            base = block // numbers.in_blocks * numbers.in_list
            for slot in tl.static_range(OPTIONS.SIDE):
                piece = tl.load(tensors.pieces_ptr + block * OPTIONS.SIDE + slot)
                if owns(owner, moved, numbers) & (piece >= 0):
                    tl.atomic_add(tensors.made.parts_ptr + base + piece, cuts.to(tl.int64))
    if pid == 0:
        real = tl.load(tensors.made.real_ptr)
        tl.store(tensors.starts_ptr + real, tl.load(tensors.ends_ptr + behind - 1))


@triton.jit
def _entries(begin, end, highest, tensors, numbers, OPTIONS: tl.constexpr, SIZE: tl.constexpr):
    """Return items, bits and parts of entries, ``[SIZE]``; the part is 4 after the end."""
    at = begin + tl.arange(0, SIZE)
    there = at < end
    item = tl.load(tensors.entries_ptr + at, mask=there, other=0)
    seen = tl.load(tensors.seen_ptr + at, mask=there, other=0)
    WHOLE: tl.constexpr = (1 << OPTIONS.SIDE * OPTIONS.SIDE) - 1
    first = seen & 65535
    second = (seen >> 16) & 65535
    is_cut = (first != WHOLE) | (second != WHOLE)
    if OPTIONS.IS_CAUSAL:
        is_cut |= item // numbers.group <= highest
    part = tl.where(is_cut, 1, 0)
    part = tl.where(second == 0, 2, tl.where(first == 0, 3, part))
    return item, seen, tl.where(there, part, 4)


@triton.jit
def _highest(owner, tensors, numbers):
    """Return the index of the last 64 tokens that an owner's blocks touch, and its list."""
    block, moved = owned(owner, 0, tensors, numbers)
    other, other_moved = owned(owner, 1, tensors, numbers)
    one = tl.load(tensors.lasts_ptr + block)
    two = tl.load(tensors.lasts_ptr + other)
    one = tl.where(owns(owner, moved, numbers), one, -1)
    two = tl.where(owns(owner, other_moved, numbers), two, -1)
    return tl.maximum(one, two), block // numbers.in_blocks


@triton.jit
def _measure(pid, tensors, numbers, OPTIONS: tl.constexpr):
    """Count the items of a program's parts, and write its sort key: list, first row, length."""
    SIZE: tl.constexpr = OPTIONS.ENTRIES
    counts = tl.zeros([4], tl.int32)
    part_index = tl.arange(0, 4)  # [4]
    first = numbers.rows
    index = numbers.lists
    if pid < tl.load(tensors.made.real_ptr):
        highest, index = _highest(tl.load(tensors.owner_ptr + pid), tensors, numbers)
        end = tl.load(tensors.starts_ptr + pid + 1)
        for begin in range(tl.load(tensors.starts_ptr + pid), end, SIZE):
            item, _, part = _entries(begin, end, highest, tensors, numbers, OPTIONS, SIZE)
            row = tl.where(part < 4, item // numbers.group, numbers.rows)
            first = tl.minimum(first, tl.min(row, 0))
            counts += tl.sum((part[:, None] == part_index[None, :]).to(tl.int32), 0)
    tl.store(tensors.parts_of_ptr + pid.to(tl.int64) * 4 + part_index, counts)
    both = tl.sum(tl.where(part_index < 2, counts, 0), 0)
    alone = tl.max(tl.where(part_index < 2, 0, counts), 0)
    length = (both + alone) * numbers.turns // numbers.alike
    longest = numbers.rows.to(tl.int64) * numbers.programs
    windows = numbers.rows // numbers.window + 1
    section = index.to(tl.int64) * windows + first // numbers.window
    tl.store(tensors.keys_ptr + pid, section * longest + (longest - 1 - length))


@triton.jit
def _emit(pid, tensors, numbers, OPTIONS: tl.constexpr):
    """Write the blocks and the items of the program at a place, by parts, heads and rows."""
    SIZE: tl.constexpr = OPTIONS.ENTRIES
    real = tl.load(tensors.made.real_ptr)
    place = pid.to(tl.int64) * 4
    sums = tl.load(tensors.sums_ptr + place + tl.arange(0, 4))
    tl.store(tensors.made.begin_ptr + place + 1 + tl.arange(0, 4), sums)
    target = tl.load(tensors.sums_ptr + place - 1, mask=pid > 0, other=0)
    if pid == 0:
        tl.store(tensors.made.begin_ptr, target)
    named = tensors.made.owners_ptr + pid * (1 + 2 * OPTIONS.SIDE)
    index = real * 0 - 1
    program = tl.load(tensors.places_ptr + pid)
    owner = tl.load(tensors.owner_ptr + program, mask=program < real, other=0)
    if program < real:
        highest, index = _highest(owner, tensors, numbers)
        start = tl.load(tensors.starts_ptr + program)
        end = tl.load(tensors.starts_ptr + program + 1)
        for begin in range(start, end, SIZE):
            item, seen, part = _entries(begin, end, highest, tensors, numbers, OPTIONS, SIZE)
            moved = item % numbers.group * numbers.head + item // numbers.group
            key = part * (numbers.head * numbers.group) + moved
            rank = tl.zeros([SIZE], tl.int32)
            for at in range(start, end, SIZE // 2):
                its, _, its_part = _entries(at, end, highest, tensors, numbers, OPTIONS, SIZE // 2)
                its = its % numbers.group * numbers.head + its // numbers.group
                its += its_part * (numbers.head * numbers.group)
                rank += tl.sum((its[None, :] < key[:, None]).to(tl.int32), 1)
            tl.store(tensors.made.items_ptr + target + rank, moved, mask=part < 4)
            tl.store(tensors.made.bits_ptr + target + rank, seen, mask=part < 4)
    tl.store(named, index)
    for half in tl.static_range(2):
        block, its_moved = owned(owner, half, tensors, numbers)
        is_there = owns(owner, its_moved, numbers) & (program < real)
        for slot in tl.static_range(OPTIONS.SIDE):
            piece = tl.load(tensors.pieces_ptr + block * OPTIONS.SIDE + slot)
            tl.store(named + 1 + half * OPTIONS.SIDE + slot, tl.where(is_there, piece, -1))
    # all programs together set unused elements to 0
    nothing = tl.zeros([SIZE], tl.int32)
    total = tl.load(tensors.starts_ptr + real)
    apart = tl.num_programs(0).to(tl.int64) * SIZE
    for at in range(total + pid.to(tl.int64) * SIZE, numbers.bound, apart):
        rest = at + tl.arange(0, SIZE)
        tl.store(tensors.made.items_ptr + rest, nothing, mask=rest < numbers.bound)
        tl.store(tensors.made.bits_ptr + rest, nothing, mask=rest < numbers.bound)


@entry(triton.jit)
def pair_kernel(tensors: PairTensors, numbers: PairNumbers, OPTIONS: PairOptions):
    """Run one stage of making ``Pairs``."""
    pid = tl.program_id(0)
    if OPTIONS.STAGE == "apart":
        find_apart(pid, tensors, numbers, OPTIONS)
    elif OPTIONS.STAGE == "rank":
        put_in_order(pid, tensors, numbers, OPTIONS)
    elif OPTIONS.STAGE == "cells":
        fill_cells(pid, tensors, numbers, OPTIONS)
    elif OPTIONS.STAGE == "alone":
        find_alone(pid, tensors, numbers, OPTIONS)
    elif OPTIONS.STAGE == "compare":
        compare(pid, tensors, numbers, OPTIONS)
    elif OPTIONS.STAGE == "count":
        _count(pid, tensors, numbers, OPTIONS)
    elif OPTIONS.STAGE == "cut":
        _cut(tensors, numbers)
    elif OPTIONS.STAGE == "write":
        _write(pid, tensors, numbers, OPTIONS)
    elif OPTIONS.STAGE == "measure":
        _measure(pid, tensors, numbers, OPTIONS)
    else:
        _emit(pid, tensors, numbers, OPTIONS)
