"""The three generations as data: limits, abilities, clocks and bandwidths.

Figures are those of the documentation pages ``nki/guides/architecture/trainium_inferentia2_arch``,
``trainium2_arch`` and ``trainium3_arch``, of ``nki.isa.nc_matmul``, and, for DMA, of
``nki/deep-dives/nki-dma-bandwidth-guide``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

KIB = 1024


@dataclass(frozen=True)
class Target:
    """One generation of NeuronCore.

    Attributes:
        name: the instance family, ``trn1``, ``trn2`` or ``trn3``.
        generation: 2, 3 or 4.
        sbuf_bytes: usable bytes of SBUF per partition.
        moving_free: the largest free size of a moving operand, by the dtype of ``dst``.
        clocks: GHz of each engine.
        dma_rate: bytes per nanosecond that one of the DMA engines moves in practice, and
            ``dma_peak`` in theory.
        hbm_rate: bytes per nanosecond of HBM that one core gets when all cores read.
        programs: cores of a logical core by default.
        has_wide_matmul: whether a product may write more than one bank of PSUM.
    """

    name: str
    generation: int
    sbuf_bytes: int
    moving_free: dict[str, int]
    clocks: dict[str, float]
    dma_rate: float
    dma_peak: float
    hbm_rate: float
    matmul_dtypes: frozenset[str]
    row_tiles: tuple[int, ...]
    has_exact_transpose: bool
    has_scalar_copy: bool
    has_scalar_arithmetic: bool
    has_constant_bias: bool
    has_range_select: bool
    has_exponential: bool
    has_hwdge: bool
    has_indirect_transpose: bool
    accumulates_on_memset: bool
    has_dma_priority: bool
    has_vector_offset: bool
    has_wide_matmul: bool
    programs: int
    partitions: int = 128
    psum_banks: int = 8
    psum_bank_bytes: int = 2 * KIB
    psum_align: int = 4
    stationary_free: int = 128
    dma_engines: int = 16


_MATMUL = frozenset({"float8_e4m3", "float8_e5m2", "bfloat16", "float16", "float32"})

GEN2 = Target(
    name="trn1",
    generation=2,
    # the part that kernels may use; the same in all generations
    sbuf_bytes=180_224,
    moving_free={"float32": 512},
    clocks={"tensor": 2.8, "vector": 1.12, "scalar": 1.4, "gpsimd": 1.4},
    dma_rate=17.0,
    dma_peak=27.2,
    hbm_rate=410.0,
    matmul_dtypes=_MATMUL,
    row_tiles=(64,),
    has_exact_transpose=False,
    has_scalar_copy=False,
    has_scalar_arithmetic=False,
    has_constant_bias=False,
    has_range_select=False,
    has_exponential=False,
    has_hwdge=False,
    has_indirect_transpose=False,
    accumulates_on_memset=False,
    has_dma_priority=False,
    has_vector_offset=False,
    has_wide_matmul=False,
    programs=1,
)
GEN3 = Target(
    name="trn2",
    generation=3,
    sbuf_bytes=212_984,
    moving_free={"float32": 512},
    clocks={"tensor": 2.4, "vector": 0.96, "scalar": 1.2, "gpsimd": 1.2},
    dma_rate=23.0,
    dma_peak=27.2,
    hbm_rate=362.0,
    matmul_dtypes=_MATMUL,
    row_tiles=(64, 32),
    has_exact_transpose=True,
    has_scalar_copy=True,
    has_scalar_arithmetic=True,
    has_constant_bias=True,
    has_range_select=True,
    has_exponential=False,
    has_hwdge=True,
    has_indirect_transpose=True,
    accumulates_on_memset=False,
    has_dma_priority=False,
    has_vector_offset=True,
    has_wide_matmul=False,
    programs=2,
)
GEN4 = Target(
    name="trn3",
    generation=4,
    sbuf_bytes=245_752,
    moving_free={"float32": 4096, "bfloat16": 8192},
    clocks={"tensor": 2.4, "vector": 1.2, "scalar": 1.2, "gpsimd": 1.2},
    dma_rate=33.0,
    dma_peak=38.4,
    hbm_rate=590.0,
    matmul_dtypes=_MATMUL | {"float8_e4m3fn"},
    row_tiles=(64, 32),
    has_exact_transpose=True,
    has_scalar_copy=True,
    has_scalar_arithmetic=True,
    has_constant_bias=True,
    has_range_select=True,
    has_exponential=True,
    has_hwdge=True,
    has_indirect_transpose=True,
    accumulates_on_memset=True,
    has_dma_priority=True,
    has_vector_offset=True,
    has_wide_matmul=True,
    programs=2,
)

TARGETS = {
    "trn1": GEN2,
    "inf2": GEN2,
    "gen2": GEN2,
    "trn2": GEN3,
    "gen3": GEN3,
    "trn3": GEN4,
    "gen4": GEN4,
}


def default_target() -> str:
    """Return the generation to simulate: ``NEURON_PLATFORM_TARGET_OVERRIDE``, or ``trn2``."""
    return find_target(os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")).name


# the instance type of a machine of EC2, such as trn2.48xlarge
PRODUCT = Path("/sys/devices/virtual/dmi/id/product_name")


def device_target() -> str | None:
    """Return the generation of this machine's device, as far as anything says it.

    ``NEURON_PLATFORM_TARGET_OVERRIDE``, or the machine's instance type.
    """
    named = os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE")
    if named is not None:
        return find_target(named).name
    try:
        family = PRODUCT.read_text().strip().partition(".")[0]
    except OSError:
        return None
    return find_target(family).name if family in TARGETS else None


def find_target(target: str | Target) -> Target:
    """Return a target by name."""
    if isinstance(target, Target):
        return target
    if target not in TARGETS:
        raise ValueError(f"target must be one of {', '.join(TARGETS)}, got {target!r}")
    return TARGETS[target]
