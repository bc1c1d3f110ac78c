"""Time candidate tiles of the walk on the shapes of the table, each checked first.

    python benchmarks/tune_lightning_attn.py
    python benchmarks/tune_lightning_attn.py --cases b1-t8192-h96 --pass fwd

The best goes into ``_configs.py`` by hand, as readable data.
"""

from __future__ import annotations

import argparse
import itertools
import sys

from bench_lightning_attn import TOLERANCE, Timer, make, passes_of, relative_error
from cases import GRID
from lightning_attn._configs import Tile
from lightning_attn._kernels import walk
from providers import ours, reference

CANDIDATES = [
    Tile(chunk, block_e, warps, stages, terms=terms)
    for (chunk, block_e, warps), stages, terms in itertools.product(
        [(64, 64, 4), (64, 32, 4), (64, 64, 8), (64, 128, 8), (128, 64, 8), (32, 64, 4)],
        (1, 2, 3),
        (1, 2),
    )
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default="", help="substring of case names")
    parser.add_argument("--pass", dest="one", default="fwd", choices=("fwd", "bwd", "train"))
    arguments = parser.parse_args()
    timer = Timer("cuda", 10.0, 30.0)
    for problem in GRID:
        if arguments.cases not in problem.name:
            continue
        inputs, dout, decay, starts = make(problem, "cuda")
        (want,) = reference(problem, inputs, None, decay)
        found = []
        for tile in CANDIDATES:
            walk.walk_tile = lambda *_, tile=tile: tile
            try:
                calls = passes_of(ours(problem, decay, starts), inputs, dout)
                error = relative_error(calls["fwd"](), want)
                took = timer(calls[arguments.one])
            except Exception as failure:  # too large a tile
                print(f"{tile}: {type(failure).__name__}")
                continue
            mark = "" if error <= TOLERANCE else f" WRONG {error:.3f}"
            found.append((took, f"{took:.3f} ms {tile}{mark}"))
        print(problem.name, arguments.one)
        for _, line in sorted(found):
            print("  ", line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
