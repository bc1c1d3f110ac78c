"""Kernels that are built before the call that launches them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import flash_attn_triton
import pytest
import torch
import triton
from flash_attn_triton import flash_attn_func, flash_attn_varlen_func, prepare
from flash_attn_triton._dense import launch
from flash_attn_triton._dense.call import BackwardCall, ForwardCall, Options, Tensors
from flash_attn_triton._dense.portable.form import Form
from flash_attn_triton._linked.launch import builds
from flash_attn_triton._linked.launch.compiler import workers
from flash_attn_triton._linked.launch.runtime import Launch

from ._linked.budget import offsets
from ._linked.gpus import absent_gpu, chosen, counting

# ---- the function


def tokens(*size, dtype=torch.float16, device="cpu"):
    return [torch.randn(size, device=device).to(dtype) for _ in "qkv"]


@pytest.mark.eager
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_it_writes_nothing_and_draws_nothing(grad, backward, device):
    x = [t.requires_grad_(grad) for t in tokens(2, 9, 2, 16, device=device)]
    before, state = [t.clone() for t in x], torch.get_rng_state()
    options = {"dropout_p": 0.1, "causal": True, "return_attn_probs": True}
    assert prepare(*x, backward=backward, **options) is None
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(*pair) for pair in zip(x, before, strict=True))
    assert all(t.grad is None for t in x)


@pytest.mark.eager
def test_it_takes_packed_calls(device):
    starts = offsets([4, 5], device)
    options = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 5}
    x = tokens(9, 2, 16, device=device)
    assert prepare(*x, **options, max_seqlen_k=5, window_size=(3, 0)) is None
    with pytest.raises(ValueError, match="max_seqlen_k"):
        prepare(*x, **options, max_seqlen_k=-1)


@pytest.mark.eager
@pytest.mark.parametrize("known", [False, True])
def test_it_checks_the_arguments(known, device):
    q, k, v = tokens(1, 8, 2, 16, device=device)
    if known:
        flash_attn_func(q, k, v)
    prepare(q, k, v)
    with pytest.raises(TypeError, match="backward must be a bool, got str"):
        prepare(q, k, v, backward="no")
    with pytest.raises(TypeError, match="sm_scale"):
        prepare(q, k, v, sm_scale=1.0)
    with pytest.raises(TypeError, match="dtype"):
        prepare(q, k.float(), v)
    with pytest.raises(ValueError, match="softcap"):
        prepare(q, k, v, softcap=-1.0)
    starts = offsets([8], device)
    with pytest.raises(NotImplementedError, match="block_table"):
        prepare(
            q[0],
            k[0],
            v[0],
            cu_seqlens_q=starts,
            cu_seqlens_k=starts,
            max_seqlen_q=8,
            max_seqlen_k=8,
            block_table=starts,
        )


# ---- what is built


@pytest.fixture(autouse=True)
def nothing_built(monkeypatch):
    monkeypatch.setattr(builds, "_builds", {})
    monkeypatch.setattr(launch, "_begun", set())
    monkeypatch.setattr(workers, "IS_OFFERED", False)


@pytest.fixture
def built(monkeypatch):
    """Names of the kernels that are built; nothing is compiled."""
    names, lock = [], threading.Lock()

    def build(self, tensors, numbers, is_apart=False):
        assert all(t is None or t.device.type == "meta" for t in tensors)
        with lock:
            names.append(self._kernel.name)

    monkeypatch.setattr(Launch, "build", build)
    empty_like = torch.empty_like

    def checked(x, **options):
        assert not x.is_meta  # it would import SymPy, for which the builds would wait
        return empty_like(x, **options)

    monkeypatch.setattr(torch, "empty_like", checked)
    return names


def meta(size, dtype=torch.bfloat16, **options):
    return torch.empty(size, dtype=dtype, device="meta", **options)


FP8 = torch.float8_e4m3fn
ROWS, PORTABLE = "row_kernel", {"dkdv_kernel", "dq_kernel"}
FIXED, HOPPER = (2, 512, 4, 64), {"row_kernel", "backward_kernel", "round_kernel"}


@pytest.mark.aot
@pytest.mark.parametrize(
    ("gpu", "dtype", "options", "kernels"),
    [
        ("nvidia:sm_80", torch.bfloat16, {}, {"forward_kernel", ROWS, *PORTABLE}),
        ("nvidia:sm_80", torch.bfloat16, {"backward": False}, {"forward_kernel"}),
        ("amd:gfx942", torch.float32, {"dropout_p": 0.1}, {"forward_kernel", ROWS, *PORTABLE}),
        ("nvidia:sm_90", torch.bfloat16, {"causal": True}, {"forward_kernel", *HOPPER}),
        ("nvidia:sm_90", torch.bfloat16, {"window_size": (9, 0)}, {"forward_kernel", *HOPPER}),
        ("nvidia:sm_90", FP8, {}, {"forward_kernel", "transpose_values"}),
    ],
)
def test_the_kernels_of_both_passes_are_built(gpu, dtype, options, kernels, built):
    with absent_gpu(gpu):
        for _ in range(2):  # once each
            prepare(*[meta(FIXED, dtype) for _ in "qkv"], **options)
    assert sorted(built) == sorted(kernels)


@pytest.mark.aot
@pytest.mark.parametrize("wanted", [False, True])
def test_the_gradient_of_a_bias_is_built_where_it_is_wanted(wanted, built):
    bias = meta((1, 4, 512, 512), requires_grad=wanted)
    with absent_gpu("nvidia:sm_80"):
        prepare(*[meta(FIXED) for _ in "qkv"], bias=bias)
    assert ("bias_gradient_kernel" in built) == wanted


@pytest.mark.aot
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("gpu", ["nvidia:sm_80", "nvidia:sm_90", "amd:gfx942"])
def test_what_is_built_is_what_is_launched(gpu, packed, monkeypatch):
    """The variants by Triton's own account, which counts but does not compile."""
    waited = set()
    monkeypatch.setattr(builds, "wait", waited.add)
    size, options = ((700, 4, 96), {}) if packed else ((2, 350, 4, 96), {"causal": True})
    if packed:
        starts = meta(3, torch.int32)
        options = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
        options |= {"max_seqlen_q": 350, "max_seqlen_k": 350}
    x = [meta(size).requires_grad_() for _ in "qkv"]
    with counting(gpu) as built:
        prepare(*x, **options)
    with counting(gpu) as launched, torch.no_grad():
        right = 0 if not packed else -1
        some = (starts, starts) if packed else (None, None)
        numbers = 350, 350, Options(96**-0.5, -1, right, 0.0, 0.0)
        call = ForwardCall(Tensors(*x, *some), *numbers, torch.bfloat16)
        out, lse = launch.launch_forward(call)
        given = BackwardCall(
            out, *x, out, lse, None, *some, *[None] * 6, *numbers, False, needs_dbias=False
        )
        launch.launch_backward(given)
    assert len(launched) == 4
    assert built == launched
    assert waited == set(builds._builds)  # each launch asks for its build


# ---- when


@pytest.mark.aot
def test_a_new_kind_of_call_begins_its_builds(built):
    def plan(length, *, deterministic=False, needs_gradient=True, dtype=torch.bfloat16):
        x = Tensors(*[meta((1, length, 4, 64), dtype) for _ in "qkv"])
        made = launch.plan_calls(
            x,
            Options(0.125, -1, 0, 0.0, 0.0),
            torch.bfloat16,
            deterministic=deterministic,
            needs_gradient=needs_gradient,
            invariant=False,
        )
        assert made is not None
        for future in builds._builds.values():
            future.result()

    with absent_gpu("nvidia:sm_90"):
        plan(512, needs_gradient=False)
        assert built == []  # one kernel: its launch builds it
        plan(512)
        assert sorted(built) == sorted({"forward_kernel", *HOPPER})
        built.clear()
        plan(640)  # of the same kind
        assert built == []
        plan(512, deterministic=True)
        # which adds in order; the others are there
        assert built == ["backward_kernel"]
        built.clear()
        plan(512, dtype=FP8, needs_gradient=False)
        assert sorted(built) == ["forward_kernel", "transpose_values"]


class Unnamed:
    """In place of a kernel's name."""

    def load(self):
        return None


class Slow:
    """In place of a launch: its build waits to be told how it ends."""

    def __init__(self, error=None):
        self.error, self.go, self.done = error, threading.Event(), False

    def build(self, tensors, numbers, is_apart=False):
        self.go.wait(10)
        if self.error:
            raise self.error
        self.done = True


@pytest.mark.eager
def test_a_launch_waits_for_its_build(monkeypatch):
    monkeypatch.setattr(triton.runtime.driver, "_active", None, raising=False)
    with absent_gpu("nvidia:sm_90"):
        good, bad = Slow(), Slow(RuntimeError("no such instruction"))
        a, b, c = (Unnamed() for _ in "abc")
        noted = [builds.Build(x, (name,), (), ()) for name, x in ((a, good), (b, bad))]
        futures = builds.start(noted, torch.device("meta"))
        threading.Timer(0.05, good.go.set).start()
        builds.wait((None, a))
        assert good.done
        bad.go.set()
        builds.wait((None, b))  # the launch builds again, and raises what it finds
        with pytest.raises(RuntimeError, match="no such instruction"):
            futures[1].result()
        builds.wait((None, c))  # never begun


# ---- in processes of their own


@pytest.fixture
def processes(monkeypatch, tmp_path):
    """Commands of the processes that builds start, with nothing on disk."""
    started, run = [], subprocess.run

    def counted(command, **options):
        if "input" in options:
            started.append(command)
        return run(command, **options)

    monkeypatch.setattr(workers, "IS_OFFERED", True)
    monkeypatch.setattr(subprocess, "run", counted)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return started


def build_apart(name):
    """Build one kernel of a call apart; say whether this process found it on disk."""
    hits = []
    x = Tensors(*[meta(FIXED) for _ in "qkv"])
    before = triton.knobs.compilation.listener
    triton.knobs.compilation.listener = lambda *_, cache_hit, **__: hits.append(cache_hit)
    try:
        with absent_gpu("nvidia:sm_90"):
            form = Form(x, Options(0.125, -1, 0, 0.0, 0.0))
            noted = launch._builds_of(form, x, torch.bfloat16, False, True, False)
            (build,) = (b for b in noted if b.form[0].name == name)
            build.launch.build(build.tensors, build.numbers, True)
    finally:
        triton.knobs.compilation.listener = before
    (hit,) = hits
    return hit


@pytest.mark.aot
@pytest.mark.parametrize("name", chosen(["forward_kernel", "backward_kernel"], ["row_kernel"]))
def test_another_process_compiles(name, processes):
    assert build_apart(name)
    assert len(processes) == 1
    assert build_apart(name)
    assert len(processes) == 1  # the disk has it


@pytest.mark.aot
def test_a_process_that_fails_leaves_the_build_to_this_one(processes, monkeypatch):
    monkeypatch.setattr(workers, "SCRIPT", "there is no such file")
    assert not build_apart("row_kernel")
    assert len(processes) == 1


@pytest.mark.eager
@pytest.mark.once
def test_kernels_import_no_pytorch():
    """It would take a process longer than a compilation."""
    root = Path(flash_attn_triton.__file__).parent
    paths = [x for x in root.rglob("*.py") if "_linked" not in x.parts and defines_entries(x)]
    kernels = [".".join(x.relative_to(root).with_suffix("").parts) for x in paths]
    assert "_dense.hopper.backward.kernel" in kernels
    code = f"""
import importlib, sys, types
package = sys.modules["flash_attn_triton"] = types.ModuleType("flash_attn_triton")
package.__path__ = [{str(root)!r}]
for name in {kernels!r}:
    importlib.import_module("flash_attn_triton." + name)
assert "torch" not in sys.modules
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def defines_entries(path):
    """Say whether a file has kernels that are launched."""
    return re.search(r"^def \w*_kernel\(|^def transpose_values\(", path.read_text(), re.MULTILINE)


@pytest.mark.device
def test_calls_after_it_compile_nothing(device):
    x = [t.to(torch.bfloat16).requires_grad_() for t in tokens(1, 192, 4, 64, device=device)]
    starts = offsets([100, 92], device)
    packed = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 100}
    packed |= {"max_seqlen_k": 100, "softcap": 3.0}
    prepare(*x, causal=True)
    prepare(*[t[0] for t in x], **packed)
    compiled = []
    before = triton.knobs.runtime.jit_cache_hook
    triton.knobs.runtime.jit_cache_hook = lambda **of: compiled.append(of["repr"])
    try:
        flash_attn_func(*x, causal=True).sum().backward()
        flash_attn_varlen_func(*[t[0] for t in x], **packed).sum().backward()
    finally:
        triton.knobs.runtime.jit_cache_hook = before
    assert compiled == []
