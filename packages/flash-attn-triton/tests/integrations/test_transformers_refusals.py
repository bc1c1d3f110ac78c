"""The adapter for ``transformers``: what it is told is obeyed, and what it does not know raises."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="the extra [transformers] is absent")

import flash_attn_triton
import flash_attn_triton.integrations.transformers as integration
import transformers
from flash_attn_triton import attention_reference
from flash_attn_triton.integrations import _masks
from transformers import masking_utils

from . import _models as models

pytestmark = pytest.mark.eager


def attend(device: torch.device, keys: int = 4, mask: Tensor | None = None, **options: Any):
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 4, 8, device=device), torch.randn(2, 2, keys, 8, device=device)
    got, _ = integration.attention_forward(torch.nn.Module(), q, k, k, mask, **options)
    return got, [t.transpose(1, 2) for t in (q, k, k)]


@pytest.mark.parametrize("name", ["s_aux", "learnable_sink", "sinks"])
def test_sinks_have_three_names(name, device):
    sinks = torch.randn(2, device=device)
    got, inputs = attend(device, **{name: sinks})
    torch.testing.assert_close(got, attention_reference(*inputs, causal=True, sinks=sinks))


def test_sinks_under_two_names_raise(device):
    sinks = torch.randn(2, device=device)
    attend(device, s_aux=sinks, sinks=sinks)
    with pytest.raises(ValueError, match="s_aux and sinks are names of one argument"):
        attend(device, s_aux=sinks, sinks=sinks.clone())


@pytest.mark.parametrize("padding", [None, models.LEFT])
def test_sinks_reach_a_package_that_is_loaded_as_a_module(padding, device, monkeypatch):
    """As ``transformers`` loads kernels: it passes on what the functions' signatures name."""
    hub = importlib.import_module("transformers.integrations.hub_kernels")
    monkeypatch.setattr(hub, "is_kernels_available", lambda: True)
    monkeypatch.setattr(hub, "get_kernel", lambda *args, **options: flash_attn_triton)
    # a list of kernels, ours not among them
    monkeypatch.setattr(
        transformers.GptOssForCausalLM, "_compatible_flash_implementations", None, raising=False
    )
    inputs, keep = models.batch(device, padding), models.valid(models.batch(device, padding))
    model = models.build(models.gpt_oss, device, "eager")
    want = models.output_of(model, inputs)[keep]
    model.set_attn_implementation("ours/module", allow_all_kernels=True)
    models.assert_close(models.output_of(model, inputs)[keep], want)


def test_an_unknown_keyword_raises(device):
    with pytest.raises(NotImplementedError, match="head_mask: not known"):
        attend(device, head_mask=torch.ones(2, device=device))
    attend(device, head_mask=None, use_cache=True, num_items_in_batch=torch.ones(()))


@pytest.mark.parametrize("columns", [1, 4])
def test_a_mask_made_for_other_keys_raises(columns, device):
    """As of a layer that keeps no keys, given to one that does."""
    mask = torch.ones(2, columns, dtype=torch.bool, device=device)
    _masks._attach(mask, _masks.Pattern(causal=True), None, columns)
    for given in (mask, mask.clone()):
        with pytest.raises(ValueError, match="must say of each of the 38 keys"):
            attend(device, 38, given)


def test_generation_after_a_layer_without_keys_raises_with_padding(device):
    config = transformers.MiniMaxConfig(
        **models.GROUPED,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        layer_types=["linear_attention", "full_attention"],
        block_size=8,
    )
    model = models.build(lambda: (transformers.MiniMaxForCausalLM, config), device, models.NAME)
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    model.generate(**models.batch(device), **options)
    with pytest.raises(ValueError, match="must say of each of the"):
        model.generate(**models.batch(device, models.LEFT), **options)


def test_a_causal_mask_is_written_out_on_request(device):
    sizes = {"batch_size": 2, "q_length": 5, "kv_length": 5, "device": device}
    mask = integration.attention_mask(**sizes, allow_is_causal_skip=False)
    assert torch.equal(mask, torch.ones(2, 1, 5, 5, device=device).tril().bool())
    both_ways = masking_utils.bidirectional_mask_function
    no_mask = integration.attention_mask(
        **sizes, mask_function=both_ways, allow_is_causal_skip=False
    )
    assert no_mask is None  # so transformers calls for every bidirectional mask


@pytest.mark.parametrize("padding", [None, models.LEFT])
def test_a_model_that_reads_its_masks_matches_eager(padding, device):
    def doge() -> models.Model:
        return transformers.DogeForCausalLM, transformers.DogeConfig(**models.GROUPED)

    inputs = models.batch(device, padding)
    got, want = (models.output_of(m, inputs) for m in models.pair(doge, device))
    keep = models.valid(inputs)
    models.assert_close(got[keep], want[keep])


@pytest.mark.parametrize(
    ("model", "config"),
    [
        ("BloomModel", {"hidden_size": 16, "n_layer": 1, "n_head": 2}),
        ("XGLMModel", {"d_model": 16, "ffn_dim": 24, "num_layers": 1, "attention_heads": 2}),
        ("TrOCRForCausalLM", {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2}),
        ("SplinterModel", {**models.SIZES, "num_hidden_layers": 1}),
    ],
)
def test_a_model_whose_attention_cannot_be_replaced_is_refused(model, config, device):
    config = getattr(transformers, re.sub("Model|ForCausalLM", "Config", model))(
        **{"vocab_size": 48, **config}
    )
    made = models.build(lambda: (getattr(transformers, model), config), device, models.NAME)
    with pytest.raises(ValueError, match=f"{model} has no interface for attention implement"):
        made(**models.batch(device))


@pytest.mark.parametrize("name", ["UMT5", "PegasusX"])
def test_a_decoder_that_does_not_say_that_it_is_causal_matches_eager(name, device):
    sizes = {"vocab_size": 48, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1}
    layers = {f"{part}_layers": 1 for part in ("encoder", "decoder")}
    heads = {f"{part}_attention_heads": 2 for part in ("encoder", "decoder")}
    config = getattr(transformers, f"{name}Config")(
        **(sizes | layers | heads), num_heads=2, decoder_start_token_id=1, pad_token_id=0
    )
    models_of = models.pair(
        lambda: (getattr(transformers, f"{name}ForConditionalGeneration"), config), device
    )
    ids = models.batch(device)["input_ids"]
    models.assert_close(*(m(input_ids=ids, decoder_input_ids=ids).logits for m in models_of))


def test_a_decoder_with_position_biases_matches_eager(device):
    model, eager = models.pair(models.t5, device)
    ids = models.batch(device)["input_ids"]
    models.assert_close(*(m(input_ids=ids, decoder_input_ids=ids).logits for m in (model, eager)))
