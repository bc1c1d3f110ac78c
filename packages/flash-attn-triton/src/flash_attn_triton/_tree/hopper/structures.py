"""Structures that device functions of the tree kernels on Hopper pass on to each other."""

from __future__ import annotations

from typing import Any, NamedTuple

from .arguments import BackwardNumbers, BackwardTensors


class Run(NamedTuple):
    """The tokens of one segment: a run of keys, or of queries."""

    segment: Any  # -1: none
    start: Any
    length: Any


class Counted(NamedTuple):
    """The numbers of tiles of keys in all segments above a block's own."""

    tails: Any  # tiles that a segment does not fill
    wholes: Any  # tiles that a segment fills


class Path(NamedTuple):
    """The keys that a warpgroup's rows of a block see: of their own segment, and all above."""

    own: Any  # the ``Walk`` over their own segment
    tails: Any  # number of tiles that a segment above does not fill
    wholes: Any  # number of tiles that all rows see whole, in all segments


class Descent(NamedTuple):
    """Values with which the producer of the backward finds the segments below."""

    tensors: BackwardTensors
    numbers: BackwardNumbers
    own: Any  # the ``Walk`` over the queries of the block's own segment, of one head


class Place(NamedTuple):
    """A tile of queries in the list of a program."""

    head: Any
    row: Any  # first row, within the run
    first_row: Any  # first row as the mask counts it
    dq_tile: Any  # index of the tile in the sums of dq
