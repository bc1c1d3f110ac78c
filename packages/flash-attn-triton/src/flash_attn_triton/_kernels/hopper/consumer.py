"""What the warpgroups do that multiply: their walk over the keys of tile after tile of queries.

Every warpgroup owns 64 queries of a tile and walks its keys from the last to the first, with the
online softmax of FlashAttention-2 (Dao, 2023) and the two overlaps of FlashAttention-3 (Shah et
al., 2024): a warpgroup's softmax runs beside another's products, and beside its own product of the
last tile's probabilities with the values. With ``PIPELINE`` the walk does not stop between tiles
of queries: the first product of the next one is issued together with the last of this one.
"""

from ._linked.compat import copy_out, gl, gluon, hopper, mbarrier, tma
from ._linked.pipeline import (
    EMPTY,
    FIELDS,
    FIRST_ROW,
    HEAD,
    LEN_K,
    LEN_Q,
    LOG2E,
    Q_START,
    SEQUENCE,
    SLOTS,
    TURN,
    barrier_arrive,
    barrier_sync,
    coordinates,
    field,
    key_tiles,
    opaque,
)
from ._linked.softmax import finish_softmax, logits_of, start_softmax
from .fp8 import UNIT, factors_of, scale_queries, sums_of, walk_fp8
from .walk import attend, begin, hide


@gluon.jit
def _receive(fields_s, tile_full, tile_empty, count):
    """Wait for the producer to announce a tile of queries, or with head -1 that none is left."""
    layout: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [4], [0])
    slot = count % SLOTS
    mbarrier.wait(tile_full.index(slot), count // SLOTS & 1)
    fields = fields_s.index(slot).load(layout)
    head, sequence = field(fields, HEAD), field(fields, SEQUENCE)
    first_row, q_start = field(fields, FIRST_ROW), field(fields, Q_START)
    len_q, len_k = field(fields, LEN_Q), field(fields, LEN_K)
    mbarrier.arrive(tile_empty.index(slot), count=1)
    return head, sequence, first_row, q_start, len_q, len_k


@gluon.jit
def _tokens(ROWS: gl.constexpr, PACK: gl.constexpr, layout: gl.constexpr):
    """Return the token of every row of a warpgroup, counted from its first: heads, then tokens."""
    index = gl.arange(0, ROWS, layout)
    if PACK > 1:
        index = index % (ROWS // PACK)
    return index


@gluon.jit
def _heads(head, ROWS: gl.constexpr, PACK: gl.constexpr, layout: gl.constexpr):
    """Return the head of every row, or where all have one, that."""
    if PACK > 1:
        head = head + gl.arange(0, ROWS, layout) // (ROWS // PACK)
    return head


@gluon.jit
def _survey(
    head, sequence, first_row, len_q, len_k, window_left, window_right, batch,
    alibi_slopes_ptr, stride_alibi_b, S: gl.constexpr,
    W: gl.constexpr, PACK: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    WARPGROUPS: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Return a tile's range of keys, its rows counted from the diagonal, and its ALiBi slopes."""
    TOKENS: gl.constexpr = ROWS // PACK
    low, left, right, high = key_tiles(
        first_row, len_q, len_k, window_left, window_right, HAS_LEFT, HAS_RIGHT,
        WARPGROUPS * TOKENS, BLOCK_N,
    )  # fmt: skip
    layout: gl.constexpr = gl.SliceLayout(1, S)
    rows = first_row + (len_k - len_q) + W * TOKENS + _tokens(ROWS, PACK, layout)
    slope = 0.0
    if alibi_slopes_ptr is not None:
        heads = _heads(gl.maximum(head, 0), ROWS, PACK, layout)
        slope = gl.load(alibi_slopes_ptr + _owner_of(sequence, batch) * stride_alibi_b + heads)
        if PACK > 1:
            slope = slope[:, None]
    return low, left, right, high, rows, slope


@gluon.jit
def _owner_of(sequence, batch):
    """Return the row of per-sequence tensors; padding around the sequences has none of its own."""
    return gl.maximum(gl.minimum(sequence, batch - 1), 0)


@gluon.jit
def _finish(m, l, head, sequence, batch, sinks_ptr, PACK: gl.constexpr, ROWS: gl.constexpr):
    """Return what ``finish_softmax`` does; padding around the sequences has no sink."""
    layout: gl.constexpr = m.type.layout
    heads = _heads(head, ROWS, PACK, layout)
    is_padding = (sequence < 0) | (sequence >= batch)
    if PACK > 1:
        is_padding |= heads < 0  # for each row
    return finish_softmax(m, l, heads, is_padding, sinks_ptr)


@gluon.jit
def _write(
    o, weight, empty, lse, out_desc, out_s, lse_ptr, cu_seqlens_q_ptr,
    first_row, head, sequence, q_start, len_q, batch, heads_q, tokens_q,
    W: gl.constexpr, PACK: gl.constexpr, RAGGED: gl.constexpr, ROWS: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
):  # fmt: skip
    """Scale the output of a block of queries, and send it and the LSE on their way."""
    O: gl.constexpr = o.type.layout
    owner = _owner_of(sequence, batch).to(gl.int64)
    row = first_row + W * (ROWS // PACK)
    layout: gl.constexpr = lse.type.layout
    rows = row + _tokens(ROWS, PACK, layout)
    heads = _heads(head, ROWS, PACK, layout)
    if cu_seqlens_q_ptr is None:
        lse_at = (owner * heads_q + heads) * tokens_q
    else:
        lse_at = heads.to(gl.int64) * tokens_q + q_start
    gl.store(lse_ptr + lse_at + rows, lse, mask=rows < len_q)
    o = o * gl.convert_layout(weight, gl.SliceLayout(1, O))[:, None]
    # values that nobody sees may be NaN
    o = gl.where(gl.convert_layout(empty, gl.SliceLayout(1, O))[:, None], 0.0, o)
    tma.store_wait(0)
    out_s.reshape([ROWS, HEAD_DIM_V]).store(o.to(out_s.dtype))
    hopper.fence_async_shared()
    copy_out(out_desc, coordinates(sequence, head, q_start, len_q, row, RAGGED), out_s)


@gluon.jit
def consume(
    W: gl.constexpr, out_desc, q_s, k_s, v_s, out_s, fields_s, q_full, q_empty, k_full, v_full,
    tile_full, tile_empty, lse_ptr, cu_seqlens_q_ptr, alibi_slopes_ptr, sinks_ptr, factors_ptr,
    scale, softcap, window_left, window_right, batch, heads_q, tokens_q, stride_alibi_b,
    GROUP: gl.constexpr, PACK: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, RAGGED: gl.constexpr, WARPGROUPS: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr,
    BUFFERS_Q: gl.constexpr, STAGES_K: gl.constexpr, STAGES_V: gl.constexpr,
    SHARE: gl.constexpr, PIPELINE: gl.constexpr, LAG: gl.constexpr,
):  # fmt: skip
    """Work on the rows of warpgroup ``W`` of every tile of queries that the producer announces."""
    PARTIES: gl.constexpr = 128 * WARPGROUPS + 32
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM_V, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    HAS_ALIBI: gl.constexpr = alibi_slopes_ptr is not None
    dtype: gl.constexpr = q_s.dtype
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, S)
    # the scale goes into the exponential's multiply-add; it is positive, so max commutes
    factor = scale * LOG2E
    if HAS_SOFTCAP or HAS_ALIBI:
        factor = 1.0
    if W == WARPGROUPS - 1:
        # the first turn
        barrier_arrive(TURN, 256, 4)
    turn = 0  # tiles of keys
    count = 0  # tiles of queries
    head, sequence, first_row, q_start, len_q, len_k = _receive(
        fields_s, tile_full, tile_empty, count
    )
    if PIPELINE:
        if head >= 0:
            low, left, right, high, rows, slope = _survey(
                head, sequence, first_row, len_q, len_k, window_left, window_right, batch,
                alibi_slopes_ptr, stride_alibi_b, S,
                W, PACK, HAS_LEFT, HAS_RIGHT, WARPGROUPS, ROWS, BLOCK_N,
            )  # fmt: skip
            m, l, p, turn = begin(
                turn, count, q_s, k_s, q_full, k_full, rows, high - 1, len_k,
                scale, factor, softcap, slope, window_left, window_right,
                W, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, WARPGROUPS, ROWS, BLOCK_N,
                HEAD_DIM, HEAD_DIM_V, BUFFERS_Q, STAGES_K,
            )  # fmt: skip
            o = gl.zeros([ROWS, HEAD_DIM_V], gl.float32, O)
            while head >= 0:
                buffer = count % BUFFERS_Q * WARPGROUPS + W
                o, m, l, p, turn = attend(
                    o, m, l, p, turn, low, left, right, high, buffer, q_s, k_s, v_s, k_full, v_full,
                    rows, len_k, scale, factor, softcap, slope, window_left, window_right,
                    W, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, WARPGROUPS, ROWS, BLOCK_N,
                    HEAD_DIM, HEAD_DIM_V, BUFFERS_Q, STAGES_K, STAGES_V, LAG,
                )  # fmt: skip
                mbarrier.arrive(q_empty.index(buffer), count=1)
                weight, empty, lse = _finish(m, l, head, sequence, batch, sinks_ptr, PACK, ROWS)
                last_head, last_sequence, last_row = head, sequence, first_row
                last_start, last_len = q_start, len_q
                count += 1
                head, sequence, first_row, q_start, len_q, len_k = _receive(
                    fields_s, tile_full, tile_empty, count
                )
                low, left, right, high, rows, slope = _survey(
                    head, sequence, first_row, len_q, len_k, window_left, window_right, batch,
                    alibi_slopes_ptr, stride_alibi_b, S,
                    W, PACK, HAS_LEFT, HAS_RIGHT, WARPGROUPS, ROWS, BLOCK_N,
                )  # fmt: skip
                # the next tile's first product beside this one's last, as between any two
                stage_v = (turn - 1) % STAGES_V
                stage_k = turn % STAGES_K
                buffer = count % BUFFERS_Q * WARPGROUPS + W
                q = q_s.index(opaque(buffer)).reshape([ROWS, HEAD_DIM])
                k = k_s.index(stage_k).reshape([BLOCK_N, HEAD_DIM])
                v = v_s.index(stage_v).reshape([BLOCK_N, HEAD_DIM_V])
                mbarrier.wait(q_full.index(buffer), count // BUFFERS_Q & 1)
                mbarrier.wait(k_full.index(stage_k), turn // STAGES_K & 1)
                barrier_sync(TURN + W, 256, 4)
                s = hopper.warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
                mbarrier.wait(v_full.index(stage_v), (turn - 1) // STAGES_V & 1)
                o = hopper.warpgroup_mma(p, v, o, is_async=True)
                barrier_arrive(TURN + (W + 1) % WARPGROUPS, 256, 4)
                s = hopper.warpgroup_mma_wait(1, deps=(s,))
                barrier_arrive(EMPTY + stage_k, PARTIES, 4)
                cols = (high - 1) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))
                s = logits_of(s, rows, cols, scale, softcap, slope, HAS_SOFTCAP, HAS_ALIBI)
                s = hide(s, rows, cols, len_k, window_left, window_right, HAS_LEFT, HAS_RIGHT)
                m, l, e = start_softmax(s, factor)
                o = hopper.warpgroup_mma_wait(0, deps=(o,))
                barrier_arrive(EMPTY + STAGES_K + stage_v, PARTIES, 4)
                p = gl.convert_layout(e.to(dtype), P)
                turn += 1
                _write(
                    o, weight, empty, lse, out_desc, out_s.index(W), lse_ptr, cu_seqlens_q_ptr,
                    last_row, last_head, last_sequence, last_start, last_len, batch, heads_q,
                    tokens_q, W, PACK, RAGGED, ROWS, HEAD_DIM_V,
                )  # fmt: skip
                o = gl.zeros([ROWS, HEAD_DIM_V], gl.float32, O)
    elif factors_ptr is None:
        while head >= 0:
            low, left, right, high, rows, slope = _survey(
                head, sequence, first_row, len_q, len_k, window_left, window_right, batch,
                alibi_slopes_ptr, stride_alibi_b, S,
                W, PACK, HAS_LEFT, HAS_RIGHT, WARPGROUPS, ROWS, BLOCK_N,
            )  # fmt: skip
            buffer = count % BUFFERS_Q * WARPGROUPS + W
            m, l, p, turn = begin(
                turn, count, q_s, k_s, q_full, k_full, rows, high - 1, len_k,
                scale, factor, softcap, slope, window_left, window_right,
                W, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, WARPGROUPS, ROWS, BLOCK_N,
                HEAD_DIM, HEAD_DIM_V, BUFFERS_Q, STAGES_K,
            )  # fmt: skip
            o = gl.zeros([ROWS, HEAD_DIM_V], gl.float32, O)
            o, m, l, p, turn = attend(
                o, m, l, p, turn, low, left, right, high, buffer, q_s, k_s, v_s, k_full, v_full,
                rows, len_k, scale, factor, softcap, slope, window_left, window_right,
                W, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, WARPGROUPS, ROWS, BLOCK_N,
                HEAD_DIM, HEAD_DIM_V, BUFFERS_Q, STAGES_K, STAGES_V, LAG,
            )  # fmt: skip
            if not SHARE:
                mbarrier.arrive(q_empty.index(buffer), count=1)
            stage_v = (turn - 1) % STAGES_V
            v = v_s.index(stage_v).reshape([BLOCK_N, HEAD_DIM_V])
            mbarrier.wait(v_full.index(stage_v), (turn - 1) // STAGES_V & 1)
            o = hopper.warpgroup_mma(p, v, o, is_async=True)
            weight, empty, lse = _finish(m, l, head, sequence, batch, sinks_ptr, PACK, ROWS)
            o = hopper.warpgroup_mma_wait(0, deps=(o,))
            barrier_arrive(EMPTY + STAGES_K + stage_v, PARTIES, 4)
            _write(
                o, weight, empty, lse, out_desc, out_s.index(W), lse_ptr, cu_seqlens_q_ptr,
                first_row, head, sequence, q_start, len_q, batch, heads_q, tokens_q,
                W, PACK, RAGGED, ROWS, HEAD_DIM_V,
            )  # fmt: skip
            if SHARE:
                # the output leaves through the memory of the queries
                tma.store_wait(0)
                mbarrier.arrive(q_empty.index(W), count=1)
            count += 1
            head, sequence, first_row, q_start, len_q, len_k = _receive(
                fields_s, tile_full, tile_empty, count
            )
    else:
        while head >= 0:
            low, left, right, high, rows, slope = _survey(
                head, sequence, first_row, len_q, len_k, window_left, window_right, batch,
                alibi_slopes_ptr, stride_alibi_b, sums_of(BLOCK_N),
                W, PACK, HAS_LEFT, HAS_RIGHT, WARPGROUPS, ROWS, BLOCK_N,
            )  # fmt: skip
            q = q_s.index(W).reshape([ROWS, HEAD_DIM])
            mbarrier.wait(q_full.index(W), count & 1)
            factors = factors_of(factors_ptr, head, _owner_of(sequence, batch), heads_q, GROUP)
            size = scale_queries(q, scale * gl.load(factors))
            o, m, l, turn = walk_fp8(
                turn, q, k_s, v_s, k_full, v_full, low, left, right, high, rows, len_k,
                size, softcap, slope, window_left, window_right,
                HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, WARPGROUPS, ROWS, BLOCK_N,
                HEAD_DIM, HEAD_DIM_V, STAGES_K, STAGES_V,
            )  # fmt: skip
            mbarrier.arrive(q_empty.index(W), count=1)
            weight, empty, lse = _finish(m, l, head, sequence, batch, sinks_ptr, PACK, ROWS)
            weight *= gl.load(factors + 1) * UNIT
            _write(
                o, weight, empty, lse, out_desc, out_s.index(W), lse_ptr, cu_seqlens_q_ptr,
                first_row, head, sequence, q_start, len_q, batch, heads_q, tokens_q,
                W, PACK, RAGGED, ROWS, HEAD_DIM_V,
            )  # fmt: skip
            count += 1
            head, sequence, first_row, q_start, len_q, len_k = _receive(
                fields_s, tile_full, tile_empty, count
            )
    tma.store_wait(0)
    if W == 0:
        # the last turn that was passed on
        barrier_sync(TURN, 256, 4)
