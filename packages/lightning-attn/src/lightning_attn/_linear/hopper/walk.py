"""The walk on Hopper: one warp copies, one or two warpgroups multiply.

All tiles are panels of 64 tokens by 64 columns. :mod:`.producer` copies them, :mod:`.consumer`
computes. ``portable/walk.py`` explains the algorithm.
"""

from __future__ import annotations

from ..._linked.hopper.compat import gl, gluon, hopper
from ..._linked.hopper.pipeline import LOG2E, barriers
from ..._linked.launch.entries import Foreign, entry
from ..portable.arguments import Numbers, Options, Tensors
from ..portable.structures import Output
from .arguments import Maps, Tile
from .consumer import consume
from .primitives import LARGEST_RATE, SIDE
from .producer import produce
from .schedule import clear_padding, locate
from .structures import Piece, Pipeline, Recurrence


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


@entry(gluon.jit)
def hopper_walk_kernel(
    maps: Maps,
    out_ptr: Foreign,
    tensors: Tensors,
    numbers: Numbers,
    OPTIONS: Options,
    TILE: Tile,
):
    """``out_i = read_i S_i``, where ``S_i = exp(-s) S_(i-1) + key_i^T value_i``.

    A program walks one piece of tokens, for some columns of the state of one head.
    """
    WIDTH: gl.constexpr = SIDE * TILE.WARPGROUPS
    SPLITS: gl.constexpr = (OPTIONS.E + WIDTH - 1) // WIDTH
    lengths, first, last = numbers.lengths, numbers.first, numbers.last
    first_ptr, last_ptr = tensors.first_ptr, tensors.last_ptr
    pid = gl.program_id(0)
    first_col = pid % SPLITS * WIDTH
    head = pid // SPLITS % lengths.heads
    number = pid // SPLITS // lengths.heads
    found, start, end = locate(tensors.cu_seqlens_ptr, number, lengths, OPTIONS.SEGMENTED)
    sequence = found.sequence
    length = gl.maximum(found.length, 0)
    head_64 = head.to(gl.int64)
    is_real = (sequence >= 0) & (sequence < lengths.batch)
    slot = gl.where(is_real, sequence, -1).to(gl.int64)
    if tensors.slots_ptr is not None:
        slot = gl.load(tensors.slots_ptr + sequence, mask=is_real, other=-1).to(gl.int64)
    if OPTIONS.RAGGED and maps.out is not None:  # noqa: SIM102  (constants, then a number)
        if slot < 0:
            whole = Output(out_ptr, lengths.heads, head_64)
            clear_padding(whole, tensors, found, lengths.batch, first_col, OPTIONS, TILE)
    if OPTIONS.SKIP:
        # the state after the last segment is not needed
        if OPTIONS.REVERSE:
            is_last = found.begin == start
        else:
            is_last = found.begin + length == end
        length = gl.where(is_last, 0, length)
    length = gl.where(slot < 0, 0, length)
    has_last = slot >= 0
    has_first = slot >= 0
    if OPTIONS.SEGMENTED:
        has_last &= length > 0
        has_first &= length > 0
    if tensors.has_first_ptr is not None:
        has_first &= gl.load(tensors.has_first_ptr + sequence, mask=slot >= 0, other=0) != 0
    state_b = slot
    if OPTIONS.SEGMENTED:
        state_b = sequence.to(gl.int64) if not OPTIONS.RAGGED else slot * 0
    if first_ptr is not None:
        first_ptr += state_b * first.batch + found.index.to(gl.int64) * first.token
        first_ptr += head_64 * first.head
    if last_ptr is not None:
        last_ptr += state_b * last.batch + found.index.to(gl.int64) * last.token
        last_ptr += head_64 * last.head
    rate = gl.minimum(gl.load(tensors.decay_ptr + head), LARGEST_RATE) * LOG2E
    chunks = gl.cdiv(length, SIDE)

    piece = Piece(sequence, head, found.begin, length, chunks, first_col)
    recurrence = Recurrence(
        rate,
        first_ptr,
        last_ptr,
        has_first,
        has_last,
        numbers.scales,
        piece,
        first.d,
        first.e,
        last.d,
        last.e,
    )
    pipeline = _memory(maps, TILE)
    hopper.fence_async_shared()
    if TILE.WARPGROUPS == 2:
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
