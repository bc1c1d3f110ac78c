"""The plan of the kernel that inference engines carried until 2025, written anew for comparison.

One dense mask over all tokens of all sequences, in int32; every tile of 128 query rows meets every
large tile of 2048 cached tokens, and the new tokens up to the diagonal; queries, masks and
probabilities are loaded or turned anew for each; a running log-sum-exp. It computes, so that a test
can hold it against the reference; what is compared is its trace. It is loaded by
``nki_paged_attn.sim.load``.
"""

import nki
import nki.isa as nisa
import nki.language as nl

P = 128
BANK = 512
LARGE = 2048
# the mask's finite fill, and the first maximum
FILL = -9984.0


def start(head_dim):
    """Return the accumulators of a tile of one head: output, maximum, log-sum-exp."""
    output = nl.ndarray((P, head_dim), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=output, value=0.0)
    top = nl.ndarray((P, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=top, value=FILL)
    logs = nl.ndarray((P, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=logs, value=FILL)
    return [output, top, logs]


def turn_keys(keys, dtype):
    """Turn keys [128, tokens, head_dim] to [head_dim, tokens * 128]."""
    tokens = keys.shape[1]
    head_dim = keys.shape[2]
    result = nl.ndarray((head_dim, tokens, P), dtype=dtype, buffer=nl.sbuf)
    for t in range(tokens):
        turned = nl.ndarray((head_dim, P), dtype=dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=turned, data=keys[:, t, :], engine=nisa.engine.tensor)
        nisa.tensor_copy(dst=result[:, t, :], src=turned)
    return result.reshape((head_dim, tokens * P))


def attend(state, queries, keys, values, mask, scale, dtype):
    """One tile of queries against one large tile of keys."""
    width = keys.shape[1]
    head_dim = values.shape[2]
    chunks = width // P
    masked = nl.ndarray((P, width), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=masked, value=FILL)
    tops = nl.ndarray((P, (width + BANK - 1) // BANK), dtype=nl.float32, buffer=nl.sbuf)
    for i in range(0, width, BANK):
        end = min(i + BANK, width)
        scores = nl.ndarray((P, end - i), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=scores, stationary=queries, moving=keys[:, i:end], accumulate=False)
        nisa.tensor_copy_predicated(
            dst=masked[:, i:end], src=scores, predicate=mask[:, i:end].view(nl.uint32)
        )
        nisa.tensor_reduce(
            dst=tops[:, i // BANK : i // BANK + 1],
            op=nl.maximum,
            data=masked[:, i:end],
            axis=1,
        )
    top = nl.ndarray((P, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=top, op=nl.maximum, data=tops, axis=1)
    new = nl.ndarray((P, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=new, data1=top, data2=state[1], op=nl.maximum)
    negated = nl.ndarray((P, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=negated, data=new, op0=nl.multiply, operand0=-1.0)
    correction = nl.ndarray((P, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=correction, op=nl.exp, data=state[1], bias=negated)

    probabilities = nl.ndarray((P, width), dtype=dtype, buffer=nl.sbuf)
    sums = nl.ndarray((P, tops.shape[1]), dtype=nl.float32, buffer=nl.sbuf)
    for i in range(0, width, BANK):
        end = min(i + BANK, width)
        nisa.activation_reduce(
            dst=probabilities[:, i:end],
            op=nl.exp,
            data=masked[:, i:end],
            reduce_op=nl.add,
            reduce_res=sums[:, i // BANK : i // BANK + 1],
            bias=negated,
        )
    total = nl.ndarray((P, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=total, op=nl.add, data=sums, axis=1)

    product = nl.ndarray((P, head_dim), dtype=nl.float32, buffer=nl.psum)
    for c in range(chunks):
        turned = nl.ndarray((P, P), dtype=dtype, buffer=nl.psum)
        nisa.nc_transpose(
            dst=turned, data=probabilities[:, c * P : (c + 1) * P], engine=nisa.engine.tensor
        )
        weights = nl.ndarray((P, P), dtype=dtype, buffer=nl.sbuf)
        nisa.tensor_copy(dst=weights, src=turned)
        nisa.nc_matmul(dst=product, stationary=weights, moving=values[:, c, :], accumulate=c > 0)
    nisa.scalar_tensor_tensor(
        dst=state[0],
        data=state[0],
        op0=nl.multiply,
        operand0=correction,
        op1=nl.add,
        operand1=product,
    )
    # the log-sum-exp costs an exponential and a logarithm for each tile
    old = nl.ndarray((P, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=old, op=nl.exp, data=state[2], bias=negated)
    both = nl.ndarray((P, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=both, data1=old, data2=total, op=nl.add)
    logs = nl.ndarray((P, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=logs, op=nl.log, data=both)
    nisa.tensor_tensor(dst=logs, data1=logs, data2=new, op=nl.add)
    state[1] = new
    state[2] = logs


def load_queries(q, head, tile, scale, dtype):
    """Load a tile of queries, already turned, and scale it."""
    head_dim = q.shape[1]
    raw = nl.ndarray((head_dim, P), dtype=dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=raw, src=q[head, :, tile * P : (tile + 1) * P])
    scaled = nl.ndarray((head_dim, P), dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=scaled, data=raw, op0=nl.multiply, operand0=scale)
    return scaled


@nki.jit
def old_plan_kernel(q, k, v, kv_cache, index, mask, tokens, scale, dtype):
    """Run the old plan.

    Args:
        q: ``[heads, head_dim, seq]``, ``seq`` a multiple of 128.
        k, v: ``[kv_heads, head_dim, seq]`` and ``[kv_heads, seq, head_dim]``.
        kv_cache: ``[2, blocks, kv_heads, block_size, head_dim]``.
        index: rows of the pool for each large tile, int32 ``[128, loads of all large tiles]``.
        mask: int32 ``[seq, context + seq]``, the context reordered.
        tokens: consecutive tokens of a partition.
    """
    heads = q.shape[0]
    head_dim = q.shape[1]
    seq = q.shape[2]
    kv_heads = k.shape[0]
    group = heads // kv_heads
    context = mask.shape[1] - seq
    out = nl.ndarray((heads, seq, head_dim), dtype=q.dtype, buffer=nl.shared_hbm)
    rows = nl.ndarray(index.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=rows, src=index)
    block_size = kv_cache.shape[3]
    half = kv_cache.shape[1] * kv_heads * block_size * head_dim
    width = tokens * head_dim
    loads = LARGE // (P * tokens)
    tiles = seq // P
    for kv_head in range(kv_heads):
        states = []
        for _ in range(tiles * group):
            states.append(start(head_dim))
        for large in range(context // LARGE):
            pool = kv_cache.reshape((2 * half // width, width))
            parts = []
            for source in range(2):
                part = nl.ndarray((P, loads * tokens, head_dim), dtype=dtype, buffer=nl.sbuf)
                for j in range(loads):
                    at = large * loads + j
                    nisa.dma_copy(
                        dst=part[:, j * tokens : (j + 1) * tokens, :].flatten_dims(1, 2),
                        src=pool.ap(
                            pattern=[[width, P], [1, width]],
                            offset=source * half + kv_head * block_size * head_dim,
                            vector_offset=rows[:, at : at + 1],
                            indirect_dim=0,
                        ),
                    )
                parts.append(part)
            keys = turn_keys(parts[0], dtype)
            for tile in range(tiles):
                seen = nl.ndarray((P, LARGE), dtype=nl.int32, buffer=nl.sbuf)
                nisa.dma_copy(
                    dst=seen,
                    src=mask[tile * P : (tile + 1) * P, large * LARGE : (large + 1) * LARGE],
                )
                for j in range(group):
                    queries = load_queries(q, kv_head * group + j, tile, scale, dtype)
                    attend(states[tile * group + j], queries, keys, parts[1], seen, scale, dtype)
        for tile in range(tiles):
            # the diagonal is met in steps of 512 keys
            end = min(seq, ((tile + 1) * P + BANK - 1) // BANK * BANK)
            for first in range(0, end, LARGE):
                size = min(LARGE, end - first)
                keys = nl.ndarray((head_dim, size), dtype=dtype, buffer=nl.sbuf)
                nisa.dma_copy(dst=keys, src=k[kv_head, :, first : first + size])
                values = nl.ndarray((P, size // P, head_dim), dtype=dtype, buffer=nl.sbuf)
                nisa.dma_copy(
                    dst=values,
                    src=v[kv_head, first : first + size, :]
                    .reshape_dim(0, (size // P, P))
                    .permute((1, 0, 2)),
                )
                seen = nl.ndarray((P, size), dtype=nl.int32, buffer=nl.sbuf)
                column = context + first
                nisa.dma_copy(dst=seen, src=mask[tile * P : (tile + 1) * P, column : column + size])
                for j in range(group):
                    queries = load_queries(q, kv_head * group + j, tile, scale, dtype)
                    attend(states[tile * group + j], queries, keys, values, seen, scale, dtype)
        for i in range(tiles * group):
            state = states[i]
            negated = nl.ndarray((P, 1), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_scalar(dst=negated, data=state[2], op0=nl.multiply, operand0=-1.0)
            inverse = nl.ndarray((P, 1), dtype=nl.float32, buffer=nl.sbuf)
            nisa.activation(dst=inverse, op=nl.exp, data=state[1], bias=negated)
            result = nl.ndarray((P, head_dim), dtype=q.dtype, buffer=nl.sbuf)
            nisa.tensor_scalar(dst=result, data=state[0], op0=nl.multiply, operand0=inverse)
            tile = i // group
            head = kv_head * group + i % group
            nisa.dma_copy(dst=out[head, tile * P : (tile + 1) * P, :], src=result)
    return out
