"""Writing new keys and values into the cache, in a form: 128 tokens of one KV head at a time.

No sequence of the call reads what is written here, so nothing waits for it.
"""

import nki.isa as nisa
import nki.language as nl

from .common import P
from .rows import as_rows, fill, load_numbers, load_row, scatter_rows

# numbers of a row: places among the new tokens, in the cache, and of the divisors
SOURCE = 0
TARGET = 1
INVERSE = 2
FIELDS = 3


def write_new(at, inputs, options):
    """Write the tokens of a row; partitions without a token are skipped."""
    row = load_row(inputs["tables"], at, FIELDS, 0)
    new = (inputs["k_new"], inputs["v_new"])
    cache = (inputs["k_cache"], inputs["v_cache"])
    head_dim = new[0].shape[2]
    most = options["largest"]
    inverse = []
    if options["is_scaled"]:
        inverse.append(load_numbers(inputs["numbers"], row[0:1, INVERSE : INVERSE + 1], 2))
    for part in range(2):
        raw = nl.ndarray((P, head_dim), dtype=new[part].dtype, buffer=nl.sbuf)
        nisa.memset(dst=raw, value=0.0, engine=nisa.engine.gpsimd)
        fill(raw, as_rows(new[part], head_dim), row[:, SOURCE : SOURCE + 1])
        if options["is_scaled"]:
            scaled = nl.ndarray((P, head_dim), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_scalar(
                dst=scaled, data=raw, op0=nl.multiply, operand0=inverse[0][:, part : part + 1]
            )
            raw = scaled
        result = nl.ndarray((P, head_dim), dtype=cache[part].dtype, buffer=nl.sbuf)
        if most > 0.0:
            # some forms of FP8 have no infinity
            nisa.tensor_scalar(
                dst=result,
                data=raw,
                op0=nl.minimum,
                operand0=most,
                op1=nl.maximum,
                operand1=-most,
            )
        else:
            nisa.tensor_copy(dst=result, src=raw, engine=nisa.engine.vector)
        scatter_rows(as_rows(cache[part], head_dim), row[:, TARGET : TARGET + 1], result)
