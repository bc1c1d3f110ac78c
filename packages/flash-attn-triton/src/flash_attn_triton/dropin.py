"""The drop-in for inference engines: the name and signature under which they call this kernel."""

import torch
from torch import Tensor

from ._linked.host import arguments
from ._linked.host.forms import checks_values
from ._linked.host.internals import is_watched
from ._linked.host.overlap import check_no_overlap
from .api import flash_attn_varlen_func

_NAMES = ("q", "k", "v")
# argument names of the checks: names in this function
_RENAMED = {
    "max_seqlen_q": "max_seqlens_q",
    "max_seqlen_k": "max_seqlens_k",
    "softmax_scale": "sm_scale",
    "q_descale": "fp8_scales[0]",
    "k_descale": "fp8_scales[1]",
    "v_descale": "fp8_scales[2]",
    "out_scale": "fp8_out_scale",
    "out_dtype": "fp8_out_scale",
}


def triton_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlens_q: int,
    max_seqlens_k: int,
    causal: bool = False,
    sm_scale: float = 1.0,
    bias: Tensor | None = None,
    fp8_scales: tuple[float | Tensor, ...] | None = None,
    fp8_out_scale: Tensor | None = None,
    *,
    invariant: bool = False,
) -> tuple[Tensor, None]:
    """Compute attention of packed sequences: :func:`flash_attn_varlen_func` for engines.

    Args:
        q: queries, ``[tokens_q, heads_q, head_dim]``; fp16, bf16, fp32 or FP8 (e4m3).
        k: keys, ``[tokens_k, heads_k, head_dim]``, dtype of ``q``.
        v: values, ``[tokens_k, heads_k, head_dim_v]``, dtype of ``q``.
        o: receives the output, ``[tokens_q, heads_q, head_dim_v]``, any strides; its dtype is the
            output's. None: allocated, in the dtype of ``q`` (bf16 for FP8 ``q``), or in FP8 with
            ``fp8_out_scale``.
        cu_seqlens_q: offsets of the sequences of queries, int32 ``[batch + 1]``.
        cu_seqlens_k: offsets of the sequences of keys, int32 ``[batch + 1]``.
        max_seqlens_q: the longest sequence of queries.
        max_seqlens_k: the longest sequence of keys.
        causal: hide key j from query i unless ``j <= i + seqlen_k - seqlen_q``. Default: False.
        sm_scale: factor of the scores. Default: 1.0, not ``head_dim ** -0.5``.
        bias: added to the scaled scores, ``[1, heads_q, max_seqlens_q, max_seqlens_k]``, one for
            all sequences; dtype of ``q`` or fp32. Default: None.
        fp8_scales: scales of q, k, v and the softmax, positive floats or one-element tensors.
            Inputs that are not FP8 yet are quantised as ``clamp(x / scale)``; the products are
            multiplied by the scales. The fourth scale is accepted but ignored: probabilities are at
            most 1 and have a fixed scale. Default: None.
        fp8_out_scale: one-element fp32 tensor; the output is FP8 and stores ``out / scale``,
            saturated. Default: None.
        invariant: as in :func:`flash_attn_func`. Default: False.

    Returns:
        ``(o, None)``. Differentiable in q, k, v and bias if ``o`` is None and nothing is FP8.

    Raises:
        TypeError: on an argument's type or dtype.
        ValueError: on a shape, a device or a range, or if ``o`` overlaps itself.
        NotImplementedError: on FP8 if the hardware lacks it; with ``invariant``, on FP8 and on
            ``bias``.
    """
    for name, x in zip(_NAMES, (q, k, v), strict=True):
        arguments.check_tensor(name, x)
    if bias is not None:
        arguments.check_tensor("bias", bias)
        if bias.ndim != 4 or bias.shape[0] != 1:
            raise ValueError(
                f"bias must be [1, heads_q, max_seqlens_q, max_seqlens_k], got {list(bias.shape)}"
            )
    arguments.check_flag("invariant", invariant)
    for name, scales in (("fp8_scales", fp8_scales), ("fp8_out_scale", fp8_out_scale)):
        if invariant and scales is not None:
            raise NotImplementedError(
                f"{name} must be None beside invariant=True: the law has no FP8, "
                f"got {arguments.kind(scales)}; leave invariant out"
            )
    sm_scale = arguments.check_scale("sm_scale", sm_scale)
    max_seqlens_q = arguments.as_length("max_seqlens_q", max_seqlens_q)
    max_seqlens_k = arguments.as_length("max_seqlens_k", max_seqlens_k)
    if fp8_out_scale is not None:
        arguments.check_out_scale("fp8_out_scale", fp8_out_scale, q)
    out_dtype = _output_dtype(q, v, o, fp8_out_scale)
    descales: tuple[Tensor | None, ...] = (None, None, None)
    if fp8_scales is not None:
        if bias is not None:
            if bias.dtype not in arguments.FLOAT_DTYPES:
                raise TypeError(
                    "bias must be torch.float16, torch.bfloat16 or torch.float32 with fp8_scales, "
                    f"got {bias.dtype}"
                )
            bias = bias.float()
        q, k, v, descales = _quantised(q, k, v, fp8_scales)

    # a result in the caller's tensor has no graph
    with torch.set_grad_enabled(torch.is_grad_enabled() and o is None):
        try:
            out = flash_attn_varlen_func(
                q,
                k,
                v,
                cu_seqlens_q,
                cu_seqlens_k,
                max_seqlens_q,
                max_seqlens_k,
                softmax_scale=sm_scale,
                causal=causal,
                bias=bias,
                q_descale=descales[0],
                k_descale=descales[1],
                v_descale=descales[2],
                out_dtype=out_dtype,
                out_scale=fp8_out_scale,
                deterministic=torch.are_deterministic_algorithms_enabled(),
                invariant=invariant,
            )
        except arguments.ERRORS as error:
            raise arguments.renamed(error, _RENAMED) from error
        return (out, None) if o is None else (o.copy_(out), None)


def _output_dtype(
    q: Tensor, v: Tensor, o: Tensor | None, fp8_out_scale: Tensor | None
) -> torch.dtype | None:
    """Check the caller's output, and return the output's dtype."""
    if o is None:
        if fp8_out_scale is not None:
            return arguments.check_fp8_hardware("fp8_out_scale", q.device)
        return q.dtype if q.dtype in arguments.FLOAT_DTYPES else None
    arguments.check_tensor("o", o)
    shape = (*q.shape[:-1], *v.shape[-1:])
    if o.shape != shape:
        raise ValueError(
            f"o must be [tokens_q, heads_q, head_dim_v], {list(shape)}, got {list(o.shape)}"
        )
    if o.device != q.device:
        raise ValueError(f"o must be on the device of q, {q.device}, got {o.device}")
    check_no_overlap("o", o)
    arguments.check_no_gradient("o", o)
    is_fp8 = o.dtype in arguments.FP8_DTYPES
    if is_fp8:
        expected = arguments.check_fp8_hardware("o", q.device)
        if o.dtype != expected:
            raise TypeError(f"o must be {expected} to be FP8 on this platform, got {o.dtype}")
    elif o.dtype not in arguments.FLOAT_DTYPES:
        raise TypeError(
            f"o must be torch.float16, torch.bfloat16, torch.float32 or FP8, got {o.dtype}"
        )
    if is_fp8 and fp8_out_scale is None:
        raise ValueError(f"fp8_out_scale must be given for an o of {o.dtype}, got None")
    if not is_fp8 and fp8_out_scale is not None:
        raise ValueError(f"fp8_out_scale must be None unless o is FP8, which is {o.dtype}")
    return o.dtype


def _quantised(
    q: Tensor, k: Tensor, v: Tensor, fp8_scales: tuple[float | Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """Return q, k and v in FP8, and their scales for the operator."""
    if not isinstance(fp8_scales, (tuple, list)):
        raise TypeError(
            f"fp8_scales must be a tuple of four floats or tensors, got {type(fp8_scales).__name__}"
        )
    if len(fp8_scales) != 4:
        raise ValueError(f"fp8_scales must hold four scales (q, k, v, p), got {len(fp8_scales)}")
    dtype = arguments.check_fp8_hardware("fp8_scales", q.device)
    if q.dtype != dtype and q.dtype not in arguments.FLOAT_DTYPES:
        raise TypeError(
            f"q must be torch.float16, torch.bfloat16, torch.float32 or {dtype} with fp8_scales, "
            f"got {q.dtype}"
        )
    for name, scale in zip((*_NAMES, "p"), fp8_scales, strict=True):
        _check_scale(f"fp8_scales: that of {name}", scale)
    limits = torch.finfo(dtype)
    tensors, scales = [], []
    for name, x, scale in zip(_NAMES, (q, k, v), fp8_scales[:3], strict=True):
        if x.dtype != q.dtype:
            raise TypeError(f"{name} must have the dtype of q, {q.dtype}, got {x.dtype}")
        if isinstance(scale, Tensor):
            if scale.device != x.device:
                raise ValueError(
                    f"fp8_scales: that of {name} must be on its device, {x.device}, "
                    f"got {scale.device}"
                )
            scale = scale.to(torch.float32)
        else:
            scale = torch.full((1,), scale, dtype=torch.float32, device=x.device)
        if x.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                f"FP8 has no gradient: {name} must not require one with "
                "fp8_scales, got requires_grad=True; leave fp8_scales out, or use torch.no_grad()"
            )
        if x.dtype != dtype:
            x = (x.float() / scale).clamp(limits.min, limits.max).to(dtype)
        tensors.append(x)
        scales.append(scale.reshape(1))
    return (*tensors, tuple(scales))  # type: ignore[return-value]


def _check_scale(name: str, scale: float | Tensor) -> None:
    if not isinstance(scale, Tensor):
        arguments.check_fp8_scale(name, scale)
        return
    arguments.check_no_gradient(name, scale)
    if not scale.dtype.is_floating_point:
        raise TypeError(f"{name} must be of a float dtype, got {scale.dtype}")
    if scale.numel() != 1:
        raise ValueError(f"{name} must have one element, got {list(scale.shape)}")
    if checks_values(scale) and not is_watched():
        arguments.check_fp8_scale(name, scale.item())
