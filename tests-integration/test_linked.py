"""What is linked into every kernel package: versions that were tested, and what serves others."""

from __future__ import annotations

import importlib
import json
import os
import re
import types
import warnings

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

PACKAGES = ("blocksparse_attn", "flash_attn_triton", "lightning_attn", "prefix_prefill")


@pytest.fixture(params=PACKAGES)
def versions(request):
    module = importlib.import_module(f"{request.param}._linked.host.versions")
    module.warn_untested.cache_clear()
    yield module
    module.warn_untested.cache_clear()


@pytest.mark.parametrize("version", ["3.6", "3.6.0", "3.9.0", "3.9.12+git1a2b", "3.8.0rc1", "3.9"])
def test_in_range(versions, version):
    assert versions.is_tested(version, ((3, 6), (3, 9)))


@pytest.mark.parametrize("version", ["3.5.9", "3.10.0", "3.10.0.dev20261122", "4.0", "2.9", "10.0"])
def test_out_of_range(versions, version):
    assert not versions.is_tested(version, ((3, 6), (3, 9)))


def test_warns_once_for_each_library(versions):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for version in ("3.10.0", "3.10.0"):
            versions.warn_untested("triton", version, versions.TRITON)
        versions.warn_untested("torch", "9.0", versions.TORCH)
    first, second = (str(warning.message) for warning in told)
    name = versions.__name__.partition(".")[0]
    assert first.startswith(f"{name} was tested with triton 3.6 to 3.9, this is 3.10.0: calls go")
    assert second.startswith(f"{name} was tested with torch ")


def test_ranges_are_what_the_checks_run_with(noxfile):
    """The floors that packages declare, and the newest that the constraints allow."""
    from flash_attn_triton._linked.host import versions

    newest = {r.name: next(iter(r.specifier)).version for r in noxfile.pins()}
    tested = {"torch": versions.TORCH, "triton": versions.TRITON}
    oldest = {"torch": noxfile.OLDEST_TORCH, "triton": noxfile.OLDEST_TRITON}
    assert newest["triton"] == noxfile.NEWEST_TRITON
    # the newest torch is that of the versions session
    assert Version(newest["torch"]) <= Version(noxfile.NEWEST_TORCH)
    newest["torch"] = noxfile.NEWEST_TORCH
    for name, ends in tested.items():
        assert ends == tuple(Version(x[name]).release[:2] for x in (oldest, newest))
    for package in noxfile.KERNEL_PACKAGES:
        needs = map(Requirement, noxfile.PROJECTS[package]["project"]["dependencies"])
        floors = {r.name: Version(next(iter(r.specifier)).version).release[:2] for r in needs}
        assert {name: floors[name] for name in tested} == {n: v[0] for n, v in tested.items()}


CALLS = """
import json, warnings
import torch
from flash_attn_triton import flash_attn_func
from flash_attn_triton._linked.host import internals
from torch.profiler import profile

def call():
    torch.manual_seed(0)
    tensors = [torch.randn(2, 20, 4, 16, requires_grad=True) for _ in "qkv"]
    with profile() as seen:
        out, lse = flash_attn_func(*tensors, causal=True, return_lse=True)
        grads = torch.autograd.grad((out.sum() + lse.sum()), tensors)
    operators = {e.key for e in seen.key_averages() if e.key.startswith("flash_attn_triton::")}
    return [out.detach(), lse.detach(), *grads], operators

assert internals.IS_TESTED
call()
past, _ = call()
internals.IS_TESTED = False
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    call()
    through, operators = call()
print(json.dumps({
    "same": [torch.equal(a, b) for a, b in zip(past, through, strict=True)],
    "operators": sorted(operators),
    "told": [str(w.message) for w in told if w.category is RuntimeWarning],
    "tangents": has_tangent(),
}))
"""
TANGENTS = """
def has_tangent():
    from torch.autograd import forward_ad
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.ones(1), torch.ones(1))
        try:
            internals.refuse_tangents((torch.ones(1), None))
            internals.refuse_tangents((x,))
        except NotImplementedError:
            return True
    return False
"""


def test_an_untested_torch_goes_through_the_operators_to_the_same_bits(python):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    text = CALLS.replace("def call", f"{TANGENTS}\ndef call", 1)
    seen = json.loads(python(text, env=environment).splitlines()[-1])
    assert seen["same"] == [True] * 5
    assert {"flash_attn_triton::forward", "flash_attn_triton::backward"} <= set(seen["operators"])
    (told,) = seen["told"]
    assert re.match(r"flash_attn_triton was tested with torch 2\.11 to ", told)
    assert seen["tangents"]


class Compiled:
    """Replaces a compiled kernel: keeps what it is launched with."""

    function = packed_metadata = None

    def __init__(self) -> None:
        self.launches = []

    def run(self, *arguments):
        self.launches.append(arguments)


class Kernel:
    """Replaces a jit function; ``by_triton`` keeps what reaches Triton's own launch."""

    __name__ = "kernel"
    params = ("x_ptr", "y_ptr", "count", "BLOCK")

    def __init__(self, compiled) -> None:
        self.by_triton, self.compiled = [], compiled

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            self.by_triton.append((grid, arguments, constants))
            return self.compiled

        return launch


@pytest.fixture(params=PACKAGES)
def launching(request, monkeypatch):
    """Return the module of launches, for a driver of no GPU."""
    module = importlib.import_module(f"{request.param}._kernels.launch.runtime")
    driver = types.SimpleNamespace(active=types.SimpleNamespace(get_current_stream=lambda _: 7))
    runtime = types.SimpleNamespace(driver=driver)
    hook = types.SimpleNamespace(launch_enter_hook=types.SimpleNamespace(calls=[]))
    triton = types.SimpleNamespace(
        __version__="3.10.0", runtime=runtime, knobs=types.SimpleNamespace(runtime=hook)
    )
    monkeypatch.setattr(module, "triton", triton)
    monkeypatch.setattr(module, "CompiledKernel", Compiled)
    monkeypatch.setattr(module, "current_device", lambda: -1)
    monkeypatch.setattr(module, "interpreted", lambda: False)
    monkeypatch.setattr(module, "_compiled", {})
    module.warn_untested.cache_clear()
    yield module
    module.warn_untested.cache_clear()


def launch_thrice(module):
    kernel = Kernel(Compiled())
    launch, x = module.Launch(kernel, {"BLOCK": 16}), torch.ones(4)
    for count in (3, 4, 5):
        launch(2, (x, None), (count,))
    return kernel, x


def test_a_tested_triton_is_asked_once(launching, monkeypatch):
    monkeypatch.setattr(launching, "IS_DIRECT", True)
    kernel, x = launch_thrice(launching)
    assert [arguments for _, arguments, _ in kernel.by_triton] == [(x, None, 3)]
    # the grid, the stream, the kernel, three hooks; addresses, numbers, constants
    ends = [(*given[:4], *given[9:]) for given in kernel.compiled.launches]
    assert ends == [(2, 1, 1, 7, x.data_ptr(), None, n, None) for n in (4, 5)]


def test_an_untested_triton_is_asked_each_time_and_told_of_once(launching, monkeypatch):
    monkeypatch.setattr(launching, "IS_DIRECT", False)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        kernel, x = launch_thrice(launching)
    assert kernel.compiled.launches == []
    assert [arguments for _, arguments, _ in kernel.by_triton] == [(x, None, n) for n in (3, 4, 5)]
    for grid, _, constants in kernel.by_triton:
        assert grid == (2,)
        assert constants == {"BLOCK": 16, "enable_fp_fusion": True}
    (warning,) = told
    assert "was tested with triton 3.6 to " in str(warning.message)
