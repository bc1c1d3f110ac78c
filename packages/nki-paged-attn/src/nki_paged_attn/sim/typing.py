"""The ``nki.typing`` namespace of the simulator."""

from .language.objects import mutable_tensor, tensor

__all__ = ["mutable_tensor", "tensor"]
