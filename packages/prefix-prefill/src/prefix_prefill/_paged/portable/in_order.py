"""Tiles of a packed cache for short tiles of queries, read in memory order.

Neighbouring lanes read neighbouring 16 bytes, so the eight lanes that a GPU serves at once request
one line of 128 bytes. Reading rows of keys or values, they would request 32 bytes of each of four
lines: the same bytes in four times as many requests. Tiles of pointers have two dimensions, the
second of them one run, because the order of lanes in more dimensions depends on Triton's version.
"""

import triton
import triton.language as tl

# neighbouring columns of values: 16 runs of 16 bytes fill two lines
_SIDE = tl.constexpr(16)


@triton.jit
def load_keys(
    vectors, rows, inside, LAYOUT: tl.constexpr, COLUMNS: tl.constexpr, MASKED: tl.constexpr
):
    """Load keys as ``[BLOCK_D, BLOCK]``; with ``MASKED``, those not ``inside`` are 0."""
    RUN: tl.constexpr = LAYOUT.RUN
    BYTES: tl.constexpr = LAYOUT.BYTES
    RUNS: tl.constexpr = COLUMNS.BLOCK_D // RUN
    BLOCK: tl.constexpr = rows.shape[0]
    run = tl.arange(0, RUNS)  # [RUNS]
    begins = (run.to(tl.int64) * vectors.stride_run)[:, None] + rows[None, :]  # [RUNS, BLOCK]
    begins = vectors.base + tl.reshape(begins, [RUNS * BLOCK])
    # [RUNS * BLOCK, RUN]
    pointers = begins[:, None] + tl.arange(0, RUN)[None, :]
    pointers = tl.multiple_of(pointers, [BYTES, BYTES])
    if MASKED or COLUMNS.HEAD_DIM != COLUMNS.BLOCK_D:
        wanted = tl.broadcast_to((run * RUN < COLUMNS.HEAD_DIM)[:, None], [RUNS, BLOCK])
        if MASKED:
            wanted &= inside[None, :]
        tile = tl.load(pointers, mask=tl.reshape(wanted, [RUNS * BLOCK])[:, None], other=0.0)
    else:
        tile = tl.load(pointers)
    tile = tl.permute(tl.reshape(tile, [RUNS, BLOCK, RUN]), (0, 2, 1))
    return tl.reshape(tile, [COLUMNS.BLOCK_D, BLOCK])


@triton.jit
def load_values(vectors, rows, LAYOUT: tl.constexpr, COLUMNS: tl.constexpr):
    """Load values as ``[BLOCK, BLOCK_D]``; ``rows`` are the offsets of the runs of slots."""
    RUN: tl.constexpr = LAYOUT.SLOT_RUN
    BYTES: tl.constexpr = LAYOUT.BYTES
    RUNS: tl.constexpr = rows.shape[0]
    SIDES: tl.constexpr = COLUMNS.BLOCK_D // _SIDE
    ROWS: tl.constexpr = RUNS * COLUMNS.BLOCK_D
    cols = tl.arange(0, COLUMNS.BLOCK_D)  # [BLOCK_D]
    begins = tl.reshape(cols.to(tl.int64) * vectors.stride_number, [SIDES, 1, _SIDE])
    begins += rows[None, :, None]  # [SIDES, RUNS, _SIDE]
    begins = vectors.base + tl.reshape(begins, [ROWS])
    # [ROWS, RUN]
    pointers = begins[:, None] + tl.arange(0, RUN)[None, :]
    pointers = tl.multiple_of(pointers, [BYTES, BYTES])
    if COLUMNS.HEAD_DIM != COLUMNS.BLOCK_D:
        wanted = tl.reshape(cols < COLUMNS.HEAD_DIM, [SIDES, 1, _SIDE])
        wanted = tl.reshape(tl.broadcast_to(wanted, [SIDES, RUNS, _SIDE]), [ROWS])
        tile = tl.load(pointers, mask=wanted[:, None], other=0.0)
    else:
        tile = tl.load(pointers)
    tile = tl.permute(tl.reshape(tile, [SIDES, RUNS, _SIDE, RUN]), (1, 3, 0, 2))
    return tl.reshape(tile, [RUNS * RUN, COLUMNS.BLOCK_D])
