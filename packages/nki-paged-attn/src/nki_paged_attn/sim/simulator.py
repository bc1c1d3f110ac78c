"""Running a kernel: ``simulate(kernel)(*arrays)``, and loading kernels that import ``nki``."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .arrays import is_tensor, like, to_array
from .dtypes import NUMPY
from .errors import NkiValidationError, NotModelledError, is_integer, require
from .lnc import LNC
from .memory.liveness import place
from .memory.machine import Machine, running
from .memory.marks import UNWRITTEN
from .memory.tensor import NkiTensor
from .places import FirstBad, add_place
from .targets import Target, default_target, find_target
from .trace import Trace

# 0 in the environment: kernels that are called, not simulated by name, run without strict
STRICT = "NKI_SIM_STRICT"
# 1: each run prints where its first NaN and its first infinity come from
NAN = "NKI_SIM_NAN"


def _says(variable: str, default: str = "0") -> bool:
    """Return whether a variable of the environment is anything but 0."""
    return os.environ.get(variable, default) != "0"


@dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of an argument without values, for runs that do not compute."""

    shape: tuple[int, ...]
    dtype: Any


class Kernel:
    """A function after ``nki.jit``; ``kernel[2]`` runs on a logical core of two."""

    def __init__(
        self, function: Callable[..., Any], programs: int = 1, target: str | None = None
    ) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.programs = programs
        self.target = target

    def __getitem__(self, programs: int) -> Kernel:
        require(
            is_integer(programs) and programs in (1, 2),
            "kernel[...]",
            "the grid",
            "must be 1 or 2 programs",
            programs,
            LNC,
        )
        return Kernel(self.function, programs, self.target)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Run the kernel; within another one, it is a function of that kernel."""
        state = running()
        if state is None:
            return simulate(self, strict=_says(STRICT, "1"))(*arguments, **options)
        fits = self.programs in (1, state.programs)
        limit = f"within a kernel must be the kernel's, {state.programs}"
        require(fits, "kernel[...]", "the grid", limit, self.programs, LNC)
        return self.function(*arguments, **options)


def jit(
    function: Callable[..., Any] | None = None, platform_target: str | None = None, **_: Any
) -> Any:
    """Mark a kernel, as ``nki.jit`` does; other options than the target are for a compiler."""
    if function is None:
        return functools.partial(jit, platform_target=platform_target)
    return Kernel(function, target=platform_target)


class Simulation:
    """A kernel bound to a target; calling it runs it. ``trace`` is the log of the last run.

    Attributes:
        samples: how many iterations of a device loop a run without computing traces, evenly spaced,
            each for its share. 0 traces each body once, even if it does not run, which counts the
            instructions that are compiled; None traces all.
        find_bad: look for the first NaN and the first infinity that a run writes; it starts as what
            ``NKI_SIM_NAN`` in the environment says.
        bad: what the last run found, ``nan`` and ``inf``, each with the line that wrote it.
    """

    def __init__(self, kernel: Kernel, target: Target, *, strict: bool, execute: bool) -> None:
        self.kernel = kernel
        self.target = target
        self.strict = strict
        self.execute = execute
        self.samples: int | None = None
        self.trace = Trace(target.name)
        self.find_bad = _says(NAN)
        self.bad: dict[str, str] = {}

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Run on NumPy arrays; return what the kernel returns, as NumPy arrays.

        With PyTorch tensors on the CPU among the arguments, results are such tensors. Arrays that
        the kernel writes into are changed in place. Anything else, numbers and tuples, reaches the
        kernel as it is.
        """
        function = self.kernel.function
        names = list(inspect.signature(function).parameters)
        machine = Machine(
            self.target, programs=self.kernel.programs, strict=self.strict, execute=self.execute
        )
        machine.samples = None if self.execute else self.samples
        self.trace = machine.trace
        machine.watch = FirstBad() if self.find_bad and self.execute else None
        taken: dict[int, NkiTensor] = {}
        copies: list[tuple[np.ndarray[Any, Any], NkiTensor]] = []

        def wrap(name: str, x: Any) -> Any:
            if isinstance(x, ArraySpec):
                return NkiTensor.whole(machine.take(name, x))
            if not isinstance(x, np.ndarray) and not is_tensor(x):
                return x
            # an array that is given twice is one tensor
            if id(x) not in taken:
                array = to_array(name, x)
                taken[id(x)] = NkiTensor.whole(machine.take(name, array))
                if not array.flags.c_contiguous:
                    copies.append((array, taken[id(x)]))
            return taken[id(x)]

        # more arguments than names: the rest of *arguments
        padded = names + [f"argument_{i}" for i in range(len(names), len(arguments))]
        wrapped = [wrap(n, x) for n, x in zip(padded, arguments, strict=False)]
        keywords = {n: wrap(n, x) for n, x in options.items()}

        def program(core: Machine) -> Any:
            # NaN and infinities are valid results
            with core, np.errstate(all="ignore"):
                try:
                    return function(*wrapped, **keywords)
                except (NkiValidationError, NotModelledError) as error:
                    add_place(error)
                    raise

        cores = [machine]
        if self.kernel.programs == 1:
            result = program(machine)
        else:
            cores.append(machine.partner())
            results = machine.turns.run([functools.partial(program, core) for core in cores])
            result = results[0]
            if self.strict:
                _same_branches(cores)
        _check_room(cores)
        if machine.watch is not None:
            self.bad = machine.watch.found
            if _says(NAN):
                for kind, where in self.bad.items():
                    sys.stderr.write(f"first {kind}: {where}\n")
        for x, tensor in copies:
            if tensor._storage.is_changed:
                x[...] = tensor.array()
        tensors = [x for x in (*arguments, *options.values()) if is_tensor(x)]
        return self._unwrap(result, tensors[0] if tensors else None)

    def _unwrap(self, result: Any, kind: Any) -> Any:
        if isinstance(result, (tuple, list)):
            return tuple(self._unwrap(x, kind) for x in result)
        hides = isinstance(result, (dict, set, np.ndarray))
        kind_of = type(result).__name__
        require(
            not hides, "nki.jit", "the output", "must be a tensor or a tuple", kind_of, "nki.jit"
        )
        if not isinstance(result, NkiTensor):
            return result
        require(
            result.buffer == "shared_hbm" or result._storage.is_argument,
            "nki.jit",
            f"the output {result.name}",
            "must be in shared_hbm",
            result.buffer,
            "nki/migration, outputs",
        )
        state = result._storage.state
        if self.strict and state is not None:
            require(
                not (state.of(result) == UNWRITTEN).any(),
                "nki.jit",
                f"the output {result.name}",
                "must be written as a whole",
                "unwritten elements",
                "nki.jit",
            )
        array = result.array()
        if array is None:
            return ArraySpec(result.shape, NUMPY[result.dtype])
        return like(array.copy(), kind)


def _check_room(cores: list[Machine]) -> None:
    """Raise if tiles that did not fit by references do not fit by live ranges either."""
    errors = [core.overflow for core in cores if core.overflow is not None]
    target = cores[0].target
    rooms = {"sbuf": target.sbuf_bytes, "psum": target.psum_banks}
    peaks = {"sbuf": cores[0].trace.sbuf_peak, "psum": cores[0].trace.psum_peak}
    if errors and not place(cores[0].trace, rooms):
        first = errors[0]
        # of the whole run, for the first tile that did not fit needs the least
        need = peaks["psum" if "PSUM" in first.limit else "sbuf"]
        text = str(first).replace(f", got {first.value} [", f", got {need} [", 1)
        first.value, first.args = need, (text,)
        raise first


def _same_branches(cores: list[Machine]) -> None:
    """Check that registers steered both programs of a logical core the same way."""
    first, second = (core.branches for core in cores)
    require(
        first == second,
        "kernel[2]",
        "dynamic control flow",
        f"must be the same in both programs: {first}",
        second,
        LNC,
    )


def simulate(
    kernel: Any, target: str | Target | None = None, *, strict: bool = True, execute: bool = True
) -> Simulation:
    """Return a callable that runs a kernel on the simulator.

    Args:
        kernel: a function that calls ``nki.isa``, or what ``nki.jit`` made of one, ``kernel[2]``
            included. Its modules must see the simulator as ``nki``: see ``load``.
        target: ``trn1``, ``trn2``, ``trn3`` or ``gen2``, ``gen3``, ``gen4``. Default: what
            ``nki.jit(platform_target=...)`` names, then ``NEURON_PLATFORM_TARGET_OVERRIDE``, then
            ``trn2``.
        strict: reading unwritten memory raises an error that names the tensor, and so do two
            programs of a logical core that registers steer differently. Without ``strict`` NaN, or
            4 for integers, spreads through the results.
        execute: compute; otherwise a run is checked and logged, and returns shapes.
    """
    wrapped = kernel if isinstance(kernel, Kernel) else Kernel(kernel)
    found = find_target(target or wrapped.target or default_target())
    return Simulation(wrapped, found, strict=strict, execute=execute)
