"""Tensor maps for TMA, Hopper's copy engine, and launches that encode each map once.

A map holds a tensor's address and layout. Triton's launcher searches all arguments of a call for
maps and has the driver encode each, which takes a third of the host's time for a call. PyTorch's
allocator mostly reuses addresses, so encoded maps are kept by address.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..launch.runtime import Launch, Ready, is_aligned
from ..launch.shipped.folders import is_shipped
from .sizes import RAGGED_ROWS

# coordinates of a ragged tensor map; see ``pipeline.coordinates``
RAGGED_EXTENT = 0x7FFF0000
RAGGED_STRIDE = 1 << 34
# arguments of a launcher before the kernel's, as ``Launch`` passes them
BASE = 9
# addresses for which a form keeps encoded maps
MAX_KNOWN = 256

# whether this thread has used a GPU
_thread = threading.local()


class TensorMap:
    """A tensor and its map, as an argument of a launch."""

    # of Triton's own class of maps
    padding = "zero"
    round_f32_to_tf32 = False

    def __init__(self, base: Tensor, form: MapForm) -> None:
        self.base = base
        self.form = form

    # what is read to encode the map

    @property
    def shape(self) -> list[int]:
        return self.form.shape

    @property
    def strides(self) -> list[int]:
        return self.form.strides

    @property
    def device(self) -> torch.device:
        return self.base.device

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    def get_device(self) -> int:
        return self.base.get_device()

    @property
    def public(self) -> Any:
        """The same map as an object of Triton's own class, with which kernels are compiled."""
        from .compat import TensorDescriptor, default_layout

        block = self.form.block_shape
        layout = default_layout(tuple(block), self.dtype)
        return TensorDescriptor(self.base, self.shape, self.strides, block, layout)

    def encoded(self, shipped: bool) -> list[Any] | None:
        """Return the encoded map of an earlier tensor of the form at the same address."""
        return self.form.encoded[shipped].get(self.base.data_ptr())

    def keep(self, encoded: list[Any], shipped: bool) -> None:
        """Keep an encoded map for later tensors of the form at the same address."""
        known = self.form.encoded[shipped]
        if len(known) >= MAX_KNOWN:
            known.clear()
        known[self.base.data_ptr()] = encoded


class MapForm:
    """How tensors of one form are mapped.

    Tensors of one form differ only in data and, if packed, in the number of tokens.

    Args:
        x: a tensor of the form, ``[batch, tokens, heads, width]`` or ``[tokens, heads, width]``.
        rows: rows of a box, over all its heads.
        columns: columns of a box.
        ragged: clip at the end of any sequence of a packed tensor; see ``pipeline.coordinates``.
        heads: heads of a box.
    """

    kind = TensorMap

    def __init__(self, x: Tensor, rows: int, columns: int, *, ragged: bool, heads: int = 1) -> None:
        self._copies = not is_mappable(x)
        if self._copies:
            x = torch.empty(x.shape, dtype=x.dtype, device="meta")
        *_, tokens, all_heads, width = x.shape
        batch, head, token = _strides(x)
        if ragged:
            shape = [RAGGED_EXTENT, RAGGED_EXTENT, all_heads, RAGGED_ROWS, width]
            strides = [RAGGED_STRIDE - token, token, head, token, 1]
        else:
            shape = [1, x.shape[0], all_heads, tokens, width]
            strides = [batch * x.shape[0], batch, head, token, 1]
        block = (1, 1, heads, rows // heads, columns)
        self.shape = shape
        self.strides = strides
        self.block_shape = list(block)
        # by address: as compiled kernels take them, and as shipped ones do
        self.encoded: tuple[dict[int, list[Any]], dict[int, list[Any]]] = {}, {}

    def __call__(self, x: Tensor) -> TensorMap:
        """Map a tensor of the form, or a copy of it if TMA cannot read it in place."""
        return self.kind(self.base_of(x), self)

    @property
    def is_in_place(self) -> bool:
        """Whether tensors of the form are mapped without a copy."""
        return not self._copies

    def base_of(self, x: Tensor) -> Tensor:
        """Return the tensor that is mapped: ``x`` itself or a copy."""
        return x.clone(memory_format=torch.contiguous_format) if self._copies else x


def is_mappable(x: Tensor) -> bool:
    """Return whether TMA can read a tensor in place: aligned and nowhere expanded."""
    return is_aligned(x) and min(_strides(x)) > 0


def _strides(x: Tensor) -> tuple[int, int, int]:
    """Return strides of batch, head and token; dimensions of size 1 get a dense tensor's stride."""
    *sizes, width = x.shape
    strides = list(x.stride()[:-1])
    dense = width
    for axis in reversed(range(len(sizes))):
        if sizes[axis] <= 1:
            strides[axis] = dense
        dense *= max(1, sizes[axis])
    if x.ndim == 3:
        token, head = strides
        return max(1, x.shape[0]) * token, head, token
    batch, token, head = strides
    return batch, head, token


class MapLaunch(Launch):
    """A launch whose first tensors are maps (``TensorMap``), each encoded once."""

    def _look_up(
        self,
        variant: Any,
        grid: int,
        tensors: tuple[Tensor | None, ...],
        numbers: tuple[float, ...],
    ) -> Ready | None:
        wake(tensors[0].device)  # Triton may encode maps now
        return super()._look_up(variant, grid, tensors, numbers)

    def _prepare(
        self, kernel: Any, tensors: tuple[Tensor | None, ...], numbers: tuple[float, ...]
    ) -> Ready:
        ready = super()._prepare(kernel, tensors, numbers)
        if not is_shipped(kernel):
            encode_once(kernel)
            return ready
        from ..launch.shipped.kernel import encode

        launch = EncodedLaunch(kernel.run, kernel.maps, encode, BASE, shipped=True)
        return ready._replace(run=launch)

    def _arguments(self, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(x.public if isinstance(x, TensorMap) else x for x in tensors)

    def _places(self, tensors: tuple[Any, ...], ready: Ready) -> list[Any]:
        places: list[Any] = []
        shipped = is_shipped(ready.kernel)
        for x in tensors:
            if x is None:
                places.append(None)
            elif x.__class__ is Tensor:
                places.append(x.data_ptr())
            else:
                encoded = x.encoded(shipped)
                if encoded is None:  # this launch encodes it
                    return super()._places(tensors, ready)
                places += encoded
        return places


class MappingLaunch(MapLaunch):
    """A launch that maps its first tensors itself, each by its ``MapForm``; None: not mapped.

    A tensor at a known address needs no new map.
    """

    def __init__(
        self, kernel: Any, constants: dict[str, Any], forms: tuple[MapForm | None, ...]
    ) -> None:
        super().__init__(kernel, constants)
        self._forms = forms
        self._is_in_place = all(form is None or form.is_in_place for form in forms)

    def _mapped(self, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments, with a map instead of each tensor that has a form."""
        bases: dict[int, Tensor] = {}  # a tensor, or its copy, may have several maps
        mapped: list[Any] = []
        for form, x in zip(self._forms, tensors, strict=False):
            if form is None:
                mapped.append(x)
                continue
            if id(x) not in bases:
                bases[id(x)] = form.base_of(x)
            mapped.append(form.kind(bases[id(x)], form))
        return *mapped, *tensors[len(mapped) :]

    def _arguments(self, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        return super()._arguments(self._mapped(tensors))

    def _places(self, tensors: tuple[Any, ...], ready: Ready) -> list[Any]:
        if not self._is_in_place:  # the maps hold the copies until they are read
            return Launch._places(self, self._mapped(tensors), ready)
        places: list[Any] = []
        shipped = is_shipped(ready.kernel)
        for x, form in zip(tensors, self._forms):  # noqa: B905 (``strict`` takes time)
            if form is None:
                places.append(None if x is None else x.data_ptr())
            else:
                encoded = form.encoded[shipped].get(x.data_ptr())
                if encoded is None:  # the launch encodes it
                    return super()._places(self._mapped(tensors), ready)
                places += encoded
        places += [None if x is None else x.data_ptr() for x in tensors[len(self._forms) :]]
        return places


def wake(device: torch.device) -> None:
    """Use the GPU in this thread: the driver encodes maps only in threads that have used it.

    Autograd's threads may not have.
    """
    if device.type == "cuda" and not getattr(_thread, "is_awake", False):
        torch.zeros(1, device=device)
        _thread.is_awake = True


def encode_once(kernel: Any) -> None:
    """Let the launches of a compiled kernel use encoded maps instead of encoding them again.

    In Triton 3.6 to 3.9 the launcher that takes encoded maps is a closure variable of the function
    that encodes them. If a later version keeps it elsewhere, maps are encoded in every launch.
    """
    encoding = getattr(kernel.run, "launch", None)
    if inspect.isfunction(encoding):
        parts = {**encoding.__globals__, **inspect.getclosurevars(encoding).nonlocals}
        if {"launcher", "tensordesc_meta", "make_tensordesc_arg"} <= parts.keys():
            kernel.run.launch = EncodedLaunch(
                parts["launcher"],
                parts["tensordesc_meta"],
                parts["make_tensordesc_arg"],
                parts.get("_BASE_ARGS_FORMAT_LEN"),
            )


class EncodedLaunch:
    """Encodes the maps among a launch's arguments, in place of Triton's function; keeps them."""

    def __init__(
        self,
        launcher: Callable[..., None],
        metadata: list[Any],
        make: Callable[..., list[Any]],
        before: int | None,
        *,
        shipped: bool = False,
    ) -> None:
        """Take the launcher, a kernel's metadata of its maps, and the function that encodes one.

        ``before`` is the number of arguments before the kernel's; None if the launcher takes the
        kernel's arguments as one last sequence (3.7 and later).
        """
        self._launcher = launcher
        self._metadata = metadata
        self._before = before
        self._shipped = shipped
        # 3.8 and later take further arguments, which tiled maps do not need
        self._extra = (None,) * (len(inspect.signature(make).parameters) - 2)
        self._make = make

    def __call__(self, *arguments: Any) -> None:
        before = self._before
        first = arguments[-1][0] if before is None else arguments[before]
        if not isinstance(first, TensorMap):  # all maps are encoded
            self._launcher(*arguments)
        elif before is None:
            self._launcher(*arguments[:-1], self._encoded(arguments[-1]))
        else:
            self._launcher(*arguments[:before], *self._encoded(arguments[before:]))

    def _encoded(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """Return a kernel's arguments with each map encoded."""
        encoded: list[Any] = []
        left = list(self._metadata)
        for place, argument in enumerate(arguments):
            if not left:
                return (*encoded, *arguments[place:])
            if isinstance(argument, TensorMap):
                known = argument.encoded(self._shipped)
                metadata = left.pop(0)
                if known is None:
                    wake(argument.device)
                    known = self._make(argument, metadata, *self._extra)
                    argument.keep(known, self._shipped)
                encoded += known
            else:  # None or a pointer instead of a map
                encoded.append(argument)
        return tuple(encoded)
