"""The kernel: paged attention over a packed batch, by a host's plan."""

import nki
import nki.isa as nisa
import nki.language as nl

from .common import P, load_table
from .decode import decode
from .prefill import prefill

DECODE = 1


@nki.jit
def paged_attention_kernel(
    q,
    k_new,
    v_new,
    kv_cache,
    kv_index,
    kv_valid,
    q_index,
    bounds,
    bounds_tokens,
    sinks,
    sink_rows,
    structure,
    sections,
    rows,
    group,
    factors,
    v_scales,
    softcap,
    no_maximum,
    has_sinks,
    has_lse,
    dtype,
):
    """``out = softmax(mask(scale * q @ k.T)) @ v``, over a paged cache and the new tokens' keys.

    Dimensions: tokens and heads of q in one, kv_heads, new = tokens padded to 8, head_dim to 256.

    Args:
        q: ``[tokens * heads, head_dim]``; head ``h`` reads KV head ``h // group``.
        k_new, v_new: ``[kv_heads, new, head_dim]``.
        kv_cache: ``[2, blocks, kv_heads, block_size, head_dim]``, keys and values.
        kv_index, kv_valid, q_index, bounds, bounds_tokens: tables of the plan.
        sinks, sink_rows: a sink for each row of a tile, ``[128, kv_heads]`` and the other way.
        structure, sections, rows, group: of the plan; compiled in.
        factors, v_scales: for each source and KV head, of the scores and of the values.
        softcap: 0.0 for none.
        no_maximum: what the negated maximum of a row without a key is.
        dtype: of the operands of products.

    Returns:
        out ``[tokens * heads, head_dim]`` in q's dtype, and lse ``[tokens * heads, 1]`` in fp32, or
        ``[1, 1]`` unless ``has_lse``.
    """
    kv_heads = k_new.shape[0]
    out = nl.ndarray(q.shape, dtype=q.dtype, buffer=nl.shared_hbm)
    lse_shape = (1, 1)
    if has_lse:
        lse_shape = (q.shape[0], 1)
    lse = nl.ndarray(lse_shape, dtype=nl.float32, buffer=nl.shared_hbm)
    inputs = {
        "q": q,
        "k_new": k_new,
        "v_new": v_new,
        "kv_cache": kv_cache,
        "bounds_tokens": bounds_tokens,
        "sink_rows": sink_rows,
    }
    outputs = {"out": out, "lse": lse}
    options = {
        "sections": sections,
        "rows": rows,
        "group": group,
        "factors": factors,
        "v_scales": v_scales,
        "softcap": softcap,
        "no_maximum": no_maximum,
        "has_sinks": has_sinks,
        "has_lse": has_lse,
        "turns_by_dma": False,
        "spares_gpsimd": False,
        "dtype": dtype,
    }
    tables = {
        "kv_index": load_table(kv_index, nl.int32),
        "kv_valid": load_table(kv_valid, nl.uint8),
        "q_index": load_table(q_index, nl.int32),
    }
    # what only queries on the partitions read
    long = 0
    for unit in structure:
        if unit[0] != DECODE:
            long = long + 1
    if long > 0:
        tables["bounds"] = load_table(bounds, nl.float32)
        if has_sinks:
            tables["sinks"] = load_table(sinks, nl.float32)
    ones = nl.ndarray((P, P), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0, engine=nisa.engine.gpsimd)
    tables["ones"] = ones

    # a unit is a sequence of one KV head; the programs of a logical core take them in turn
    count = 0
    for kv_head in range(kv_heads):
        short = []
        for unit in structure:
            if count % nl.num_programs(0) == nl.program_id(0):
                if unit[0] == DECODE:
                    short.append(unit)
                else:
                    prefill(unit[1], inputs, outputs, tables, options, kv_head)
            count = count + 1
        decode(short, inputs, outputs, tables, options, kv_head)
    if not has_lse and nl.program_id(0) == 0:
        nisa.dma_copy(dst=lse, src=ones[0:1, 0:1])
    return out, lse
