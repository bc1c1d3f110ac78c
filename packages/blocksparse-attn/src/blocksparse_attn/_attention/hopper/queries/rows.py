"""What the consumers of the forward and of dq share: receiving a tile, its mask, its stores."""

from ...._linked.hopper.compat import copy_out, gl, gluon, hopper, mbarrier, tma
from ...._linked.hopper.pipeline import SLOTS, coordinates, opaque
from ...._linked.hopper.ptx import hide_unless
from ..structures import Announced, Entries, Place, Rows, Walk
from .schedule import FIELDS, NO_BLOCK, diagonal_of, half_places, pick, places


@gluon.jit
def receive(count, pipeline):
    """Wait for the numbers of a tile of queries; the head is -1 if no tile is left."""
    layout: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [4], [0])
    slot = count % SLOTS
    mbarrier.wait(pipeline.tile_full.index(slot), count // SLOTS & 1)
    fields = pipeline.fields_s.index(slot).load(layout)  # [FIELDS]
    mbarrier.arrive(pipeline.tile_empty.index(slot), count=1)
    return fields


@gluon.jit
def understood(fields):
    """Return the received numbers of a tile of queries by name."""
    first, seen, cut = pick(fields, 6), pick(fields, 7), pick(fields, 8)
    count, whole, halves = pick(fields, 9), pick(fields, 10), pick(fields, 11)
    alone_at, alone_0, alone_1 = pick(fields, 12), pick(fields, 13), pick(fields, 14)
    odd = pick(fields, 15)
    walk = Walk(first, seen, cut, count, whole, halves, alone_at, alone_0, alone_1, odd)
    head, first_row, sequence = pick(fields, 0), pick(fields, 1), pick(fields, 2)
    q_start, len_q, len_k = pick(fields, 3), pick(fields, 4), pick(fields, 5)
    return Announced(head, first_row, sequence, q_start, len_q, len_k, walk)


@gluon.jit
def place_of(tile, W: gl.constexpr, OPTIONS: gl.constexpr):
    """Return the place of warpgroup ``W``'s rows of a tile of queries."""
    row, head = tile.first_row, tile.head
    if OPTIONS.HEADS == 1:
        row += W * OPTIONS.ROWS
    else:
        head += W
    return Place(row, head, tile.sequence, tile.q_start, tile.len_q)


@gluon.jit
def rows_of(tile, place, factor, S: gl.constexpr, OPTIONS: gl.constexpr):
    """Return what the rows at ``place`` see; scores have the layout ``S``."""
    diagonal = diagonal_of(tile.len_q, tile.len_k, OPTIONS.TOP_LEFT)
    start = tile.first_row + diagonal  # the tile's first position, a multiple of its positions
    positions = place.row + diagonal + gl.arange(0, OPTIONS.ROWS, gl.SliceLayout(1, S))  # [ROWS]
    bits = gl.maximum(positions - start // OPTIONS.SPAN * OPTIONS.SPAN, 0) // OPTIONS.BLOCK_Q
    last_seen = positions * 0 + tile.len_k - 1
    if OPTIONS.IS_CAUSAL:
        last_seen = gl.minimum(positions, last_seen)
    return Rows(last_seen, bits, factor)


@gluon.jit
def hide(s, entries, rows, OPTIONS: gl.constexpr):
    """Mask keys after a row's last key, and keys of blocks that the row does not keep."""
    S: gl.constexpr = s.type.layout
    col = gl.arange(0, s.shape[1], gl.SliceLayout(0, S))  # [BLOCK_N]
    R: gl.constexpr = gl.SliceLayout(1, S)
    last_seen, bits = (gl.convert_layout(rows.last_seen, R), gl.convert_layout(rows.bits, R))
    # the last key of each block that a row sees, counted within the block
    limit = gl.full(s.shape, -1, gl.int32, S)  # [ROWS, BLOCK_N]
    for i in gl.static_range(entries.items.shape[0]):
        reach = last_seen - pick(entries.items, i) * OPTIONS.BLOCK_K  # [ROWS]
        if OPTIONS.ROW_MEMBERS > 1:
            reach = gl.where(((pick(entries.members, i) >> bits) & 1) != 0, reach, -1)
        limit = gl.where((col // OPTIONS.BLOCK_K == i)[None, :], reach[:, None], limit)
    return hide_unless(s, (col % OPTIONS.BLOCK_K)[None, :], limit)


@gluon.jit
def entries_of(walk, step, tensors, OPTIONS: gl.constexpr):
    """Load the key blocks of a step, and which of the tile's rows of blocks keep each block."""
    PER_STEP: gl.constexpr = OPTIONS.BLOCK_N // OPTIONS.BLOCK_K
    lane = gl.arange(0, PER_STEP, gl.BlockedLayout([PER_STEP], [32], [4], [0]))  # [PER_STEP]
    at, there = places(walk, step, lane)
    return _load_entries(at, there, tensors, OPTIONS)


@gluon.jit
def half_entries_of(walk, step, W: gl.constexpr, tensors, OPTIONS: gl.constexpr):
    """Load warpgroup ``W``'s key blocks of a half step, and which rows of blocks keep each."""
    HALF: gl.constexpr = OPTIONS.BLOCK_N // OPTIONS.BLOCK_K // 2
    lane = gl.arange(0, HALF, gl.BlockedLayout([HALF], [32], [4], [0]))  # [HALF]
    at, there = half_places(walk, step, lane, lane * 0 + W, HALF)
    return _load_entries(at, there, tensors, OPTIONS)


@gluon.jit
def _load_entries(at, there, tensors, OPTIONS: gl.constexpr):
    items = gl.load(tensors.items_ptr + at, mask=there, other=NO_BLOCK)
    members = items
    if OPTIONS.ROW_MEMBERS > 1:
        members = gl.load(tensors.members_ptr + at, mask=there, other=0)
    return Entries(items, members)


@gluon.jit
def send(o, place, W: gl.constexpr, tensors, numbers, pipeline):
    """Round warpgroup ``W``'s rows of the output or of dq, and start to store them."""
    RAGGED: gl.constexpr = tensors.cu_seqlens_q_ptr is not None
    ROWS: gl.constexpr = o.shape[0]
    WIDTH: gl.constexpr = o.shape[1]
    row, head, sequence, q_start, len_q = place
    out_s, width = pipeline.out_s.index(W), numbers.width
    tma.store_wait(0)
    tile_s = out_s.reshape([ROWS, WIDTH])
    tile_s.store(o.to(out_s.dtype))
    if row >= 0:
        hopper.fence_async_shared()
        where = coordinates(sequence, head, q_start, len_q, row, RAGGED)
        copy_out(tensors.out_desc, where, out_s)
    else:
        # the TMA clips at a sequence's end, but the copy must begin inside the sequence
        LANES: gl.constexpr = WIDTH // 8
        B: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
        lines = row + gl.arange(0, ROWS, gl.SliceLayout(1, B))  # [ROWS]
        cols = gl.arange(0, WIDTH, gl.SliceLayout(0, B))  # [WIDTH]
        inside = ((lines >= 0) & (lines < len_q))[:, None] & (cols < width)[None, :]
        if RAGGED:
            first = q_start
        else:
            first = sequence.to(gl.int64) * opaque(numbers.tokens_q)
        # opaque: the compiler would hoist the products that tiles share, into registers
        at = ((first + lines).to(gl.int64) * opaque(numbers.heads_q) + head) * opaque(width)
        pointers = tensors.out_ptr + (at[:, None] + cols[None, :])
        gl.store(pointers, tile_s.load(B), mask=inside)  # [ROWS, WIDTH]
