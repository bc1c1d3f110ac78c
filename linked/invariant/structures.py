"""Structures that the functions of the portable kernels pass on; see ``arguments.py``."""

from __future__ import annotations

from typing import Any, NamedTuple


class Place(NamedTuple):
    """A tile of rows; ``tile`` is negative if there is none."""

    sequence: Any
    tile: Any
    q_start: Any
    seqlen_q: Any
    k_start: Any
    seqlen_k: Any


class Rows(NamedTuple):
    """The queries of a tile; some see keys of ``[first, last)``.

    All of them see ``[full_first, full_last)``, which may be empty.
    """

    q: Any
    position: Any
    first: Any
    last: Any
    full_first: Any
    full_last: Any


class Source(NamedTuple):
    """Addresses of the keys of a sequence and a head; keys from ``context`` on are dense."""

    k_ptr: Any
    v_ptr: Any
    table_ptr: Any
    new_k_ptr: Any
    new_v_ptr: Any
    context: Any
    seqlen_k: Any
    k_descale: Any
    v_descale: Any


class Softmax(NamedTuple):
    """Sums of weighted values, sums of weights and base-2 maxima over some keys."""

    acc: Any
    l_i: Any
    m_i: Any
