"""Around the Hopper backward: clear sums, and then scale, round and bring them into order."""

from __future__ import annotations

import triton
import triton.language as tl

from .schedule import locate_keys, locate_queries

# tokens of a tile of sums
SIDE = tl.constexpr(64)


@triton.jit
def _tile(sums_ptr, WIDTH: tl.constexpr):
    """Load 64 x WIDTH sums, in the order in which ``add_to_memory`` left them."""
    sums = tl.load(sums_ptr + tl.arange(0, 64 * WIDTH))
    sums = tl.permute(tl.reshape(sums, (WIDTH // 8, 4, 8, 4, 2, 2)), (1, 4, 2, 0, 3, 5))
    return tl.reshape(sums, (64, WIDTH))


@triton.jit
def _store(gradient, pointer, token, inside, head, heads, first, WIDTH: tl.constexpr):
    """Write columns of a gradient ``[tokens, heads, WIDTH]``, from the ``first`` on."""
    cols = first + tl.arange(0, gradient.shape[1])
    pointers = pointer + ((token.to(tl.int64) * heads + head) * WIDTH)[:, None] + cols[None, :]
    mask = inside[:, None] & (cols < WIDTH)[None, :]
    tl.store(pointers, gradient.to(pointer.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["batch", "heads_q", "tokens_q", "tokens_k", "tiles"],
    do_not_specialize_on_alignment=["cu_seqlens_ptr"],
)
def round_queries_kernel(
    sums_ptr, dq_ptr, cu_seqlens_ptr, scale, batch, heads_q, tokens_q, tokens_k, tiles,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write a block of dq; each of two warpgroups added half of its columns."""
    tile, is_alive, sequence, head, _split, start, _k_start, seqlen_q, seqlen_k = locate_queries(
        cu_seqlens_ptr, cu_seqlens_ptr, batch, heads_q, tokens_q, tokens_k, tiles, 1, 1,
        SIDE, False, False, -1,
    )  # fmt: skip
    if not is_alive:
        return
    rows = tile * SIDE - (seqlen_k - seqlen_q) + tl.arange(0, SIDE)
    token = start + rows
    if cu_seqlens_ptr is None:
        token += sequence.to(tl.int64) * tokens_q
    inside = (rows >= 0) & (rows < seqlen_q)
    sums_ptr += tl.program_id(0).to(tl.int64) * (SIDE * BLOCK_D)
    WIDTH: tl.constexpr = BLOCK_D // 2
    for half in tl.static_range(2):
        dq = _tile(sums_ptr + half * (SIDE * WIDTH), WIDTH) * scale
        _store(dq, dq_ptr, token, inside, head, heads_q, half * WIDTH, HEAD_DIM)


KEYS = {
    "do_not_specialize": ["batch", "heads_k", "tokens_q", "tokens_k", "tiles", "list_blocks"],
    "do_not_specialize_on_alignment": ["parts_ptr", "cu_seqlens_ptr"],
}


@triton.jit
def _owned_keys(
    parts_ptr, cu_seqlens_ptr, batch, heads_k, tokens_q, tokens_k, tiles, list_blocks,
    PER_HEAD: tl.constexpr,
):  # fmt: skip
    """Return ``(tile, token, inside, head, parts)`` of a block of keys, and who owns it.

    Keys behind the layout's last block, and padding around the sequences, are nobody's.
    """
    tile, sequence, head, _q_start, start, _seqlen_q, seqlen_k = locate_keys(
        cu_seqlens_ptr, cu_seqlens_ptr, batch, heads_k, tokens_q, tokens_k, tiles, 1, SIDE, False
    )  # fmt: skip
    owned_ptr = parts_ptr + tile
    if PER_HEAD:
        owned_ptr += head * list_blocks
    is_listed = (tile >= 0) & (tile < list_blocks) & (sequence >= 0) & (sequence < batch)
    parts = tl.load(owned_ptr, mask=is_listed, other=0)
    rows = tile * SIDE + tl.arange(0, SIDE)
    token = start + rows
    if cu_seqlens_ptr is None:
        token += sequence.to(tl.int64) * tokens_k
    return tile, token, rows < seqlen_k, head, parts


@triton.jit(**KEYS)
def clear_keys_kernel(
    dk_sums_ptr, dv_sums_ptr, parts_ptr, cu_seqlens_ptr,
    batch, heads_k, tokens_q, tokens_k, tiles, list_blocks,
    PER_HEAD: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Clear the sums of a block of dk and dv to which several programs will add."""
    tile, _token, _inside, _head, parts = _owned_keys(
        parts_ptr, cu_seqlens_ptr, batch, heads_k, tokens_q, tokens_k, tiles, list_blocks, PER_HEAD
    )
    if (tile < 0) | (parts < 2):
        return
    place = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, SIDE * BLOCK_D)
    tl.store(dk_sums_ptr + place * (SIDE * BLOCK_D) + at, tl.zeros_like(at).to(tl.float32))
    at = tl.arange(0, SIDE * BLOCK_DV)
    tl.store(dv_sums_ptr + place * (SIDE * BLOCK_DV) + at, tl.zeros_like(at).to(tl.float32))


@triton.jit(**KEYS)
def round_keys_kernel(
    dk_sums_ptr, dv_sums_ptr, dk_ptr, dv_ptr, parts_ptr, cu_seqlens_ptr,
    scale, batch, heads_k, tokens_q, tokens_k, tiles, list_blocks,
    PER_HEAD: tl.constexpr,  # lists of each key head, or one for all
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Write a block of dk and dv, unless a program wrote it that alone owned it."""
    tile, token, inside, head, parts = _owned_keys(
        parts_ptr, cu_seqlens_ptr, batch, heads_k, tokens_q, tokens_k, tiles, list_blocks, PER_HEAD
    )
    if (tile < 0) | (parts == 1):
        return
    place = tl.program_id(0).to(tl.int64)
    if parts > 1:
        dk = _tile(dk_sums_ptr + place * (SIDE * BLOCK_D), BLOCK_D) * scale
        dv = _tile(dv_sums_ptr + place * (SIDE * BLOCK_DV), BLOCK_DV)
    else:
        dk = tl.zeros([SIDE, BLOCK_D], tl.float32)
        dv = tl.zeros([SIDE, BLOCK_DV], tl.float32)
    _store(dk, dk_ptr, token, inside, head, heads_k, 0, HEAD_DIM)
    _store(dv, dv_ptr, token, inside, head, heads_k, 0, HEAD_DIM_V)
