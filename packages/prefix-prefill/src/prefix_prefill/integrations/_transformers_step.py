"""What every version of ``transformers`` may ask of a step of continuous batching."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.utils import TransformersKwargs

from .._linked.host.arguments import refuse_others
from .._paged.checks import check_extras, check_no_gradients
from .._paged.options import check_options

# arguments that would change the result
_UNSUPPORTED = {
    "attention_mask": "masks are those of the sequences; a mask of another kind has no place here",
    "output_attentions": "attention weights are never materialised",
    "position_bias": "additive biases are not supported",
    "indices": "attention to a list of key indices is not supported",
    "block_indices": "attention to a list of key blocks is not supported",
}

# arguments that models pass to their layers and that do not concern attention
_IGNORED = frozenset(TransformersKwargs.__annotations__) | {
    "cache_position",
    "cu_seqlens",
    "input_ids",
    "inputs_embeds",
    "labels",
    "layer_idx",
    "logits_indices",
    "logits_processor_args",
    "logits_to_keep",
    "max_seqlen",
    "past_key_values",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "token_type_ids",
    "use_cache",
}


def check_step(
    others: Mapping[str, Any], name: str, is_batching: bool, known: frozenset[str] = frozenset()
) -> None:
    """Check what a model passes beside its tensors; ``name`` is what continuous batching gives."""
    refuse_others(others, _UNSUPPORTED, _IGNORED | known, "paged attention", "paged|eager")
    if not is_batching:
        raise ValueError(
            f"{name} must be that of continuous batching, got None: generate_batch gives it; for "
            'generate or training load the model with another attn_implementation, as "sdpa"'
        )


def check_layer(module: torch.nn.Module, dropout: float, is_causal: bool | None) -> None:
    """Check what a layer may ask for in a step."""
    if dropout:
        raise NotImplementedError(
            f"dropout must be 0.0 over a paged cache, got {dropout}; call model.eval()"
        )
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise NotImplementedError("is_causal must be True over a paged cache, got False")


def window_of(ring: int, sliding_window: int | None) -> tuple[int, int]:
    """Return the window of a layer; the cache keeps ``ring`` slots, or with 1 all of them."""
    if sliding_window is None:
        return (-1, -1) if ring == 1 else (ring - 1, 0)
    if sliding_window < 1 or (ring != 1 and sliding_window > ring):
        most = "" if ring == 1 else f" to the {ring} that the cache keeps"
        raise ValueError(f"sliding_window must be from 1{most}, got {sliding_window}")
    return sliding_window - 1, 0


def check_options_of(
    q: Tensor,
    heads: int,
    scaling: float | None,
    window: tuple[int, int],
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    """Check what attention would refuse behind the change of the cache."""
    check_options(q, scaling, True, window, softcap or 0.0, 0, False)
    check_extras(q, 0, heads, None, sinks, None, None, None)
    check_no_gradients(q=q, sinks=sinks)
