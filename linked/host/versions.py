"""Versions of PyTorch and Triton whose private interfaces were tested.

Those interfaces save host time and change no result. With any other version the public interfaces
are used, and the first such call warns.
"""

from __future__ import annotations

import os
import re
import warnings
from functools import cache
from importlib import import_module
from importlib.util import find_spec

Version = tuple[int, int]

# the oldest and the newest
TORCH: tuple[Version, Version] = (2, 11), (2, 15)
TRITON: tuple[Version, Version] = (3, 6), (3, 9)


def is_tested(version: str, tested: tuple[Version, Version]) -> bool:
    """Return whether a version such as ``"3.9.0+git1"`` lies in the tested range."""
    oldest, newest = tested
    return oldest <= _numbers(version) <= newest


def _numbers(version: str) -> Version:
    major, minor = map(int, re.findall(r"\d+", version)[:2])
    return major, minor


def need(library: str, oldest: Version, user: str, before: Version | None = None) -> Version:
    """Return the version of an installed library.

    Raises:
        ModuleNotFoundError: it is not installed; the message names ``user`` and what to install.
        ImportError: it is older than ``oldest``, or not older than ``before``.
    """
    least = ".".join(map(str, oldest))
    needed, requirement = f"{library} {least} or newer", f"{library}>={least}"
    if before is not None:
        end = ".".join(map(str, before))
        needed, requirement = f"{needed}, before {end}", f"{requirement},<{end}"
    install = f'pip install "{requirement}"'
    if find_spec(library) is None:
        told = f"{user} needs {needed}, which is not installed: {install}"
        raise ModuleNotFoundError(told, name=library)
    version = str(import_module(library).__version__)
    found = _numbers(version)
    if found < oldest or (before is not None and found >= before):
        raise ImportError(f"{user} needs {needed}, got {version}: {install}", name=library)
    return found


def asks_for_interpreter() -> bool:
    """Return whether the environment asks for Triton's interpreter, parsed as Triton does."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on")


def need_triton(user: str) -> None:
    """Raise as ``need`` does without Triton, or without a NumPy that the interpreter can use."""
    # the interpreter imports NumPy
    numpy = need("numpy", (1, 22), f"{user}, interpreted,") if asks_for_interpreter() else (0, 0)
    triton = need("triton", TRITON[0], user)
    if triton < (3, 7) and numpy >= (2, 4):
        raise ImportError(
            f"the interpreter of Triton {triton[0]}.{triton[1]} needs numpy before 2.4, got "
            f'{numpy[0]}.{numpy[1]}: pip install "numpy<2.4", or triton 3.7 or newer',
            name="numpy",
        )


@cache
def warn_untested(library: str, version: str, tested: tuple[Version, Version]) -> None:
    """Warn once per process that calls use the public interfaces of an untested version."""
    package = __name__.partition(".")[0]
    oldest, newest = (".".join(map(str, v)) for v in tested)
    warnings.warn(
        f"{package} was tested with {library} {oldest} to {newest}, this is {version}: calls go "
        "through its public interface, which takes more time on the host",
        RuntimeWarning,
        stacklevel=3,
    )
