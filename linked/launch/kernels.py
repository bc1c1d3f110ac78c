"""Kernels by name: their modules import Triton, which takes time and may be absent."""

from __future__ import annotations

from importlib import import_module
from importlib.util import resolve_name
from typing import Any, NamedTuple


class Kernel(NamedTuple):
    """A kernel by the place where it is declared, imported when it is compiled or interpreted."""

    # the module's package, ``__package__`` of the module that launches the kernel
    package: str | None
    # the kernel's module, relative to the package
    module: str
    name: str

    @property
    def path(self) -> str:
        """The module's full name, a colon, and the kernel's name."""
        return f"{resolve_name(self.module, self.package)}:{self.name}"

    def load(self) -> Any:
        """Import the kernel."""
        return getattr(import_module(self.module, self.package), self.name)
