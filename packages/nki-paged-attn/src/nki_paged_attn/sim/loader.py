"""The simulator as a module ``nki``: for this process, or for files of kernels alone."""

from __future__ import annotations

import builtins
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

from . import collectives, isa, language, typing
from .dtypes import NUMPY, UNMODELLED
from .simulator import jit, simulate


def _module(name: str, **members: object) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(members)
    return module


PARTS: dict[str, types.ModuleType] = {
    "isa": isa,
    "language": language,
    "typing": typing,
    "collectives": collectives,
    "dtype": _module("nki.dtype", **{n: getattr(language, n) for n in (*NUMPY, *UNMODELLED)}),
}
NKI = _module("nki", **PARTS, jit=jit, simulate=simulate, is_simulator=True)
MODULES = {
    "nki": NKI,
    **{f"nki.{name}": part for name, part in PARTS.items()},
    "nki.isa.constants": isa.constants,
}
OLD = (
    "neuronxcc.nki is refused in kernels since NKI 0.4: import nki, nki.isa and nki.language, pass "
    "dst first, and slice instead of masks [nki/migration]"
)


def install() -> bool:
    """Make ``import nki`` mean the simulator in this process, unless nki is installed.

    Returns:
        whether ``import nki`` now means the simulator.
    """
    if "nki" not in sys.modules and importlib.util.find_spec("nki") is None:
        sys.modules.update(MODULES)
    return sys.modules.get("nki") is NKI


class Loader:
    """Loads modules whose ``import nki`` means the simulator, whether or not nki is installed.

    Modules of one folder may import each other relatively.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules: dict[str, types.ModuleType] = {}

    def load(self, name: str) -> types.ModuleType:
        """Run ``<name>.py`` of the folder once, and return it as a module."""
        if name not in self.modules:
            path = self.folder / f"{name}.py"
            module = types.ModuleType(name)
            module.__file__ = str(path)
            # builtins for this module only
            module.__dict__["__builtins__"] = {**vars(builtins), "__import__": self._import}
            self.modules[name] = module
            exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
        return self.modules[name]

    def _import(
        self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        if level == 1:
            if name:
                return self.load(name)
            return types.SimpleNamespace(**{n: self.load(n) for n in fromlist})
        parts = name.split(".")
        if parts[0] == "neuronxcc":
            raise ImportError(OLD)
        if parts[0] != "nki":
            return builtins.__import__(name, globals, locals, fromlist, level)
        if name not in MODULES:
            raise ImportError(f"{name} is not modelled by the simulator [{name}]")
        return MODULES[name] if fromlist else NKI


def load(path: str | Path) -> types.ModuleType:
    """Load a Python file with kernels, whose ``import nki`` then means the simulator."""
    found = Path(path)
    return Loader(found.parent).load(found.stem)
