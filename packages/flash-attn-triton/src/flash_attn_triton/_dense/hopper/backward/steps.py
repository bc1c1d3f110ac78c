"""The steps of a warpgroup of the Hopper backward up to head dim 128, tile by tile of queries.

A tile has five products (wgmma), and one of them runs while the warpgroup computes: dp during the
exponentials, dv during the gradient of the scores, dk and the next tile's scores during the
addition to dq. More products in flight were slower: a warpgroup cannot go on before the tensor
cores have taken its product. The product of dq is one step late. By then the other warpgroup has
stored its gradients of scores, so the two need not run in lockstep, and one computes while the
other multiplies.
"""

from ...._linked.hopper.compat import gl, gluon, hopper, mbarrier, tma
from ...._linked.hopper.gradients import ROWS
from ...._linked.hopper.pipeline import EMPTY, LOG2E, TURN, await_full, barrier_arrive, barrier_sync
from ...._linked.hopper.softmax import tanh
from ..dropout import dropout_key, gradient_of_kept, negate_dropped, round_kept
from ..panels import (
    accumulator,
    add_by_threads,
    add_panels,
    multiply_gradient,
    multiply_rows,
    multiply_values,
    no_gradient,
    own_panels,
    panels_in_rows,
    part_of,
    rows_before,
    scale_panels,
    splits_by_panel,
    stage_panels,
    tile_of,
    wait_for,
    wait_for_all,
)
from .bias import gradients_of, keep_gradient, less_bias
from .blocks import DQ_TILE, FIRST_ROW, count_turns, place_of
from .order import hand_over, tile_at
from .shared_bias import await_buffer, clear_hidden
from .structures import Carried, Head
from .sums.shares import hand_in

# threads at the barrier of an empty stage: two warpgroups and the producer's warp
PARTIES = gl.constexpr(288)
# first of the named barriers that signal stored gradients of scores: one per buffer; the second
# warpgroup's come eight later
MADE = gl.constexpr(6)


@gluon.constexpr_function
def adds_by_threads(tile):
    """Tell whether threads add to dq, not the TMA: with 64 keys, or if dv has its own launch.

    The tiles then take all of the shared memory.
    """
    return tile.BLOCK_N == 64 or not tile.MAKES_DV


@gluon.jit
def slope_of(head, program):
    """Return ALiBi's slope of a query head, in base 2."""
    tensors, numbers = program.tensors, program.numbers
    # padding takes its neighbour's slope
    owner = gl.maximum(gl.minimum(program.block.sequence, numbers.batch - 1), 0)
    return gl.load(tensors.alibi_slopes_ptr + owner * numbers.stride_alibi_b + head) * LOG2E


@gluon.jit
def side_of(slope, first_row, block):
    """Return ALiBi's slope of a tile of queries, negated if they come before the block's keys.

    Then ``distance * slope`` is ``(row - key) * side``, except in the tiles with a mask. ``lse2``
    already contains the row's part of it: ``(row - block.first_key) * side``.
    """
    return gl.where(first_row < block.first_key, -slope, slope)


@gluon.jit
def _tilt(logits, first_key, first_row, slope, MASKED: gl.constexpr, block):
    """Subtract ALiBi's ``distance * slope``, of which ``lse2`` already contains the rows' part."""
    S: gl.constexpr = logits.type.layout
    keys = first_key + gl.arange(0, logits.shape[0], gl.SliceLayout(1, S))  # [keys]
    side = side_of(slope, first_row, block)
    logits += ((keys - block.first_key).to(gl.float32) * side)[:, None]
    if MASKED:
        rows = first_row + gl.arange(0, logits.shape[1], gl.SliceLayout(0, S))  # [queries]
        distance = (rows[None, :] - keys[:, None]).to(gl.float32)
        logits += distance * side - gl.abs(distance) * slope
    return logits


@gluon.jit
def head_of(member, dq_at, program, OPTIONS: gl.constexpr):
    """Return the ``Head`` of a query head of the group, whose sums of dq begin at ``dq_at``."""
    block, numbers = program.block, program.numbers
    head = block.head_k * OPTIONS.GROUP + member
    slope = 0.0
    if program.tensors.alibi_slopes_ptr is not None:
        slope = slope_of(head, program)
    dropout = 0
    if program.tensors.rng_state_ptr is not None:
        plane = block.sequence * (numbers.heads_k * OPTIONS.GROUP) + head
        dropout = dropout_key(program.tensors.rng_state_ptr, plane)
    return Head(dq_at, slope, dropout)


@gluon.jit
def head_now(step, head, program, OPTIONS: gl.constexpr):
    """Return the ``Head`` of a step of a walk that began with ``head``; see ``head_at``."""
    if OPTIONS.ORDERED and OPTIONS.GROUP > 1:
        now = head_of(step % OPTIONS.GROUP, head.dq_at, program, OPTIONS)
    else:
        now = head
    return now


@gluon.jit
def probabilities(
    s,
    shift,
    first_key,
    first_row,
    head,
    MASKED: gl.constexpr,
    program,
    OPTIONS: gl.constexpr,
):
    """Return ``p = exp2(s - shift)`` of scores [keys, queries], and the factor of dp in ds.

    ``shift`` is the LSE minus the bias. The factor of dp is p, or with a softcap p times the
    derivative of the cap. Both are negative where dropout drops. Rows are numbered by the key that
    they stand at.
    """
    S: gl.constexpr = s.type.layout
    block = program.block
    numbers = program.numbers
    if OPTIONS.HAS_SOFTCAP:
        capped = tanh(s * (numbers.scale / numbers.softcap))
        logits = capped * (numbers.softcap * LOG2E) - shift
    else:
        logits = s * (numbers.scale * LOG2E) - shift
    if program.tensors.alibi_slopes_ptr is not None:
        logits = _tilt(logits, first_key, first_row, head.slope, MASKED, block)
    p = gl.exp2(logits)
    if MASKED:
        keys = first_key + gl.arange(0, s.shape[0], gl.SliceLayout(1, S))
        rows = first_row + gl.arange(0, s.shape[1], gl.SliceLayout(0, S))
        visible = (keys < block.len_k)[:, None]
        if OPTIONS.HAS_RIGHT:
            visible &= keys[:, None] <= (rows + numbers.window_right)[None, :]
        if OPTIONS.HAS_LEFT:
            visible &= keys[:, None] >= (rows - numbers.window_left)[None, :]
        p = gl.where(visible, p, 0.0)
    if program.tensors.rng_state_ptr is not None:
        keys = block.ahead_k + first_key + gl.arange(0, s.shape[0], gl.SliceLayout(1, S))
        rows = (
            block.ahead_q
            - block.diagonal
            + first_row
            + gl.arange(0, s.shape[1], gl.SliceLayout(0, S))
        )
        threshold = numbers.dropout_threshold
        p = negate_dropped(p, keys, rows, head.dropout, threshold, OPTIONS.APART_K, OPTIONS.APART_Q)
    weight = p
    if OPTIONS.HAS_SOFTCAP:
        weight = p * (1.0 - capped * capped)
    return p, weight


@gluon.jit
def rounded(p, program, dtype: gl.constexpr):
    """Round probabilities, with 0 where dropout drops, for the product of dv."""
    if program.tensors.rng_state_ptr is not None:
        factor = round_kept(p, dtype)
    else:
        factor = p.to(dtype)
    return factor


@gluon.jit
def score_gradient(weight, dp, delta, program):
    """Return the gradient of scores; ``delta`` is negated, and ``dp`` already contains it."""
    if program.tensors.rng_state_ptr is not None:
        ds = gradient_of_kept(weight, dp, delta[None, :])
    else:
        ds = weight * dp
    return ds


@gluon.jit
def scale_of(factor, program):
    """Return a gradient's last factor: ``factor``, with dropout times ``keep_scale``."""
    if program.tensors.rng_state_ptr is not None:
        factor *= program.numbers.keep_scale
    return factor


@gluon.jit
def say_made(turn, W: gl.constexpr):
    """Signal: warpgroup ``W`` has stored its ds. Of ``turn`` only the parity counts."""
    barrier_arrive(MADE + 8 * W + turn % 2, 256, 4)


@gluon.jit
def await_made(turn, W: gl.constexpr):
    """Wait for the signal of the other warpgroup than ``W``."""
    barrier_sync(MADE + 8 * (1 - W) + turn % 2, 256, 4)


@gluon.jit
def multiply_dq(program, turn, none, W: gl.constexpr, TILE: gl.constexpr):
    """Begin ``W``'s half of the product of dq of step ``turn``.

    With 128 queries it is half of the rows, else half of the columns of each panel, or one panel.
    """
    PARTS: gl.constexpr = TILE.BLOCK_M // 64
    PANEL: gl.constexpr = splits_by_panel(TILE)
    if PANEL:
        dq = no_gradient(64, TILE.NARROW if W == 1 else TILE.HEAD_DIM, 0)  # [64, width]
    else:
        WIDTH: gl.constexpr = TILE.HEAD_DIM * PARTS // 2
        LESS: gl.constexpr = TILE.NARROW * PARTS // 2
        dq = no_gradient(64, WIDTH, LESS)  # [64, WIDTH], [64, LESS]
    for h in gl.static_range(2):
        ds_h = gradients_of(turn % 2 * 2 + h, program, TILE)  # [ROWS, BLOCK_M]
        k_h = tile_of(program.pipeline.k_s, h + none, ROWS)  # [ROWS, HEAD_DIM]
        if PARTS == 2:
            ds_h = ds_h.slice(W * 64, 64, 1)  # [ROWS, 64]
        elif PANEL:
            k_h = own_panels(k_h, W, TILE)  # [ROWS, width]
        else:
            k_h = part_of(k_h, W, 2)  # [ROWS, WIDTH], [ROWS, LESS]
        dq = multiply_gradient(ds_h.permute((1, 0)), k_h, dq, h == 1)
    return dq


@gluon.jit
def _pass_on(
    dq,
    row,
    step,
    W: gl.constexpr,
    LEFT: gl.constexpr,
    program,
    OPTIONS: gl.constexpr,
    TILE: gl.constexpr,
):
    """Add ``W``'s half of dq to the sums at ``row``, or give it to the warp that adds.

    Up to ``LEFT`` TMA stores of ``keep_gradient`` may be in flight: those after the last addition.
    """
    if OPTIONS.ORDERED:
        if program.maps.ds_desc is not None:
            # ``keep_gradient`` needs this wait; ``send`` has its own
            tma.store_wait(LEFT)
        hand_over(dq, step, program, W, TILE)
    elif adds_by_threads(TILE):
        add_by_threads(dq, program.maps.sums + row.to(gl.int64) * 32)
    else:
        send(dq, row, LEFT, program, W, TILE)


@gluon.jit
def send(dq, row, LEFT: gl.constexpr, program, W: gl.constexpr, TILE: gl.constexpr):
    """Add ``W``'s half of dq to the sums at ``row`` by TMA; ``LEFT`` stores may be in flight."""
    rows = panels_in_rows(dq)
    tma.store_wait(LEFT)
    buffers = own_panels(program.dq_s, W, TILE)
    NUMBER: gl.constexpr = 0 if splits_by_panel(TILE) else W
    stage_panels(rows, buffers, NUMBER)
    add_panels(own_panels(program.maps.sums, W, TILE), row, buffers, NUMBER)


@gluon.jit
def walk_tiles(
    carried,
    first_tile,
    end_tile,
    head,
    W: gl.constexpr,
    MASKED: gl.constexpr,
    program,
    OPTIONS: gl.constexpr,
    TILE: gl.constexpr,
):
    """Accumulate dk and dv for tiles of queries of one ``Head``; dq is one tile late."""
    BLOCK_M: gl.constexpr = TILE.BLOCK_M
    STAGES_Q: gl.constexpr = TILE.STAGES_Q
    STAGES_O: gl.constexpr = TILE.STAGES_O
    ROWS_DQ: gl.constexpr = BLOCK_M * (TILE.HEAD_DIM + TILE.NARROW) // 32
    S: gl.constexpr = accumulator(BLOCK_M)
    # a step does not wait for the store of its own gradients of scores
    LEFT: gl.constexpr = 0 if program.maps.ds_desc is None or OPTIONS.SHARES_DS else 1
    pipeline, block = program.pipeline, program.block
    dtype: gl.constexpr = pipeline.ds_s.dtype
    total = count_turns(program.walk, OPTIONS)
    tiles = end_tile - first_tile
    if OPTIONS.ORDERED:
        tiles *= OPTIONS.GROUP
    dk, dv, s, last, turn = carried.dk, carried.dv, carried.s, carried.last, carried.turn
    PANELS: gl.constexpr = len(dk)
    PANELS_V: gl.constexpr = len(dv)
    row = head.dq_at + first_tile * ROWS_DQ
    zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, S)  # [ROWS, BLOCK_M]
    for step in range(tiles):
        # 0, which the compiler cannot know: else it hoists addresses out of the loop into registers
        none = turn >> 30
        k = tile_of(pipeline.k_s, W + none, ROWS)  # [ROWS, HEAD_DIM]
        v = tile_of(pipeline.v_s, W + none, ROWS)  # [ROWS, HEAD_DIM_V]
        stage = turn % STAGES_Q
        stage_o = turn % STAGES_O
        q = tile_of(pipeline.q_s, stage, BLOCK_M)  # [BLOCK_M, HEAD_DIM]
        dout = tile_of(pipeline.dout_s, stage_o, BLOCK_M)  # [BLOCK_M, HEAD_DIM_V]
        await_full(pipeline.dout_full, turn)
        delta = pipeline.delta_s.index(stage_o).load(gl.SliceLayout(0, S))  # [BLOCK_M]
        # [ROWS, BLOCK_M]: dp - delta, from a start at -delta
        dp = multiply_rows(v, dout, delta[None, :] - zeros, True)
        lse2 = pipeline.lse2_s.index(stage).load(gl.SliceLayout(0, S))  # [BLOCK_M]
        first_key = block.first_key + W * ROWS
        first_row = tile_at(step, first_tile, end_tile, OPTIONS) * BLOCK_M + block.diagonal
        if program.places_s is not None:
            first_row = place_of(program.places_s, stage, FIRST_ROW)
            row = head.dq_at + place_of(program.places_s, stage, DQ_TILE) * ROWS_DQ
        shift = less_bias(lse2, turn, W, program, S, OPTIONS, TILE)
        now = head_now(step, head, program, OPTIONS)
        # [ROWS, BLOCK_M]
        p, weight = probabilities(s, shift, first_key, first_row, now, MASKED, program, OPTIONS)
        if TILE.MAKES_DV:
            p = rounded(p, program, dtype)
            p = gl.convert_layout(p, gl.DotOperandLayout(0, dv[0].type.layout, 2))
            dv = multiply_values(p, dout, dv)  # [ROWS, HEAD_DIM_V]
        dp = hopper.warpgroup_mma_wait(PANELS_V, deps=(dp,))
        if program.tensors.rng_state_ptr is not None:
            # load again: kept during the exponentials, it would take registers
            delta = pipeline.delta_s.index(stage_o).load(gl.SliceLayout(0, S))  # [BLOCK_M]
        ds = score_gradient(weight, dp, delta, program).to(dtype)  # [ROWS, BLOCK_M]
        await_made(turn + 1, W)
        await_buffer(turn, program, OPTIONS)
        gradients_of(turn % 2 * 2 + W, program, TILE).store(ds)
        hopper.fence_async_shared()
        keep_gradient(turn, W, program, OPTIONS, TILE)
        # dq of the step before; in the first step, of undefined data, which is not added
        dq = multiply_dq(program, turn + 1, none, W, TILE)
        if TILE.MAKES_DV:
            dv = wait_for(dv, 2 * len(dq))
        barrier_arrive(EMPTY + STAGES_Q + stage_o, PARTIES, 4)
        ds = gl.convert_layout(ds, gl.DotOperandLayout(0, dk[0].type.layout, 2))
        dk = multiply_values(ds, q, dk)  # [ROWS, HEAD_DIM]
        turn += 1
        following = turn % STAGES_Q
        # after the last tile: scores of undefined data, which are not read
        await_full(pipeline.q_full, turn, pred=turn < total)
        q = tile_of(pipeline.q_s, following, BLOCK_M)
        s = multiply_rows(k, q, zeros, False)  # [ROWS, BLOCK_M]
        dq = wait_for(dq, 2 * PANELS)
        if turn > 1:
            _pass_on(dq, last, turn, W, LEFT, program, OPTIONS, TILE)
        last = row
        row += ROWS_DQ
        # a product in flight over the loop's back edge would keep ptxas from overlapping any
        dk, s = wait_for_all(dk, s)
        barrier_arrive(EMPTY + stage, PARTIES, 4)
        say_made(turn + 1, W)
    return Carried(dk, dv, s, turn, last)


@gluon.jit
def _first_scores(W: gl.constexpr, program, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Wait for the block's keys and values, and multiply the scores of the first tile."""
    pipeline = program.pipeline
    total = count_turns(program.walk, OPTIONS)
    S: gl.constexpr = accumulator(TILE.BLOCK_M)
    s = gl.zeros([ROWS, TILE.BLOCK_M], gl.float32, S)  # [ROWS, BLOCK_M]
    mbarrier.wait(pipeline.k_full, 0)
    mbarrier.wait(pipeline.q_full.index(0), 0, pred=total > 0)
    k = tile_of(pipeline.k_s, W, ROWS)
    q = tile_of(pipeline.q_s, 0, TILE.BLOCK_M)
    s = multiply_rows(k, q, s, False)
    s = hopper.warpgroup_mma_wait(0, deps=(s,))
    mbarrier.wait(pipeline.v_full, 0, pred=total > 0)
    return s


@gluon.jit
def _finish(carried, W: gl.constexpr, program, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Add the last tile's part to dq, and write dk and dv."""
    maps, pipeline, tensors = program.maps, program.pipeline, program.tensors
    await_made(carried.turn + 1, W)
    dq = multiply_dq(program, carried.turn + 1, 0, W, TILE)
    dq = wait_for(dq, 0)
    if count_turns(program.walk, OPTIONS) > 0:
        _pass_on(dq, carried.last, carried.turn + 1, W, 0, program, OPTIONS, TILE)
    # dv is stored through this warpgroup's values, which only it reads; dk through its keys, which
    # the other warpgroup may still be multiplying
    if TILE.MAKES_DV:
        dv = carried.dv
        if tensors.rng_state_ptr is not None:
            dv = scale_panels(dv, program.numbers.keep_scale)
        hand_in(dv, maps.dv_descs, tensors.dv_sums_ptr, pipeline.v_s, W, program, OPTIONS, TILE)
    barrier_sync(TURN, 256, 4)
    clear_hidden(W, program, OPTIONS, TILE)
    dk = scale_panels(carried.dk, scale_of(program.numbers.scale, program))
    hand_in(dk, maps.dk_descs, tensors.dk_sums_ptr, pipeline.k_s, W, program, OPTIONS, TILE)
    tma.store_wait(0)


@gluon.jit
def consume(W: gl.constexpr, program, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Compute warpgroup ``W``'s 64 rows of dk and dv, and its half of the block's part of dq."""
    # queries before the block's keys see them
    ALIBI_AHEAD: gl.constexpr = (
        program.tensors.alibi_slopes_ptr is not None and not OPTIONS.HAS_RIGHT
    )
    WALKS: gl.constexpr = 1 if OPTIONS.ORDERED else OPTIONS.GROUP
    FIRST: gl.constexpr = 3 if OPTIONS.ORDERED else 0
    LAST: gl.constexpr = -1 if OPTIONS.ORDERED else 4
    BY: gl.constexpr = -1 if OPTIONS.ORDERED else 1
    walk = program.walk
    dk = no_gradient(ROWS, TILE.HEAD_DIM, TILE.NARROW)  # [ROWS, HEAD_DIM]
    dv = ()
    if TILE.MAKES_DV:
        dv = no_gradient(ROWS, TILE.HEAD_DIM_V, TILE.NARROW_V)  # [ROWS, HEAD_DIM_V]
    s = _first_scores(W, program, OPTIONS, TILE)  # [ROWS, BLOCK_M]
    turn = 0
    first_head = program.block.head_k * OPTIONS.GROUP
    # a tile of dq is stored as the first warpgroup's half, then the second's
    dq_row = program.dq_at + (first_head * program.dq_pitch + rows_before(TILE, W))
    carried = Carried(dk, dv, s, turn, dq_row)
    # dq is one step late
    say_made(turn + 1, W)
    for member in range(WALKS):
        head = head_of(member, dq_row, program, OPTIONS)
        # the parts of ``Walk``; the second and the fourth need a mask
        for i in gl.static_range(FIRST, LAST, BY):
            if (i > 0 or ALIBI_AHEAD) and (i < 3 or OPTIONS.HAS_LEFT):
                carried = walk_tiles(
                    carried, walk[i], walk[i + 1], head, W, i % 2 == 1, program, OPTIONS, TILE
                )
        dq_row += program.dq_pitch
    _finish(carried, W, program, OPTIONS, TILE)
