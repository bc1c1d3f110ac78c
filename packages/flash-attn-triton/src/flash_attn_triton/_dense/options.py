"""Checks of the options: arguments that are neither tensors nor describe one."""

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from torch import Tensor

from .._linked.host import arguments
from .._linked.host.arguments import (
    FP8_DTYPES,
    check_flag,
    check_number,
    check_scale,
    check_softcap,
    check_window,
    shown,
)
from .call import Arguments, Options

_PAGED = "paged keys and values are served by paged_attn_func of the package prefix-prefill"
# arguments of other attention functions, and what to use here
_ELSEWHERE = {
    "attn_bias": "use bias",
    "attn_mask": "use bias, with -inf where a key is hidden",
    "block_table": _PAGED,
    "block_tables": _PAGED,
    "cache_seqlens": f"use seqused_k of flash_attn_varlen_func; {_PAGED}",
    "cu_seqlens_k": "use flash_attn_varlen_func",
    "cu_seqlens_q": "use flash_attn_varlen_func",
    "is_causal": "use causal",
    "learnable_sink": "use sinks",
    "num_splits": "leave it out: keys are not split, so results do not depend on the batch",
    "pack_gqa": "leave it out: it changes no result",
    "page_table": _PAGED,
    "return_softmax_lse": "use return_lse",
    "s_aux": "use sinks",
    "scale": "use softmax_scale",
    "seqused_k": "use flash_attn_varlen_func",
    "sm_scale": "use softmax_scale",
}


def refuse_unknown(names: Iterable[str], function: Callable[..., Any]) -> NoReturn:
    """Raise for unknown keyword arguments, and name the argument to use."""
    arguments.refuse_unknown(names, _ELSEWHERE, function)


def check_options(q: Tensor, given: Arguments) -> Options:
    """Check the arguments; return them as the operators take them."""
    for name in ("causal", "deterministic", "return_attn_probs", "return_lse", "invariant"):
        check_flag(name, getattr(given, name))
    dropout_p, softmax_scale = given.dropout_p, given.softmax_scale
    if dropout_p.__class__ is not float:
        check_number("dropout_p", dropout_p)
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be in [0, 1), got {shown(dropout_p)}")
    if dropout_p > 0.0 and q.dtype in FP8_DTYPES:
        raise NotImplementedError(
            f"dropout_p must be 0.0 for FP8 inputs, got {dropout_p}; pass q, k and v in bfloat16"
        )
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5
    else:
        softmax_scale = check_scale("softmax_scale", softmax_scale)
    softcap = check_softcap(given.softcap, softmax_scale)
    left, right = check_window(given.window_size)
    return Options(softmax_scale, left, 0 if given.causal else right, softcap, dropout_p)
