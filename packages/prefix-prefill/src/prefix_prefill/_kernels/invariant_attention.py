"""Attention under the law of docs/numerics.md: see ``linked/invariant``."""

from __future__ import annotations

from torch import Tensor

from .. import _configs
from .._call import Options, Tensors
from .._layout import cache_sizes
from .addressing import CacheForm, descale_ndim, one_form
from .invariant.plans import Call, KeyForm, Scores, plan_invariant
from .launch.runtime import dense


class InvariantAttention:
    """How calls of one form are launched, whose rows depend on their own keys alone."""

    def __init__(self, x: Tensors, options: Options, is_kept: bool = False) -> None:
        """Plan for calls like this one, whose tensors are as ``aligned`` leaves them."""
        descales = x.k_descale, x.v_descale
        sizes = cache_sizes(x.k_cache)
        batch = x.seqlens_k.shape[0]
        ndim = descale_ndim(*descales)
        self._descale_shape = (batch, sizes.heads_k)[2 - ndim :]
        cache = CacheForm(x.k_cache, x.v_cache)
        layout = cache.layout
        keys = KeyForm(
            sizes.head_dim,
            sizes.heads_k,
            layout.PAGE,
            layout.K_RUN,
            layout.K_BYTES if layout.K_UNIT else 0,
            layout.V_BYTES if layout.V_UNIT else 0,
            *cache.k,
            cache.v.page,
            cache.v.slot,
            cache.v.head,
            cache.v.inner,
            ndim,
        )
        scores = Scores(
            options.softmax_scale, options.softcap, options.window_left, options.window_right
        )
        self._plan = plan_invariant(
            self._call_of(x), scores, keys, batch, is_kept=is_kept, hopper=_configs.HOPPER
        )

    def _call_of(self, x: Tensors) -> Call:
        descales: tuple[Tensor | None, ...] = x.k_descale, x.v_descale
        if any(d is not None for d in descales):
            descales = one_form(self._descale_shape, *descales)
        return Call(
            x.q,
            x.k_cache,
            x.v_cache,
            x.out,
            x.lse,
            dense(x.sinks),
            *descales,
            x.block_table,
            x.k,
            x.v,
            cu_seqlens_q=dense(x.cu_seqlens_q),
            seqlens_k=dense(x.seqlens_k),
        )

    def run(self, x: Tensors, max_seqlen_q: int, max_seqlen_k: int) -> None:
        """Launch for one call of the form."""
        self._plan.run(self._call_of(x), 0, max_seqlen_q, max_seqlen_k)
