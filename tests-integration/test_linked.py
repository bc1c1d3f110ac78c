"""What is linked into every kernel package: versions that were tested, and what serves others."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import types
import warnings
from importlib.machinery import ModuleSpec

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


def test_what_is_missing_or_older_is_named(versions, monkeypatch):
    monkeypatch.setitem(sys.modules, "friend", None)
    with pytest.raises(ModuleNotFoundError) as told:
        versions.need("friend", (1, 10), "ours")
    install = 'pip install "friend>=1.10"'
    missing = f"ours needs friend 1.10 or newer, which is not installed: {install}"
    assert str(told.value) == missing
    friend = types.ModuleType("friend")
    friend.__spec__ = ModuleSpec("friend", None)
    monkeypatch.setitem(sys.modules, "friend", friend)
    friend.__version__ = "1.9.3"
    with pytest.raises(ImportError) as told:
        versions.need("friend", (1, 10), "ours")
    assert str(told.value) == f"ours needs friend 1.10 or newer, got 1.9.3: {install}"
    for friend.__version__ in ("1.10", "1.10.0rc1", "2.0+git1"):
        assert versions.need("friend", (1, 10), "ours") >= (1, 10)


def test_what_is_too_new_is_named(versions, monkeypatch):
    friend = types.ModuleType("friend")
    friend.__spec__ = ModuleSpec("friend", None)
    monkeypatch.setitem(sys.modules, "friend", friend)
    for friend.__version__ in ("1.9.3", "1.11", "1.11.0rc1", "2.0+git1"):
        with pytest.raises(ImportError) as told:
            versions.need("friend", (1, 10), "ours", (1, 11))
        needed = "ours needs friend 1.10 or newer, before 1.11"
        install = 'pip install "friend>=1.10,<1.11"'
        assert str(told.value) == f"{needed}, got {friend.__version__}: {install}"
    friend.__version__ = "1.10.7"
    assert versions.need("friend", (1, 10), "ours", (1, 11)) == (1, 10)


@pytest.mark.parametrize(("numpy", "works"), [((2, 3), True), ((2, 4), False)])
def test_an_old_interpreter_names_the_numpy_that_it_takes(versions, numpy, works, monkeypatch):
    monkeypatch.setattr(versions, "need", lambda library, *_: {"numpy": numpy}.get(library, (3, 6)))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    if works:
        versions.need_triton("ours")
        return
    with pytest.raises(ImportError, match=r"Triton 3\.6 needs numpy before 2\.4, got 2\.4: pip"):
        versions.need_triton("ours")


# what is told of, in the order of the cases
MISSING = """
import json, sys, types, warnings
from importlib.machinery import ModuleSpec
import blocksparse_attn, flash_attn_triton, lightning_attn, prefix_prefill, torch
q = torch.ones(1, 8, 1, 16)
layout = blocksparse_attn.patterns.sliding_window(32, 1, block_size=16, device="cpu")
def lightning():
    lightning_attn.lightning_attn_func(q, q, q, torch.ones(1))
def adapter(package):
    __import__(f"{package}.integrations.transformers")
def vllm():
    import prefix_prefill.integrations.vllm as adapter
    adapter.register()
cases = (
    ("numpy", lambda: flash_attn_triton.flash_attn_func(q, q, q)),
    ("triton", lambda: flash_attn_triton.flash_attn_func(q, q, q)),
    ("triton", lightning),
    ("transformers", lambda: adapter("flash_attn_triton")),
    ("transformers", lambda: adapter("prefix_prefill")),
    ("vllm", vllm),
    ("matplotlib", layout.plot),
)
told = []
for name, call in cases:
    kept = sys.modules.pop(name, None)
    sys.modules[name] = None
    try:
        call()
    except ModuleNotFoundError as error:
        told.append(str(error))
    del sys.modules[name]
    if kept is not None:
        sys.modules[name] = kept
old = sys.modules["vllm"] = types.ModuleType("vllm")
old.__spec__, old.__path__, old.__version__ = ModuleSpec("vllm", None), [], "0.20.1"
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    vllm()
print(json.dumps(told + [str(w.message) for w in caught]))
"""


def test_optional_libraries_are_named_where_they_are_missing(python):
    text = python(MISSING, env=os.environ | {"TRITON_INTERPRET": "1"})
    told = json.loads(text.splitlines()[-1])
    not_there = "{} needs {} or newer, which is not installed: pip install "
    expected = [
        not_there.format("a kernel of flash-attn-triton, interpreted,", "numpy 1.22"),
        not_there.format("a kernel of flash-attn-triton", "triton 3.6"),
        not_there.format("a kernel of lightning-attn", "triton 3.6"),
        not_there.format("flash_attn_triton.integrations.transformers", "transformers 5.8"),
        "prefix_prefill.integrations.transformers needs transformers 5.17 or newer, before 5.25, "
        "which is not installed: pip install ",
        not_there.format("prefix_prefill.integrations.vllm", "vllm 0.33"),
        not_there.format("BlockSparseLayout.plot", "matplotlib 3.0"),
        "nothing is registered: prefix_prefill.integrations.vllm needs vllm 0.33 or newer, got "
        "0.20.1: pip install ",
    ]
    assert [x.partition('"')[0] for x in told] == expected


# imports every module of launches without Triton, then what compiles a kernel
LAUNCHES = """
import importlib, os, pkgutil, sys
package = importlib.import_module(os.environ["PACKAGE"])
sys.modules["triton"] = None
prefix = package.__name__ + "."
count = 0
for found in pkgutil.walk_packages(package.__path__, prefix, onerror=lambda _: None):
    if found.name.rpartition(".")[2] in ("launch", "plans", "tma", "runtime"):
        importlib.import_module(found.name)
        count += 1
print(count)
try:
    importlib.import_module(prefix + "_linked.launch.compiler")
except ModuleNotFoundError as error:
    print(error)
"""


@pytest.mark.parametrize("name", PACKAGES)
def test_launches_do_without_triton_until_they_compile(name, python):
    count, told = python(LAUNCHES, env=os.environ | {"PACKAGE": name}).splitlines()[-2:]
    assert int(count) >= 4
    wanted = f"a kernel of {name.replace('_', '-')} needs triton 3.6 or newer, which is not"
    assert told.startswith(wanted)


# the command of a package where neither Triton nor a GPU is
CHECKS = """
import os, runpy, sys
sys.modules["triton"] = None
sys.argv[1:] = []
runpy.run_module(os.environ["PACKAGE"], run_name="__main__")
"""


@pytest.mark.parametrize("name", PACKAGES)
def test_the_self_check_does_without_triton(name, python):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    told = python(CHECKS, env=environment | {"PACKAGE": name, "CUDA_VISIBLE_DEVICES": ""})
    assert "neither a GPU nor Triton" in told
    assert told.splitlines()[-1].endswith("of the error budget, ok")


class Compiled:
    """Replaces a compiled kernel: keeps what it is launched with."""

    function = packed_metadata = None

    def __init__(self) -> None:
        self.launches = []

    def run(self, *arguments):
        self.launches.append(arguments)


class Kernel:
    """Replaces a kernel; ``by_triton`` keeps what reaches Triton's own launch."""

    name = "kernel"
    arg_names = params = ("x_ptr", "y_ptr", "count", "BLOCK")

    def __init__(self, compiled) -> None:
        self.by_triton, self.compiled = [], compiled

    def load(self):
        return self

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            self.by_triton.append((grid, arguments, constants))
            return self.compiled

        return launch


@pytest.fixture(params=PACKAGES)
def launching(request, monkeypatch):
    """Return the module of launches, for a driver of no GPU."""
    module = importlib.import_module(f"{request.param}._linked.launch.runtime")
    driver = types.SimpleNamespace(active=types.SimpleNamespace(get_current_stream=lambda _: 7))
    runtime = types.SimpleNamespace(driver=driver)
    hook = types.SimpleNamespace(launch_enter_hook=types.SimpleNamespace(calls=[]))
    triton = types.SimpleNamespace(
        __version__="3.10.0", runtime=runtime, knobs=types.SimpleNamespace(runtime=hook)
    )
    compiler = importlib.import_module(f"{request.param}._linked.launch.compiler.launches")
    monkeypatch.setattr(compiler, "triton", triton)
    monkeypatch.setattr(compiler, "CompiledKernel", Compiled)
    monkeypatch.setattr(module, "current_device", lambda: -1)
    monkeypatch.setattr(module, "interpreted", lambda: False)
    monkeypatch.setattr(module, "_compiled", {})
    warn = compiler.warn_untested
    warn.cache_clear()
    monkeypatch.setattr(module, "compiler", compiler, raising=False)
    yield module
    warn.cache_clear()


def launch_thrice(module):
    kernel = Kernel(Compiled())
    launch, x = module.Launch(kernel, {"BLOCK": 16}), torch.ones(4)
    for count in (3, 4, 5):
        launch(2, (x, None), (count,))
    return kernel, x


def test_a_tested_triton_is_asked_once(launching, monkeypatch):
    monkeypatch.setattr(launching.compiler, "IS_DIRECT", True)
    kernel, x = launch_thrice(launching)
    assert [arguments for _, arguments, _ in kernel.by_triton] == [(x, None, 3)]
    # the grid, the stream, the kernel, three hooks; addresses, numbers, constants
    ends = [(*given[:4], *given[9:]) for given in kernel.compiled.launches]
    assert ends == [(2, 1, 1, 7, x.data_ptr(), None, n, None) for n in (4, 5)]


def test_a_launch_keeps_to_tensors_like_the_first(launching, monkeypatch):
    """What was compiled for a None or a dtype reads another argument wrongly."""
    monkeypatch.setattr(launching.compiler, "IS_DIRECT", False)
    monkeypatch.setattr(launching.compiler, "warn_untested", lambda *_: None)
    launch, x = launching.Launch(Kernel(Compiled()), {"BLOCK": 16}), torch.ones(4)
    launch(2, (x, None), (3,))
    for others in ((x, x), (x.half(), None), (x.to("meta"), None)):
        with pytest.raises(TypeError, match="must have tensors like those of its first call"):
            launch(2, others, (3,))
    launch(2, (x.clone(), None), (2**40,))


def test_an_untested_triton_is_asked_each_time_and_told_of_once(launching, monkeypatch):
    monkeypatch.setattr(launching.compiler, "IS_DIRECT", False)
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
