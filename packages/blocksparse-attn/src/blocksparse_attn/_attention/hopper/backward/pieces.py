"""Tiles of 64 rows in the Hopper backward, each one block or several pieces (see ``Pairs``).

Each piece is copied by itself, and written or added to its own sums. Shared memory holds a tile of
pieces in panels of 64 columns; a copy brings a piece's rows of one panel.
"""

from ...._linked.hopper.compat import copy_in, copy_out, gl, gluon, hopper, mbarrier
from ...._linked.hopper.gradients import ROWS, add_to_memory, write
from ...._linked.hopper.pipeline import coordinates
from ..boxes import boxes_of
from ..queries.schedule import NO_BLOCK
from .lists import owned_by


@gluon.jit
def tiles(COUNT: gl.constexpr, desc, PIECE: gl.constexpr, WIDTH: gl.constexpr):
    """Allocate shared memory for tiles of 64 rows, which are copied whole or in pieces."""
    dtype: gl.constexpr = desc.dtype
    if PIECE == ROWS:
        made = gl.allocate_shared_memory(dtype, [COUNT, 1, 1, 1, ROWS, WIDTH], desc.layout)
    else:
        tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], dtype)
        made = gl.allocate_shared_memory(dtype, [COUNT, ROWS, WIDTH], tile)
    return made


@gluon.jit
def copy_piece(desc, where, full, boxes_s, tile, i, PIECE: gl.constexpr, WIDTH: gl.constexpr):
    """Copy the ``i``-th piece of a tile, panel by panel."""
    x, sequence, head, row, _ = where
    for panel in gl.static_range(WIDTH // 64):
        box = boxes_s.index((tile * (WIDTH // 64) + panel) * (ROWS // PIECE) + i)
        copy_in(desc, (x, sequence, head, row, panel * 64), full, box)


@gluon.jit
def first_key(owned_ptr, seen, place, PIECE: gl.constexpr):
    """Return the first row of a piece of keys; if unseen, a row for which the TMA gives zeros."""
    piece = gl.load(owned_ptr + place)
    is_seen = (piece >= 0) & (((seen >> place) & 1) != 0)
    return gl.where(is_seen, piece, NO_BLOCK) * PIECE


@gluon.jit
def first_query(item, diagonal, j, PIECE: gl.constexpr):
    """Return the first row of a piece of queries; if it sees no key, a row after the end."""
    SIDE: gl.constexpr = ROWS // PIECE
    cells = item.bits * 0
    for i in gl.static_range(SIDE):
        cells |= (item.bits >> (i * SIDE + j)) | (item.bits >> (16 + i * SIDE + j))
    return gl.where((cells & 1) != 0, item.block * ROWS + j * PIECE - diagonal, NO_BLOCK * ROWS)


@gluon.jit
def copy_keys(desc, tiles_s, full, work, tensors, PIECE: gl.constexpr):
    """Copy a program's two blocks of keys or of values."""
    RAGGED: gl.constexpr = tensors.cu_seqlens_ptr is not None
    WIDTH: gl.constexpr = tiles_s.shape[-1]
    program, keys = work.program, work.keys
    sequence, head = program.sequence, program.head_k
    start, len_k = program.start, program.len_k
    mbarrier.expect(full, 2 * ROWS * WIDTH * (desc.dtype.primitive_bitwidth // 8))
    if PIECE == ROWS:
        where = coordinates(sequence, head, start, len_k, keys.seen_0 * ROWS, RAGGED)
        copy_in(desc, where, full, tiles_s.index(0))
        where = coordinates(sequence, head, start, len_k, keys.seen_1 * ROWS, RAGGED)
        copy_in(desc, where, full, tiles_s.index(1))
    else:
        # computed again: with ``work.owned_ptr`` ptxas spills more
        owned_ptr = owned_by(program, tensors, PIECE)
        boxes = boxes_of(tiles_s, desc, PIECE)
        SIDE: gl.constexpr = ROWS // PIECE
        for i in gl.static_range(2 * SIDE):
            row = first_key(owned_ptr, keys.seen, i, PIECE)
            where = coordinates(sequence, head, start, len_k, row, RAGGED)
            copy_piece(desc, where, full, boxes, i // SIDE, i % SIDE, PIECE, WIDTH)


@gluon.jit
def copy_queries(
    desc, tiles_s, full, stage, item, head, program, RAGGED: gl.constexpr, PIECE: gl.constexpr
):
    """Copy a block of queries or of dout; pieces that see no key become zeros."""
    WIDTH: gl.constexpr = tiles_s.shape[-1]
    sequence, start = program.sequence, program.start
    len_q, diagonal = program.len_q, program.diagonal
    mbarrier.expect(full, ROWS * WIDTH * (desc.dtype.primitive_bitwidth // 8))
    if PIECE == ROWS:
        where = coordinates(sequence, head, start, len_q, item.block * ROWS - diagonal, RAGGED)
        copy_in(desc, where, full, tiles_s.index(stage))
    else:
        boxes = boxes_of(tiles_s, desc, PIECE)
        for j in gl.static_range(ROWS // PIECE):
            row = first_query(item, diagonal, j, PIECE)
            where = coordinates(sequence, head, start, len_q, row, RAGGED)
            copy_piece(desc, where, full, boxes, stage, j, PIECE, WIDTH)


@gluon.jit
def key_positions(owned_ptr, layout: gl.constexpr, PIECE: gl.constexpr):
    """Return the positions of a block's keys in their sequence; negative for no piece."""
    key = gl.arange(0, ROWS, layout)  # [ROWS]
    return gl.load(owned_ptr + key // PIECE) * PIECE + key % PIECE


@gluon.jit
def write_block(gradient, desc, tiles_s, W: gl.constexpr, work, tensors, PIECE: gl.constexpr):
    """Start the stores of a gradient, for the pieces that only this warpgroup owns."""
    RAGGED: gl.constexpr = tensors.cu_seqlens_ptr is not None
    WIDTH: gl.constexpr = tiles_s.shape[-1]
    SIDE: gl.constexpr = ROWS // PIECE
    program, keys = work.program, work.keys
    sequence, head = program.sequence, program.head_k
    start, len_k = program.start, program.len_k
    if PIECE == ROWS:
        block = keys.block_0 if W == 0 else keys.block_1
        where = coordinates(sequence, head, start, len_k, block * ROWS, RAGGED)
        write(gradient, desc, tiles_s.index(W), where, WIDTH)
    else:
        tiles_s.index(W).store(gradient.to(tiles_s.dtype))
        hopper.fence_async_shared()
        boxes = boxes_of(tiles_s, desc, PIECE)
        mine = keys.mine_0 if W == 0 else keys.mine_1
        owned_ptr = work.owned_ptr + W * SIDE
        for i in gl.static_range(SIDE):
            if (mine >> i) & 1 != 0:
                row = gl.load(owned_ptr + i) * PIECE
                where = coordinates(sequence, head, start, len_k, row, RAGGED)
                x, y, _, at, _ = where
                for panel in gl.static_range(WIDTH // 64):
                    box = boxes.index((W * (WIDTH // 64) + panel) * SIDE + i)
                    copy_out(desc, (x, y, head, at, panel * 64), box)


@gluon.jit
def add_block(pointer, gradient, W: gl.constexpr, work, tensors, PIECE: gl.constexpr):
    """Add a warpgroup's rows of a gradient to sums in memory."""
    program, keys = work.program, work.keys
    if PIECE == ROWS:
        block = keys.block_0 if W == 0 else keys.block_1
        add_to_memory(pointer + block.to(gl.int64) * (ROWS * gradient.shape[1]), gradient)
    else:
        owned_ptr = work.owned_ptr + W * (ROWS // PIECE)
        _add_pieces(pointer, owned_ptr, program.len_k, gradient, PIECE)


@gluon.jit
def _add_pieces(pointer, owned_ptr, len_k, values, PIECE: gl.constexpr):
    """Add rows to the sums of their pieces, in the order of ``add_to_memory``.

    Sums of pieces that no other program owns are never read.
    """
    WIDTH: gl.constexpr = values.shape[1]
    WARPS: gl.constexpr = PIECE // 16
    layout: gl.constexpr = gl.SliceLayout(1, values.type.layout)
    positions = key_positions(owned_ptr, layout, PIECE)  # [ROWS]
    # pieces outside the sequence have no sums: add 0 to other sums
    is_there = (positions >= 0) & (positions < len_k)
    values = gl.where(is_there[:, None], values, 0.0)
    values = gl.reshape(values, [4, 2, 8, WIDTH // 8, 4, 2])
    values = gl.reshape(gl.permute(values, (3, 0, 2, 4, 1, 5)), [ROWS * WIDTH])
    index = gl.arange(0, ROWS * WIDTH, values.type.layout)  # [ROWS * WIDTH]
    warp = index // 128 % 4
    at = index // 512 * (PIECE * 8) + warp % WARPS * 128 + index % 128
    for i in gl.static_range(ROWS // PIECE):
        piece = gl.load(owned_ptr + i)
        piece = gl.where((piece >= 0) & (piece * PIECE < len_k), piece, 0)
        at += gl.where(warp // WARPS == i, piece * (PIECE * WIDTH), 0)
    gl.inline_asm_elementwise(
        "red.relaxed.gpu.global.add.v4.f32 [$4], {$8, $9, $10, $11};"
        " mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;",
        "=r,=r,=r,=r,l,l,l,l,f,f,f,f",
        [(pointer + at).to(gl.int64), values],
        dtype=gl.int32,
        is_pure=False,
        pack=4,
    )
