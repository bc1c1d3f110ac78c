"""Gluon of Triton 3.6 to 3.9: the only module that knows how their names differ.

Gluon is Triton's lower-level language, with explicit layouts, barriers and asynchronous copies.
Only the Hopper kernels use it. The import of this module fails if Triton has no Gluon.
"""

from __future__ import annotations

import triton.language.core as _core
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..portable.primitives import is_sanitized

__all__ = [
    "TensorDescriptor",
    "add_out",
    "aggregate",
    "copy_in",
    "copy_out",
    "default_layout",
    "gl",
    "gluon",
    "hopper",
    "is_sanitized",
    "mbarrier",
    "tma",
]


# 3.8 renamed the tensor copies, 3.7 made aggregates public
copy_in = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
copy_out = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
aggregate = getattr(gluon, "aggregate", None) or _core._aggregate
if hasattr(tma, "async_atomic_add"):
    add_out = tma.async_atomic_add
else:  # 3.6 has it only in the builder
    from triton._C.libtriton import ir as _ir
    from triton.experimental.gluon.language._core import builtin as _builtin

    @_builtin
    def add_out(tensor_desc, coord, src, _semantic=None):
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        kind = _ir.DESCRIPTOR_REDUCE_KIND.ADD
        _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, coord, src.handle)


def default_layout(block, dtype):
    """Return the layout in shared memory of a box of a tensor map."""
    import torch  # here: processes that compile do without it

    names = {
        torch.bfloat16: gl.bfloat16,
        torch.float16: gl.float16,
        torch.float32: gl.float32,
        torch.float8_e4m3fn: gl.float8e4nv,
    }
    return gl.NVMMASharedLayout.get_default_for(list(block), names[dtype])
