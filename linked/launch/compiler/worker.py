"""Script that ``workers.py`` starts: compile one kernel into Triton's cache on disk.

The kernels' modules import Triton but not PyTorch, whose import would take longer than a
compilation. Their package does import PyTorch, so an empty module replaces it.
"""

from __future__ import annotations

import importlib
import pickle
import sys
from types import ModuleType


def main() -> None:
    """Read the module path, then the job, from standard input; compile."""
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
