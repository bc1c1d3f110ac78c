"""What the loops of a form share: rows of its table, and gathers that skip missing rows."""

import nki.isa as nisa
import nki.language as nl

from .common import TINY, P, copy_to, finish_lse


def load_row(tables, at, width, offset):
    """Load a row of the table, [128, width] numbers from element ``at + offset`` on."""
    row = nl.ndarray((P, width), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(
        dst=row,
        src=tables.ap(
            pattern=[[width, P], [1, width]], offset=offset, scalar_offset=at, indirect_dim=0
        ),
    )
    return row


def load_numbers(numbers, at, width):
    """Load fp32 numbers for each partition, [128, width] from element ``at`` on."""
    tile = nl.ndarray((P, width), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(
        dst=tile,
        src=numbers.ap(pattern=[[width, P], [1, width]], scalar_offset=at, indirect_dim=0),
    )
    return tile


def to_float(row, first, end):
    """Return columns of a row in fp32."""
    result = nl.ndarray((P, end - first), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=result, src=row[:, first:end], engine=nisa.engine.vector)
    return result


def load_register(row, column):
    """Return a register with a number that all partitions of a row hold."""
    result = nisa.register_alloc()
    nisa.register_load(result, row[0:1, column : column + 1])
    return result


def as_rows(tensor, width):
    """Return a tensor of HBM as rows of ``width`` elements."""
    size = 1
    for length in tensor.shape:
        size = size * length
    return tensor.reshape((size // width, width))


def fill(dst, pool, index):
    """Gather rows of a pool into [128, width]; partitions without a row keep their contents."""
    width = dst.shape[1]
    nisa.dma_copy(
        dst=dst,
        src=pool.ap(pattern=[[width, P], [1, width]], vector_offset=index, indirect_dim=0),
        oob_mode=nisa.oob_mode.skip,
    )


def gather_packed(dst, cache, index):
    """Gather keys of which two tokens are interleaved into [128, tokens, head_dim].

    A page is ``[block_size // 2, head_dim, 2]``. Partitions without tokens become 0.
    """
    tokens = dst.shape[1]
    head_dim = dst.shape[2]
    if tokens > 1:
        pairs = nl.ndarray((P, tokens // 2, head_dim, 2), dtype=cache.dtype, buffer=nl.sbuf)
        nisa.memset(dst=pairs, value=0.0, engine=nisa.engine.gpsimd)
        width = tokens * head_dim
        fill(pairs.reshape((P, width)), as_rows(cache, width), index)
        nisa.tensor_copy(
            dst=dst.reshape_dim(1, (tokens // 2, 2)),
            src=pairs.permute((0, 1, 3, 2)),
            engine=nisa.engine.vector,
        )
        return
    # of a token's row number, the lowest bit is its place in the pair, the rest the pair's number
    place = nl.ndarray((P, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=place, data=index, op0=nl.right_shift, operand0=1)
    is_second = nl.ndarray((P, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=is_second, data=index, op0=nl.bitwise_and, operand0=1)
    chosen = nl.ndarray((P, 1), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_copy(dst=chosen, src=is_second, engine=nisa.engine.vector)
    pairs = nl.ndarray((P, head_dim, 2), dtype=cache.dtype, buffer=nl.sbuf)
    nisa.memset(dst=pairs, value=0.0, engine=nisa.engine.gpsimd)
    fill(pairs.reshape((P, 2 * head_dim)), as_rows(cache, 2 * head_dim), place)
    second = nl.ndarray((P, head_dim), dtype=dst.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=dst[:, 0, :], src=pairs[:, :, 0], engine=nisa.engine.vector)
    nisa.tensor_copy(dst=second, src=pairs[:, :, 1], engine=nisa.engine.gpsimd)
    nisa.tensor_copy_predicated(
        dst=dst[:, 0, :], src=second, predicate=chosen.broadcast(1, head_dim)
    )


def gather_keys(inputs, options, row, tiles, is_whole, sources=(0, 1)):
    """Load keys and values of 128 partitions into two tiles, [128, tokens, head_dim] each.

    Columns 0 and 1 of ``row`` are the places of partitions in the cache and among the new tokens.
    A partition that is in neither becomes 0; ``is_whole`` promises that there is none. ``sources``
    lists the columns that may be used.
    """
    cache = (inputs["k_cache"], inputs["v_cache"])
    new = (inputs["k_new"], inputs["v_new"])
    width = tiles[0].shape[1] * cache[0].shape[3]
    for part in range(2):
        if options["is_packed"] and part == 0 and 0 in sources:
            gather_packed(tiles[part], cache[part], row[:, 0:1])
        else:
            if not is_whole:
                nisa.memset(dst=tiles[part], value=0.0, engine=nisa.engine.vector)
            if 0 in sources:
                fill(tiles[part].reshape((P, width)), as_rows(cache[part], width), row[:, 0:1])
    # a second load into a tile waits for the first
    if 1 in sources:
        for part in range(2):
            fill(tiles[part].reshape((P, width)), as_rows(new[part], width), row[:, 1:2])


def make_keys(inputs, options, tokens):
    """Return tiles for keys and values, [128, tokens, head_dim] each."""
    shape = (P, tokens, inputs["q"].shape[1])
    keys = nl.ndarray(shape, dtype=options["dtype"], buffer=nl.sbuf)
    values = nl.ndarray(shape, dtype=options["dtype"], buffer=nl.sbuf)
    return keys, values


def gather_rows(q, index, rows, dtype):
    """Load rows of the queries, [rows, head_dim]; rows without a place become 0."""
    width = q.shape[1]
    raw = nl.ndarray((rows, width), dtype=dtype, buffer=nl.sbuf)
    nisa.memset(dst=raw, value=0.0, engine=nisa.engine.gpsimd)
    nisa.dma_copy(
        dst=raw,
        src=q.ap(pattern=[[width, rows], [1, width]], vector_offset=index, indirect_dim=0),
        oob_mode=nisa.oob_mode.skip,
    )
    return raw


def scatter_rows(target, index, values):
    """Store [rows, width] at the rows' places; rows without a place are skipped."""
    rows = values.shape[0]
    width = values.shape[1]
    nisa.dma_copy(
        dst=target.ap(pattern=[[width, rows], [1, width]], vector_offset=index, indirect_dim=0),
        src=values,
        oob_mode=nisa.oob_mode.skip,
    )


def find_scaling(inputs, options, row, column):
    """Return the factors of the scores, as ``find_maximum`` takes them, and the values' factor.

    They are compiled in; if the cache has scales they are data.
    """
    if options["is_scaled"]:
        found = load_numbers(inputs["numbers"], row[0:1, column : column + 1], 4)
        return (found[:, 0:1], found[:, 1:2], found[:, 2:3]), found[:, 3:4]
    return options["scaling"], 1.0


def store_tiles(outputs, options, index, states):
    """Divide the outputs of tiles by their sums, and store; rows without a key give 0.

    The tiles hold rows of the same tokens, so they share the rows of ``index``.
    """
    rows, head_dim = states[0][3].shape
    count = len(states)
    width = count * head_dim
    result = nl.ndarray((rows, width), dtype=outputs["out"].dtype, buffer=nl.sbuf)
    lse = nl.ndarray((rows, count), dtype=nl.float32, buffer=nl.sbuf)
    for number in range(count):
        total = states[number][2]
        safe = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=safe, data=total, op0=nl.maximum, operand0=TINY)
        inverse = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.reciprocal(dst=inverse, data=safe)
        nisa.tensor_scalar(
            dst=result[:, number * head_dim : (number + 1) * head_dim],
            data=states[number][3],
            op0=nl.multiply,
            operand0=inverse,
        )
        if options["has_lse"]:
            finish_lse(lse[:, number : number + 1], total, safe, states[number][1])
    scatter_rows(as_rows(outputs["out"], width), index, result)
    if options["has_lse"]:
        scatter_rows(as_rows(outputs["lse"], count), index, lse)


def turn_output(output, inverse, target):
    """Multiply pieces [head_dim, rows] by a number for each row, and return [rows, head_dim]."""
    rows = output[0].shape[1]
    dtype = target.dtype
    head_dim = target.shape[1]
    turned = nl.ndarray((rows, head_dim), dtype=dtype, buffer=nl.psum)
    start = 0
    for own in output:
        size = own.shape[0]
        # round before the transpose: in 16 bits it takes a quarter of the time
        divided = nl.ndarray((size, rows), dtype=dtype, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=divided, data1=own, data2=inverse[:size, :], op=nl.multiply)
        nisa.nc_transpose(
            dst=turned[:, start : start + size], data=divided, engine=nisa.engine.tensor
        )
        start = start + size
    result = nl.ndarray((rows, head_dim), dtype=dtype, buffer=nl.sbuf)
    copy_to(result, turned, False)
    return result


def store_columns(outputs, options, index, total, negated, output):
    """Divide pieces [head_dim, rows] by the rows' sums, transpose them, and store.

    ``total`` and ``negated`` hold the sums and negated maxima on every partition.
    """
    rows = output[0].shape[1]
    safe = nl.ndarray((P, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=safe, data=total, op0=nl.maximum, operand0=TINY)
    inverse = nl.ndarray((P, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.reciprocal(dst=inverse, data=safe)
    scatter_rows(outputs["out"], index, turn_output(output, inverse, outputs["out"]))
    if options["has_lse"]:
        logs = nl.ndarray((1, rows), dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=logs, op=nl.log, data=safe[0:1, :])
        nisa.tensor_tensor(dst=logs, data1=logs, data2=negated[0:1, :], op=nl.subtract)
        column = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_transpose(dst=column, data=logs, engine=nisa.engine.tensor)
        lse = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
        copy_to(lse, column, False)
        scatter_rows(outputs["lse"], index, lse)
