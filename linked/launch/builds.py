"""Builds of kernels in threads, before their first launch.

Triton's front end holds the GIL. So one kernel is compiled in this process, and each other one in a
process of its own (``compiler/workers.py``), for which a thread waits. Builds do not use the GPU: a
CUDA graph may be captured meanwhile. Kernels that were shipped compiled are not built.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from ..host.forms import noted
from .shipped.folders import has

# concurrent builds: a pass has few more kernels
WORKERS = 8


class Build(NamedTuple):
    """A noted launch whose kernel is to be built."""

    # a ``runtime.Launch``
    launch: Any
    # all that its compilation depends on but the device
    form: tuple[Any, ...]
    tensors: tuple[Any, ...]
    numbers: tuple[float, ...]


# builds begun or finished, by key
_builds: dict[Hashable, Future[None]] = {}
_pools: list[ThreadPoolExecutor] = []
_lock = threading.Lock()


def note(
    launch: Any, form: tuple[Any, ...], tensors: tuple[Any, ...], numbers: tuple[float, ...]
) -> bool:
    """Note a launch; return False if this thread does not note launches."""
    found = noted()
    if found is not None:
        found.append(Build(launch, form, tensors, numbers))
    return found is not None


def start(launches: list[Build], device: torch.device) -> list[Future[None]]:
    """Start builds for a device, except those begun before; retry failed ones."""
    missing = [build for build in launches if not has(build.form, device)]
    if not missing:
        return []
    from .compiler.launches import identify, set_up

    futures = []
    set_up()
    for build in missing:
        identify(build.form[0])
    with _lock:
        if not _pools:
            _pools.append(ThreadPoolExecutor(WORKERS, thread_name_prefix="attention-builds"))
        for place, build in enumerate(missing):
            key = (device.index, *build.form)
            known = _builds.get(key)
            if known is None or (known.done() and known.exception() is not None):
                try:
                    known = _builds[key] = _pools[0].submit(_run, build, device, place > 0)
                except RuntimeError:  # no thread can be started: the launch itself will build
                    break
            futures.append(known)
    return futures


def wait(key: tuple[Any, ...]) -> None:
    """Wait for a build that was begun; if it failed, the launch itself will raise."""
    future = _builds.get(key)
    if future is not None:
        future.exception()


def _run(build: Build, device: torch.device, is_apart: bool) -> None:
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        build.launch.build(build.tensors, build.numbers, is_apart)
