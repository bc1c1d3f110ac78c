"""vLLM: an attention backend on these kernels.

Installing ``prefix-prefill`` beside ``vllm`` registers the backend by the entry point
``vllm.general_plugins``, and selects nothing. To take it::

    vllm serve MODEL --attention-backend CUSTOM

or ``LLM(model, attention_backend="CUSTOM")``. ``VLLM_PLUGINS`` names which plugins vLLM loads, if
it is set; this one is ``prefix_prefill``.

The backend serves decoders, encoders and cross-attention, prefill and decode in one call, with
sliding windows, softcap, ALiBi and sinks, in fp16, bf16 and fp32, over caches of the model's dtype
or FP8 with a scale per tensor or KV head. It takes pages of any size, in every layout that vLLM
gives them, and needs no workspace. Batches in which all sequences have as many queries are captured
whole in CUDA graphs. vLLM itself refuses at start what the backend does not say it supports: MLA,
multimodal prefixes that see both ways, context parallelism over ranks.

The classes are in :mod:`prefix_prefill.integrations._vllm_backend`, which vLLM imports if it is
selected. They follow vLLM 0.33's interface.
"""

from __future__ import annotations

import warnings

from .._linked.host.versions import need

__all__ = ["register"]

BACKEND = "prefix_prefill.integrations._vllm_backend.PagedAttentionBackend"


def register() -> None:
    """Make this package the backend that vLLM calls ``CUSTOM``; done by the entry point.

    Registering again does no harm. Where another package has taken the name, it keeps it, and a
    ``RuntimeWarning`` says so: vLLM loads the plugins of all that is installed. For the same reason
    one says so where vLLM is older than what the backend follows.

    Raises:
        ModuleNotFoundError: vLLM is not installed.
    """
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError:
        if not _is_older():
            raise
        return

    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != BACKEND:
        warnings.warn(
            f"prefix-prefill is not vLLM's attention backend CUSTOM: {custom.get_path()} is, which "
            "another plugin has registered; VLLM_PLUGINS=prefix_prefill loads this one alone",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    register_backend(custom, BACKEND)


def _is_older() -> bool:
    """Warn of a vLLM that is older than what the backend follows; raise where there is none."""
    try:
        need("vllm", (0, 33), __name__)
    except ModuleNotFoundError:
        raise
    except ImportError as error:
        warnings.warn(f"nothing is registered: {error}", RuntimeWarning, stacklevel=3)
        return True
    return False
