"""Kernels that were compiled before, elsewhere: looked up in folders, launched without a compiler.

A folder holds the kernels of one package for one GPU: a cubin each, and ``manifest.json``, which
says what a launch needs. Folders are those of companion distributions (entry points of the group
``attn_kernels``) and of the environment variable ``ATTN_KERNELS``. A kernel is taken only if the
package's files, the GPU, the kernel's constants and dtypes are those of its build, and, where
Triton is installed, its version.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

MANIFEST = "manifest.json"
# of manifests; others are left aside
FORMAT = 1
FOLDERS = "ATTN_KERNELS"
GROUP = "attn_kernels"

# what a launch asks of Triton's profilers, which see compiled kernels alone
NO_PROFILER = SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=()))

PACKAGE = __name__.partition(".")[0]
_log = logging.getLogger(PACKAGE)


class Build(NamedTuple):
    """What a folder's kernels were built from."""

    package: str
    version: str
    # sha256 of the package's files, see ``sources``
    files: str
    gpu: str
    triton: str


class Folder(NamedTuple):
    """A folder of kernels."""

    path: Path
    build: Build
    # what a launch needs, by the hash of the kernel's form
    kernels: dict[str, dict[str, Any]]


@functools.cache
def sources() -> str:
    """Return the sha256 of the package's Python files, which include its kernels."""
    root = Path(__file__).parents[3]
    digest = hashlib.sha256()
    found = []
    for folder, inner, names in os.walk(root, followlinks=True):
        # what wheels do not hold
        inner[:] = [name for name in inner if name not in ("testing", "benchmarks", "__pycache__")]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    for path in sorted(found):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


def _triton() -> str:
    """Return the version of Triton without importing it; empty where it is not installed."""
    found = find_spec("triton")
    text = Path(found.origin).read_text() if found and found.origin else ""
    version = re.search(r"^__version__ = ['\"](.+)['\"]", text, re.MULTILINE)
    return version[1] if version else ""


def this_build(gpu: str) -> Build:
    """Return what kernels would be built from here; without Triton, its version is empty."""
    return Build(PACKAGE, sys.modules[PACKAGE].__version__, sources(), gpu, _triton())


def hash_of(form: tuple[Any, ...]) -> str:
    """Return the hash of a kernel's form: its path, constants and dtypes, written out."""
    kernel, *rest = form
    return hashlib.sha256(repr((kernel.path, *rest)).encode()).hexdigest()


def read(path: Path) -> Folder:
    """Read a folder's manifest.

    Raises:
        ValueError: it is no manifest of this format.
        OSError: it cannot be read.
    """
    try:
        held = json.loads((path / MANIFEST).read_text())
        if held["format"] != FORMAT:
            raise ValueError(f"{path}: format {held['format']}, this version reads {FORMAT}")
        return Folder(path, Build(**held["build"]), held["kernels"])
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path / MANIFEST} is no manifest of kernels") from error


def candidates() -> Iterator[Path]:
    """Yield the folders to look into, and theirs, companion distributions first."""
    for path in _roots():
        inner = sorted(path.glob(f"*/{MANIFEST}"))
        yield from [x.parent for x in inner] or [path]


def _roots() -> Iterator[Path]:
    for point in metadata.entry_points(group=GROUP):
        spec = find_spec(point.module) if point.name == PACKAGE else None
        if spec is not None and spec.submodule_search_locations:
            yield Path(next(iter(spec.submodule_search_locations)))
    for text in os.environ.get(FOLDERS, "").split(os.pathsep):
        if text:
            yield Path(text)


def folders(gpu: str) -> tuple[list[Folder], list[str]]:
    """Return the folders that fit, and a line for each that is left aside.

    Folders of another Triton are not told of where one fits: a wheel has one for each.
    """
    fitting, aside, of_triton = list[Folder](), list[str](), list[str]()
    paths = [*candidates()]
    if not paths:
        return fitting, aside
    here = this_build(gpu)
    for path in paths:
        try:
            folder = read(path)
        except (OSError, ValueError) as error:
            aside.append(str(error))
            continue
        if folder.build.package != PACKAGE:  # one variable serves all packages
            continue
        for field, theirs, ours in zip(Build._fields, folder.build, here, strict=True):
            if theirs != ours and not (field == "triton" and not ours):
                told = f": {theirs}, here {ours}" if field != "files" else ""
                lines = of_triton if field == "triton" else aside
                lines.append(f"{path} is left aside, it was built for other {field}{told}")
                break
        else:
            if find_spec("cuda") and find_spec("cuda.bindings"):
                fitting.append(folder)
            else:
                aside.append(f"{path} is left aside, it needs cuda-bindings: {_needed()}")
    return fitting, aside if fitting else aside + of_triton


def _needed() -> str:
    return f'pip install "{PACKAGE.replace("_", "-")}[kernels]"'


@functools.cache
def _folders(gpu: str) -> list[Folder]:
    found, aside = folders(gpu)
    for line in aside:
        _log.warning("%s", line)
    return found


def find(form: tuple[Any, ...], device: torch.device) -> Any:
    """Return a shipped kernel, loaded on the current device; None if there is none.

    Raises:
        RuntimeError: the kernel's file is not the one of its build.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    found = _find(form, _arch(device))
    if found is None:
        return None
    from .kernel import load

    return load(*found)


def is_shipped(kernel: Any) -> bool:
    """Return whether a kernel was shipped, not compiled here."""
    return getattr(kernel, "is_shipped", False)


def has(form: tuple[Any, ...], device: torch.device) -> bool:
    """Return whether ``find`` would find the kernel."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return _find(form, _arch(device)) is not None


@functools.cache
def _arch(device: torch.device) -> str:
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def _find(form: tuple[Any, ...], gpu: str) -> tuple[Path, dict[str, Any]] | None:
    found = _folders(gpu)
    if found:
        key = hash_of(form)
        for folder in found:
            entry = folder.kernels.get(key)
            if entry is not None:
                return folder.path, entry
    return None
