"""Candidate tiles of each kernel, and putting one in the place of the table's."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import pkgutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Tile = dict[str, int]
Space = dict[str, tuple[int, ...]]

# what a Hopper SM has; other GPUs have less and refuse at the launch, which is reported
SHARED_BYTES = 227 * 1024
# accumulators and scores of a thread, in registers: beyond this a candidate is all spills
REGISTERS = 300


@dataclass(frozen=True)
class Kernel:
    """A tunable kernel.

    Attributes:
        lookup: Name of the function of ``_configs`` that chooses its tile.
        part: What its name holds.
        direction: The pass that it belongs to.
        checked: The results that it writes.
        space: Values of each field of the tile.
    """

    lookup: str
    part: str
    direction: str
    checked: tuple[str, ...]
    space: Space

    def candidates(self, head_dim: int, itemsize: int, space: Space) -> list[Tile]:
        """Return the tiles worth compiling for a head dimension."""
        merged = {**self.space, **space}
        choices = itertools.product(*merged.values())
        tiles = [dict(zip(merged, choice, strict=True)) for choice in choices]
        return [tile for tile in tiles if self._fits(tile, head_dim, itemsize)]

    def _fits(self, tile: Tile, head_dim: int, itemsize: int) -> bool:
        m, n, threads = tile["block_m"], tile["block_n"], tile["num_warps"] * 32
        row = head_dim * itemsize
        if self.direction == "fwd":
            shared = m * row + tile["num_stages"] * 2 * n * row
            registers = (m * head_dim + m * n) / threads
        elif self.checked == ("dq",):
            shared = 2 * m * row + tile["num_stages"] * 2 * n * row
            registers = (m * head_dim + 2 * m * n) / threads
        else:
            shared = 2 * n * row + tile["num_stages"] * 2 * m * row
            registers = (2 * n * head_dim + 2 * m * n) / threads
        # the estimate of shared memory is rough: only what is hopeless goes
        return shared <= 1.15 * SHARED_BYTES and registers <= REGISTERS


KERNELS = {
    "fwd": Kernel(
        "forward_tile",
        "forward",
        "fwd",
        ("out",),
        {
            "block_m": (64, 128),
            "block_n": (32, 64, 128),
            "num_warps": (4, 8),
            "num_stages": (2, 3, 4),
        },
    ),
    "dkdv": Kernel(
        "backward_dkdv_tile",
        "dkdv",
        "bwd",
        ("dk", "dv"),
        {
            "block_m": (32, 64, 128),
            "block_n": (64, 128),
            "num_warps": (4, 8),
            "num_stages": (1, 2, 3),
        },
    ),
    "dq": Kernel(
        "backward_dq_tile",
        "dq",
        "bwd",
        ("dq",),
        {
            "block_m": (64, 128),
            "block_n": (32, 64, 128),
            "num_warps": (4, 8),
            "num_stages": (1, 2, 3),
        },
    ),
}


def import_kernels() -> None:
    """Import every kernel module, so that all places that hold a lookup exist."""
    package = importlib.import_module("flash_attn_triton._kernels")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")


@contextlib.contextmanager
def overridden(lookup: str, tile: Tile | None) -> Iterator[list[Any]]:
    """Let a lookup return a tile; yields the list of tiles that it handed out.

    Calls within go through the operators, which ask for a tile each time: the plans that are kept
    of earlier calls have theirs.

    Args:
        lookup: Function of ``_configs``, wherever the package has imported it.
        tile: Fields to replace; None leaves the table's own tile.
    """
    import_kernels()
    original = getattr(sys.modules["flash_attn_triton._dense.tiles"], lookup)
    given: list[Any] = []

    def instead(*args: Any, **kwargs: Any) -> Any:
        given.append(dataclasses.replace(original(*args, **kwargs), **(tile or {})))
        return given[-1]

    places = [
        module
        for name, module in list(sys.modules.items())
        if name.split(".")[0] == "flash_attn_triton" and vars(module).get(lookup) is original
    ]
    internals = sys.modules["flash_attn_triton._linked.host.internals"]
    askers = [
        module
        for name, module in list(sys.modules.items())
        if name.split(".")[0] == "flash_attn_triton"
        and vars(module).get("is_watched") is internals.is_watched
    ]
    before = [(module, lookup, original) for module in places]
    before += [(module, "is_watched", internals.is_watched) for module in askers]
    for module in places:
        setattr(module, lookup, instead)
    for module in askers:
        vars(module)["is_watched"] = lambda: True
    try:
        yield given
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def compiled_kernels() -> dict[int, tuple[str, Any]]:
    """Return every kernel compiled in this process, by identity; empty when interpreted."""
    from triton.runtime.jit import JITFunction

    found = {}
    for name, module in list(sys.modules.items()):
        if not name.startswith("flash_attn_triton._kernels"):
            continue
        for function in vars(module).values():
            if isinstance(function, JITFunction):
                for caches in function.device_caches.values():
                    for kernel in caches[0].values():
                        found[id(kernel)] = (function.__name__, kernel)
    return found


def resources(before: dict[int, tuple[str, Any]], part: str) -> list[dict[str, Any]]:
    """Return registers, spills and shared memory of kernels compiled since ``before``.

    Args:
        before: What ``compiled_kernels`` returned then.
        part: Part of the names of the kernels that matter.
    """
    rows = []
    for key, (name, kernel) in compiled_kernels().items():
        if key not in before and part in name:
            row = {"kernel": name, "registers": kernel.n_regs, "spills": kernel.n_spills}
            rows.append({**row, "shared": kernel.metadata.shared})
    return rows
