"""Queries on the partitions: tiles of 128 rows against sections of keys.

Pseudocode, for a tile and a section, each line a stage:

    s = q @ k.T                                   TensorE
    m' = max(m, factor * rowmax(s in range))      VectorE
    p = exp(factor * s - m');  l = l * exp(m - m') + rowsum(p)        ScalarE, VectorE
    o = o * exp(m - m') + p @ v                   TensorE transposes p first; VectorE

Dimensions: rows 128, keys up to 1024 = 128 partitions x tokens, head_dim up to 256, contracted in
pieces of 128.
"""

import nki.isa as nisa
import nki.language as nl

from .common import BANK, FP32_MIN, P, copy_to

# the maximum is kept negated, as the bias of the exponential
NEGATED = 1
TOTAL = 2
OUTPUT = 3


def score(state, keys):
    """Return raw products [rows, keys] in PSUM, keys in the order of their positions."""
    rows = state[5]
    tokens = keys[0].shape[1]
    scores = nl.ndarray((rows, P * tokens), dtype=nl.float32, buffer=nl.psum)
    part = BANK // tokens
    for start in range(0, P, part):
        end = min(start + part, P)
        for piece in range(len(keys)):
            ordered = keys[piece].permute((0, 2, 1))
            nisa.nc_matmul(
                dst=scores[:, start * tokens : end * tokens],
                stationary=state[0][piece],
                moving=ordered[:, start:end, :],
                accumulate=piece > 0,
            )
    return scores


def mask(work, top):
    """Return scores, FP32_MIN where a row sees no key, and write the rows' maxima to ``top``."""
    scores = work["scores"]
    rows = scores.shape[0]
    width = scores.shape[1]
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
        range_start=0,
        on_false_value=FP32_MIN,
    )
    return masked


def find_maximum(work, options):
    """Mask the scores of a tile, and lower its negated maximum.

    ``work["scaling"]`` has a number or a tile for each of: the factor before the cap, the factor of
    the exponential, and the latter negated.
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
    work["scores"] = mask(work, top)
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
    """Compute probabilities, their sums, and the correction factor of the tile's output."""
    scores = work["scores"]
    rows = scores.shape[0]
    probabilities = nl.ndarray(scores.shape, dtype=options["dtype"], buffer=nl.sbuf)
    written = probabilities
    if options["turns_by_dma"] and not work["by_chunk"]:
        # DMA transposes contiguous tiles: first those of each partition's first token
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
    """Transpose the probabilities of token t of each partition, in the layout of the values.

    They lie in the order of positions; ``by_chunk``: first those of each partition's first token.
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
    # a transpose stays within a bank and begins at a multiple of 4 bytes
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
    # ScalarE, the less busy engine, copies the larger share
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
    # in place: the body of a device loop is traced once, and reads and writes the same tiles
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
