"""Structures that device functions of the Hopper backward pass on to each other."""

from __future__ import annotations

from typing import Any, NamedTuple

from .arguments import Numbers, Tensors


class Panels(NamedTuple):
    """``Maps`` in the kernel: a tuple of maps for each tensor; see ``panels.py``."""

    q_descs: Any
    k_descs: Any
    v_descs: Any
    dout_descs: Any
    dk_descs: Any
    dv_descs: Any
    bias_desc: Any
    ds_desc: Any
    sums: Any  # a tuple of maps, or a pointer, to which the threads add


class Located(NamedTuple):
    """The block of keys that a program owns, and its sequence."""

    block: Any  # -1 for a slot without a block
    sequence: Any
    head_k: Any
    q_start: Any  # tokens before the sequence
    k_start: Any
    len_q: Any
    len_k: Any


class Block(NamedTuple):
    """A program's block of keys; leading queries that see no key, and unseen keys, are cut."""

    sequence: Any
    head_k: Any
    first_key: Any
    q_start: Any
    k_start: Any
    diagonal: Any  # the key that query 0 stands at
    len_q: Any
    len_k: Any
    row_at: Any  # index of the sequence's first LSE and delta, of head 0
    row_pitch: Any  # stride of heads in LSE and delta
    ahead_q: Any  # tokens cut before query 0, and before key 0
    ahead_k: Any
    unused: Any  # keys after ``seqused_k``, whose gradients are 0
    sums_at: Any = 0  # with ``SHARES``: the block's place in the sums of dk and of dv


class Walk(NamedTuple):
    """The tiles of queries that see some key of a block: four parts, from each field to the next.

    Tiles [cross, whole) and [part, end) need a mask, or with ALiBi have keys on both sides; tiles
    [whole, part) see all keys. Tiles [begin, cross) exist only with ALiBi: they see all keys, and
    come before them.
    """

    begin: Any
    cross: Any
    whole: Any
    part: Any
    end: Any


class Pipeline(NamedTuple):
    """Buffers in shared memory, and the mbarriers that signal the consumers that one is full.

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
    """The fields of ``Pipeline`` that a launch only for dv needs."""

    q_s: Any
    k_s: Any
    dout_s: Any
    lse2_s: Any
    q_full: Any
    k_full: Any
    dout_full: Any


class BiasRing(NamedTuple):
    """Tiles of the bias in shared memory, and the mbarriers that signal a full stage."""

    tiles: Any  # [STAGES_B * BLOCK_N // 64, 1, 1, 1, BLOCK_M, 64], of one row [.., 1, 64]
    full: Any


class Order(NamedTuple):
    """Counters and mbarriers between the warps that add to memory in order and the warpgroups.

    With ``ORDERED`` two warps add to dq, each one half. With ``SHARES_DS`` one warp stores or adds
    gradients of scores.
    """

    counters_ptr: Any  # one for each half of a tile of dq, or two for a block; see ``Tensors``
    full: Any  # of ``dq_s``, one for each half; or of ``ds_s``, one for even steps, one for odd
    empty: Any


class Program(NamedTuple):
    """State that the roles of a warp-specialised program share.

    ``gl.warp_specialize`` hands it to the warps in the order of the fields.
    """

    maps: Panels
    pipeline: Pipeline
    # [2, BLOCK_M * HEAD_DIM // 64, 32], a tuple of panels: dq before TMA adds it, to head dim 128
    dq_s: Any
    p_s: Any  # [2, 64, BLOCK_M]: probabilities, above head dim 128
    bias: Any  # None, or a ``BiasRing``
    dq_at: Any  # begin of the sequence's sums of dq: a row of the map, or an address
    tensors: Tensors
    numbers: Numbers
    block: Block
    dq_pitch: Any  # stride of heads in the sums of dq
    walk: Walk
    # None, or [2 * STAGES_Q, 1]: the place of each tile of queries, if only the producer knows it;
    # then the walk counts tiles of all heads
    places_s: Any
    order: Any  # None, or an ``Order``


class Head(NamedTuple):
    """Values that differ between query heads."""

    dq_at: Any  # begin of the head's sums of dq
    slope: Any  # of ALiBi, in base 2, or 0
    dropout: Any  # a ``DropoutKey``, or 0


class Carried(NamedTuple):
    """State that a warpgroup carries from tile to tile of queries, up to head dim 128."""

    dk: Any  # [64, HEAD_DIM], a tuple of panels
    dv: Any  # [64, HEAD_DIM_V], a tuple of panels
    s: Any  # [64, BLOCK_M]: scores of the next tile
    turn: Any  # tiles that are done
    last: Any  # place of the last tile's part of dq
