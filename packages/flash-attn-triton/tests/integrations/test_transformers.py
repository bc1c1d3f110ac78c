"""Models of ``transformers`` through the adapter, against their eager attention.

Eager attention defines what a model means: outputs, gradients of every parameter, and greedy
generation must agree with it, under padding on either side, sliding windows, soft-capping, sinks
and packing.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="the extra [transformers] is absent")

import flash_attn_triton.integrations.transformers as integration
import transformers
from flash_attn_triton.integrations import _masks

from . import _models as models

pytestmark = pytest.mark.eager


@pytest.mark.parametrize("padding", [None, models.LEFT, models.RIGHT])
@pytest.mark.parametrize("make", models.MODELS.values(), ids=models.MODELS)
def test_outputs_and_gradients_match_eager(device, make, padding):
    inputs = models.batch(device, padding)
    keep = models.valid(inputs)
    results = []
    for model in models.pair(make, device):
        out = models.output_of(model, inputs)[keep]
        (out * torch.linspace(-1, 1, out.shape[-1], device=device)).sum().backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        results.append((out.detach(), grads))
    (got, got_grads), (want, want_grads) = results
    models.assert_close(got, want, "output")
    assert got_grads.keys() == want_grads.keys()
    assert any("q_proj" in n or "query" in n or "Wqkv" in n for n in got_grads)
    # some gradients cancel to zero: those of key biases, which softmax does not see
    scale = 1e-2 * max(float(grad.abs().max()) for grad in want_grads.values())
    for name, grad in got_grads.items():
        models.assert_close(grad, want_grads[name], name, scale)


@pytest.mark.parametrize(
    ("name", "cache"),
    [*((name, "dynamic") for name in models.DECODERS), ("llama", "static"), ("qwen2", "static")],
)
def test_greedy_generation_matches_eager_token_for_token(device, name, cache):
    inputs = models.batch(device, models.LEFT)
    tokens = []
    for model in models.pair(models.DECODERS[name], device):
        options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
        options |= {"cache_implementation": cache, "disable_compile": True}
        result = model.generate(
            **inputs, **options, output_scores=True, return_dict_in_generate=True
        )
        tokens.append((result.sequences, torch.stack(result.scores)))
    (got, got_scores), (want, want_scores) = tokens
    assert torch.equal(got, want)
    models.assert_close(got_scores, want_scores, "scores")
    assert (
        len(got[:, models.TOKENS :].unique()) > 1
    )  # a model that always says the same proves little


@pytest.mark.parametrize(
    ("make", "static"),
    [(models.llama, False), (models.mistral, False), (models.qwen2, True)],
    ids=["llama", "mistral", "qwen2 with a static cache"],
)
def test_prefill_in_chunks_matches_eager(device, make, static, monkeypatch):
    """Many queries against a longer cache: packed by rows that are no square."""
    monkeypatch.setattr(_masks, "_FEW_QUERIES", 2)
    ids = torch.randint(3, 48, (2, 12), generator=torch.Generator().manual_seed(1)).to(device)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    outputs = []
    for model in models.pair(make, device):
        cache = (
            transformers.StaticCache(model.config, max_cache_len=16)
            if static
            else transformers.DynamicCache(config=model.config)
        )
        parts = []
        for start, end in ((0, 5), (5, 11), (11, 12)):
            part = model(
                ids[:, start:end],
                attention_mask=mask[:, :end],
                past_key_values=cache,
                position_ids=(mask.cumsum(1) - 1).clamp(min=0)[:, start:end],
            )
            parts.append(part.logits)
        outputs.append(torch.cat(parts, 1)[mask.bool()])
    models.assert_close(*outputs)


def test_static_cache_without_a_mask_matches_eager(device):
    ids = models.batch(device)["input_ids"]
    outputs = []
    for model in models.pair(models.llama, device):
        cache = transformers.StaticCache(model.config, max_cache_len=16)
        first = model(ids, past_key_values=cache).logits
        outputs.append(torch.cat([first, model(ids[:, :1], past_key_values=cache).logits], 1))
    models.assert_close(*outputs)


def test_right_padded_generation_keeps_distances_across_the_hole(device):
    """A window is counted in columns, padding included, as eager attention counts."""
    ids = models.batch(device)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, 4:7] = 0
    for make in (models.mistral, models.llama):
        got, want = (model(ids, attention_mask=mask).logits for model in models.pair(make, device))
        models.assert_close(got[mask.bool()], want[mask.bool()])


@pytest.mark.parametrize("padding", [None, models.LEFT])
def test_encoder_decoder_with_position_biases_and_cross_attention(device, padding):
    inputs = models.batch(device, padding)
    # as many decoder tokens as encoder tokens: the mask of one says nothing of the other
    decoder = torch.randint(3, 48, (2, models.TOKENS), generator=torch.Generator().manual_seed(2))
    outputs, grads = [], []
    for model in models.pair(models.t5, device):
        out = model(**inputs, decoder_input_ids=decoder.to(device)).logits
        bias = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
        outputs.append(out)
        grads.append(torch.autograd.grad(out.square().sum(), bias)[0])
    models.assert_close(*outputs)
    models.assert_close(*grads)


def test_cross_attention_keeps_every_query(device):
    def make() -> models.Model:
        config = transformers.BertConfig(**models.SIZES, is_decoder=True, add_cross_attention=True)
        return transformers.BertModel, config

    memory = torch.randn(2, models.TOKENS, 16, generator=torch.Generator().manual_seed(3)).to(
        device
    )
    inputs = models.batch(device, models.LEFT)
    outputs = [
        model(
            inputs["input_ids"],
            encoder_hidden_states=memory,
            encoder_attention_mask=inputs["attention_mask"],
        ).last_hidden_state
        for model in models.pair(make, device)
    ]
    models.assert_close(*outputs)


def packed_inputs(device: torch.device) -> tuple[dict[str, Tensor], list[Tensor]]:
    rows = [torch.arange(3, 3 + n, device=device) for n in (5, 1, 7)]
    positions = torch.cat([torch.arange(len(row), device=device) for row in rows])
    return {"input_ids": torch.cat(rows)[None], "position_ids": positions[None]}, rows


@pytest.mark.parametrize("make", [models.llama, models.mistral], ids=lambda f: f.__name__)
@pytest.mark.parametrize("how", ["position ids", "position ids with a cache", "cu_seq_lens"])
def test_packed_sequences_do_not_see_each_other(device, make, how):
    inputs, rows = packed_inputs(device)
    model, eager = models.pair(make, device)
    want = torch.cat([eager(row[None], use_cache=False).logits for row in rows], 1)
    options: dict[str, Any] = {"use_cache": how.endswith("cache")}
    if how == "cu_seq_lens":
        ends = torch.tensor([0, 5, 6, 13], dtype=torch.int32, device=device)
        options |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
        options |= {"max_length_q": 7, "max_length_k": 7}
    models.assert_close(model(**inputs, **options).logits, want)


def test_positions_changed_in_place_are_read_again(device):
    inputs, _ = packed_inputs(device)
    model, eager = models.pair(models.llama, device)
    positions = inputs["position_ids"]
    model(**inputs)
    positions.copy_(torch.arange(positions.shape[1], device=device))
    want = eager(inputs["input_ids"], use_cache=False).logits
    models.assert_close(model(**inputs).logits, want)


# dynamo instantiates autograd functions, which torch deprecates
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "padding"),
    [(models.llama, None), (models.qwen2, models.LEFT), (models.bert, models.RIGHT)],
    ids=["llama", "qwen2 padded", "bert padded"],
)
def test_traces_without_graph_breaks(device, make, padding):
    inputs = models.batch(device, padding)
    model = models.build(make, device, models.NAME)
    want = models.output_of(model, inputs)
    torch.compiler.reset()
    compiled = torch.compile(copy.copy(model), backend="eager", fullgraph=True)
    got = models.output_of(compiled, inputs)
    keep = models.valid(inputs)
    models.assert_close(got[keep], want[keep])


def test_dropout_in_training_is_drawn_from_the_generator(device):
    def make() -> models.Model:
        config = transformers.LlamaConfig(**models.GROUPED, attention_dropout=0.5)
        return transformers.LlamaForCausalLM, config

    model, inputs = models.build(make, device, models.NAME), models.batch(device, models.LEFT)
    keep = models.valid(inputs)

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return model(**inputs).logits.detach()[keep]

    assert torch.equal(run(0), run(1))
    model.train()
    assert torch.equal(run(0), run(0))
    assert not torch.equal(run(0), run(1))


def test_autocast_casts_as_for_torch_attention(device):
    q = torch.randn(1, 2, 4, 8, device=device)
    module = torch.nn.Module()
    with torch.autocast(device.type, torch.bfloat16):
        out, weights = integration.attention_forward(module, q, q, q.bfloat16(), None)
    assert (out.dtype, weights) == (torch.bfloat16, None)
