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

from .common import P, cut_head_dim

# VectorE transposes squares of this side
SIDE = 32
NEGATED = 1
TOTAL = 2
OUTPUT = 3


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


def keep_maximum(work, options):
    """Keep the maximum of each row of the scores on the diagonal of a tile.

    The rest of the tile is set to 0: a product with 0 would spread NaN and infinities of a row to
    the others.
    """
    rows = work["state"][5]
    by_partition = nl.ndarray((P, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(
        dst=by_partition, op=nl.maximum, data=work["scores"].permute((0, 2, 1)), axis=2
    )
    # on VectorE: in fp32 TensorE would take twice as long
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
    # not by affine_select, which runs on GpSimd: GpSimd writes the descriptors of gathers
    nisa.memset(dst=diagonal, value=0.0, engine=nisa.engine.vector)
    nisa.tensor_copy_predicated(
        dst=diagonal,
        src=top.broadcast(1, rows),
        predicate=options["is_diagonal"][:rows, :rows],
    )


def exponentiate(work, options):
    """Spread the maxima over the partitions, lower the negated ones, and exponentiate."""
    state = work["state"]
    scores = work["scores"]
    chunks = scores.shape[1]
    rows = scores.shape[2]
    top = nl.ndarray((P, rows), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(
        dst=top, stationary=options["ones"][:rows, :], moving=work["diagonal"], accumulate=False
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
    # the sum is of probabilities before they are rounded
    probabilities = exact
    if options["dtype"] != nl.float32:
        probabilities = nl.ndarray((P, chunks, rows), dtype=options["dtype"], buffer=nl.sbuf)
        nisa.tensor_copy(dst=probabilities, src=exact, engine=nisa.engine.vector)
    state[NEGATED] = negated
    work["scores"] = 0
    work["exact"] = exact
    work["probabilities"] = probabilities
    work["correction"] = correction


def weigh(work):
    """Add a round to the partitions' sums and to the output."""
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
