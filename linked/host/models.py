"""Attention of well-known models: what ``compile --like`` builds kernels for."""

from __future__ import annotations

from typing import NamedTuple


class Model(NamedTuple):
    """The attention of a model."""

    heads_q: int
    heads_k: int
    head_dim: int
    # keys that a token sees to its left besides itself, in layers with a window; None: no such
    window: int | None = None
    softcap: float = 0.0
    has_sinks: bool = False


MODELS = {
    "gemma-2-9b": Model(16, 8, 256, window=4095, softcap=50.0),
    "gpt-oss-20b": Model(64, 8, 64, window=127, has_sinks=True),
    "llama-3-8b": Model(32, 8, 128),
    "llama-3-70b": Model(64, 8, 128),
    "mistral-7b": Model(32, 8, 128),
    "qwen2.5-0.5b": Model(14, 2, 64),
    "qwen3-8b": Model(32, 8, 128),
}
