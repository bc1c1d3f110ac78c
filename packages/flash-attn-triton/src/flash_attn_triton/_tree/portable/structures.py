"""Structures of the portable tree kernels, in addition to ``Inputs``, ``Tile`` and the options."""

from __future__ import annotations

from typing import Any, NamedTuple


class TreeForwardTensors(NamedTuple):
    """The tensors of the forward; ``sinks_ptr`` is optional."""

    q_ptr: Any
    k_ptr: Any
    v_ptr: Any
    out_ptr: Any
    lse_ptr: Any
    sinks_ptr: Any
    cu_seqlens_ptr: Any
    parents_ptr: Any


class Tree(NamedTuple):
    """The tensors of the backward that describe the tree; they come after the gradients."""

    cu_seqlens_ptr: Any
    parents_ptr: Any


class LinkTensors(NamedTuple):
    """The tensors of ``link_kernel``."""

    parents_ptr: Any
    links_ptr: Any


class CountTensors(NamedTuple):
    """The tensors of ``count_below_kernel``."""

    cu_seqlens_ptr: Any
    parents_ptr: Any
    below_ptr: Any


class TreeNumbers(NamedTuple):
    """The numbers of a call, and the strides of its inputs in elements: token and head."""

    scale: Any
    softcap: Any
    segments: Any
    heads_q: Any
    tokens: Any
    tiles: Any  # slots for the blocks of all segments
    stride_qs: Any
    stride_qh: Any
    stride_ks: Any
    stride_kh: Any
    stride_vs: Any
    stride_vh: Any


class TreeGradientStrides(NamedTuple):
    """Strides of the incoming gradient."""

    stride_dos: Any
    stride_doh: Any


TREE_NUMBERS = (*TreeNumbers._fields, *TreeGradientStrides._fields)
# pointers to memory that the package did not allocate, which may begin anywhere
TREE_FOREIGN = (
    "q_ptr",
    "k_ptr",
    "v_ptr",
    "dout_ptr",
    "sinks_ptr",
    "cu_seqlens_ptr",
    "parents_ptr",
)
