"""vLLM: an attention backend on these kernels.

If ``prefix-prefill`` and ``vllm`` are installed, the entry point ``vllm.general_plugins`` registers
the backend. To select it::

    vllm serve MODEL --attention-backend PREFIX_PREFILL

or ``LLM(model, attention_backend="PREFIX_PREFILL")``. ``CUSTOM``, vLLM's name for a back end from
outside, selects the same one unless another plugin has taken it. If ``VLLM_PLUGINS``, vLLM's list
of plugins to load, is set, it must contain ``prefix_prefill``.

The backend serves decoders, encoders and cross-attention, prefill and decode in one call, with
sliding windows, softcap, ALiBi and sinks, in fp16, bf16 and fp32, over caches of the model's dtype,
of FP8 with a scale per tensor or KV head, and of vLLM's formats with a scale per token and head. It
takes pages of any size in all of vLLM's layouts and needs no workspace. Batches of any mixture of
prefill and decode are captured in full CUDA graphs. Under ``VLLM_BATCH_INVARIANT=1`` the bits of a
token's output depend on its own sequence alone; ALiBi and the last formats are refused. vLLM
refuses at start what the backend does not support: bidirectional multimodal prefixes, context
parallelism over ranks.

``--attention-backend PREFIX_PREFILL_MLA`` serves models with multi-head latent attention: decoding,
also where the keys of a sequence are spread over ranks; vLLM computes their prefill.

The classes are in :mod:`prefix_prefill.integrations._vllm_backend` and ``_vllm_mla``, which vLLM
imports if a backend is selected. They implement vLLM 0.33's interface.
"""

from __future__ import annotations

import warnings
from typing import Any

from .._linked.host.versions import need

__all__ = ["register"]

BACKEND = "prefix_prefill.integrations._vllm_backend.PagedAttentionBackend"
LATENT = "prefix_prefill.integrations._vllm_mla.LatentAttentionBackend"
NAMES = {"PREFIX_PREFILL": BACKEND, "PREFIX_PREFILL_MLA": LATENT, "CUSTOM": BACKEND}


def register() -> None:
    """Register this package's back ends under their names; the entry point calls this.

    Registering again does no harm. vLLM loads the plugins of all installed packages, so this only
    gives a ``RuntimeWarning`` if another package has taken a name or if vLLM is too old.

    Raises:
        ModuleNotFoundError: vLLM is not installed.
    """
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError:
        if not _is_older():
            raise
        return

    for name, path in NAMES.items():
        if name not in AttentionBackendEnum.__members__:
            register_backend(name, path)
            # A process that unpickles vLLM's configuration has not loaded plugins yet.
            AttentionBackendEnum[name].__reduce_ex__ = lambda _, name=name: (_named, (name,))
            continue
        taken = AttentionBackendEnum[name]
        if taken.is_overridden() and taken.get_path() != path:
            warnings.warn(
                f"prefix-prefill is not vLLM's attention backend {name}: {taken.get_path()} is, "
                "which another plugin has registered; VLLM_PLUGINS=prefix_prefill loads this one "
                "alone",
                RuntimeWarning,
                stacklevel=2,
            )
            continue
        register_backend(taken, path)


def _named(name: str) -> Any:
    """Return vLLM's member of a name, registered first: what pickles of one restore."""
    register()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return AttentionBackendEnum[name]


def _is_older() -> bool:
    """Return whether vLLM is too old, with a warning; raise if it is not installed."""
    try:
        need("vllm", (0, 33), __name__)
    except ModuleNotFoundError:
        raise
    except ImportError as error:
        warnings.warn(f"nothing is registered: {error}", RuntimeWarning, stacklevel=3)
        return True
    return False
