"""Loading tables, queries, keys and values, and storing results."""

import nki.isa as nisa
import nki.language as nl

P = 128
FP32_MIN = -3.4028234663852886e38
# a denominator of 0, made harmless: the numerator is 0 as well
TINY = 1e-18
# columns of a bank of PSUM, in fp32
BANK = 512


def copy_to(dst, src, on_scalar):
    """Copy a tile, on ScalarE or VectorE; on every generation."""
    if on_scalar:
        nisa.activation(dst=dst, op=nl.copy, data=src)
    else:
        nisa.tensor_copy(dst=dst, src=src, engine=nisa.engine.vector)


def load_table(source, dtype):
    """Copy a table of 128 rows into SBUF."""
    table = nl.ndarray(source.shape, dtype=dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=table, src=source)
    return table


def gather_queries(q, q_index, tile, rows, group, kv_head, dtype):
    """Gather the rows of a tile, [rows, head_dim]."""
    width = q.shape[1]
    raw = nl.ndarray((rows, width), dtype=dtype, buffer=nl.sbuf)
    nisa.dma_copy(
        dst=raw,
        src=q.ap(
            pattern=[[width, rows], [1, width]],
            offset=kv_head * group * width,
            vector_offset=q_index[:rows, tile : tile + 1],
            indirect_dim=0,
        ),
    )
    return raw


def cut_head_dim(head_dim):
    """Return the first and end column of each piece of a head that fits the partitions."""
    pieces = []
    for start in range(0, head_dim, P):
        pieces.append((start, min(start + P, head_dim)))
    return pieces


def turn_queries(raw, dtype):
    """Return the rows of a tile as [head_dim, rows], the stationary operand: a tile of a piece."""
    rows = raw.shape[0]
    result = []
    for start, end in cut_head_dim(raw.shape[1]):
        turned = nl.ndarray((end - start, rows), dtype=dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=turned, data=raw[:, start:end], engine=nisa.engine.tensor)
        own = nl.ndarray((end - start, rows), dtype=dtype, buffer=nl.sbuf)
        copy_to(own, turned, False)
        result.append(own)
    return result


def store_rows(target, q_index, tile, rows, group, kv_head, values):
    """Scatter the rows of a tile to the queries' places."""
    width = target.shape[1]
    nisa.dma_copy(
        dst=target.ap(
            pattern=[[width, rows], [1, width]],
            offset=kv_head * group * width,
            vector_offset=q_index[:rows, tile : tile + 1],
            indirect_dim=0,
        ),
        src=values,
    )


def gather(pool, offset, index, tokens, head_dim, clean, valid, dtype):
    """Load 128 partitions of consecutive tokens: [128, tokens, head_dim].

    What nobody sees becomes 0, so that NaN in it reaches nothing: a product of 0 and NaN would.
    """
    width = tokens * head_dim
    raw = nl.ndarray((P, tokens, head_dim), dtype=dtype, buffer=nl.sbuf)
    mode = nisa.oob_mode.error
    if clean > 0:
        # GpSimd writes the descriptors of gathers
        nisa.memset(dst=raw, value=0.0, engine=nisa.engine.vector)
        mode = nisa.oob_mode.skip
    nisa.dma_copy(
        dst=raw.reshape((P, width)),
        src=pool.ap(
            pattern=[[width, P], [1, width]], offset=offset, vector_offset=index, indirect_dim=0
        ),
        oob_mode=mode,
    )
    if clean < 2:
        return raw
    result = nl.ndarray((P, tokens, head_dim), dtype=dtype, buffer=nl.sbuf)
    nisa.memset(dst=result, value=0.0, engine=nisa.engine.gpsimd)
    nisa.tensor_copy_predicated(
        dst=result, src=raw, predicate=valid.expand_dim(2).broadcast(2, head_dim)
    )
    return result


def gather_section(inputs, tables, options, number, kv_head):
    """Load the keys and values of a section, [128, tokens, head_dim] each.

    Partition ``p`` holds tokens ``p * tokens`` and following.
    """
    kv_cache = inputs["kv_cache"]
    k_new = inputs["k_new"]
    v_new = inputs["v_new"]
    kv_index = tables["kv_index"]
    kv_valid = tables["kv_valid"]
    dtype = options["dtype"]
    section = options["sections"][number]
    source = section[0]
    tokens = section[1]
    clean = section[2]
    column = section[4]
    index = kv_index[:, number : number + 1]
    valid = kv_valid[:, 0:1]
    if clean == 2:
        valid = kv_valid[:, column : column + tokens]
    if source == 0:
        blocks = kv_cache.shape[1]
        kv_heads = kv_cache.shape[2]
        block_size = kv_cache.shape[3]
        head_dim = kv_cache.shape[4]
        width = tokens * head_dim
        half = blocks * kv_heads * block_size * head_dim
        pool = kv_cache.reshape((2 * half // width, width))
        offset = kv_head * block_size * head_dim
        keys = gather(pool, offset, index, tokens, head_dim, clean, valid, dtype)
        values = gather(pool, half + offset, index, tokens, head_dim, clean, valid, dtype)
    else:
        count = k_new.shape[1]
        head_dim = k_new.shape[2]
        width = tokens * head_dim
        rows = k_new.shape[0] * count // tokens
        offset = kv_head * count * head_dim
        k_pool = k_new.reshape((rows, width))
        v_pool = v_new.reshape((rows, width))
        keys = gather(k_pool, offset, index, tokens, head_dim, clean, valid, dtype)
        values = gather(v_pool, offset, index, tokens, head_dim, clean, valid, dtype)
    return keys, values


def turn_keys(keys, dtype):
    """Return the keys of a section as [head_dim, tokens, 128], a tile of each piece of a head.

    Column ``t, p`` is token ``p * tokens + t``.
    """
    tokens = keys.shape[1]
    result = []
    for start, end in cut_head_dim(keys.shape[2]):
        turned = nl.ndarray((end - start, tokens, P), dtype=dtype, buffer=nl.psum)
        for t in range(tokens):
            nisa.nc_transpose(
                dst=turned[:, t, :], data=keys[:, t, start:end], engine=nisa.engine.tensor
            )
        own = nl.ndarray((end - start, tokens, P), dtype=dtype, buffer=nl.sbuf)
        half = (tokens + 1) // 2
        copy_to(own[:, :half, :], turned[:, :half, :], True)
        if half < tokens:
            copy_to(own[:, half:, :], turned[:, half:, :], False)
        result.append(own)
    return result


def finish_lse(result, total, safe, negated):
    """Write log(total) - negated into [rows, 1], or -inf where total is 0."""
    rows = result.shape[0]
    logs = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=logs, op=nl.log, data=safe)
    nisa.tensor_tensor(dst=logs, data1=logs, data2=negated, op=nl.subtract)
    has_keys = nl.ndarray((rows, 1), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=has_keys, data=total, op0=nl.greater, operand0=0.0)
    nisa.memset(dst=result, value=float("-inf"))
    nisa.tensor_copy_predicated(dst=result, src=logs, predicate=has_keys)
