"""Compare calls past PyTorch's and Triton's public interfaces with calls through them."""

from __future__ import annotations

import contextlib
import gc
import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.jit import JITFunction


@contextlib.contextmanager
def untested_versions(package: str, *, torch_too: bool) -> Iterator[None]:
    """Make a package treat the installed Triton, and with ``torch_too`` PyTorch, as untested."""
    runtime = importlib.import_module(f"{package}._linked.launch.runtime")
    internals = importlib.import_module(f"{package}._linked.host.internals")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*was tested with", RuntimeWarning)
        patch.setattr(runtime, "IS_DIRECT", False)
        patch.setattr(runtime, "_compiled", {})
        if torch_too:
            patch.setattr(internals, "IS_TESTED", False)
        yield


def forget_plans(package: str) -> None:
    """Clear a package's caches by form, and Triton's kernels, whose launchers may be replaced."""
    forms = importlib.import_module(f"{package}._linked.host.forms")
    for x in gc.get_objects():
        kind = type(x)  # isinstance would wake lazy objects
        if kind is forms.Memory:
            x.clear()
        elif issubclass(kind, JITFunction):
            x.device_caches.clear()


def assert_same_bits(package: str, call: Callable[[], Any]) -> None:
    """Require the same bits of a call's results with tested and with untested versions."""

    def bits() -> list[Tensor]:
        forget_plans(package)
        # the first call prepares and compiles, the second uses the caches
        made = call(), call()
        return [x.clone() for result in made for x in result]

    want = bits()
    for torch_too in (False, True):
        with untested_versions(package, torch_too=torch_too):
            got = bits()
        for x, y in zip(got, want, strict=True):
            assert torch.equal(x, y)
    forget_plans(package)
