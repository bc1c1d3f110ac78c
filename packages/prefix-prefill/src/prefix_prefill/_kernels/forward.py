"""The launches of one call: sequences with few queries, those with many, and what was split."""

from __future__ import annotations

import torch
from attn_common import detect
from torch import Tensor

from .._call import Options, Tensors
from .._configs import hopper_tile, long_tile, short_tile, short_tokens, takes_hopper
from .._layout import cache_sizes
from .common import one_form
from .launch.runtime import aligned, dense, is_aligned
from .tiled import Tiled

MAX_TOKENS = 2**31 - 1


def launch_attention(*arguments):
    """Run the attention operator on checked inputs; see ``_ops.py`` for its schema."""
    x, (max_seqlen_q, max_seqlen_k) = Tensors(*arguments[:17]), arguments[17:19]
    q, k, v, out = aligned(x.q), x.k, x.v, x.out
    if k is not None:
        k, v = aligned(k), aligned(v)
    if not is_writable(out):
        # rows that are not written have to come back as they were
        out = out.clone(memory_format=torch.contiguous_format)
    aligned_x = x._replace(q=q, k=k, v=v, out=out)
    Plan(aligned_x, Options(*arguments[19:])).run(aligned_x, max_seqlen_q, max_seqlen_k)
    if out is not x.out:
        x.out.copy_(out)


def plan_of(x: Tensors, options: Options) -> Plan | None:
    """Return how to launch a form of calls, or None where tensors have to be copied first."""
    new = (x.q, x.k, x.v) if x.k is not None else (x.q,)
    fits = all(map(is_aligned, new)) and is_writable(x.out)
    return Plan(x, options, is_kept=True) if fits else None


def is_writable(out: Tensor) -> bool:
    """Say whether the kernels may write an output where it is."""
    return is_aligned(out) and min(out.stride()) > 0


def _small(x: Tensors) -> tuple[Tensor | None, ...]:
    """Return what the kernels take as contiguous, in their order."""
    return x[6], x[7], x[14], x[8], x[9]


class Plan:
    """All of a call's launches that depends on its form alone: on no data, and no token count."""

    def __init__(self, x: Tensors, options: Options, is_kept: bool = False) -> None:
        """Plan for calls like this one, whose tensors are as ``aligned`` leaves them.

        ``is_kept``: for others after it, too.
        """
        self.options = options
        device, dtype = x.q.device, x.q.dtype
        platform = detect(device)
        heads_k = cache_sizes(x.k_cache).heads_k
        group, head_dim = x.q.shape[1] // heads_k, x.q.shape[2]
        most_short = 0 if options.long_only else short_tokens(group)
        least_short = 2 if options.skip_decode else 1
        itemsize = 4 if dtype == torch.float32 else 2
        descales = x.q_descale, x.k_descale, x.v_descale
        self._per_head = any(d is not None and d.numel() != 1 for d in descales)
        self._has_descales = any(d is not None for d in descales)
        self._is_dense = all(t is None or t.is_contiguous() for t in _small(x))
        self._heads_k = heads_k
        self.batch = x.seqlens_k.shape[0]
        self.short = None
        if most_short >= least_short or options.fill_padding:
            tile = short_tile(platform, head_dim, itemsize, group)
            has_any = most_short >= least_short
            self.short = Tiled(x, options, tile, least_short, most_short, has_any)
        tile = long_tile(platform, head_dim, itemsize)
        least_long = max(most_short + 1, least_short)
        self.long: list[Tiled] = []
        if takes_hopper(x, options):
            from .hopper.prefill_plan import HopperTiled

            least = max(least_long, hopper_tile(head_dim).least_tokens(group))
            if least > least_long:
                # too few queries for a group that its tiles do not hold whole
                self.long += [Tiled(x, options, tile, least_long, least - 1, None)]
            self.long += [HopperTiled(x, options, tile, least, MAX_TOKENS, is_kept)]
        else:
            self.long += [Tiled(x, options, tile, least_long, MAX_TOKENS, None)]

    def run(self, x: Tensors, max_seqlen_q: int, max_seqlen_k: int) -> None:
        """Launch for one call of the form."""
        tokens = x.q.shape[0]
        if tokens == 0:
            return
        small, descales = _small(x), x[10:13]
        if not self._is_dense:
            small = tuple(map(dense, small))
        if self._has_descales:
            descales = one_form(self._heads_k, self._per_head, *descales)
        inputs = x[0], x[1], x[2], x[3], x[4], x[15], x[16]
        rest = (x[5], *small, *descales, x[13])
        if self.short is not None:
            self.short.run(inputs, rest, tokens, max_seqlen_k)
        for long in self.long:
            # a sequence that is longer than it should be is not left out, if it can be helped
            if max_seqlen_q >= long.least or tokens > self.batch * (long.least - 1):
                long.run(inputs, rest, tokens, max_seqlen_k)
