"""The ``nki.language`` namespace of the simulator."""

from __future__ import annotations

from typing import Any

from ..calls import named
from ..dtypes import name_of
from ..errors import NotModelledError, is_integer, require
from ..memory.machine import machine, running
from ..memory.tensor import DynamicSlice, NkiTensor
from ..targets import Target, default_target, find_target
from . import functions, objects, values
from .loops import dynamic_range as dynamic_range
from .loops import fori_loop as fori_loop
from .loops import no_reorder as no_reorder
from .loops import while_loop as while_loop

float32 = "float32"
bfloat16 = "bfloat16"
float16 = "float16"
float8_e4m3 = "float8_e4m3"
float8_e4m3fn = "float8_e4m3fn"
float8_e5m2 = "float8_e5m2"
int32 = "int32"
uint32 = "uint32"
int16 = "int16"
uint16 = "uint16"
int8 = "int8"
uint8 = "uint8"
bool_ = "uint8"
tfloat32 = "tfloat32"
float8_e8m0fnu = "float8_e8m0fnu"
float8_e4m3fn_x4 = "float8_e4m3fn_x4"
float8_e5m2_x4 = "float8_e5m2_x4"
float4_e2m1fn_x4 = "float4_e2m1fn_x4"

sbuf = "sbuf"
psum = "psum"
hbm = "private_hbm"
private_hbm = "private_hbm"
shared_hbm = "shared_hbm"

NKIObject = objects.NKIObject
MemoryRegion = objects.MemoryRegion
DType = str
ds = DynamicSlice
# loops run while a kernel is traced, so all ranges are Python's
affine_range = range
sequential_range = range
static_range = range


FUNCTIONS = ("ceil", "cos", "floor", "logical_not", "softmax", "tan", "trunc")


@named("nl")
def ndarray(
    shape: Any, dtype: Any, buffer: str = sbuf, name: str = "", address: Any = None
) -> NkiTensor:
    """Allocate a tensor; its contents are undefined until something writes them.

    Args:
        address: on the chip, (first partition, byte within a partition). Default: any.
    """
    page = "nki.language.ndarray"
    known = isinstance(shape, (tuple, list)) and all(is_integer(n) for n in shape)
    require(known, "nl.ndarray", "shape", "must be a tuple of integers", shape, page)
    sizes = tuple(int(n) for n in shape)
    regions = (sbuf, psum, private_hbm, shared_hbm)
    require(buffer in regions, "nl.ndarray", "buffer", f"must be one of {regions}", buffer, page)
    on_chip = buffer in (sbuf, psum)
    require(
        len(sizes) >= (2 if on_chip else 1) and min(sizes) >= 1,
        "nl.ndarray",
        "shape",
        "must have sizes from 1, and on the chip 2 dimensions or more",
        sizes,
        page,
    )
    require(
        address is None
        or (
            on_chip
            and isinstance(address, (tuple, list))
            and [*map(is_integer, address)] == [True] * 2
        ),
        "nl.ndarray",
        "address",
        "must be (partition, byte) of a tensor on the chip",
        address,
        f"{page}, address",
    )
    kind = name_of(dtype)
    state = machine()
    if buffer == shared_hbm:
        return NkiTensor.whole(state.share(name, sizes, kind))
    place = None if address is None else (int(address[0]), int(address[1]))
    return NkiTensor.whole(state.allocate(name, sizes, kind, buffer, place))


class _TileSize:
    """Sizes of the hardware that a kernel runs on; outside of a kernel, of the default target."""

    pmax = 128
    gemm_stationary_fmax = 128
    psum_num_banks = 8
    bn_stats_fmax = 512
    psum_min_align = 4
    sbuf_min_align = 1

    @property
    def _target(self) -> Target:
        state = running()
        return find_target(default_target()) if state is None else state.target

    @property
    def gemm_moving_fmax(self) -> int:
        return self._target.moving_free["float32"]

    @property
    def psum_bank_fmax_bytes(self) -> int:
        return self._target.psum_bank_bytes

    @property
    def psum_bank_fmax(self) -> int:
        return self._target.psum_bank_bytes // 4

    psum_fmax = psum_bank_fmax

    @property
    def sbuf_fmax_bytes(self) -> int:
        return self._target.sbuf_bytes

    total_available_sbuf_size = sbuf_fmax_bytes

    @property
    def sbuf_fmax(self) -> int:
        return self._target.sbuf_bytes // 4

    @property
    def sbuf_size_bytes(self) -> int:
        return self._target.sbuf_bytes * self._target.partitions

    def __getattr__(self, name: str) -> int:
        raise NotModelledError(f"nl.tile_size.{name} is not modelled [nki.language.tile_size]")


tile_size = _TileSize()


@named("nl")
def program_id(axis: int = 0) -> int:
    """Return which program of the logical core this is."""
    require(axis == 0, "nl.program_id", "axis", "must be 0", axis, "nki/get-started/about/lnc")
    return machine().program


@named("nl")
def num_programs(axes: Any = 0) -> int:
    """Return how many programs the logical core runs."""
    page = "nki/get-started/about/lnc"
    known = axes in (None, 0, (0,), [0])
    require(known, "nl.num_programs", "axes", "must be 0", axes, page)
    return machine().programs


def program_ndim() -> int:
    """Return the number of dimensions of the grid: 1, or 0 without a grid."""
    return 1 if machine().programs > 1 else 0


@named("nl")
def device_print(text: str, x: NkiTensor) -> None:
    """Print a tensor from within a kernel."""
    print(text, x.array())  # noqa: T201


def is_hbm(buffer: str) -> bool:
    return buffer in (private_hbm, shared_hbm)


def is_on_chip(buffer: str) -> bool:
    return buffer in (sbuf, psum)


def is_psum(buffer: str) -> bool:
    return buffer == psum


def is_sbuf(buffer: str) -> bool:
    return buffer == sbuf


values.COMPOSED["sin"] = functions.sin


def __getattr__(name: str) -> Any:
    if name in FUNCTIONS:
        return getattr(functions, name)
    return getattr(values, name)
