"""Tensors that end where readable memory ends, in the interpreter: a read beyond one is fatal."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor


def fenced(x: Tensor) -> Tensor:
    """Return a contiguous copy whose last byte is the last one before memory that faults.

    The package must be able to read the copy where it lies: the bytes of ``x`` are a multiple of
    16, so that it is aligned. The memory is never freed.
    """
    size = x.numel() * x.element_size()
    if size == 0 or size % 16:
        raise ValueError(f"x must have a multiple of 16 bytes, got {size}")
    page = mmap.PAGESIZE
    readable = -(-size // page) * page
    memory = mmap.mmap(-1, readable + page)
    held = (ctypes.c_char * (readable + page)).from_buffer(memory)
    fence = ctypes.c_void_p(ctypes.addressof(held) + readable)
    if ctypes.CDLL(None).mprotect(fence, ctypes.c_size_t(page), 0) != 0:
        raise OSError("mprotect failed")
    at = torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=readable - size)
    return at.view(x.shape).copy_(x)


def run_fenced(code: str, tests: str) -> None:
    """Run code in a process of its own, where ``fenced`` is known; ``tests``: a file of the tests.

    It passes if it gets to its end: what reads beyond a fence ends it.
    """
    code = f"from tests._linked.fences import fenced\n{code}\nprint('done')"
    folder = Path(tests).resolve().parent.parent
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.stdout.endswith("done\n"), f"ended with {done.returncode}: {done.stderr[-2000:]}"
