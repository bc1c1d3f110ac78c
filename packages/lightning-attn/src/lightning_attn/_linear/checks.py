"""Argument checks of the public functions.

They use only types, shapes, dtypes, strides and devices, never tensor data, so that they neither
wait for the device nor break a graph capture.
"""

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor

from .._linked.host import arguments
from .._linked.host.arguments import (
    FLOAT_DTYPES,
    check_device,
    check_flag,
    check_floats,
    check_kinds,
    check_offsets,
    check_scale,
    check_tensor,
    kind,
    warn_of_heads_first,
)
from .._linked.host.overlap import check_no_overlap

MAX_HEAD_DIM = 256
HEAD_DIM_UNIT = 16
# the most new tokens of a sequence in a decoding step
MAX_NEW_TOKENS = 8
SCHEDULES = ("auto", "sequential", "parallel")

_FORMS = {4: "[batch, seqlen, heads, {}]", 3: "[tokens, heads, {}]"}
# for dimensions of the other function: what to do
_OTHERS = {
    (_FORMS[4], 3): "; packed sequences go to lightning_attn_varlen_func, one sequence is q[None]",
    (_FORMS[3], 4): "; sequences of one length go to lightning_attn_func",
}
_DECODE_FORM = "[batch, tokens, heads, {}]"
_DECAY = "use decay, which is at least 0: exp(-decay) is what a token leaves of the state"
# arguments of other linear attention functions, and what to do here
_ELSEWHERE = {
    "cache_seqlens": "use state_cache and state_indices: a state stands for all earlier tokens",
    "causal": "leave it out: a token sees itself and those before it",
    "cu_seqlens_q": "use cu_seqlens of lightning_attn_varlen_func",
    "cu_seqlens": "use lightning_attn_varlen_func",
    "ed": _DECAY,
    "g": f"a decay of each token is not offered; {_DECAY}",
    "g_gamma": f"{_DECAY}; decay is -g_gamma",
    "kv_caches": "use state_cache",
    "kv_history": "use initial_state",
    "max_seqlen": "leave it out: lengths are read on the device",
    "num_splits": "use schedule",
    "s": _DECAY,
    "sm_scale": "use scale",
    "slope_rate": _DECAY,
    "slopes": _DECAY,
    "softmax_scale": "use scale",
    "window_size": "leave it out: the decay is what forgets",
}


def check_qkv(q: Tensor, k: Tensor, v: Tensor, ndim: int, form: str | None = None) -> None:
    """Check the three main tensors: 4 dimensions for sequences of one length, 3 packed."""
    form = form or _FORMS[ndim]
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
    if q.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"q must be torch.float16, torch.bfloat16 or torch.float32, got {q.dtype}; "
            "lightning_attention_reference takes torch.float64"
        )
    check_kinds(q, k, v)
    _check_shapes(q, k, v, ndim, form)
    if form == _FORMS[4]:
        warn_of_heads_first(q, k)
    for name, x, letter in (("q", q, "d"), ("v", v, "e")):
        size = x.shape[-1]
        if not HEAD_DIM_UNIT <= size <= MAX_HEAD_DIM or size % HEAD_DIM_UNIT:
            raise ValueError(
                f"{letter}, the last dimension of {name}, must be a multiple of {HEAD_DIM_UNIT} "
                f"from {HEAD_DIM_UNIT} to {MAX_HEAD_DIM}, got {size}"
            )


def check_reference(q: Tensor, k: Tensor, v: Tensor, ndim: int) -> None:
    """Check the main tensors of the reference: any float dtypes, any head dimension."""
    check_floats(q, k, v)
    _check_shapes(q, k, v, ndim, _FORMS[ndim])


def check_decay(decay: Tensor, q: Tensor, name: str = "decay") -> Tensor:
    """Check the decays; return them as ``[heads]``."""
    check_tensor(name, decay)
    if decay.dtype != torch.float32:
        raise TypeError(f"{name} must be torch.float32, got {decay.dtype}")
    check_device(name, decay, q)
    heads = q.shape[-2]
    # not by ``in``, which fails under torch.compile for a tuple of symbols
    if decay.shape != (heads,) and decay.shape != (heads, 1, 1) and decay.shape != (1, heads, 1, 1):
        raise ValueError(
            f"{name} must be [heads], [heads, 1, 1] or [1, heads, 1, 1] with heads {heads}, "
            f"got {list(decay.shape)}"
        )
    return decay.reshape(heads)


def refuse_unknown(names: Iterable[str], function: Callable[..., Any]) -> NoReturn:
    """Raise for keyword arguments that do not exist, with a hint."""
    arguments.refuse_unknown(names, _ELSEWHERE, function)


def check_scale_of(q: Tensor, scale: float | None) -> float:
    """Check the factor of the queries; return it as a float."""
    return float(q.shape[-1] ** -0.5) if scale is None else check_scale("scale", scale)


def check_options(q: Tensor, scale: float | None, output_final_state: bool, schedule: str) -> float:
    """Check the arguments that are no tensors; return the factor of the queries as a float."""
    scale = check_scale_of(q, scale)
    check_flag("output_final_state", output_final_state)
    check_schedule(schedule)
    return scale


def check_schedule(schedule: str) -> None:
    """Check the name of a schedule."""
    if not isinstance(schedule, str):
        raise TypeError(f"schedule must be a str, got {kind(schedule)}")
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")


def check_initial_state(name: str, state: Tensor, batch: int, q: Tensor, v: Tensor) -> None:
    """Check the initial states of sequences."""
    _check_fp32_state(name, state, q)
    want = (batch, q.shape[-2], q.shape[-1], v.shape[-1])
    if tuple(state.shape) != want:
        raise ValueError(
            f"{name} must be [batch, heads, d, e], {list(want)}, got {list(state.shape)}"
        )


def check_packed(q: Tensor, cu_seqlens: Tensor) -> int:
    """Check the offsets of packed sequences; return the number of sequences."""
    check_offsets("cu_seqlens", cu_seqlens, q)
    if cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens must be [batch + 1], got {list(cu_seqlens.shape)}")
    batch: int = cu_seqlens.shape[0] - 1
    return batch


def check_sequences(
    q: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    state_cache: Tensor | None,
    state_indices: Tensor | None,
    initial_state: Tensor | None,
    has_initial_state: Tensor | None,
) -> None:
    """Check the arguments of packed sequences besides q, k and v."""
    batch = check_packed(q, cu_seqlens)
    if has_initial_state is not None:
        check_has_initial_state(has_initial_state, batch, q)
    if state_cache is None:
        if state_indices is not None:
            raise ValueError("state_indices must be None without a state_cache, got a tensor")
        if initial_state is not None:
            check_initial_state("initial_state", initial_state, batch, q, v)
        return
    if initial_state is not None:
        raise ValueError("initial_state must be None with a state_cache, got a tensor")
    check_state_cache(state_cache, state_indices, batch, q, v)


def check_state_cache(
    state_cache: Tensor,
    state_indices: Tensor | None,
    batch: int,
    q: Tensor,
    v: Tensor,
    indices_name: str = "state_indices",
    cache_name: str = "state_cache",
) -> None:
    """Check a cache of states and the slot of each sequence."""
    _check_fp32_state(cache_name, state_cache, q)
    check_no_overlap(cache_name, state_cache)
    want = (q.shape[-2], q.shape[-1], v.shape[-1])
    if state_cache.ndim != 4 or tuple(state_cache.shape[1:]) != want:
        raise ValueError(
            f"{cache_name} must be [slots, heads, d, e], [slots, {', '.join(map(str, want))}], "
            f"got {list(state_cache.shape)}"
        )
    if state_indices is None:
        if state_cache.shape[0] < batch:
            raise ValueError(
                f"{cache_name} must have a slot for each of {batch} sequences where "
                f"{indices_name} is None, got {state_cache.shape[0]} slots"
            )
        return
    check_tensor(indices_name, state_indices)
    if state_indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"{indices_name} must be torch.int32 or torch.int64, got {state_indices.dtype}"
        )
    check_device(indices_name, state_indices, q)
    if tuple(state_indices.shape) != (batch,):
        raise ValueError(
            f"{indices_name} must be [batch], [{batch}], got {list(state_indices.shape)}"
        )


def check_has_initial_state(flags: Tensor, batch: int, q: Tensor) -> None:
    """Check the flags of sequences with an initial state."""
    name = "has_initial_state"
    check_tensor(name, flags)
    if flags.dtype != torch.bool:
        raise TypeError(f"{name} must be torch.bool, got {flags.dtype}")
    check_device(name, flags, q)
    if tuple(flags.shape) != (batch,):
        raise ValueError(f"{name} must be [batch], [{batch}], got {list(flags.shape)}")


def check_decode(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, states_out: Tensor | None
) -> None:
    """Check the tensors of a decoding step, except its cache."""
    check_qkv(q, k, v, 4, _DECODE_FORM)
    batch, tokens, heads, d = q.shape
    e = v.shape[-1]
    if not 1 <= tokens <= MAX_NEW_TOKENS:
        raise ValueError(
            f"q must hold from 1 to {MAX_NEW_TOKENS} tokens of each sequence, got {tokens}"
        )
    if out is not None:
        check_tensor("out", out)
        if out.dtype != q.dtype:
            raise TypeError(f"out must have the dtype of q, {q.dtype}, got {out.dtype}")
        check_device("out", out, q)
        if tuple(out.shape) != (batch, tokens, heads, e):
            raise ValueError(
                f"out must be [batch, tokens, heads, e], {[batch, tokens, heads, e]}, "
                f"got {list(out.shape)}"
            )
        check_no_overlap("out", out)
    if states_out is not None:
        _check_fp32_state("states_out", states_out, q)
        want = [batch, tokens, heads, d, e]
        if list(states_out.shape) != want:
            raise ValueError(
                f"states_out must be [batch, tokens, heads, d, e], {want}, "
                f"got {list(states_out.shape)}"
            )
        check_no_overlap("states_out", states_out)


def check_no_gradient(what: str, **tensors: Tensor | None) -> None:
    """Raise if an argument requires a gradient, which would not be computed."""
    if not torch.is_grad_enabled():
        return
    for name, x in tensors.items():
        if x is not None and x.requires_grad:
            raise NotImplementedError(
                f"{what} has no gradient: its inputs must not require one, got requires_grad=True "
                f"of {name}; call lightning_attn_func with initial_state and output_final_state "
                "to train, or use torch.no_grad()"
            )


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, ndim: int, form: str) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != ndim:
            wanted = form.format("e" if name == "v" else "d")
            hint = _OTHERS.get((form, x.ndim), "") if name == "q" else ""
            raise ValueError(f"{name} must be {wanted}, got {list(x.shape)}{hint}")
    if q.shape[-2] < 1:
        raise ValueError(f"q must have at least one head, got {list(q.shape)}")
    if k.shape != q.shape:
        raise ValueError(f"k must have the shape of q, {list(q.shape)}, got {list(k.shape)}")
    if v.shape[:-1] != q.shape[:-1]:
        raise ValueError(
            f"v must have the shape of q but for the last dimension, {list(q.shape[:-1])}, "
            f"got {list(v.shape[:-1])}"
        )


def _check_fp32_state(name: str, state: Tensor, q: Tensor) -> None:
    check_tensor(name, state)
    if state.dtype != torch.float32:
        raise TypeError(f"{name} must be torch.float32, got {state.dtype}")
    check_device(name, state, q)
