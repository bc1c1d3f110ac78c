"""Structures that the launches of the Hopper backward pass."""

from __future__ import annotations

from typing import NamedTuple

from ...._linked.launch.entries import Constant, Foreign, Map, Number, Pointer

# ---- ``backward_kernel``


class PanelMaps(NamedTuple):
    """The tensor maps of one panel of each tensor; see ``panels.py``."""

    q: Map
    k: Map
    v: Map
    dout: Map
    dk: Map
    dv: Map


class Maps(NamedTuple):
    """All tensor maps, and the sums of dq; maps from ``narrow`` on may be None."""

    wide: PanelMaps
    narrow: PanelMaps
    bias: Map
    ds: Map  # stored gradients of scores; see ``keep_gradient``
    sums: Map  # of dq: a map, or a pointer; see ``adds_by_threads``
    sums_narrow: Map  # if ``sums`` is a map: the map of the narrow panels


class Tensors(NamedTuple):
    """The other tensors of a call."""

    lse2_ptr: Pointer  # base-2 LSE: [batch, heads_q, tokens_q], packed [heads_q, tokens_q]
    delta_ptr: Pointer  # the same shape
    alibi_slopes_ptr: Foreign = None  # None, or [heads_q] for each sequence
    rng_state_ptr: Foreign = None  # without dropout None
    cu_seqlens_q_ptr: Foreign = None  # None, or [batch + 1]
    cu_seqlens_k_ptr: Foreign = None
    seqused_k_ptr: Foreign = None  # None, or [batch]
    # 0 before the launch. With ``ORDERED``: the number of programs that have begun, then for each
    # half of a tile of dq the number of additions to it. With ``SHARES_DS``: for each block of keys
    # of a shared bias, the programs that have begun and the tiles of its gradient that are stored
    counters_ptr: Pointer = None
    # None, or with ``SHARES`` the sums, 0 before the launch
    dk_sums_ptr: Pointer = None
    dv_sums_ptr: Pointer = None


class Numbers(NamedTuple):
    """The numbers of a call."""

    scale: Number
    softcap: Number
    window_left: Number
    window_right: Number
    batch: Number
    heads_k: Number  # key heads, each counted once for each of its ``SHARES``
    tokens_q: Number  # of a sequence; packed: of all sequences
    tokens_k: Number
    tiles: Number  # blocks of keys of a sequence; packed: slots for the blocks of all sequences
    tiles_q: Number  # the same for tiles of queries
    span: Number  # heads that are walked together
    keep_scale: Number  # factor of kept probabilities; see ``_reference/philox.py``
    dropout_threshold: Number  # draws below it are dropped
    stride_alibi_b: Number
    # with stored gradients of scores: the sequences and key heads of a launch
    first_sequence: Number
    first_head: Number
    heads_here: Number  # key heads of each sequence
    # with shared gradients of scores: how many neighbours add theirs up in memory
    sequences_together: Number
    heads_together: Number  # key heads


class Options(NamedTuple):
    """Constants of a call's signature."""

    GROUP: Constant  # query heads that a program walks
    HAS_LEFT: Constant
    HAS_RIGHT: Constant
    HAS_SOFTCAP: Constant
    RAGGED: Constant  # the tensor maps are ragged; see ``coordinates``
    SHARES: Constant = (
        1  # programs that share the query heads of a key head; see ``sums/shares.py``
    )
    # a tile may begin inside a group of queries, or of keys, with one draw; see ``dropout.py``
    APART_Q: Constant = False
    APART_K: Constant = False
    BIAS_BATCH: Constant = False  # which dimensions of a bias are not broadcast
    BIAS_HEADS: Constant = False
    BIAS_ROWS: Constant = False
    ORDERED: Constant = False  # dq repeats bit for bit; see ``order.py``
    ADDS_DS: Constant = False  # gradients of scores are added to earlier ones; ``BiasSum``
    SHARES_DS: Constant = False  # programs add up the gradients of a bias: ``shared_bias.py``
    CLEARS_DS: Constant = False  # zeros are stored where a mask hides whole tiles of gradients


class Tile(NamedTuple):
    """Sizes of the tiles and of the rings."""

    BLOCK_M: Constant  # queries per step
    BLOCK_N: Constant  # keys per program
    HEAD_DIM: Constant  # columns of queries and keys; of the wide panel if there is a narrow one
    NARROW: Constant  # columns of the narrow panel, or 0; see ``panels.py``
    HEAD_DIM_V: Constant  # the same two for values and output gradients
    NARROW_V: Constant
    STAGES_Q: Constant  # of the ring of queries
    STAGES_O: Constant  # of the ring of output gradients
    STAGES_B: Constant  # of the ring of the bias
    MAKES_DK: Constant  # the launch makes dk and dq; if not, only dv
    MAKES_DV: Constant


# ---- ``round_kernel``


class RoundingTensors(NamedTuple):
    """Tensors of ``round_kernel``; "own" is the side of the gradient's rows, queries or keys."""

    sums_ptr: Pointer
    gradient_ptr: Pointer
    cu_seqlens_own_ptr: Foreign
    cu_seqlens_other_ptr: Foreign
    seqused_k_ptr: Foreign


class RoundingNumbers(NamedTuple):
    """Numbers of ``round_kernel``."""

    scale: Number
    window: Number  # on the right of queries, on the left of keys
    batch: Number
    heads: Number
    tokens_own: Number
    tokens_other: Number
    tiles: Number


class RoundingOptions(NamedTuple):
    """Constants of ``round_kernel``."""

    HAS_WINDOW: Constant
    BLOCK: Constant  # rows of a tile
    HEAD_DIM: Constant
    WIDE: Constant  # columns of the panels
    NARROW: Constant
    OF_KEYS: Constant = False  # the gradient is of keys or values, not of queries
    COLUMN_PARTS: Constant = 1  # warpgroups that divided the columns of each panel
    SHARES: Constant = 1  # places whose sums are added up


# ---- ``sum_bias_kernel``


class BiasSumTensors(NamedTuple):
    """Tensors of ``sum_bias_kernel``."""

    ds_ptr: Pointer
    dbias_ptr: Pointer


class BiasSumNumbers(NamedTuple):
    """Numbers of ``sum_bias_kernel``."""

    keep_scale: Number
    window_right: Number
    batch: Number
    heads_q: Number
    tokens_q: Number
    tokens_k: Number
    tiles_q: Number
    tiles_k: Number


class BiasSumOptions(NamedTuple):
    """Constants of ``sum_bias_kernel``."""

    HAS_RIGHT: Constant
    BIAS_BATCH: Constant
    BIAS_HEADS: Constant
    ACCESS: Constant  # elements per memory access
    BLOCK_M: Constant
    BLOCK_N: Constant


def has_panel_each(wide: int, narrow: int, block_m: int, block_n: int) -> bool:
    """Tell whether each warpgroup of the backward makes one panel of dq, not half of each.

    Narrow products are then not halved; each half would read all gradients of scores, and 16
    columns take as long as 48. Wider panels would take too many registers.
    """
    return narrow > 0 and wide == 64 and block_m == 64 and block_n == 128
