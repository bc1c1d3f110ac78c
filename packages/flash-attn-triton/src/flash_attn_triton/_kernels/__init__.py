"""The kernels and their launches, imported by the first call that needs them."""

from .._linked.host.versions import need_triton

need_triton("a kernel of flash-attn-triton")
