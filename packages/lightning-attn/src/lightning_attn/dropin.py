"""Functions with the names under which inference engines call this kernel family."""

from einops import rearrange
from torch import Tensor

from ._linear import checks, ops
from ._linked.host.arguments import ERRORS, check_count, check_tensor, renamed
from .api import lightning_attn_decode


def lightning_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ed: Tensor,
    block_size: int = 256,
    kv_history: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend within fixed-length sequences, heads first; return outputs and states of blocks.

    A drop-in for engines, over the operators of :func:`lightning_attn_func`. Unlike its
    predecessor's, its outputs agree with decoding.

    Args:
        q: queries, ``[B, H, N, D]``; fp16, bf16 or fp32. ``D`` is a multiple of 16 up to 256.
        k: keys, the shape and dtype of ``q``.
        v: values, ``[B, H, N, E]``, dtype of ``q``; ``E`` is a multiple of 16 up to 256.
        ed: decays, fp32, ``[H]``, ``[H, 1, 1]`` or ``[1, H, 1, 1]``, at least 0.
        block_size: tokens between two returned states. Default: 256.
        kv_history: the state before the first token, fp32 ``[B, H, D, E]``, not changed.
            Default: None (zeros).

    Returns:
        ``(o, kv)``: ``o`` ``[B, H, N, E]`` in the dtype of ``q``, and ``kv``, fp32 ``[B, H,
        ceil(N / block_size) + 1, D, E]``: entry i is the state before block i, the last entry the
        final state. There is no gradient: :func:`lightning_attn_func` has one.

    Raises:
        TypeError: if an argument has a wrong type or dtype.
        ValueError: if a shape, a device or a range is wrong.
        NotImplementedError: if an input requires a gradient.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if x.ndim != 4:
            last = "E" if name == "v" else "D"
            raise ValueError(f"{name} must be [B, H, N, {last}], got {list(x.shape)}")
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    checks.check_qkv(q, k, v, 4)
    rates = checks.check_decay(ed, q, "ed")
    check_count("block_size", block_size, 1)
    if kv_history is not None:
        checks.check_initial_state("kv_history", kv_history, q.shape[0], q, v)
    given = {"q": q, "k": k, "v": v, "ed": ed, "kv_history": kv_history}
    checks.check_no_gradient("lightning_attention", **given)
    try:
        out, states = ops.forward_with_states(q, k, v, rates, kv_history, 1.0, block_size)
    except ERRORS as error:
        raise renamed(error, {"decay": "ed"}) from error
    return out.transpose(1, 2), states


def linear_decode_forward_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_caches: Tensor,
    slope_rate: Tensor,
    slot_idx: Tensor,
    BLOCK_SIZE: int = 32,
) -> Tensor:
    """Advance each sequence by one token; a drop-in for engines over the decode function.

    Args:
        q: queries, ``[B, H, 1, D]``; fp16, bf16 or fp32, any strides.
        k: keys, the shape and dtype of ``q``.
        v: values, ``[B, H, 1, E]``, dtype of ``q``; ``E`` may differ from ``D``.
        kv_caches: states, fp32 ``[slots, H, D, E]``, updated in place.
        slope_rate: decays, fp32, ``[H]``, ``[H, 1, 1]`` or ``[1, H, 1, 1]``.
        slot_idx: the slot of each sequence, int32 or int64 ``[B]``; negative: padding.
        BLOCK_SIZE: accepted and ignored. Default: 32.

    Returns:
        ``[B, H * E]`` in the dtype of ``q``; rows of padding are 0.

    Raises:
        TypeError: if an argument has a wrong type or dtype.
        ValueError: if a shape, a device or a range is wrong, or if what is written shares memory.
        NotImplementedError: if an input requires a gradient.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if x.ndim != 4 or x.shape[2] != 1:
            last = "E" if name == "v" else "D"
            raise ValueError(f"{name} must be [B, H, 1, {last}], got {list(x.shape)}")
    check_tensor("kv_caches", kv_caches)
    check_tensor("slope_rate", slope_rate)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    try:
        out = lightning_attn_decode(q, k, v, kv_caches, slope_rate, slot_idx)
    except ERRORS as error:
        raise renamed(error, {"state_cache": "kv_caches", "decay": "slope_rate"}) from error
    return rearrange(out, "b 1 h e -> b (h e)")
