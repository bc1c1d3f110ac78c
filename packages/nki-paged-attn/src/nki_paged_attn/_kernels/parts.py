"""Keys on the partitions, in a form: a part of the keys of a sequence with few rows.

A part is up to 32 chunks of 128 keys. A sequence's parts follow from its length alone. The last
part begins with the sink, applies masks, and has one more chunk: the new tokens, and the keys that
fill no partition. The results of several parts are merged:

    M = max of m;  w = exp(m - M);  out = sum of w o / sum of w l
"""

import nki.isa as nisa
import nki.language as nl

from .common import BANK, FP32_MIN, P, cut_head_dim, turn_keys, turn_queries
from .rounds import (
    NEGATED,
    OUTPUT,
    TOTAL,
    exponentiate,
    keep_maximum,
    multiply_keys,
    start_output,
    weigh,
)
from .rows import (
    as_rows,
    find_scaling,
    gather_keys,
    gather_packed,
    gather_rows,
    load_row,
    make_keys,
    store_columns,
    to_float,
)

# numbers of a part's row after its sections: rest of the cache, new tokens, queries, results,
# slot, sinks, scales
REST = 0
QUERIES = 2
RESULTS = 3
SLOT = 4
SINKS = 5
SCALES = 6
FIELDS = 7
# further numbers of a last part, before the bounds of its tokens: first and end position of its
# sections, and each partition's position in the chunk after them
EXTENT = 0
POSITION = 2
LAST_FIELDS = 3
# parts of a sequence that a merge keeps in SBUF at once: a power of two
MOST_LOADED = 64


def cut_part(chunks, wide):
    """Return the sections of a part, and the tokens of a partition of one."""
    tokens = min(wide, chunks)
    return chunks // tokens, tokens


def row_width(spec, wide):
    """Return the numbers of a part's row: ``spec`` is (chunks, tokens of the queries, is last)."""
    sections, _ = cut_part(spec[0], wide)
    if spec[2]:
        return sections + FIELDS + LAST_FIELDS + 2 * spec[1]
    return sections + FIELDS


def gather(pool, index, tokens, is_whole, dtype):
    """Load 128 partitions of consecutive tokens, [128, tokens, head_dim].

    Partitions without a token become 0; ``is_whole`` promises that there are none.
    """
    width = pool.shape[1]
    raw = nl.ndarray((P, tokens, width // tokens), dtype=dtype, buffer=nl.sbuf)
    mode = nisa.oob_mode.error
    if not is_whole:
        # on VectorE, because GpSimd writes the descriptors of gathers
        nisa.memset(dst=raw, value=0.0, engine=nisa.engine.vector)
        mode = nisa.oob_mode.skip
    nisa.dma_copy(
        dst=raw.reshape((P, width)),
        src=pool.ap(pattern=[[width, P], [1, width]], vector_offset=index, indirect_dim=0),
        oob_mode=mode,
    )
    return raw


def load_part(row, spec, inputs, options):
    """Begin to load the queries, keys and values of a part whose row of the table is given."""
    head_dim = inputs["q"].shape[1]
    is_last = spec[2]
    rows = spec[1] * options["group"]
    sections, tokens = cut_part(spec[0], options["wide"])
    k_pool = as_rows(inputs["k_cache"], tokens * head_dim)
    v_pool = as_rows(inputs["v_cache"], tokens * head_dim)
    raw = gather_rows(
        inputs["q"],
        row[:rows, sections + QUERIES : sections + QUERIES + 1],
        rows,
        options["dtype"],
    )
    keys = []
    values = []
    for number in range(sections):
        index = row[:, number : number + 1]
        # the first half of a last part's sections is full; otherwise the part would be smaller
        is_whole = not (is_last and (sections == 1 or number >= sections // 2))
        if options["is_packed"]:
            own = nl.ndarray((P, tokens, head_dim), dtype=options["dtype"], buffer=nl.sbuf)
            gather_packed(own, inputs["k_cache"], index)
            keys.append(own)
        else:
            keys.append(gather(k_pool, index, tokens, is_whole, options["dtype"]))
        values.append(gather(v_pool, index, tokens, is_whole, options["dtype"]))
    if is_last:
        own, part = make_keys(inputs, options, 1)
        places = row[:, sections + REST : sections + REST + 2]
        gather_keys(inputs, options, places, (own, part), False)
        keys.append(own)
        values.append(part)
    return {
        "row": row,
        "first": sections,
        "raw": raw,
        "keys": keys,
        "values": values,
        "keys_each": tokens,
        "spec": spec,
    }


def begin_part(part, inputs, options):
    """Transpose the queries of a part, and begin its maximum, sums and output."""
    spec = part["spec"]
    rows = spec[1] * options["group"]
    head_dim = inputs["q"].shape[1]
    turned = turn_queries(part["raw"], options["dtype"])
    negated = nl.ndarray((P, rows), dtype=nl.float32, buffer=nl.sbuf)
    total = nl.ndarray((P, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=total, value=0.0, engine=nisa.engine.vector)
    if options["has_sinks"] and spec[2]:
        column = part["first"] + SINKS
        spread = nl.ndarray((P, rows), dtype=nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(
            dst=spread,
            src=inputs["numbers"].ap(
                pattern=[[0, P], [1, rows]],
                scalar_offset=part["row"][0:1, column : column + 1],
                indirect_dim=0,
            ),
        )
        nisa.tensor_scalar(dst=negated, data=spread, op0=nl.multiply, operand0=-1.0)
        # on one partition: the sum of 128 equal shares would be rounded more often
        nisa.memset(dst=total[0:1, :], value=1.0, engine=nisa.engine.vector)
    else:
        nisa.memset(dst=negated, value=options["no_maximum"], engine=nisa.engine.vector)
    part["state"] = [turned, negated, total, start_output(head_dim, rows), 0, rows]
    scaling, v_scale = find_scaling(inputs, options, part["row"], part["first"] + SCALES)
    part["scaling"] = scaling
    part["v_scale"] = v_scale
    if spec[2]:
        first = part["first"] + FIELDS
        tokens = spec[1]
        found = to_float(part["row"], first, first + LAST_FIELDS + 2 * tokens)
        part["position"] = found[:, POSITION : POSITION + 1]
        part["limits"] = found[:, LAST_FIELDS:]
        # bounds relative to the sections' first position
        start = found[:, EXTENT : EXTENT + 1]
        relative = nl.ndarray((P, 2 * tokens), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(
            dst=relative,
            data=found[:, LAST_FIELDS:],
            op0=nl.minimum,
            operand0=found[:, EXTENT + 1 : EXTENT + 2],
            op1=nl.subtract,
            operand1=start,
        )
        part["relative"] = relative
        if options["is_scaled"]:
            column = part["first"] + SCALES
            # ratios of new to cached keys and values; they follow the factors of the cache
            part["ratios"] = nl.ndarray((P, 2), dtype=nl.float32, buffer=nl.sbuf)
            nisa.dma_copy(
                dst=part["ratios"],
                src=inputs["numbers"].ap(
                    pattern=[[2, P], [1, 2]],
                    offset=4 * P,
                    scalar_offset=part["row"][0:1, column : column + 1],
                    indirect_dim=0,
                ),
            )


def cut_rounds(part, options):
    """Return the first and end section of each softmax; its scores fill at most a bank."""
    rows = part["spec"][1] * options["group"]
    room = BANK // rows
    rounds = []
    start = 0
    chunks = 0
    count = len(part["keys"])
    for number in range(count):
        own = part["keys"][number].shape[1]
        if chunks + own > room:
            rounds.append((start, number))
            start = number
            chunks = 0
        chunks = chunks + own
    rounds.append((start, count))
    return rounds


def score_part(work, options):
    """Transpose the keys of a round, and write its raw products [128, chunks, rows]."""
    part = work["part"]
    rows = part["state"][5]
    chunks = 0
    for number in range(work["start"], work["end"]):
        chunks = chunks + part["keys"][number].shape[1]
    scores = nl.ndarray((P, chunks, rows), dtype=nl.float32, buffer=nl.psum)
    values = []
    waiting = []
    at = 0
    for number in range(work["start"], work["end"]):
        # transpose these keys while the section before is copied out of PSUM
        turned = turn_keys(part["keys"][number], options["dtype"])
        if at > 0:
            multiply_keys(scores, waiting, part["state"])
        waiting = [turned, at]
        values.append(part["values"][number])
        part["keys"][number] = 0
        part["values"][number] = 0
        at = at + turned[0].shape[1]
    multiply_keys(scores, waiting, part["state"])
    work["state"] = part["state"]
    work["scores"] = scores
    work["values"] = values
    work["chunks"] = chunks
    work["v_scale"] = part["v_scale"]
    work["has_v_tile"] = options["is_scaled"]


def mask_part(scores, positions, limits, group):
    """Put FP32_MIN where a row does not see a key, in place; a token's heads see the same keys."""
    chunks = scores.shape[1]
    tokens = limits.shape[1] // 2
    spread = positions.expand_dim(2).broadcast(2, tokens)
    low = limits[:, :tokens].expand_dim(1).broadcast(1, chunks)
    high = limits[:, tokens:].expand_dim(1).broadcast(1, chunks)
    after = nl.ndarray((P, chunks, tokens), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=after, data1=spread, data2=low, op=nl.greater_equal)
    before = nl.ndarray((P, chunks, tokens), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=before, data1=spread, data2=high, op=nl.less)
    seen = nl.ndarray((P, chunks, tokens), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=seen, data1=after, data2=before, op=nl.multiply)
    nisa.tensor_copy_predicated(
        dst=scores.reshape_dim(2, (tokens, group)),
        src=FP32_MIN,
        predicate=seen.expand_dim(3).broadcast(3, group),
        reverse_pred=True,
    )


def find_part_maximum(work, options):
    """Scale, cap and mask the scores of a round, and keep the maximum of each row."""
    part = work["part"]
    chunks = work["chunks"]
    is_last = part["spec"][2]
    has_new = is_last and work["end"] == len(part["keys"])
    if options["is_scaled"] and has_new:
        own = work["scores"][:, chunks - 1, :]
        nisa.tensor_scalar(dst=own, data=own, op0=nl.multiply, operand0=part["ratios"][:, 0:1])
    scaling = part["scaling"]
    if options["softcap"] > 0.0:
        capped = nl.ndarray(work["scores"].shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=capped, op=nl.tanh, data=work["scores"], scale=scaling[0])
        work["scores"] = capped
    work["factor"] = scaling[1]
    work["negative"] = scaling[2]
    if is_last:
        whole = chunks
        if has_new:
            whole = chunks - 1
            own = work["scores"][:, whole:, :]
            mask_part(own, part["position"], part["limits"], options["group"])
        if whole > 0:
            first = work["first"]
            positions = options["orders"][str(part["keys_each"])][:, first : first + whole]
            own = work["scores"][:, :whole, :]
            mask_part(own, positions, part["relative"], options["group"])
    keep_maximum(work, options)


def scale_new_values(work, options):
    """Multiply the probabilities of new tokens by the ratio of new to cached values' scales."""
    part = work["part"]
    if not (options["is_scaled"] and part["spec"][2] and work["end"] == len(part["keys"])):
        return
    last = work["chunks"] - 1
    # in a copy: the sum needs the probabilities without the ratio
    result = nl.ndarray(work["exact"].shape, dtype=options["dtype"], buffer=nl.sbuf)
    if last > 0:
        nisa.tensor_copy(
            dst=result[:, :last, :],
            src=work["probabilities"][:, :last, :],
            engine=nisa.engine.gpsimd,
        )
    nisa.tensor_scalar(
        dst=result[:, last, :],
        data=work["exact"][:, last, :],
        op0=nl.multiply,
        operand0=part["ratios"][:, 1:2],
    )
    work["probabilities"] = result


def finish_part(part, inputs, outputs, options):
    """Store a part's result: the output if it is the only part, else its share in a slot."""
    state = part["state"]
    rows = state[5]
    row = part["row"]
    first = part["first"]
    total = nl.ndarray((P, rows), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=total, stationary=options["ones"], moving=state[TOTAL], accumulate=False)
    if part["spec"][2]:
        index = row[:rows, first + RESULTS : first + RESULTS + 1]
        store_columns(outputs, options, index, total, state[NEGATED], state[OUTPUT])
    statistics = nl.ndarray((1, 2 * rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(
        dst=statistics[:, :rows], src=state[NEGATED][0:1, :], engine=nisa.engine.gpsimd
    )
    nisa.tensor_copy(dst=statistics[:, rows:], src=total[0:1, :], engine=nisa.engine.vector)
    slot = row[0:1, first + SLOT : first + SLOT + 1]
    store_slot(outputs, part["spec"][1], slot, statistics, state[OUTPUT])


def store_slot(outputs, tokens, slot, statistics, output):
    """Store a part's statistics [1, 2 rows] and output [head_dim, rows] in its slot."""
    rows = output[0].shape[1]
    parts = outputs["parts"][str(tokens)]
    nisa.dma_copy(
        dst=parts[0].ap(pattern=[[2 * rows, 1], [1, 2 * rows]], scalar_offset=slot, indirect_dim=0),
        src=statistics,
        oob_mode=nisa.oob_mode.skip,
    )
    start = 0
    for own in output:
        size = own.shape[0]
        nisa.dma_copy(
            dst=parts[1].ap(
                pattern=[[rows, size], [1, rows]],
                offset=start * rows,
                scalar_offset=slot,
                indirect_dim=0,
            ),
            src=own,
            oob_mode=nisa.oob_mode.skip,
        )
        start = start + size


def clear_slot(inputs, outputs, options, tokens):
    """Fill the slot that stands for missing parts: slot 0, or slot 1 in program 1."""
    rows = tokens * options["group"]
    head_dim = inputs["q"].shape[1]
    statistics = nl.ndarray((1, 2 * rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=statistics[:, :rows], value=options["no_maximum"])
    nisa.memset(dst=statistics[:, rows:], value=0.0)
    parts = outputs["parts"][str(tokens)]
    slot = nl.program_id(0)
    nisa.dma_copy(dst=parts[0][slot : slot + 1, :], src=statistics)
    at = slot * head_dim * rows
    for own in start_output(head_dim, rows):
        size = own.shape[0]
        nisa.dma_copy(dst=parts[1].ap(pattern=[[rows, size], [1, rows]], offset=at), src=own)
        at = at + size * rows


def run_parts(at, count, spec, inputs, outputs, options):
    """Run parts whose rows begin at element ``at``.

    All loads come first; then the softmaxes run, pipelined by stages.
    """
    # rows first: the loads that they point at wait for them
    width = row_width(spec, options["wide"])
    loaded = []
    for number in range(count):
        loaded.append(load_row(inputs["tables"], at, width, number * P * width))
    works = []
    for row in loaded:
        part = load_part(row, spec, inputs, options)
        rounds = cut_rounds(part, options)
        first = 0
        for number in range(len(rounds)):
            start, end = rounds[number]
            work = {"part": part, "start": start, "end": end, "first": first}
            work["is_first"] = number == 0
            work["is_last"] = number == len(rounds) - 1
            works.append(work)
            for section in range(start, end):
                first = first + part["keys"][section].shape[1]
    steps = len(works)
    for i in range(steps + 4):
        if i >= 1 and i - 1 < steps:
            find_part_maximum(works[i - 1], options)
        if i >= 2 and i - 2 < steps:
            exponentiate(works[i - 2], options)
            scale_new_values(works[i - 2], options)
        if i < steps:
            if works[i]["is_first"]:
                begin_part(works[i]["part"], inputs, options)
            score_part(works[i], options)
        if i >= 3 and i - 3 < steps:
            weigh(works[i - 3])
        if i >= 4:
            if works[i - 4]["is_last"]:
                finish_part(works[i - 4]["part"], inputs, outputs, options)
            # free the tiles of finished work
            works[i - 4] = 0


def merge_parts(at, spec, inputs, outputs, options):
    """Merge the parts of some sequences, in order; missing parts have slot 0.

    ``spec`` is (parts, tokens, sequences). All loads come first, unless there are too many parts.
    """
    count = spec[0]
    tokens = spec[1]
    waiting = []
    for number in range(spec[2]):
        waiting.append(load_row(inputs["tables"], at, count + 1, number * P * (count + 1)))
    works = []
    if count > MOST_LOADED:
        for row in waiting:
            works.append(merge_many(row, count, tokens, inputs, outputs, options))
    else:
        for row in waiting:
            works.append(load_slots(row, 0, count, tokens, inputs, outputs, options))
        # stage by stage, because engines run instructions in program order
        for work in works:
            find_largest(work)
        for work in works:
            weigh_slots(work)
        for work in works:
            begin_sums(work, inputs)
            add_slots(work)
    for number in range(spec[2]):
        work = works[number]
        row = waiting[number]
        rows = tokens * options["group"]
        index = row[:rows, count : count + 1]
        store_columns(outputs, options, index, work["total"], work["negated"], work["output"])


def merge_many(row, count, tokens, inputs, outputs, options):
    """Merge more parts than are loaded at once: the maximum of all first, and then the sums."""
    result = {}
    for start in range(0, count, MOST_LOADED):
        own = load_statistics(row, start, start + MOST_LOADED, tokens, outputs, options)
        if start > 0:
            own.append(result["negated"])
        result = {"statistics": own}
        find_largest(result)
    begin_sums(result, inputs)
    for start in range(0, count, MOST_LOADED):
        work = load_slots(row, start, start + MOST_LOADED, tokens, inputs, outputs, options)
        for name in ("negated", "total", "output"):
            work[name] = result[name]
        weigh_slots(work)
        add_slots(work)
    return result


def load_statistics(row, start, end, tokens, outputs, options):
    """Load the negated maxima and sums of parts whose slots are in columns of a row."""
    rows = tokens * options["group"]
    parts = outputs["parts"][str(tokens)]
    statistics = []
    for number in range(start, end):
        both = nl.ndarray((P, 2 * rows), dtype=nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(
            dst=both,
            src=parts[0].ap(
                pattern=[[0, P], [1, 2 * rows]],
                scalar_offset=row[0:1, number : number + 1],
                indirect_dim=0,
            ),
        )
        statistics.append(both)
    return statistics


def load_slots(row, start, end, tokens, inputs, outputs, options):
    """Load the statistics and outputs of parts whose slots are in columns of a row."""
    rows = tokens * options["group"]
    parts = outputs["parts"][str(tokens)]
    statistics = load_statistics(row, start, end, tokens, outputs, options)
    found = []
    for number in range(start, end):
        pieces = []
        for first, last in cut_head_dim(inputs["q"].shape[1]):
            own = nl.ndarray((last - first, rows), dtype=nl.float32, buffer=nl.sbuf)
            nisa.dma_copy(
                dst=own,
                src=parts[1].ap(
                    pattern=[[rows, last - first], [1, rows]],
                    offset=first * rows,
                    scalar_offset=row[0:1, number : number + 1],
                    indirect_dim=0,
                ),
            )
            pieces.append(own)
        found.append(pieces)
    return {"statistics": statistics, "found": found}


def find_largest(work):
    """Find the negated maximum of all parts of a sequence, [128, rows]."""
    statistics = work["statistics"]
    rows = statistics[0].shape[1] // 2
    negated = nl.ndarray((P, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=negated, src=statistics[0][:, :rows], engine=nisa.engine.vector)
    for own in statistics[1:]:
        nisa.tensor_tensor(dst=negated, data1=negated, data2=own[:, :rows], op=nl.minimum)
    work["negated"] = negated


def weigh_slots(work):
    """Find the weight of each part of a sequence."""
    negated = work["negated"]
    rows = negated.shape[1]
    weights = []
    for own in work["statistics"]:
        weight = nl.ndarray((P, rows), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=weight, data1=negated, data2=own[:, :rows], op=nl.subtract)
        nisa.activation(dst=weight, op=nl.exp, data=weight)
        weights.append(weight)
    work["weights"] = weights


def begin_sums(work, inputs):
    """Begin the sums [128, rows] and the output, in pieces [head_dim, rows], of a sequence."""
    rows = work["negated"].shape[1]
    work["total"] = nl.ndarray((P, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=work["total"], value=0.0)
    work["output"] = start_output(inputs["q"].shape[1], rows)


def add_slots(work):
    """Add parts to the sums and to the output of their sequence."""
    total = work["total"]
    output = work["output"]
    rows = total.shape[1]
    for number in range(len(work["weights"])):
        own = work["statistics"][number]
        weight = work["weights"][number]
        nisa.tensor_tensor(dst=own[:, rows:], data1=own[:, rows:], data2=weight, op=nl.multiply)
        nisa.tensor_tensor(dst=total, data1=total, data2=own[:, rows:], op=nl.add)
        for piece in range(len(output)):
            part = work["found"][number][piece]
            size = part.shape[0]
            nisa.tensor_tensor(dst=part, data1=part, data2=weight[:size, :], op=nl.multiply)
            nisa.tensor_tensor(dst=output[piece], data1=output[piece], data2=part, op=nl.add)
