"""Loads, list entries and masks that the forward and the backward kernels share."""

import triton
import triton.language as tl

# a block after the end of every sequence: what ``fetch`` gives past the end of a list
NO_BLOCK = tl.constexpr(2**22)


@triton.jit
def load_rows(
    base,
    offsets,
    live,
    OPTIONS: tl.constexpr,
    OF_V: tl.constexpr,
    MASKED: tl.constexpr,
    TURNED: tl.constexpr = False,
):
    """Load rows of q or k, or with ``OF_V`` of v, out or dout: ``[rows, columns]``.

    Rows that are not ``live`` give 0. ``offsets`` are the rows' offsets in elements, as int64: they
    may exceed 2**31. The launcher ensures that every row is aligned to ``ROW_BYTES``. With
    ``TURNED`` the tile is transposed, ``[columns, rows]``.
    """
    WIDTH: tl.constexpr = OPTIONS.HEAD_DIM_V if OF_V else OPTIONS.HEAD_DIM
    BLOCK: tl.constexpr = OPTIONS.BLOCK_DV if OF_V else OPTIONS.BLOCK_D
    ROW_BYTES: tl.constexpr = OPTIONS.ROW_BYTES_V if OF_V else OPTIONS.ROW_BYTES
    AXIS: tl.constexpr = 0 if TURNED else 1
    cols = tl.arange(0, BLOCK)  # [BLOCK]
    begin = tl.multiple_of(base + tl.expand_dims(offsets, AXIS), [ROW_BYTES, ROW_BYTES])
    pointers = begin + tl.expand_dims(cols, 1 - AXIS)
    if MASKED:
        inside = tl.expand_dims(live, AXIS) & tl.expand_dims(cols < WIDTH, 1 - AXIS)
        tile = tl.load(pointers, mask=inside, other=0.0)
    elif WIDTH != BLOCK:
        tile = tl.load(pointers, mask=tl.expand_dims(cols < WIDTH, 1 - AXIS), other=0.0)
    else:
        tile = tl.load(pointers)  # whole tile inside: no mask needed
    return tile


@triton.jit
def floor_div(x, DIVISOR: tl.constexpr):
    """Divide and round down, also for negative numbers."""
    return tl.where(x >= 0, x // DIVISOR, -((DIVISOR - 1 - x) // DIVISOR))


@triton.jit
def lower_bound(items_ptr, first, last, limit, DIVISOR: tl.constexpr):
    """Return the first index from ``first`` on whose item's block is at least ``limit``."""
    while first < last:
        middle = (first + last) // 2
        is_below = tl.load(items_ptr + middle) // DIVISOR < limit
        first = tl.where(is_below, middle + 1, first)
        last = tl.where(is_below, last, middle)
    return first


@triton.jit
def fetch(values_ptr, step, ranges, other, SIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Load the list entry of a step: a scalar, or one entry for each of ``SIDE`` tokens.

    A step is a tile of ``SIDE`` tokens: a part of a block of the layout, or several blocks. The
    walk covers three ranges of the list, one after the other; past them the entry is ``other``.
    """
    if BLOCK >= SIDE:
        place = step // (BLOCK // SIDE)
    else:
        place = step * (SIDE // BLOCK) + tl.arange(0, SIDE) // BLOCK
    behind_a = place - ranges.count_a
    at = tl.where(behind_a < 0, ranges.first_a + place, ranges.first_b + behind_a)
    behind_b = behind_a - ranges.count_b
    at = tl.where(behind_b < 0, at, ranges.first_c + behind_b)
    return tl.load(values_ptr + at, mask=behind_b < ranges.count_c, other=other)


@triton.jit
def count_steps(items, SIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the number of steps that walk ``items`` items."""
    if BLOCK >= SIDE:
        steps = items * (BLOCK // SIDE)
    else:
        steps = tl.cdiv(items, SIDE // BLOCK)
    return steps.to(tl.int32)


@triton.jit
def tokens_of(block, step, SIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the tokens of a step, given its block or blocks from ``fetch``."""
    lane = tl.arange(0, SIDE)  # [SIDE]
    if BLOCK > SIDE:
        tokens = block * BLOCK + step % (BLOCK // SIDE) * SIDE + lane
    elif BLOCK == SIDE:
        tokens = block * BLOCK + lane
    else:
        tokens = block * BLOCK + lane % BLOCK
    return tokens


@triton.jit
def in_range(keys, first, last):
    """Say which keys the layout's token rule lets a row see."""
    return (keys >= first) & (keys <= last)


@triton.jit
def sees(keys, members, rows, tensors, HAS_MEMBERS: tl.constexpr, OPTIONS: tl.constexpr):
    """Say which keys of a step each row of the tile sees, ``[rows, keys]``."""
    if OPTIONS.IS_CAUSAL:
        visible = keys[None, :] <= rows.positions[:, None]
    else:
        visible = (keys < rows.work.seqlen_k)[None, :] & (rows.positions >= 0)[:, None]
    if HAS_MEMBERS:
        visible &= keeps(members, rows.bits, OPTIONS.BLOCK_N, OPTIONS.BLOCK_K)
    if tensors.rule_ptr is not None:
        visible &= in_range(keys[None, :], rows.first_key[:, None], rows.last_key[:, None])
    return visible


@triton.jit
def live_keys(keys, members, rows, tensors, HAS_MEMBERS: tl.constexpr, OPTIONS: tl.constexpr):
    """Say which keys of a step some row of the tile sees; the other keys must not be read.

    ``members`` has a bit for each of the tile's rows of blocks: whether it keeps the key's block.
    """
    if OPTIONS.ROW_MEMBERS > 1:
        reach = members * 0 - 1
        for i in tl.static_range(OPTIONS.ROW_MEMBERS):
            first = tl.maximum(rows.span_start + i * OPTIONS.BLOCK_Q, rows.first_position)
            last = tl.minimum(rows.span_start + (i + 1) * OPTIONS.BLOCK_Q - 1, rows.last_position)
            is_kept = ((members >> i) & 1) != 0
            reach = tl.where(is_kept & (first <= last), last, reach)
    else:
        # every block of the list is kept by some head
        reach = rows.last_position
    if OPTIONS.IS_CAUSAL:
        # with top-left alignment, rows may stand after the last key
        live = keys <= tl.minimum(reach, rows.work.seqlen_k - 1)
    else:
        live = keys < tl.where(reach >= 0, rows.work.seqlen_k, 0)
    if tensors.rule_ptr is not None:
        visible = sees(keys, members, rows, tensors, HAS_MEMBERS, OPTIONS)
        live &= tl.max(visible.to(tl.int32), 0) > 0
    return live


@triton.jit
def keeps(members, bits, SIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Say which of the tile's rows keep a step's tokens: ``[rows, tokens]``, or ``[rows, 1]``."""
    if BLOCK >= SIDE:
        kept = (((members >> bits) & 1) != 0)[:, None]
    else:
        kept = ((members[None, :] >> bits[:, None]) & 1) != 0
    return kept


@triton.jit
def fetch_keys(step, ranges, tensors, HAS_MEMBERS: tl.constexpr, OPTIONS: tl.constexpr):
    """Load the block or blocks of a step of keys, and the members of the tile that keep them."""
    block = fetch(tensors.items_ptr, step, ranges, NO_BLOCK, OPTIONS.BLOCK_N, OPTIONS.BLOCK_K)
    members = 1
    if HAS_MEMBERS:
        members = fetch(tensors.members_ptr, step, ranges, 0, OPTIONS.BLOCK_N, OPTIONS.BLOCK_K)
    return block, members


@triton.jit
def key_offsets(keys, live, strides, table_ptr, MASKED: tl.constexpr, PAGE: tl.constexpr):
    """Return the offsets of keys, in elements, in the cache or in the sequence."""
    if PAGE:
        if MASKED:
            page = tl.load(table_ptr + keys // PAGE, mask=live, other=0)
        else:
            page = tl.load(table_ptr + keys // PAGE)  # whole tile inside: no mask needed
        offsets = page.to(tl.int64) * strides.batch + (keys % PAGE) * strides.token
    else:
        offsets = keys.to(tl.int64) * strides.token
    return offsets
