"""Stores of gradients from a warpgroup's registers, shared by the Hopper backwards."""

from . import sizes
from .compat import copy_out, gl, gluon, hopper

ROWS = gl.constexpr(sizes.ROWS)


@gluon.jit
def add_to_memory(pointer, values):
    """Add a warpgroup's ``[64, N]`` accumulator to memory, in the order of its registers.

    From slowest to fastest: group of eight columns, warp, row of eight, pair of columns, half of
    the warp's sixteen rows, column. A thread adds four neighbouring numbers, a warp 512 bytes.
    """
    PANELS: gl.constexpr = values.shape[1] // 8
    values = gl.reshape(values, [4, 2, 8, PANELS, 4, 2])
    values = gl.reshape(gl.permute(values, (3, 0, 2, 4, 1, 5)), [512 * PANELS])
    index = gl.arange(0, 512 * PANELS, values.type.layout)  # [512 * PANELS]
    addresses = (pointer + index).to(gl.int64)
    gl.inline_asm_elementwise(
        "red.relaxed.gpu.global.add.v4.f32 [$4], {$8, $9, $10, $11};"
        " mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;",
        "=r,=r,=r,=r,l,l,l,l,f,f,f,f",
        [addresses, values],
        dtype=gl.int32,
        is_pure=False,
        pack=4,
    )


@gluon.jit
def in_rows(values):
    """Return the accumulator in the order of ``add_to_memory``, as rows of 32 numbers."""
    PANELS: gl.constexpr = values.shape[1] // 8
    values = gl.reshape(values, [4, 2, 8, PANELS, 4, 2])
    return gl.reshape(gl.permute(values, (3, 0, 2, 4, 1, 5)), [16 * PANELS, 32])


@gluon.jit
def write(gradient, desc, staging, where, WIDTH: gl.constexpr):
    """Start the TMA store of a warpgroup's ``[64, WIDTH]`` rows of a gradient."""
    staging.reshape([ROWS, WIDTH]).store(gradient.to(staging.dtype))
    hopper.fence_async_shared()
    copy_out(desc, where, staging)
