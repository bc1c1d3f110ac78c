"""The log of a run: a record for each instruction, with the cost model's inputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

# (storage, first byte, end byte): within a partition on the chip, within the tensor in HBM
Region = tuple[int, int, int]


@dataclass(slots=True)
class Instruction:
    """One instruction.

    Attributes:
        op: name of the call, such as ``nc_matmul``.
        engine: ``tensor``, ``vector``, ``scalar``, ``gpsimd`` or ``dma``.
        elements: elements per partition that stream through the engine.
        stationary: free size of the stationary operand; partitions of a transposed tile.
        form: a property of the operands that changes the cost, such as ``fp32`` or ``both_sbuf``.
        nbytes: bytes that a DMA moves; ``rows``: its descriptors.
        reads, writes: regions of memory, for dependences.
        hbm, is_store: the tensor in HBM that a DMA reads or writes, and whether it writes it.
        program: which of the logical core's two programs issued it.
        times: how often it runs, if one iteration of a loop was logged for several.
    """

    op: str
    engine: str
    elements: int
    stationary: int = 0
    form: frozenset[str] = frozenset()
    nbytes: int = 0
    rows: int = 0
    reads: tuple[Region, ...] = ()
    writes: tuple[Region, ...] = ()
    program: int = 0
    times: float = 1.0
    hbm: str = ""
    is_store: bool = False


class Tile(NamedTuple):
    """A tile's memory, its bytes a partition or its banks, and the program that owns it."""

    region: str
    need: int
    program: int


@dataclass(slots=True)
class Trace:
    """All instructions of a run in program order, and the memory that it took.

    Attributes:
        target: name of the generation.
        tiles: the room of each storage on the chip.
        reuses: for each storage on the chip, the storages whose place it took.
        loops: iterations of device loops: first and end instruction, and how many iterations it
            stands for; an inner loop's come before the outer's.
        sbuf_peak, psum_peak: most bytes per partition, and most banks, in use at once.
    """

    target: str
    instructions: list[Instruction] = field(default_factory=list)
    tiles: dict[int, Tile] = field(default_factory=dict)
    reuses: dict[int, tuple[int, ...]] = field(default_factory=dict)
    loops: list[tuple[int, int, float]] = field(default_factory=list)
    sbuf_peak: int = 0
    psum_peak: int = 0

    def count(self, op: str) -> int:
        """Return the number of instructions with a name."""
        return sum(i.op == op for i in self.instructions)

    def dma_bytes(self, hbm: str = "") -> int:
        """Return the bytes that DMA moved, in total or to and from the HBM tensor with a name."""
        found = sum(i.nbytes * i.times for i in self.instructions if not hbm or i.hbm == hbm)
        return round(found)
