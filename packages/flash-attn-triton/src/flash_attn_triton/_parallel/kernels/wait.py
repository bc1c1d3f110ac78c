"""A kernel that only waits; see ``launch.give_way``."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["nanoseconds"])
def wait_kernel(x_ptr, nanoseconds):
    """Return after ``nanoseconds``. One program is enough; ``x_ptr`` only selects the device."""
    now = tl.extra.cuda.globaltimer()
    end = now + nanoseconds
    while now < end:
        now = tl.extra.cuda.globaltimer()
