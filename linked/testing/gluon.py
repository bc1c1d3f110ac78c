"""An interpreter for the part of Gluon that the Hopper kernels use; it runs them on a CPU.

It runs the Python code of a kernel, one program after the other, or several at once
(``gluon_programs``), with a thread for every warp partition of a program. ``gluon_language``
implements the functions of the language, ``gluon_machine`` memory, barriers and asynchronous work.
Layouts, registers, and memory order beyond fences are not modelled.
"""

from __future__ import annotations

import functools
import inspect
import sys
import textwrap
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import ConstexprFunction

from .gluon_language import Language, Pointer, register
from .gluon_machine import Boxes, Map

# the part of the compiler that functions built into the language use
_semantic = types.SimpleNamespace(
    memdesc_reinterpret=lambda x, dtype, shape, layout: Boxes(x, shape)
)


class Kernel:
    """Replaces a kernel of a launch: its programs run one after the other.

    With ``reverse`` the last partition, the producer, comes first in the order of threads. Programs
    may also run in reverse order (``backwards``), or several ``at_once``.
    """

    def __init__(self, kernel: Any, reverse: bool = True) -> None:
        function = kernel.load()
        self.name = function.__name__
        self.params, self.arg_names = function.params, function.arg_names
        self.reverse = reverse
        self.backwards = False
        self.at_once = 1
        self.launches = 0
        self._function = function
        self._language = Language()
        self.faults: list[tuple[str, str, str]] = []

    def load(self) -> Kernel:
        """Return what is called with a grid."""
        return self

    def plant(self, name: str, right: str, wrong: str) -> None:
        """Replace ``right`` by ``wrong`` in the source of a function of the kernel."""
        self.faults.append((name, right, wrong))

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*given: Any, **constants: Any) -> None:
            self.launches += 1
            arguments = dict(zip((p.name for p in self.params), given, strict=False))
            arguments = {name: _argument(value) for name, value in arguments.items()}
            taken = {p.name for p in self.params}
            arguments |= {name: value for name, value in constants.items() if name in taken}
            linker = _Linker(self._language.names, self.faults)
            kernel = linker.function(self._function)
            linker.see_that_all_are_planted()
            run = functools.partial(kernel, **arguments)
            order = range(grid[0])[:: -1 if self.backwards else 1]
            for first in range(0, grid[0], self.at_once):
                pids = order[first : first + self.at_once]
                self._language.run(run, pids, grid[0], self.reverse)

        return launch


def as_python(*functions: Any) -> dict[str, Any]:
    """Return device functions by name, as Python functions that tests call outside of a kernel."""
    linker = _Linker(Language().names, [])
    return {function.fn.__name__: linker.function(function) for function in functions}


class _Linker:
    """Turns jit functions into Python functions whose global names are bound to ``Language``."""

    def __init__(self, ours: dict[str, Any], faults: list[tuple[str, str, str]]) -> None:
        self.ours, self.faults = ours, faults
        self._functions: dict[Any, Any] = {}
        self._modules: dict[str, dict[str, Any]] = {}
        self._planted: set[tuple[str, str, str]] = set()

    def see_that_all_are_planted(self) -> None:
        missing = set(self.faults) - self._planted
        if missing:
            raise LookupError(f"nowhere to plant {missing}")

    def function(self, function: Any) -> Any:
        code = function.fn
        names = self._module(code.__module__)
        if code not in self._functions:
            made = self._make(code, names)
            # results of constexpr functions are cached: some take long
            is_constant = isinstance(function, ConstexprFunction)
            self._functions[code] = functools.cache(made) if is_constant else made
        return self._functions[code]

    def _make(self, code: Any, names: dict[str, Any]) -> Any:
        faults = [fault[1:] for fault in self.faults if fault[0] == code.__name__]
        if not faults:
            return types.FunctionType(code.__code__, names, code.__name__, code.__defaults__)
        source = textwrap.dedent(inspect.getsource(code))
        source = source[source.index("def ") :]
        for right, wrong in faults:
            if right in source:
                self._planted.add((code.__name__, right, wrong))
                source = source.replace(right, wrong)
        made: dict[str, Any] = {}
        exec(compile(source, code.__name__, "exec"), names, made)
        return made[code.__name__]

    def _module(self, name: str) -> dict[str, Any]:
        if name in self._modules:
            return self._modules[name]
        names = self._modules[name] = {"__builtins__": __builtins__}
        for key, value in vars(sys.modules[name]).items():
            if key in self.ours or key.startswith("__"):
                continue
            if type(value).__name__ == "constexpr":
                names[key] = value.value
            elif hasattr(value, "fn"):
                names[key] = self.function(value)
            elif isinstance(value, type) and hasattr(value, "_fields"):  # structures of arguments
                names[key] = value
            elif getattr(value, "__triton_builtin__", False):
                names[key] = functools.partial(value, _semantic=_semantic)
        names |= self.ours
        return names


def _argument(value: Any) -> Any:
    if hasattr(value, "block_shape"):
        return Map(value)
    if isinstance(value, Tensor):
        return Pointer(value, torch.zeros((), dtype=torch.int64))
    return None if value is None else register(value)
