"""A causal language model of transformers, whose layers attend over the engine's pages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

# what a layer may pass by name, and what paged_attn_func calls it
PASSED = {"softcap": "softcap", "s_aux": "sinks", "sinks": "sinks"}
REFUSED = "dropout", "position_bias", "attention_mask"


class Pretrained:
    """A model and its tokenizer, from a folder or a name on the hub."""

    def __init__(self, path: str, device: str) -> None:
        AttentionInterface.register("engine", self._attend)
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        found = AutoModelForCausalLM.from_pretrained(path, attn_implementation="engine")
        self.model = found.eval().to(device)
        self.device = device
        self.dtype, self.vocabulary = found.dtype, found.config.get_text_config().vocab_size
        self.longest = found.config.get_text_config().max_position_embeddings
        ends = found.generation_config.eos_token_id
        self.ends = frozenset(ends if isinstance(ends, list) else [ends])
        with torch.no_grad(), torch.device(device):
            self.cache_shape = self._shape(found.config.get_text_config().num_hidden_layers)

    def __call__(self, tokens: Tensor, positions: Tensor, attend: Any) -> Tensor:
        """Return the logits of packed tokens; only ``attend(layer, q, k, v)`` mixes tokens."""
        self.attend = attend
        ids, places = tokens[None], positions[None]
        return self.model(input_ids=ids, position_ids=places, use_cache=False).logits[0]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the tokens of messages by the model's template, and of the answer's beginning."""
        return self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )

    def _shape(self, layers: int) -> tuple[int, int, int]:
        """Return what a cache has: layers, heads, and their dimension, by calling the model."""
        seen: dict[int, tuple[int, int]] = {}

        def look(layer: int, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
            seen[layer] = k.shape[1:]
            if k.shape != v.shape or len(set(seen.values())) > 1:
                raise NotImplementedError("keys and values of one shape in all layers are needed")
            return q

        self(torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long), look)
        if sorted(seen) != list(range(layers)):
            raise NotImplementedError(f"only {len(seen)} of {layers} layers attend to keys")
        return layers, *seen[0]

    def _attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Attend as a layer of transformers asks, with tensors ``[1, heads, tokens, head_dim]``."""
        others["attention_mask"] = attention_mask
        # dropout is 0.0
        if wrong := [x for x in REFUSED if isinstance(others.get(x), Tensor) or others.get(x)]:
            raise NotImplementedError(f"the model needs {wrong[0]}, which is not served")
        options = {PASSED[x]: others[x] for x in PASSED if others.get(x) is not None}
        if sliding_window:
            options["window_size"] = sliding_window - 1, 0
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        out = self.attend(module.layer_idx, q, k, v, softmax_scale=scaling, **options)
        return out[None], None
