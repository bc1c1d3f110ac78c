"""Launchers: what calls with one signature share on the host; and the operators' implementations.

An attention call launches one kernel for sequences with few queries and one for sequences with
many, and merges splits. ``portable/tile_launch.py`` and ``hopper/launch.py`` launch one tile each.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from attn_common import cdiv, detect, fp8_info
from torch import Tensor

from .._cache.kernels.addressing import (
    descale_ndim,
    has_narrow_words,
    one_form,
    row_strides,
)
from .._cache.kernels.arguments import RowStrides
from .._cache.layout import cache_sizes
from .._linked.host.operators import structured
from .._linked.launch.entries import flat
from .._linked.launch.kernels import Kernel
from .._linked.launch.runtime import MAX_COUNTS, Launch, aligned, dense, is_aligned
from .call import Call, Options, Plan, Tensors
from .hopper_tiles import hopper_tile
from .invariant import InvariantAttention
from .portable.arguments import StateMergeNumbers, StateMergeTensors, StateMergeTile
from .portable.tile_launch import TilePlan
from .tiles import (
    MAX_SHORT_ROWS,
    long_tile,
    padded_head_dim,
    short_tile,
    short_tokens,
    takes_hopper,
    tree_tile,
    words_of,
)

state_merge_kernel = Kernel(__package__, ".portable.merge", "state_merge_kernel")

if TYPE_CHECKING:
    from .hopper.launch import HopperPlan

MAX_TOKENS = 2**31 - 1
# rows that a program merges
MERGE_ROWS = 16
# small tensors that must be contiguous for the kernels
_DENSE = ("cu_seqlens_q", "seqlens_k", "positions", "alibi_slopes", "sinks", "tree_mask")

# ---- attention


def launch_attention(*arguments: Any) -> None:
    """Run the attention operator on checked inputs; see ``ops.py`` for its schema."""
    call = structured(Call, arguments)
    x = call.tensors
    q, k, v, out = aligned(x.q), x.k, x.v, x.out
    if k is not None:
        k, v = aligned(k), aligned(v)
    if not is_writable(out):
        # a clone, because rows that the kernels do not write keep their values
        out = out.clone(memory_format=torch.contiguous_format)
    aligned_x = x._replace(q=q, k=k, v=v, out=out)
    if call.options.invariant:
        plan: Plan = InvariantAttention(aligned_x, call.options)
    else:
        plan = AttentionPlan(aligned_x, call.options)
    plan.run(aligned_x, call.max_seqlen_q, call.max_seqlen_k)
    if out is not x.out:
        x.out.copy_(out)


def plan_of(x: Tensors, options: Options) -> Plan | None:
    """Return a launcher for calls like ``x``, or None if tensors have to be copied first."""
    new = (x.q, x.k, x.v) if x.k is not None else (x.q,)
    fits = all(map(is_aligned, new)) and is_writable(x.out)
    if not fits:
        return None
    if options.invariant:
        return InvariantAttention(x, options, is_kept=True)
    return AttentionPlan(x, options, is_kept=True)


def is_writable(out: Tensor) -> bool:
    """Return whether the kernels can write ``out`` in place."""
    return is_aligned(out) and min(out.stride()) > 0


class AttentionPlan:
    """Launcher of the calls with one signature; it depends on no data and on no token count."""

    def __init__(self, x: Tensors, options: Options, is_kept: bool = False) -> None:
        """Prepare calls like ``x``, with aligned tensors; ``is_kept``: the launcher is reused."""
        self.options = options
        device, dtype = x.q.device, x.q.dtype
        platform = detect(device)
        heads_k = cache_sizes(x.k_cache).heads_k
        # the wider of keys and values sets the tile
        group, head_dim = x.q.shape[1] // heads_k, max(x.q.shape[2], x.out.shape[2])
        most_short = 0 if options.long_only else short_tokens(group)
        least_short = 2 if options.skip_decode else 1
        itemsize = 4 if dtype == torch.float32 else 2
        descales = x.q_descale, x.k_descale, x.v_descale
        self._has_descales = any(d is not None for d in descales)
        small = (getattr(x, name) for name in _DENSE)
        self._is_dense = all(t is None or t.is_contiguous() for t in small)
        self.batch = x.seqlens_k.shape[0]
        ndim = descale_ndim(*descales)
        self._descale_shape = (self.batch, heads_k)[2 - ndim :]
        self.short = None
        if most_short >= least_short or options.fill_padding:
            tile = short_tile(platform, head_dim, itemsize, group, words_of(x))
            has_any = most_short >= least_short
            self.short = TilePlan(x, options, tile, least_short, most_short, has_any)
        tile_of = long_tile if x.tree_mask is None else tree_tile
        tile = tile_of(platform, head_dim, itemsize, x.k_scale_cache is not None)
        if platform.is_hopper and has_narrow_words(x):
            # too few rows for a wgmma, near which ptxas 12.8 miscompiles: see docs/hopper-traps.md
            tile = short_tile(platform, head_dim, itemsize, MAX_SHORT_ROWS // 2)
        least_long = max(most_short + 1, least_short)
        self.long: list[TilePlan | HopperPlan] = []
        if takes_hopper(x, options):
            from .hopper.launch import HopperPlan

            least = max(least_long, hopper_tile(head_dim, words_of(x)).least_tokens(group))
            if least > least_long:
                # too few queries for a group that does not fit one Hopper tile
                self.long += [TilePlan(x, options, tile, least_long, least - 1, None)]
            portable = TilePlan(x, options, tile, least, MAX_TOKENS, None)
            self.long += [HopperPlan(x, options, portable, is_kept)]
        else:
            self.long += [TilePlan(x, options, tile, least_long, MAX_TOKENS, None)]

    def run(self, x: Tensors, max_seqlen_q: int, max_seqlen_k: int) -> None:
        """Launch one call."""
        tokens = x.q.shape[0]
        if tokens == 0:
            return
        if not self._is_dense:
            x = x._replace(**{name: dense(getattr(x, name)) for name in _DENSE})
        if self._has_descales:
            q_descale, k_descale, v_descale = one_form(
                self._descale_shape, x.q_descale, x.k_descale, x.v_descale
            )
            x = x._replace(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
        if self.short is not None:
            self.short.run(x, tokens, max_seqlen_k)
        for long in self.long:
            # serve sequences even if max_seqlen_q understates them, where the token count proves it
            if max_seqlen_q >= long.least or tokens > self.batch * (long.least - 1):
                long.run(x, tokens, max_seqlen_k)


# ---- merging two results


@functools.lru_cache(MAX_COUNTS)
def _merge_numbers(heads_q: int, tokens: int, *strides: int) -> tuple[int, ...]:
    return flat(StateMergeNumbers(heads_q, tokens, out=RowStrides(*strides)))


# by device, head dimension and dtypes
_merges: dict[tuple[Any, ...], Launch] = {}


def launch_merge(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    out_scale: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Run the operator that merges two results on checked inputs; see ``ops.py``."""
    tokens, heads_q, head_dim = out_a.shape
    target = out if out.stride(2) == 1 or head_dim == 1 else out.new_empty(out.shape)
    tensors = StateMergeTensors(
        dense(out_a), dense(lse_a), dense(out_b), dense(lse_b), target, lse, out_scale
    )
    key = (out_a.device, head_dim, *(None if t is None else t.dtype for t in tensors))
    launch = _merges.get(key)
    if launch is None:
        tile = StateMergeTile(
            HEAD_DIM=head_dim,
            OUT_MAX=fp8_info(out.dtype).max if out.element_size() == 1 else 0.0,
            BLOCK_D=padded_head_dim(head_dim),
            ROWS=MERGE_ROWS,
        )
        constants = {"TILE": tile, "num_warps": 4, "num_stages": 1}
        launch = _merges[key] = Launch(state_merge_kernel, constants)
    numbers = _merge_numbers(heads_q, tokens, *row_strides(target))
    launch(cdiv(tokens * heads_q, MERGE_ROWS), tensors, numbers)
    if target is not out:
        out.copy_(target)
