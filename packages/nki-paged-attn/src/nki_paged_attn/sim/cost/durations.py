"""How long an instruction occupies its engine.

The formulae are those of the instruction pages (``nki.isa.*``, cost tables), of
``nki/deep-dives/nki_perf_guide`` and of ``nki/deep-dives/nki-dma-bandwidth-guide``. They are an
estimate from documents; nothing here was timed on a device.
"""

from __future__ import annotations

from ..targets import Target, find_target
from ..trace import Instruction

# the least number of cycles between two instructions of an engine
MIN_CYCLES = 64
# reading out the reduce registers takes an instruction
READOUT = 64
# cycles before GpSimd writes the first index
GPSIMD_START = 150
# operands in steps of more than 16 bytes come at half the rate
STRIDED = 2
# bytes of a descriptor with which an engine reaches the rate that it has in practice
DESCRIPTOR_BYTES = 2048
# cycles in which GpSimd writes a descriptor: 16 bytes for each side, a word a cycle (an assumption)
DESCRIPTOR_CYCLES = 8
# nanoseconds that a sequencer takes to start a DMA whose descriptors the hardware writes
HARDWARE_DESCRIPTORS = 600.0
# nanoseconds from a semaphore to the first byte
DMA_LATENCY = 1300.0


def cycles(i: Instruction) -> int:
    """Return the cycles that an instruction occupies its engine."""
    n = i.elements * (STRIDED if "strided" in i.form else 1)
    least = max(MIN_CYCLES, n)
    wide = 4 if "fp32" in i.form else 1
    readout = READOUT if "readout" in i.form else 0
    match i.op:
        case "nc_matmul":
            return wide * max(min(MIN_CYCLES, i.stationary), n)
        case "nc_transpose" if i.engine == "tensor":
            return wide * max(i.stationary, min(MIN_CYCLES, n))
        case "tensor_tensor":
            return least if "cheap" in i.form else max(MIN_CYCLES, 2 * n)
        case "scalar_tensor_tensor":
            return least if "cheap" in i.form else max(MIN_CYCLES, 2 * n)
        case "tensor_copy_predicated":
            return max(MIN_CYCLES, 2 * n) if "both_sbuf" in i.form else least
        case "tensor_scalar_reduce":
            return least + READOUT
        case "reciprocal":
            return max(MIN_CYCLES, 8 * n)
        case "tensor_reduce" | "memset" if "cheap" in i.form:
            return max(MIN_CYCLES, n // 2)
        case "iota" | "affine_select":
            return GPSIMD_START + n
        case "dma_copy" | "dma_transpose":
            return 0
        case _:
            return least + readout


def descriptor_time(nbytes: int, target: str | Target) -> float:
    """Return the nanoseconds that one DMA engine takes for a descriptor.

    The time is a fixed part, plus the bytes at the engine's theoretical rate. The fixed part is
    chosen such that descriptors of 2 KiB reach the practical rate; longer ones count as several.
    """
    found = find_target(target)
    fixed = DESCRIPTOR_BYTES / found.dma_rate - DESCRIPTOR_BYTES / found.dma_peak
    count = max(1, -(-nbytes // DESCRIPTOR_BYTES))
    return count * fixed + nbytes / found.dma_peak


def dma_occupancy(i: Instruction, target: Target) -> float:
    """Return the nanoseconds for which a DMA occupies all queues together."""
    rows = max(i.rows, 1)
    time = rows * descriptor_time(-(-i.nbytes // rows), target) / target.dma_engines
    if i.op == "dma_transpose":
        # largest share of the throughput: from HBM, and between tiles
        time /= 0.9 if i.hbm else 0.5
    return max(time, i.nbytes / target.hbm_rate)


def descriptor_cycles(i: Instruction) -> int:
    """Return the cycles in which GpSimd writes the descriptors of a gather or scatter."""
    if i.engine != "dma" or "indirect" not in i.form:
        return 0
    return GPSIMD_START + DESCRIPTOR_CYCLES * i.rows


def duration(i: Instruction, target: Target) -> float:
    """Return the nanoseconds for which an instruction occupies its engine."""
    if i.engine == "dma":
        return dma_occupancy(i, target)
    return cycles(i) / target.clocks[i.engine]
