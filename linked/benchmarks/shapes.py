"""Problems that are drawn by a seed: shapes that nobody chose tiles by.

A benchmark with the family ``shapes`` draws them (``Benchmark.draw``), and finds one by its name
(``Benchmark.named``). The first rival of the family is the one that ratios are of.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from .plot import COLOURS, Panel, Series, draw, note_of
from .report import DIRECTIONS, by_case, geometric_mean, markdown, ratio

T = TypeVar("T")
Row = dict[str, Any]

FAMILY = "shapes"
# a shape whose last pass, the backward, takes no longer waits for the host
HOST_BOUND_MS = 0.2
WORST = 10


class Dice:
    """Choices by a seed, the same in every version of Python: only ``random()`` promises that."""

    def __init__(self, seed: int) -> None:
        self.share = random.Random(seed).random

    def one_of(self, values: Sequence[T]) -> T:
        """Return one of some values."""
        return values[int(self.share() * len(values))]

    def power(self, low: float, high: float) -> int:
        """Return a number from ``2**low`` to ``2**high``; every octave is as likely."""
        return int(2.0 ** (low + (high - low) * self.share()))


def drawn(roll: Callable[[Dice], Any], seed: int) -> Iterator[Any]:
    """Yield problems without end, no name twice; a None of ``roll`` is drawn again."""
    dice, known = Dice(seed), set()
    while True:
        problem = roll(dice)
        if problem is not None and problem.name not in known:
            known.add(problem.name)
            yield problem


class Ratio(NamedTuple):
    """How many times as fast as the rival a pass of a shape is."""

    shape: str
    one: str
    value: float
    is_short: bool  # the shape is bound by the host


def ratios(bench: Any, found: Row) -> list[Ratio]:
    """Return what was timed beside the rival, in the order of the results."""
    own, rival, *_ = bench.families[FAMILY]
    rows = [row for row in found["results"] if row["family"] == FAMILY]
    shape = {row["case"]: row["case"].removesuffix("-" + row.get("pass", "")) for row in rows}
    cases = by_case(bench, rows)
    # of each shape, the last pass that was timed remains
    took = {shape[case]: of[own]["ms"] for case, of in cases.items() if "ms" in of.get(own, {})}
    every = []
    for case, of in cases.items():
        value = ratio(of, own, rival)
        if value is not None:
            is_short = took[shape[case]] <= HOST_BOUND_MS
            every.append(Ratio(shape[case], of[own].get("pass", ""), value, is_short))
    return every


def groups(bench: Any, found: Row) -> dict[tuple[str, str], list[Ratio]]:
    """Return the ratios by length and pass, the least first."""
    every = sorted(ratios(bench, found), key=lambda one: one.value)
    names = {False: f"over {HOST_BOUND_MS} ms", True: f"up to {HOST_BOUND_MS} ms, host-bound"}
    passes = sorted({one.one for one in every}, key=[*DIRECTIONS, ""].index)
    made = {
        (name, one): [x for x in every if x.is_short == is_short and x.one == one]
        for is_short, name in names.items()
        for one in passes
    }
    return {key: of for key, of in made.items() if of}


def summary(bench: Any, found: Row) -> str:
    """Return the means over all shapes, and the worst by name, as Markdown."""
    own, rival, *_ = bench.families[FAMILY]
    of = f"/ {bench.providers[rival].label}"
    mine = [row for row in found["results"] if (row["family"], row["provider"]) == (FAMILY, own)]
    means, worst = [], []
    for (name, one), here in groups(bench, found).items():
        word = DIRECTIONS.get(one, one)
        cells = [f"{geometric_mean(x.value for x in here):.3f}", f"{here[0].value:.3f}"]
        means.append([name, word, *cells, str(len(here))])
        worst += [[x.shape, word, name, f"{x.value:.3f}"] for x in here[:WORST]]
    alone = sum("ms" in row for row in mine) - len(ratios(bench, found))
    text = markdown(["random shapes, by the last pass", "pass", of, "least", "shapes"], means)
    if worst:
        text += "\n\n" + markdown(["worst", "pass", "last pass", of], worst)
    return text + (f"\n\nPasses without the rival: {alone}." if mine else "")


def plot(bench: Any, found: Row, path: Path) -> list[Path]:
    """Draw all ratios in order, a panel for long shapes and one for short ones."""
    own, rival, *_ = bench.families[FAMILY]
    made = groups(bench, found)
    panels = []
    for name in dict.fromkeys(name for name, _ in made):
        series = [Series("as fast", {0.0: 1.0, 100.0: 1.0}, line="--")]
        for (of, one), here in made.items():
            if of == name:
                last = max(1, len(here) - 1)
                points = {100.0 * i / last: x.value for i, x in enumerate(here)}
                colour = COLOURS["fa3" if one == "fwd" else "ours"]
                series.append(Series(DIRECTIONS.get(one, "call"), points, colour))
        label = f"times as fast as {bench.providers[rival].label}"
        panels.append(Panel(name, series, label, "% of shapes, slowest first", bars=False))
    if not panels:
        return []
    to = path.with_name(f"{path.stem}-{FAMILY}.png")
    title = f"{bench.providers[own].label}, random shapes"
    return [draw(panels, to, len(panels), title, note_of(found))]
