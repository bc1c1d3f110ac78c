"""The kernel of a form: the bucket's shapes are compiled in, lengths and tables are data."""

import nki
import nki.isa as nisa
import nki.language as nl

from .blocks import FIELDS as BLOCK_FIELDS
from .blocks import merge_tiles, run_block
from .common import P
from .parts import clear_slot, merge_parts, row_width, run_parts
from .rows import load_register
from .write import FIELDS as WRITE_FIELDS
from .write import write_new

# kinds of loops
BLOCKS = 0
PARTS = 1
MERGES = 2
TILES = 3
WRITES = 4
# key of the tiles' slots; other slots are keyed by a number of tokens
OF_TILES = 0
# rows of a part
MOST_ROWS = 64


def run_loop(loop, lower, upper, inputs, outputs, options):
    """Run a loop of the device over rows of the table, from element ``lower`` to ``upper``.

    ``loop`` is (BLOCKS, tiles, tiles that share tokens, sections at once), (PARTS, chunks, tokens,
    whether last, parts at once), (MERGES, parts, tokens, merges at once), (TILES, tiles per merge)
    or (WRITES,).
    """
    if loop[0] == BLOCKS:
        spec = (loop[1], loop[2], loop[3])

        def run_one(at):
            run_block(at, spec, inputs, outputs, options)

        columns = loop[1] // loop[2]
        nl.fori_loop(lower, upper, run_one, step=P * (3 * columns + BLOCK_FIELDS))
    elif loop[0] == PARTS:
        spec = (loop[1], loop[2], loop[3])

        def run_some(at):
            run_parts(at, loop[4], spec, inputs, outputs, options)

        nl.fori_loop(lower, upper, run_some, step=P * row_width(spec, options["wide"]) * loop[4])
    elif loop[0] == WRITES:

        def write(at):
            write_new(at, inputs, options)

        nl.fori_loop(lower, upper, write, step=P * WRITE_FIELDS)
    elif loop[0] == TILES:

        def merge_some(at):
            merge_tiles(at, loop[1], inputs, outputs, options)

        nl.fori_loop(lower, upper, merge_some, step=P * (loop[1] + 1))
    else:

        def merge(at):
            spec = (loop[1], loop[2], loop[3])
            merge_parts(at, spec, inputs, outputs, options)

        nl.fori_loop(lower, upper, merge, step=P * (loop[1] + 1) * loop[3])


def meet(outputs):
    """Wait for the other program of a logical core: this one also merges its slots."""
    if nl.num_programs(0) > 1:
        for kept in outputs["kept"]:
            nisa.core_barrier(data=kept, cores=(0, 1))


def find_diagonal(rows):
    """Return 1 on the diagonal and 0 elsewhere, [rows, rows]."""
    distance = nl.ndarray((rows, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=distance, pattern=[[-1, rows]], channel_multiplier=1)
    result = nl.ndarray((rows, rows), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=result, data=distance, op0=nl.equal, operand0=0.0)
    return result


def count_keys(chunks, tokens):
    """Return the place of each key in its part, [128, chunks], in sections of ``tokens`` tokens."""
    result = nl.ndarray((P, chunks), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(
        dst=result,
        pattern=[[P * tokens, chunks // tokens], [1, tokens]],
        channel_multiplier=tokens,
    )
    return result


@nki.jit
def paged_attention_form(
    q,
    k_new,
    v_new,
    k_cache,
    v_cache,
    tables,
    numbers,
    loops,
    slots,
    group,
    wide,
    scaling,
    is_scaled,
    softcap,
    no_maximum,
    has_sinks,
    has_lse,
    has_new,
    is_packed,
    turns_by_dma,
    largest,
    dtype,
):
    """``out = softmax(mask(scale * q @ k.T)) @ v``, over a paged cache and the new tokens' keys.

    Dimensions: tokens * heads of q, kv_heads, new = tokens padded to 8, head_dim up to 256.

    Args:
        q: ``[tokens * heads, head_dim]``; head ``h`` reads KV head ``h // group``.
        k_new, v_new: ``[kv_heads, new, head_dim]``.
        k_cache, v_cache: ``[blocks, kv_heads, block_size, head_dim]``; with ``is_packed`` keys may
            be ``[blocks, kv_heads, block_size // 2, head_dim, 2]``.
        tables: int32 ``[size]``: first and end element of each loop, for each program, and rows.
        numbers: fp32 ``[size]``: sinks of each KV head's rows, and factors.
        loops: what each loop runs; this and all later arguments are compiled in.
        slots: number of places for results: of parts, by their number of tokens; key 0: of tiles.
        group: query heads of a KV head.
        wide: tokens of a partition of a wide section.
        scaling: factor before the cap, factor of the exponential, and that with the other sign.
        is_scaled: whether ``scaling`` is data instead, because the cache has scales.
        softcap: 0.0 for none.
        no_maximum: negated maximum of a row without a key.
        has_new: whether ``k_new`` has the new tokens' keys; else they are in the cache.
        turns_by_dma: whether DMA, and not TensorE, turns the probabilities of blocks.
        is_packed: whether two tokens of the cached keys are interleaved.
        largest: limit of new keys and values that are written, in an FP8 cache; 0.0 for none.
        dtype: of the operands of products.

    Returns:
        out ``[tokens * heads, head_dim]`` in q's dtype, and lse ``[tokens * heads, 1]`` in fp32, or
        ``[1, 1]`` without ``has_lse``. Rows of no sequence are not written. With a loop of writes,
        also the caches.
    """
    out = nl.ndarray(q.shape, dtype=q.dtype, buffer=nl.shared_hbm)
    lse_shape = (1, 1)
    if has_lse:
        lse_shape = (q.shape[0], 1)
    lse = nl.ndarray(lse_shape, dtype=nl.float32, buffer=nl.shared_hbm)
    head_dim = q.shape[1]
    ones = nl.ndarray((P, P), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0, engine=nisa.engine.gpsimd)
    inputs = {
        "q": q,
        "k_new": k_new,
        "v_new": v_new,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "tables": tables,
        "numbers": numbers,
    }
    options = {
        "group": group,
        "wide": wide,
        "scaling": scaling,
        "is_scaled": is_scaled,
        "softcap": softcap,
        "no_maximum": no_maximum,
        "has_sinks": has_sinks,
        "has_lse": has_lse,
        "has_new": has_new,
        "is_packed": is_packed,
        "turns_by_dma": turns_by_dma,
        "largest": largest,
        "dtype": dtype,
        "ones": ones,
        "has_tile_slots": False,
        "is_diagonal": find_diagonal(MOST_ROWS),
    }
    parts = {}
    kept = []
    outputs = {"out": out, "lse": lse, "parts": parts, "kept": kept}
    for own in slots:
        rows = own[0] * group
        if own[0] == OF_TILES:
            rows = P
        # shared: a program merges results of both programs
        statistics = nl.ndarray((own[1], 2 * rows), dtype=nl.float32, buffer=nl.shared_hbm)
        found = nl.ndarray((own[1], head_dim * rows), dtype=nl.float32, buffer=nl.shared_hbm)
        kept.append(statistics)
        kept.append(found)
        if own[0] == OF_TILES:
            options["has_tile_slots"] = True
            outputs["tiles"] = (statistics, found)
        else:
            parts[str(own[0])] = (statistics, found)
            clear_slot(inputs, outputs, options, own[0])
    orders = {}
    for loop in loops:
        if loop[0] == PARTS and loop[3]:
            tokens = min(wide, loop[1])
            if str(tokens) not in orders or orders[str(tokens)].shape[1] < loop[1]:
                orders[str(tokens)] = count_keys(loop[1], tokens)
    options["orders"] = orders
    count = 2 * len(loops)
    bounds = nl.ndarray((1, count), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(
        dst=bounds,
        src=tables.ap(pattern=[[count, 1], [1, count]], offset=nl.program_id(0) * count),
    )
    waits = True
    for number in range(len(loops)):
        if waits and (loops[number][0] == MERGES or loops[number][0] == TILES):
            waits = False
            meet(outputs)
        lower = load_register(bounds, 2 * number)
        upper = load_register(bounds, 2 * number + 1)
        run_loop(loops[number], lower, upper, inputs, outputs, options)
    if not has_lse and nl.program_id(0) == 0:
        nisa.dma_copy(dst=lse, src=ones[0:1, 0:1])
    if loops[0][0] == WRITES:
        return out, lse, k_cache, v_cache
    return out, lse
