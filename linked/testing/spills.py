"""Hold builds to their limits, and to what they spilled when that was measured.

``tests/spills.json`` of each package has a line for each build that spills:

    "GPU configuration kernel": [with the oldest Triton, with the newest]

in bytes a thread, on AMD in vector registers, and under ``reasons`` why that is accepted, for
patterns of builds. A build without a line spills nothing. More than was measured fails, less does
not. ``nox -s compile -- --write`` writes the numbers anew. Where a number is null, or a pattern of
``bounds`` fits a build without a line, nothing was measured, and the largest bound that fits holds.
"""

from __future__ import annotations

import functools
import json
import os
from collections import Counter
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import triton

from .gpus import GPUS, Build

# of the package whose tests link this folder: the path is not resolved
FILE = Path(__file__).parent.parent / "spills.json"


@functools.cache
def measured() -> dict[str, Any]:
    return json.loads(FILE.read_text())


def most_spilled(name: str, known: dict[str, Any], version: str = triton.__version__) -> int:
    """Return how much a build may spill; versions of Triton between the two count as new."""
    which = version != known["triton"][0]
    number = known["spills"].get(name, (None, None))[which]
    if number is None:
        fitting = (x for key, x in known.get("bounds", {}).items() if fnmatchcase(name, key))
        return max((numbers[which] for numbers in fitting), default=0)
    return number


def check_builds(gpu: str, config: object, builds: Iterable[Build]) -> None:
    """Hold the builds of one configuration to the GPU's limits and to what they spilled before.

    With ``ATTN_AOT_REPORT`` set to a path, a line of JSON per build is appended there instead of
    the comparison with what was measured.
    """
    report, spilled, seen = os.environ.get("ATTN_AOT_REPORT"), [], Counter[str]()
    for build in builds:
        seen[build.kernel] += 1
        count = seen[build.kernel]
        name = f"{gpu} {config} {build.kernel}" + (f" {count}" if count > 1 else "")
        assert build.shared <= GPUS[gpu].shared_limit, build
        assert not build.unset, (build, build.unset)
        if report:
            numbers = build.registers, build.spilled, build.shared
            told = dict(zip(("registers", "spilled", "shared"), numbers, strict=True))
            with Path(report).open("a") as file:
                print(json.dumps({"build": name, "triton": triton.__version__, **told}), file=file)
        elif build.spilled > (most := most_spilled(name, measured())):
            spilled.append(f"{name}: {build}, {most} before")
    assert not spilled, "\n".join(spilled)
