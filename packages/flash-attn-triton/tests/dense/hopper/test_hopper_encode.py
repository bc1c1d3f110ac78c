"""Tensor maps are encoded once for each place in memory, with the launcher of any Triton."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from attn_common import detect
from flash_attn_triton import flash_attn_func
from flash_attn_triton._linked.hopper.compat import TensorDescriptor
from flash_attn_triton._linked.hopper.tma import (
    MAX_KNOWN,
    EncodedLaunch,
    MapForm,
    MapLaunch,
    MappingLaunch,
    TensorMap,
    encode_once,
)
from flash_attn_triton._linked.launch.runtime import _compiled
from triton.backends.nvidia import driver

METADATA = {
    "swizzle": 3,
    "elem_size": 2,
    "elem_type": 10,
    "block_size": [1, 1, 1, 64, 64],
    "fp4_padded": False,
}
SIGNATURE = {0: "tensordesc<bf16[1,1,1,64,64]>", 1: "tensordesc<bf16[1,1,1,64,64]>", 2: "i32"}
# what comes ahead of the kernel's arguments
READY = SimpleNamespace(kernel=None)
OTHERS = tuple(range(getattr(driver, "_BASE_ARGS_FORMAT_LEN", 15)))


@pytest.fixture
def encoded(monkeypatch):
    """Addresses of the maps that the driver was asked to encode."""
    addresses = []

    def fill(address, *how):
        addresses.append(address)
        return address, *map(str, how)

    utils = SimpleNamespace(fill_tma_descriptor=fill, fill_tma_descriptor_tiled=fill)
    active = SimpleNamespace(active=SimpleNamespace(utils=utils))
    monkeypatch.setattr(driver.triton.runtime, "driver", active)
    return addresses


def launching(launches):
    """Return a compiled kernel as far as launching goes, and Triton's way to launch it."""

    def launcher(*arguments):
        launches.append(arguments)

    launch = driver.wrap_handle_tensordesc(launcher, SIGNATURE, [METADATA] * 2)
    return SimpleNamespace(run=SimpleNamespace(launch=launch)), launch


def call(launch, *own):
    if hasattr(driver, "_BASE_ARGS_FORMAT_LEN"):
        launch(*OTHERS, *own)
    else:
        launch(*OTHERS, own)


def flat(arguments):
    *others, last = arguments
    return [*others, *last] if isinstance(last, (list, tuple)) else [*others, last]


@pytest.mark.parametrize("ragged", [False, True])
def test_the_launcher_is_given_what_triton_gives_it(ragged, encoded):
    launches = []
    kernel, of_triton = launching(launches)
    encode_once(kernel)
    assert isinstance(kernel.run.launch, EncodedLaunch)
    shape = (300, 2, 64) if ragged else (2, 300, 2, 64)
    q, k = (torch.zeros(shape, dtype=torch.bfloat16) for _ in "qk")
    form = MapForm(q, 64, 64, ragged=ragged)
    for x, y in ((q, k), (k, q), (q, q)):
        call(of_triton, form(x), form(y), 7)
        call(kernel.run.launch, form(x), form(y), 7)
        want, got = launches[-2:]
        assert flat(got) == flat(want)
        assert flat(got)[-1] == 7


def test_maps_that_are_known_are_passed_encoded(encoded):
    launches = []
    kernel, of_triton = launching(launches)
    encode_once(kernel)
    launch = MapLaunch(None, {})
    q, k = (torch.zeros(2, 300, 2, 64, dtype=torch.bfloat16) for _ in "qk")
    form = MapForm(q, 64, 64, ragged=False)
    for is_known in (False, True):
        places = launch._places((form(q), form(k), q), READY)
        assert any(isinstance(x, TensorMap) for x in places) != is_known
        call(of_triton, form(q), form(k), q.data_ptr())
        call(kernel.run.launch, *places)
        want, got = launches[-2:]
        assert flat(got) == flat(want)
    assert encoded.count(q.data_ptr()) == 3  # ours once


def test_a_launch_maps_its_tensors(encoded):
    launches = []
    kernel, of_triton = launching(launches)
    encode_once(kernel)
    q, k = (torch.zeros(2, 300, 2, 64, dtype=torch.bfloat16) for _ in "qk")
    form = MapForm(q, 64, 64, ragged=False)
    launch = MappingLaunch(None, {}, (form, form))
    for is_known in (False, True, True):
        places = launch._places((q, k, q), READY)
        assert any(isinstance(x, TensorMap) for x in places) != is_known
        call(of_triton, form(q), form(k), q.data_ptr())
        call(kernel.run.launch, *places)
        want, got = launches[-2:]
        assert flat(got) == flat(want)
    mapped = launch._arguments((q, k, q))
    assert [type(x) for x in mapped] == [TensorDescriptor, TensorDescriptor, torch.Tensor]
    assert mapped[0].base is mapped[2] is q


def test_a_launch_copies_a_tensor_once_and_holds_the_copy(encoded):
    launches = []
    kernel, _ = launching(launches)
    encode_once(kernel)
    q = torch.randn(2, 300, 1, 64, dtype=torch.bfloat16).expand(2, 300, 2, 64)
    wide, narrow = (MapForm(q, 64, columns, ragged=False) for columns in (64, 32))
    launch = MappingLaunch(None, {}, (wide, narrow))
    for _ in range(2):
        places = launch._places((q, q), READY)
        # the maps themselves, known or not: they hold the memory until the launch has read it
        assert [type(x) for x in places] == [TensorMap] * 2
        assert places[0].base is places[1].base
        assert places[0].base.is_contiguous()
        assert torch.equal(places[0].base, q)
        call(kernel.run.launch, *places)
        assert flat(launches[-1])[len(OTHERS)][0] == places[0].base.data_ptr()


def test_a_place_is_encoded_once(encoded):
    kernel, _ = launching([])
    encode_once(kernel)
    encode_once(kernel)  # nothing more to do
    q, k = (torch.zeros(1, 64, 1, 64, dtype=torch.bfloat16) for _ in "qk")
    form = MapForm(q, 64, 64, ragged=False)
    for _ in range(3):
        call(kernel.run.launch, form(q), form(k), 0)
    assert encoded == [q.data_ptr(), k.data_ptr()]
    # tensors of another form lie there in another way
    other = MapForm(q.expand(1, 64, 1, 64).transpose(1, 2), 64, 64, ragged=False)
    call(kernel.run.launch, other(q.transpose(1, 2)), other(k.transpose(1, 2)), 0)
    assert len(encoded) == 4


def test_places_are_forgotten(encoded):
    kernel, _ = launching([])
    encode_once(kernel)
    memory = torch.zeros(MAX_KNOWN + 10, 64, 1, 64, dtype=torch.bfloat16)
    form = MapForm(memory[:1], 64, 64, ragged=False)
    for i in range(len(memory)):
        call(kernel.run.launch, form(memory[i : i + 1]), form(memory[:1]), 0)
    assert len(form.encoded[False]) <= MAX_KNOWN


def test_another_launcher_stays_as_it_is():
    launch = lambda *arguments: None  # noqa: E731
    kernel = SimpleNamespace(run=SimpleNamespace(launch=launch))
    encode_once(kernel)
    assert kernel.run.launch is launch
    encode_once(SimpleNamespace(run=print))


@pytest.mark.device
def test_calls_of_the_package_ask_their_maps(device):
    if not detect(device).is_hopper:
        pytest.skip("only calls on Hopper take maps")
    q, k, v = (torch.randn(1, 64, 2, 64, dtype=torch.bfloat16, device=device) for _ in "qkv")
    for _ in range(2):
        flash_attn_func(q, k, v)
    kernels = {key[0]: kernel for key, kernel in _compiled.items()}
    assert isinstance(kernels["forward_kernel"].run.launch, EncodedLaunch)


@pytest.mark.device
def test_threads_that_have_not_used_the_gpu(device):
    if not detect(device).is_hopper:
        pytest.skip("only calls on Hopper take maps")
    q, k, v = (torch.randn(1, 64, 2, 64, dtype=torch.bfloat16, device=device) for _ in "qkv")
    # what it leaves is memory that can be had without the driver
    want = flash_attn_func(q, k, v).clone()
    results = []
    thread = threading.Thread(target=lambda: results.append(flash_attn_func(q, k, v)))
    thread.start()
    thread.join()
    assert torch.equal(results[0], want)


@pytest.mark.parametrize("ragged", [False, True])
def test_an_untested_version_is_given_the_map_of_its_own_class(ragged):
    q = torch.zeros((300, 2, 64) if ragged else (2, 300, 2, 64), dtype=torch.bfloat16)
    ours = MapForm(q, 64, 64, ragged=ragged)(q)
    public = ours.public
    assert type(public) is TensorDescriptor
    assert public.base is q
    for name in ("shape", "strides"):
        assert getattr(public, name) == getattr(ours, name)
    assert public.block_shape == [1, 1, 1, 64, 64]
    assert public.layout.swizzle_byte_width == 128
