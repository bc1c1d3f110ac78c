"""What is measured: the base of a package's problems, and the choice among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Case:
    """A problem in a family; each of its passes is a case.

    A package's problems are dataclasses below it. ``passes`` has one empty name where a problem
    is one call.
    """

    name: str
    family: str

    passes = ("",)

    def case(self, one: str) -> str:
        """Return the name of the case of one pass."""
        return f"{self.name}-{one}" if one else self.name

    def flops(self, one: str) -> float:
        """Return the floating-point operations of a pass, by the usual count."""
        raise NotImplementedError

    def bytes(self, one: str) -> float:
        """Return the fewest bytes of a pass: each input read once, each output written once."""
        raise NotImplementedError

    def told(self) -> dict[str, str]:
        """Return what else the table of bounds tells."""
        return {}

    def kind(self) -> Any:
        """Return what problems of the same kernels have in common."""
        return replace(self, name="", family="")

    def shrunk(self) -> Case:
        """Return a problem of the same kind that a CPU does in no time, for dry runs."""
        raise NotImplementedError


Selected = list[tuple[Any, tuple[str, ...]]]


def split(text: str) -> list[str]:
    """Return the parts of a comma-separated text."""
    return [part.strip() for part in text.split(",") if part.strip()]


def select(
    problems: Sequence[Case],
    specials: dict[str, str],
    filters: list[str],
    families: list[str],
    quick: set[str] | None = None,
) -> tuple[Selected, list[str]]:
    """Return the problems with the passes asked for, and the other cases asked for.

    Args:
        problems: All of them.
        specials: Families of the cases that are no problems, by name.
        filters: A case is taken when its name holds one of them, or its family is one of them.
            Empty: every case.
        families: Names of families. Empty: every family.
        quick: Names of the only problems that are taken; then no other case is unless it is asked
            for.
    """

    def wanted(name: str, family: str) -> bool:
        is_named = not filters or family in filters or any(part in name for part in filters)
        return is_named and (not families or family in families)

    chosen = []
    for problem in problems:
        passes = tuple(p for p in problem.passes if wanted(problem.case(p), problem.family))
        if passes and (quick is None or problem.name in quick):
            chosen.append((problem, passes))
    asked = quick is None or filters or families
    return chosen, [name for name, family in specials.items() if asked and wanted(name, family)]
