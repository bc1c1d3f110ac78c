"""Backward pass on Hopper: one warp copies by TMA, two warpgroups multiply by wgmma.

A program owns a block of keys, of which every warpgroup has 64, and walks the queries that see it.
Above head dim 128 it owns 64 keys, and the warpgroups divide the work as ``backward_wide`` says.
Scores are transposed ([keys, queries]), so that probabilities and their gradients go from the
accumulators into the products of dv and dk as they lie. The product of dq needs those of all keys
of the block: they meet in shared memory. What a block contributes to dq is added in fp32 to a
buffer in memory, in the order of the accumulators' registers: by TMA, or above head dim 128 by the
threads. ``round_dq`` brings it into its own order.
"""

from ._linked.compat import gl, gluon, hopper
from ._linked.gradients import ROWS
from ._linked.order import take_number
from ._linked.pipeline import EMPTY, SEARCH_CHUNK, barriers
from .backward_bias import make_ring
from .backward_producer import produce
from .backward_steps import MADE, adds_by_threads, consume
from .backward_structures import (
    Block,
    Located,
    Numbers,
    Options,
    Order,
    Panels,
    Pipeline,
    Program,
    Tensors,
    Tile,
    Walk,
)
from .backward_values import consume_values, make_value_pipeline
from .backward_wide import GIVEN, consume_gradients, consume_scores
from .ordered import add_in_order, pass_turns
from .panels import allocate
from .shared_bias import keep_shared, share_block


@gluon.jit
def locate_keys(
    pid,
    tensors,
    numbers,
    BALANCE: gl.constexpr,
    IS_PART: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BY_HEAD: gl.constexpr = False,
):
    """Return the block of keys that a program owns, and where its sequence lies.

    Under a causal mask the first blocks walk furthest: ``BALANCE`` starts them first, within as
    many heads (``span``) as the cache holds. A launch that ``IS_PART`` has some of the sequences or
    heads (``Numbers``). ``BY_HEAD`` starts the sequences of a head side by side, not the heads of a
    sequence. For packed tensors ``tiles`` counts slots, and a slot without a block gives -1.
    """
    batch, heads_k, tiles = numbers.batch, numbers.heads_k, numbers.tiles
    if tensors.cu_seqlens_k_ptr is None:
        planes = batch * heads_k
        if IS_PART:
            planes = gl.num_programs(0) // tiles
            heads_k = numbers.heads_here
        if BALANCE:
            section = pid // (numbers.span * tiles)
            place = pid % (numbers.span * tiles)
            heads_here = gl.minimum(numbers.span, planes - section * numbers.span)
            block = place // heads_here
            batch_head = section * numbers.span + place % heads_here
        else:
            block = pid % tiles
            batch_head = pid // tiles
        if BY_HEAD:
            sequence = batch_head % batch
            head = batch_head // batch
        else:
            sequence = batch_head // heads_k
            head = batch_head % heads_k
        if IS_PART:
            sequence += numbers.first_sequence
            head += numbers.first_head
        q_start = 0
        k_start = 0
        len_q = numbers.tokens_q
        len_k = numbers.tokens_k
    else:
        cu_q_ptr, cu_k_ptr = tensors.cu_seqlens_q_ptr, tensors.cu_seqlens_k_ptr
        slot = pid // heads_k if BALANCE else pid % tiles
        head = pid % heads_k if BALANCE else pid // tiles
        # as ``schedule.find_sequence``, for a whole warpgroup
        sequence = -1
        for first in range(0, batch + 1, SEARCH_CHUNK):
            index = first + gl.arange(0, SEARCH_CHUNK, gl.BlockedLayout([1], [32], [4], [0]))
            start = gl.load(cu_k_ptr + index, mask=index <= batch, other=0)  # [SEARCH_CHUNK]
            mine = (start // BLOCK_N + index < slot) & (index <= batch)
            sequence += gl.sum(mine.to(gl.int32), 0)
        # tokens around the sequences are two more sequences, which face nothing
        is_real = (sequence >= 0) & (sequence < batch)
        k_start = gl.load(cu_k_ptr + sequence, mask=sequence >= 0, other=0)
        k_end = gl.load(cu_k_ptr + sequence + 1, mask=sequence < batch, other=numbers.tokens_k)
        q_start = gl.load(cu_q_ptr + sequence, mask=is_real, other=0)
        q_end = gl.load(cu_q_ptr + sequence + 1, mask=is_real, other=0)
        block = slot - (k_start // BLOCK_N + sequence + 1)
        len_q = q_end - q_start
        len_k = k_end - k_start
        block = gl.where(block * BLOCK_N < len_k, block, -1)
    return Located(block, sequence, head, q_start, k_start, len_q, len_k)


@gluon.jit
def query_tiles(
    first_key,
    diagonal,
    len_q,
    len_k,
    numbers,
    HAS_ALIBI: gl.constexpr,
    OPTIONS: gl.constexpr,
    TILE: gl.constexpr,
):
    """Return the tiles of queries that see a block of keys."""
    BLOCK_M: gl.constexpr = TILE.BLOCK_M
    last_key = first_key + TILE.BLOCK_N - 1
    begin = 0
    whole = 0
    end = gl.cdiv(len_q, BLOCK_M)
    part = end
    if OPTIONS.HAS_RIGHT:
        begin = gl.maximum(first_key - diagonal - numbers.window_right, 0) // BLOCK_M
        whole = gl.cdiv(gl.maximum(last_key - diagonal - numbers.window_right, 0), BLOCK_M)
    if OPTIONS.HAS_LEFT:
        last = gl.minimum(last_key, len_k - 1) - diagonal + numbers.window_left + 1
        end = gl.minimum(end, gl.cdiv(gl.maximum(last, 0), BLOCK_M))
        part = gl.maximum(first_key - diagonal + numbers.window_left + 1, 0) // BLOCK_M
    if HAS_ALIBI:
        # distances change their sign in tiles between
        whole = gl.maximum(whole, gl.cdiv(gl.maximum(last_key - diagonal, 0), BLOCK_M))
    # no key, no query: a block ahead of the seen ones, or a slot without a block
    end = gl.where(first_key < len_k, end, 0)
    begin = gl.minimum(begin, end)
    whole = gl.minimum(gl.maximum(whole, begin), end)
    if last_key >= len_k:
        whole = end
    part = gl.minimum(gl.maximum(part, whole), end)
    cross = begin
    if HAS_ALIBI and not OPTIONS.HAS_RIGHT:
        ahead = gl.maximum(first_key - diagonal + 1, 0) // BLOCK_M
        cross = gl.where(last_key < len_k, gl.minimum(gl.maximum(ahead, begin), whole), begin)
    return Walk(begin, cross, whole, part, end)


@gluon.jit
def _find_block(
    tensors,
    numbers,
    HAS_BIAS: gl.constexpr,
    IS_PART: gl.constexpr,
    OPTIONS: gl.constexpr,
    TILE: gl.constexpr,
):
    """Return ``(block, walk, dq_at)``: a program's block and the tiles of queries that see it.

    ``dq_at`` is the tile in the sums of dq with which those of the sequence begin. Programs that
    share a tile of a bias begin side by side, so that one copies it from memory, and the others
    from the L2 cache.
    """
    pid = gl.program_id(0)
    if OPTIONS.ORDERED:
        pid = take_number(tensors.counters_ptr)
        if IS_PART:
            # without the programs of the launches before
            before = numbers.first_sequence * numbers.heads_k + numbers.first_head * numbers.batch
            pid -= before * numbers.tiles
    IS_FIXED: gl.constexpr = tensors.cu_seqlens_k_ptr is None
    SHARES: gl.constexpr = HAS_BIAS and IS_FIXED and not OPTIONS.ORDERED
    BALANCE: gl.constexpr = OPTIONS.HAS_RIGHT or OPTIONS.ORDERED or SHARES
    BY_HEAD: gl.constexpr = SHARES and not OPTIONS.BIAS_BATCH
    found = locate_keys(pid, tensors, numbers, BALANCE, IS_PART, TILE.BLOCK_N, BY_HEAD)
    q_start, k_start, len_q, len_k = found.q_start, found.k_start, found.len_q, found.len_k
    owner = gl.maximum(gl.minimum(found.sequence, numbers.batch - 1), 0).to(gl.int64)
    heads_q = numbers.heads_k * OPTIONS.GROUP
    if tensors.cu_seqlens_q_ptr is None:
        row_at = owner * heads_q * numbers.tokens_q
        dq_at = owner * heads_q * numbers.tiles_q
    else:
        row_at = owner * 0 + q_start
        dq_at = owner * 0 + (q_start // TILE.BLOCK_M + found.sequence + 1)
    unused = 0
    if tensors.seqused_k_ptr is not None:
        is_real = (found.sequence >= 0) & (found.sequence < numbers.batch)
        used = gl.load(tensors.seqused_k_ptr + found.sequence, mask=is_real, other=0)
        unused = len_k - used
        len_k = used
    shift = 0
    unseen = 0
    if OPTIONS.HAS_RIGHT:
        # queries ahead of the first one that sees a key: as if there were none
        shift = gl.minimum(gl.maximum(len_q - len_k - numbers.window_right, 0), len_q)
        q_start += shift
        row_at += shift
        len_q -= shift
    if OPTIONS.HAS_LEFT:
        # likewise keys ahead of the first one that a query sees
        unseen = gl.minimum(gl.maximum(len_k - len_q - numbers.window_left, 0), len_k)
        k_start += unseen
        len_k -= unseen
    diagonal = len_k - len_q
    # a slot without a block: beyond the end, where nothing is read or written
    last = gl.cdiv(len_k + unused, TILE.BLOCK_N)
    first_key = gl.where(found.block < 0, last, found.block) * TILE.BLOCK_N
    HAS_ALIBI: gl.constexpr = tensors.alibi_slopes_ptr is not None
    walk = query_tiles(first_key, diagonal, len_q, len_k, numbers, HAS_ALIBI, OPTIONS, TILE)
    block = Block(
        found.sequence,
        found.head_k,
        first_key,
        q_start,
        k_start,
        diagonal,
        len_q,
        len_k,
        row_at,
        numbers.tokens_q,
        shift,
        unseen,
        unused,
    )
    return block, walk, dq_at


@gluon.jit
def _make_pipeline(maps, TILE: gl.constexpr):
    """Allocate the buffers and mbarriers of the pipeline."""
    dtype: gl.constexpr = maps.q_descs[0].dtype
    BLOCK_M: gl.constexpr = TILE.BLOCK_M
    STAGES_Q: gl.constexpr = TILE.STAGES_Q
    STAGES_O: gl.constexpr = TILE.STAGES_O
    PARTS: gl.constexpr = TILE.BLOCK_N // ROWS
    q_s = allocate(maps.q_descs, STAGES_Q)
    dout_s = allocate(maps.dout_descs, STAGES_O)
    k_s = allocate(maps.k_descs, PARTS)
    v_s = allocate(maps.v_descs, PARTS)
    if maps.ds_desc is None:
        TRANSPOSED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_M], dtype)
        ds_s = gl.allocate_shared_memory(dtype, [2 * PARTS, ROWS, BLOCK_M], TRANSPOSED)
    else:
        # as the bias lies in memory: TMA keeps them
        ds_s = allocate((maps.ds_desc,), 2 * PARTS)[0]
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse2_s = gl.allocate_shared_memory(gl.float32, [STAGES_Q, BLOCK_M], PLAIN)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES_O, BLOCK_M], PLAIN)
    # two arrivals: the copy's, and that of the row numbers, which the producer stores itself
    q_full = barriers(STAGES_Q, 2)
    dout_full = barriers(STAGES_O, 2)
    k_full = barriers(1, 1).index(0)
    v_full = barriers(1, 1).index(0)
    hopper.fence_async_shared()
    return Pipeline(q_s, k_s, v_s, dout_s, ds_s, lse2_s, delta_s, q_full, k_full, v_full, dout_full)


@gluon.jit
def allocate_sums(maps, TILE: gl.constexpr):
    """Allocate the panels of dq on its way out: half of a tile for either warpgroup."""
    SIZE: gl.constexpr = TILE.BLOCK_M * TILE.HEAD_DIM // 64
    dq_s = (gl.allocate_shared_memory(gl.float32, [2, SIZE, 32], maps.sums[0].layout),)
    if TILE.NARROW > 0:
        LESS: gl.constexpr = TILE.BLOCK_M * TILE.NARROW // 64
        dq_s += (gl.allocate_shared_memory(gl.float32, [2, LESS, 32], maps.sums[1].layout),)
    return dq_s


@gluon.jit(
    do_not_specialize=Numbers._fields,
    do_not_specialize_on_alignment=[
        "alibi_slopes_ptr",
        "rng_state_ptr",
        "cu_seqlens_q_ptr",
        "cu_seqlens_k_ptr",
        "seqused_k_ptr",
    ],
)
def backward_kernel(
    q_desc,
    k_desc,
    v_desc,
    dout_desc,
    dk_desc,
    dv_desc,
    q_narrow_desc,
    k_narrow_desc,
    v_narrow_desc,
    dout_narrow_desc,
    dk_narrow_desc,
    dv_narrow_desc,
    bias_desc,
    ds_desc,
    sums,
    sums_narrow,
    lse2_ptr,
    delta_ptr,
    alibi_slopes_ptr,
    rng_state_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    seqused_k_ptr,
    counters_ptr,
    scale,
    softcap,
    window_left,
    window_right,
    batch,
    heads_k,
    tokens_q,
    tokens_k,
    tiles,
    tiles_q,
    span,
    keep_scale,
    dropout_threshold,
    stride_alibi_b,
    first_sequence,
    first_head,
    heads_here,
    sequences_together,
    heads_together,
    GROUP: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
    RAGGED: gl.constexpr,
    APART_Q: gl.constexpr,
    APART_K: gl.constexpr,
    BIAS_BATCH: gl.constexpr,
    BIAS_HEADS: gl.constexpr,
    BIAS_ROWS: gl.constexpr,
    ORDERED: gl.constexpr,
    ADDS_DS: gl.constexpr,
    SHARES_DS: gl.constexpr,
    CLEARS_DS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    NARROW: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    NARROW_V: gl.constexpr,
    STAGES_Q: gl.constexpr,
    STAGES_O: gl.constexpr,
    STAGES_B: gl.constexpr,
    MAKES_DK: gl.constexpr,
    MAKES_DV: gl.constexpr,
):
    """``dv = p^T dout``, ``dk = scale ds^T q`` and ``dq += ds k`` of one block of keys.

    There ``p = exp2(s - lse2)`` are the probabilities of the scores s, and
    ``ds = p (dout v^T - delta)`` their gradients (beside a softcap, times its derivative). Beside
    dropout, with ``m`` 1 where it keeps and ``c = keep_scale``, ``dv = c (p m)^T dout`` and
    ``ds = c p (m dout v^T - delta / c)``. A program writes dk and dv of the block, of one key head,
    and adds its part to the sums of dq.
    """
    dtype: gl.constexpr = q_desc.dtype
    OPTIONS: gl.constexpr = Options(
        GROUP,
        HAS_LEFT,
        HAS_RIGHT,
        HAS_SOFTCAP,
        RAGGED,
        APART_Q,
        APART_K,
        BIAS_BATCH,
        BIAS_HEADS,
        BIAS_ROWS,
        ORDERED,
        ADDS_DS,
        SHARES_DS,
        CLEARS_DS,
    )
    TILE: gl.constexpr = Tile(
        BLOCK_M,
        BLOCK_N,
        HEAD_DIM,
        NARROW,
        HEAD_DIM_V,
        NARROW_V,
        STAGES_Q,
        STAGES_O,
        STAGES_B,
        MAKES_DK,
        MAKES_DV,
    )
    maps = Panels(
        (q_desc, q_narrow_desc) if NARROW > 0 else (q_desc,),
        (k_desc, k_narrow_desc) if NARROW > 0 else (k_desc,),
        (v_desc, v_narrow_desc) if NARROW_V > 0 else (v_desc,),
        (dout_desc, dout_narrow_desc) if NARROW_V > 0 else (dout_desc,),
        (dk_desc, dk_narrow_desc) if NARROW > 0 else (dk_desc,),
        (dv_desc, dv_narrow_desc) if NARROW_V > 0 else (dv_desc,),
        bias_desc,
        ds_desc,
        sums if adds_by_threads(TILE) else (sums, sums_narrow) if NARROW > 0 else (sums,),
    )
    tensors = Tensors(
        lse2_ptr,
        delta_ptr,
        alibi_slopes_ptr,
        rng_state_ptr,
        cu_seqlens_q_ptr,
        cu_seqlens_k_ptr,
        seqused_k_ptr,
        counters_ptr,
    )
    numbers = Numbers(
        scale,
        softcap,
        window_left,
        window_right,
        batch,
        heads_k,
        tokens_q,
        tokens_k,
        tiles,
        tiles_q,
        span,
        keep_scale,
        dropout_threshold,
        stride_alibi_b,
        first_sequence,
        first_head,
        heads_here,
        sequences_together,
        heads_together,
    )
    block, walk, dq_at = _find_block(
        tensors, numbers, bias_desc is not None, ds_desc is not None, OPTIONS, TILE
    )
    if MAKES_DK:
        pipeline = _make_pipeline(maps, TILE)
    else:
        pipeline = make_value_pipeline(maps, TILE)
    bias = None
    if bias_desc is not None:
        bias = make_ring(bias_desc, OPTIONS, TILE)
    BARRIERS: gl.constexpr = EMPTY + STAGES_Q + STAGES_O + STAGES_B
    # numbers in a tile of dq
    SIZE: gl.constexpr = BLOCK_M * (HEAD_DIM + NARROW)
    order = None
    if ORDERED:
        order = Order(counters_ptr + (1 + 2 * dq_at), barriers(2, 1), barriers(2, 1))
    elif SHARES_DS:
        gl.static_assert(MAKES_DK and BLOCK_N > ROWS and not HAS_LEFT, "another way to sum dbias")
        order = share_block(block, tensors, numbers, TILE)
    if not MAKES_DK:
        gl.static_assert(BARRIERS <= 16, "stages outnumber the barriers")
        program = Program(
            maps, pipeline, None, None, bias, 0, tensors, numbers, block, 0, walk, None, order
        )
        gl.warp_specialize(
            [
                (consume_values, (0, program, OPTIONS, TILE)),
                (consume_values, (1, program, OPTIONS, TILE)),
                (produce, (program, OPTIONS, TILE)),
            ],
            [4, 1],
            [240, 24],
        )
    elif BLOCK_N == ROWS:
        gl.static_assert(BARRIERS <= GIVEN, "stages outnumber the barriers")
        TRANSPOSED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_M], dtype)
        p_s = gl.allocate_shared_memory(dtype, [2, ROWS, BLOCK_M], TRANSPOSED)
        at = sums + dq_at * SIZE
        pitch = tiles_q.to(gl.int64) * SIZE
        program = Program(
            maps, pipeline, None, p_s, bias, at, tensors, numbers, block, pitch, walk, None, order
        )
        if ORDERED:
            gl.warp_specialize(
                [
                    (consume_scores, (program, OPTIONS, TILE)),
                    (consume_gradients, (program, OPTIONS, TILE)),
                    (produce, (program, OPTIONS, TILE)),
                    (pass_turns, (0, program, OPTIONS, TILE)),
                    (pass_turns, (1, program, OPTIONS, TILE)),
                ],
                [4, 1, 1, 1],
                [240, 24, 24, 24],
            )
        else:
            gl.warp_specialize(
                [
                    (consume_scores, (program, OPTIONS, TILE)),
                    (consume_gradients, (program, OPTIONS, TILE)),
                    (produce, (program, OPTIONS, TILE)),
                ],
                [4, 1],
                [240, 24],
            )
    else:
        gl.static_assert(BARRIERS <= MADE + 8, "stages outnumber the barriers")
        dq_s = None
        if not adds_by_threads(TILE):
            dq_s = allocate_sums(maps, TILE)
        # in rows of the maps
        at = (dq_at * (SIZE // 32)).to(gl.int32)
        pitch = tiles_q * (SIZE // 32)
        program = Program(
            maps, pipeline, dq_s, None, bias, at, tensors, numbers, block, pitch, walk, None, order
        )
        if ORDERED:
            gl.warp_specialize(
                [
                    (consume, (0, program, OPTIONS, TILE)),
                    (consume, (1, program, OPTIONS, TILE)),
                    (produce, (program, OPTIONS, TILE)),
                    (add_in_order, (0, program, OPTIONS, TILE)),
                    (add_in_order, (1, program, OPTIONS, TILE)),
                ],
                [4, 1, 1, 1],
                [240, 24, 24, 24],
            )
        elif SHARES_DS:
            gl.warp_specialize(
                [
                    (consume, (0, program, OPTIONS, TILE)),
                    (consume, (1, program, OPTIONS, TILE)),
                    (produce, (program, OPTIONS, TILE)),
                    (keep_shared, (program, OPTIONS, TILE)),
                ],
                [4, 1, 1],
                [240, 24, 24],
            )
        else:
            gl.warp_specialize(
                [
                    (consume, (0, program, OPTIONS, TILE)),
                    (consume, (1, program, OPTIONS, TILE)),
                    (produce, (program, OPTIONS, TILE)),
                ],
                [4, 1],
                [240, 24],
            )
