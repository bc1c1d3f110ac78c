"""What all launches share on the host: how caches are addressed, and kernels by their constants."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from .._layout import Strides, is_packed, key_strides, value_strides
from .._linked.host.forms import ACCESS_BYTES
from .launch.runtime import MAX_INT32, Launch, dense

# kernels that were launched before, by all that their variant depends on
_launches: dict[tuple[Any, ...], Launch] = {}


def launch(
    kernel: Any,
    grid: int,
    tensors: tuple[Tensor | None, ...],
    numbers: tuple[float, ...],
    constants: dict[str, Any],
) -> None:
    """Launch a one-dimensional grid on the first tensor's device; an empty grid is no launch."""
    if grid == 0:
        return
    key = (
        kernel.__name__, tensors[0].device, *constants.values(),
        *[None if t is None else t.dtype for t in tensors],
        # an int's width follows its value
        max(numbers) > MAX_INT32 and tuple(n > MAX_INT32 for n in numbers),
    )  # fmt: skip
    known = _launches.get(key)
    if known is None:
        known = _launches[key] = Launch(kernel, constants)
    known(grid, tensors, numbers)


class CacheForm:
    """Strides and constants of a cache, as the kernels take them."""

    def __init__(self, k_cache: Tensor, v_cache: Tensor, block_n: int = 1) -> None:
        """Look at a cache that is read in tiles of ``block_n`` keys."""
        k, v = key_strides(k_cache), value_strides(k_cache, v_cache)
        self.k_strides = (k.page, k.slot, k.head, k.step, k.inner)
        self.v_strides = (v.page, v.slot, v.head, v.inner)
        self.page = k_cache.shape[3] if is_packed(k_cache) else k_cache.shape[1]
        self.constants: dict[str, Any] = {
            "PAGE": self.page,
            "K_RUN": k.run,
            "K_UNIT": k.inner == 1,
            "K_BYTES": _begins(k_cache, k, k.run),
            "V_UNIT": v.inner == 1,
            "V_BYTES": _begins(v_cache, v, v.run),
        }
        self.v_column_run = 0
        if v.inner != 1 and v.slot == 1:
            # slots that follow each other in one page and in one tile
            run = math.gcd(self.page, block_n)
            begins = (v.page, v.head, v.inner)
            self.v_column_run = run & -run
            self.constants["V_BYTES"] = _gcd(v_cache, begins, self.v_column_run)


def _begins(cache: Tensor, strides: Strides, run: int) -> int:
    """Return the alignment of all runs of a cache."""
    begins = (strides.page, strides.slot, strides.head, strides.step)
    return _gcd(cache, begins, run) if strides.inner == 1 else cache.element_size()


def _gcd(x: Tensor, begins: tuple[int, ...], run: int) -> int:
    # strides of a dimension of one element count for nothing, and may be any; they do no harm
    return math.gcd(ACCESS_BYTES, x.data_ptr(), *(n * x.element_size() for n in (*begins, run)))


def one_form(heads_k: int, per_head: bool, *descales: Tensor | None) -> tuple[Tensor | None, ...]:
    """Bring the scales to one form: one element each, or ``[heads_k]`` each."""
    if not per_head:
        return tuple(map(dense, descales))
    full = (None if d is None else d.reshape(-1).expand(heads_k) for d in descales)
    return tuple(map(dense, full))
