"""What tests of the backward kernel for Hopper share."""

from __future__ import annotations

from flash_attn_triton._dense.portable.arguments import Extras

HOPPER = "nvidia:sm_90"


def extras_of(x):
    """Return the optional tensors of a call as the launcher takes them."""
    return Extras(*(getattr(x, name.removesuffix("_ptr")) for name in Extras._fields))
