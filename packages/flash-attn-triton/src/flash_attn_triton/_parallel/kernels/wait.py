"""A kernel that does nothing for a while; see ``sharded_plans.give_way``."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["nanoseconds"])
def wait_kernel(x_ptr, nanoseconds):
    """Return after so many nanoseconds. One program is enough; ``x_ptr`` says on which device."""
    now = tl.extra.cuda.globaltimer()
    end = now + nanoseconds
    while now < end:
        now = tl.extra.cuda.globaltimer()
