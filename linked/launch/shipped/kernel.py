"""Launches of shipped kernels, through the CUDA driver's own interface (``cuda-bindings``)."""

from __future__ import annotations

import ctypes
import hashlib
import struct
import threading
from operator import itemgetter
from pathlib import Path
from typing import Any

from cuda.bindings import driver

# values between the stream and the kernel's arguments, which a launch ignores
AHEAD = 5
# bytes of shared memory that a launch gets unasked
UNASKED = 48 * 1024
MAP_BYTES, MAP_ALIGNMENT = 128, 64
# formats of ``struct``, by Triton's names of types
FORMATS = {"pointer": "Q", "i32": "i", "i64": "q", "fp32": "f", "map": f"{MAP_BYTES}s"}
# a pointer to scratch memory, which no kernel of ours takes; Triton adds them behind the others
NULL = "8x"


class Shipped:
    """A kernel of a folder, loaded on one device.

    ``run`` takes what Triton's launchers take: a grid, a stream, values that are ignored here, and
    the kernel's arguments, tensor maps written out.
    """

    is_shipped = True
    packed_metadata = None

    def __init__(self, code: bytes, entry: dict[str, Any]) -> None:
        self._context = _checked(driver.cuCtxGetCurrent())
        module = _checked(driver.cuModuleLoadData(code))
        self.function = _checked(driver.cuModuleGetFunction(module, entry["symbol"].encode()))
        self.maps: list[dict[str, Any]] = entry["maps"]
        self._module, self._shared, self._threads = module, entry["shared"], entry["threads"]
        if self._shared > UNASKED:
            wish = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked(driver.cuFuncSetAttribute(self.function, wish, self._shared))
        # where a parameter's value comes from, and where it lies in the buffer
        places = [AHEAD + place for place, _ in entry["parameters"]]
        one = slice(places[0], places[0] + 1)  # of one place, itemgetter returns no tuple
        self._values = itemgetter(*places) if len(places) > 1 else itemgetter(one)
        kinds = [FORMATS[kind] for _, kind in entry["parameters"]]
        form, offsets = _packing([*kinds, *[NULL] * entry["scratch"]])
        self._pack = struct.Struct(form).pack_into
        self._held = ctypes.create_string_buffer(struct.calcsize(form) + MAP_ALIGNMENT)
        self._start = -ctypes.addressof(self._held) % MAP_ALIGNMENT
        first = ctypes.addressof(self._held) + self._start
        self._pointers = (ctypes.c_void_p * len(offsets))(*[first + x for x in offsets])
        self._where = ctypes.addressof(self._pointers)
        # the buffer is one, threads are several
        self._lock = threading.Lock()
        self._config = _early(self._shared, self._threads) if entry["early"] else None

    def run(self, grid: int, _y: int, _z: int, stream: int, *rest: Any) -> None:
        """Launch on the current device."""
        with self._lock:
            self._pack(self._held, self._start, *self._values(rest))
            answer = self._launch(grid, stream)
            if answer[0] == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:
                # a thread that has not used the GPU
                _checked(driver.cuCtxSetCurrent(self._context))
                answer = self._launch(grid, stream)
        if answer[0]:
            _checked(answer)

    def _launch(self, grid: int, stream: int) -> tuple[Any]:
        if self._config is None:
            answer: tuple[Any] = driver.cuLaunchKernel(
                self.function, grid, 1, 1, self._threads, 1, 1, self._shared, stream, self._where, 0
            )
            return answer
        self._config.gridDimX, self._config.hStream = grid, stream
        answer = driver.cuLaunchKernelEx(self._config, self.function, self._where, 0)
        return answer


def _packing(formats: list[str]) -> tuple[str, list[int]]:
    """Return the format of a kernel's parameters one after the other, and their offsets."""
    form, offsets = "<", []
    for one in formats:
        gap = -struct.calcsize(form) % min(struct.calcsize("<" + one), MAP_ALIGNMENT)
        form += f"{gap}x" if gap else ""
        offsets.append(struct.calcsize(form))
        form += one
    return form, offsets


def _early(shared: int, threads: int) -> Any:
    """Return what launches a kernel that may begin before the one ahead of it ends."""
    config = driver.CUlaunchConfig()
    config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
    config.blockDimX, config.sharedMemBytes = threads, shared
    attribute = driver.CUlaunchAttribute()
    early = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.id = early
    attribute.value.programmaticStreamSerializationAllowed = 1
    config.attrs, config.numAttrs = [attribute], 1
    return config


def load(folder: Path, entry: dict[str, Any]) -> Shipped:
    """Load a kernel on the current device.

    Raises:
        RuntimeError: its file is not the one of its build, or the driver refuses it.
    """
    path = folder / entry["code"]
    code = path.read_bytes()
    if hashlib.sha256(code).hexdigest() != entry["sha256"]:
        raise RuntimeError(f"{path} is not the file that was built: its sha256 differs")
    return Shipped(code, entry)


def encode(x: Any, form: dict[str, Any]) -> list[Any]:
    """Encode a tensor map; return it with shape and strides, as a kernel takes it."""
    rank = len(x.shape)
    sizes = driver.cuuint64_t
    shape = [sizes(n) for n in reversed(x.shape)]
    strides = [sizes(n * form["elem_size"]) for n in reversed(x.strides[:-1])]
    box = [driver.cuuint32_t(n) for n in reversed(form["block_size"])]
    encoded = _checked(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType(form["elem_type"]),
            rank,
            x.base.data_ptr(),
            shape,
            strides,
            box,
            [driver.cuuint32_t(1)] * rank,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle(form["swizzle"]),
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return [ctypes.string_at(encoded.getPtr(), MAP_BYTES), *x.shape, *x.strides]


def _checked(answer: tuple[Any, ...]) -> Any:
    """Return what the driver answered.

    Raises:
        RuntimeError: the driver reports an error.
    """
    error, *values = answer
    if error:
        _, name = driver.cuGetErrorName(error)
        raise RuntimeError(f"the CUDA driver refuses a shipped kernel: {name.decode()}")
    return values[0] if values else None
