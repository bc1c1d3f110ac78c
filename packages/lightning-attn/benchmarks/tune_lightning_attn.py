"""Time candidate tiles of the walk on the shapes of the table, each checked first.

    python benchmarks/tune_lightning_attn.py --json tuning.json
    python benchmarks/tune_lightning_attn.py --cases b1-t8192-h96 --kernels sequential-fwd

The best goes into ``_configs.py`` by hand. See ``_linked/tune.py`` for how candidates are compiled,
compared and timed.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
from _linked.tune import Tile, Trial, Tuner, looked_up
from cases import GRID, Problem
from lightning_attn._linear import ops
from lightning_attn._linear import tiles as linear_tiles
from lightning_attn._linear.portable.walk_launch import tile_of
from lightning_attn._linked.host.forms import Memory
from providers import judge, make_inputs, reference

# without ``warpgroups`` the portable kernel runs
CANDIDATES: list[Tile] = [
    {"block_e": columns, "num_warps": warps, "num_stages": stages, "segment": segment}
    for columns, warps in ((64, 4), (128, 8))
    for stages in (2, 3)
    for segment in (1024, 4096)
] + [
    {
        "block_e": 64 * warpgroups,
        "num_warps": 4 * warpgroups,
        "num_stages": 3,
        "segment": segment,
        "warpgroups": warpgroups,
        "stages": stages,
    }
    for warpgroups, stages in ((1, 3), (1, 5), (2, 3), (2, 4))
    for segment in (1024, 4096)
]
KERNELS = ("sequential-fwd", "sequential-bwd", "parallel-fwd", "parallel-bwd")


class LightningTuner(Tuner):
    package = "lightning_attn"
    tiles = dict.fromkeys(KERNELS, CANDIDATES)
    problems = {kernel: [(problem, GRID[2]) for problem in GRID] for kernel in KERNELS}

    def use(self, kernel: str, tile: Tile | None) -> contextlib.AbstractContextManager[None]:
        # what was planned for another candidate
        memory = (sys.modules[tile_of.__module__], "_walks", Memory())
        if tile is None:
            return looked_up(self.package, {}, memory)
        # the interpreter has no operands in 16 bits
        fields = {"chunk": 64, "terms": 2 if torch.cuda.is_available() else None, **tile}
        hopper = {name: fields.pop(name) for name in ("warpgroups", "stages") if name in fields}
        own = linear_tiles.Tile(**fields)
        lookups: dict[str, Any] = {"tile_of": lambda _: own}
        if hopper:
            lookups["hopper_tile"] = lambda _: linear_tiles.HopperTile(**hopper)
        return looked_up(self.package, lookups, memory, (linear_tiles, "HOPPER", bool(hopper)))

    def trial(self, kernel: str, problem: Problem, device: str) -> Trial:
        """Prepare a pass by operators: they keep no plan of a call."""
        schedule, one = kernel.split("-")
        problem = problem.shrunk() if device == "cpu" else problem
        x = make_inputs(problem, device)
        q, k, v = x.given
        further = x.decay, None, None, 1.0, schedule

        def forward() -> Any:
            return ops.forward(q, k, v, *further, False)[0]

        def backward() -> Any:
            dq = ops.read_gradient(x.dout, k, v, *further)
            return dq, *ops.write_gradients(x.dout, q, k, v, *further, False)[:2]

        def judged(got: Any) -> tuple[bool, Any]:
            return judge(problem, one, got, reference(problem, x, (one,)))

        return Trial(forward if one == "fwd" else backward, judged, problem.flops(one))


if __name__ == "__main__":
    sys.exit(LightningTuner(__doc__, __file__).main())
