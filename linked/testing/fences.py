"""Tensors that end at the end of readable memory: a read beyond one ends the interpreter."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def fenced(x: Tensor) -> Tensor:
    """Return a contiguous copy whose last byte is the last one before memory that faults.

    Floating-point tensors must have a multiple of 16 bytes: then the copy is aligned, and the
    package reads it in place.
    """
    size = x.numel() * x.element_size()
    if not _is_fenceable(x):
        raise ValueError(f"x must be integers, or have a multiple of 16 bytes, got {size}")
    page = mmap.PAGESIZE
    readable = -(-size // page) * page
    memory = mmap.mmap(-1, readable + page)
    held = (ctypes.c_char * (readable + page)).from_buffer(memory)
    fence = ctypes.c_void_p(ctypes.addressof(held) + readable)
    if ctypes.CDLL(None).mprotect(fence, ctypes.c_size_t(page), 0) != 0:
        raise OSError("mprotect failed")
    at = torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=readable - size)
    return at.view(x.shape).copy_(x)


def _is_fenceable(x: Tensor) -> bool:
    size = x.numel() * x.element_size()
    return size > 0 and (not x.dtype.is_floating_point or size % 16 == 0)


def fence_new_tensors() -> None:
    """From now on, fence the empty and zero tensors that Python code makes."""
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "zeros"),
        (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_zeros"),
    ):
        setattr(owner, name, _fencing(getattr(owner, name)))


def _fencing(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*arguments: Any, **options: Any) -> Tensor:
        x = make(*arguments, **options)
        return fenced(x) if x.is_contiguous() and _is_fenceable(x) else x

    return made


def run_fenced(code: str, tests: str) -> None:
    """Run code, which may call ``fenced``, in another process; ``tests`` is a file of the tests.

    The check passes if the code runs to its end: an access beyond a fence ends the process. Tensors
    that the package makes are fenced, too.
    """
    before = "from tests._linked.fences import fence_new_tensors, fenced\nfence_new_tensors()"
    folder = next(p.parent for p in Path(tests).resolve().parents if p.name == "tests")
    command = [sys.executable, "-c", f"{before}\n{code}\nprint('done')"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.stdout.endswith("done\n"), f"ended with {done.returncode}: {done.stderr[-2000:]}"
