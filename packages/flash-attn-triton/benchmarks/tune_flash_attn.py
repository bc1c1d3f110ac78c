"""Sweep the tiles of flash-attn-triton's portable kernels on the GPU at hand.

    python benchmarks/tune_flash_attn.py --kernels fwd --cases d128
    python benchmarks/tune_flash_attn.py --kernels dkdv,dq --cases s4096,s16384 --json tiles.json
    python benchmarks/tune_flash_attn.py --kernels fwd --set block_m=256 --set num_warps=8,16

See ``_linked/tune.py`` for how candidates are compiled, compared and timed.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from typing import Any

from _linked.tune import Tile, Trial, Tuner, looked_up, product
from cases import Problem, grid
from checks import judge, make_inputs, reference
from flash_attn_triton import api
from flash_attn_triton._dense import tiles as dense_tiles
from rivals import PROVIDERS

# the function that chooses a kernel's tile, and the results that the kernel writes
LOOKUPS = {"fwd": "forward_tile", "dkdv": "backward_dkdv_tile", "dq": "backward_dq_tile"}
WRITTEN = {"fwd": ("out",), "dkdv": ("dk", "dv"), "dq": ("dq",)}


def _problems(*dtypes: str) -> list[tuple[Problem, Problem]]:
    """Return what is timed, each with one of a length that no tile divides."""
    found = [p for x in dtypes for p in grid(f"tune-{x}", (64, 128, 256), dtype=x)]
    return [(p, replace(p, lengths=(1000, 1000))) for p in found]


class FlashTuner(Tuner):
    package = "flash_attn_triton"
    tiles = {
        "fwd": product(
            block_m=(64, 128), block_n=(32, 64, 128), num_warps=(4, 8), num_stages=(2, 3, 4)
        ),
        "dkdv": product(
            block_m=(32, 64, 128), block_n=(64, 128), num_warps=(4, 8), num_stages=(1, 2, 3)
        ),
        "dq": product(
            block_m=(64, 128), block_n=(32, 64, 128), num_warps=(4, 8), num_stages=(1, 2, 3)
        ),
    }
    problems = {
        "fwd": _problems("bf16", "fp8"),
        "dkdv": _problems("bf16"),
        "dq": _problems("bf16"),
    }

    def use(self, kernel: str, tile: Tile | None) -> contextlib.AbstractContextManager[None]:
        lookups = {} if tile is None else {LOOKUPS[kernel]: lambda own: replace(own, **tile)}
        off = (dense_tiles, "HOPPER", False), (api, "_known", type(api._known)())
        return looked_up(self.package, lookups, *off)

    def trial(self, kernel: str, problem: Problem, device: str) -> Trial:
        one = "fwd" if kernel == "fwd" else "bwd"
        problem = problem.shrunk() if device == "cpu" else problem
        inputs = make_inputs(problem, device)
        prepared = PROVIDERS["ours"].prepare(problem, inputs, (one,))

        def judged(got: Any) -> tuple[bool, Any]:
            made = prepared.expected
            expected = reference(problem, inputs, (one,)) if made is None else made()
            names = ("out",) if one == "fwd" else ("dq", "dk", "dv")
            named = dict(zip(names, (got,) if one == "fwd" else got, strict=True))
            return judge({name: named[name] for name in WRITTEN[kernel]}, expected, problem)

        return Trial(prepared.calls[one], judged, problem.flops(one))


if __name__ == "__main__":
    sys.exit(FlashTuner(__doc__, __file__).main())
