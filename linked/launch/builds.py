"""Builds of kernels in threads, ahead of their first launch.

Threads take turns in Triton's front end, which holds the interpreter's lock. So one kernel is
compiled in this process and each other one in a process of its own (``workers.py``), for which its
thread waits. Builds ask nothing of the GPU: a CUDA graph may be captured meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import triton

# builds at a time: a pass has not many more kernels
WORKERS = 8


class Build(NamedTuple):
    """A launch that was noted, and is to be built."""

    # of ``runtime``
    launch: Any
    # as the launch itself will look for it
    key: tuple[Any, ...]
    tensors: tuple[Any, ...]
    numbers: tuple[float, ...]


_thread = threading.local()
# what is built, or was
_builds: dict[Hashable, Future[None]] = {}
_pools: list[ThreadPoolExecutor] = []
_lock = threading.Lock()


@contextmanager
def noting() -> Iterator[list[Build]]:
    """Note launches of this thread on meta tensors, in place of launching."""
    _thread.noted = noted = []
    try:
        yield noted
    finally:
        del _thread.noted


def note(
    launch: Any, key: tuple[Any, ...], tensors: tuple[Any, ...], numbers: tuple[float, ...]
) -> bool:
    """Note a launch, and say whether launches are noted at this moment."""
    noted = getattr(_thread, "noted", None)
    if noted is not None:
        noted.append(Build(launch, key, tensors, numbers))
    return noted is not None


def start(noted: list[Build], device: torch.device) -> list[Future[None]]:
    """Build what was noted, side by side, for a device; what was begun is not begun again.

    A build that failed is tried again.
    """
    futures = []
    triton.runtime.driver.active.get_current_target()  # set up once, and not in every thread
    with _lock:
        if not _pools:
            _pools.append(ThreadPoolExecutor(WORKERS, thread_name_prefix="attention-builds"))
        for place, build in enumerate(noted):
            name, _, *rest = build.key
            key = (name, device.index, *rest)
            known = _builds.get(key)
            if known is None or (known.done() and known.exception() is not None):
                try:
                    known = _builds[key] = _pools[0].submit(_run, build, device, place > 0)
                except RuntimeError:  # no thread can be started; the launch will build
                    break
            futures.append(known)
    return futures


def wait(key: tuple[Any, ...]) -> None:
    """Wait for a build that was begun; one that failed is left for the launch to raise."""
    future = _builds.get(key)
    if future is not None:
        future.exception()


def _run(build: Build, device: torch.device, is_apart: bool) -> None:
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        build.launch.build(build.tensors, build.numbers, is_apart)
