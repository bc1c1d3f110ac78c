"""What the functions of the Hopper backward hand to each other, as structures.

Upper-case fields are constants of the build: such a structure is passed on as ``gl.constexpr``.
Lower-case fields are values at run time, and hold no constants. The host passes ``Maps``,
``Tensors``, ``Numbers``, ``Options`` and ``Tile``, and the entry takes their fields as its
parameters, in this order.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Maps(NamedTuple):
    """The tensor maps of TMA, and where dq is summed, as the host passes them.

    Those of narrow panels are None where nothing is cut, and two others are optional.
    """

    q_desc: Any
    k_desc: Any
    v_desc: Any
    dout_desc: Any
    dk_desc: Any
    dv_desc: Any
    q_narrow_desc: Any
    k_narrow_desc: Any
    v_narrow_desc: Any
    dout_narrow_desc: Any
    dk_narrow_desc: Any
    dv_narrow_desc: Any
    bias_desc: Any
    ds_desc: Any  # where gradients of scores are kept: see ``keep_gradient``
    sums: Any  # of dq: a map, or a pointer; see ``adds_by_threads``
    sums_narrow: Any  # beside a map, that of narrow panels


class Panels(NamedTuple):
    """The same in the kernel: of each tensor a tuple of maps; see ``panels.py``."""

    q_descs: Any
    k_descs: Any
    v_descs: Any
    dout_descs: Any
    dk_descs: Any
    dv_descs: Any
    bias_desc: Any
    ds_desc: Any
    sums: Any  # a tuple likewise, or a pointer, to which the threads add


class Tensors(NamedTuple):
    """The other tensors of a call."""

    lse2_ptr: Any  # base-2 LSE: [batch, heads_q, tokens_q], packed [heads_q, tokens_q]
    delta_ptr: Any  # of the same shape
    alibi_slopes_ptr: Any  # None, or [heads_q] of each sequence
    rng_state_ptr: Any  # None without dropout
    cu_seqlens_q_ptr: Any  # None, or [batch + 1]
    cu_seqlens_k_ptr: Any
    seqused_k_ptr: Any  # None, or [batch]
    # 0 before the launch. Where ``ORDERED``: how many programs have begun, then how often each half
    # of a tile of dq was added to. Where ``SHARES_DS``: for each block of keys of those that share
    # a bias, how many programs have begun, and how many tiles of its gradient are stored
    counters_ptr: Any


class Numbers(NamedTuple):
    """The numbers of a call."""

    scale: Any
    softcap: Any
    window_left: Any
    window_right: Any
    batch: Any
    heads_k: Any
    tokens_q: Any  # of a sequence, packed of all
    tokens_k: Any
    tiles: Any  # blocks of keys of a sequence, packed slots for those of all
    tiles_q: Any  # tiles of queries, likewise
    span: Any  # heads that are walked together
    keep_scale: Any  # of what dropout keeps; see ``_reference/philox.py``
    dropout_threshold: Any  # draws below it are dropped
    stride_alibi_b: Any
    # where gradients of scores are kept: which sequences and key heads a launch has
    first_sequence: Any
    first_head: Any
    heads_here: Any  # key heads of each sequence
    # and how many neighbours add theirs up in memory
    sequences_together: Any
    heads_together: Any  # key heads


class Options(NamedTuple):
    """What the call asks for."""

    GROUP: Any  # query heads per key head
    HAS_LEFT: Any
    HAS_RIGHT: Any
    HAS_SOFTCAP: Any
    RAGGED: Any  # form of the tensor maps; see ``coordinates``
    APART_Q: Any  # queries need not begin where those do that share a draw; see ``dropout.py``
    APART_K: Any  # nor need keys
    BIAS_BATCH: Any  # which dimensions of a bias are not broadcast
    BIAS_HEADS: Any
    BIAS_ROWS: Any
    ORDERED: Any  # dq repeats bit for bit; see ``ordered``
    ADDS_DS: Any  # gradients of scores are added to what is there; see ``BiasSum``
    SHARES_DS: Any  # those of programs that share a bias are added up; see ``shared_bias.py``
    CLEARS_DS: Any  # and zeros are stored where a mask hides whole tiles of them


class Tile(NamedTuple):
    """Sizes of the tiles and of the rings."""

    BLOCK_M: Any  # queries of a step
    BLOCK_N: Any  # keys of a program
    HEAD_DIM: Any  # columns of queries and keys; of the wide panel if there is a narrow one
    NARROW: Any  # columns of the narrow panel, or 0; see ``panels.py``
    HEAD_DIM_V: Any  # likewise of values and output gradients
    NARROW_V: Any
    STAGES_Q: Any  # of the ring of queries
    STAGES_O: Any  # of the ring of output gradients
    STAGES_B: Any  # of the ring of the bias
    MAKES_DK: Any  # and dq; if not, the launch makes dv alone
    MAKES_DV: Any


class Located(NamedTuple):
    """Which block of keys a program owns, and where its sequence lies."""

    block: Any  # -1 for a slot without a block
    sequence: Any
    head_k: Any
    q_start: Any  # tokens ahead of the sequence
    k_start: Any
    len_q: Any
    len_k: Any


class Block(NamedTuple):
    """A program's block of keys, in a sequence without the tokens that neither see nor are seen."""

    sequence: Any
    head_k: Any
    first_key: Any
    q_start: Any
    k_start: Any
    diagonal: Any  # the key that faces query 0
    len_q: Any
    len_k: Any
    row_at: Any  # where the LSE and delta of the sequence begin, of head 0
    row_pitch: Any  # from head to head
    ahead_q: Any  # tokens that were left out ahead of query 0, and of key 0
    ahead_k: Any
    unused: Any  # keys behind the used ones, whose gradients are 0


class Walk(NamedTuple):
    """The tiles of queries that see a block of keys: four parts, from each field to the next."""

    begin: Any  # from here up to ``end`` they see some key of it
    cross: Any  # from here up to ``whole`` a mask is needed, or keys on either side are faced
    whole: Any  # from here up to ``part`` they see all of them
    part: Any
    end: Any


class Pipeline(NamedTuple):
    """Buffers in shared memory, and the mbarriers at which consumers wait until they are full.

    The producer waits at named barriers until a stage is empty; see ``EMPTY``. Tiles lie in panels:
    their buffers are tuples of one or two; see ``panels.py``.
    """

    q_s: Any  # [STAGES_Q, 1, 1, 1, BLOCK_M, HEAD_DIM]
    k_s: Any  # [BLOCK_N // 64, 1, 1, 1, 64, HEAD_DIM]
    v_s: Any  # [BLOCK_N // 64, 1, 1, 1, 64, HEAD_DIM_V]
    dout_s: Any  # [STAGES_O, 1, 1, 1, BLOCK_M, HEAD_DIM_V]
    ds_s: Any  # [2 * BLOCK_N // 64, 64, BLOCK_M]: gradients of scores
    lse2_s: Any  # [STAGES_Q, BLOCK_M]
    delta_s: Any  # [STAGES_O, BLOCK_M], negated
    q_full: Any  # one for each stage
    k_full: Any
    v_full: Any
    dout_full: Any  # one for each stage


class ValuePipeline(NamedTuple):
    """As much of ``Pipeline`` as dv alone takes."""

    q_s: Any
    k_s: Any
    dout_s: Any
    lse2_s: Any
    q_full: Any
    k_full: Any
    dout_full: Any


class BiasRing(NamedTuple):
    """Tiles of the bias in shared memory, and the mbarriers that say when a stage is full."""

    tiles: Any  # [STAGES_B * BLOCK_N // 64, 1, 1, 1, BLOCK_M, 64], of one row [.., 1, 64]
    full: Any


class Order(NamedTuple):
    """What the warps that add to memory in turn share with the warpgroups that compute.

    Where ``ORDERED`` they add to dq, each its half. Where ``SHARES_DS`` one keeps gradients of
    scores.
    """

    counters_ptr: Any  # one for each half of a tile of dq, or the two of a block; see ``Tensors``
    full: Any  # of ``dq_s``, one for each half, or of ``ds_s``, one for even steps, one for odd
    empty: Any


class Program(NamedTuple):
    """What the roles of a warp-specialised program share.

    ``gl.warp_specialize`` hands them to the warps in the order of the fields.
    """

    maps: Panels
    pipeline: Pipeline
    # [2, BLOCK_M * HEAD_DIM // 64, 32], a tuple of panels: dq on its way out, up to head dim 128
    dq_s: Any
    p_s: Any  # [2, 64, BLOCK_M]: probabilities, above head dim 128
    bias: Any  # None, or its ``BiasRing``
    dq_at: Any  # where the sequence's sums of dq begin: a row of the map, or an address
    tensors: Tensors
    numbers: Numbers
    block: Block
    dq_pitch: Any  # from head to head in the sums of dq
    walk: Walk
    # None, or [2 * STAGES_Q, 1]: where each tile of queries lies, if only the producer knows; then
    # the walk counts tiles of all heads
    places_s: Any
    order: Any  # None, or an ``Order``


class Head(NamedTuple):
    """What is a query head's own."""

    dq_at: Any  # where its sums of dq begin
    slope: Any  # ALiBi's, in base 2, or 0
    dropout: Any  # its ``DropoutKey``, or 0


class Carried(NamedTuple):
    """What a warpgroup carries from tile to tile of queries, up to head dim 128."""

    dk: Any  # [64, HEAD_DIM], a tuple of panels
    dv: Any  # [64, HEAD_DIM_V], likewise
    s: Any  # [64, BLOCK_M]: scores of the next tile
    turn: Any  # tiles that are done
    last: Any  # where the last tile's part of dq belongs
