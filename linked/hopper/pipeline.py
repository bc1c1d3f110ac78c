"""Barriers and the order of tiles, shared by producers and consumers of the Hopper kernels.

The kernels are persistent and warp-specialised. A program stays on its multiprocessor and takes
tiles from a counter until none is left. One producer warp copies tiles into shared memory by TMA,
and two or three consumer warpgroups multiply them by wgmma. They meet at mbarriers. Signals per
tile of keys use named barriers (``bar.sync``, ``bar.arrive``; the hardware has sixteen), at which a
warp arrives without waiting for the rest of its warpgroup.
"""

from . import sizes
from .compat import gl, gluon, mbarrier

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
NEG_INF = gl.constexpr(float("-inf"))

RAGGED_ROWS = gl.constexpr(sizes.RAGGED_ROWS)
# tiles that the producer may announce in advance, and the numbers that describe a tile
SLOTS = gl.constexpr(2)
FIELDS = gl.constexpr(8)
FIRST_ROW = gl.constexpr(0)
HEAD = gl.constexpr(1)
SEQUENCE = gl.constexpr(2)
Q_START = gl.constexpr(3)
LEN_Q = gl.constexpr(4)
LEN_K = gl.constexpr(5)
# the first named barriers of the ping-pong turns and of freed stages; Triton uses those below
TURN = gl.constexpr(5)
EMPTY = gl.constexpr(8)
SEARCH_CHUNK = gl.constexpr(128)


@gluon.jit
def barrier_sync(number, THREADS: gl.constexpr, WARPS: gl.constexpr):
    """Arrive at a named barrier and wait until ``THREADS`` threads have arrived (``bar.sync``)."""
    lanes = gl.arange(0, 32 * WARPS, gl.BlockedLayout([1], [32], [WARPS], [0]))  # [32 * WARPS]
    gl.inline_asm_elementwise(
        "bar.sync $1, $2; mov.b32 $0, 0;",
        "=r,r,r",
        [lanes * 0 + number, lanes * 0 + THREADS],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def barrier_arrive(number, THREADS: gl.constexpr, WARPS: gl.constexpr):
    """Arrive at a named barrier without waiting (``bar.arrive``)."""
    lanes = gl.arange(0, 32 * WARPS, gl.BlockedLayout([1], [32], [WARPS], [0]))  # [32 * WARPS]
    gl.inline_asm_elementwise(
        "bar.arrive $1, $2; mov.b32 $0, 0;",
        "=r,r,r",
        [lanes * 0 + number, lanes * 0 + THREADS],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def barrier_arrive_after(sums, number, THREADS: gl.constexpr):
    """Arrive at a named barrier once ``sums``, two numbers a thread, are computed.

    ptxas keeps the order of barriers and of waits for wgmma, but moves arithmetic across them.
    Without this, most of a softmax ends up after the wait that it should precede. So the barrier's
    number depends on the sums as far as ptxas can tell; no sum has the bits that change it.
    """
    gl.inline_asm_elementwise(
        """
        {
            .reg .pred odd;
            .reg .b32 number, bits;
            mov.b32 bits, $2;
            setp.eq.b32 odd, bits, 0x7f812345;
            selp.b32 number, 1, 0, odd;
            mov.b32 bits, $3;
            setp.eq.b32 odd, bits, 0x7f812345;
            selp.b32 bits, 1, 0, odd;
            or.b32 number, number, bits;
            add.s32 number, number, $4;
            bar.arrive number, $6;
            mov.b32 $0, 0;
            mov.b32 $1, 0;
        }
        """,
        "=r,=r,f,f,r,r,r,r",
        [
            sums,
            gl.full(sums.shape, number, gl.int32, sums.type.layout),
            gl.full(sums.shape, THREADS, gl.int32, sums.type.layout),
        ],
        dtype=gl.int32,
        is_pure=False,
        pack=2,
    )


@gluon.jit
def opaque(number):
    """Return a number by a shuffle, so that ptxas can derive nothing from it.

    ptxas keeps values derived from a number, such as a buffer's address, in uniform registers. The
    ptxas of Triton 3.6 reused a register that was set before a loop after that loop had been
    skipped. Values derived from a shuffle's result have to be computed again.
    """
    one = gl.arange(0, 1, gl.BlockedLayout([1], [32], [4], [0]))  # [1]
    taken = gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, -1;",
        "=r,r",
        [one + number],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    return gl.sum(taken, 0)


@gluon.jit
def locate(ticket, batch, heads, tiles, span, last, BALANCE: gl.constexpr):
    """Return ``(block, sequence, head)`` of a tile of queries of fixed-length sequences.

    Under a causal mask the walks over keys differ in length. ``BALANCE`` starts the longest first,
    within sections of as many heads (``span``) as the L2 cache holds. The last section has ``last``
    heads, at most twice ``span``, so that no small rest remains. Without ``BALANCE``, neighbouring
    tickets are blocks of one head.
    """
    if BALANCE:
        first = ticket // (span * tiles) * span
        heads_here = span
        if first >= batch * heads - last:
            first = batch * heads - last
            heads_here = last
        place = ticket - first * tiles
        block = tiles - 1 - place // heads_here
        batch_head = first + place % heads_here
    else:
        block = ticket % tiles
        batch_head = ticket // tiles
    return block, batch_head // heads, batch_head % heads


@gluon.jit
def key_tiles(
    first_row,
    len_q,
    len_k,
    window_left,
    window_right,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """Return ``(low, left, right, high)``: the tiles of keys that a block of queries sees.

    Some row sees part of the tiles ``[low, high)``, and every row sees all of ``[left, right)``.
    There is always at least one tile. The walk begins with the last one, which counts as masked.
    """
    diagonal = len_k - len_q
    last_row = gl.minimum(first_row + BLOCK_M, len_q) - 1
    last = len_k
    whole = len_k
    if HAS_RIGHT:
        last = gl.maximum(gl.minimum(last, last_row + diagonal + window_right + 1), 0)
        whole = gl.maximum(gl.minimum(whole, first_row + diagonal + window_right + 1), 0)
    high = gl.maximum(gl.cdiv(last, BLOCK_N), 1)
    low = 0
    left = 0
    if HAS_LEFT:
        first = gl.maximum(first_row + diagonal - window_left, 0)
        low = gl.minimum(first // BLOCK_N, high - 1)
        left = gl.cdiv(gl.maximum(last_row + diagonal - window_left, 0), BLOCK_N)
    right = gl.maximum(gl.minimum(whole // BLOCK_N, high - 1), low)
    left = gl.maximum(gl.minimum(left, right), low)
    return low, left, right, high


@gluon.jit
def coordinates(sequence, head, start, size, row, RAGGED: gl.constexpr):
    """Return the coordinates of row ``row`` of a sequence in a tensor map of five dimensions.

    TMA reads rows beyond the map as zeros and does not write them. A fixed-length map has the
    dimensions ``[1, batch, heads, tokens, head_dim]``. A ragged map has ``[x, y, heads, 2**30,
    head_dim]``: its row dimension ends where the sequence ends, and the first two dimensions move
    it there with strides that cancel modulo 2**64 bytes.
    """
    if RAGGED:
        where = (RAGGED_ROWS, start + size, head, RAGGED_ROWS - size + row, 0)
    else:
        where = (0, sequence, head, start + row, 0)
    return where


@gluon.jit
def field(fields, NUMBER: gl.constexpr):
    """Return one number of a tile's description; each thread holds the whole description."""
    index = gl.arange(0, FIELDS, fields.type.layout)  # [FIELDS]
    return gl.sum(gl.where(index == NUMBER, fields, 0), 0)


@gluon.jit
def barriers(COUNT: gl.constexpr, PARTIES: gl.constexpr):
    """Make ``COUNT`` mbarriers that wait for ``PARTIES`` arrivals each."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=PARTIES)
    return made


# ---- rings: the tile of turn ``n`` lies in stage ``n % STAGES``


@gluon.jit
def await_full(full, turn, pred=True, OWNERS: gl.constexpr = 1, W: gl.constexpr = 0):
    """Wait until the stage of a turn is full.

    ``full`` are the mbarriers of all stages, and of each stage one for each of its ``OWNERS``.
    """
    STAGES: gl.constexpr = full.shape[0] // OWNERS
    mbarrier.wait(full.index(turn % STAGES * OWNERS + W), turn // STAGES & 1, pred=pred)


@gluon.jit
def await_empty(empty, turn):
    """Wait until the stage of a turn is empty, as all are at first; see ``await_full``."""
    STAGES: gl.constexpr = empty.shape[0]
    mbarrier.wait(empty.index(turn % STAGES), (turn // STAGES & 1) ^ 1)


@gluon.jit
def await_readers(
    turn, FIRST: gl.constexpr, STAGES: gl.constexpr, PARTIES: gl.constexpr, WARPS: gl.constexpr = 1
):
    """Wait until the stage of a turn is empty: until its readers arrive at its named barrier.

    The ring's named barriers begin at ``FIRST``.
    """
    if turn >= STAGES:
        barrier_sync(FIRST + turn % STAGES, PARTIES, WARPS)


@gluon.jit
def drain(
    turns, FIRST: gl.constexpr, STAGES: gl.constexpr, PARTIES: gl.constexpr, WARPS: gl.constexpr = 1
):
    """Wait until all stages are empty: no named barrier may end with unmatched arrivals."""
    for back in gl.static_range(STAGES):
        if turns > back:
            barrier_sync(FIRST + (turns - 1 - back) % STAGES, PARTIES, WARPS)


# ---- announcements: the producer tells the consumers the numbers of a tile


@gluon.jit
def announce(numbers, index, count, pipeline):
    """Announce a tile, or the end; ``index`` is ``[FIELDS]``, and ``count`` counts announcements.

    ``numbers`` are the first fields in order.
    """
    await_empty(pipeline.tile_empty, count)
    fields = gl.where(index == 0, numbers[0], numbers[1])
    for i in gl.static_range(2, len(numbers)):
        fields = gl.where(index == i, numbers[i], fields)
    pipeline.fields_s.index(count % SLOTS).store(fields)
    mbarrier.arrive(pipeline.tile_full.index(count % SLOTS), count=1)


@gluon.jit
def hear(count, pipeline):
    """Wait for an announcement; return its fields, ``[FIELDS]``, which ``forget`` releases."""
    await_full(pipeline.tile_full, count)
    layout: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [4], [0])
    return pipeline.fields_s.index(count % SLOTS).load(layout)


@gluon.jit
def forget(count, pipeline):
    """Let the producer overwrite an announcement."""
    mbarrier.arrive(pipeline.tile_empty.index(count % SLOTS), count=1)
