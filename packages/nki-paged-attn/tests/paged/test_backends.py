"""Point 15: which backend is taken, with modules that are there, missing, or the wrong ones."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from nki_paged_attn._paged import backends
from nki_paged_attn._paged.backends import choose_backend

from .._cases import make_case


@pytest.fixture
def modules(monkeypatch):
    """Say which of nki and neuronxcc can be imported."""
    monkeypatch.delenv(backends.VARIABLE, raising=False)

    def install(*names):
        for name in ("nki", "neuronxcc"):
            found = types.ModuleType(name) if name in names else None
            monkeypatch.setitem(sys.modules, name, found)

    install()
    return install


@pytest.fixture
def device(monkeypatch, tmp_path):
    found = tmp_path / "neuron0"
    monkeypatch.setattr(backends, "DEVICE", found)
    return found


def test_15_without_nki_our_simulator_runs(modules):
    assert choose_backend() == "sim"


def test_15_with_nki_alone_its_simulator_runs(modules, device):
    modules("nki")
    assert choose_backend() == "nki-sim"


def test_15_with_nki_and_a_device_the_device_runs(modules, device):
    modules("nki", "neuronxcc")
    device.touch()
    assert choose_backend() == "nki"


def test_15_the_old_namespace_alone_raises_with_what_to_install(modules):
    modules("neuronxcc")
    with pytest.raises(ImportError, match=r"pip install .*nki>=0.6.*pip.repos.neuron.amazonaws"):
        choose_backend()
    assert choose_backend("sim") == "sim"


def test_15_the_environment_overrides_auto(modules, device, monkeypatch):
    modules("nki")
    monkeypatch.setenv(backends.VARIABLE, "sim")
    assert choose_backend() == "sim"
    assert choose_backend("nki-sim") == "nki-sim"
    monkeypatch.setenv(backends.VARIABLE, "nki")
    assert choose_backend() == "nki"


@pytest.mark.parametrize("backend", ["nki", "nki-sim"])
def test_15_a_backend_that_is_not_there_raises(modules, backend):
    with pytest.raises(ImportError, match=f"backend '{backend}' needs the package nki"):
        choose_backend(backend)


def test_unknown_backends_are_refused(modules, monkeypatch):
    with pytest.raises(ValueError, match="backend must be one of auto, nki, nki-sim, sim, got 'x'"):
        choose_backend("x")
    monkeypatch.setenv(backends.VARIABLE, "gpu")
    with pytest.raises(ValueError, match="NKI_PAGED_ATTN_BACKEND must be one of"):
        choose_backend()


def test_15_import_takes_neither_torch_nor_nki():
    code = (
        "import os, sys; before = dict(os.environ); import nki_paged_attn;"
        "assert dict(os.environ) == before;"
        "print([n for n in ('torch', 'nki', 'neuronxcc', 'triton') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_kernels_are_not_imported_with_the_package():
    code = (
        "import sys, nki_paged_attn;"
        "assert not [n for n in sys.modules if n.startswith('nki_paged_attn._kernels')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_device_runs_the_kernel_on_its_logical_core(modules, device, monkeypatch):
    """The jit of the installed nki is called as ``kernel[lnc](**arguments)``."""
    import importlib

    seen = {}

    class Kernel:
        def __getitem__(self, programs):
            seen["programs"] = programs
            return self

        def __call__(self, **arguments):
            seen["arguments"] = arguments
            tokens = arguments["q"].shape
            return np.ones(tokens, np.float32), np.zeros((tokens[0], 1), np.float32)

    modules("nki")
    fake = types.SimpleNamespace(paged_attention_form=Kernel())
    real = importlib.import_module
    monkeypatch.setattr(
        importlib,
        "import_module",
        lambda name, package=None: fake if name == ".._kernels.form" else real(name, package),
    )
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    out, _ = make_case([3], [5]).run(backend="nki")
    assert (out == 1).all()
    assert seen["programs"] == 2
    assert seen["arguments"]["loops"]


@pytest.mark.skipif(not backends.has_module("nki"), reason="AWS's nki is on no public index")
def test_the_simulator_of_aws_agrees_with_ours():
    case = make_case([20, 1], [100, 300])
    got, expected = case.run(backend="nki-sim")[0], case.run()[0]
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("value", ["0", "3", "two"])
def test_logical_cores_have_one_or_two(monkeypatch, value):
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", value)
    with pytest.raises(ValueError, match="NEURON_LOGICAL_NC_CONFIG must be 1 or 2 on trn2"):
        backends.find_programs()


@pytest.mark.parametrize(
    ("target", "programs"), [("trn1", 1), ("inf2", 1), ("trn2", 2), ("trn3", 2)]
)
def test_a_logical_core_has_the_programs_of_its_target(monkeypatch, target, programs):
    monkeypatch.delenv("NEURON_LOGICAL_NC_CONFIG", raising=False)
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", target)
    assert backends.find_programs() == programs


def test_logical_cores_of_gen2_have_one(monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn1")
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    with pytest.raises(ValueError, match="NEURON_LOGICAL_NC_CONFIG must be 1 on trn1, got '2'"):
        backends.find_programs()


def test_the_target_comes_from_the_environment(monkeypatch):
    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE", raising=False)
    assert backends.default_target() == "trn2"
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "gen4")
    assert backends.default_target() == "trn3"
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn9")
    with pytest.raises(ValueError, match="target must be one of trn1"):
        backends.default_target()


def test_the_extra_cannot_resolve_to_the_placeholders_of_the_public_index():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert 'neuron = ["neuronx-cc>=2.27", "nki>=0.6"]' in text
    assert "neuronx" not in text.partition("[project.optional-dependencies]")[0]
