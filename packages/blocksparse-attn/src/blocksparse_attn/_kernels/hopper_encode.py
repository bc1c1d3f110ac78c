"""Launches that encode a tensor map once for each place in memory, and not for each call.

Triton's launcher goes through all arguments of a call in search of maps, and has the driver encode
each: that takes a third of the host's time for a call. But a map says no more than where a tensor
lies and how, and tensors that come from PyTorch's allocator call after call lie where others did.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from triton.compiler import CompiledKernel

from .hopper_maps import TensorMap
from .runtime import Launch, Ready

# whether this thread has used a GPU
_thread = threading.local()


class MapLaunch(Launch):
    """A launch whose first tensors are maps (``hopper_maps.TensorMap``)."""

    def __call__(
        self, grid: int, tensors: tuple[Tensor | None, ...], numbers: tuple[float, ...]
    ) -> None:
        if not getattr(_thread, "is_awake", False):
            wake(tensors[0].device)
        super().__call__(grid, tensors, numbers)

    def _look_up(
        self,
        variant: Any,
        grid: int,
        tensors: tuple[Tensor | None, ...],
        numbers: tuple[float, ...],
    ) -> Ready | None:
        found = super()._look_up(variant, grid, tensors, numbers)
        ready = self._ready.get(variant)
        if ready is not None:
            encode_once(ready.kernel)
        return found


def wake(device: torch.device) -> None:
    """Use a GPU in this thread: in one that has not, as autograd's, the driver makes no maps."""
    if device.type == "cuda":
        torch.zeros(1, device=device)
        _thread.is_awake = True


def encode_once(kernel: CompiledKernel) -> None:
    """Let the launches of a compiled kernel ask its maps for what Triton would encode.

    Triton 3.6 to 3.9 keep the launcher that takes encoded maps within the function that encodes
    them. A later one may keep it elsewhere: then that function stays, and maps are encoded anew.
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
    """In place of the function that encodes maps: the same launch with those that are known."""

    def __init__(
        self,
        launcher: Callable[..., None],
        metadata: list[Any],
        make: Callable[..., list[Any]],
        before: int | None,
    ) -> None:
        """Take the launcher, what a kernel says of its maps, and how one map is made.

        ``before`` counts the arguments that are not the kernel's. Launchers that take the kernel's
        as one last sequence (3.7 and later) have no such count.
        """
        self._launcher = launcher
        self._metadata = metadata
        self._before = before
        # 3.8 and later pass something more, which tiled maps do not need
        self._extra = (None,) * (len(inspect.signature(make).parameters) - 2)
        self._make = make

    def __call__(self, *arguments: Any) -> None:
        maps = len(self._metadata)
        if self._before is None:
            *others, (*own,) = arguments
            self._launcher(*others, (*self._encoded(own[:maps]), *own[maps:]))
        else:
            rest = self._before + maps
            encoded = self._encoded(arguments[self._before : rest])
            self._launcher(*arguments[: self._before], *encoded, *arguments[rest:])

    def _encoded(self, maps: Sequence[TensorMap]) -> list[Any]:
        encoded: list[Any] = []
        for index, tensor_map in enumerate(maps):
            known = tensor_map.encoded
            if known is None:
                known = self._make(tensor_map, self._metadata[index], *self._extra)
                tensor_map.keep(known)
            encoded += known
        return encoded
