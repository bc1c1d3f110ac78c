"""A kernel that only waits; see ``launch.give_way``."""

from __future__ import annotations

import triton
import triton.language as tl

from ..._linked.launch.entries import Number, Pointer, entry


@entry(triton.jit)
def wait_kernel(x_ptr: Pointer, nanoseconds: Number):
    """Return after ``nanoseconds``. One program is enough; ``x_ptr`` only selects the device."""
    now = tl.extra.cuda.globaltimer()
    end = now + nanoseconds
    while now < end:
        now = tl.extra.cuda.globaltimer()
