"""The output by tiles of queries: what the consumers do with a tile.

Softmax and overlaps are those of FlashAttention-3 (Shah et al., 2024): a warpgroup's softmax runs
while the other warpgroup multiplies, and while its own product of the previous step's probabilities
with the values runs.
"""

from ...._linked.hopper.compat import gl, gluon, hopper, mbarrier
from ...._linked.hopper.pipeline import EMPTY, barrier_arrive, opaque
from ...._linked.hopper.ptx import in_pairs
from ...._linked.hopper.softmax import finish_softmax
from ..structures import Softmax
from .forward_steps import attend, begin_tile
from .producer import PARTIES
from .rows import send
from .schedule import steps_of


@gluon.jit
def _finish(softmax, head, W: gl.constexpr, pipeline, OPTIONS: gl.constexpr):
    """Multiply the last step's values; return the unnormalised output, its factor and the LSE."""
    o, m, l, p, turn = softmax
    mbarrier.arrive(pipeline.q_empty.index(W), count=1)
    stage_v = (turn - 1) % OPTIONS.STAGES_V
    mbarrier.wait(pipeline.v_full.index(stage_v), (turn - 1) // OPTIONS.STAGES_V & 1)
    v = pipeline.v_s.index(stage_v)
    o = hopper.warpgroup_mma(p, v, o, is_async=True)  # [ROWS, HEAD_DIM_V]
    weight, empty, lse = finish_softmax(m, l, head, False, None)
    o = hopper.warpgroup_mma_wait(0, deps=(o,))
    barrier_arrive(EMPTY + OPTIONS.STAGES_K + stage_v, PARTIES, 4)
    return o, weight, empty, lse


@gluon.jit
def _write(
    o, weight, empty, lse, place, W: gl.constexpr, tensors, numbers, pipeline, OPTIONS: gl.constexpr
):
    """Scale the output of a block of queries, and start the stores of the output and the LSE."""
    RAGGED: gl.constexpr = tensors.cu_seqlens_q_ptr is not None
    O: gl.constexpr = o.type.layout
    row, head, sequence, q_start, len_q = place
    rows = row + gl.arange(0, OPTIONS.ROWS, lse.type.layout)  # [ROWS]
    if RAGGED:
        lse_at = head.to(gl.int64) * numbers.tokens_q + q_start
    else:
        # opaque: the compiler would compute the numbers' signs early and keep them in registers
        row_of_heads = sequence.to(gl.int64) * opaque(numbers.heads_q) + head
        lse_at = row_of_heads * opaque(numbers.tokens_q)
    gl.store(tensors.lse_ptr + lse_at + rows, lse, mask=(rows >= 0) & (rows < len_q))
    o = o * gl.convert_layout(weight, gl.SliceLayout(1, O))[:, None]
    # values that no query sees may be NaN
    o = gl.where(gl.convert_layout(empty, gl.SliceLayout(1, O))[:, None], 0.0, o)
    send(o, place, W, tensors, numbers, pipeline)


@gluon.jit
def make_output(
    task, turn, tile_count, W: gl.constexpr, tensors, numbers, pipeline, OPTIONS: gl.constexpr
):
    """Write the output and the LSE of warpgroup ``W``'s rows of a tile; return the next turn."""
    walk, place = task.walk, task.place
    last = steps_of(walk, OPTIONS) - 1
    softmax = begin_tile(task, turn, tile_count, W, tensors, pipeline, OPTIONS)
    softmax = attend(softmax, walk.whole, last, task, W, True, tensors, pipeline, OPTIONS)
    o, m, l, p, turn = softmax
    softmax = Softmax(o, m, l, in_pairs(p), turn)
    softmax = attend(softmax, 0, walk.whole, task, W, False, tensors, pipeline, OPTIONS)
    o, weight, empty, lse = _finish(softmax, place.head, W, pipeline, OPTIONS)
    _write(o, weight, empty, lse, place, W, tensors, numbers, pipeline, OPTIONS)
    return softmax.turn
