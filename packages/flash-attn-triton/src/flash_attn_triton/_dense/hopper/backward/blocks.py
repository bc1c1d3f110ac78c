"""Find a Hopper backward program's block of keys, and the queries that see it."""

from ...._linked.hopper.compat import gl, gluon
from ...._linked.hopper.order import take_number
from ...._linked.hopper.pipeline import SEARCH_CHUNK, coordinates
from .structures import Block, Located, Walk

# places of a tile of queries that a tree's producer passes to the consumers: the row of its first
# query, and its index in the sums of dq
FIRST_ROW = gl.constexpr(0)
DQ_TILE = gl.constexpr(1)


@gluon.jit
def locate_keys(
    pid,
    tensors,
    numbers,
    BALANCE: gl.constexpr,
    IS_PART: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BY_HEAD: gl.constexpr = False,
):
    """Return the block of keys that a program owns, and its sequence.

    Under a causal mask the first blocks walk furthest. ``BALANCE`` starts them first, for as many
    heads at a time (``span``) as the cache holds. With ``IS_PART`` the launch has some of the
    sequences or heads (``Numbers``). ``BY_HEAD`` starts the sequences of a head side by side, not
    the heads of a sequence. For packed tensors ``tiles`` counts slots; a slot without a block
    gives -1.
    """
    batch, heads_k, tiles = numbers.batch, numbers.heads_k, numbers.tiles
    if tensors.cu_seqlens_k_ptr is None:
        planes = batch * heads_k
        if IS_PART:
            planes = gl.num_programs(0) // tiles
            heads_k = numbers.heads_here
        if BALANCE:
            section = pid // (numbers.span * tiles)
            place = pid % (numbers.span * tiles)
            heads_here = gl.minimum(numbers.span, planes - section * numbers.span)
            block = place // heads_here
            batch_head = section * numbers.span + place % heads_here
        else:
            block = pid % tiles
            batch_head = pid // tiles
        if BY_HEAD:
            sequence = batch_head % batch
            head = batch_head // batch
        else:
            sequence = batch_head // heads_k
            head = batch_head % heads_k
        if IS_PART:
            sequence += numbers.first_sequence
            head += numbers.first_head
        q_start = 0
        k_start = 0
        len_q = numbers.tokens_q
        len_k = numbers.tokens_k
    else:
        cu_q_ptr, cu_k_ptr = tensors.cu_seqlens_q_ptr, tensors.cu_seqlens_k_ptr
        slot = pid // heads_k if BALANCE else pid % tiles
        head = pid % heads_k if BALANCE else pid // tiles
        # the algorithm of ``schedule.find_sequence``, for a whole warpgroup
        sequence = -1
        for first in range(0, batch + 1, SEARCH_CHUNK):
            index = first + gl.arange(0, SEARCH_CHUNK, gl.BlockedLayout([1], [32], [4], [0]))
            start = gl.load(cu_k_ptr + index, mask=index <= batch, other=0)  # [SEARCH_CHUNK]
            mine = (start // BLOCK_N + index < slot) & (index <= batch)
            sequence += gl.sum(mine.to(gl.int32), 0)
        # padding before the first and after the last sequence: two more sequences without queries
        is_real = (sequence >= 0) & (sequence < batch)
        k_start = gl.load(cu_k_ptr + sequence, mask=sequence >= 0, other=0)
        k_end = gl.load(cu_k_ptr + sequence + 1, mask=sequence < batch, other=numbers.tokens_k)
        q_start = gl.load(cu_q_ptr + sequence, mask=is_real, other=0)
        q_end = gl.load(cu_q_ptr + sequence + 1, mask=is_real, other=0)
        block = slot - (k_start // BLOCK_N + sequence + 1)
        len_q = q_end - q_start
        len_k = k_end - k_start
        block = gl.where(block * BLOCK_N < len_k, block, -1)
    return Located(block, sequence, head, q_start, k_start, len_q, len_k)


@gluon.jit
def query_tiles(
    first_key,
    diagonal,
    len_q,
    len_k,
    numbers,
    HAS_ALIBI: gl.constexpr,
    OPTIONS: gl.constexpr,
    TILE: gl.constexpr,
):
    """Return the ``Walk`` over a block of keys."""
    BLOCK_M: gl.constexpr = TILE.BLOCK_M
    last_key = first_key + TILE.BLOCK_N - 1
    begin = 0
    whole = 0
    end = gl.cdiv(len_q, BLOCK_M)
    part = end
    if OPTIONS.HAS_RIGHT:
        begin = gl.maximum(first_key - diagonal - numbers.window_right, 0) // BLOCK_M
        whole = gl.cdiv(gl.maximum(last_key - diagonal - numbers.window_right, 0), BLOCK_M)
    if OPTIONS.HAS_LEFT:
        last = gl.minimum(last_key, len_k - 1) - diagonal + numbers.window_left + 1
        end = gl.minimum(end, gl.cdiv(gl.maximum(last, 0), BLOCK_M))
        part = gl.maximum(first_key - diagonal + numbers.window_left + 1, 0) // BLOCK_M
    if HAS_ALIBI:
        # in the tiles before ``whole`` distances change their sign
        whole = gl.maximum(whole, gl.cdiv(gl.maximum(last_key - diagonal, 0), BLOCK_M))
    # a block without keys, or a slot without a block: no queries
    end = gl.where(first_key < len_k, end, 0)
    begin = gl.minimum(begin, end)
    whole = gl.minimum(gl.maximum(whole, begin), end)
    if last_key >= len_k:
        whole = end
    part = gl.minimum(gl.maximum(part, whole), end)
    cross = begin
    if HAS_ALIBI and not OPTIONS.HAS_RIGHT:
        ahead = gl.maximum(first_key - diagonal + 1, 0) // BLOCK_M
        cross = gl.where(last_key < len_k, gl.minimum(gl.maximum(ahead, begin), whole), begin)
    return Walk(begin, cross, whole, part, end)


@gluon.jit
def place_in_sums(found, tensors, numbers, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Return the place of a program's block in the sums of dk and of dv; see ``sums/shares.py``."""
    head, heads = found.head_k, numbers.heads_k
    if not OPTIONS.ORDERED:
        head = head // OPTIONS.SHARES
        heads = heads // OPTIONS.SHARES
    if tensors.cu_seqlens_k_ptr is None:
        plane = found.sequence.to(gl.int64) * heads + head
        slot = found.block
    else:
        plane = head.to(gl.int64)
        slot = found.k_start // TILE.BLOCK_N + found.sequence + 1 + found.block
    return plane * numbers.tiles + slot


@gluon.jit
def find_block(maps, tensors, numbers, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Return ``(block, walk, dq_at)``: a program's block and the tiles of queries that see it.

    ``dq_at`` is the sequence's first tile in the sums of dq. Programs that share a tile of a bias
    begin side by side: the first one reads it from memory, the rest from the L2 cache.
    """
    IS_PART: gl.constexpr = maps.ds_desc is not None
    pid = gl.program_id(0)
    if OPTIONS.ORDERED:
        pid = take_number(tensors.counters_ptr)
        if IS_PART:
            # the counter also counted the programs of earlier launches
            before = numbers.first_sequence * numbers.heads_k + numbers.first_head * numbers.batch
            pid -= before * numbers.tiles
    IS_FIXED: gl.constexpr = tensors.cu_seqlens_k_ptr is None
    SHARES: gl.constexpr = maps.bias_desc is not None and IS_FIXED and not OPTIONS.ORDERED
    BALANCE: gl.constexpr = OPTIONS.HAS_RIGHT or OPTIONS.ORDERED or SHARES
    BY_HEAD: gl.constexpr = SHARES and not OPTIONS.BIAS_BATCH
    found = locate_keys(pid, tensors, numbers, BALANCE, IS_PART, TILE.BLOCK_N, BY_HEAD)
    q_start, k_start, len_q, len_k = found.q_start, found.k_start, found.len_q, found.len_k
    owner = gl.maximum(gl.minimum(found.sequence, numbers.batch - 1), 0).to(gl.int64)
    heads_q = numbers.heads_k * OPTIONS.GROUP
    if tensors.cu_seqlens_q_ptr is None:
        row_at = owner * heads_q * numbers.tokens_q
        dq_at = owner * heads_q * numbers.tiles_q
    else:
        row_at = owner * 0 + q_start
        dq_at = owner * 0 + (q_start // TILE.BLOCK_M + found.sequence + 1)
    sums_at = 0
    if OPTIONS.SHARES > 1:
        sums_at = place_in_sums(found, tensors, numbers, OPTIONS, TILE)
    unused = 0
    if tensors.seqused_k_ptr is not None:
        is_real = (found.sequence >= 0) & (found.sequence < numbers.batch)
        used = gl.load(tensors.seqused_k_ptr + found.sequence, mask=is_real, other=0)
        unused = len_k - used
        len_k = used
    shift = 0
    unseen = 0
    if OPTIONS.HAS_RIGHT:
        # cut the queries before the first one that sees a key
        shift = gl.minimum(gl.maximum(len_q - len_k - numbers.window_right, 0), len_q)
        q_start += shift
        row_at += shift
        len_q -= shift
    if OPTIONS.HAS_LEFT:
        # cut the keys before the first one that a query sees
        unseen = gl.minimum(gl.maximum(len_k - len_q - numbers.window_left, 0), len_k)
        k_start += unseen
        len_k -= unseen
    diagonal = len_k - len_q
    # a slot without a block gets keys after the end, which are neither read nor written
    last = gl.cdiv(len_k + unused, TILE.BLOCK_N)
    first_key = gl.where(found.block < 0, last, found.block) * TILE.BLOCK_N
    HAS_ALIBI: gl.constexpr = tensors.alibi_slopes_ptr is not None
    walk = query_tiles(first_key, diagonal, len_q, len_k, numbers, HAS_ALIBI, OPTIONS, TILE)
    block = Block(
        found.sequence,
        found.head_k,
        first_key,
        q_start,
        k_start,
        diagonal,
        len_q,
        len_k,
        row_at,
        numbers.tokens_q,
        shift,
        unseen,
        unused,
        sums_at,
    )
    return block, walk, dq_at


@gluon.jit
def count_turns(walk, OPTIONS: gl.constexpr):
    """Return how many tiles of queries a program walks, over all query heads of the group."""
    return (walk.end - walk.begin) * OPTIONS.GROUP


@gluon.jit
def key_coordinates(block, first_key, OPTIONS: gl.constexpr):
    """Return the coordinates of a row of the block's keys in a tensor map."""
    head = block.head_k
    if OPTIONS.SHARES > 1:
        head = head // OPTIONS.SHARES
    return coordinates(block.sequence, head, block.k_start, block.len_k, first_key, OPTIONS.RAGGED)


@gluon.jit
def gradient_coordinates(first_key, program, OPTIONS: gl.constexpr):
    """Return a row's coordinates in the map of a gradient, which also covers unused keys."""
    block = program.block
    size = block.len_k
    if program.tensors.seqused_k_ptr is not None:
        size += block.unused
    return coordinates(block.sequence, block.head_k, block.k_start, size, first_key, OPTIONS.RAGGED)


@gluon.jit
def place_of(places_s, stage, NUMBER: gl.constexpr):
    """Return the producer's ``FIRST_ROW`` or ``DQ_TILE`` of a tile of queries."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.sum(places_s.index(2 * stage + NUMBER).load(layout), 0)
