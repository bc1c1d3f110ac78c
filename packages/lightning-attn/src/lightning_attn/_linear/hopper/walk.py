"""The walk on Hopper: one warp copies, one or two warpgroups multiply.

All tiles are panels of 64 tokens by 64 columns. :mod:`.producer` copies them, :mod:`.consumer`
computes. ``portable/walk.py`` explains the algorithm.
"""

from ..._linked.hopper.compat import gl, gluon, hopper
from ..._linked.hopper.pipeline import LOG2E, barriers
from ..portable.structures import Lengths, Output
from .consumer import consume
from .primitives import LARGEST_RATE, SIDE
from .producer import produce
from .schedule import clear_padding, locate
from .structures import Maps, Numbers, Options, Piece, Pipeline, Recurrence, Tensors, Tile


@gluon.jit
def _memory(maps, TILE: gl.constexpr):
    """Allocate the shared memory of a program, and make its barriers."""
    dtype: gl.constexpr = maps.key.dtype
    HALF: gl.constexpr = [TILE.STAGES * TILE.HALVES, 1, 1, 1, 64, 64]
    k_s = gl.allocate_shared_memory(dtype, HALF, maps.key.layout)
    v_s = gl.allocate_shared_memory(
        dtype, [TILE.STAGES * TILE.WARPGROUPS, 1, 1, 1, 64, 64], maps.value.layout
    )
    q_s = k_s
    scores_s = k_s
    out_s = k_s
    if maps.out is not None:
        q_s = gl.allocate_shared_memory(dtype, HALF, maps.read.layout)
        scores_s = gl.allocate_shared_memory(
            dtype, [TILE.WARPGROUPS, 64, 64], gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
        )
        out_s = gl.allocate_shared_memory(
            dtype, [TILE.WARPGROUPS, 1, 1, 1, 64, 64], maps.out.layout
        )
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    since_s = gl.allocate_shared_memory(gl.float32, [TILE.WARPGROUPS, 64], plain)
    until_s = gl.allocate_shared_memory(gl.float32, [TILE.WARPGROUPS, 64], plain)
    full = barriers(TILE.STAGES, 1)
    return Pipeline(k_s, v_s, q_s, scores_s, out_s, since_s, until_s, full)


@gluon.jit(do_not_specialize=Numbers._fields, do_not_specialize_on_alignment=Tensors._fields)
def hopper_walk_kernel(
    key_desc,
    value_desc,
    read_desc,
    out_desc,
    out_ptr,
    decay_ptr,
    first_ptr,
    last_ptr,
    cu_seqlens_ptr,
    slots_ptr,
    has_first_ptr,
    read_scale,
    write_scale,
    batch,
    heads,
    tokens,
    size,
    pieces,
    stride_first_b,
    stride_first_s,
    stride_first_h,
    stride_first_d,
    stride_first_e,
    stride_last_b,
    stride_last_s,
    stride_last_h,
    stride_last_d,
    stride_last_e,
    D: gl.constexpr,
    E: gl.constexpr,
    REVERSE: gl.constexpr,
    SEGMENTED: gl.constexpr,
    SKIP: gl.constexpr,
    RAGGED: gl.constexpr,
    TERMS: gl.constexpr,
    HALVES: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """``out_i = read_i S_i``, where ``S_i = exp(-s) S_(i-1) + key_i^T value_i``.

    A program walks one piece of tokens, for some columns of the state of one head.
    """
    OPTIONS: gl.constexpr = Options(D, E, REVERSE, SEGMENTED, SKIP, RAGGED, TERMS)
    TILE: gl.constexpr = Tile(HALVES, WARPGROUPS, STAGES)
    WIDTH: gl.constexpr = SIDE * WARPGROUPS
    SPLITS: gl.constexpr = (E + WIDTH - 1) // WIDTH
    pid = gl.program_id(0)
    first_col = pid % SPLITS * WIDTH
    head = pid // SPLITS % heads
    number = pid // SPLITS // heads
    lengths = Lengths(batch, tokens, size, pieces)
    found, start, end = locate(cu_seqlens_ptr, number, lengths, SEGMENTED)
    sequence = found.sequence
    length = gl.maximum(found.length, 0)
    head_64 = head.to(gl.int64)
    is_real = (sequence >= 0) & (sequence < batch)
    slot = gl.where(is_real, sequence, -1).to(gl.int64)
    if slots_ptr is not None:
        slot = gl.load(slots_ptr + sequence, mask=is_real, other=-1).to(gl.int64)
    if RAGGED and out_desc is not None:  # noqa: SIM102  (constants, then a number)
        if slot < 0:
            whole = Output(out_ptr, heads, head_64)
            clear_padding(whole, cu_seqlens_ptr, found, batch, first_col, OPTIONS, TILE)
    if SKIP:
        # the state after the last segment is not needed
        if REVERSE:
            is_last = found.begin == start
        else:
            is_last = found.begin + length == end
        length = gl.where(is_last, 0, length)
    length = gl.where(slot < 0, 0, length)
    has_last = slot >= 0
    has_first = slot >= 0
    if SEGMENTED:
        has_last &= length > 0
        has_first &= length > 0
    if has_first_ptr is not None:
        has_first &= gl.load(has_first_ptr + sequence, mask=slot >= 0, other=0) != 0
    state_b = slot
    if SEGMENTED:
        state_b = sequence.to(gl.int64) if not RAGGED else slot * 0
    if first_ptr is not None:
        first_ptr += state_b * stride_first_b + found.index.to(gl.int64) * stride_first_s
        first_ptr += head_64 * stride_first_h
    if last_ptr is not None:
        last_ptr += state_b * stride_last_b + found.index.to(gl.int64) * stride_last_s
        last_ptr += head_64 * stride_last_h
    rate = gl.minimum(gl.load(decay_ptr + head), LARGEST_RATE) * LOG2E
    chunks = gl.cdiv(length, SIDE)

    maps = Maps(out_desc, key_desc, value_desc, read_desc)
    piece = Piece(sequence, head, found.begin, length, chunks, first_col)
    recurrence = Recurrence(
        rate,
        first_ptr,
        last_ptr,
        has_first,
        has_last,
        read_scale,
        write_scale,
        piece,
        stride_first_d,
        stride_first_e,
        stride_last_d,
        stride_last_e,
    )
    pipeline = _memory(maps, TILE)
    hopper.fence_async_shared()
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (consume, (0, maps, pipeline, recurrence, OPTIONS, TILE)),
                (consume, (1, maps, pipeline, recurrence, OPTIONS, TILE)),
                (produce, (maps, pipeline, piece, OPTIONS, TILE)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (0, maps, pipeline, recurrence, OPTIONS, TILE)),
                (produce, (maps, pipeline, piece, OPTIONS, TILE)),
            ],
            [1],
            [24],
        )
