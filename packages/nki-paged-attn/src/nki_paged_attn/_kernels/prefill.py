"""Queries on the partitions: tiles of up to 128 rows against sections of keys.

Pseudocode, for the pairs of one step:

    s = q @ k.T                                   TensorE
    m' = max(m, factor * rowmax(s in range))      VectorE
    p = exp(factor * s - m');  l = l * exp(m - m') + rowsum(p)        ScalarE, VectorE
    o = o * exp(m - m') + p @ v                   TensorE turns p first; VectorE

Dimensions: rows 128, keys up to 1024 = 128 partitions x tokens, head_dim up to 256, of which pieces
of 128 are contracted one after the other.
"""

import nki.isa as nisa
import nki.language as nl

from .common import (
    BANK,
    FP32_MIN,
    TINY,
    copy_to,
    finish_lse,
    gather_queries,
    gather_section,
    store_rows,
    turn_keys,
    turn_queries,
)

LOAD_SECTIONS = 0
MULTIPLY = 1
# pairs between the load of a tile and its first product
AHEAD = 6
# the maximum is kept with the other sign: it is a bias of the exponential
NEGATED = 1
TOTAL = 2
OUTPUT = 3


def load_tile(inputs, tables, options, tile, kv_head):
    """Begin to load a tile of queries."""
    rows = options["rows"][tile]
    return gather_queries(
        inputs["q"], tables["q_index"], tile, rows, options["group"], kv_head, options["dtype"]
    )


def start_tile(raw, tables, options, tile, kv_head):
    """Begin the maximum, the sum and the output of a tile."""
    rows = raw.shape[0]
    head_dim = raw.shape[1]
    turned = turn_queries(raw, options["dtype"])
    negated = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    total = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    if options["has_sinks"]:
        # a sink is a first key without a value
        nisa.tensor_scalar(
            dst=negated,
            data=tables["sinks"][:rows, kv_head : kv_head + 1],
            op0=nl.multiply,
            operand0=-1.0,
        )
        nisa.memset(dst=total, value=1.0, engine=nisa.engine.gpsimd)
    else:
        nisa.memset(dst=negated, value=options["no_maximum"], engine=nisa.engine.gpsimd)
        nisa.memset(dst=total, value=0.0, engine=nisa.engine.gpsimd)
    output = nl.ndarray((rows, head_dim), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=output, value=0.0, engine=nisa.engine.gpsimd)
    return [turned, negated, total, output, tile, rows]


def score(state, keys, reach):
    """Return raw products [rows, keys] in PSUM, keys in the order of their positions.

    Of the keys, those of the first ``reach`` partitions.
    """
    rows = state[5]
    tokens = keys[0].shape[1]
    width = reach * tokens
    scores = nl.ndarray((rows, width), dtype=nl.float32, buffer=nl.psum)
    part = BANK // tokens
    for start in range(0, reach, part):
        end = min(start + part, reach)
        for piece in range(len(keys)):
            ordered = keys[piece].permute((0, 2, 1))
            nisa.nc_matmul(
                dst=scores[:, start * tokens : end * tokens],
                stationary=state[0][piece],
                moving=ordered[:, start:end, :],
                accumulate=piece > 0,
            )
    return scores


def mask(work, options, top):
    """Return scores with FP32_MIN for what a row does not see, and the rows' maxima in ``top``."""
    scores = work["scores"]
    rows = scores.shape[0]
    width = scores.shape[1]
    start = work["start"]
    low = work["low"]
    high = work["high"]
    masked = nl.ndarray((rows, width), dtype=nl.float32, buffer=nl.sbuf)
    nisa.range_select(
        dst=masked,
        on_true_tile=scores,
        comp_op0=nl.greater_equal,
        comp_op1=nl.less,
        bound0=low,
        bound1=high,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
        reduce_res=top,
        reduce_op=nl.maximum,
        range_start=start,
        on_false_value=FP32_MIN,
    )
    return masked


def find_maximum(work, options):
    """Mask the scores of a pair, and lower the tile's negated maximum.

    ``work["scaling"]`` is a number or a tile for each of: the factor before the cap, the factor of
    the exponential, and that with the other sign.
    """
    state = work["state"]
    scores = work["scores"]
    rows = state[5]
    scaling = work["scaling"]
    if options["softcap"] > 0.0:
        capped = nl.ndarray(scores.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=capped, op=nl.tanh, data=scores, scale=scaling[0])
        work["scores"] = capped
    top = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    if work["is_masked"]:
        work["scores"] = mask(work, options, top)
    else:
        nisa.tensor_reduce(dst=top, op=nl.maximum, data=work["scores"], axis=1)
    negated = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=negated,
        data=top,
        op0=nl.multiply,
        operand0=scaling[2],
        op1=nl.minimum,
        operand1=state[NEGATED],
    )
    work["old"] = state[NEGATED]
    work["negated"] = negated
    state[NEGATED] = negated


def exponentiate(work, options):
    """Turn scores into probabilities, their sums, and what the tile's output is multiplied by."""
    scores = work["scores"]
    rows = scores.shape[0]
    probabilities = nl.ndarray(scores.shape, dtype=options["dtype"], buffer=nl.sbuf)
    written = probabilities
    if options["turns_by_dma"] and not work["by_chunk"]:
        # DMA turns what is contiguous: all of the first token of partitions first
        tokens = work["values"].shape[1]
        reach = scores.shape[1] // tokens
        written = probabilities.reshape_dim(1, (tokens, reach)).permute((0, 2, 1))
    row_sum = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(
        dst=written,
        op=nl.exp,
        data=scores,
        bias=work["negated"],
        scale=work["scaling"][1],
        reduce_op=nl.add,
        reduce_res=row_sum,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )
    correction = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=correction, op=nl.exp, data=work["old"], bias=work["negated"], scale=-1.0)
    work["scores"] = 0
    work["probabilities"] = probabilities
    work["row_sum"] = row_sum
    work["correction"] = correction


def turn(work, options):
    """Turn the probabilities: those of token t of each partition, as the values lie.

    They lie in the order of positions, or ``by_chunk``: all of the first token of partitions first.
    """
    probabilities = work["probabilities"]
    rows = probabilities.shape[0]
    tokens = work["values"].shape[1]
    reach = probabilities.shape[1] // tokens
    if options["turns_by_dma"]:
        weights = nl.ndarray((reach, tokens, rows), dtype=options["dtype"], buffer=nl.sbuf)
        nisa.dma_transpose(
            dst=weights, src=probabilities.reshape_dim(1, (tokens, reach)), axes=(2, 1, 0)
        )
        work["probabilities"] = 0
        work["weights"] = weights
        return
    # each transpose within a bank, and from a multiple of 4 bytes on
    width = 2
    while width < rows:
        width = 2 * width
    turned = nl.ndarray((reach, tokens, width), dtype=options["dtype"], buffer=nl.psum)
    if work["by_chunk"]:
        parts = probabilities.reshape_dim(1, (tokens, reach))
        for t in range(tokens):
            nisa.nc_transpose(
                dst=turned[:, t, :rows], data=parts[:, t, :], engine=nisa.engine.tensor
            )
    else:
        parts = probabilities.reshape_dim(1, (reach, tokens))
        for t in range(tokens):
            nisa.nc_transpose(
                dst=turned[:, t, :rows], data=parts[:, :, t], engine=nisa.engine.tensor
            )
    weights = nl.ndarray((reach, tokens, rows), dtype=options["dtype"], buffer=nl.sbuf)
    # ScalarE has a little less to do than VectorE
    share = tokens - tokens // 8
    copy_to(weights[:, :share, :], turned[:, :share, :rows], True)
    if share < tokens:
        copy_to(weights[:, share:, :], turned[:, share:, :rows], False)
    work["probabilities"] = 0
    work["weights"] = weights


def weigh(work):
    """Add the values of a section to a tile's output, and the sums to its sum."""
    state = work["state"]
    rows = state[5]
    values = work["values"]
    reach = work["weights"].shape[0]
    tokens = values.shape[1]
    head_dim = values.shape[2]
    product = nl.ndarray((rows, head_dim), dtype=nl.float32, buffer=nl.psum)
    for t in range(tokens):
        nisa.nc_matmul(
            dst=product,
            stationary=work["weights"][:, t, :],
            moving=values[:reach, t, :],
            accumulate=t > 0,
        )
    if work["has_v_scale"]:
        scaled = nl.ndarray((rows, head_dim), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=scaled, data=product, op0=nl.multiply, operand0=work["v_scale"])
        product = scaled
    # in place: a loop of the device traces its body once, and finds them where they were before
    nisa.scalar_tensor_tensor(
        dst=state[TOTAL],
        data=state[TOTAL],
        op0=nl.multiply,
        operand0=work["correction"],
        op1=nl.add,
        operand1=work["row_sum"],
    )
    nisa.scalar_tensor_tensor(
        dst=state[OUTPUT],
        data=state[OUTPUT],
        op0=nl.multiply,
        operand0=work["correction"],
        op1=nl.add,
        operand1=product,
    )


def finish_tile(outputs, tables, options, state, kv_head):
    """Divide by the sum, and store; rows without a key give 0 and an LSE of -inf."""
    tile = state[4]
    rows = state[5]
    head_dim = state[OUTPUT].shape[1]
    safe = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=safe, data=state[TOTAL], op0=nl.maximum, operand0=TINY)
    inverse = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.reciprocal(dst=inverse, data=safe)
    result = nl.ndarray((rows, head_dim), dtype=outputs["out"].dtype, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=result, data=state[OUTPUT], op0=nl.multiply, operand0=inverse)
    store_rows(outputs["out"], tables["q_index"], tile, rows, options["group"], kv_head, result)
    if options["has_lse"]:
        lse = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
        finish_lse(lse, state[TOTAL], safe, state[NEGATED])
        store_rows(outputs["lse"], tables["q_index"], tile, rows, options["group"], kv_head, lse)


def begin_pair(pair, states, held, tables, options, kv_head):
    """Multiply the queries of a tile with the keys of a section."""
    part = held[pair[0]]
    state = states[str(pair[3])]
    rows = state[5]
    section = options["sections"][pair[1]]
    source = section[0]
    column = 4 * pair[3] + 2 * source
    factor = options["factors"][source][kv_head]
    scaling = (factor, factor, -factor)
    if options["softcap"] > 0.0:
        softcap = options["softcap"]
        scaling = (factor / softcap, softcap, -softcap)
    v_scale = options["v_scales"][source][kv_head]
    return {
        "state": state,
        "start": section[3],
        "low": tables["bounds"][:rows, column : column + 1],
        "high": tables["bounds"][:rows, column + 1 : column + 2],
        "scaling": scaling,
        "has_v_scale": v_scale != 1.0,
        "v_scale": v_scale,
        "values": part[1],
        "by_chunk": 0,
        "is_masked": pair[2],
        "scores": score(state, part[0], pair[6]),
    }


def multiply(pairs, states, held, inputs, outputs, tables, options, kv_head):
    """Run pairs of tiles and sections, five at a time, each a stage behind the next.

    An engine takes its instructions in this order, so that what it waits for was begun a step ago.
    """
    count = len(pairs)
    works = []
    # queries are loaded well ahead, and turned a step before their first product
    for i in range(-AHEAD, count + 4):
        if i + AHEAD < count:
            pair = pairs[i + AHEAD]
            if pair[4]:
                states[str(pair[3])] = load_tile(inputs, tables, options, pair[3], kv_head)
        if i + 1 >= 0 and i + 1 < count:
            pair = pairs[i + 1]
            if pair[4]:
                raw = states[str(pair[3])]
                states[str(pair[3])] = start_tile(raw, tables, options, pair[3], kv_head)
        if i >= 0 and i < count:
            pair = pairs[i]
            works.append(begin_pair(pair, states, held, tables, options, kv_head))
        if i >= 1 and i - 1 < count:
            find_maximum(works[i - 1], options)
        if i >= 2 and i - 2 < count:
            exponentiate(works[i - 2], options)
        if i >= 3 and i - 3 < count:
            turn(works[i - 3], options)
        if i >= 4:
            work = works[i - 4]
            weigh(work)
            if pairs[i - 4][5]:
                finish_tile(outputs, tables, options, work["state"], kv_head)
                states[str(pairs[i - 4][3])] = 0
            # what is done needs no more room
            work = 0
            works[i - 4] = 0


def prefill(steps, inputs, outputs, tables, options, kv_head):
    """Run the steps of one sequence for one KV head.

    A pair is (place of the section in what is loaded, its number, whether to mask, number of the
    tile, whether it is the tile's first, whether it is its last, partitions that it reaches).
    """
    states = {}
    held = []
    for step in steps:
        if step[0] == LOAD_SECTIONS:
            held = []
            for number in step[1]:
                keys, values = gather_section(inputs, tables, options, number, kv_head)
                held.append([turn_keys(keys, options["dtype"]), values])
        elif step[0] == MULTIPLY:
            multiply(step[1], states, held, inputs, outputs, tables, options, kv_head)
        else:
            for tile in step[1]:
                raw = load_tile(inputs, tables, options, tile, kv_head)
                state = start_tile(raw, tables, options, tile, kv_head)
                finish_tile(outputs, tables, options, state, kv_head)
