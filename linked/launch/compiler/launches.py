"""What the first launch of a kernel asks of Triton: to compile it, or to interpret it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import RLock
from typing import Any

import triton
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from ...host.arguments import FP32_TINY
from ...host.internals import IS_TESTED as TORCH_IS_TESTED
from ...host.versions import TRITON, is_tested, warn_untested
from ..kernels import Kernel
from ..shipped.folders import PACKAGE
from . import workers

# whether a compiled kernel may be launched past Triton's own look-up
IS_DIRECT = TORCH_IS_TESTED and is_tested(triton.__version__, TRITON)

# seconds of a compilation that are worth a line
LONG = 1.0
# the kernel of which the line was logged
_said: list[str] = []

# Triton's interpreter keeps its state in globals, so one kernel may run at a time; all packages
# with this file share the lock
_interpreter: RLock = vars(triton).setdefault("_attn_interpreter_lock", RLock())


def interpret(
    kernel: Kernel,
    grid: int,
    arguments: tuple[Any, ...],
    numbers: tuple[float, ...],
    constants: dict[str, Any],
) -> None:
    """Run a kernel in Triton's interpreter."""
    function = kernel.load()
    with _interpreter:
        function[(grid,)](*arguments, *map(flushed, numbers), **_keywords(function, constants))


def launch(
    kernel: Kernel,
    grid: int,
    arguments: tuple[Any, ...],
    numbers: tuple[float, ...],
    constants: dict[str, Any],
) -> CompiledKernel | None:
    """Compile a kernel and launch it; return it if it may be launched past Triton's look-up."""
    function = kernel.load()
    refuse_specialized(function, numbers)
    compiled = function[(grid,)](*arguments, *numbers, **_keywords(function, constants))
    if not isinstance(compiled, CompiledKernel):  # not compiled at all
        return None
    if not IS_DIRECT:
        if not is_tested(triton.__version__, TRITON):  # otherwise PyTorch is; that has warned
            warn_untested("triton", triton.__version__, TRITON)
        return None
    return compiled


def tell(kernel: str, spent: float) -> None:
    """Log, once per process, that a call waited long for its kernel, and how to avoid it."""
    if spent > LONG and not _said:
        _said.append(kernel)
        logging.getLogger(PACKAGE).warning(
            "compiled %s in %.1f s, for which the call waited; `python -m %s compile --help` tells "
            "how to compile kernels once, elsewhere (said once)",
            kernel,
            spent,
            PACKAGE,
        )


def set_up() -> None:
    """Set up Triton's driver, before threads use it."""
    triton.runtime.driver.active.get_current_target()


def identify(kernel: Kernel) -> None:
    """Import a kernel and hash its source, before threads do.

    In Triton 3.6 the hash of a kernel, by which the disk keeps it, depends on which others were
    hashed before: threads would hash in any order, and the next process would not find it.
    """
    getattr(kernel.load(), "cache_key", None)


def stream() -> Callable[[int], int]:
    """Return the function that gives a device's current stream."""
    found: Callable[[int], int] = triton.runtime.driver.active.get_current_stream
    return found


def profiler() -> Any:
    """Return what tells whether a profiler listens to launches."""
    return triton.knobs.runtime


def padding_of(kernel: Kernel, given: int) -> tuple[None, ...]:
    """Return one None per constexpr, which launchers expect behind the ``given`` arguments."""
    return (None,) * (len(kernel.load().params) - given)


def build(
    kernel: Kernel,
    arguments: tuple[Any, ...],
    numbers: tuple[float, ...],
    constants: dict[str, Any],
    is_apart: bool = False,
) -> CompiledKernel | None:
    """Compile a kernel for the current device, in another process if ``is_apart``."""
    function = kernel.load()
    refuse_specialized(function, numbers)
    arguments, keywords = (*arguments, *numbers), _keywords(function, constants)
    if is_apart:
        workers.compile_apart(function, arguments, keywords)
    compiled = function.warmup(*arguments, grid=(1,), **keywords)
    driver = triton.runtime.driver.active
    if not isinstance(compiled, CompiledKernel):
        return None
    if IS_DIRECT and hasattr(driver, "launcher_cls"):
        # Triton 3.6 also compiles a launcher, which it keeps on disk
        driver.launcher_cls(compiled.src, compiled.metadata)
    return compiled


def _keywords(function: Any, constants: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of a kernel: structures of constants field by field."""
    # Triton 3.10 flips the default
    keywords: dict[str, Any] = {"enable_fp_fusion": True}
    for name, value in constants.items():
        is_structure = hasattr(value, "_asdict") and name not in function.arg_names
        keywords |= value._asdict() if is_structure else {name: value}
    return keywords


def flushed(number: float) -> float:
    """Return 0 for fp32 subnormals, which the interpreter holds as fp64 and converts wrongly."""
    return 0.0 if 0.0 < abs(number) < FP32_TINY else number


def refuse_specialized(function: Any, numbers: tuple[float, ...]) -> None:
    """Raise if Triton would specialise a kernel on the value of an int, which later calls change.

    Pointers to memory that the package did not allocate must be listed as
    ``do_not_specialize_on_alignment``; this cannot be checked here.
    """
    if not isinstance(function, JITFunction):  # interpreted
        return
    free = [p for p in function.params if not p.is_constexpr]
    for parameter, number in zip(free[len(free) - len(numbers) :], numbers, strict=True):
        if number.__class__ is int and not parameter.do_not_specialize:
            raise TypeError(f"{function.__name__} must list {parameter.name} as do_not_specialize")
