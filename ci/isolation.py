"""Show that an environment holds what was declared, and nothing else.

Usage: python ci/isolation.py REQUIREMENT... (what the environment was made for).
"""

from __future__ import annotations

import importlib.metadata as metadata
import sys

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# what virtualenv itself may put into an environment
SEEDS = {"pip", "setuptools", "wheel"}


def closure(roots: list[Requirement]) -> set[str]:
    """Return the names of all that the requirements lead to, by the installed metadata."""
    seen: set[tuple[str, str]] = set()
    todo = [(r, "") for r in roots]
    while todo:
        requirement, extra = todo.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        for wanted in ("", *requirement.extras):
            if (name, wanted) not in seen:
                seen.add((name, wanted))
                todo += [(Requirement(r), wanted) for r in metadata.requires(name) or ()]
    return {name for name, _ in seen}


def main(arguments: list[str]) -> int:
    declared = closure([Requirement(text) for text in arguments])
    installed = {canonicalize_name(d.metadata["Name"]) for d in metadata.distributions()}
    stray = installed - declared - SEEDS
    if stray:
        print(f"isolation: installed, but nothing declares it: {', '.join(sorted(stray))}")
        return 1
    print(f"isolation: {len(installed)} distributions, all led to by: {', '.join(arguments)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
