"""Reference of attention over a paged cache: eager, any float dtype, sequence by sequence.

The kernels are tested against it, and CPU tensors run it. It holds the whole score matrix of a
sequence and shares no code with the kernels. float64 inputs are computed in float64, all others in
float32; only the output is rounded to the output's dtype. Lengths and page numbers are read on the
host.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .._cache.checks import check_kv_dtype, stored_view
from .._cache.layout import cache_sizes, gather_pages, head_dim_of_values, is_packed
from .._cache.scales import check_scale_caches
from .._linked.host.arguments import (
    MAX_WINDOW,
    as_int32,
    as_length,
    check_given,
    check_no_gradient,
    check_readable,
)
from .._linked.host.overlap import check_no_overlap
from .._linked.host.results import returns_lse
from .call import Call, Options, Tensors
from .checks import check_reference, check_table, check_tree
from .options import check_options
from .values import check_values


@returns_lse
def paged_attention_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    k: Tensor | None = None,
    v: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out: Tensor | None = None,
    out_scale: Tensor | None = None,
    num_splits: int = 0,
    return_lse: bool = False,
    tree_mask: Tensor | None = None,
    kv_dtype: str | None = None,
    k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute the formulas of :func:`paged_attn_func` in eager PyTorch.

    Args:
        q: queries, ``[tokens, heads_q, head_dim]``; any float dtype, float64 included.
        k_cache: this and all later arguments as in :func:`paged_attn_func`; ``num_splits`` has no
            effect.

    Returns:
        ``out`` or ``(out, lse)`` as :func:`paged_attn_func` does; the log-sum-exp is float64 for
        float64 queries, else float32.

    Raises:
        TypeError: on an argument's type, or a dtype that is not a float dtype.
        ValueError: on a shape, or a range.
    """
    check_kv_dtype(kv_dtype)
    k_cache, v_cache = stored_view(q, k_cache, kv_dtype), stored_view(q, v_cache, kv_dtype)
    check_reference(q, k_cache, v_cache, k, v, kv_dtype)
    scales = k_scale_cache, v_scale_cache, kv_dtype
    check_scale_caches(k_cache, *scales, k_descale, v_descale, is_reference=True)
    options = check_options(q, softmax_scale, causal, window_size, softcap, num_splits, return_lse)
    options = options._replace(zero_points=kv_dtype == "int4_per_token_head")
    cu_seqlens_q, seqlens_k = as_int32(cu_seqlens_q), as_int32(seqlens_k)
    batch = check_table(q, block_table, cu_seqlens_q, seqlens_k)
    check_readable(block_table=block_table, cu_seqlens_q=cu_seqlens_q, seqlens_k=seqlens_k)
    tokens, heads, _ = q.shape
    heads_k, width = cache_sizes(k_cache).heads_k, head_dim_of_values(k_cache, v_cache)
    check_given("k", k, q, (tokens, heads_k, q.shape[2]))
    check_given("v", v, q, (tokens, heads_k, width))
    check_given("alibi_slopes", alibi_slopes, q, (heads,), (batch, heads))
    check_given("sinks", sinks, q, (heads,))
    scales_of_heads = ("q_descale", q_descale), ("k_descale", k_descale), ("v_descale", v_descale)
    for name, scale in scales_of_heads:
        check_given(name, scale, q, (), (heads_k,), (batch, heads_k))
    check_given("out", out, q, (tokens, heads, width))
    check_given("out_scale", out_scale, q, ())
    max_seqlen_q = as_length("max_seqlen_q", max_seqlen_q)
    as_length("max_seqlen_k", max_seqlen_k)
    if tree_mask is not None:
        check_tree(q, tree_mask, max_seqlen_q, causal, alibi_slopes)
        options = options._replace(window_right=-1)
    x = Tensors.of(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        k=k,
        v=v,
        block_table=block_table,
        cu_seqlens_q=cu_seqlens_q,
        seqlens_k=seqlens_k,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        k_scale_cache=k_scale_cache,
        v_scale_cache=v_scale_cache,
        tree_mask=tree_mask,
    )
    check_values(Call(x, max_seqlen_q, max_seqlen_k, options))
    result, lse = attend(x, options)
    dtype = out_dtype_of(q, out, out_scale)
    result = round_output(result, dtype, out_scale)
    if out is not None:
        check_no_overlap("out", out)
        check_no_gradient("out", out)
        result = out.copy_(result)
    return (result, lse) if return_lse else result


def attend(x: Tensors, options: Options, at_once: int | None = None) -> tuple[Tensor, Tensor]:
    """Attend sequence by sequence, ``at_once`` queries at a time, by default all of a sequence.

    Both results are in the dtype of the computation. Padding rows get out 0 and lse -inf, with
    ``skip_decode`` also the rows of sequences with one query. ``positions`` are the keys to which
    the masks of rows are aligned, by default the last ones; with them, slopes are per row.
    """
    q, positions = x.q, x.positions
    dtype = compute_dtype(q)
    out = q.new_zeros((*q.shape[:2], head_dim_of_values(x.k_cache, x.v_cache)), dtype=dtype)
    lse = q.new_full((q.shape[1], q.shape[0]), -math.inf, dtype=dtype)
    starts, lengths = x.cu_seqlens_q.tolist(), x.seqlens_k.tolist()
    for b, seqlen_k in enumerate(lengths):
        rows = slice(starts[b], starts[b + 1])
        seqlen_q = rows.stop - rows.start
        if seqlen_q == 0 or (options.skip_decode and seqlen_q == 1):
            continue
        dense = x.k is not None and not (options.decode_from_cache and seqlen_q == 1)
        context = seqlen_k - seqlen_q if dense else seqlen_k
        if positions is None:
            position = torch.arange(seqlen_q, device=q.device) + (seqlen_k - seqlen_q)
        else:
            position = positions[rows].to(torch.int64)
        tree = None if x.tree_mask is None else x.tree_mask[rows]
        mask = _Mask(position, seqlen_k, options.window_left, options.window_right, tree)
        size = seqlen_q if at_once is None else at_once
        spans = {start: mask.span(start, start + size) for start in range(0, seqlen_q, size)}
        seen = [span for span in spans.values() if span.start < span.stop]
        # pages before the first visible key may be freed
        first = min((span.start for span in seen), default=0)
        last = max((span.stop for span in seen), default=0)
        parts: list[Tensor] = []
        for cache, fresh, descale, scales in (
            (x.k_cache, x.k, x.k_descale, x.k_scale_cache),
            (x.v_cache, x.v, x.v_descale, x.v_scale_cache),
        ):
            where = x.block_table[b], first, min(last, context)
            part = unpacked(_cached(cache, *where, is_packed(x.k_cache)), options.zero_points)
            part = scaled(part, _of_sequence(descale, b), dtype)
            if scales is not None:
                scale = _cached(scales, *where, False)
                if options.zero_points:
                    bits = scale.to(torch.float32).view(torch.int32)
                    part, scale = part - (bits & 15)[..., None], (bits & -16).view(torch.float32)
                part = part * scale.to(dtype)[..., None]
            if dense and fresh is not None:
                new = fresh[rows][max(first - context, 0) : max(last - context, 0)]
                part = torch.cat([part, new.to(dtype)])
            parts.append(part)
        slopes = x.alibi_slopes
        if slopes is not None and slopes.ndim == 2:
            slopes = slopes[b] if positions is None else slopes[rows].T
        queries = scaled(q[rows], _of_sequence(x.q_descale, b), dtype)
        for start, keys in spans.items():
            some = slice(start, min(start + size, seqlen_q))
            own = slice(max(keys.start - first, 0), max(keys.stop - first, 0))
            written = slice(rows.start + some.start, rows.start + some.stop)
            out[written], lse[:, written] = dense_attention(
                queries[some],
                parts[0][own],
                parts[1][own],
                mask.rows(some.start, some.stop)[:, keys],
                position[some] - keys.start,
                slopes if slopes is None or slopes.ndim == 1 else slopes[:, some],
                x.sinks,
                options.softmax_scale,
                options.softcap,
                options.signed_alibi,
            )
    return out, lse


def seen_keys(x: Tensors, which: str, b: int, first: int, last: int, context: int) -> Tensor:
    """Return keys or values ``first`` to ``last`` of sequence ``b`` in fp32, times their scale.

    Keys from ``context`` on are new: the keys of the tokens of ``q``.
    """
    cache, fresh, descale = (
        (x.k_cache, x.k, x.k_descale) if which == "k" else (x.v_cache, x.v, x.v_descale)
    )
    found = _cached(cache, x.block_table[b], first, min(last, context), is_packed(x.k_cache))
    found = scaled(found, _of_sequence(descale, b), torch.float32)
    if fresh is None:
        return found
    rows = fresh[int(x.cu_seqlens_q[b]) : int(x.cu_seqlens_q[b + 1])]
    new = rows[max(first - context, 0) : max(last - context, 0)]
    return torch.cat([found, new.to(torch.float32)])


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    position: Tensor,
    slopes: Tensor | None,
    sinks: Tensor | None,
    softmax_scale: float,
    softcap: float,
    signed_alibi: bool,
) -> tuple[Tensor, Tensor]:
    """Attend within one sequence; ``visible`` is the mask, bool ``[queries, keys]``."""
    # under autocast the products below would be rounded to 16 bits
    with torch.autocast(q.device.type, enabled=False):
        seqlen_q, heads_q, _ = q.shape
        group = heads_q // k.shape[1]
        # a key that no query sees may hold NaN, and 0 * NaN is NaN
        unseen = ~visible.any(0)[:, None, None]
        k = k.masked_fill(unseen, 0.0).repeat_interleave(group, dim=1)
        v = v.masked_fill(unseen, 0.0).repeat_interleave(group, dim=1)
        scores = torch.einsum("ihd,jhd->hij", q, k) * softmax_scale
        if softcap > 0.0:
            scores = softcap * torch.tanh(scores / softcap)
        if slopes is not None:
            distance = torch.arange(k.shape[0], device=q.device) - position[:, None]
            distance = distance if signed_alibi else -distance.abs()
            per_row = slopes[:, None] if slopes.ndim == 1 else slopes
            scores = scores + per_row.to(q.dtype)[..., None] * distance
        scores = scores.masked_fill(~visible, -math.inf)

        # the sink is an extra column of scores without a value
        sink = q.new_full((heads_q,), -math.inf) if sinks is None else sinks.to(q.dtype)
        scores = torch.cat([scores, sink[:, None, None].expand(-1, seqlen_q, 1)], dim=-1)
        shift = scores.amax(dim=-1, keepdim=True)
        shift = shift.masked_fill(shift == -math.inf, 0.0)
        weights = (scores - shift).exp_()
        del scores  # frees as much memory as the weights take
        total = weights.sum(dim=-1, keepdim=True)
        empty = total == 0.0
        total = total.masked_fill(empty, 1.0)
        lse = (shift + torch.log(total)).masked_fill(empty, -math.inf).squeeze(-1)
        out = torch.einsum("hij,jhd->ihd", weights[..., :-1] / total, v)
        return out.masked_fill(~visible.any(1)[:, None, None], 0.0), lse


def visible_keys(position: Tensor, seqlen_k: int, window_left: int, window_right: int) -> Tensor:
    """Return which keys each query sees, bool ``[queries, seqlen_k]``; a window of -1: no limit."""
    key = torch.arange(seqlen_k, device=position.device)
    position = position[:, None]
    visible = torch.ones((position.shape[0], seqlen_k), dtype=torch.bool, device=position.device)
    # clamped, because a position plus the largest integer overflows
    if window_left >= 0:
        visible = visible & (key >= position - min(window_left, MAX_WINDOW))
    if window_right >= 0:
        visible = visible & (key <= position + min(window_right, MAX_WINDOW))
    return visible


class _Mask(NamedTuple):
    """The mask of a sequence, made for a range of queries at a time."""

    position: Tensor
    seqlen_k: int
    window_left: int
    window_right: int
    tree: Tensor | None  # bits of the new tokens that each query sees

    def rows(self, start: int, stop: int) -> Tensor:
        """Return the keys that queries see, bool ``[queries, seqlen_k]``."""
        window = self.window_left, self.window_right
        visible = visible_keys(self.position[start:stop], self.seqlen_k, *window)
        if self.tree is not None:
            new = torch.arange(self.seqlen_k, device=self.tree.device)
            new = new - (self.seqlen_k - len(self.tree))
            bits = self.tree[start:stop, None] >> new.clamp(0, 63) & 1
            visible = visible & ((new < 0) | bits.bool())
        return visible

    def span(self, start: int, stop: int) -> slice:
        """Return the range from the first to the last key that a query of the range sees."""
        seen = self.rows(start, stop).any(0).nonzero()
        return slice(int(seen[0]), int(seen[-1]) + 1) if len(seen) else slice(0, 0)


def _of_sequence(descale: Tensor | None, b: int) -> Tensor | None:
    """Return the scales of sequence ``b``."""
    is_own = descale is not None and descale.ndim == 2 and descale.numel() > 1
    return descale[b] if descale is not None and is_own else descale


def scaled(x: Tensor, descale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return ``x``, ``[tokens, heads, head_dim]``, in another dtype, times its scale."""
    # a copy, because the rounding of a product may depend on strides and on the alignment
    x = x.to(dtype, copy=True, memory_format=torch.contiguous_format)
    if descale is None:
        return x
    descale = descale.to(dtype).reshape(-1)
    if descale.numel() > 1:
        descale = descale.repeat_interleave(x.shape[1] // descale.numel())
    return x * descale[:, None]


def unpacked(codes: Tensor, zero_points: bool = False) -> Tensor:
    """Return int4 codes, two per byte, one by one; return other dtypes unchanged.

    ``zero_points``: the codes are 0 to 15, without a sign.
    """
    if codes.dtype != torch.uint8:
        return codes
    both = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).to(torch.int8)
    # two's complement
    return both if zero_points else (both ^ 8) - 8


def quantised(x: Tensor, largest: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the codes of rows and the scale of each row; with ``largest`` 7, two codes per byte.

    The scale is ``max(abs(x)) / largest``, rounded; codes are rounded to the nearest integer, ties
    to even. A row that is not finite has a scale that is not finite, and codes of 0.
    """
    # in fp32, as in the kernel
    wide = x.to(compute_dtype(x))
    scale = (wide.abs().amax(-1) / largest).to(scale_dtype)
    divisor = scale.to(wide.dtype)
    divisor = divisor.masked_fill(divisor == 0.0, math.inf)[..., None]
    codes = (wide / divisor).nan_to_num(0.0).round().clamp(-largest, largest).to(torch.int8)
    if largest == 7:
        pairs = (*codes.shape[:-1], codes.shape[-1] // 2, 2)
        low, high = (codes & 15).to(torch.uint8).reshape(pairs).unbind(-1)
        codes = low | high << 4
    return codes, scale


def coded(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the codes of rows and their scales as vLLM makes them, in fp32.

    By the inverse of the scale, which is at least 1e-6; integers are rounded with halves away from
    zero. uint8 is int4 from 0 to 15, two per byte, whose zero point is the low bits of the scale.
    """

    def nearest(x: Tensor) -> Tensor:
        return torch.where(x >= 0, x + 0.5, x - 0.5).trunc()

    x = x.float()
    if dtype == torch.uint8:
        least, largest = x.amin(-1), x.amax(-1)
        scale = ((largest - least) / 15.0).clamp_min(1e-6)
        zero = nearest(-least / scale).clamp(0, 15)
        codes = nearest(x * (1.0 / scale)[..., None] + zero[..., None]).clamp(0, 15)
        low, high = codes[..., ::2].to(torch.uint8), codes[..., 1::2].to(torch.uint8)
        bits = scale.view(torch.int32) & -16 | zero.to(torch.int32)
        return low | high << 4, bits.view(torch.float32)
    most = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    scale = (x.abs().amax(-1) / most).clamp_min(1e-6)
    codes = x * (1.0 / scale)[..., None]
    if dtype == torch.int8:
        codes = nearest(codes)
    return codes.clamp(-most, most).to(dtype), scale


def out_dtype_of(q: Tensor, out: Tensor | None, out_scale: Tensor | None) -> torch.dtype:
    """Return the dtype of the output."""
    if out is not None:
        return out.dtype
    if out_scale is not None:
        return torch.float8_e4m3fn
    return torch.bfloat16 if q.element_size() == 1 else q.dtype


def round_output(out: Tensor, dtype: torch.dtype, out_scale: Tensor | None) -> Tensor:
    """Return ``out`` in the output's dtype; an FP8 output is scaled and saturated first."""
    if out_scale is not None:
        out = out / out_scale
    if dtype.itemsize == 1:
        limits = torch.finfo(dtype)
        out = out.clamp(limits.min, limits.max)
    return out.to(dtype)


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which the reference computes."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _cached(cache: Tensor, table: Tensor, first: int, last: int, packed: bool) -> Tensor:
    """Return keys or values ``first`` to ``last`` of the sequence with this row of the table."""
    size = cache.shape[3] if packed else cache.shape[1]
    if first >= last:
        # no key, so read no page: it may be freed
        first = last = 0
    first_page = first // size
    pages = table[first_page : -(-last // size)]
    tokens = gather_pages(cache, pages.to(torch.int64), packed)
    return tokens[first - first_page * size : last - first_page * size]
