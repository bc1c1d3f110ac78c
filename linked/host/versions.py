"""Versions of PyTorch and Triton whose private interfaces were tested.

Those interfaces save time on the host and change no result. Any other version is served through the
public interfaces, and the first call that takes them warns.
"""

from __future__ import annotations

import re
import warnings
from functools import cache

Version = tuple[int, int]

# the oldest and the newest
TORCH: tuple[Version, Version] = (2, 11), (2, 15)
TRITON: tuple[Version, Version] = (3, 6), (3, 9)


def is_tested(version: str, tested: tuple[Version, Version]) -> bool:
    """Return whether a version such as ``"3.9.0+git1"`` lies in a range that was tested."""
    major, minor = map(int, re.findall(r"\d+", version)[:2])
    oldest, newest = tested
    return oldest <= (major, minor) <= newest


@cache
def warn_untested(library: str, version: str, tested: tuple[Version, Version]) -> None:
    """Warn, once a process, that a version is served through public interfaces."""
    package = __name__.partition(".")[0]
    oldest, newest = (".".join(map(str, v)) for v in tested)
    warnings.warn(
        f"{package} was tested with {library} {oldest} to {newest}, this is {version}: calls go "
        "through its public interface, which takes more time on the host",
        RuntimeWarning,
        stacklevel=3,
    )
