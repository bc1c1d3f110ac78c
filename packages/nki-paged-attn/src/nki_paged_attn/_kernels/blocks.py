"""Queries on the partitions, in a form: a block of tiles, and loops of the device over its keys.

A block is up to 64 tiles of 128 rows of one sequence and KV head. A tile has all heads of a few
tokens, or one head of 128 tokens. In the second case one load brings the rows of several tiles, and
one store writes them. A block's row of the table lists the sections of keys that its tiles may see:
wide sections (128 partitions of several tokens), and up to four chunks of 128 tokens. The diagonal
is a few more chunks; each tile multiplies only those that it reaches.

    for a block:                                     a loop of the device
        m, l, o = sink or nothing
        for some wide sections, for some chunks:     loops of the device
            for a section, for a tile:               unrolled, five stages in flight
                m, l, o += section
        for a chunk of the diagonal: the same        unrolled
        out = o / l
"""

import nki.isa as nisa
import nki.language as nl

from .common import BANK, P, cut_head_dim, turn_keys, turn_queries
from .rows import (
    as_rows,
    find_scaling,
    gather_keys,
    gather_rows,
    load_numbers,
    load_register,
    load_row,
    make_keys,
    store_tiles,
    to_float,
)
from .tiles import NEGATED, OUTPUT, TOTAL, exponentiate, find_maximum, score, turn, weigh

# numbers of a section's row: places in the cache and among new tokens, first and end position,
# scales
SECTION = 5
# numbers of a block's row after its columns: bounds of the loops over several wide sections, over
# one, and over chunks; the diagonal; the sinks. In a block of one tile also the tile's slot, if its
# keys are split, and the place of its results
WIDE = 0
CHUNKS = 3
DIAGONAL = 5
SINKS = 6
SLOT = 7
RESULTS = 8
FIELDS = 9
# entry of a tile's state, after its output, that keeps the maximum between iterations
KEPT = 4
# chunks of the diagonal that are in flight together
GROUP_OF_CHUNKS = 8
# chunks of an iteration
CHUNKS_TOGETHER = 4


def begin_tiles(inputs, options, row, tiles, shared):
    """Load the queries of a block, and begin each tile's maximum, sum and output."""
    dtype = options["dtype"]
    head_dim = inputs["q"].shape[1]
    columns = tiles // shared
    width = shared * head_dim
    sinks = []
    if options["has_sinks"]:
        at = row[0:1, 3 * columns + SINKS : 3 * columns + SINKS + 1]
        if shared == 1:
            sinks.append(load_numbers(inputs["numbers"], at, 1))
        else:
            # the first rows are those of the first token: a number for each head
            spread = nl.ndarray((P, shared), dtype=nl.float32, buffer=nl.sbuf)
            nisa.dma_copy(
                dst=spread,
                src=inputs["numbers"].ap(
                    pattern=[[0, P], [1, shared]], scalar_offset=at, indirect_dim=0
                ),
            )
            sinks.append(spread)
    queries = as_rows(inputs["q"], width)
    loaded = []
    for column in range(columns):
        loaded.append(gather_rows(queries, row[:, column : column + 1], P, dtype))
    states = []
    for column in range(columns):
        raw = loaded[column]
        negated = nl.ndarray((P, shared), dtype=nl.float32, buffer=nl.sbuf)
        total = nl.ndarray((P, shared), dtype=nl.float32, buffer=nl.sbuf)
        if options["has_sinks"]:
            # a sink is a first key without a value
            nisa.tensor_scalar(dst=negated, data=sinks[0], op0=nl.multiply, operand0=-1.0)
            nisa.memset(dst=total, value=1.0, engine=nisa.engine.gpsimd)
        else:
            nisa.memset(dst=negated, value=options["no_maximum"], engine=nisa.engine.gpsimd)
            nisa.memset(dst=total, value=0.0, engine=nisa.engine.gpsimd)
        output = nl.ndarray((P, width), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=output, value=0.0, engine=nisa.engine.gpsimd)
        for number in range(shared):
            start = number * head_dim
            end = start + head_dim
            one = negated[:, number : number + 1]
            turned = turn_queries(raw[:, start:end], dtype)
            states.append(
                [turned, one, total[:, number : number + 1], output[:, start:end], one, P]
            )
    return states


def score_chunks(state, keys):
    """Return raw products [128 rows, keys] in PSUM, chunk by chunk."""
    chunks = keys[0].shape[1]
    scores = nl.ndarray((P, chunks * P), dtype=nl.float32, buffer=nl.psum)
    part = BANK // P
    for start in range(0, chunks, part):
        end = min(start + part, chunks)
        for piece in range(len(keys)):
            nisa.nc_matmul(
                dst=scores[:, start * P : end * P],
                stationary=state[0][piece],
                moving=keys[piece][:, start:end, :],
                accumulate=piece > 0,
            )
    return scores


def sweep(works, block, outputs, options):
    """Run tiles against keys, pipelined by stages, and update their state in place."""
    count = len(works)
    for i in range(count + 4):
        # transpose keys one work before the product that needs them
        if i == 0 and count > 0:
            turn_chunks(works[0], options)
        if i + 1 < count:
            turn_chunks(works[i + 1], options)
        if i < count:
            work = works[i]
            if work["by_chunk"]:
                work["scores"] = score_chunks(work["state"], work["keys"])
            else:
                work["scores"] = score(work["state"], work["keys"])
        if i >= 1 and i - 1 < count:
            find_maximum(works[i - 1], options)
        if i >= 2 and i - 2 < count:
            work = works[i - 2]
            state = work["state"]
            exponentiate(work, options)
            if work["is_last"]:
                # the next iteration reads the maximum here
                nisa.tensor_copy(dst=state[KEPT], src=work["negated"], engine=nisa.engine.gpsimd)
                state[NEGATED] = state[KEPT]
        if i >= 3 and i - 3 < count:
            turn(works[i - 3], options)
        if i >= 4:
            work = works[i - 4]
            weigh(work)
            if work["finishes"]:
                finish_column(block, work["column"], outputs, options)
            # free the tiles of finished work
            work = 0
            works[i - 4] = 0


def finish_column(block, column, outputs, options):
    """Store the tiles of a column after their last keys."""
    shared = block["shared"]
    states = block["states"][column * shared : (column + 1) * shared]
    index = block["row"][:, column : column + 1]
    if len(block["states"]) == 1:
        # if the keys of this tile are split, its result goes to a slot to be merged
        at = 3 + RESULTS
        index = block["row"][:, at : at + 1]
    store_tiles(outputs, options, index, states)


def start_works(inputs, options, block, section):
    """Return each tile's work on a section, given the section's row."""
    states = block["states"]
    limits = block["limits"]
    columns = len(states) // block["shared"]
    extent = to_float(section, 2, 4)
    # positions are relative to the section's first, which only the device knows
    low = nl.ndarray((P, columns), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=low, data=limits[:, :columns], op0=nl.subtract, operand0=extent[:, 0:1])
    high = nl.ndarray((P, columns), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=high,
        data=limits[:, columns:],
        op0=nl.minimum,
        operand0=extent[:, 1:2],
        op1=nl.subtract,
        operand1=extent[:, 0:1],
    )
    scaling, v_scale = find_scaling(inputs, options, section, 4)
    works = []
    for tile in range(len(states)):
        column = tile // block["shared"]
        works.append(
            {
                "state": states[tile],
                "tile": tile,
                "column": column,
                "low": low[:, column : column + 1],
                "high": high[:, column : column + 1],
                "scaling": scaling,
                "has_v_scale": options["is_scaled"],
                "v_scale": v_scale,
                "by_chunk": 0,
                "turns": [],
                "is_last": 1,
                "finishes": 0,
            }
        )
    return works


def run_sections(inputs, outputs, options, block, at, count):
    """Run all tiles of a block against ``count`` wide sections, the first at ``at``."""
    tokens = options["wide"]
    sources = (0,)
    if options["has_new"]:
        sources = (0, 1)
    rows = []
    for number in range(count):
        rows.append(load_row(inputs["tables"], at, SECTION, number * P * SECTION))
    loaded = []
    for row in rows:
        tiles = make_keys(inputs, options, tokens)
        gather_keys(inputs, options, row, tiles, tokens > 1, sources)
        loaded.append(tiles)
    works = []
    for number in range(count):
        keys, values = loaded[number]
        turned = turn_keys(keys, options["dtype"])
        for work in start_works(inputs, options, block, rows[number]):
            work["keys"] = turned
            work["values"] = values
            work["is_last"] = number == count - 1
            works.append(work)
    sweep(works, block, outputs, options)


def run_chunks(inputs, outputs, options, block, at):
    """Run all tiles of a block against some chunks, the first at ``at``."""
    sources = (0,)
    if options["has_new"]:
        sources = (0, 1)
    sections, raw, keys, values = load_chunks(inputs, options, at, CHUNKS_TOGETHER, sources)
    works = start_works(inputs, options, block, sections[:, 0:SECTION])
    for chunk in range(CHUNKS_TOGETHER):
        works[0]["turns"].append((raw, keys, chunk))
    for work in works:
        work["keys"] = keys
        work["values"] = values
        work["by_chunk"] = 1
    sweep(works, block, outputs, options)


def load_chunks(inputs, options, at, chunks, sources):
    """Load chunks whose rows begin at ``at``.

    Returns their rows, the keys [128, chunks, head_dim], tiles for the transposed keys, and the
    values.
    """
    sections = nl.ndarray((P, chunks * SECTION), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(
        dst=sections.reshape_dim(1, (chunks, SECTION)),
        src=inputs["tables"].ap(
            pattern=[[SECTION, P], [SECTION * P, chunks], [1, SECTION]],
            scalar_offset=at,
            indirect_dim=0,
        ),
    )
    raw, values = make_keys(inputs, options, chunks)
    keys = []
    for start, end in cut_head_dim(raw.shape[2]):
        keys.append(nl.ndarray((end - start, chunks, P), dtype=options["dtype"], buffer=nl.sbuf))
    for chunk in range(chunks):
        own = sections[:, chunk * SECTION : (chunk + 1) * SECTION]
        tiles = (raw[:, chunk : chunk + 1, :], values[:, chunk : chunk + 1, :])
        gather_keys(inputs, options, own, tiles, False, sources)
    return sections, raw, keys, values


def turn_chunks(work, options):
    """Transpose the chunks of keys that no earlier work has needed."""
    for raw, keys, chunk in work["turns"]:
        start = 0
        for own in keys:
            end = start + own.shape[0]
            turned = nl.ndarray((end - start, P), dtype=options["dtype"], buffer=nl.psum)
            nisa.nc_transpose(dst=turned, data=raw[:, chunk, start:end], engine=nisa.engine.tensor)
            nisa.activation(dst=own[:, chunk, :], op=nl.copy, data=turned)
            start = end


def run_diagonal(inputs, outputs, options, block, columns, per_column):
    """Run each tile of a block against the chunks of the diagonal that it reaches.

    A column of tiles has ``per_column`` tokens, and reaches the chunk that may hold its last token.
    """
    chunks = (P - 1 + columns * per_column + P - 1) // P
    sources = (0,)
    if options["has_new"]:
        sources = (1,)
    first = 3 * columns + DIAGONAL
    at = block["row"][0:1, first : first + 1]
    sections, raw, keys, values = load_chunks(inputs, options, at, chunks, sources)
    works = []
    turned = 0
    for start in range(0, chunks, GROUP_OF_CHUNKS):
        own = sections[:, start * SECTION : (start + 1) * SECTION]
        for work in start_works(inputs, options, block, own):
            last = (P - 1 + (work["column"] + 1) * per_column + P - 1) // P
            end = min(start + GROUP_OF_CHUNKS, last)
            if end > start:
                work["turns"] = []
                while turned < end:
                    work["turns"].append((raw, keys, turned))
                    turned = turned + 1
                work["keys"] = []
                for part in keys:
                    work["keys"].append(part[:, start:end, :])
                work["values"] = values[:, start:end, :]
                work["by_chunk"] = 1
                works.append(work)
    for number in range(len(works)):
        # last work of a tile, and of a column of tiles
        work = works[number]
        work["finishes"] = 1
        for later in works[number + 1 :]:
            if later["column"] == work["column"]:
                work["finishes"] = 0
            if later["tile"] == work["tile"]:
                work["is_last"] = 0
    sweep(works, block, outputs, options)


def run_block(at, spec, inputs, outputs, options):
    """Run the block whose row begins at element ``at`` of the table.

    ``spec`` is (tiles, tiles that share their tokens, wide sections of an iteration).
    """
    tiles = spec[0]
    shared = spec[1]
    columns = tiles // shared
    row = load_row(inputs["tables"], at, 3 * columns + FIELDS, 0)
    limits = to_float(row, columns, 3 * columns)
    states = begin_tiles(inputs, options, row, tiles, shared)
    block = {"states": states, "limits": limits, "row": row, "shared": shared}

    def run_several(place):
        run_sections(inputs, outputs, options, block, place, spec[2])

    def run_wide(place):
        run_sections(inputs, outputs, options, block, place, 1)

    def run_few(place):
        run_chunks(inputs, outputs, options, block, place)

    first = 3 * columns
    step = P * SECTION
    lower = load_register(row, first + WIDE)
    middle = load_register(row, first + WIDE + 1)
    upper = load_register(row, first + WIDE + 2)
    if spec[2] > 1:
        nl.fori_loop(lower, middle, run_several, step=step * spec[2])
    nl.fori_loop(middle, upper, run_wide, step=step)
    lower = load_register(row, first + CHUNKS)
    upper = load_register(row, first + CHUNKS + 1)
    nl.fori_loop(lower, upper, run_few, step=step * CHUNKS_TOGETHER)
    per_column = P
    if shared == 1:
        per_column = P // options["group"]
    run_diagonal(inputs, outputs, options, block, columns, per_column)
    if tiles == 1 and options["has_tile_slots"]:
        store_tile_slot(outputs, row[0:1, first + SLOT : first + SLOT + 1], states[0])


def store_tile_slot(outputs, slot, state):
    """Store a tile's negated maxima, sums and output in its slot."""
    head_dim = state[OUTPUT].shape[1]
    statistics = nl.ndarray((P, 2), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=statistics[:, 0:1], src=state[NEGATED], engine=nisa.engine.gpsimd)
    nisa.tensor_copy(dst=statistics[:, 1:2], src=state[TOTAL], engine=nisa.engine.gpsimd)
    kept = outputs["tiles"]
    nisa.dma_copy(
        dst=kept[0].ap(pattern=[[2, P], [1, 2]], scalar_offset=slot, indirect_dim=0),
        src=statistics,
        oob_mode=nisa.oob_mode.skip,
    )
    nisa.dma_copy(
        dst=kept[1].ap(pattern=[[head_dim, P], [1, head_dim]], scalar_offset=slot, indirect_dim=0),
        src=state[OUTPUT],
        oob_mode=nisa.oob_mode.skip,
    )


def merge_tiles(at, count, inputs, outputs, options):
    """Merge the results of tiles with the same rows and different keys, in order."""
    head_dim = inputs["q"].shape[1]
    row = load_row(inputs["tables"], at, count + 1, 0)
    kept = outputs["tiles"]
    statistics = []
    found = []
    for number in range(count):
        slot = row[0:1, number : number + 1]
        both = nl.ndarray((P, 2), dtype=nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(
            dst=both,
            src=kept[0].ap(pattern=[[2, P], [1, 2]], scalar_offset=slot, indirect_dim=0),
        )
        own = nl.ndarray((P, head_dim), dtype=nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(
            dst=own,
            src=kept[1].ap(
                pattern=[[head_dim, P], [1, head_dim]], scalar_offset=slot, indirect_dim=0
            ),
        )
        statistics.append(both)
        found.append(own)
    negated = nl.ndarray((P, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=negated, src=statistics[0][:, 0:1], engine=nisa.engine.vector)
    for number in range(1, count):
        nisa.tensor_tensor(
            dst=negated, data1=negated, data2=statistics[number][:, 0:1], op=nl.minimum
        )
    total = nl.ndarray((P, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=total, value=0.0)
    output = nl.ndarray((P, head_dim), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=output, value=0.0)
    for number in range(count):
        own = statistics[number]
        weight = nl.ndarray((P, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=weight, op=nl.exp, data=own[:, 0:1], bias=negated, scale=-1.0)
        nisa.scalar_tensor_tensor(
            dst=total,
            data=own[:, 1:2],
            op0=nl.multiply,
            operand0=weight,
            op1=nl.add,
            operand1=total,
        )
        nisa.scalar_tensor_tensor(
            dst=output,
            data=found[number],
            op0=nl.multiply,
            operand0=weight,
            op1=nl.add,
            operand1=output,
        )
    store_tiles(outputs, options, row[:, count : count + 1], [[0, negated, total, output]])
