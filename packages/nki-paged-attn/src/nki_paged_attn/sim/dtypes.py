"""Number formats by their NKI names, and the conversions of the engines.

Compute engines convert inputs to fp32, compute in fp32, and round when they write: to the nearest,
ties to even; to integers with saturation (pages ``nki.api.shared`` and
``about-neuron/arch/neuron-features/rounding-modes``).
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from .errors import NotModelledError

Array = np.ndarray[Any, np.dtype[Any]]

NUMPY = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float8_e4m3": np.dtype(ml_dtypes.float8_e4m3),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "int32": np.dtype(np.int32),
    "uint32": np.dtype(np.uint32),
    "int16": np.dtype(np.int16),
    "uint16": np.dtype(np.uint16),
    "int8": np.dtype(np.int8),
    "uint8": np.dtype(np.uint8),
}
NAMES = {dtype: name for name, dtype in NUMPY.items()}
FLOATS = frozenset(name for name in NUMPY if "float" in name)
INTEGERS = frozenset(NUMPY) - FLOATS
# names that kernels compare dtypes with; tensors of them are not modelled
UNMODELLED = frozenset(
    {"tfloat32", "float8_e8m0fnu", "float8_e4m3fn_x4", "float8_e5m2_x4", "float4_e2m1fn_x4"}
)

# what fills memory that nothing has written, as in AWS's simulator
POISON_INTEGER = 4


def name_of(dtype: Any) -> str:
    """Return the NKI name of a dtype of NumPy, or of an NKI name itself."""
    if isinstance(dtype, str) and dtype in NUMPY:
        return dtype
    if isinstance(dtype, str) and dtype == "bool_":
        return "uint8"
    if isinstance(dtype, str) and dtype in UNMODELLED:
        raise NotModelledError(f"dtype {dtype} is not modelled [nki.language.{dtype}]")
    found = np.dtype(dtype)
    if found == np.bool_:
        return "uint8"
    if found not in NAMES:
        raise TypeError(f"dtype must be one that NKI has, {', '.join(NUMPY)}, got {dtype}")
    return NAMES[found]


def to_fp32(x: Array) -> Array:
    """Convert an engine's input to fp32."""
    return x if x.dtype == np.float32 else x.astype(np.float32)


def from_fp32(x: Array, dtype: np.dtype[Any]) -> Array:
    """Round fp32 results to the dtype of a destination."""
    if x.dtype == dtype:
        return x
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        # float64 can hold the limits of 32-bit integers, fp32 cannot
        rounded = np.rint(x.astype(np.float64))
        rounded = np.nan_to_num(rounded, nan=0.0, posinf=info.max, neginf=info.min)
        return np.clip(rounded, info.min, info.max).astype(dtype)
    return x.astype(dtype)


def convert(x: Array, dtype: np.dtype[Any]) -> Array:
    """Convert between any two dtypes: exactly if they are equal, else through fp32."""
    return x if x.dtype == dtype else from_fp32(to_fp32(x), dtype)


def poison(x: Array) -> None:
    """Fill memory as if nothing had written it: NaN, or 4 for integers."""
    x[...] = POISON_INTEGER if x.dtype.kind in "iu" else np.nan
