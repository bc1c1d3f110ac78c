"""A pytest plugin: ``import nki`` is the simulator, and torch_xla's device the CPU."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from unittest.mock import MagicMock

import torch
from nki_paged_attn.sim import loader


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules that no kernel needs, for reports and for devices, as ones that do nothing."""

    def __init__(self, *names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if name in self.names or name.partition(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = MagicMock(name=spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module):
        pass


def fake_xla():
    """Return torch_xla, as far as harnesses use it, for the CPU."""
    model = types.ModuleType("torch_xla.core.xla_model")
    model.xla_device = lambda *_: torch.device("cpu")
    model.mark_step = lambda *_, **__: None
    core, xla = types.ModuleType("torch_xla.core"), types.ModuleType("torch_xla")
    core.xla_model = model
    xla.core, xla.device, xla.sync = core, model.xla_device, model.mark_step
    return xla, core, model


# whatever else is called nki in the working folder
sys.modules.update(loader.MODULES)
DEVICES = ("neuronxcc", "neuronx_distributed", "neuronx_distributed_inference", "torch_neuronx")
sys.meta_path.insert(0, Absent(*DEVICES))
for found in fake_xla():
    sys.modules.setdefault(found.__name__, found)
