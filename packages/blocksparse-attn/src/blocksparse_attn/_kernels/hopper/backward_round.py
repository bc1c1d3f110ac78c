"""Around the Hopper backward: numbers of rows and sums of 0 ahead of it, rounded gradients after.

Both kernels go through their places from the last to the first: what the programs between them read
first was then written last, and what they wrote last is read first, while the cache has it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..backward_rows import number_rows
from ..schedule import locate_keys, locate_queries

# tokens of a tile of sums
SIDE = tl.constexpr(64)
# sums that are set to 0 at a time
PIECE = 2048


@triton.jit
def _tile(sums_ptr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Load sums in the order in which ``add_to_memory`` left 64 rows, and ``add_pieces`` fewer."""
    sums = tl.load(sums_ptr + tl.arange(0, ROWS * WIDTH))
    sums = tl.permute(tl.reshape(sums, (WIDTH // 8, ROWS // 16, 8, 4, 2, 2)), (1, 4, 2, 0, 3, 5))
    return tl.reshape(sums, (ROWS, WIDTH))


@triton.jit
def _clear(sums_ptr, COUNT: tl.constexpr):
    tl.store(sums_ptr + tl.arange(0, COUNT), tl.zeros([COUNT], tl.float32))


@triton.jit
def _store(gradient, pointer, token, inside, head, heads, first, WIDTH: tl.constexpr):
    """Write columns of a gradient ``[tokens, heads, WIDTH]``, from the ``first`` on."""
    cols = first + tl.arange(0, gradient.shape[1])
    pointers = pointer + ((token.to(tl.int64) * heads + head) * WIDTH)[:, None] + cols[None, :]
    mask = inside[:, None] & (cols < WIDTH)[None, :]
    tl.store(pointers, gradient.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _locate(
    place, cu_seqlens_ptr, batch, heads_k, tokens_q, tokens_k, tiles
):  # fmt: skip
    """Return ``(tile, is_owned, start, head, seqlen_k)`` of 64 keys.

    Tile -1 is none at all. Padding around the sequences is nobody's.
    """
    tile, sequence, head, _q_start, start, _seqlen_q, seqlen_k = locate_keys(
        place, cu_seqlens_ptr, cu_seqlens_ptr, batch, heads_k, tokens_q, tokens_k, tiles, 1, SIDE,
        False,
    )  # fmt: skip
    if cu_seqlens_ptr is None:
        start += sequence.to(tl.int64) * tokens_k
    return tile, (tile >= 0) & (sequence >= 0) & (sequence < batch), start, head, seqlen_k


@triton.jit
def _parts(parts_ptr, piece, is_owned, head, list_pieces, PER_HEAD: tl.constexpr):
    """Return how many programs own a piece; keys behind the layout's last are nobody's."""
    if PER_HEAD:
        parts_ptr += head * list_pieces
    return tl.load(parts_ptr + piece, mask=is_owned & (piece < list_pieces), other=0)


@triton.jit(
    do_not_specialize=[
        "tokens_q", "rows", "stride_dob", "stride_dos", "stride_doh", "heads_q", "batch",
        "heads_k", "tokens_k", "tiles_k", "list_pieces", "slots_k", "share", "pieces",
    ],
    do_not_specialize_on_alignment=[
        "out_ptr", "dout_ptr", "lse_ptr", "dlse_ptr", "delta_ptr", "lse2_ptr", "parts_ptr",
        "cu_seqlens_ptr",
    ],
)  # fmt: skip
def prepare_kernel(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, delta_ptr, lse2_ptr, dq_sums_ptr, dk_sums_ptr,
    dv_sums_ptr, parts_ptr, cu_seqlens_ptr,
    tokens_q, rows, stride_dob, stride_dos, stride_doh, heads_q, batch, heads_k, tokens_k, tiles_k,
    list_pieces, slots_k, share, pieces,
    PER_HEAD: tl.constexpr,  # lists of each key head, or one for all
    TOKENS: tl.constexpr,  # tokens of the layout's blocks, up to 64
    HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,  # columns of sums
    ROW_BYTES_V: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Write the numbers of some rows, and set to 0 a share of the sums, of dk and dv by blocks.

    Of these it is those to which programs will add.
    """
    place = tl.num_programs(0) - 1 - tl.program_id(0)
    number_rows(
        place, out_ptr, dout_ptr, lse_ptr, dlse_ptr, delta_ptr, lse2_ptr,
        tokens_q, rows, stride_dob, stride_dos, stride_doh, heads_q,
        HEAD_DIM_V, BLOCK_DV, ROW_BYTES_V, BLOCK,
    )  # fmt: skip
    first = place * share
    dq_sums_ptr += first.to(tl.int64) * PIECE
    for _ in range(first, tl.minimum(first + share, pieces)):
        _clear(dq_sums_ptr, PIECE)
        dq_sums_ptr += PIECE
    if place < slots_k:
        tile, is_owned, _start, head, _seqlen_k = _locate(
            place, cu_seqlens_ptr, batch, heads_k, tokens_q, tokens_k, tiles_k
        )
        for i in tl.static_range(SIDE // TOKENS):
            piece = tile * (SIDE // TOKENS) + i
            parts = _parts(parts_ptr, piece, is_owned, head, list_pieces, PER_HEAD)
            if parts > TOKENS // SIDE:
                at = place.to(tl.int64) * SIDE + i * TOKENS
                _clear(dk_sums_ptr + at * WIDTH, TOKENS * WIDTH)
                _clear(dv_sums_ptr + at * WIDTH_V, TOKENS * WIDTH_V)


@triton.jit
def _round_queries(
    place, sums_ptr, dq_ptr, cu_seqlens_ptr, scale, batch, heads_q, tokens_q, tokens_k, tiles,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write a block of dq; each of two warpgroups added half of its columns."""
    tile, is_alive, sequence, head, _split, start, _k_start, seqlen_q, seqlen_k = locate_queries(
        place, cu_seqlens_ptr, cu_seqlens_ptr, batch, heads_q, tokens_q, tokens_k, tiles, 1, 1,
        SIDE, False, False, -1,
    )  # fmt: skip
    rows = tile * SIDE - (seqlen_k - seqlen_q) + tl.arange(0, SIDE)
    token = start + rows
    if cu_seqlens_ptr is None:
        token += sequence.to(tl.int64) * tokens_q
    inside = (rows >= 0) & (rows < seqlen_q)
    sums_ptr += place.to(tl.int64) * (SIDE * WIDTH)
    if is_alive:
        for half in tl.static_range(2):
            dq = _tile(sums_ptr + half * (SIDE * WIDTH // 2), SIDE, WIDTH // 2) * scale
            _store(dq, dq_ptr, token, inside, head, heads_q, half * (WIDTH // 2), HEAD_DIM)


@triton.jit
def _round_keys(
    place, dk_sums_ptr, dv_sums_ptr, dk_ptr, dv_ptr, parts_ptr, cu_seqlens_ptr,
    scale, batch, heads_k, tokens_q, tokens_k, tiles, list_pieces,
    PER_HEAD: tl.constexpr, TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
):  # fmt: skip
    """Write 64 keys' dk and dv, but for a block that a program wrote which alone owned it."""
    tile, is_owned, start, head, seqlen_k = _locate(
        place, cu_seqlens_ptr, batch, heads_k, tokens_q, tokens_k, tiles
    )
    for i in tl.static_range(SIDE // TOKENS):
        piece = tile * (SIDE // TOKENS) + i
        parts = _parts(parts_ptr, piece, is_owned, head, list_pieces, PER_HEAD)
        rows = piece * TOKENS + tl.arange(0, TOKENS)
        inside = (rows >= 0) & (rows < seqlen_k)
        token = start + rows
        if parts > TOKENS // SIDE:
            at = place.to(tl.int64) * SIDE + i * TOKENS
            dk = _tile(dk_sums_ptr + at * WIDTH, TOKENS, WIDTH) * scale
            _store(dk, dk_ptr, token, inside, head, heads_k, 0, HEAD_DIM)
            dv = _tile(dv_sums_ptr + at * WIDTH_V, TOKENS, WIDTH_V)
            _store(dv, dv_ptr, token, inside, head, heads_k, 0, HEAD_DIM_V)
        if parts == 0:
            dk = tl.zeros([TOKENS, WIDTH], tl.float32)
            _store(dk, dk_ptr, token, inside, head, heads_k, 0, HEAD_DIM)
            dv = tl.zeros([TOKENS, WIDTH_V], tl.float32)
            _store(dv, dv_ptr, token, inside, head, heads_k, 0, HEAD_DIM_V)


@triton.jit(
    do_not_specialize=[
        "scale", "slots_q", "batch", "heads_q", "heads_k", "tokens_q", "tokens_k", "tiles_q",
        "tiles_k", "list_pieces",
    ],
    do_not_specialize_on_alignment=["parts_ptr", "cu_seqlens_ptr"],
)  # fmt: skip
def round_kernel(
    dq_sums_ptr, dk_sums_ptr, dv_sums_ptr, dq_ptr, dk_ptr, dv_ptr, parts_ptr, cu_seqlens_ptr,
    scale, slots_q, batch, heads_q, heads_k, tokens_q, tokens_k, tiles_q, tiles_k, list_pieces,
    PER_HEAD: tl.constexpr,  # lists of each key head, or one for all
    TOKENS: tl.constexpr,  # tokens of the layout's blocks, up to 64
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,  # columns of sums
):  # fmt: skip
    """Write a block of dq, or of dk and dv: scaled, rounded and in order."""
    place = tl.num_programs(0) - 1 - tl.program_id(0)
    if place < slots_q:
        _round_queries(
            place, dq_sums_ptr, dq_ptr, cu_seqlens_ptr, scale, batch, heads_q, tokens_q, tokens_k,
            tiles_q, HEAD_DIM, WIDTH,
        )  # fmt: skip
    else:
        _round_keys(
            place - slots_q, dk_sums_ptr, dv_sums_ptr, dk_ptr, dv_ptr, parts_ptr, cu_seqlens_ptr,
            scale, batch, heads_k, tokens_q, tokens_k, tiles_k, list_pieces,
            PER_HEAD, TOKENS, HEAD_DIM, HEAD_DIM_V, WIDTH, WIDTH_V,
        )  # fmt: skip
