"""Time tiles that the tables might hold: one kernel's is changed, all others stay.

    python benchmarks/tune_blocksparse_attn.py --kernels tall,dkdv --json tiles.json

The tables are those of the portable kernels: on Hopper, another serves the forward of most calls.
See ``_linked/tune.py`` for how candidates are compiled, compared and timed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace

from _linked.providers import replaced
from _linked.tune import Tile, Trial, Tuner
from blocksparse_attn._attention import tiles as attention_tiles
from cases import Problem, problem
from checks import judge, make_inputs, reference
from providers import PROVIDERS

TABLES = {
    "tall": "_TALL",
    "low": "_LOW",
    "short": "_SHORT",
    "dkdv": "_BACKWARD_DKDV",
    "dq": "_BACKWARD_DQ",
}
# queries, keys, warps, stages
TILES: dict[str, list[tuple[int, int, int, int]]] = {
    "tall": [
        (128, 64, 8, 4), (128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 2),
        (64, 64, 4, 3), (64, 64, 4, 4), (32, 64, 4, 3), (64, 128, 4, 2),
    ],
    "short": [
        (16, 64, 4, 4), (16, 64, 2, 3), (16, 64, 2, 5), (16, 128, 4, 3), (16, 128, 8, 3),
        (16, 32, 4, 5), (16, 32, 2, 6),
    ],
    "dkdv": [
        (64, 64, 4, 3), (128, 64, 8, 2), (64, 128, 8, 2), (32, 64, 4, 3), (32, 64, 4, 2),
        (32, 32, 4, 3), (64, 32, 4, 3),
    ],
    "dq": [
        (128, 128, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (32, 64, 4, 2), (64, 32, 4, 3),
    ],
}  # fmt: skip
FIELDS = ("block_m", "block_n", "num_warps", "num_stages")
PREFILL = [
    problem("strided", 8192, 64, local=16, stride=8),
    problem("strided", 32768, 64, local=16, stride=8),
    problem("shared", 8192, 64, local=16, stride=8, homo=True),
    problem("dense", 8192, 64, local=128, stride=1, homo=True),
    problem("strided", 8192, 128, local=8, stride=8),
    problem("strided", 8192, 32, local=32, stride=8),
    problem("strided", 8192, 16, local=64, stride=8),
]
DECODE = [
    problem("decode", 8192, 64, local=local, stride=stride, batch=32, queries=1)
    for local, stride in ((16, 8), (8, 16))
]


class BlockSparseTuner(Tuner):
    package = "blocksparse_attn"
    tiles = {k: [dict(zip(FIELDS, t, strict=True)) for t in found] for k, found in TILES.items()}
    problems = {
        kernel: [
            (p, replace(p, seqlen=2048, batch=min(p.batch, 2)))
            for p in (DECODE if kernel == "short" else PREFILL)
        ]
        for kernel in TILES
    }

    @contextlib.contextmanager
    def use(self, kernel: str, tile: Tile | None) -> Iterator[None]:
        table = getattr(attention_tiles, TABLES[kernel])
        changed = table
        if tile is not None:
            changed = {family: ((256, attention_tiles.Tile(**tile)),) for family in table}
        before = dict(table)
        with replaced((attention_tiles, "HOPPER", False)):
            try:
                table.update(changed)
                forget()
                yield
            finally:
                table.update(before)
                forget()

    def trial(self, kernel: str, problem: Problem, device: str) -> Trial:
        one = "bwd" if kernel in ("dkdv", "dq") else "fwd"
        problem = problem.shrunk() if device == "cpu" else problem
        inputs = make_inputs(problem, device)
        prepared = PROVIDERS["ours"].prepare(problem, inputs, (one,))
        expected = reference(problem, inputs, (one,))
        return Trial(
            prepared.calls[one],
            lambda got: judge(problem, one, got, expected),
            problem.flops(one),
        )


def forget() -> None:
    """Forget what was looked up in the tables."""
    for found in vars(attention_tiles).values():
        if hasattr(found, "cache_clear"):
            found.cache_clear()


if __name__ == "__main__":
    sys.exit(BlockSparseTuner(__doc__, __file__).main())
