"""Structures that the launches of the tree kernels on Hopper pass."""

from __future__ import annotations

from typing import NamedTuple

from ..._linked.launch.entries import Foreign, Number, Pointer


class ForwardNumbers(NamedTuple):
    """Numbers of ``tree_forward_kernel``."""

    scale: Number
    softcap: Number
    segments: Number
    heads_q: Number
    tokens: Number
    total: Number  # an upper bound of the number of blocks of queries


class BackwardTensors(NamedTuple):
    """Tensors of ``tree_backward_kernel`` that have no map."""

    lse2_ptr: Pointer  # base-2 LSE: [heads_q, tokens]
    delta_ptr: Pointer  # [heads_q, tokens]
    cu_seqlens_ptr: Foreign
    parents_ptr: Foreign
    links_ptr: Pointer  # [2, segments]; see ``link_kernel``
    below_ptr: Pointer  # [segments]; see ``count_below_kernel``
    dk_sums_ptr: Pointer  # None, or sums of dk and dv; see ``sums/shares.py`` of the dense backward
    dv_sums_ptr: Pointer


class BackwardNumbers(NamedTuple):
    """Numbers of ``tree_backward_kernel``."""

    scale: Number
    softcap: Number
    segments: Number
    heads_k: Number
    tokens: Number
    tiles_q: Number  # slots for the tiles of queries of all segments
    tiles_k: Number  # slots for the blocks of keys of all segments
