"""Structures that the device functions of the portable kernels pass on."""

from __future__ import annotations

from typing import Any, NamedTuple


class Scores(NamedTuple):
    """Parameters of the scores that all heads of a sequence share."""

    scale: Any  # with the descales
    numbers: Any  # a launch's: softcap, and of dropout
    mask: Any
    bias: Any  # strides of the bias; None without one
    rng_state_ptr: Any  # None without dropout
    spans: Any = None  # of the rows of a tile; for ``dkdv_walk`` the pointer to a sequence's


class Head(NamedTuple):
    """Values that differ between query heads."""

    slope: Any  # None without ALiBi
    bias_ptr: Any
    dropout: Any  # a ``DropoutKey``, or None


class DropoutKey(NamedTuple):
    """The key of a head's draws."""

    word: Any  # key of Philox
    row: Any  # xored with rows
    col: Any  # xored with columns


class Keys(NamedTuple):
    """Keys and values of one head and sequence."""

    k_ptr: Any
    v_ptr: Any
    stride_ks: Any
    stride_vs: Any


class Queries(NamedTuple):
    """Queries of one sequence with their gradients and extras, for all heads of the group."""

    q_ptr: Any
    dout_ptr: Any
    lse2_ptr: Any  # with ``out_ptr``: the LSE to base e
    delta_ptr: Any  # with ``out_ptr``: dlse, or None
    out_ptr: Any  # contiguous; None if an earlier kernel made ``lse2`` and ``delta``
    q: Any  # strides
    dout: Any  # strides
    rows: Any  # stride of heads in ``lse2`` and ``delta``
    alibi_slopes_ptr: Any  # None without ALiBi
    bias_ptr: Any
    bias_head: Any  # stride of heads in the bias
    sequence: Any
    head_k: Any
    heads_q: Any
