"""Arguments of the merge: the structures that its launch passes."""

from __future__ import annotations

from typing import NamedTuple

from ..._linked.launch.entries import Constant, Number, Pointer


class MergeTensors(NamedTuple):
    """The outputs, then two to four pieces; all pieces have an LSE, or none has."""

    out_ptr: Pointer
    lse_ptr: Pointer
    out0_ptr: Pointer
    lse0_ptr: Pointer
    out1_ptr: Pointer
    lse1_ptr: Pointer
    out2_ptr: Pointer
    lse2_ptr: Pointer
    out3_ptr: Pointer
    lse3_ptr: Pointer


class Raster(NamedTuple):
    """Where a piece has tokens: ``batch`` groups of ``size``, ``step`` apart from ``begin`` on."""

    begin: Number
    size: Number
    step: Number
    batch: Number


class MergeNumbers(NamedTuple):
    """The range of tokens that is written, the size of the whole, and the rasters of the pieces."""

    first: Number
    last: Number
    tokens: Number
    heads: Number
    piece0: Raster
    piece1: Raster
    piece2: Raster
    piece3: Raster


class MergeTile(NamedTuple):
    """Constants of the merge."""

    HEAD_DIM_V: Constant
    BLOCK_DV: Constant
    BLOCK: Constant
