"""Enumerations of ``nki.isa``, with the values that the documentation gives."""

from __future__ import annotations

from enum import Enum, IntEnum


class engine(Enum):
    """Engines of a NeuronCore."""

    tensor = 1
    vector = 5
    scalar = 2
    gpsimd = 3
    dma = 4
    sync = 6
    unknown = 0


class reduce_cmd(IntEnum):
    """What to do with the accumulation registers."""

    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3
    load_reduce = 4


class oob_mode(IntEnum):
    """Effect of an index out of bounds: raise, or skip the row."""

    error = 0
    skip = 1


class dge_mode(IntEnum):
    """The writer of a DMA's descriptors."""

    unknown = 0
    swdge = 1
    hwdge = 2
    none = 3


class matmul_perf_mode(Enum):
    """Performance modes of TensorE."""

    none = "none"
    double_row = "double_row"


class nc_version(IntEnum):
    """Generations of NeuronCore."""

    gen2 = 2
    gen3 = 3
    gen4 = 4


class dma_engine(Enum):
    """Which DMA moves tiles between the cores of a logical core."""

    dma = 1
    gpsimd_dma = 2
