"""Keys and values that TMA cannot copy: a warpgroup loads them.

These are small or odd pages, caches of 8 bits, caches whose keys have gaps, and new keys besides a
cache. The tiles in shared memory are the same as by TMA, so results have the same bits.
"""

from ...hopper.compat import gl, gluon, hopper, mbarrier
from ...hopper.pipeline import TURN, barrier_sync
from ..arguments import KeyStrides
from .structures import Layout, Lines

# warps that load
WARPS = gl.constexpr(4)


@gluon.constexpr_function
def _layout_of(columns):
    """Return the layout of a tile in a warpgroup: 16 bytes of a row per thread."""
    across = min(columns // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])


@gluon.jit
def _descale_of(pointer, seen, inputs, OPTIONS: gl.constexpr):
    """Return the descale factor of a head."""
    at = seen.head * (OPTIONS.DESCALE_NDIM > 0)
    if OPTIONS.DESCALE_NDIM == 2:
        at += seen.sequence * inputs.counts.heads_k
    return gl.load(pointer + at)


@gluon.jit
def _load_cached(
    keys, seen, lines, inputs, PAGE: gl.constexpr, WHERE: gl.constexpr, COLS: gl.constexpr
):
    """Load cached keys or values of a tile, ``[BLOCK_N, COLS]``; hidden ones are 0."""
    strides = lines.strides
    cols = gl.arange(0, COLS, gl.SliceLayout(0, _layout_of(COLS)))  # [COLS]
    cached = (keys >= seen.first) & (keys < gl.minimum(seen.last, seen.context))  # [BLOCK_N]
    width = (cols < WHERE.WIDTH)[None, :]
    if PAGE > 0:
        table = inputs.places.table
        entries = inputs.block_table_ptr + seen.sequence.to(gl.int64) * table.sequence
        entries += (keys // PAGE).to(gl.int64) * table.page
        pages = gl.load(entries, mask=cached, other=0).to(gl.int64)  # [BLOCK_N]
        slots = (keys % PAGE).to(gl.int64)
    else:
        pages = seen.sequence.to(gl.int64)
        slots = (seen.start + keys).to(gl.int64)
    rows = pages * strides.page + slots * strides.slot
    begins = (lines.ptr + seen.head.to(gl.int64) * strides.head) + rows[:, None]
    place = cols.to(gl.int64)
    if WHERE.RUN < WHERE.WIDTH:
        place = (cols // WHERE.RUN).to(gl.int64) * strides.run
        place += (cols % WHERE.RUN).to(gl.int64) * strides.number
    elif WHERE.BYTES == 0:
        place *= strides.number
    else:
        begins = gl.multiple_of(begins, [WHERE.BYTES, WHERE.BYTES])
    return gl.load(begins + place[None, :], mask=cached[:, None] & width, other=0.0)


@gluon.jit
def _load_new(keys, seen, lines, WHERE: gl.constexpr, COLS: gl.constexpr):
    """Load new keys or values of a tile, ``[BLOCK_N, COLS]``; hidden ones are 0."""
    cols = gl.arange(0, COLS, gl.SliceLayout(0, _layout_of(COLS)))  # [COLS]
    row = (seen.start + keys - seen.context).to(gl.int64) * lines.new_strides.token  # [BLOCK_N]
    begins = (lines.new_ptr + seen.head.to(gl.int64) * lines.new_strides.head) + row[:, None]
    begins = gl.multiple_of(begins, [WHERE.NEW_BYTES, WHERE.NEW_BYTES])
    is_new = (keys >= gl.maximum(seen.first, seen.context)) & (keys < seen.last)
    mask = is_new[:, None] & (cols < WHERE.WIDTH)[None, :]
    return gl.load(begins + cols[None, :], mask=mask, other=0.0)


@gluon.jit
def _gather(
    tile,
    seen,
    lines,
    descale_ptr,
    inputs,
    full,
    memory,
    WHERE: gl.constexpr,
    OPTIONS: gl.constexpr,
    TILE: gl.constexpr,
):
    """Load a tile into shared memory in the queries' dtype, and signal that it is full."""
    COLS: gl.constexpr = memory.shape[4]
    Q: gl.constexpr = inputs.q_desc.dtype
    rows: gl.constexpr = gl.SliceLayout(1, _layout_of(COLS))
    keys = tile * TILE.BLOCK_N + gl.arange(0, TILE.BLOCK_N, rows)  # [BLOCK_N]
    x = _load_cached(keys, seen, lines, inputs, OPTIONS.PAGE, WHERE, COLS)
    if descale_ptr is not None:
        x = x.to(gl.float32) * _descale_of(descale_ptr, seen, inputs, OPTIONS)
    x = x.to(Q)
    if lines.new_ptr is not None:
        new = _load_new(keys, seen, lines, WHERE, COLS)
        x = gl.where((keys < seen.context)[:, None], x, new.to(Q))
    memory.reshape([TILE.BLOCK_N, COLS]).store(x)
    hopper.fence_async_shared()
    # wait until all warps have stored
    barrier_sync(TURN, 32 * WARPS, WARPS)
    mbarrier.arrive(full, count=1)


@gluon.jit
def gather_keys(tile, seen, inputs, full, memory, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Load a tile of keys."""
    places = inputs.places
    lines = Lines(inputs.k_ptr, places.k, inputs.new_k_ptr, places.new_k)
    WHERE: gl.constexpr = Layout(TILE.WIDTH, OPTIONS.K_RUN, OPTIONS.K_BYTES, OPTIONS.ROW_BYTES)
    _gather(tile, seen, lines, inputs.k_descale_ptr, inputs, full, memory, WHERE, OPTIONS, TILE)


@gluon.jit
def gather_values(tile, seen, inputs, full, memory, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Load a tile of values."""
    places, v = inputs.places, inputs.places.v
    strides = KeyStrides(v.page, v.slot, v.head, v.number, v.number)  # one run
    lines = Lines(inputs.v_ptr, strides, inputs.new_v_ptr, places.new_v)
    WHERE: gl.constexpr = Layout(TILE.WIDTH_V, TILE.WIDTH_V, OPTIONS.V_BYTES, OPTIONS.ROW_BYTES)
    _gather(tile, seen, lines, inputs.v_descale_ptr, inputs, full, memory, WHERE, OPTIONS, TILE)
