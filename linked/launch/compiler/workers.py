"""Builds of kernels in other processes; results come through Triton's cache on disk.

Triton's front end holds the GIL for a good part of a build, so threads would wait for each other.
Processes are spawned, not forked: the GPU's driver does not survive a fork.
"""

from __future__ import annotations

import copy
import hashlib
import os
import pickle
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import triton
from triton.runtime.jit import JITFunction

from ...host.versions import TRITON, is_tested

SCRIPT = Path(__file__).with_name("worker.py")
# seconds after which a process is killed
PATIENCE = 300


def cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _is_python() -> bool:
    """Return whether ``sys.executable`` runs scripts, unlike a program that embeds Python."""
    name = Path(sys.executable or "").name
    return name.startswith("python") and not getattr(sys, "frozen", False)


# the inputs of a build are read through Triton's private interfaces
IS_OFFERED = _is_python() and cores() > 1 and is_tested(triton.__version__, TRITON)


def compile_apart(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    """Compile a kernel for the current device in another process, unless the disk has it.

    Errors are ignored: the build that follows in this process finds the result on disk or raises.
    """
    if not IS_OFFERED or not isinstance(kernel, JITFunction):
        return
    found = _specialized(kernel, arguments, constants)
    if found is None:
        return
    device, options, source = found
    _, _, target, backend, _ = kernel.device_caches[device]
    if _is_on_disk(kernel.ASTSource(kernel, *source), backend, options):
        return
    package = kernel.module.partition(".")[0]
    where = package, list(sys.modules[package].__path__), kernel.module, kernel.__name__
    # the class of the source is Triton's or Gluon's
    job = where, kernel.cache_key, kernel.ASTSource, target, options, *source
    with suppress(OSError, subprocess.SubprocessError, pickle.PicklingError):
        subprocess.run(
            [sys.executable, str(SCRIPT)],
            input=pickle.dumps(sys.path) + pickle.dumps(job),
            env={**os.environ, "TRITON_CACHE_DIR": triton.knobs.cache.dir},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=PATIENCE,
            check=False,
        )


def _specialized(
    kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]
) -> tuple[Any, dict[str, Any], tuple[Any, ...]] | None:
    """Return device, options and further arguments of ``ASTSource``; None if compiled already."""
    found = []

    def note(
        _key: Any, signature: Any, device: Any, constexprs: Any, options: Any, attrs: Any, _: bool
    ) -> None:
        found.append((device, dict(options.__dict__), (signature, constexprs, attrs)))

    # Triton's own path up to the compilation, which ``note`` replaces
    asked = copy.copy(kernel)
    asked._do_compile = note
    asked.warmup(*arguments, grid=(1,), **constants)
    return found[0] if found else None


def _is_on_disk(source: Any, backend: Any, options: dict[str, Any]) -> bool:
    """Return whether Triton would find the kernel in its cache."""
    # imported here: untested versions may lack these names
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.runtime.cache import get_cache_key, get_cache_manager

    parsed = backend.parse_options({**options, **source.parse_options()})
    key = get_cache_key(source, backend, parsed, get_cache_invalidating_env_vars())
    manager = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    # Triton shortens file names to this length
    name = f"{source.name[:150]}.json"
    return name in (manager.get_group(name) or {})
