"""The calls whose kernels ``python -m flash_attn_triton compile`` builds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from .._linked.host.models import MODELS, Model

# batch and length: many short sequences, and few long ones
SIZES = (8, 512), (2, 4096)
HEAD_DIMS = 64, 96, 128, 192, 256
# query heads a key head
GROUPS = 1, 4


def calls_of(like: str | None) -> Iterator[dict[str, Any]]:
    """Yield the calls of a model's training and prefill, or for None the common ones."""
    if like is not None:
        yield from _calls_of(MODELS[like], ("bfloat16",))
        return
    for head_dim, group in itertools.product(HEAD_DIMS, GROUPS):
        model = Model(16, 16 // group, head_dim, window=1023)
        yield from _calls_of(model, ("bfloat16", "float16"), (False, True))


def _calls_of(
    model: Model, dtypes: tuple[str, ...], causal: tuple[bool, ...] = (True,)
) -> Iterator[dict[str, Any]]:
    options: dict[str, Any] = {"softcap": model.softcap}
    if model.has_sinks:
        options["sinks"] = ["float32", [model.heads_q]]
    masks: list[dict[str, Any]] = [{"causal": x} for x in causal]
    if model.window is not None:
        masks.append({"causal": True, "window_size": [model.window, 0]})
    for dtype, mask, (batch, length) in itertools.product(dtypes, masks, SIZES):
        for lead in ([batch, length], [batch * length]):
            arguments = {
                name: [dtype, [*lead, heads, model.head_dim]]
                for name, heads in zip("qkv", (model.heads_q, *[model.heads_k] * 2), strict=True)
            }
            arguments |= {**options, **mask}
            function = "flash_attn_func"
            if len(lead) == 1:
                function = "flash_attn_varlen_func"
                arguments |= {f"cu_seqlens_{x}": ["int32", [batch + 1]] for x in "qk"}
                arguments |= {f"max_seqlen_{x}": length for x in "qk"}
            yield {"function": function, "backward": True, "arguments": arguments}
