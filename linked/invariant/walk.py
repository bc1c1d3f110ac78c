"""Which rows a program owns, and its walk over the keys of a segment."""

import triton
import triton.language as tl

from .arithmetic import fold_keys, no_keys
from .structures import Place, Softmax

# sequences per step when a program searches its sequence in cu_seqlens
SEARCH_CHUNK = tl.constexpr(128)


@triton.jit
def _find_sequence(cu_seqlens_ptr, unit, batch, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Return the sequence that owns a unit; -1 and ``batch``: padding before and after all.

    Sequence ``b`` owns the units from ``cu_seqlens[b] * GROUP // BLOCK + b + 1`` on, at least as
    many as its tiles.
    """
    owned = tl.zeros([], tl.int32)
    for first in range(0, batch + 1, SEARCH_CHUNK):
        index = first + tl.arange(0, SEARCH_CHUNK)  # [SEARCH_CHUNK]
        start = tl.load(cu_seqlens_ptr + index, mask=index <= batch, other=0)
        mine = (start.to(tl.int64) * GROUP // BLOCK + index < unit) & (index <= batch)
        owned += tl.sum(mine.to(tl.int32), 0)
    return owned - 1


@triton.jit
def locate(unit, tensors, numbers, OPTIONS: tl.constexpr, TILE: tl.constexpr):
    """Return the ``Place`` of a unit; a sequence's last tile, which sees most keys, comes first.

    Padding before the first and after the last sequence is treated as two extra sequences without
    keys.
    """
    GROUP: tl.constexpr = OPTIONS.GROUP
    batch = numbers.batch
    if tensors.cu_seqlens_q_ptr is None:
        sequence = unit // numbers.tiles
        tile = numbers.tiles - 1 - unit % numbers.tiles
        q_start = tl.zeros([], tl.int64)
        seqlen_q = numbers.tokens_q
        is_real = sequence < batch
    else:
        sequence = _find_sequence(tensors.cu_seqlens_q_ptr, unit, batch, GROUP, TILE.BLOCK_M)
        is_real = (sequence >= 0) & (sequence < batch)
        begin = tl.load(tensors.cu_seqlens_q_ptr + sequence, mask=sequence >= 0, other=0)
        end = tl.load(
            tensors.cu_seqlens_q_ptr + sequence + 1, mask=sequence < batch, other=numbers.tokens_q
        )
        q_start = begin.to(tl.int64)
        seqlen_q = end - begin
        first = tl.where(sequence < 0, 0, q_start * GROUP // TILE.BLOCK_M + sequence + 1)
        tile = tl.cdiv(seqlen_q * GROUP, TILE.BLOCK_M) - 1 - (unit - first).to(tl.int32)
    k_start = tl.zeros([], tl.int64)
    seqlen_k = numbers.tokens_k
    if tensors.cu_seqlens_k_ptr is not None:
        k_begin = tl.load(tensors.cu_seqlens_k_ptr + sequence, mask=is_real, other=0)
        seqlen_k = tl.load(tensors.cu_seqlens_k_ptr + sequence + 1, mask=is_real, other=0) - k_begin
        k_start = k_begin.to(tl.int64)
    if tensors.seqlens_k_ptr is not None:
        seqlen_k = tl.load(tensors.seqlens_k_ptr + sequence, mask=is_real, other=0)
    return Place(sequence, tile, q_start, seqlen_q, k_start, seqlen_k)


@triton.jit
def _load(begins, place, wanted, cols, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load numbers ``place`` of the vectors at ``begins``; vectors not ``wanted`` are 0."""
    pointers = begins + place[None, :]
    if wanted is not None:
        tile = tl.load(pointers, mask=wanted[:, None] & (cols < WIDTH)[None, :], other=0.0)
    elif WIDTH != BLOCK:
        tile = tl.load(pointers, mask=(cols < WIDTH)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)  # the whole tile is inside: no mask
    return tile


@triton.jit
def load_rows(
    base, rows, stride, inside, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BYTES: tl.constexpr
):
    """Load rows of a tensor whose columns have unit stride; rows not ``inside`` are 0."""
    cols = tl.arange(0, BLOCK)  # [BLOCK]
    begins = tl.multiple_of(base + (rows * stride)[:, None], [BYTES, BYTES])
    return _load(begins, cols, inside, cols, WIDTH, BLOCK)


@triton.jit
def _offsets(keys, source, wanted, numbers, OPTIONS: tl.constexpr):
    """Return the offsets of keys and values, relative to their head."""
    if OPTIONS.PAGE > 0:
        entries = source.table_ptr + (keys // OPTIONS.PAGE).to(tl.int64) * numbers.table.page
        if wanted is not None:
            pages = tl.load(entries, mask=wanted, other=0).to(tl.int64)
        else:
            pages = tl.load(entries).to(tl.int64)
        slots = (keys % OPTIONS.PAGE).to(tl.int64)
        k_rows = pages * numbers.k.page + slots * numbers.k.slot
        v_rows = pages * numbers.v.page + slots * numbers.v.slot
    else:
        k_rows = keys.to(tl.int64) * numbers.k.slot
        v_rows = keys.to(tl.int64) * numbers.v.slot
    return k_rows, v_rows


@triton.jit
def _as_queries(x, descale, Q: tl.constexpr):
    """Return keys or values in the queries' dtype; numbers of 8 bits are scaled."""
    if descale is not None:
        x = x.to(tl.float32) * descale
    return x.to(Q)


@triton.jit
def _load_keys(
    begin, rows, source, numbers, MASKED: tl.constexpr, OPTIONS: tl.constexpr, TILE: tl.constexpr
):
    """Load a tile of keys and values in the queries' dtype; ``MASKED``: only visible ones."""
    Q: tl.constexpr = rows.q.dtype
    D: tl.constexpr = TILE.HEAD_DIM
    DV: tl.constexpr = TILE.HEAD_DIM_V
    BLOCK_DV: tl.constexpr = TILE.BLOCK_DV
    HAS_NEW: tl.constexpr = source.new_k_ptr is not None
    keys = begin + tl.arange(0, TILE.BLOCK_N)  # [BLOCK_N]
    cols = tl.arange(0, TILE.BLOCK_D)  # [BLOCK_D]
    cols_v = tl.arange(0, BLOCK_DV)  # [BLOCK_DV]
    wanted = None
    if MASKED:
        wanted = (keys >= rows.first) & (keys < rows.last)
    cached = wanted
    if HAS_NEW:
        cached = (keys >= rows.first) & (keys < tl.minimum(rows.last, source.context))
    k_place = cols.to(tl.int64)
    v_place = cols_v.to(tl.int64)
    if OPTIONS.K_RUN < D:
        k_place = (cols // OPTIONS.K_RUN).to(tl.int64) * numbers.k.run
        k_place += (cols % OPTIONS.K_RUN).to(tl.int64) * numbers.k.number
    elif OPTIONS.K_BYTES == 0:
        k_place *= numbers.k.number
    if OPTIONS.V_BYTES == 0:
        v_place *= numbers.v.number
    k_rows, v_rows = _offsets(keys, source, cached, numbers, OPTIONS)
    k_begins = source.k_ptr + k_rows[:, None]
    if OPTIONS.K_BYTES > 0 and OPTIONS.K_RUN >= D:
        k_begins = tl.multiple_of(k_begins, [OPTIONS.K_BYTES, OPTIONS.K_BYTES])
    v_begins = source.v_ptr + v_rows[:, None]
    if OPTIONS.V_BYTES > 0:
        v_begins = tl.multiple_of(v_begins, [OPTIONS.V_BYTES, OPTIONS.V_BYTES])
    k = _as_queries(_load(k_begins, k_place, cached, cols, D, TILE.BLOCK_D), source.k_descale, Q)
    v = _as_queries(_load(v_begins, v_place, cached, cols_v, DV, BLOCK_DV), source.v_descale, Q)
    if HAS_NEW:
        new = (keys >= tl.maximum(rows.first, source.context)) & (keys < rows.last)
        at = (keys - source.context).to(tl.int64)
        # [BLOCK_N, BLOCK_D], [BLOCK_N, BLOCK_DV]
        new_k = load_rows(
            source.new_k_ptr, at, numbers.new_k.token, new, D, TILE.BLOCK_D, OPTIONS.ROW_BYTES
        )
        new_v = load_rows(
            source.new_v_ptr, at, numbers.new_v.token, new, DV, BLOCK_DV, OPTIONS.ROW_BYTES
        )
        k = tl.where(new[:, None], new_k.to(Q), k)
        v = tl.where(new[:, None], new_v.to(Q), v)
    return k, v


@triton.jit
def walk_segment(segment, rows, source, numbers, OPTIONS: tl.constexpr, TILE: tl.constexpr):
    """Return the sums over the keys of one segment.

    In ascending order: tiles that the window's left edge cuts, whole tiles, and tiles that the
    diagonal or the end cuts.
    """
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    nothing = no_keys(BLOCK_M, TILE.BLOCK_DV)
    acc, l_i, m_i = nothing.acc, nothing.l_i, nothing.m_i
    begin = segment * TILE.SEGMENT
    first = tl.maximum(rows.first, begin)
    last = tl.minimum(rows.last, begin + TILE.SEGMENT)
    start = first // BLOCK_N * BLOCK_N
    end = tl.maximum(tl.cdiv(last, BLOCK_N) * BLOCK_N, start)
    full_start = tl.cdiv(rows.full_first, BLOCK_N) * BLOCK_N
    full_start = tl.minimum(tl.maximum(full_start, start), end)
    full_end = tl.minimum(tl.maximum(rows.full_last // BLOCK_N * BLOCK_N, full_start), end)
    for phase in tl.static_range(3):
        if phase == 0:
            low, high = start, full_start
        elif phase == 1:
            low, high = full_start, full_end
        else:
            low, high = full_end, end
        if phase != 0 or OPTIONS.HAS_LEFT:
            for tile in tl.range(low, high, BLOCK_N):
                # [BLOCK_N, BLOCK_D], [BLOCK_N, BLOCK_DV]
                k, v = _load_keys(tile, rows, source, numbers, phase != 1, OPTIONS, TILE)
                visible = None
                if phase != 1:
                    keys = tile + tl.arange(0, BLOCK_N)  # [BLOCK_N]
                    visible = tl.broadcast_to((keys < source.seqlen_k)[None, :], [BLOCK_M, BLOCK_N])
                    if OPTIONS.HAS_RIGHT:
                        visible &= (
                            keys[None, :] <= rows.position[:, None] + numbers.scores.window_right
                        )
                    if OPTIONS.HAS_LEFT:
                        visible &= (
                            keys[None, :] >= rows.position[:, None] - numbers.scores.window_left
                        )
                sums = fold_keys(
                    Softmax(acc, l_i, m_i), rows.q, k, v, visible, numbers.scores, OPTIONS, TILE
                )
                acc, l_i, m_i = sums.acc, sums.l_i, sums.m_i
    return Softmax(acc, l_i, m_i)
