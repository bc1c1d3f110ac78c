"""Tiers, the ``device`` argument, and an environment in which unwritten memory shows.

The markers of a test alone decide its tiers:

=============  ==========================================  =====================================
marker         runs in                                     ``device``
=============  ==========================================  =====================================
(none)         the interpreter (``TRITON_INTERPRET=1``);   cpu when interpreted, else cuda
               a GPU
``eager``      as above, and on the eager CPU path, in a   as above; cpu without the interpreter
               process without the interpreter
``device``     a GPU only                                  cuda
``aot``        a process without the interpreter; needs    none
               no GPU
=============  ==========================================  =====================================

Tests that cannot run in this process are deselected. A machine without a GPU needs three processes:
``TRITON_INTERPRET=1 pytest``, ``pytest -m eager`` and ``pytest -m aot``.

Two more markers are no tiers. A ``once`` test starts its own process, which is the same in every
tier, so it does not run under the interpreter. A ``mutation`` test plants a mistake in a kernel and
requires a failure; only the first mistake of a test runs unless ``ATTN_MUTATIONS=all``.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import random
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

# read by cuBLAS when torch starts it; without it deterministic mode warns at the first matmul
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ALL_MUTATIONS = os.environ.get("ATTN_MUTATIONS") == "all"
HAS_GPU = torch.cuda.is_available() and not INTERPRETED

MARKERS = {
    "aot": "compiles kernels for GPU targets; needs no GPU, and TRITON_INTERPRET unset",
    "eager": "also runs on the eager CPU path, in a process without TRITON_INTERPRET",
    "device": "too large for the interpreter, or about the GPU itself; runs on a GPU",
    "once": "starts a process of its own, the same in each tier; not run in the interpreter",
    "mutation": "plants a mistake in a kernel; one of each test, or all with ATTN_MUTATIONS=all",
}


class Parsed(BaseException):
    """Triton's front end has parsed a test's kernels, which ends the test; see ``gpus.py``."""


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    try:
        return (yield)
    except Parsed:
        return True


def pytest_configure(config: pytest.Config) -> None:
    # imports leave little garbage, and its collection takes a twentieth of the time
    gc.set_threshold(20_000, 50, 50)
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    if INTERPRETED:
        _patch_language_once()
        _skip_what_shows_nothing()
        _keep_types()
        _shorten_operations()
    # under the interpreter, NumPy warns about expected infinities
    config.addinivalue_line("filterwarnings", "ignore:.* encountered:RuntimeWarning")
    # with a future Triton or PyTorch, all tests run through the public interfaces
    config.addinivalue_line("filterwarnings", "ignore:.* was tested with :RuntimeWarning")
    # PyTorch 2.11's inductor warns about its own use of torch.jit
    config.addinivalue_line("filterwarnings", "ignore:.*torch.jit.script:DeprecationWarning")


def _patch_language_once() -> None:
    """Let the interpreter patch Triton's language only once per launch.

    It patches again in each call of a jit function, which takes a third of its time.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    replace: Callable[..., Any] | None = getattr(interpreter, "_patch_lang", None)
    if replace is None:  # another version of Triton
        return
    replaced: set[str] = set()

    @functools.cache
    def languages(function: Any) -> set[str]:
        modules = (tl, tl.core)
        return {x.__name__ for x in function.__globals__.values() if any(x is m for m in modules)}

    def replace_once(function: Any) -> Any:
        names = languages(function)
        if names <= replaced:
            return None
        scope, is_launch = replace(function), not replaced
        replaced.update(names)
        if is_launch:
            restore = scope.restore
            scope.restore = lambda: (replaced.clear(), restore())
        return scope

    interpreter._patch_lang = replace_once


def _skip_what_shows_nothing() -> None:
    """Skip work without effect, a third of the interpreter's time.

    It checks each integer sum for overflow but drops the answer outside of debug mode, and it
    rebuilds its table of NumPy's types at each look-up.
    """
    from triton.runtime import interpreter

    builder = getattr(interpreter, "interpreter_builder", None)
    options = getattr(builder, "options", None)
    if not getattr(options, "debug", True) and hasattr(options, "sanitize_overflow"):
        builder.options = dataclasses.replace(options, sanitize_overflow=False)
    numpy_type: Callable[..., Any] | None = getattr(interpreter, "_get_np_dtype", None)
    if numpy_type is None:
        return
    known: dict[str, Any] = {}

    def look(dtype: Any) -> Any:
        scalar = dtype.scalar
        if scalar.name not in known:
            known[scalar.name] = numpy_type(scalar)
        return known[scalar.name]

    interpreter._get_np_dtype = look


def _keep_types() -> None:
    """Cache block types and their tensors' shapes: another third of the interpreter's time."""
    import triton.language as tl

    block, tensor, constexpr = tl.core.block_type, tl.core.tensor, tl.core.constexpr
    make_block: Callable[..., None] = block.__init__
    make_tensor: Callable[..., None] = tensor.__init__
    blocks: dict[Any, dict[str, Any]] = {}
    tensors: dict[Any, dict[str, Any]] = {}

    def known_block(self: Any, element_ty: Any, shape: Any) -> None:
        lengths = [s.value if isinstance(s, constexpr) else s for s in shape]
        # pointer types of two address spaces have the same name
        key = element_ty.name, getattr(element_ty, "address_space", None), *lengths
        found = blocks.get(key)
        if found is None:
            make_block(self, element_ty, shape)
            found = blocks[key] = {**vars(self), "key": key, "lengths": lengths}
        self.__dict__.update(found)

    def known_tensor(self: Any, handle: Any, type: Any) -> None:
        key = type.key if type.is_block() else type.name
        found = tensors.get(key)
        if found is None:
            make_tensor(self, handle, type)
            # all attributes but handle and type
            tensors[key] = {name: getattr(self, name) for name in ("numel", "dtype", "shape")}
        else:
            self.__dict__.update(found, handle=handle, type=type)

    block.__init__ = known_block
    tensor.__init__ = known_tensor


def _shorten_operations() -> None:
    """Shorten type checks and broadcasting: another fifth of the interpreter's time."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic

    is_equal: Callable[..., bool] = tl.core.dtype.__eq__
    find: Callable[..., Any] = TritonSemantic.computation_type_impl
    broadcast: Callable[..., Any] = TritonSemantic.broadcast_impl_value
    results: dict[Any, Any] = {}

    def know_equal(self: Any, other: Any) -> bool:
        return self is other or is_equal(self, other)

    def look_up(self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, div: bool) -> Any:
        key = a.name, a_is_scalar, b.name, b_is_scalar, div
        found = results.get(key)
        if found is None:
            found = results[key] = find(self, a, a_is_scalar, b, b_is_scalar, div)
        return found

    def broadcast_unequal(self: Any, lhs: Any, rhs: Any) -> Any:
        # the type of a scalar has no lengths
        a, b = getattr(lhs.type, "lengths", None), getattr(rhs.type, "lengths", None)
        return (lhs, rhs) if a == b else broadcast(self, lhs, rhs)

    tl.core.dtype.__eq__ = know_equal
    TritonSemantic.computation_type_impl = look_up
    TritonSemantic.broadcast_impl_value = broadcast_unequal


def _devices(marks: set[str]) -> list[torch.device]:
    """Return the devices on which a test with these markers runs in this process."""
    if INTERPRETED:
        return [] if "device" in marks else [torch.device("cpu")]
    devices = [torch.device("cpu")] if "eager" in marks and "device" not in marks else []
    return [*devices, torch.device("cuda")] if HAS_GPU else devices


def _belongs(item: pytest.Item) -> bool:
    marks = {mark.name for mark in item.iter_markers()} & set(MARKERS)
    if marks & {"aot", "once"} and INTERPRETED:
        return False
    if "aot" in marks:
        return True
    device = item.callspec.params.get("device") if hasattr(item, "callspec") else None
    allowed = _devices(marks)
    return bool(allowed) if device is None else device in allowed


def _sampled(items: list[pytest.Item]) -> list[pytest.Item]:
    """Keep one planted mistake per test, unless ``ATTN_MUTATIONS=all``."""
    seen: set[str] = set()
    kept = []
    for item in items:
        name = item.nodeid.partition("[")[0]
        if ALL_MUTATIONS or name not in seen or item.get_closest_marker("mutation") is None:
            kept.append(item)
        seen.add(name)
    return kept


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        marks = {mark.name for mark in metafunc.definition.iter_markers()}
        # a test without a device here is collected once and deselected below
        devices = _devices(marks) or [torch.device("cpu")]
        metafunc.parametrize("device", devices, ids=[device.type for device in devices])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = _sampled([item for item in items if _belongs(item)])
    if len(kept) < len(items):
        chosen = set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    # property tests take longest: start them first, so that none runs alone at the end
    items[:] = sorted(kept, key=lambda item: "test_property" not in item.nodeid)


@pytest.fixture(autouse=True)
def nan_filled_empty() -> Iterator[None]:
    """Make ``torch.empty`` return NaN (integers: the largest), so that unwritten outputs show.

    On a GPU, nondeterministic PyTorch operators only warn: a test's eager arithmetic may use them.
    """
    # use_deterministic_algorithms would do the same but imports inductor
    mode = torch.get_deterministic_debug_mode()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("warn" if HAS_GPU else "error")
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = filled
    torch.set_deterministic_debug_mode(mode)


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Start every test from the same state of every global generator."""
    random.seed(0)
    torch.manual_seed(0)
    try:
        import numpy as np
    except ImportError:  # only the interpreter needs it
        return
    np.random.seed(0)
