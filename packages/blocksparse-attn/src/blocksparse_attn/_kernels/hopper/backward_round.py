"""After the Hopper backward: its sums become gradients, rounded.

The kernel goes through its places from the last to the first: what the programs before it wrote
last is read first, while the cache has it.
"""

import triton
import triton.language as tl

from ..backward_rows import SIDE, locate_sums, parts_of
from ..schedule import locate_queries
from ..structures import Grid
from .structures import RoundNumbers, RoundOptions, RoundTensors


@triton.jit
def _tile(sums_ptr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Load sums in the order in which ``add_to_memory`` left 64 rows, and ``add_pieces`` fewer."""
    sums = tl.load(sums_ptr + tl.arange(0, ROWS * WIDTH))
    sums = tl.permute(tl.reshape(sums, (WIDTH // 8, ROWS // 16, 8, 4, 2, 2)), (1, 4, 2, 0, 3, 5))
    return tl.reshape(sums, (ROWS, WIDTH))


@triton.jit
def _store(gradient, pointer, token, inside, head, heads, first, WIDTH: tl.constexpr):
    """Write columns of a gradient ``[tokens, heads, WIDTH]``, from the ``first`` on."""
    cols = first + tl.arange(0, gradient.shape[1])
    pointers = pointer + ((token.to(tl.int64) * heads + head) * WIDTH)[:, None] + cols[None, :]
    mask = inside[:, None] & (cols < WIDTH)[None, :]
    tl.store(pointers, gradient.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _round_queries(place, tensors, numbers, OPTIONS: tl.constexpr):
    """Write a block of dq; each of two warpgroups added half of its columns."""
    WIDTH: tl.constexpr = OPTIONS.WIDTH
    offsets_ptr, heads_q = tensors.cu_seqlens_ptr, numbers.heads_q
    sizes = numbers.tokens_q, numbers.tokens_k, numbers.tiles_q
    grid = Grid(offsets_ptr, offsets_ptr, numbers.batch, heads_q, *sizes, 1, 1)
    work = locate_queries(place, grid, SIDE, False, False, -1, OPTIONS.TOP_LEFT)
    rows = work.tile * SIDE - work.diagonal + tl.arange(0, SIDE)  # [SIDE]
    token = work.q_start + rows
    if offsets_ptr is None:
        token += work.sequence.to(tl.int64) * numbers.tokens_q
    inside = (rows >= 0) & (rows < work.seqlen_q)
    sums_ptr = tensors.dq_sums_ptr + place.to(tl.int64) * (SIDE * WIDTH)
    if work.is_alive:
        for half in tl.static_range(2):
            dq = _tile(sums_ptr + half * (SIDE * WIDTH // 2), SIDE, WIDTH // 2) * numbers.scale
            _store(
                dq,
                tensors.dq_ptr,
                token,
                inside,
                work.unit,
                heads_q,
                half * (WIDTH // 2),
                OPTIONS.HEAD_DIM,
            )


@triton.jit
def _round_keys(place, tensors, numbers, OPTIONS: tl.constexpr):
    """Write 64 keys' dk and dv, but for a block that a program wrote which alone owned it."""
    TOKENS: tl.constexpr = OPTIONS.TOKENS
    HEAD_DIM: tl.constexpr = OPTIONS.HEAD_DIM
    HEAD_DIM_V: tl.constexpr = OPTIONS.HEAD_DIM_V
    WIDTH: tl.constexpr = OPTIONS.WIDTH
    WIDTH_V: tl.constexpr = OPTIONS.WIDTH_V
    dk_ptr, dv_ptr, heads_k = tensors.dk_ptr, tensors.dv_ptr, numbers.heads_k
    tile, is_owned, start, head, seqlen_k = locate_sums(place, tensors, numbers)
    for i in tl.static_range(SIDE // TOKENS):
        piece = tile * (SIDE // TOKENS) + i
        parts = parts_of(piece, is_owned, head, tensors, numbers, OPTIONS.PER_HEAD)
        rows = piece * TOKENS + tl.arange(0, TOKENS)  # [TOKENS]
        inside = (rows >= 0) & (rows < seqlen_k)
        token = start + rows
        if parts > TOKENS // SIDE:
            at = place.to(tl.int64) * SIDE + i * TOKENS
            dk = _tile(tensors.dk_sums_ptr + at * WIDTH, TOKENS, WIDTH) * numbers.scale
            _store(dk, dk_ptr, token, inside, head, heads_k, 0, HEAD_DIM)
            dv = _tile(tensors.dv_sums_ptr + at * WIDTH_V, TOKENS, WIDTH_V)
            _store(dv, dv_ptr, token, inside, head, heads_k, 0, HEAD_DIM_V)
        if parts == 0:
            dk = tl.zeros([TOKENS, WIDTH], tl.float32)  # [TOKENS, WIDTH]
            _store(dk, dk_ptr, token, inside, head, heads_k, 0, HEAD_DIM)
            dv = tl.zeros([TOKENS, WIDTH_V], tl.float32)  # [TOKENS, WIDTH_V]
            _store(dv, dv_ptr, token, inside, head, heads_k, 0, HEAD_DIM_V)


@triton.jit(
    do_not_specialize=RoundNumbers._fields,
    do_not_specialize_on_alignment=("parts_ptr", "cu_seqlens_ptr"),
)
def round_kernel(
    dq_sums_ptr,
    dk_sums_ptr,
    dv_sums_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    parts_ptr,
    cu_seqlens_ptr,
    scale,
    slots_q,
    batch,
    heads_q,
    heads_k,
    tokens_q,
    tokens_k,
    tiles_q,
    tiles_k,
    list_pieces,
    PER_HEAD: tl.constexpr,
    TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_V: tl.constexpr,
    TOP_LEFT: tl.constexpr,
):
    """``dq = scale * dq_sums``, or ``dk = scale * dk_sums`` and ``dv = dv_sums``, rounded.

    The sums lie in the order of accumulators' registers, the gradients in that of rows.
    """
    tensors = RoundTensors(
        dq_sums_ptr, dk_sums_ptr, dv_sums_ptr, dq_ptr, dk_ptr, dv_ptr, parts_ptr, cu_seqlens_ptr
    )
    numbers = RoundNumbers(
        scale, slots_q, batch, heads_q, heads_k, tokens_q, tokens_k, tiles_q, tiles_k, list_pieces
    )
    OPTIONS: tl.constexpr = RoundOptions(
        PER_HEAD, TOKENS, HEAD_DIM, HEAD_DIM_V, WIDTH, WIDTH_V, TOP_LEFT
    )
    place = tl.num_programs(0) - 1 - tl.program_id(0)
    if place < slots_q:
        _round_queries(place, tensors, numbers, OPTIONS)
    else:
        _round_keys(place - slots_q, tensors, numbers, OPTIONS)
