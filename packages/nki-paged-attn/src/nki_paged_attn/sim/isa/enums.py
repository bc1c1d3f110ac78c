"""Enumerations of ``nki.isa``, with the values that the documentation gives."""

from __future__ import annotations

from enum import Enum, IntEnum


class engine(Enum):
    """Engines of a NeuronCore."""

    tensor = 1
    vector = 2
    scalar = 3
    gpsimd = 4
    dma = 5
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

    none = 0
    double_row = 1


class nc_version(IntEnum):
    """Generations of NeuronCore."""

    gen2 = 2
    gen3 = 3
    gen4 = 4


class dma_engine(Enum):
    """Which DMA moves tiles between the cores of a logical core."""

    dma = 0
    gpsimd_dma = 1
