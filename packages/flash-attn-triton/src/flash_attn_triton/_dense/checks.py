"""Argument checks of the public functions; messages give the argument, the expected and the found.

The checks look only at types, shapes, dtypes, strides and devices, never at tensor data. So they
neither wait for the device nor break a graph capture.
"""

import torch
from torch import Tensor

from .._linked.host.arguments import (
    FLOAT_DTYPES,
    FP8_DTYPES,
    check_cu_seqlens,
    check_device,
    check_fp8_hardware,
    check_given,
    check_groups,
    check_kinds,
    check_no_gradient,
    check_offset_values,
    check_offsets,
    check_out_scale,
    check_tensor,
    check_width,
    is_symbol,
    kind,
    shown,
    warn_of_heads_first,
)
from .call import Arguments, Options, Tensors

MAX_HEAD_DIM = 256

_FORMS = {
    4: ("[batch, seqlen_q, heads_q, head_dim]", "[batch, seqlen_k, heads_k, head_dim]"),
    3: ("[tokens_q, heads_q, head_dim]", "[tokens_k, heads_k, head_dim]"),
}
# for dimensions of the other function: what to do
_OTHERS = {
    (4, 3): "; packed sequences go to flash_attn_varlen_func, one sequence is q[None]",
    (3, 4): "; sequences of one length go to flash_attn_func",
}


def check_qkv(q: Tensor, k: Tensor, v: Tensor, ndim: int) -> None:
    """Check q, k and v: 4 dimensions for sequences of one length, 3 for packed ones."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
    if q.dtype not in FLOAT_DTYPES:
        _check_fp8_input(q)
    check_kinds(q, k, v)

    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    if len(q_shape) != ndim:
        other = _OTHERS.get((ndim, len(q_shape)), "")
        raise ValueError(f"q must be {_FORMS[ndim][0]}, got {list(q_shape)}{other}")
    if len(k_shape) != ndim:
        raise ValueError(f"k must be {_FORMS[ndim][1]}, got {list(k_shape)}")
    if len(v_shape) != ndim:
        raise ValueError(f"v must be {_FORMS[ndim][1]}, got {list(v_shape)}")
    if not 1 <= q_shape[-1] <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim of q must be from 1 to {MAX_HEAD_DIM}, got {q_shape[-1]}")
    if k_shape[-1] != q_shape[-1]:
        raise ValueError(f"head_dim of k must be that of q, {q_shape[-1]}, got {k_shape[-1]}")
    if not 1 <= v_shape[-1] <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim of v must be from 1 to {MAX_HEAD_DIM}, got {v_shape[-1]}")
    _check_heads(q, k, v)
    if ndim == 4:
        warn_of_heads_first(q, k)


def check_packed(
    q: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None,
) -> int:
    """Check the offsets and used lengths of packed sequences; return the number of sequences."""
    batch = check_cu_seqlens(cu_seqlens_q, cu_seqlens_k, q)
    if seqused_k is not None:
        check_offsets("seqused_k", seqused_k, q)
        if seqused_k.shape[0] != batch:
            raise ValueError(f"seqused_k must be [{batch}], got {list(seqused_k.shape)}")
    return batch


def check_values(x: Tensors, max_seqlen_q: int, max_seqlen_k: int) -> None:
    """Check the values of offsets on the CPU; on a GPU they are not checked."""
    if x.cu_seqlens_q is None or x.cu_seqlens_k is None:
        return
    offsets = x.cu_seqlens_q.tolist()
    check_offset_values("cu_seqlens_q", offsets, x.q.shape[0], "max_seqlen_q", max_seqlen_q)
    starts = x.cu_seqlens_k.tolist()
    check_offset_values("cu_seqlens_k", starts, x.k.shape[0], "max_seqlen_k", max_seqlen_k)
    check_used(starts, x.seqused_k)


def check_used(starts: list[int], seqused_k: Tensor | None) -> None:
    """Check the values of ``seqused_k`` against the lengths of the sequences."""
    if seqused_k is None:
        return
    for b, used in enumerate(seqused_k.tolist()):
        length = starts[b + 1] - starts[b]
        if not 0 <= used <= length:
            raise ValueError(
                f"seqused_k[{b}] must be from 0 to the length of the sequence, {length}, got {used}"
            )


def check_extras(x: Tensors, batch: int, seqlen_q: int, seqlen_k: int) -> None:
    """Check the bias, the ALiBi slopes and the sinks."""
    q, bias, alibi_slopes, sinks = x.q, x.bias, x.alibi_slopes, x.sinks
    heads_q = q.shape[-2]
    if bias is not None:
        check_tensor("bias", bias)
        if bias.dtype != q.dtype and bias.dtype != torch.float32:
            of_q = f"have the dtype of q, {q.dtype}, or " if q.dtype != torch.float32 else ""
            mask = "; of a mask, 0 where a key is seen and -inf where it is not"
            raise TypeError(
                f"bias must {of_q}be torch.float32, got {bias.dtype}"
                + mask * (bias.dtype == torch.bool)
            )
        if bias.dtype in FP8_DTYPES:
            raise TypeError(f"bias must be torch.float32 for FP8 inputs, got {bias.dtype}")
        check_device("bias", bias, q)
        _check_broadcast(bias, (batch, heads_q, seqlen_q, seqlen_k))
    if alibi_slopes is not None:
        check_tensor("alibi_slopes", alibi_slopes)
        if alibi_slopes.dtype != torch.float32:
            raise TypeError(f"alibi_slopes must be torch.float32, got {alibi_slopes.dtype}")
        check_device("alibi_slopes", alibi_slopes, q)
        if alibi_slopes.shape != (heads_q,) and alibi_slopes.shape != (batch, heads_q):
            raise ValueError(
                f"alibi_slopes must be [heads_q] or [batch, heads_q], [{heads_q}] or "
                f"[{batch}, {heads_q}], got {list(alibi_slopes.shape)}"
            )
        check_no_gradient("alibi_slopes", alibi_slopes)
    if sinks is not None:
        check_tensor("sinks", sinks)
        if sinks.dtype not in FLOAT_DTYPES:
            raise TypeError(
                f"sinks must be torch.float16, torch.bfloat16 or torch.float32, got {sinks.dtype}"
            )
        check_device("sinks", sinks, q)
        if sinks.shape != (heads_q,):
            raise ValueError(f"sinks must be [heads_q], [{heads_q}], got {list(sinks.shape)}")


def check_spans(spans: Tensor, x: Tensors, given: Arguments, options: Options) -> None:
    """Check the spans of a call whose other arguments have passed their checks."""
    q = x.q
    check_tensor("spans", spans)
    if spans.dtype != torch.int32:
        raise TypeError(f"spans must be torch.int32, got {spans.dtype}")
    check_device("spans", spans, q)
    form = "[batch or 1, seqlen_q, n, 2]" if q.ndim == 4 else "[tokens_q, n, 2]"
    rows = q.shape[:-2]
    of_rows = spans.shape[:-2]
    is_shared = q.ndim == 4 and of_rows[:1] == (1,) and of_rows[1:] == rows[1:]
    if spans.ndim != q.ndim or spans.shape[-1] != 2 or not (of_rows == rows or is_shared):
        raise ValueError(
            f"spans must be {form}, here [{', '.join(map(str, rows))}, n, 2], "
            f"got {list(spans.shape)}"
        )
    if not 1 <= spans.shape[-2] <= 2:
        raise ValueError(f"spans must be {form} with n 1 or 2, got n {spans.shape[-2]}")
    if given.causal:
        raise ValueError("causal must be False beside spans, which take its place, got True")
    if options.window_left >= 0 or options.window_right >= 0:
        raise ValueError(
            "window_size must be (-1, -1) beside spans, which take its place, "
            f"got {shown(given.window_size)}"
        )
    for name, other in (("bias", x.bias), ("alibi_slopes", x.alibi_slopes)):
        if other is not None:
            raise NotImplementedError(f"{name} must be None beside spans, got Tensor")
    if q.dtype in FP8_DTYPES or given.out_dtype in FP8_DTYPES:
        name, dtype = ("q", q.dtype) if q.dtype in FP8_DTYPES else ("out_dtype", given.out_dtype)
        raise NotImplementedError(f"{name} must not be FP8 beside spans, got {dtype}")
    if given.invariant:
        raise NotImplementedError("invariant must be False beside spans, got True")


def check_low_precision(x: Tensors, batch: int, out_dtype: torch.dtype | None) -> torch.dtype:
    """Check scales and the output's dtype; return that dtype."""
    q, heads_k, out_scale = x.q, x.k.shape[-2], x.out_scale
    dtype = q.dtype
    is_fp8 = dtype in FP8_DTYPES
    for name in ("q_descale", "k_descale", "v_descale"):
        descale = getattr(x, name)
        if descale is None:
            continue
        check_tensor(name, descale)
        check_no_gradient(name, descale)
        if not is_fp8:
            raise ValueError(f"{name} must be None unless q, k and v are FP8, which are {dtype}")
        if descale.dtype != torch.float32:
            raise TypeError(f"{name} must be torch.float32, got {descale.dtype}")
        check_device(name, descale, q)
        if descale.numel() != 1 and descale.shape != (batch, heads_k):
            raise ValueError(
                f"{name} must have one element or be [batch, heads_k], [{batch}, {heads_k}], "
                f"got {list(descale.shape)}"
            )
    if out_dtype is None:
        if out_scale is not None:
            raise ValueError("out_scale must be None unless out_dtype is FP8, got out_dtype None")
        if not is_fp8:
            return dtype
        out_dtype = torch.bfloat16
    if not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"out_dtype must be a torch.dtype, got {kind(out_dtype)}")
    if out_dtype in FP8_DTYPES:
        _check_fp8_output(q, out_dtype, out_scale)
    else:
        if out_dtype not in FLOAT_DTYPES:
            raise TypeError(
                "out_dtype must be torch.float16, torch.bfloat16, torch.float32 or FP8, "
                f"got {out_dtype}"
            )
        if out_scale is not None:
            raise ValueError(
                f"out_scale must be None unless out_dtype is FP8, which is {out_dtype}"
            )
    if (is_fp8 or out_dtype in FP8_DTYPES) and torch.is_grad_enabled():
        for name in ("q", "k", "v", "bias", "sinks"):
            t = getattr(x, name)
            if t is not None and t.requires_grad:
                raise NotImplementedError(
                    "FP8 has no gradient: inputs must not require one with FP8 inputs or an FP8 "
                    f"out_dtype, got requires_grad=True of {name}; use bfloat16, or "
                    "torch.no_grad()"
                )
    return out_dtype


def check_invariant(x: Tensors, options: Options, out_dtype: torch.dtype) -> None:
    """Check that a call uses no option that the law of docs/numerics.md does not cover."""
    if x.q.dtype in FP8_DTYPES:
        raise NotImplementedError(
            "q must not be FP8 beside invariant=True: tensor cores add products of FP8 with fewer "
            f"bits than the sums have, so that a tile of zeros would round them, got {x.q.dtype}; "
            "pass q, k and v in bfloat16"
        )
    if out_dtype in FP8_DTYPES:
        raise NotImplementedError(
            f"out_dtype must not be FP8 beside invariant=True, got {out_dtype}; quantise the "
            "output afterwards"
        )
    if options.dropout_p > 0.0:
        raise NotImplementedError(
            "dropout_p must be 0.0 beside invariant=True: its draw depends on the place in the "
            f"batch and in the call, got {options.dropout_p}; leave invariant out in training"
        )
    for name, extra in (("bias", x.bias), ("alibi_slopes", x.alibi_slopes)):
        if extra is not None:
            raise NotImplementedError(
                f"{name} must be None beside invariant=True: the law has no term for it, got "
                "Tensor; leave invariant out"
            )


def check_reference(q: Tensor, k: Tensor, v: Tensor, ndim: int, **others: Tensor | None) -> None:
    """Check the tensors of the reference: any float dtypes, any head dimension."""
    for name, other in others.items():
        if other is not None:
            check_tensor(name, other)
    rng_state = others.get("rng_state")
    if rng_state is not None and rng_state.dtype != torch.int64:
        raise TypeError(f"rng_state must be torch.int64, got {rng_state.dtype}")
    if rng_state is not None and rng_state.shape != (2,):
        raise ValueError(f"rng_state must be (seed, offset), [2], got {list(rng_state.shape)}")
    form_q, form_k = _FORMS[ndim]
    for name, x, form in (("q", q, form_q), ("k", k, form_k), ("v", v, form_k)):
        check_tensor(name, x)
        if not x.dtype.is_floating_point:
            raise TypeError(f"{name} must be of a float dtype, got {x.dtype}")
        check_device(name, x, q)
        if x.ndim != ndim:
            raise ValueError(f"{name} must be {form}, got {list(x.shape)}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"head_dim of k must be that of q, {q.shape[-1]}, got {k.shape[-1]}")
    if q.shape[-1] == 0:
        raise ValueError("head_dim must be at least 1, got 0")
    check_width(q, k=k, v=v)
    _check_heads(q, k, v)


def check_given_tensors(
    x: Tensors, batch: int, seqlen_q: int, seqlen_k: int, out_dtype: torch.dtype | None
) -> None:
    """Check the tensors besides q, k and v of the reference: of any float dtypes."""
    heads_q, heads_k = x.q.shape[-2], x.k.shape[-2]
    check_given("sinks", x.sinks, x.q, (heads_q,))
    check_given("alibi_slopes", x.alibi_slopes, x.q, (heads_q,), (batch, heads_q))
    for name in ("q_descale", "k_descale", "v_descale"):
        check_given(name, getattr(x, name), x.q, (), (batch, heads_k))
    check_given("out_scale", x.out_scale, x.q, ())
    if x.bias is not None:
        check_given("bias", x.bias, x.q, tuple(x.bias.shape))
        _check_broadcast(x.bias, (batch, heads_q, seqlen_q, seqlen_k))
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"out_dtype must be a torch.dtype, got {kind(out_dtype)}")


def _check_broadcast(bias: Tensor, whole: tuple[int, int, int, int]) -> None:
    # no ``in``: under torch.compile a number is not found in a tuple of symbols, and the operators
    # compare what a symbol of max_seqlen says
    if bias.ndim > 4 or any(
        not is_symbol(full) and size != 1 and size != full
        for size, full in zip(reversed(bias.shape), reversed(whole), strict=False)
    ):
        raise ValueError(
            f"bias must broadcast to [batch, heads_q, seqlen_q, seqlen_k], {list(whole)}, "
            f"got {list(bias.shape)}"
        )


def _check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    q_shape, k_shape = q.shape, k.shape
    if len(q_shape) == 4 and k_shape[0] != q_shape[0]:
        raise ValueError(f"batch of k must be that of q, {q_shape[0]}, got {k_shape[0]}")
    if v.shape[:-1] != k_shape[:-1]:
        raise ValueError(
            f"v must have the shape of k but for head_dim, {list(k_shape[:-1])}, "
            f"got {list(v.shape[:-1])}"
        )
    check_groups(q_shape[-2], k_shape[-2])


def _check_fp8_input(q: Tensor) -> None:
    dtype = q.dtype
    if dtype not in FP8_DTYPES:
        raise TypeError(
            "q must be torch.float16, torch.bfloat16, torch.float32 or FP8 (e4m3), "
            f"got {dtype}; attention_reference takes torch.float64"
        )
    expected = check_fp8_hardware("q", q.device)
    if dtype != expected:
        raise TypeError(f"q must be {expected} to be FP8 on this platform, got {dtype}")


def _check_fp8_output(q: Tensor, out_dtype: torch.dtype, out_scale: Tensor | None) -> None:
    expected = check_fp8_hardware("out_dtype", q.device)
    if out_dtype != expected:
        raise TypeError(f"out_dtype must be {expected} to be FP8 on this platform, got {out_dtype}")
    if out_scale is None:
        raise ValueError(f"out_scale must be given for the FP8 out_dtype {out_dtype}, got None")
    check_out_scale("out_scale", out_scale, q)
