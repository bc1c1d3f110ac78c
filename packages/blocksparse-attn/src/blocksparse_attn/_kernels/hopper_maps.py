"""Tensor maps: what the copy engine of Hopper knows of a tensor's place in memory."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .._configs import padded_head_dim
from .gluon_compat import TensorDescriptor, gl
from .hopper import RAGGED_ROWS
from .runtime import is_aligned

# coordinates of a ragged tensor map; see ``hopper.coordinates``
RAGGED_EXTENT = 0x7FFF0000
RAGGED_STRIDE = 1 << 34
# addresses at which the maps of one form are remembered
MAX_KNOWN = 256


class TensorMap(TensorDescriptor):  # type: ignore[misc]
    """A tensor and its map, as an argument of a launch beside tensors."""

    def __init__(self, base: Tensor, form: MapForm) -> None:
        # in place of the base class's, whose checks take longer than a launch: ``MapForm`` made
        # shape and strides, and its tensors are aligned
        self.base = base
        self.form = form
        # what the driver made of it for a tensor that lay there; see ``hopper_encode``
        self.encoded = form.encoded.get(base.data_ptr())

    # what Triton reads of a map where a kernel is compiled or a map encoded

    @property
    def shape(self) -> list[int]:  # type: ignore[override]
        return self.form.shape

    @property
    def strides(self) -> list[int]:  # type: ignore[override]
        return self.form.strides

    @property
    def block_shape(self) -> list[int]:  # type: ignore[override]
        return self.form.block_shape

    @property
    def layout(self) -> Any:  # type: ignore[override]
        return self.form.layout

    @property
    def device(self) -> torch.device:
        return self.base.device

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    def get_device(self) -> int:
        return self.base.get_device()

    def keep(self, encoded: list[Any]) -> None:
        """Remember an encoded map for whatever tensor of the form lies there."""
        known = self.form.encoded
        if len(known) >= MAX_KNOWN:
            known.clear()
        known[self.base.data_ptr()] = encoded


class MapForm:
    """How tensors of one form are mapped: tiles of ``rows`` rows, tokens of one head or of some.

    Tensors of one form differ in data alone or, packed, in the number of tokens too. A ``ragged``
    map clips at the end of any sequence. A tile has all columns of a head, or as many as are said.
    """

    kind = TensorMap

    def __init__(
        self, x: Tensor, rows: int, ragged: bool, columns: int = 0, heads: int = 1
    ) -> None:
        self._copies = not is_mappable(x)
        if self._copies:
            x = torch.empty(x.shape, dtype=x.dtype, device="meta")
        *_, tokens, all_heads, width = x.shape
        batch, head, token = _strides(x)
        if ragged:
            shape = [RAGGED_EXTENT, RAGGED_EXTENT, all_heads, RAGGED_ROWS.value, width]
            strides = [RAGGED_STRIDE - token, token, head, token, 1]
        else:
            shape = [1, x.shape[0], all_heads, tokens, width]
            strides = [batch * x.shape[0], batch, head, token, 1]
        block = (1, 1, heads, rows // heads, columns or padded_head_dim(width))
        self.shape = shape
        self.strides = strides
        self.block_shape = list(block)
        self.layout = _layout(block, x.dtype)
        # by address
        self.encoded: dict[int, list[Any]] = {}

    def __call__(self, x: Tensor) -> TensorMap:
        """Map a tensor of the form, or a copy of it if the engine cannot read it where it is."""
        if self._copies:
            x = x.clone(memory_format=torch.contiguous_format)
        return self.kind(x, self)


def is_mappable(x: Tensor) -> bool:
    """Say whether the copy engine can read a tensor where it is: aligned, and nowhere expanded."""
    return is_aligned(x) and min(_strides(x)) > 0


def _strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of batch, head and token; those that are never taken as if the tensor were dense."""
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


@functools.cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    names = {
        torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float8_e4m3fn: gl.float8e4nv
    }  # fmt: skip
    return gl.NVMMASharedLayout.get_default_for(list(block), names[dtype])
