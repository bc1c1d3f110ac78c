"""A fake device: the CPU under another name, with our simulator for its kernel."""

from __future__ import annotations

import types

import pytest
from nki_paged_attn import simulate
from nki_paged_attn._paged import backends, devices


def on_simulator(arguments, programs):
    """Run a form on tensors of PyTorch."""
    return simulate(backends.simulated_kernel()[programs], strict=False)(**arguments)


@pytest.fixture
def device(monkeypatch):
    """Take the CPU for a device; return what crosses to it, and the calls of the kernel."""
    seen = types.SimpleNamespace(crossed=[], calls=[])
    put = devices.TorchDevice.put

    def count(self, array):
        seen.crossed.append(array.nbytes)
        return put(self, array)

    def run(self, arguments, programs):
        seen.calls.append((programs, arguments))
        return on_simulator(arguments, programs)

    monkeypatch.setattr(devices, "TORCH_DEVICES", ("cpu",))
    monkeypatch.setattr(devices.TorchDevice, "put", count)
    monkeypatch.setattr(devices.TorchDevice, "run", run)
    return seen
