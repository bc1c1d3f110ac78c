"""Queries on the partitions, in a form: a block of tiles, and loops of the device over its keys.

A block is up to 64 tiles of 128 rows of one sequence and KV head. Its row of the table says which
sections of keys all its tiles may see: wide ones of 128 partitions of several tokens, and chunks of
128 tokens. The diagonal is a few chunks more, of which each tile multiplies those that it reaches.

    for a block:                                     a loop of the device
        m, l, o = sink or nothing
        for a wide section, for a chunk:             loops of the device
            for a tile: m, l, o += section           unrolled, five stages in flight
        for a chunk of the diagonal: the same        unrolled
        out = o / l
"""

import nki.isa as nisa
import nki.language as nl

from .common import BANK, P, cut_head_dim, turn_keys, turn_queries
from .prefill import NEGATED, OUTPUT, TOTAL, exponentiate, find_maximum, score, turn, weigh
from .rows import (
    find_scaling,
    gather_keys,
    gather_rows,
    load_numbers,
    load_register,
    load_row,
    store_tile,
    to_float,
)

# numbers of a section's row: places in the cache and among new tokens, first and end position,
# scales
SECTION = 5
# of a block's row behind its tiles: loops over wide sections and chunks, the diagonal, the sinks;
# of one tile, which may be one of two with different keys: its slot, and where its results lie
WIDE = 0
CHUNKS = 2
DIAGONAL = 4
SINKS = 5
SLOT = 6
RESULTS = 7
FIELDS = 8
# chunks of the diagonal that are in flight together
GROUP_OF_CHUNKS = 8


def begin_tiles(inputs, options, row, tiles):
    """Load the queries of a block, and begin each tile's maximum, sum and output."""
    dtype = options["dtype"]
    head_dim = inputs["q"].shape[1]
    sinks = []
    if options["has_sinks"]:
        column = 3 * tiles + SINKS
        at = row[0:1, column : column + 1]
        sinks.append(load_numbers(inputs["numbers"], at, 1))
    states = []
    for tile in range(tiles):
        raw = gather_rows(inputs["q"], row[:, tile : tile + 1], P, dtype)
        turned = turn_queries(raw, dtype)
        negated = nl.ndarray((P, 1), dtype=nl.float32, buffer=nl.sbuf)
        total = nl.ndarray((P, 1), dtype=nl.float32, buffer=nl.sbuf)
        if options["has_sinks"]:
            # a sink is a first key without a value
            nisa.tensor_scalar(dst=negated, data=sinks[0], op0=nl.multiply, operand0=-1.0)
            nisa.memset(dst=total, value=1.0, engine=nisa.engine.gpsimd)
        else:
            nisa.memset(dst=negated, value=options["no_maximum"], engine=nisa.engine.gpsimd)
            nisa.memset(dst=total, value=0.0, engine=nisa.engine.gpsimd)
        output = nl.ndarray((P, head_dim), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=output, value=0.0, engine=nisa.engine.gpsimd)
        states.append([turned, negated, total, output, tile, P])
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


def sweep(works, options):
    """Run tiles against keys, each a stage behind the one before, and keep their state in place."""
    count = len(works)
    for i in range(count + 4):
        if i < count:
            work = works[i]
            if work["by_chunk"]:
                work["scores"] = score_chunks(work["state"], work["keys"])
            else:
                work["scores"] = score(work["state"], work["keys"], P)
        if i >= 1 and i - 1 < count:
            find_maximum(works[i - 1], options)
        if i >= 2 and i - 2 < count:
            work = works[i - 2]
            exponentiate(work, options)
            # a loop's body finds the maximum where the one before left it
            nisa.tensor_copy(dst=work["old"], src=work["negated"], engine=nisa.engine.gpsimd)
            work["state"][NEGATED] = work["old"]
        if i >= 3 and i - 3 < count:
            turn(works[i - 3], options)
        if i >= 4:
            weigh(works[i - 4])
            # what is done needs no more room
            works[i - 4] = 0


def start_works(inputs, options, states, limits, section):
    """Return what each tile is told of a section whose row is given."""
    tiles = len(states)
    extent = to_float(section, 2, 4)
    # positions are counted from the section's first, which only the device knows
    low = nl.ndarray((P, tiles), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=low, data=limits[:, :tiles], op0=nl.subtract, operand0=extent[:, 0:1])
    high = nl.ndarray((P, tiles), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=high,
        data=limits[:, tiles:],
        op0=nl.minimum,
        operand0=extent[:, 1:2],
        op1=nl.subtract,
        operand1=extent[:, 0:1],
    )
    scaling, v_scale = find_scaling(inputs, options, section, 4)
    works = []
    for tile in range(tiles):
        works.append(
            {
                "state": states[tile],
                "start": 0,
                "low": low[:, tile : tile + 1],
                "high": high[:, tile : tile + 1],
                "scaling": scaling,
                "has_v_scale": options["is_scaled"],
                "v_scale": v_scale,
                "is_masked": 1,
                "by_chunk": 0,
            }
        )
    return works


def run_section(inputs, options, states, limits, at, tokens):
    """Run all tiles of a block against a section of the table."""
    section = load_row(inputs["tables"], at, SECTION, 0)
    keys, values = gather_keys(inputs, options, section, tokens, tokens > 1)
    turned = turn_keys(keys, options["dtype"])
    works = start_works(inputs, options, states, limits, section)
    for work in works:
        work["keys"] = turned
        work["values"] = values
    sweep(works, options)


def run_diagonal(inputs, options, states, limits, row, first, chunks, reaches):
    """Run each tile of a block against the chunks of the diagonal that it reaches.

    They are ``chunks`` from the diagonal's ``first`` on, and a tile reaches so many of them.
    """
    tiles = len(states)
    head_dim = inputs["q"].shape[1]
    dtype = options["dtype"]
    column = 3 * tiles + DIAGONAL
    sections = nl.ndarray((P, chunks * SECTION), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(
        dst=sections.reshape_dim(1, (chunks, SECTION)),
        src=inputs["tables"].ap(
            pattern=[[SECTION, P], [SECTION * P, chunks], [1, SECTION]],
            offset=first * SECTION * P,
            scalar_offset=row[0:1, column : column + 1],
            indirect_dim=0,
        ),
    )
    pieces = cut_head_dim(head_dim)
    keys = []
    for start, end in pieces:
        keys.append(nl.ndarray((end - start, chunks, P), dtype=dtype, buffer=nl.sbuf))
    values = nl.ndarray((P, chunks, head_dim), dtype=dtype, buffer=nl.sbuf)
    for chunk in range(chunks):
        own = sections[:, chunk * SECTION : (chunk + 1) * SECTION]
        raw, part = gather_keys(inputs, options, own, 1, False)
        for piece in range(len(pieces)):
            start, end = pieces[piece]
            turned = nl.ndarray((end - start, P), dtype=dtype, buffer=nl.psum)
            nisa.nc_transpose(dst=turned, data=raw[:, 0, start:end], engine=nisa.engine.tensor)
            nisa.activation(dst=keys[piece][:, chunk, :], op=nl.copy, data=turned)
        nisa.tensor_copy(dst=values[:, chunk, :], src=part[:, 0, :], engine=nisa.engine.gpsimd)
    works = start_works(inputs, options, states, limits, sections[:, 0:SECTION])
    own = []
    for tile in range(tiles):
        if reaches[tile] > 0:
            work = works[tile]
            work["keys"] = []
            for part in keys:
                work["keys"].append(part[:, : reaches[tile], :])
            work["values"] = values[:, : reaches[tile], :]
            work["by_chunk"] = 1
            own.append(work)
    sweep(own, options)


def run_block(at, tiles, inputs, outputs, options):
    """Run the block whose row begins at element ``at`` of the table."""
    row = load_row(inputs["tables"], at, 3 * tiles + FIELDS, 0)
    limits = to_float(row, tiles, 3 * tiles)
    states = begin_tiles(inputs, options, row, tiles)

    def run_wide(place):
        run_section(inputs, options, states, limits, place, options["wide"])

    def run_chunk(place):
        run_section(inputs, options, states, limits, place, 1)

    first = 3 * tiles
    step = P * SECTION
    lower = load_register(row, first + WIDE)
    upper = load_register(row, first + WIDE + 1)
    nl.fori_loop(lower, upper, run_wide, step=step)
    lower = load_register(row, first + CHUNKS)
    upper = load_register(row, first + CHUNKS + 1)
    nl.fori_loop(lower, upper, run_chunk, step=step)
    # a tile reaches the chunk in which the last of its tokens may lie
    per_tile = P // options["group"]
    chunks = (P - 1 + tiles * per_tile + P - 1) // P
    for start in range(0, chunks, GROUP_OF_CHUNKS):
        count = min(GROUP_OF_CHUNKS, chunks - start)
        reaches = []
        for tile in range(tiles):
            reach = (P - 1 + (tile + 1) * per_tile + P - 1) // P - start
            reaches.append(max(0, min(count, reach)))
        run_diagonal(inputs, options, states, limits, row, start, count, reaches)
    if tiles == 1:
        column = first + RESULTS
        store_tile(outputs, options, row[:, column : column + 1], states[0])
        if options["has_tile_slots"]:
            store_tile_slot(outputs, row[0:1, first + SLOT : first + SLOT + 1], states[0])
    else:
        for tile in range(tiles):
            store_tile(outputs, options, row[:, tile : tile + 1], states[tile])


def store_tile_slot(outputs, slot, state):
    """Store what a tile that has a slot found: its negated maxima and sums, and its output."""
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
    """Merge what tiles of the same rows found with different keys, in their order."""
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
    store_tile(outputs, options, row[:, count : count + 1], [0, negated, total, output])
