"""Arguments by names: entries, device functions, and how few calls lie before a launch."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from prefix_prefill import (
    api,
    context_attention_fwd,
    dropin,
    flash_attn_with_kvcache,
    paged_attn_func,
    reshape_and_cache,
)
from prefix_prefill._cache.kernels import launch as write_launch
from prefix_prefill._cache.kernels import words
from prefix_prefill._cache.kernels import write as cache
from prefix_prefill._kvcache import api as public_kvcache
from prefix_prefill._kvcache.kernels import append
from prefix_prefill._kvcache.kernels import launch as kvcache_launch
from prefix_prefill._linked.hopper import tickets
from prefix_prefill._linked.host.forms import Memory
from prefix_prefill._linked.invariant import arithmetic as invariant_arithmetic
from prefix_prefill._linked.invariant import kernels as invariant_kernels
from prefix_prefill._linked.invariant import walk as invariant_walk
from prefix_prefill._linked.launch import runtime
from prefix_prefill._mla.hopper import (
    fp8 as mla_fp8,
)
from prefix_prefill._mla.hopper import kernel as hopper_mla
from prefix_prefill._mla.hopper import (
    producer as mla_producer,
)
from prefix_prefill._mla.portable import kernel as portable_mla
from prefix_prefill._paged import launch as paged_launch
from prefix_prefill._paged import ops
from prefix_prefill._paged.call import Tensors
from prefix_prefill._paged.hopper import arguments as hopper_arguments
from prefix_prefill._paged.hopper import attention as hopper_attention
from prefix_prefill._paged.hopper import (
    consumer,
    producer,
    scales,
    tiles,
    wide,
    wide_producer,
    widening,
)
from prefix_prefill._paged.hopper import structures as hopper
from prefix_prefill._paged.portable import (
    arguments,
    attention,
    merge,
    primitives,
    queries,
    results,
    schedule,
    structures,
    walk,
)

from .._linked.gpus import absent_gpu

pytestmark = pytest.mark.eager

DEVICE_MODULES = [
    attention,
    cache,
    append,
    merge,
    portable_mla,
    primitives,
    queries,
    results,
    schedule,
    walk,
    words,
    hopper_attention,
    consumer,
    producer,
    scales,
    tiles,
    wide_producer,
    widening,
    hopper_mla,
    mla_fp8,
    mla_producer,
    wide,
    invariant_arithmetic,
    invariant_kernels,
    invariant_walk,
]
MOST_ARGUMENTS = 12
MOST_FRAMES = 5


def names(function: Any) -> list[str]:
    return list(inspect.signature(function.fn).parameters)


def test_the_tensors_of_a_call_are_in_the_order_of_the_kernel():
    """Plans pass them on as they are."""
    ordered = [f"{name}_ptr" for name in Tensors._fields]
    assert [*ordered, "part_out_ptr", "part_lse_ptr"] == [*arguments.Tensors._fields]


def test_what_a_kernel_is_compiled_with_is_in_upper_case():
    for module in (arguments, structures, hopper, hopper_arguments):
        for structure in vars(module).values():
            fields = getattr(structure, "_fields", ())
            assert len({name.isupper() for name in fields}) <= 1, structure


@pytest.mark.parametrize("module", DEVICE_MODULES, ids=lambda module: module.__name__[15:])
def test_a_device_function_takes_few_arguments(module):
    found = [f for f in vars(module).values() if hasattr(f, "fn")]
    found = [f for f in found if not f.__name__.endswith("_kernel")]
    assert found
    for function in found:
        assert len(names(function)) <= MOST_ARGUMENTS, function.__name__


@pytest.fixture
def launches(monkeypatch):
    """Count the Python frames of each launch, from a public function to what it launches with."""
    counts: list[int] = []
    functions = paged_attn_func, context_attention_fwd, reshape_and_cache, flash_attn_with_kvcache
    public = {f.__code__ for f in functions}

    def launch(*_: Any) -> None:
        frame, count = sys._getframe(1), 1
        while frame.f_code not in public:
            frame, count = frame.f_back, count + 1
        counts.append(count)

    def look_up(self: Any, variant: Any, *_: Any) -> runtime.Ready:
        kernel = types.SimpleNamespace(function=0, packed_metadata=None, run=None)
        self._ready[variant] = runtime.Ready(
            kernel, 0, (), launch, lambda _: 0, runtime.NO_PROFILER
        )
        return self._ready[variant]

    monkeypatch.setattr(runtime.Launch, "_look_up", look_up)
    for module in (runtime, tickets):
        monkeypatch.setattr(module, "current_device", lambda: 0)
    # plans are for GPUs
    monkeypatch.setattr(ops, "plan_of", paged_launch.plan_of)
    monkeypatch.setattr(ops, "write_plan_of", write_launch.write_plan_of)
    monkeypatch.setattr(ops, "kvcache_plans_of", kvcache_launch.plans_of)
    known = (api, "_known"), (dropin, "_known"), (api, "_writes"), (public_kvcache, "_known")
    for module, name in known:
        monkeypatch.setattr(module, name, Memory())
    return counts


def meta(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype, device="meta")


def attend(tokens: int, batch: int, splits: int, invariant: bool = False) -> None:
    """Attend as engines do in a step; with many tokens of a sequence this is prefill."""
    small = [meta(batch, 64, dtype=torch.int32), meta(batch + 1, dtype=torch.int32)]
    small += [meta(batch, dtype=torch.int32)]
    q, caches = meta(tokens, 32, 128), [meta(100, 16, 8, 128) for _ in "kv"]
    paged_attn_func(
        q, *caches, *small, tokens // batch, 2000, num_splits=splits, invariant=invariant
    )


def attend_by_the_drop_in() -> None:
    small = [meta(4, 64, dtype=torch.int32), meta(5, dtype=torch.int32), meta(4, dtype=torch.int32)]
    q, caches = meta(2048, 32, 128), [meta(100, 16, 8, 128) for _ in "kv"]
    given = q, None, None, torch.empty_like(q), "auto", *caches, *small, None, 512, None, None
    context_attention_fwd(*given)


def write() -> None:
    new, caches = [meta(64, 8, 128) for _ in "kv"], [meta(100, 16, 8, 128) for _ in "kv"]
    reshape_and_cache(*new, *caches, meta(64, dtype=torch.int64))


def append_and_attend() -> None:
    """One new token a sequence, in rows of 1000."""
    caches, cos = [meta(4, 1000, 8, 128) for _ in "kv"], meta(1000, 64)
    new = [meta(4, 1, 8, 128) for _ in "kv"]
    lengths = meta(4, dtype=torch.int32)
    flash_attn_with_kvcache(meta(4, 1, 32, 128), *caches, *new, cos, cos, lengths, num_splits=1)


@pytest.mark.parametrize("gpu", ["nvidia:sm_90", "nvidia:sm_80", "amd:gfx942"])
@pytest.mark.parametrize(
    ("call", "kernels"),
    [
        (lambda: attend(64, 64, 1), 1),
        (lambda: attend(64, 64, 4), 2),
        (lambda: attend(2048, 4, 1), 2),
        (lambda: attend(4, 4, 0, True), {"nvidia:sm_90": 1}),  # else a merge behind it
        (attend_by_the_drop_in, 2),
        (write, 1),
        (append_and_attend, 3),
    ],
    ids=["decode", "splits", "prefill", "invariant", "drop_in", "write", "kvcache"],
)
def test_few_frames_lie_before_a_warm_launch(call: Callable[[], None], kernels, gpu, launches):
    with absent_gpu(gpu):
        call()
        launches.clear()
        call()
    assert len(launches) == (kernels.get(gpu, 2) if isinstance(kernels, dict) else kernels)
    assert max(launches) <= MOST_FRAMES, launches
