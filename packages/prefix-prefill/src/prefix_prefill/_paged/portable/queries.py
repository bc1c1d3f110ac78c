"""The rows of a tile of queries: tokens and heads, positions, numbers, slopes, trees."""

import triton
import triton.language as tl

from .primitives import load_rows, offsets_of
from .structures import Positions, Rows, VectorLayout, Vectors


@triton.jit
def query_rows(place, q_start, head_k, SCHEDULE: tl.constexpr, TILE: tl.constexpr):
    """Return the ``Rows`` of a tile of queries."""
    row = place.tile * SCHEDULE.BLOCK_M + tl.arange(0, SCHEDULE.BLOCK_M)  # [BLOCK_M]
    token = row // SCHEDULE.GROUP
    in_group = row % SCHEDULE.GROUP
    is_inside = row < place.seqlen_q * SCHEDULE.GROUP
    cols = tl.arange(0, TILE.BLOCK_D)  # [BLOCK_D]
    cols_v = tl.arange(0, TILE.BLOCK_DV)  # [BLOCK_DV]
    head = head_k * SCHEDULE.GROUP + in_group
    return Rows(token, q_start + token, head, is_inside, cols, cols_v)


@triton.jit
def load_queries(rows, problem, OPTIONS: tl.constexpr, TILE: tl.constexpr):
    """Load a tile of queries, ``[BLOCK_M, BLOCK_D]``."""
    LAYOUT: tl.constexpr = VectorLayout(TILE.HEAD_DIM, True, OPTIONS.ROW_BYTES, 0)
    q_rows = offsets_of(rows, problem.numbers.q)
    vectors = Vectors(problem.tensors.q_ptr, None, None, None, None)
    return load_rows(vectors, q_rows, rows.is_inside, rows.cols, LAYOUT, TILE, True)


@triton.jit
def _load_slice(rows, problem, index: tl.constexpr, CACHE: tl.constexpr):
    WORDS: tl.constexpr = CACHE.K_WORDS
    LAYOUT: tl.constexpr = VectorLayout(WORDS.HEAD_DIM, False, 1, 0)
    q_rows = offsets_of(rows, problem.numbers.q)
    vectors = Vectors(problem.tensors.q_ptr + index, None, None, None, CACHE.SLICES)
    cols = tl.arange(0, WORDS.BLOCK_D)  # [BLOCK_D // SLICES]
    return load_rows(vectors, q_rows, rows.is_inside, cols, LAYOUT, WORDS, True)


@triton.jit
def load_slices(rows, problem, CACHE: tl.constexpr):
    """Load the slices of a tile of queries, each ``[BLOCK_M, BLOCK_D // SLICES]``, as a tuple."""
    if CACHE.SLICES == 2:
        slices = _load_slice(rows, problem, 0, CACHE), _load_slice(rows, problem, 1, CACHE)
    else:
        slices = (
            _load_slice(rows, problem, 0, CACHE),
            _load_slice(rows, problem, 1, CACHE),
            _load_slice(rows, problem, 2, CACHE),
            _load_slice(rows, problem, 3, CACHE),
        )
    return slices


@triton.jit
def _largest(slices):
    """Return the largest magnitude of each row, ``[BLOCK_M]``."""
    largest = tl.max(tl.abs(slices[0].to(tl.float32)), 1)
    for i in tl.static_range(1, len(slices)):
        largest = tl.maximum(largest, tl.max(tl.abs(slices[i].to(tl.float32)), 1))
    return largest


@triton.jit
def unit_of(slices):
    """Return the power of two by which each row of bf16 is divided before it is cast to fp16.

    The largest number of a row becomes 2**14 or more. Numbers that are then too small for fp16
    would be lost anyway in fp32 sums with the largest.
    """
    exponent = _largest(slices).to(tl.int32, bitcast=True) >> 23
    exponent = tl.maximum(exponent, 15)
    return ((exponent - 14) << 23).to(tl.float32, bitcast=True)


@triton.jit
def as_fp16(slices, unit):
    """Return the slices in fp16; bf16 is divided by ``unit`` first."""
    if unit is not None:
        inverse = (1.0 / unit)[:, None]
        if len(slices) == 2:
            slices = (
                (slices[0].to(tl.float32) * inverse).to(tl.float16),
                (slices[1].to(tl.float32) * inverse).to(tl.float16),
            )
        else:
            slices = (
                (slices[0].to(tl.float32) * inverse).to(tl.float16),
                (slices[1].to(tl.float32) * inverse).to(tl.float16),
                (slices[2].to(tl.float32) * inverse).to(tl.float16),
                (slices[3].to(tl.float32) * inverse).to(tl.float16),
            )
    elif slices[0].dtype.primitive_bitwidth == 8:
        if len(slices) == 2:
            slices = slices[0].to(tl.float16), slices[1].to(tl.float16)
        else:
            slices = (
                slices[0].to(tl.float16),
                slices[1].to(tl.float16),
                slices[2].to(tl.float16),
                slices[3].to(tl.float16),
            )
    return slices


@triton.jit
def positions_of(rows, place, seqlen_k, positions_ptr, SCHEDULE: tl.constexpr):
    """Return the ``Positions`` of a tile's rows: given, or aligned to the last keys."""
    BLOCK_M: tl.constexpr = SCHEDULE.BLOCK_M
    if positions_ptr is not None:
        position = tl.load(positions_ptr + rows.token_64, mask=rows.is_inside, other=0)
        first = tl.min(tl.where(rows.is_inside, position, 2147483647), 0)
        last = tl.max(tl.where(rows.is_inside, position, -2147483648), 0)
    else:
        diagonal = seqlen_k - place.seqlen_q
        position = rows.token + diagonal
        first = place.tile * BLOCK_M // SCHEDULE.GROUP + diagonal
        last_row = tl.minimum(place.tile * BLOCK_M + BLOCK_M, place.seqlen_q * SCHEDULE.GROUP) - 1
        last = last_row // SCHEDULE.GROUP + diagonal
    return Positions(position, first, last)


@triton.jit
def slopes_of(rows, sequence, problem):
    """Return the ALiBi slope of each row, or None; positions need slopes per token and head."""
    tensors = problem.tensors
    if tensors.alibi_slopes_ptr is not None:
        if tensors.positions_ptr is not None:
            of = rows.token_64
        else:
            of = sequence + rows.token * 0
        at = tensors.alibi_slopes_ptr + of * problem.numbers.slopes + rows.head
        slopes = tl.load(at, mask=rows.is_inside, other=0.0)
    else:
        slopes = None
    return slopes


@triton.jit
def tree_of(rows, problem, OPTIONS: tl.constexpr):
    """Return the bits of the new tokens that each row sees, or None."""
    tree_mask_ptr = problem.tensors.tree_mask_ptr
    if tree_mask_ptr is not None:
        tree = tl.load(tree_mask_ptr + rows.token_64, mask=rows.is_inside, other=0)  # [BLOCK_M]
        if OPTIONS.HAS_LEFT:
            # clear the bits of tokens before the row's window
            ahead = tl.maximum(rows.token - problem.numbers.scores.window_left, 0)
            within = tl.full([], -1, tl.int64) << tl.minimum(ahead, 63).to(tl.int64)
            tree = tl.where(ahead < 64, tree & within, 0)
    else:
        tree = None
    return tree


@triton.jit
def branches_of(tree):
    """Return the bits of the new tokens that some row sees, or None."""
    if tree is not None:
        bit = tl.arange(0, 64).to(tl.int64)  # [64]
        # [BLOCK_M, 64]
        seen = (tree[:, None] >> bit[None, :]).to(tl.int32) & 1
        branches = tl.sum(tl.max(seen, 0).to(tl.int64) << bit, 0)
    else:
        branches = None
    return branches
