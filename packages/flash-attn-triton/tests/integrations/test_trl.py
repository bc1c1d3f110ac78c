"""The adapter for TRL: what it asks for; tests-integration/test_scale.py trains with it."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest

pytest.importorskip("transformers", reason="the extra [transformers] is absent")

from . import _models as models

pytestmark = pytest.mark.eager
NAME = "flash_attn_triton.integrations.trl"


@pytest.fixture
def adapter(monkeypatch):
    """Import the adapter with a TRL of some version."""

    def load(version):
        trl = ModuleType("trl")
        trl.__spec__, trl.__version__ = ModuleSpec("trl", None), version
        trl.GRPOTrainer = type("GRPOTrainer", (SimpleNamespace,), {})
        monkeypatch.setitem(sys.modules, "trl", trl)
        monkeypatch.delitem(sys.modules, NAME, raising=False)
        return importlib.import_module(NAME)

    yield load
    sys.modules.pop(NAME, None)


@pytest.mark.parametrize("version", ["0.29.1", "2.0.0"])
def test_other_versions_are_told_what_to_install(version, adapter):
    with pytest.raises(ImportError) as caught:
        adapter(version)
    assert str(caught.value) == (
        f'{NAME} needs trl 1.0 or newer, before 2.0, got {version}: pip install "trl>=1.0,<2.0"'
    )


def test_all_models_of_a_trainer_share_prefixes(adapter, device):
    integration = adapter("1.16.0")
    ours, eager = models.pair(models.llama, device)
    trainer = sys.modules["trl"].GRPOTrainer(model=ours, ref_model=None)
    integration.share_prefixes(trainer).remove()
    with pytest.raises(ValueError, match="models that share prefixes must have these kernels"):
        integration.share_prefixes(sys.modules["trl"].GRPOTrainer(model=ours, ref_model=eager))
    assert not ours.base_model._forward_pre_hooks
    with pytest.raises(
        TypeError, match="trainer must be a GRPOTrainer of TRL, got SimpleNamespace"
    ):
        integration.share_prefixes(SimpleNamespace(model=ours))
