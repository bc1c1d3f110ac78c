"""What tiles of queries and parts of keys share: transposes, and the logarithm of the sums."""

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


def cut_head_dim(head_dim):
    """Return the first and end column of each piece of a head that fits the partitions."""
    pieces = []
    for start in range(0, head_dim, P):
        pieces.append((start, min(start + P, head_dim)))
    return pieces


def turn_queries(raw, dtype):
    """Return a tile's rows transposed, [head_dim, rows]: a stationary operand for each piece."""
    rows = raw.shape[0]
    result = []
    for start, end in cut_head_dim(raw.shape[1]):
        turned = nl.ndarray((end - start, rows), dtype=dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=turned, data=raw[:, start:end], engine=nisa.engine.tensor)
        own = nl.ndarray((end - start, rows), dtype=dtype, buffer=nl.sbuf)
        copy_to(own, turned, False)
        result.append(own)
    return result


def turn_keys(keys, dtype):
    """Return a section's keys as [head_dim, tokens, 128], in a tile for each piece of a head.

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
