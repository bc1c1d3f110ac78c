"""Strides of a tensor, as kernels and their launches pass them."""

from __future__ import annotations

from typing import NamedTuple

from ..launch.entries import Number


class Strides(NamedTuple):
    """Strides of a tensor with a row per token and head, in elements; 0 if broadcast."""

    batch: Number
    token: Number
    head: Number
