"""The numbers of each row that every tile of it needs in the backward pass, and sums of 0.

The backward for Hopper adds to sums of gradients in memory. Ahead of it the places are gone through
from the last to the first: what it reads first was then written last, while the cache has it.
"""

import triton
import triton.language as tl

from ._linked.primitives import INF, LOG2E, NEG_INF
from .primitives import load_rows
from .schedule import locate_keys
from .structures import Grid, RowNumbers, RowOptions, RowTensors

# tokens of a tile of sums
SIDE = tl.constexpr(64)


@triton.jit
def _number_rows(place, tensors, numbers, OPTIONS: tl.constexpr):
    """Write two numbers per row of [batch, heads_q, tokens], of some rows at a place.

    ``delta = sum(out * dout) - dlse``, and ``lse2``, the LSE in base 2, which is +inf for rows that
    see no key: their probabilities then come out as 0.
    """
    HEAD_DIM_V: tl.constexpr = OPTIONS.HEAD_DIM_V
    BLOCK: tl.constexpr = OPTIONS.BLOCK
    tokens, heads_q = numbers.tokens_q, numbers.heads_q
    row = place.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    inside = row < numbers.rows
    batch_head = row // tokens
    token = row % tokens
    batch_id = batch_head // heads_q
    head = batch_head % heads_q
    # out is contiguous: [batch, tokens, heads_q, HEAD_DIM_V]
    out_at = ((batch_id * tokens + token) * heads_q + head) * HEAD_DIM_V
    dout_at = batch_id * numbers.stride_dob + token * numbers.stride_dos + head * numbers.stride_doh
    out = load_rows(tensors.out_ptr, out_at, inside, OPTIONS, True, True)
    dout = load_rows(tensors.dout_ptr, dout_at, inside, OPTIONS, True, True)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if tensors.dlse_ptr is not None:
        # d(lse)/d(score) is p, which joins the softmax's own term
        delta -= tl.load(tensors.dlse_ptr + row, mask=inside, other=0.0)
    lse = tl.load(tensors.lse_ptr + row, mask=inside, other=0.0)
    # what arrives at a row without keys counts for nothing, NaN neither
    tl.store(tensors.delta_ptr + row, tl.where(lse == NEG_INF, 0.0, delta), mask=inside)
    tl.store(tensors.lse2_ptr + row, tl.where(lse == NEG_INF, INF, lse * LOG2E), mask=inside)


@triton.jit
def locate_sums(place, tensors, numbers):
    """Return ``(tile, is_owned, start, head, seqlen_k)`` of 64 keys.

    Tile -1 is none at all. Padding around the sequences is nobody's.
    """
    offsets_ptr, batch = tensors.cu_seqlens_ptr, numbers.batch
    sizes = numbers.tokens_q, numbers.tokens_k, numbers.tiles_k
    grid = Grid(offsets_ptr, offsets_ptr, batch, numbers.heads_k, *sizes, 1, 1)
    work = locate_keys(place, grid, SIDE, False, False)
    start, sequence = work.k_start, work.sequence
    if offsets_ptr is None:
        start += sequence.to(tl.int64) * numbers.tokens_k
    is_owned = (work.tile >= 0) & (sequence >= 0) & (sequence < batch)
    return work.tile, is_owned, start, work.head, work.seqlen_k


@triton.jit
def parts_of(piece, is_owned, head, tensors, numbers, PER_HEAD: tl.constexpr):
    """Return how many programs own a piece; keys behind the layout's last are nobody's."""
    parts_ptr = tensors.parts_ptr
    if PER_HEAD:
        parts_ptr += head * numbers.list_pieces
    return tl.load(parts_ptr + piece, mask=is_owned & (piece < numbers.list_pieces), other=0)


@triton.jit
def _clear(sums_ptr, COUNT: tl.constexpr):
    tl.store(sums_ptr + tl.arange(0, COUNT), tl.zeros([COUNT], tl.float32))


@triton.jit
def _clear_sums(place, tensors, numbers, OPTIONS: tl.constexpr):
    """Set a share of the sums to 0; of those of dk and dv, the ones to which several add."""
    TOKENS: tl.constexpr = OPTIONS.TOKENS
    PIECE: tl.constexpr = OPTIONS.PIECE
    first = place * numbers.share
    dq_sums_ptr = tensors.dq_sums_ptr + first.to(tl.int64) * PIECE
    for _ in range(first, tl.minimum(first + numbers.share, numbers.pieces)):
        _clear(dq_sums_ptr, PIECE)
        dq_sums_ptr += PIECE
    if place < numbers.slots_k:
        tile, is_owned, _start, head, _seqlen_k = locate_sums(place, tensors, numbers)
        for i in tl.static_range(SIDE // TOKENS):
            piece = tile * (SIDE // TOKENS) + i
            parts = parts_of(piece, is_owned, head, tensors, numbers, OPTIONS.PER_HEAD)
            if parts > TOKENS // SIDE:
                at = place.to(tl.int64) * SIDE + i * TOKENS
                _clear(tensors.dk_sums_ptr + at * OPTIONS.WIDTH, TOKENS * OPTIONS.WIDTH)
                _clear(tensors.dv_sums_ptr + at * OPTIONS.WIDTH_V, TOKENS * OPTIONS.WIDTH_V)


@triton.jit(
    do_not_specialize=RowNumbers._fields,
    do_not_specialize_on_alignment=[name for name in RowTensors._fields if "sums" not in name],
)
def row_kernel(
    out_ptr,
    dout_ptr,
    lse_ptr,
    dlse_ptr,
    delta_ptr,
    lse2_ptr,
    dq_sums_ptr,
    dk_sums_ptr,
    dv_sums_ptr,
    parts_ptr,
    cu_seqlens_ptr,
    tokens_q,
    rows,
    stride_dob,
    stride_dos,
    stride_doh,
    heads_q,
    batch,
    heads_k,
    tokens_k,
    tiles_k,
    list_pieces,
    slots_k,
    share,
    pieces,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ROW_BYTES_V: tl.constexpr,
    BLOCK: tl.constexpr,
    PER_HEAD: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_V: tl.constexpr,
    PIECE: tl.constexpr,
):
    """``delta = sum(out * dout) - dlse`` and ``lse2 = lse * log2(e)`` of a program's rows.

    With sums, a share of them becomes 0.
    """
    tensors = RowTensors(
        out_ptr,
        dout_ptr,
        lse_ptr,
        dlse_ptr,
        delta_ptr,
        lse2_ptr,
        dq_sums_ptr,
        dk_sums_ptr,
        dv_sums_ptr,
        parts_ptr,
        cu_seqlens_ptr,
    )
    numbers = RowNumbers(
        tokens_q,
        rows,
        stride_dob,
        stride_dos,
        stride_doh,
        heads_q,
        batch,
        heads_k,
        tokens_k,
        tiles_k,
        list_pieces,
        slots_k,
        share,
        pieces,
    )
    OPTIONS: tl.constexpr = RowOptions(
        HEAD_DIM_V, BLOCK_DV, ROW_BYTES_V, BLOCK, PER_HEAD, TOKENS, WIDTH, WIDTH_V, PIECE
    )
    place = tl.program_id(0)
    if dq_sums_ptr is not None:
        place = tl.num_programs(0) - 1 - place
    _number_rows(place, tensors, numbers, OPTIONS)
    if dq_sums_ptr is not None:
        _clear_sums(place, tensors, numbers, OPTIONS)
