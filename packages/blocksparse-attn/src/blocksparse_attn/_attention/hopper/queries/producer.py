"""The copying warp: it takes the next tile of queries and copies its queries, keys and values."""

from ...._linked.hopper.compat import copy_in, gl, gluon, mbarrier
from ...._linked.hopper.pipeline import EMPTY, SLOTS, barrier_sync, coordinates
from .schedule import (
    FIELDS,
    NO_BLOCK,
    half_places,
    locate,
    members_alive,
    pick,
    places,
    steps_of,
    survey,
)

# threads at the barrier of a stage: two warpgroups and the copying warp
PARTIES = gl.constexpr(2 * 128 + 32)


@gluon.jit
def next_tile(ticket, units, tensors, numbers, OPTIONS: gl.constexpr):
    """Return the first tile that holds queries, from tile number ``ticket`` on."""
    tile, is_alive = locate(ticket, units, tensors, numbers, OPTIONS)
    if tensors.cu_seqlens_q_ptr is not None:
        while (not is_alive) & (ticket < numbers.total):
            ticket = gl.num_programs(0) + gl.atomic_add(tensors.ticket_ptr, 1, sem="relaxed")
            tile, is_alive = locate(ticket, units, tensors, numbers, OPTIONS)
    return tile


@gluon.jit
def fetch(walk, step, alive, tensors, OPTIONS: gl.constexpr):
    """Load the key blocks of a step; the walk takes half steps first, then whole steps.

    A block that no row of the tile sees becomes ``NO_BLOCK``.
    """
    PER_STEP: gl.constexpr = OPTIONS.BLOCK_N // OPTIONS.BLOCK_K
    lane = gl.arange(0, PER_STEP, gl.BlockedLayout([PER_STEP], [32], [1], [0]))  # [PER_STEP]
    at, there = places(walk, steps_of(walk, OPTIONS) - 1 - (step - walk.halves), lane)
    if OPTIONS.HALVES:
        HALF: gl.constexpr = PER_STEP // 2
        half_at, half_there = half_places(walk, step, lane % HALF, lane // HALF, HALF)
        at = gl.where(step < walk.halves, half_at, at)
        there = gl.where(step < walk.halves, half_there, there)
    items = gl.load(tensors.items_ptr + at, mask=there, other=NO_BLOCK)
    if OPTIONS.ROW_MEMBERS > 1:
        members = gl.load(tensors.members_ptr + at, mask=there, other=0)
        items = gl.where((members & alive) != 0, items, NO_BLOCK)
    return items


@gluon.jit
def copy_blocks(OF_V: gl.constexpr, items, where, turn, tensors, pipeline, OPTIONS: gl.constexpr):
    """Copy a step's blocks of keys, or of values, panel by panel, once their stage is empty."""
    STAGES: gl.constexpr = OPTIONS.STAGES_V if OF_V else OPTIONS.STAGES_K
    ROOM: gl.constexpr = EMPTY + OPTIONS.STAGES_K if OF_V else EMPTY
    PANELS: gl.constexpr = (OPTIONS.HEAD_DIM_V if OF_V else OPTIONS.HEAD_DIM) // 64
    PER_STEP: gl.constexpr = items.shape[0]
    if OF_V:
        desc, boxes_s, full = tensors.v_desc, pipeline.v_boxes, pipeline.v_full
    else:
        desc, boxes_s, full = tensors.k_desc, pipeline.k_boxes, pipeline.k_full
    stage = turn % STAGES
    if turn >= STAGES:
        barrier_sync(ROOM + stage, PARTIES, 1)
    x, sequence, head, row, _ = where
    mbarrier.expect(full.index(stage), desc.block_type.nbytes * (PANELS * PER_STEP))
    for i in gl.static_range(PER_STEP):
        first = row + pick(items, i) * OPTIONS.BLOCK_K
        for panel in gl.static_range(PANELS):
            box = boxes_s.index((stage * PANELS + panel) * PER_STEP + i)
            copy_in(desc, (x, sequence, head, first, panel * 64), full.index(stage), box)


@gluon.jit
def copy_queries(tile, first_row, count, tensors, pipeline, OPTIONS: gl.constexpr):
    """Copy each warpgroup's queries, and dout for dq, once it has read those of the last tile."""
    head = tile.unit * OPTIONS.HEADS
    for w in gl.static_range(2):
        # the map treats packed queries as one sequence; results of the next sequence's rows are
        # not written
        owner = 0 if tensors.cu_seqlens_q_ptr is not None else tile.sequence
        if OPTIONS.HEADS == 1:
            at = (0, owner, head, tile.q_start + first_row + w * OPTIONS.ROWS, 0)
        else:
            at = (0, owner, head + w, tile.q_start + first_row, 0)
        full = pipeline.q_full.index(w)
        mbarrier.wait(pipeline.q_empty.index(w), (count & 1) ^ 1)
        if tensors.dout_desc is None:
            mbarrier.expect(full, tensors.q_desc.block_type.nbytes)
        else:
            mbarrier.expect(
                full, tensors.q_desc.block_type.nbytes + tensors.dout_desc.block_type.nbytes
            )
        copy_in(tensors.q_desc, at, full, pipeline.q_s.index(w))
        if tensors.dout_desc is not None:
            copy_in(tensors.dout_desc, at, full, pipeline.dout_s.index(w))


@gluon.jit
def announce(tile, walk, first_row, index, count, pipeline, OPTIONS: gl.constexpr):
    """Send the numbers of a tile of queries to the warpgroups, in the order of ``Announced``."""
    TOLD: gl.constexpr = 16 if OPTIONS.HALVES else 11
    slot = count % SLOTS
    mbarrier.wait(pipeline.tile_empty.index(slot), (count // SLOTS & 1) ^ 1)
    head = tile.unit * OPTIONS.HEADS
    told = (head, first_row, tile.sequence, tile.q_start, tile.len_q, tile.len_k) + walk
    fields = head
    for i in gl.static_range(1, TOLD):
        fields = gl.where(index == i, told[i], fields)
    pipeline.fields_s.index(slot).store(fields)
    mbarrier.arrive(pipeline.tile_full.index(slot), count=1)


@gluon.jit
def say_the_end(index, count, turn, turn_v, pipeline, OPTIONS: gl.constexpr):
    """Signal that no tile is left, and meet the warpgroups at the barriers of all stages."""
    STAGES_V: gl.constexpr = OPTIONS.STAGES_V
    slot = count % SLOTS
    mbarrier.wait(pipeline.tile_empty.index(slot), (count // SLOTS & 1) ^ 1)
    pipeline.fields_s.index(slot).store(index * 0 - 1)
    mbarrier.arrive(pipeline.tile_full.index(slot), count=1)
    # no warpgroup may be left waiting at a barrier
    for back in gl.static_range(OPTIONS.STAGES_K):
        if turn > back:
            barrier_sync(EMPTY + (turn - 1 - back) % OPTIONS.STAGES_K, PARTIES, 1)
    for back in gl.static_range(STAGES_V):
        if turn_v > back:
            barrier_sync(EMPTY + OPTIONS.STAGES_K + (turn_v - 1 - back) % STAGES_V, PARTIES, 1)


@gluon.jit
def produce(tensors, numbers, pipeline, OPTIONS: gl.constexpr):
    """Copy tiles of queries, keys and values into shared memory, in the order of their use.

    The forward uses a step's values one step after its keys; dq needs both at once.
    """
    POSITIONS: gl.constexpr = 2 * OPTIONS.ROWS // OPTIONS.HEADS
    RAGGED: gl.constexpr = tensors.cu_seqlens_q_ptr is not None
    IS_FORWARD: gl.constexpr = tensors.dout_desc is None
    units = numbers.heads_q // OPTIONS.HEADS
    index = gl.arange(0, FIELDS, gl.BlockedLayout([1], [32], [1], [0]))  # [FIELDS]
    count = 0  # tiles of queries
    turn = 0  # tiles of keys
    turn_v = 0  # tiles of values
    tile = next_tile(gl.program_id(0), units, tensors, numbers, OPTIONS)
    walk = survey(tile, tensors, numbers, OPTIONS)
    ticket = tile.ticket
    while ticket < numbers.total:
        head = tile.unit * OPTIONS.HEADS
        first_row = tile.index * POSITIONS - tile.diagonal
        announce(tile, walk, first_row, index, count, pipeline, OPTIONS)

        where = coordinates(
            tile.sequence, head // OPTIONS.GROUP, tile.k_start, tile.len_k, 0, RAGGED
        )
        alive = members_alive(tile, POSITIONS, OPTIONS)
        items = fetch(walk, 0, alive, tensors, OPTIONS)
        before = items * 0  # not ``items``: Triton would treat both names as one variable
        for step in range(walk.halves + steps_of(walk, OPTIONS)):
            # load the next step's entries while this step's keys wait for a free stage
            coming = fetch(walk, step + 1, alive, tensors, OPTIONS)
            copy_blocks(False, items, where, turn, tensors, pipeline, OPTIONS)
            turn += 1
            if not IS_FORWARD:
                copy_blocks(True, items, where, turn_v, tensors, pipeline, OPTIONS)
                turn_v += 1
            if step == 0:
                copy_queries(tile, first_row, count, tensors, pipeline, OPTIONS)
                # the next tile's number arrives during the copies of keys
                ticket = gl.num_programs(0) + gl.atomic_add(tensors.ticket_ptr, 1, sem="relaxed")
            elif IS_FORWARD:
                copy_blocks(True, before, where, turn_v, tensors, pipeline, OPTIONS)
                turn_v += 1
            before = items
            items = coming
        count += 1
        # look up the next tile's walk while the last values wait for a free stage
        tile = next_tile(ticket, units, tensors, numbers, OPTIONS)
        walk = survey(tile, tensors, numbers, OPTIONS)
        ticket = tile.ticket
        if IS_FORWARD:
            copy_blocks(True, before, where, turn_v, tensors, pipeline, OPTIONS)
            turn_v += 1
    say_the_end(index, count, turn, turn_v, pipeline, OPTIONS)
    if ticket == numbers.total + gl.num_programs(0) - 1:
        # the last program to ask resets the counter for the next launch
        gl.atomic_xchg(tensors.ticket_ptr, 0, sem="relaxed")
