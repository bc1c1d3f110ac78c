"""Compile one kernel into Triton's cache on disk: what ``workers.py`` starts, as a script.

The kernels' modules import Triton and no PyTorch, which would take longer than a compilation. So
their package is not imported, which does: a module without content stands in its place.
"""

from __future__ import annotations

import importlib
import pickle
import sys
from types import ModuleType


def main() -> None:
    """Read from standard input where modules are, then what to compile."""
    sys.path[:] = pickle.load(sys.stdin.buffer)
    where, key, source_of, target, options, *source = pickle.load(sys.stdin.buffer)
    package, paths, module, name = where
    from triton.compiler import compile as compile_kernel

    sys.modules[package] = ModuleType(package)
    sys.modules[package].__path__ = paths
    kernel = getattr(importlib.import_module(module), name)
    if kernel.cache_key != key:  # Triton's hash of its source depends on what was hashed before
        kernel.hash = key
    compile_kernel(source_of(kernel, *source), target=target, options=options)


if __name__ == "__main__":
    main()
