"""Makes lists on the device, in a few launches whose sizes are upper bounds from shapes.

A bitmap (1 bit per block of the grid) is made first. It is capped at ``BYTES`` or the size for one
group of heads; larger layouts are processed per group of heads, in two passes. All other tensors
are proportional to the number of kept blocks.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from attn_common import cdiv
from torch import Tensor

from ..._attention.portable.form import launch_of
from ..._linked.launch.entries import flat
from ..._linked.launch.kernels import Kernel
from .. import lists as layout_lists
from ..lists import Lists, ListSpec, Pairs, common_bounds, empty_lists, piece_of, steps_of
from .arguments import (
    RANKED,
    BitNumbers,
    BitOptions,
    BitTensors,
    ListNumbers,
    ListOptions,
    ListTensors,
    PairNumbers,
    PairOptions,
    PairTensors,
    Pieces,
)

bit_kernel = Kernel(__package__, ".lists", "bit_kernel")
list_kernel = Kernel(__package__, ".lists", "list_kernel")
pair_kernel = Kernel(__package__, ".pairs", "pair_kernel")

# entries of ``col``, or items, per program
BLOCK = 512
# cap of the bitmap: 32 heads of 128k tokens in blocks of 16, or of 512k tokens in blocks of 64
BYTES = 2**28
# entries per step of the stages that go through a program of the Hopper backward
ENTRIES = 128


@functools.cache
def _launch(kernel: Any, options: Any, form: tuple[Any, ...]) -> Any:
    return launch_of(kernel, options, num_warps=4, num_stages=1)


def _run(kernel: Any, options: Any, grid: int, tensors: Any, numbers: Any) -> None:
    """Run a launch that is cached by the tensors' dtypes and devices, and by which are None."""
    form = tuple(None if t is None else (t.dtype, t.device) for t in tensors)
    _launch(kernel, options, form)(grid, tensors, flat(numbers))


def mark_bits(
    crow: Tensor,
    col: Tensor,
    cols: int,
    lists: tuple[int, int],
    items: int,
    pieces: Pieces,
    group: int,
    by_key: bool,
    causal: bool,
) -> Tensor:
    """Return the bits of the kept blocks, int32 ``[lines of all lists, words]``.

    Args:
        crow: row pointers ``[heads, rows + 1]``.
        col: columns ``[heads, nnz]``.
        cols: number of key blocks.
        lists: number of lists, and lines per list.
        items: bits per line.
        pieces: how blocks are cut.
        group: heads that share the lines of a list.
        by_key: whether lines are columns.
        causal: leave out blocks after the diagonal.
    """
    (heads, nnz), rows = col.shape, crow.shape[1] - 1
    count, lines = lists
    words = cdiv(items, 32)
    bits = torch.zeros((count * lines, words), dtype=torch.int32, device=crow.device)
    numbers = BitNumbers(
        chunks=cdiv(nnz, BLOCK),
        nnz=nnz,
        rows=rows,
        cols=cols,
        steps=(rows + 1).bit_length(),
        group=group,
        lines=lines,
        words=words,
        pieces=pieces,
    )
    options = BitOptions(BY_KEY=by_key, IS_CAUSAL=causal, BLOCK=BLOCK)
    tensors = BitTensors(crow_ptr=crow, col_ptr=col, bits_ptr=bits)
    _run(bit_kernel, options, heads * numbers.chunks, tensors, numbers)
    return bits


def make_lists(
    crow: Tensor,
    col: Tensor,
    cols: int,
    block_size: tuple[int, int],
    spec: ListSpec,
    rule: Tensor | None = None,
) -> Lists:
    """Make the lists of a layout: count each owner's items, sum the counts, write the items."""
    block_q, block_k = block_size
    heads, rows = len(col), crow.shape[1] - 1
    group, pack = spec.group, 1 if spec.by_key else spec.pack
    side, other, lines, items = (
        (block_k, block_q, cols, rows * group) if spec.by_key else (block_q, block_k, rows, cols)
    )
    stack = max(spec.span // side, 1)
    owners = max(cdiv(lines, stack), 1)
    groups, packs = cdiv(heads, group), 1 if spec.by_key else cdiv(group, pack)
    # groups of heads whose bits are held at once
    in_group = (1 if spec.by_key else group) * lines * cdiv(items, 32) * 4
    step = max(BYTES // max(in_group, 1), 1)

    def bits_of(first: int) -> Tensor:
        part = slice(first * group, (first + step) * group)
        own, shared = len(crow[part]), 1
        if spec.by_key:
            own, shared = min(step, groups - first), group
        csr, blocks = (crow[part], col[part], cols), Pieces(1, 1, block_q, block_k)
        return mark_bits(*csr, (own, lines), items, blocks, shared, spec.by_key, spec.causal)

    chunks = max(cdiv(items, BLOCK), 1)
    made = empty_lists(crow, col, cols, block_size, spec)
    parts = 4 if spec.halves else 2
    counts = made.items.new_empty(parts * len(made.whole) * chunks)
    ends = made.begin.new_zeros(len(counts) + 1)
    common = None if rule is None else common_bounds(rule, block_q)
    members = pack if pack > 1 else stack
    options = ListOptions(
        BY_KEY=spec.by_key,
        IS_CAUSAL=spec.causal,
        IS_PACKED=pack > 1,
        MEMBERS=members,
        HALVES=spec.halves,
        BLOCK=BLOCK,
        WRITES=False,
    )

    def run(first: int, bits: Tensor, writes: bool) -> None:
        own = min(step, groups - first)
        numbers = ListNumbers(
            owners=owners,
            chunks=chunks,
            items=items,
            lines=lines,
            words=bits.shape[1],
            heads=min(heads - first * group, own * group),
            group=group,
            packs=packs,
            span=stack * side,
            block=other,
            bound=len(made.items),
        )
        at = first * packs * owners
        tensors = ListTensors(
            bits_ptr=bits,
            counts_ptr=counts[parts * at * chunks :],
            ends_ptr=ends[parts * at * chunks :],
            begin_ptr=made.begin[at:],
            whole_ptr=made.whole[at:],
            items_ptr=made.items,
            members_ptr=made.members,
            common_ptr=common,
        )
        grid = own * packs * owners * chunks
        _run(list_kernel, options._replace(WRITES=writes), grid, tensors, numbers)

    for first in range(0, groups, step):
        bits = bits_of(first)
        run(first, bits, False)
    torch.cumsum(counts, 0, out=ends[1:])
    # each part overwrites the zeros that the part before it wrote past its end
    for first in range(0, groups, step):
        bits = bits if step >= groups else bits_of(first)
        run(first, bits, True)
    return made


def make_pairs(
    crow: Tensor, col: Tensor, cols: int, block_size: tuple[int, int], spec: ListSpec
) -> Pairs:
    """Make the lists of the Hopper backward."""
    heads, device, turns = len(col), crow.device, spec.pack
    piece = piece_of(block_size)
    parts_q, parts_k = (tokens // piece for tokens in block_size)
    side = layout_lists.SIDE // piece
    made = empty_lists(crow, col, cols, block_size, spec)
    made.parts.zero_()
    pieces, programs, bound = len(made.parts), len(made.owners), len(made.items)
    lists = cdiv(heads, spec.group)
    in_list = pieces // lists
    in_blocks = in_list if side == 1 else in_list // side * 2
    rows = max(cdiv((crow.shape[1] - 1) * parts_q, side), 1)
    items = rows * spec.group
    cut, count = Pieces(parts_q, parts_k, piece, piece, side), (lists, in_list)
    bits = mark_bits(crow, col, cols, count, items * side, cut, spec.group, True, spec.causal)
    blocks = lists * in_blocks
    pairs, chunks = blocks // 2, cdiv(items, BLOCK)

    def ints(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def longs(*size: int) -> Tensor:
        return ints(*size, dtype=torch.int64)

    tensors = PairTensors(
        bits_ptr=bits,
        cells_ptr=ints(0 if side == 1 else blocks, items),
        alone_ptr=ints(blocks),
        last_ptr=ints(blocks),
        order_ptr=ints(blocks),
        rank_ptr=ints(blocks),
        pieces_ptr=ints(blocks, side),
        lasts_ptr=ints(blocks),
        alike_ptr=ints(pairs),
        counts_ptr=longs(4 * pairs * chunks),
        ends_ptr=longs(0),
        first_ptr=ints(2 * pairs + 1),
        owner_ptr=ints(programs),
        starts_ptr=longs(programs + 1),
        entries_ptr=ints(bound - 1),
        seen_ptr=ints(bound - 1),
        keys_ptr=longs(programs),
        parts_of_ptr=ints(programs, 4),
        places_ptr=longs(0),
        sums_ptr=longs(0),
        made=made,
    )
    numbers = PairNumbers(
        pairs=pairs,
        items=items,
        group=spec.group,
        words=bits.shape[1],
        in_list=in_list,
        in_blocks=in_blocks,
        sorted=in_blocks,
        kept=layout_lists.KEPT,
        chunks=chunks,
        most=2 * steps_of(layout_lists.LONGEST, turns),
        most_apart=2 * steps_of(layout_lists.SHORTER, turns),
        programs=programs,
        turns=turns,
        rows=rows,
        lists=lists,
        bound=bound,
        head=layout_lists.HEAD,
        window=layout_lists.WINDOW,
        alike=layout_lists.ALIKE,
    )

    def run(stage: str, grid: int, x: PairTensors, n: PairNumbers) -> None:
        options = PairOptions(
            STAGE=stage, SIDE=side, IS_CAUSAL=spec.causal, BLOCK=BLOCK, ENTRIES=ENTRIES
        )
        _run(pair_kernel, options, grid, flat(x), n)

    if side > 1:
        # the same stages for pieces, before blocks are made of them
        alone, last, order, rank = (ints(pieces) for _ in range(4))
        x = tensors._replace(alone_ptr=alone, last_ptr=last, order_ptr=order, rank_ptr=rank)
        n = numbers._replace(sorted=in_list, kept=layout_lists.KEPT)
        run("apart", pieces // side, x, n)
        run("rank", lists * cdiv(in_list, RANKED), x, n)
        run("cells", blocks, x, n)
    run("alone", pairs, tensors, numbers)
    run("rank", lists * cdiv(in_blocks, RANKED), tensors, numbers)
    run("compare", pairs, tensors, numbers)
    run("count", 2 * pairs * chunks, tensors, numbers)
    tensors = tensors._replace(ends_ptr=tensors.counts_ptr.cumsum(0))
    run("cut", 1, tensors, numbers)
    run("write", 2 * pairs * chunks, tensors, numbers)
    run("measure", programs, tensors, numbers)
    places = tensors.keys_ptr.sort(stable=True).indices
    sums = tensors.parts_of_ptr[places].flatten().cumsum(0)
    tensors = tensors._replace(places_ptr=places, sums_ptr=sums)
    run("emit", programs, tensors, numbers)
    return made
