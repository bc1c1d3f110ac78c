"""Models of ``transformers`` over trees: the mask that holds a tree, and rows that become one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from .._linked.host.arguments import kind
from .._tree.api import flash_attn_tree_func
from ..trees import TreeBatch, pack

# kinds of layers in a configuration, besides those with a window, whose tokens see all before them
_FULL = frozenset({"full_attention", "attention"})


def tree_inputs(batch: TreeBatch) -> dict[str, Any]:
    """Return what a model takes to run once over a tree of rows.

    Use it as ``model(**tree_inputs(batch))``, with a model whose ``attn_implementation`` is the
    name that :func:`register` returned. The logits are those of ``batch.tokens``,
    ``[1, tokens, vocabulary]``, which :func:`flash_attn_triton.trees.log_probs` reads.

    Args:
        batch: what ``flash_attn_triton.trees.pack`` returned, on the device of the model.

    Returns:
        ``input_ids`` and ``position_ids``, ``[1, tokens]``; ``use_cache``, which is False; and
        ``attention_mask``, int32 ``[1, 1, 2, segments + 1]``, which holds ``cu_seqlens`` and
        ``parents``, and which no other implementation can read.

    Raises:
        TypeError: if ``batch`` is no ``TreeBatch``.
    """
    if not isinstance(batch, TreeBatch):
        raise TypeError(f"batch must be a TreeBatch, which trees.pack returns, got {kind(batch)}")
    parents = torch.nn.functional.pad(batch.parents, (0, 1), value=-1)
    return {
        "input_ids": batch.tokens[None],
        "position_ids": batch.positions[None],
        "attention_mask": torch.stack((batch.cu_seqlens, parents))[None, None],
        "use_cache": False,
    }


def is_tree(mask: Tensor | None) -> bool:
    """Whether a mask is one of :func:`tree_inputs`."""
    return (
        mask is not None
        and mask.dtype == torch.int32
        and mask.ndim == 4
        and mask.shape[:3] == (1, 1, 2)
    )


def attend_tree(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, unsupported: dict[str, Any], **options: Any
) -> Tensor:
    """Attend over a tree with tensors ``[1, tokens, heads, head_dim]``."""
    given = next((name for name, x in unsupported.items() if x), None)
    if given is not None:
        raise NotImplementedError(f"{given} over a tree of rows")
    tokens = q.shape[1]
    if q.shape[0] != 1 or k.shape[1] != tokens:
        raise ValueError(
            "a tree of rows must be a batch of one without a cache, got queries "
            f"{list(q.shape[:2])} and keys {list(k.shape[:2])}"
        )
    cu_seqlens, parents = mask[0, 0].unbind(0)
    out = flash_attn_tree_func(q[0], k[0], v[0], cu_seqlens, parents[:-1], tokens, **options)
    return cast(Tensor, out)[None]


def check_layers(config: Any, sliding_window: int | None, tokens: int) -> None:
    """Raise for a model with other positions, or whose tokens do not see all tokens above them.

    Not all models tell their attention about a window, and a layer with a state does not call it.
    """
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    if "encoder_attention_heads" in getattr(config, "attribute_map", {}).values():
        # bart and its like count positions by themselves, from the first token
        raise NotImplementedError("a tree of rows for a decoder of an encoder-decoder")
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    has_window = "sliding_attention" in kinds if kinds else True
    if has_window and getattr(config, "use_sliding_window", None) is not False:
        sliding_window = sliding_window or getattr(config, "sliding_window", None)
    if sliding_window is not None and sliding_window < tokens:
        raise NotImplementedError(
            f"a sliding window over a tree of rows: it would cut the {tokens} tokens, got "
            f"sliding_window={sliding_window}"
        )
    other = sorted(set(kinds or ()) - _FULL - {"sliding_attention"})
    if other:
        raise NotImplementedError(f"layers of the kind {other[0]} over a tree of rows")


class SharedPrefixes:
    """The hooks of backbones that run each batch of rows as a tree; ``remove`` takes them off."""

    def __init__(self, backbones: Iterable[torch.nn.Module]) -> None:
        self._handles: list[RemovableHandle] = []
        self._rows: tuple[Tensor, Tensor] | None = None
        for backbone in backbones:
            self._handles += (
                backbone.register_forward_pre_hook(self._before, with_kwargs=True),
                backbone.register_forward_hook(self._after),
            )

    def remove(self) -> None:
        """Let the model run rows as they are given again."""
        for handle in self._handles:
            handle.remove()

    def _before(self, _: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        self._rows = None
        given = {name: x for name, x in kwargs.items() if x is not None}
        # generation has a cache, and computes a prompt once anyway
        if args or given.pop("use_cache", True) is not False or "past_key_values" in given:
            return None
        ids, mask, positions = (
            given.pop(name, None) for name in ("input_ids", "attention_mask", "position_ids")
        )
        if is_tree(mask):
            return None
        if given.get("return_dict") is True:
            del given["return_dict"]
        if ids is None:
            given["input_ids=None"] = True
        other = next((name for name, x in given.items() if x is not False), None)
        if other is not None:
            raise NotImplementedError(
                f"{other}: not known where rows share prefixes, and it may change the result; "
                "remove() of what share_prefixes returned lets a model take it again"
            )
        kept = torch.ones_like(ids) if mask is None else mask
        if kept.shape != ids.shape:
            raise ValueError(
                f"attention_mask must have the shape of input_ids, {list(ids.shape)}, got "
                f"{list(kept.shape)}"
            )
        kept = kept.bool()
        valid = kept.cpu()
        tokens = ids.cpu()[valid]
        # where rows begin: those of the batch, and those that are packed within one of them
        begins = (valid & (valid.cumsum(1) == 1))[valid]
        if positions is not None:
            positions = positions.cpu().expand(ids.shape)[valid]
            begins |= positions == 0
        batch = pack(tokens.tensor_split(begins.nonzero().flatten()))
        if positions is not None:
            _check_positions(positions, batch.positions[batch.gather])
        batch = batch.to(ids.device, non_blocking=True)
        self._rows = kept, batch.gather
        return (), tree_inputs(batch)

    def _after(self, _module: Any, _args: Any, output: Any) -> Any:
        if self._rows is None:
            return None
        (kept, gather), self._rows = self._rows, None
        hidden = output.last_hidden_state[0]
        rows = hidden.new_zeros(*kept.shape, hidden.shape[-1])
        output.last_hidden_state = rows.masked_scatter(kept[..., None], hidden[gather])
        return output


def _check_positions(given: Tensor, wanted: Tensor) -> None:
    wrong = given != wanted
    if bool(wrong.any()):
        raise ValueError(
            "position_ids must count the tokens of each row from 0, padding left out, where rows "
            f"share prefixes, got {int(given[wrong][0])} for a row's token {int(wanted[wrong][0])}"
        )
