"""Sums of gradients, in fp32, to which the Hopper backward adds.

They are set to 0 before it and rounded to gradients after it. The elements of the sums are in the
order of the accumulators' registers, those of the gradients in the order of rows.
"""

import triton
import triton.language as tl

from .schedule import locate_keys, locate_queries
from .structures import Grid

# tokens of a tile of sums
SIDE = tl.constexpr(64)


@triton.jit
def expect_walks(place, tensors, numbers, OPTIONS: tl.constexpr):
    """Set a counter to minus the number of programs that add to dq of a sequence's key head."""
    TOGETHER: tl.constexpr = 1024
    WIDTH: tl.constexpr = 1 + 2 * SIDE // OPTIONS.TOKENS
    if place < numbers.batch * numbers.heads_k:
        programs = tl.load(tensors.real_ptr)
        if OPTIONS.PER_HEAD:
            head = place % numbers.heads_k
            count = tl.zeros([TOGETHER], tl.int32)
            for first in range(0, programs, TOGETHER):
                at = first + tl.arange(0, TOGETHER)
                owner = tl.load(tensors.owners_ptr + at * WIDTH, mask=at < programs, other=-1)
                count += (owner == head).to(tl.int32)
            programs = tl.sum(count, 0)
        tl.store(tensors.counters_ptr + place, -programs)


@triton.jit
def _await_walks(sequence, head, tensors, numbers):
    """Wait until a sequence's key head has all of its dq; padding gets none."""
    if (sequence >= 0) & (sequence < numbers.batch):
        counter_ptr = tensors.counters_ptr + sequence * numbers.heads_k + head
        while tl.atomic_add(counter_ptr, 0, sem="acquire") < 0:
            pass


@triton.jit
def _await_launch():
    """Wait for the end of the previous launch, which may overlap with this one."""
    tl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _locate(place, tensors, numbers):
    """Return ``(tile, is_owned, start, head, seqlen_k)`` of 64 keys.

    Tile -1 does not exist. Padding is owned by no program.
    """
    offsets_ptr, batch = tensors.cu_seqlens_ptr, numbers.batch
    sizes = numbers.tokens_q, numbers.tokens_k, numbers.tiles_k
    grid = Grid(offsets_ptr, offsets_ptr, batch, numbers.heads_k, *sizes, 1, 1)
    work = locate_keys(place, grid, SIDE, False, False)
    start, sequence = work.k_start, work.sequence
    if offsets_ptr is None:
        start += sequence.to(tl.int64) * numbers.tokens_k
    is_owned = (work.tile >= 0) & (sequence >= 0) & (sequence < batch)
    return work.tile, is_owned, start, work.unit, work.seqlen_k


@triton.jit
def _parts(piece, is_owned, head, tensors, numbers, PER_HEAD: tl.constexpr):
    """Return how many programs own a piece: none own keys after the layout's last column."""
    parts_ptr = tensors.parts_ptr
    if PER_HEAD:
        parts_ptr += head * numbers.list_pieces
    return tl.load(parts_ptr + piece, mask=is_owned & (piece < numbers.list_pieces), other=0)


@triton.jit
def _clear(sums_ptr, COUNT: tl.constexpr):
    tl.store(sums_ptr + tl.arange(0, COUNT), tl.zeros([COUNT], tl.float32))


@triton.jit
def clear_sums(place, tensors, numbers, OPTIONS: tl.constexpr):
    """Set a share of dq's sums to 0, and the sums of dk and dv to which several programs add."""
    first = place * numbers.share
    dq_sums_ptr = tensors.dq_sums_ptr + first.to(tl.int64) * OPTIONS.PIECE
    for _ in range(first, tl.minimum(first + numbers.share, numbers.pieces)):
        _clear(dq_sums_ptr, OPTIONS.PIECE)
        dq_sums_ptr += OPTIONS.PIECE
    if place < numbers.slots_k:
        tile, is_owned, _start, head, _seqlen_k = _locate(place, tensors, numbers)
        for i in tl.static_range(SIDE // OPTIONS.TOKENS):
            piece = tile * (SIDE // OPTIONS.TOKENS) + i
            parts = _parts(piece, is_owned, head, tensors, numbers, OPTIONS.PER_HEAD)
            if parts > 1:
                at = place.to(tl.int64) * SIDE + i * OPTIONS.TOKENS
                _clear(tensors.dk_sums_ptr + at * OPTIONS.WIDTH, OPTIONS.TOKENS * OPTIONS.WIDTH)
                _clear(tensors.dv_sums_ptr + at * OPTIONS.WIDTH_V, OPTIONS.TOKENS * OPTIONS.WIDTH_V)


@triton.jit
def _tile(sums_ptr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Load sums that ``add_to_memory`` (64 rows) or ``add_block`` (fewer rows) has written."""
    sums = tl.load(sums_ptr + tl.arange(0, ROWS * WIDTH))
    sums = tl.permute(tl.reshape(sums, (WIDTH // 8, ROWS // 16, 8, 4, 2, 2)), (1, 4, 2, 0, 3, 5))
    return tl.reshape(sums, (ROWS, WIDTH))


@triton.jit
def _store(gradient, pointer, token, inside, head, heads, first, WIDTH: tl.constexpr):
    """Write columns from ``first`` on of a gradient ``[tokens, heads, WIDTH]``."""
    cols = first + tl.arange(0, gradient.shape[1])
    pointers = pointer + ((token.to(tl.int64) * heads + head) * WIDTH)[:, None] + cols[None, :]
    mask = inside[:, None] & (cols < WIDTH)[None, :]
    tl.store(pointers, gradient.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _round_queries(place, tensors, numbers, OPTIONS: tl.constexpr):
    """Write a block of dq from its sums; each of two warpgroups added half of the columns."""
    offsets_ptr, heads_q = tensors.cu_seqlens_ptr, numbers.heads_q
    sizes = numbers.tokens_q, numbers.tokens_k, numbers.tiles_q
    grid = Grid(offsets_ptr, offsets_ptr, numbers.batch, heads_q, *sizes, 1, 1)
    work = locate_queries(place, grid, SIDE, False, False, -1, OPTIONS.TOP_LEFT)
    rows = work.tile * SIDE - work.diagonal + tl.arange(0, SIDE)  # [SIDE]
    token = work.q_start + rows
    if offsets_ptr is None:
        token += work.sequence.to(tl.int64) * numbers.tokens_q
    inside = (rows >= 0) & (rows < work.seqlen_q)
    sums_ptr = tensors.dq_sums_ptr + place.to(tl.int64) * (SIDE * OPTIONS.WIDTH)
    if work.is_alive:
        if tensors.counters_ptr is not None:
            head = work.unit // (heads_q // numbers.heads_k)
            _await_walks(work.sequence, head, tensors, numbers)
        for half in tl.static_range(2):
            first = half * (OPTIONS.WIDTH // 2)
            dq = _tile(sums_ptr + SIDE * first, SIDE, OPTIONS.WIDTH // 2) * numbers.scale
            _store(dq, tensors.dq_ptr, token, inside, work.unit, heads_q, first, OPTIONS.HEAD_DIM)


@triton.jit
def _round_keys(place, tensors, numbers, OPTIONS: tl.constexpr):
    """Write dk and dv of 64 keys, except pieces that a single program owned and wrote."""
    WIDTH: tl.constexpr = OPTIONS.WIDTH
    dk_ptr, dv_ptr, heads_k = tensors.dk_ptr, tensors.dv_ptr, numbers.heads_k
    tile, is_owned, start, head, seqlen_k = _locate(place, tensors, numbers)
    for i in tl.static_range(SIDE // OPTIONS.TOKENS):
        piece = tile * (SIDE // OPTIONS.TOKENS) + i
        parts = _parts(piece, is_owned, head, tensors, numbers, OPTIONS.PER_HEAD)
        rows = piece * OPTIONS.TOKENS + tl.arange(0, OPTIONS.TOKENS)  # [TOKENS]
        inside = (rows >= 0) & (rows < seqlen_k)
        token = start + rows
        if parts > 1:
            at = place.to(tl.int64) * SIDE + i * OPTIONS.TOKENS
            dk = _tile(tensors.dk_sums_ptr + at * WIDTH, OPTIONS.TOKENS, WIDTH) * numbers.scale
            _store(dk, dk_ptr, token, inside, head, heads_k, 0, OPTIONS.HEAD_DIM)
            dv = _tile(tensors.dv_sums_ptr + at * OPTIONS.WIDTH_V, OPTIONS.TOKENS, OPTIONS.WIDTH_V)
            _store(dv, dv_ptr, token, inside, head, heads_k, 0, OPTIONS.HEAD_DIM_V)
        if parts == 0:
            dk = tl.zeros([OPTIONS.TOKENS, WIDTH], tl.float32)  # [TOKENS, WIDTH]
            _store(dk, dk_ptr, token, inside, head, heads_k, 0, OPTIONS.HEAD_DIM)
            dv = tl.zeros([OPTIONS.TOKENS, OPTIONS.WIDTH_V], tl.float32)  # [TOKENS, WIDTH_V]
            _store(dv, dv_ptr, token, inside, head, heads_k, 0, OPTIONS.HEAD_DIM_V)


@triton.jit
def round_sums(place, tensors, numbers, OPTIONS: tl.constexpr):
    """``dq = scale * dq_sums``, or ``dk = scale * dk_sums`` and ``dv = dv_sums``, rounded.

    dq comes first, head by head: walks of some heads have ended while walks of other heads run.
    """
    if place < numbers.slots_q:
        _round_queries(place, tensors, numbers, OPTIONS)
    else:
        if OPTIONS.IS_EARLY:
            _await_launch()
        place = numbers.slots_q + numbers.slots_k - 1 - place
        _round_keys(place, tensors, numbers, OPTIONS)
