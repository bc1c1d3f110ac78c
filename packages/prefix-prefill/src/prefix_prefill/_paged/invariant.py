"""Launcher of ``invariant=True``: see docs/numerics.md and ``linked/invariant``."""

from __future__ import annotations

import torch
from torch import Tensor

from .._cache.kernels.addressing import CacheForm, descale_ndim, one_form
from .._cache.layout import cache_sizes
from .._linked.invariant.arguments import KeyStrides, Scores, ValueStrides
from .._linked.invariant.call import Call, KeyForm
from .._linked.invariant.plans import plan_invariant
from .._linked.launch.runtime import dense
from . import tiles
from .call import Options, Tensors


class InvariantAttention:
    """Launcher of the calls with one signature; a row's bits depend only on its own keys."""

    def __init__(self, x: Tensors, options: Options, is_kept: bool = False) -> None:
        """Prepare calls like ``x``, whose tensors are aligned (see ``aligned``)."""
        descales = x.k_descale, x.v_descale
        sizes = cache_sizes(x.k_cache)
        batch = x.seqlens_k.shape[0]
        ndim = descale_ndim(*descales)
        self._descale_shape = (batch, sizes.heads_k)[2 - ndim :]
        cache = CacheForm(x.k_cache, x.v_cache)
        layout = cache.layout
        keys = KeyForm(
            head_dim_v=x.out.shape[2],
            heads_k=sizes.heads_k,
            page=layout.PAGE,
            k_run=layout.K_RUN,
            k_bytes=layout.K_BYTES if layout.K_UNIT else 0,
            v_bytes=layout.V_BYTES if layout.V_UNIT else 0,
            k=KeyStrides(*cache.k),
            v=ValueStrides(cache.v.page, cache.v.slot, cache.v.head, number=cache.v.number),
            descale_ndim=ndim,
            decode_from_cache=options.decode_from_cache and x.k is not None,
        )
        # Drop-ins keep the rows that they do not compute. The kernels write all rows, so they write
        # another output, from which the computed rows are copied.
        self._keeps_rows, self._skip_decode = not options.fill_padding, options.skip_decode
        # drop-ins accept a max_seqlen_k that is too small; the page table bounds the keys
        self._room = sizes.block_size * x.block_table.shape[1]
        if self._keeps_rows:
            x = x._replace(out=_like(x.out))
        scores = Scores(
            options.softmax_scale, options.softcap, options.window_left, options.window_right
        )
        self._plan = plan_invariant(
            self._call_of(x), scores, keys, batch, is_kept=is_kept, hopper=tiles.HOPPER
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
        """Launch one call."""
        if not self._keeps_rows:
            self._plan.run(self._call_of(x), 0, max_seqlen_q, max_seqlen_k)
            return
        out = _like(x.out)
        most_keys = self._room + (0 if x.k is None else len(x.k))
        self._plan.run(self._call_of(x._replace(out=out)), 0, max_seqlen_q, most_keys)
        written = _written(x.cu_seqlens_q, len(out), self._skip_decode)
        x.out.copy_(torch.where(written[:, None, None], out, x.out))


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _written(starts: Tensor, tokens: int, skip_decode: bool) -> Tensor:
    """Return the mask ``[tokens]`` of rows of sequences; ``skip_decode``: with several queries."""
    token = torch.arange(tokens, device=starts.device)
    written = (token >= starts[0]) & (token < starts[-1])
    if skip_decode:
        # the row of each sequence with one query; for other sequences a row past the end
        single = torch.where(starts.diff() == 1, starts[:-1], tokens).to(torch.int64)
        longer = torch.ones(tokens + 1, dtype=torch.bool, device=starts.device)
        written &= longer.index_fill(0, single, False)[:tokens]
    return written
