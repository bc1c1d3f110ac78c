"""Attention over a tree of segments: one prompt with many answers, trees of prefixes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .._linked.host.arguments import (
    as_int32,
    check_flag,
    check_readable,
    check_scale,
    check_softcap,
    check_tensor,
)
from .._linked.host.results import returns_lse
from . import checks, ops
from .call import TreeCall


@returns_lse
def flash_attn_tree_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    parents: Sequence[int] | Tensor,
    max_seqlen: int,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention over a tree of packed segments, forward and backward.

    A token sees all tokens of the segments above its own segment, up to a root, and its own segment
    causally. The result equals causal attention over each written-out path from a root. But a
    segment's keys and values are stored once, and get one gradient, however many segments are
    below it. Scores, softcap and sinks are those of :func:`flash_attn_func`.

    Args:
        q: queries, ``[tokens, heads_q, head_dim]``; fp16, bf16 or fp32. Segment s has the rows
            ``cu_seqlens[s]`` to ``cu_seqlens[s + 1]``. Rows after the last segment are padding,
            with output 0, lse -inf and gradient 0. ``head_dim`` is from 1 to 256. Any strides.
        k: keys, ``[tokens, heads_k, head_dim]``, dtype of ``q``. ``heads_q`` is a multiple of
            ``heads_k``: query head h reads KV head ``h // (heads_q // heads_k)``.
        v: values, ``[tokens, heads_k, head_dim_v]``, dtype of ``q``; ``head_dim_v`` is from 1 to
            256.
        cu_seqlens: first token of each segment, and the end of the last, int32 ``[segments + 1]``,
            contiguous; int64 is converted. A segment may be empty. On a GPU the values are not
            checked; :func:`validate_tree` checks them.
        parents: the index of each segment's parent, smaller than its own index, or -1 for a root: a
            list of ints, or int32 ``[segments]`` on the device of ``q``, whose values are not
            checked on a GPU. A list is copied to the device, which a CUDA graph cannot capture.
        max_seqlen: the longest segment, or an upper bound.
        softmax_scale: factor of the scores, any number that is finite in fp32.
            Default: ``head_dim ** -0.5``.
        softcap: cap of the scores; 0.0 is none. Default: 0.0.
        sinks: one more logit per head in the softmax denominator, not scaled and without a value:
            ``[heads_q]``, fp16, bf16 or fp32. Has a gradient. Default: None.
        deterministic: make gradients repeat bit for bit. Default: False.
        return_lse: return ``(out, lse)``. Default: False.

    Returns:
        ``out``, ``[tokens, heads_q, head_dim_v]``; or ``(out, lse)``, where ``lse`` is the natural
        logarithm of the whole softmax denominator, fp32 ``[heads_q, tokens]``, differentiable.

    Raises:
        TypeError: on an argument's type or dtype.
        ValueError: on a shape, a device or a range; on the values of a list, and of tensors on the
            CPU.
        NotImplementedError: on FP8, on a list while a CUDA graph is captured, and on forward-mode
            differentiation.
    """
    checks.check_tokens(q, k, v, sinks)
    cu_seqlens, parents = as_int32(cu_seqlens), as_int32(parents)
    max_seqlen = checks.check_tree(q, cu_seqlens, parents, max_seqlen)
    deterministic = check_flag("deterministic", deterministic)
    check_flag("return_lse", return_lse)
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5
    else:
        softmax_scale = check_scale("softmax_scale", softmax_scale)
    softcap = check_softcap(softcap, softmax_scale)
    on_device = checks.parents_on_device(parents, q.device)
    call = TreeCall(
        q,
        k,
        v,
        cu_seqlens,
        on_device,
        sinks,
        max_seqlen,
        softmax_scale,
        softcap,
        deterministic,
    )
    out, lse = ops.attention(call)
    return (out, lse) if return_lse else out


def validate_tree(
    q: Tensor, cu_seqlens: Tensor, parents: Sequence[int] | Tensor, max_seqlen: int
) -> None:
    """Check the values of offsets and parents, which :func:`flash_attn_tree_func` trusts on a GPU.

    Use it for debugging and in tests: it copies both to the host, so it waits for the device, and a
    CUDA graph cannot capture it.

    Args:
        q: queries, ``[tokens, heads_q, head_dim]``; only the shape is read.
        cu_seqlens: first token of each segment, and the end of the last, int32 ``[segments + 1]``:
            must not decrease, and must be from 0 to ``tokens``.
        parents: the index of each segment's parent, smaller than its own index, or -1 for a root.
        max_seqlen: no segment may be longer.

    Raises:
        TypeError: on an argument's type or dtype.
        ValueError: on a shape, a device or a range, and on the first wrong value: the message gives
            the argument, the index of the entry, what was expected and what was given.
    """
    check_tensor("q", q)
    if q.ndim != 3:
        raise ValueError(f"q must be [tokens, heads_q, head_dim], got {list(q.shape)}")
    cu_seqlens, parents = as_int32(cu_seqlens), as_int32(parents)
    max_seqlen = checks.check_tree(q, cu_seqlens, parents, max_seqlen)
    check_readable(cu_seqlens=cu_seqlens)
    if isinstance(parents, Tensor):
        check_readable(parents=parents)
    values = parents.tolist() if isinstance(parents, Tensor) else parents
    checks.check_tree_values(cu_seqlens.tolist(), values, q.shape[0], max_seqlen)
