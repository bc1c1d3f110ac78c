"""Tiny random models of ``transformers``, with the adapter and with eager attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flash_attn_triton.integrations.transformers as integration
import torch
import transformers
from torch import Tensor

NAME = "triton_attention"
TOKENS = 11
LEFT, RIGHT = "left", "right"
PADDED = (4, 0)  # how many tokens of each sequence are padding

Model = tuple[Any, Any]  # class, configuration

SIZES = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 1}


def llama() -> Model:
    return transformers.LlamaForCausalLM, transformers.LlamaConfig(**GROUPED)


def mistral() -> Model:
    return transformers.MistralForCausalLM, transformers.MistralConfig(**GROUPED, sliding_window=4)


def qwen2() -> Model:
    # the first layer attends to everything, the second within a window
    windows = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    return transformers.Qwen2ForCausalLM, transformers.Qwen2Config(**GROUPED, **windows)


def qwen2_moe() -> Model:
    # does not tell its attention about the window: only the mask knows
    config = transformers.Qwen2MoeConfig(
        **GROUPED,
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=1,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
        num_experts=2,
        num_experts_per_tok=1,
    )
    return transformers.Qwen2MoeForCausalLM, config


def gemma2() -> Model:
    config = transformers.Gemma2Config(
        **GROUPED,
        head_dim=8,
        sliding_window=4,
        attn_logit_softcapping=0.5,
        query_pre_attn_scalar=4,
    )
    return transformers.Gemma2ForCausalLM, config


def gpt_oss() -> Model:
    config = transformers.GptOssConfig(
        **GROUPED,
        head_dim=8,
        sliding_window=4,
        num_local_experts=2,
        num_experts_per_tok=1,
        layer_types=["sliding_attention", "full_attention"],
    )
    return transformers.GptOssForCausalLM, config


def bert() -> Model:
    return transformers.BertModel, transformers.BertConfig(**SIZES)


def modernbert() -> Model:
    config = transformers.ModernBertConfig(
        **SIZES, local_attention=6, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2
    )
    return transformers.ModernBertModel, config


def t5() -> Model:
    config = transformers.T5Config(
        vocab_size=48,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return transformers.T5ForConditionalGeneration, config


DECODERS = {f.__name__: f for f in (llama, mistral, qwen2, qwen2_moe, gemma2, gpt_oss)}
ENCODERS = {f.__name__: f for f in (bert, modernbert)}
MODELS = {**DECODERS, **ENCODERS}


def build(make: Callable[[], Model], device: torch.device, implementation: str) -> Any:
    """Make a model whose scores are of order one, the same for every implementation."""
    integration.register(NAME)
    model_class, config = make()
    model = model_class._from_config(config, attn_implementation=implementation).eval().to(device)
    parts = [part for part in model.modules() if hasattr(part, "config")]
    assert {part.config._attn_implementation for part in parts} == {implementation}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(len(name))
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.3 if parameter.ndim > 1 else 1.0 + 0.1 * noise)
    return model


def pair(make: Callable[[], Model], device: torch.device) -> tuple[Any, Any]:
    """The same model through the adapter, and with eager attention."""
    return build(make, device, NAME), build(make, device, "eager")


def batch(device: torch.device, padding: str | None = None) -> dict[str, Tensor]:
    ids = torch.randint(3, 48, (len(PADDED), TOKENS), generator=torch.Generator().manual_seed(0))
    if padding is None:
        return {"input_ids": ids.to(device)}
    mask = torch.ones_like(ids)
    for row, count in enumerate(PADDED):
        mask[row, slice(0, count) if padding == LEFT else slice(TOKENS - count, TOKENS)] = 0
    return {"input_ids": (ids * mask).to(device), "attention_mask": mask.to(device)}


def valid(inputs: dict[str, Tensor]) -> Tensor:
    return inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()


def output_of(model: Any, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    result = (
        model(**inputs, use_cache=False, **options)
        if model.config.model_type not in ("bert", "modernbert")
        else model(**inputs, **options)
    )
    return result.logits if hasattr(result, "logits") else result.last_hidden_state


def assert_close(actual: Tensor, expected: Tensor, what: str = "", scale: float = 0.0) -> None:
    """Two orders of summation in fp32, through two layers; ``scale`` of what was summed."""
    actual, expected = actual.detach(), expected.detach()
    atol = 1e-4 * max(float(expected.abs().max()), scale)
    torch.testing.assert_close(
        actual, expected, rtol=1e-4, atol=atol, msg=lambda text: f"{what}: {text}"
    )
