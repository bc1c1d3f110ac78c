"""The log of a run: one record for each instruction, with what the cost model needs."""

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
        form: what of the operands changes the cost, for instance ``fp32`` or ``both_sbuf``.
        nbytes: bytes that a DMA moves, and ``rows`` its descriptors.
        reads, writes: regions of memory, for dependences.
        hbm, is_store: the tensor in HBM that a DMA reads or writes, and whether it writes it.
        program: which of the logical core's two programs issued it.
        times: how often it runs, where an iteration of a loop was logged for several.
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
    """Where a tile lies, its bytes a partition or its banks, and the program that has it."""

    region: str
    need: int
    program: int


@dataclass(slots=True)
class Trace:
    """All instructions of a run in program order, and what memory it took.

    Attributes:
        target: name of the generation.
        tiles: of each storage on the chip, what room it needs.
        reuses: for each storage on the chip, those whose place it took.
        loops: iterations of loops of the device: first and end instruction, and how many it stands
            for; an inner loop's come before the outer's.
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
        """Return how many instructions of a name there are."""
        return sum(i.op == op for i in self.instructions)

    def dma_bytes(self, hbm: str = "") -> int:
        """Return the bytes that DMA moved, in all or to and from the HBM tensor of a name."""
        found = sum(i.nbytes * i.times for i in self.instructions if not hbm or i.hbm == hbm)
        return round(found)
