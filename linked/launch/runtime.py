"""Launches of Triton kernels, and the alignment that the kernels rely on.

Integers and pointers are never specialised: new lengths compile nothing, and strides do not change
rounding. Kernels rely instead on aligned rows, which ``aligned`` ensures.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from attn_common import round_up
from torch import Tensor

from ..host.forms import ACCESS_BYTES, interpreted
from ..host.internals import current_device, current_stream
from . import builds
from .kernels import Kernel
from .shipped.folders import NO_PROFILER, find, is_shipped

MAX_INT32 = 2**31 - 1
# token counts, or strides of a gradient, for which a launcher keeps its arguments
MAX_COUNTS = 256

# compiled kernels, by all that a compilation depends on
_compiled: dict[tuple[Any, ...], Any] = {}


class Ready(NamedTuple):
    """A compiled kernel and the values needed to call it."""

    kernel: Any
    device: int
    # one None per constexpr: the launcher expects these arguments
    padding: tuple[None, ...]
    run: Callable[..., None]
    stream: Callable[[int], int]
    # ``launch_enter_hook.calls`` of it is not empty while a profiler listens
    profiler: Any


class Launch:
    """A kernel with its tile and constants, to be called with a grid and arguments.

    Devices and dtypes of the tensors, and which are None, must be the same in every call. A kernel
    that was shipped compiled is launched as it is; another is compiled by the first call. From the
    second call on it calls the compiled kernel itself: Triton's own look-up reads every argument
    again and takes several times as long as the rest of the launch. With an untested version of
    Triton or PyTorch every call takes that look-up.
    """

    def __init__(self, kernel: Kernel, constants: dict[str, Any]) -> None:
        """Take a kernel and its keyword arguments: constexprs and compiler options.

        A structure of constants is passed field by field.
        """
        self._kernel = kernel
        self._constants = constants
        # by ``variant_of`` a call
        self._ready: dict[Any, Ready] = {}
        # dtypes and devices of the first call's tensors
        self._form: list[Any] | None = None
        # the last launch's numbers, an object that launchers keep, and its kernel
        self._last: tuple[tuple[float, ...], Ready] | None = None

    def __call__(
        self, grid: int, tensors: tuple[Tensor | None, ...], numbers: tuple[float, ...]
    ) -> None:
        """Launch a one-dimensional grid on the first tensor's device, unless it is empty."""
        if grid == 0:
            return
        last = self._last
        if last is not None and last[0] is numbers:
            ready = last[1]
        else:
            variant = variant_of(tensors, numbers)
            found = self._ready.get(variant)
            if found is None:
                with on_device_of(tensors[0]):
                    found = self._look_up(variant, grid, tensors, numbers)
                if found is None:
                    return
            ready = found
            if torch.version.hip is None:  # on CUDA a variant depends only on the numbers
                self._last = numbers, ready
        if current_device() != ready.device:
            with torch.cuda.device(ready.device):
                self(grid, tensors, numbers)
        elif ready.profiler.launch_enter_hook.calls:
            ready.kernel[grid, 1, 1](*self._arguments(tensors), *numbers, *ready.padding)
        else:
            kernel = ready.kernel
            ready.run(
                grid,
                1,
                1,
                ready.stream(ready.device),
                kernel.function,
                kernel.packed_metadata,
                None,
                None,
                None,
                *self._places(tensors, ready),
                *numbers,
                *ready.padding,
            )

    def _look_up(
        self,
        variant: Any,
        grid: int,
        tensors: tuple[Tensor | None, ...],
        numbers: tuple[float, ...],
    ) -> Ready | None:
        """Return the kernel to call; None if it was launched or noted here."""
        dtypes = [None if t is None else t.dtype for t in tensors]
        form = self._kernel, variant, *self._constants.items(), *dtypes
        if builds.note(self, form, tensors, numbers):
            return None
        self._hold_form(tensors)
        if interpreted():
            from .compiler.launches import interpret

            interpret(self._kernel, grid, self._arguments(tensors), numbers, self._constants)
            return None
        key = tensors[0].device.index, *form
        known = _compiled.get(key)
        if known is None:
            known = find(form, tensors[0].device)
        if known is None:
            from .compiler.launches import launch, tell

            start = time.monotonic()
            builds.wait(key)
            arguments = self._arguments(tensors)
            kernel = launch(self._kernel, grid, arguments, numbers, self._constants)
            tell(self._kernel.name, time.monotonic() - start)
            if kernel is None:
                return None
        else:
            kernel = known
        _compiled[key] = kernel
        ready = self._ready[variant] = self._prepare(kernel, tensors, numbers)
        return None if known is None else ready

    def _prepare(
        self, kernel: Any, tensors: tuple[Tensor | None, ...], numbers: tuple[float, ...]
    ) -> Ready:
        """Return what further launches of a compiled kernel need."""
        device = tensors[0].get_device()
        if is_shipped(kernel):
            return Ready(kernel, device, (), kernel.run, current_stream, NO_PROFILER)
        from .compiler.launches import padding_of, profiler, stream

        padding = padding_of(self._kernel, len(tensors) + len(numbers))
        return Ready(kernel, device, padding, kernel.run, stream(), profiler())

    def _hold_form(self, tensors: tuple[Tensor | None, ...]) -> None:
        """Raise if tensors differ in dtype or device from those of the first call."""
        form = [None if t is None else (t.dtype, t.device) for t in tensors]
        if self._form is None:
            self._form = form
        elif form != self._form:
            raise TypeError(
                f"a launch of {self._kernel.name} must have tensors like those of its first "
                f"call, {self._form}, got {form}"
            )

    def build(
        self, tensors: tuple[Any, ...], numbers: tuple[float, ...], is_apart: bool = False
    ) -> Any:
        """Compile such a launch for the current device, in another process if ``is_apart``.

        Return the kernel; None if it was shipped, or nothing was compiled.
        """
        from .compiler.launches import build

        arguments = self._arguments(tensors)
        return build(self._kernel, arguments, numbers, self._constants, is_apart)

    def _arguments(self, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments that Triton's own launch takes for the tensors."""
        return tensors

    def _places(self, tensors: tuple[Any, ...], _ready: Ready) -> list[Any]:
        """Return the arguments that a compiled kernel takes for the tensors: addresses.

        For a tensor, Triton would ask the driver whether the GPU may read it.
        """
        return [t.data_ptr() if t.__class__ is Tensor else t for t in tensors]


def variant_of(tensors: tuple[Tensor | None, ...], numbers: tuple[float, ...]) -> Any:
    """Return what a compilation depends on besides dtypes: integer widths, on AMD of offsets."""
    wide = max(numbers) > MAX_INT32 and tuple(n > MAX_INT32 for n in numbers)
    if torch.version.hip is None:
        return wide
    # on AMD, offsets into storage below 2 GiB have 32 bits
    large = (t is not None and t.untyped_storage().nbytes() > MAX_INT32 for t in tensors)
    return wide, *large


def row_bytes(x: Tensor) -> int:
    """Return the alignment in bytes of every row of a tensor that ``aligned`` returned."""
    return math.gcd(x.shape[-1] * x.element_size(), ACCESS_BYTES)


def is_aligned(x: Tensor) -> bool:
    """Return whether columns have unit stride and rows are aligned to ``row_bytes``."""
    if x.is_contiguous():
        return x.data_ptr() % ACCESS_BYTES == 0
    if x.data_ptr() % ACCESS_BYTES != 0 or (x.stride(-1) != 1 and x.shape[-1] != 1):
        return False
    unit = row_bytes(x) // x.element_size()
    return all(
        stride % unit == 0 or size <= 1
        for size, stride in zip(x.shape[:-1], x.stride(), strict=False)
    )


def aligned(x: Tensor) -> Tensor:
    """Return the tensor, or a copy, with unit column stride and aligned rows."""
    return x if is_aligned(x) else x.clone(memory_format=torch.contiguous_format)


def compact(x: Tensor) -> Tensor:
    """Return the tensor, or a copy, contiguous and aligned."""
    if x.is_contiguous() and x.data_ptr() % ACCESS_BYTES == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def has_whole_rows(x: Tensor) -> bool:
    """Return whether a row is a whole number of accesses of ``ACCESS_BYTES``."""
    return x.shape[-1] * x.element_size() % ACCESS_BYTES == 0


def whole_rows(x: Tensor) -> Tensor:
    """Return the tensor aligned and padded with columns of 0 to a whole number of accesses.

    Narrower reads are not asynchronous copies. In loops with such reads on Hopper, ptxas 12.8 reads
    uniform registers before they are set: wrong products and reads out of range.
    """
    return aligned(widened(x, round_up(x.shape[-1], ACCESS_BYTES // x.element_size())))


def widened(x: Tensor, width: int) -> Tensor:
    """Return the tensor padded with columns of 0 to a width."""
    if x.shape[-1] == width:
        return x
    padded = x.new_zeros((*x.shape[:-1], width))
    padded[..., : x.shape[-1]].copy_(x)
    return padded


def first_columns(x: Tensor, width: int) -> Tensor:
    """Return a result without its padding columns."""
    return x if x.shape[-1] == width else x[..., :width].contiguous()


def dense(x: Tensor | None) -> Tensor | None:
    """Return a small tensor contiguous, or None."""
    return None if x is None else x.contiguous()


def token_strides(x: Tensor) -> tuple[int, int, int]:
    """Return the strides of batch (or page), token and head; a packed tensor has no batch."""
    return x.stride()[:3] if x.ndim == 4 else (0, *x.stride()[:2])  # type: ignore[return-value]


def on_device_of(x: Tensor) -> Any:
    """Make ``x``'s device the current one, on which Triton launches."""
    if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)
