"""Arguments of the portable tree kernels: the structures that a launch passes."""

from __future__ import annotations

from typing import NamedTuple

from ..._linked.launch.entries import Foreign, Number, Pointer


class ForwardTensors(NamedTuple):
    """The tensors of the forward; ``sinks_ptr`` is optional."""

    q_ptr: Foreign
    k_ptr: Foreign
    v_ptr: Foreign
    out_ptr: Pointer
    lse_ptr: Pointer
    sinks_ptr: Foreign
    cu_seqlens_ptr: Foreign
    parents_ptr: Foreign


class Tree(NamedTuple):
    """The tensors of the backward that describe the tree, passed after the gradients."""

    cu_seqlens_ptr: Foreign
    parents_ptr: Foreign


class LinkTensors(NamedTuple):
    """The tensors of ``link_kernel``."""

    parents_ptr: Foreign
    links_ptr: Pointer


class CountTensors(NamedTuple):
    """The tensors of ``count_below_kernel``."""

    cu_seqlens_ptr: Foreign
    parents_ptr: Foreign
    below_ptr: Pointer


class Strides(NamedTuple):
    """Strides of a packed tensor, in elements."""

    token: Number
    head: Number


class Numbers(NamedTuple):
    """The numbers of a call, and the strides of its inputs."""

    scale: Number
    softcap: Number
    segments: Number
    heads_q: Number
    tokens: Number
    tiles: Number  # slots for the blocks of all segments
    q: Strides
    k: Strides
    v: Strides
    dout: Strides  # of a gradient
