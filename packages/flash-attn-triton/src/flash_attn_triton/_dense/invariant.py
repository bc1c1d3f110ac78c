"""The forward pass under the law of docs/numerics.md: see ``linked/invariant``."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._linked.host.forms import ACCESS_BYTES
from .._linked.invariant.arguments import KeyStrides, Scores, ValueStrides
from .._linked.invariant.call import Call, InvariantRun, KeyForm
from .._linked.invariant.plans import plan_invariant
from .._linked.launch.runtime import dense, token_strides
from . import tiles
from .call import Tensors
from .portable.form import Form


class InvariantForward:
    """The forward launcher of a signature with ``invariant=True``."""

    def __init__(self, form: Form, out_dtype: torch.dtype, is_kept: bool = False) -> None:
        self._form = form
        self._out_dtype = out_dtype
        self._is_kept = is_kept
        self._plan: InvariantRun | None = None

    def __call__(self, x: Tensors) -> tuple[Tensor, Tensor]:
        """Return ``(out, lse)``; the tensors have passed ``readable``."""
        form, q = self._form, x.q
        tokens_q, tokens_k = q.shape[-3], x.k.shape[-3]
        out = q.new_empty((*q.shape[:-1], form.head_dim_v), dtype=self._out_dtype)
        per_head = (form.heads_q, tokens_q)
        lse_shape = per_head if form.is_packed else (form.batch, *per_head)
        lse = q.new_empty(lse_shape, dtype=torch.float32)
        if form.batch == 0:  # a packed call may hold nothing but padding
            return out.zero_(), lse.fill_(-math.inf)
        call = Call(
            q,
            x.k,
            x.v,
            out,
            lse,
            sinks=dense(x.sinks),
            cu_seqlens_q=dense(x.cu_seqlens_q),
            cu_seqlens_k=dense(x.cu_seqlens_k),
            seqlens_k=dense(x.seqused_k),
        )
        if self._plan is None:
            self._plan = _plan_of(form, call, self._is_kept)
        # 0 for packed keys: the host knows no useful bound of their lengths
        self._plan.run(call, tokens_k, tokens_q, 0 if form.is_packed else tokens_k)
        return out, lse


def _plan_of(form: Form, call: Call, is_kept: bool) -> InvariantRun:
    options = form.options
    keys = KeyForm(
        head_dim_v=form.head_dim_v,
        heads_k=form.heads_k,
        page=0,
        k_run=form.head_dim,
        k_bytes=ACCESS_BYTES,
        v_bytes=ACCESS_BYTES,
        k=KeyStrides(*token_strides(call.k), run=0, number=1),
        v=ValueStrides(*token_strides(call.v), number=1),
    )
    scores = Scores(
        options.softmax_scale, options.softcap, options.window_left, options.window_right
    )
    return plan_invariant(call, scores, keys, form.batch, is_kept=is_kept, hopper=tiles.HOPPER)
