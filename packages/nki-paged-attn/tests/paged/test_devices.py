"""Tensors of a device: fakes that say what crosses, and what the kernel is called with.

A fake device is the CPU under another name; its kernel is ours, on the simulator.
"""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
from nki_paged_attn import Buckets, paged_attention
from nki_paged_attn._paged import devices

from .._cases import F32, make_case
from .._devices import device as device
from .._devices import on_simulator

torch = pytest.importorskip("torch")
MIXED = ([20, 1, 70, 1], [100, 300, 3, 4500])


def on_device(case, **options):
    tensors = [torch.from_numpy(x) for x in case.tensors[:4]]
    return paged_attention(*tensors, *case.tensors[4:], return_lse=True, **case.options, **options)


@pytest.mark.parametrize("programs", [1, 2])
def test_tensors_of_a_device_give_the_bits_of_arrays(device, programs, monkeypatch):
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", str(programs))
    case = make_case(*MIXED, head_dim=16, extra=2, sinks=np.linspace(-1, 1, 4).astype(F32))
    out, lse = on_device(case)
    monkeypatch.setattr(devices, "TORCH_DEVICES", ())
    expected = case.run()
    np.testing.assert_array_equal(out.numpy(), expected[0])
    np.testing.assert_array_equal(lse.numpy(), expected[1])
    assert device.calls[0][0] == programs


def test_an_unset_variable_means_two_programs_on_a_device(device, monkeypatch):
    monkeypatch.delenv("NEURON_LOGICAL_NC_CONFIG", raising=False)
    on_device(make_case([3], [20]))
    assert device.calls[0][0] == 2


def test_tables_alone_cross(device):
    """Not the cache, and not what of the table is not used."""
    case = make_case([1] * 4, [2000] * 4, heads=8, head_dim=64, block_size=32, spare=1)
    out, _ = on_device(case)
    assert isinstance(out, torch.Tensor)
    read = 2 * 2000 * 4 * 2 * 64 * 4
    assert sum(device.crossed) < read / 50
    arguments = device.calls[0][1]
    pool = torch.from_numpy(case.kv_cache)
    assert arguments["k_cache"].data_ptr() == pool[0].data_ptr()
    assert arguments["v_cache"].data_ptr() == pool[1].data_ptr()
    assert len(arguments["tables"]) * 4 > max(device.crossed)


@pytest.mark.parametrize("scale", [-0.7, 0.0, 1e-12, 1e-30, -1e-30])
def test_scales_that_queries_are_multiplied_by(device, scale, monkeypatch):
    case = make_case([5, 1], [20, 30], scale=scale)
    out, _ = on_device(case)
    monkeypatch.setattr(devices, "TORCH_DEVICES", ())
    np.testing.assert_array_equal(out.numpy(), case.run()[0])


def test_a_form_is_called_by_its_number_through_the_operator(monkeypatch):
    """``nki_op`` registers a function of tensors and an integer, which calls the wrapped kernel."""
    seen = {"registered": []}

    class Wrapped:
        def __init__(self, kernel):
            seen["kernel"] = kernel

        def __getitem__(self, programs):
            return lambda **arguments: on_simulator(arguments, programs)

    def nki_op(name, mutates_args):
        def register(function):
            schema = torch.library.infer_schema(function, mutates_args=())
            seen["registered"].append((name, mutates_args, schema))
            return function

        return register

    fake = types.ModuleType("torch_neuronx")
    fake.wrap_nki, fake.nki_op = Wrapped, nki_op
    monkeypatch.setitem(sys.modules, "torch_neuronx", fake)
    monkeypatch.setitem(sys.modules, "torch_neuronx.nki_hop", None)
    monkeypatch.setitem(sys.modules, "libtorch_neuronx_lite.nki.nki_hop", None)
    monkeypatch.setattr(devices, "load_kernel", lambda: "the kernel")
    monkeypatch.setattr(devices, "TORCH_DEVICES", ("cpu",))
    devices.torch_operator.cache_clear()
    case = make_case([5, 1], [20, 30])
    out, _ = on_device(case)
    again, _ = on_device(case, buckets=Buckets(batch=4))
    devices.torch_operator.cache_clear()
    assert seen["kernel"] == "the kernel"
    (name, mutates, schema), writer = seen["registered"]
    assert (name, mutates) == ("nki_paged_attn::form", {})
    assert schema.count("Tensor") == len(devices.TENSORS) + 2
    # the one of forms that write says what they write
    assert writer[:2] == ("nki_paged_attn::form_that_writes", {"k_cache", "v_cache"})
    assert torch.equal(out, again)
    monkeypatch.setattr(devices, "TORCH_DEVICES", ())
    np.testing.assert_array_equal(out.numpy(), case.run()[0])


def test_a_form_that_writes_changes_the_tensors_of_the_device(device, monkeypatch):
    case = make_case([5, 1], [20, 30])
    cache = torch.from_numpy(case.kv_cache.copy())
    tensors = [torch.from_numpy(x) for x in case.tensors[:3]]
    paged_attention(*tensors, cache, *case.tensors[4:6], [15, 29], write_cache=True)
    monkeypatch.setattr(devices, "TORCH_DEVICES", ())
    expected = case.kv_cache.copy()
    batch = (*case.tensors[:3], expected, *case.tensors[4:6], [15, 29])
    paged_attention(*batch, write_cache=True, backend="sim")
    assert not np.array_equal(expected, case.kv_cache)
    np.testing.assert_array_equal(cache.numpy(), expected)


def test_a_tensor_of_a_device_is_not_written_as_keys_and_values(device):
    case = make_case([5, 1], [20, 30])
    *tensors, cache = (torch.from_numpy(x.copy()) for x in case.tensors[:4])
    batch = (*case.tensors[4:6], [15, 29])
    paged_attention(*tensors, (cache[0], cache[0].clone()), *batch, write_cache=True)
    half = cache[0]
    with pytest.raises(ValueError, match="kv_cache must be two tensors for write_cache, got one"):
        paged_attention(*tensors, (half, half), *batch, write_cache=True)


def test_without_an_operator_nothing_runs_elsewhere(monkeypatch):
    for name in devices.TORCH_MODULES:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(devices, "TORCH_DEVICES", ("cpu",))
    devices.torch_operator.cache_clear()
    with pytest.raises(ImportError, match="need torch_neuronx or libtorch_neuronx_lite"):
        on_device(make_case([5], [20]))


def test_tensors_must_be_on_one_device(device):
    case = make_case([5], [20])
    tensors = [torch.from_numpy(x) for x in case.tensors[:3]]
    with pytest.raises(ValueError, match="kv_cache must be on q's device, cpu, got a ndarray"):
        paged_attention(*tensors, *case.tensors[3:])
    with pytest.raises(ValueError, match="backend must be auto or nki for tensors of a device"):
        on_device(case, backend="sim")


class FakeJax(types.ModuleType):
    """As much of JAX as the adapter asks for, on NumPy."""

    class Array(np.ndarray):
        platform = "neuron"

        def devices(self):
            return {type("Device", (), {"platform": self.platform})}


@pytest.fixture
def jax(monkeypatch):
    fake = FakeJax("jax")
    module = types.ModuleType("jax.numpy")
    for name in ("pad", "take", "where", "asarray", "zeros"):
        monkeypatch.setattr(module, name, getattr(np, name), raising=False)
    monkeypatch.setitem(sys.modules, "jax", fake)
    monkeypatch.setitem(sys.modules, "jax.numpy", module)
    return fake


def test_arrays_of_jax(jax, monkeypatch):
    case = make_case([5, 1, 40], [20, 30, 0])
    expected = case.run()
    seen = []

    class Kernel:
        def __getitem__(self, programs):
            plain = lambda x: np.array(x) if isinstance(x, np.ndarray) else x  # noqa: E731

            def run(**arguments):
                seen.append(arguments)
                return on_simulator({n: plain(x) for n, x in arguments.items()}, programs)

            return run

    monkeypatch.setattr(devices, "load_kernel", Kernel)
    arrays = [x.view(FakeJax.Array) for x in case.tensors[:4]]
    out, lse = paged_attention(*arrays, *case.tensors[4:], return_lse=True)
    np.testing.assert_array_equal(out, expected[0])
    np.testing.assert_array_equal(lse, expected[1])
    # parts of a JAX array are copies: two arrays reach the kernel themselves
    halves = tuple(x.copy().view(FakeJax.Array) for x in case.tensors[3])
    out = paged_attention(*arrays[:3], halves, *case.tensors[4:])
    np.testing.assert_array_equal(out, expected[0])
    assert seen[-1]["k_cache"] is halves[0]
    assert seen[-1]["v_cache"] is halves[1]
    monkeypatch.setattr(FakeJax.Array, "platform", "cpu")
    with pytest.raises(ValueError, match=r"must be on a Neuron device, got \['cpu'\]"):
        paged_attention(*arrays, *case.tensors[4:])


def test_a_cache_in_two_parts(device):
    case = make_case([5, 1, 40], [20, 30, 0])
    tensors = [torch.from_numpy(x) for x in case.tensors[:4]]
    halves = tensors[3].unbind()
    out = paged_attention(*tensors[:3], halves, *case.tensors[4:])
    np.testing.assert_array_equal(out.numpy(), case.run()[0])
    wrong = [
        (halves * 2, "kv_cache must be a tensor or two, keys and values, got 4"),
        (
            (halves[0], halves[1][1:]),
            r"kv_cache\[1\] must have the shape and dtype of kv_cache\[0\]",
        ),
        ((halves[0], np.ones(2)), r"kv_cache\[1\] must be on q's device, cpu, got a ndarray"),
    ]
    for cache, message in wrong:
        with pytest.raises(ValueError, match=message):
            paged_attention(*tensors[:3], cache, *case.tensors[4:])
