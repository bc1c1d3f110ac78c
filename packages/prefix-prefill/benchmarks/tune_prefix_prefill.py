"""Time tiles, and numbers of splits, that the tables do not have; the tables are edited by hand.

    python benchmarks/tune_prefix_prefill.py --json results/h200-tiles.json
    python benchmarks/tune_prefix_prefill.py --kernels short --cases decode-64 --set num_warps=4

Tiles for many queries are tried on prefill; those for few, and numbers of splits, on decoding.
See ``_linked/tune.py`` for how candidates are compiled, compared and timed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace

from _linked.tune import Tile, Trial, Tuner, looked_up, product
from aims import CHUNKS, INVARIANT
from cases import BY_NAME, Problem
from checks import judge, make_inputs, reference
from prefix_prefill import api
from prefix_prefill._paged import tiles as paged_tiles
from providers import Ours

LOOKUPS = {"long": "long_tile", "short": "short_tile"}


class PrefixTuner(Tuner):
    package = "prefix_prefill"
    tiles = {
        "long": product(block_m=(64, 128), block_n=(64, 128), num_warps=(4, 8), num_stages=(2, 3)),
        "short": product(block_m=(16,), block_n=(64, 128), num_warps=(4, 8), num_stages=(2, 3)),
        "splits": product(splits=(1, 2, 4, 8)),
    }
    problems = {
        kernel: [(p, replace(p, lengths=p.lengths[:2])) for p in map(BY_NAME.get, names)]
        for kernel, names in (("long", CHUNKS), ("short", INVARIANT), ("splits", INVARIANT))
    }

    @contextlib.contextmanager
    def use(self, kernel: str, tile: Tile | None) -> Iterator[None]:
        lookups = {}
        if tile is not None and kernel in LOOKUPS:
            lookups = {LOOKUPS[kernel]: lambda own: replace(own, **tile)}
        self.splits = tile["splits"] if tile and kernel == "splits" else 0
        # plans of earlier calls hold the tile of their time
        places = (paged_tiles, "HOPPER", False), (api, "_known", type(api._known)())
        with looked_up(self.package, lookups, *places):
            yield

    def trial(self, kernel: str, problem: Problem, device: str) -> Trial:
        problem = problem.shrunk() if device == "cpu" else problem
        x = make_inputs(problem, device)
        provider = Ours()
        provider.splits = self.splits
        expected = reference(problem, x)
        return Trial(
            provider.call(problem, x),
            lambda out: judge(problem, "", out, expected),
            problem.flops(),
        )


if __name__ == "__main__":
    sys.exit(PrefixTuner(__doc__, __file__).main())
