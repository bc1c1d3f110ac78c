"""Keys on the partitions: the few rows of a sequence, all heads of a group at once.

Keys and values are the stationary operands, so that a product of 128 keys takes as long for one row
as for 64. A round is up to 40 chunks of 128 keys with one softmax.

Pseudocode, for a round:

    s = k @ q.T                     [128 keys, chunks, rows], TensorE
    t = max over chunks, then over partitions by transposes; a product with ones spreads it
    m' = max(m, factor * t);  p = exp(factor * s - m')          VectorE, ScalarE
    l = l * exp(m - m') + sum over chunks of p                  one sum for each partition
    o.T = o.T * exp(m - m') + v.T @ p                           [head_dim, rows]
"""

import nki.isa as nisa
import nki.language as nl

from .common import (
    FP32_MIN,
    TINY,
    P,
    copy_to,
    cut_head_dim,
    gather_queries,
    gather_section,
    store_rows,
    turn_keys,
    turn_queries,
)

# VectorE turns squares of so many
SIDE = 32
NEGATED = 1
TOTAL = 2
OUTPUT = 3


def start_rows(inputs, tables, options, tile, rows, kv_head):
    """Load the queries of a sequence, and begin its maximum, sums and output."""
    head_dim = inputs["q"].shape[1]
    raw = gather_queries(
        inputs["q"], tables["q_index"], tile, rows, options["group"], kv_head, options["dtype"]
    )
    turned = turn_queries(raw, options["dtype"])
    negated = nl.ndarray((P, rows), dtype=nl.float32, buffer=nl.sbuf)
    total = nl.ndarray((P, rows), dtype=nl.float32, buffer=nl.sbuf)
    if options["has_sinks"]:
        source = inputs["sink_rows"]
        spread = nl.ndarray((P, rows), dtype=nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(dst=spread, src=source.ap([[0, P], [1, rows]], offset=kv_head * P))
        nisa.tensor_scalar(dst=negated, data=spread, op0=nl.multiply, operand0=-1.0)
        # 128 equal parts would add up with more rounding
        nisa.memset(dst=total, value=0.0, engine=nisa.engine.gpsimd)
        nisa.memset(dst=total[0:1, :], value=1.0, engine=nisa.engine.gpsimd)
    else:
        nisa.memset(dst=negated, value=options["no_maximum"], engine=nisa.engine.gpsimd)
        nisa.memset(dst=total, value=0.0, engine=nisa.engine.gpsimd)
    return [turned, negated, total, start_output(head_dim, rows), tile, rows]


def start_output(head_dim, rows):
    """Return zeros [head_dim, rows], a tile of each piece of a head."""
    output = []
    for start, end in cut_head_dim(head_dim):
        own = nl.ndarray((end - start, rows), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=own, value=0.0, engine=nisa.engine.vector)
        output.append(own)
    return output


def multiply_keys(scores, part, state):
    """Write the raw products of one section."""
    keys = part[0]
    for t in range(keys[0].shape[1]):
        for piece in range(len(keys)):
            nisa.nc_matmul(
                dst=scores[:, part[1] + t, :],
                stationary=keys[piece][:, t, :],
                moving=state[0][piece],
                accumulate=piece > 0,
            )


def score_round(work, inputs, tables, options, kv_head):
    """Load the sections of a round; keep raw products [128, chunks, rows] and the values."""
    state = work["state"]
    numbers = work["numbers"]
    rows = state[5]
    chunks = 0
    for item in numbers:
        chunks = chunks + options["sections"][item[0]][1]
    scores = nl.ndarray((P, chunks, rows), dtype=nl.float32, buffer=nl.psum)
    values = []
    waiting = []
    at = 0
    for item in numbers:
        keys, own = gather_section(inputs, tables, options, item[0], kv_head)
        # the next section's keys are turned while these are copied out of PSUM
        turned = turn_keys(keys, options["dtype"])
        for part in waiting:
            multiply_keys(scores, part, state)
        waiting = [[turned, at]]
        values.append(own)
        at = at + own.shape[1]
    work["waiting"] = waiting[0]
    work["scores"] = scores
    work["values"] = values
    source = options["sections"][numbers[0][0]][0]
    work["factor"] = options["factors"][source][kv_head]
    work["v_scale"] = options["v_scales"][source][kv_head]
    work["has_v_tile"] = False
    work["is_masked"] = 0
    for item in numbers:
        work["is_masked"] = max(work["is_masked"], item[1])
    if work["is_masked"]:
        # the heads of a token see the same
        source = inputs["bounds_tokens"]
        tokens = rows // options["group"]
        limits = nl.ndarray((P, tokens, 4), dtype=nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(
            dst=limits,
            src=source.ap([[0, P], [1, 4 * tokens]], offset=4 * state[4] * source.shape[1]),
        )
        work["limits"] = limits


def mask_section(scores, section, limits, group):
    """Put FP32_MIN for what a row does not see of a section, in place."""
    keys = scores.shape[1]
    tokens = limits.shape[1]
    positions = nl.ndarray((P, keys), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=positions, pattern=[[1, keys]], offset=section[3], channel_multiplier=keys)
    spread = positions.expand_dim(2).broadcast(2, tokens)
    first = 2 * section[0]
    low = limits[:, :, first].expand_dim(1).broadcast(1, keys)
    high = limits[:, :, first + 1].expand_dim(1).broadcast(1, keys)
    after = nl.ndarray((P, keys, tokens), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=after, data1=spread, data2=low, op=nl.greater_equal)
    before = nl.ndarray((P, keys, tokens), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=before, data1=spread, data2=high, op=nl.less)
    seen = nl.ndarray((P, keys, tokens), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=seen, data1=after, data2=before, op=nl.multiply)
    nisa.tensor_copy_predicated(
        dst=scores.reshape_dim(2, (tokens, group)),
        src=FP32_MIN,
        predicate=seen.expand_dim(3).broadcast(3, group),
        reverse_pred=True,
    )


def find_maximum(work, tables, options):
    """Mask the scores, and keep the maximum of each row."""
    if options["softcap"] > 0.0:
        scores = work["scores"]
        capped = nl.ndarray(scores.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(
            dst=capped, op=nl.tanh, data=scores, scale=work["factor"] / options["softcap"]
        )
        work["scores"] = capped
        work["factor"] = options["softcap"]
    work["negative"] = -work["factor"]
    at = 0
    for item in work["numbers"]:
        section = options["sections"][item[0]]
        end = at + section[1]
        if item[1]:
            scores = work["scores"][:, at:end, :]
            mask_section(scores, section, work["limits"], options["group"])
        at = end
    keep_maximum(work, options)


def keep_maximum(work, options):
    """Keep the maximum of each row of the scores on the diagonal of a tile.

    The rest of the tile is 0 by selection: a product with 0 would spread NaN and infinities of a
    row to the others.
    """
    rows = work["state"][5]
    by_partition = nl.ndarray((P, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(
        dst=by_partition, op=nl.maximum, data=work["scores"].permute((0, 2, 1)), axis=2
    )
    # in fp32 TensorE would take twice as long for it as VectorE does
    turned = nl.ndarray((rows, P), dtype=nl.float32, buffer=nl.sbuf)
    for row in range(0, rows, SIDE):
        end = min(row + SIDE, rows)
        for start in range(0, P, SIDE):
            nisa.nc_transpose(
                dst=turned[row:end, start : start + SIDE],
                data=by_partition[start : start + SIDE, row:end],
                engine=nisa.engine.vector,
            )
    top = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=top, op=nl.maximum, data=turned, axis=1)
    diagonal = nl.ndarray((rows, rows), dtype=nl.float32, buffer=nl.sbuf)
    work["diagonal"] = diagonal
    if options["spares_gpsimd"]:
        nisa.memset(dst=diagonal, value=0.0, engine=nisa.engine.vector)
        nisa.tensor_copy_predicated(
            dst=diagonal,
            src=top.broadcast(1, rows),
            predicate=options["is_diagonal"][:rows, :rows],
        )
        return
    nisa.affine_select(
        dst=diagonal,
        pattern=[[-1, rows]],
        channel_multiplier=1,
        on_true_tile=top.broadcast(1, rows),
        on_false_value=0.0,
        cmp_op=nl.equal,
    )


def exponentiate(work, tables, options):
    """Spread the maxima over the partitions, lower the negated ones, and exponentiate."""
    state = work["state"]
    scores = work["scores"]
    chunks = scores.shape[1]
    rows = scores.shape[2]
    top = nl.ndarray((P, rows), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(
        dst=top, stationary=tables["ones"][:rows, :], moving=work["diagonal"], accumulate=False
    )
    negated = nl.ndarray((P, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(
        dst=negated,
        data=top,
        op0=nl.multiply,
        operand0=work["negative"],
        op1=nl.minimum,
        operand1=state[NEGATED],
    )
    correction = nl.ndarray((P, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=correction, data1=negated, data2=state[NEGATED], op=nl.subtract)
    shifted = nl.ndarray((P, chunks, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(
        dst=shifted,
        data=scores,
        op0=nl.multiply,
        operand0=work["factor"],
        op1=nl.add,
        operand1=negated.expand_dim(1).broadcast(1, chunks),
    )
    exact = nl.ndarray((P, chunks, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=exact, op=nl.exp, data=shifted)
    nisa.activation(dst=correction, op=nl.exp, data=correction)
    # the sum is of what was not rounded yet
    probabilities = exact
    if options["dtype"] != nl.float32:
        probabilities = nl.ndarray((P, chunks, rows), dtype=options["dtype"], buffer=nl.sbuf)
        engine = nisa.engine.gpsimd
        if options["spares_gpsimd"]:
            engine = nisa.engine.vector
        nisa.tensor_copy(dst=probabilities, src=exact, engine=engine)
    state[NEGATED] = negated
    work["scores"] = 0
    work["exact"] = exact
    work["probabilities"] = probabilities
    work["correction"] = correction


def weigh(work):
    """Add a round to the sums of the partitions and to the output."""
    state = work["state"]
    probabilities = work["probabilities"]
    correction = work["correction"]
    rows = state[5]
    products = []
    start = 0
    for piece in range(len(state[OUTPUT])):
        size = state[OUTPUT][piece].shape[0]
        product = nl.ndarray((size, rows), dtype=nl.float32, buffer=nl.psum)
        at = 0
        for part in work["values"]:
            tokens = part.shape[1]
            for t in range(tokens):
                nisa.nc_matmul(
                    dst=product,
                    stationary=part[:, t, start : start + size],
                    moving=probabilities[:, at + t, :],
                    accumulate=at + t > 0,
                )
            at = at + tokens
        products.append(product)
        start = start + size
    sums = nl.ndarray((P, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=sums, op=nl.add, data=work["exact"].permute((0, 2, 1)), axis=2)
    kept = nl.ndarray((P, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=kept, data1=state[TOTAL], data2=correction, op=nl.multiply)
    total = nl.ndarray((P, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=total, data1=kept, data2=sums, op=nl.add)
    state[TOTAL] = total
    for piece in range(len(products)):
        kept = state[OUTPUT][piece]
        size = kept.shape[0]
        scale = work["v_scale"]
        if work["has_v_tile"]:
            scale = scale[:size, :]
        old = nl.ndarray((size, rows), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=old, data1=kept, data2=correction[:size, :], op=nl.multiply)
        output = nl.ndarray((size, rows), dtype=nl.float32, buffer=nl.sbuf)
        nisa.scalar_tensor_tensor(
            dst=output,
            data=products[piece],
            op0=nl.multiply,
            operand0=scale,
            op1=nl.add,
            operand1=old,
        )
        state[OUTPUT][piece] = output


def turn_output(output, inverse, target):
    """Multiply pieces [head_dim, rows] by a number for each row, and return [rows, head_dim]."""
    rows = output[0].shape[1]
    dtype = target.dtype
    head_dim = target.shape[1]
    turned = nl.ndarray((rows, head_dim), dtype=dtype, buffer=nl.psum)
    start = 0
    for own in output:
        size = own.shape[0]
        # rounded before it is turned, which takes a quarter of the time in 16 bits
        divided = nl.ndarray((size, rows), dtype=dtype, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=divided, data1=own, data2=inverse[:size, :], op=nl.multiply)
        nisa.nc_transpose(
            dst=turned[:, start : start + size], data=divided, engine=nisa.engine.tensor
        )
        start = start + size
    result = nl.ndarray((rows, head_dim), dtype=dtype, buffer=nl.sbuf)
    copy_to(result, turned, False)
    return result


def finish_rows(outputs, tables, options, state, kv_head):
    """Add up the partitions' sums, divide, round, turn, and store."""
    tile = state[4]
    rows = state[5]
    group = options["group"]
    total = nl.ndarray((P, rows), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=total, stationary=tables["ones"], moving=state[TOTAL], accumulate=False)
    safe = nl.ndarray((P, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=safe, data=total, op0=nl.maximum, operand0=TINY)
    inverse = nl.ndarray((P, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.reciprocal(dst=inverse, data=safe)
    result = turn_output(state[OUTPUT], inverse, outputs["out"])
    store_rows(outputs["out"], tables["q_index"], tile, rows, group, kv_head, result)
    if options["has_lse"]:
        # every row of this path sees a key, so that no logarithm is of 0
        logs = nl.ndarray((1, rows), dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=logs, op=nl.log, data=safe[0:1, :])
        nisa.tensor_tensor(dst=logs, data1=logs, data2=state[NEGATED][0:1, :], op=nl.subtract)
        column = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_transpose(dst=column, data=logs, engine=nisa.engine.tensor)
        lse = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
        copy_to(lse, column, False)
        store_rows(outputs["lse"], tables["q_index"], tile, rows, group, kv_head, lse)


def decode(units, inputs, outputs, tables, options, kv_head):
    """Run sequences for one KV head, round by round, each stage a step behind the one before."""
    works = []
    for unit in units:
        for number in range(len(unit[2])):
            works.append({"tile": unit[1], "numbers": unit[2][number], "number": number})
            works[-1]["is_last"] = number == len(unit[2]) - 1
    count = len(works)
    state = []
    for i in range(count + 4):
        if i >= 1 and i - 1 < count:
            find_maximum(works[i - 1], tables, options)
        if i >= 2 and i - 2 < count:
            exponentiate(works[i - 2], tables, options)
        if i < count:
            work = works[i]
            if work["number"] == 0:
                rows = options["rows"][work["tile"]]
                state = start_rows(inputs, tables, options, work["tile"], rows, kv_head)
            work["state"] = state
            score_round(work, inputs, tables, options, kv_head)
        if i >= 3 and i - 3 < count:
            weigh(works[i - 3])
        if i < count:
            multiply_keys(works[i]["scores"], works[i]["waiting"], state)
            works[i]["waiting"] = 0
        if i >= 4:
            if works[i - 4]["is_last"]:
                finish_rows(outputs, tables, options, works[i - 4]["state"], kv_head)
            # what is done needs no more room
            works[i - 4] = 0
