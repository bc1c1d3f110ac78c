"""Calls of ``flash_attn_with_kvcache``, and what they come to: a plain loop in any dtype."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from prefix_prefill import flash_attn_with_kvcache
from torch import Tensor

from .._linked.budget import Maker, assert_no_worse_than_eager

NAN = float("nan")


class Call(NamedTuple):
    """Sequences with as many cached keys, in rows or in pages, and new ones."""

    lengths: tuple[int, ...] = (9, 30, 0)
    queries: int = 3
    new: int = 3
    heads_q: int = 4
    heads_k: int = 2
    head_dim: int = 16
    slots: int = 48  # of a row
    page: int = 0  # slots of a page; 0: rows
    rotary: int = 0  # rotary_dim
    pads: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()  # cache_batch_idx
    head_dim_v: int | None = None

    def __str__(self) -> str:
        text = f"{'_'.join(map(str, self.lengths))}+{self.new}q{self.queries}"
        text += f"-h{self.heads_q}:{self.heads_k}-d{self.head_dim}"
        text += "" if self.head_dim_v is None else f":{self.head_dim_v}"
        text += f"-p{self.page}" if self.page else f"-s{self.slots}"
        text += f"-r{self.rotary}" if self.rotary else ""
        return text + ("-pads" if self.pads else "") + ("-rows" if self.rows else "")


def make(
    call: Call, dtype: torch.dtype, device: torch.device | str, seed: int = 0
) -> dict[str, Any]:
    """Make arguments with values of order one, and NaN in every slot that holds no key."""
    m = Maker(device, dtype, seed)
    batch, heads_k, d = len(call.lengths), call.heads_k, call.head_dim
    widths = {"k": d, "v": call.head_dim_v or d}
    given: dict[str, Any] = {"q": m.randn(batch, call.queries, call.heads_q, d)}
    count = 1 + max((batch, *[row + 1 for row in call.rows]))
    shape: tuple[int, ...] = (count, call.slots, heads_k)
    table = None
    if call.page:
        # pages in no order, and one that nobody has
        blocks = -(-call.slots // call.page)
        order = torch.randperm(batch * blocks, generator=m.generator)
        table = order.view(batch, blocks).to(device, torch.int32)
        shape = (batch * blocks + 1, call.page, heads_k)
    caches = [torch.full((*shape, n), NAN, dtype=dtype, device=device) for n in widths.values()]
    for cache in caches:
        for b, length in enumerate(call.lengths):
            pad = call.pads[b] if call.pads else 0
            positions = torch.arange(pad, length, device=device)
            cache[places(call, table, b, positions)] = m.randn(length - pad, *cache.shape[2:])
    given |= {"k_cache": caches[0], "v_cache": caches[1]}
    if call.new:
        given |= {name: m.randn(batch, call.new, heads_k, n) for name, n in widths.items()}
    if call.rotary:
        positions = call.slots + 64
        angles = torch.arange(positions)[:, None] * 10.0 ** -torch.linspace(0, 2, call.rotary // 2)
        given |= {
            "rotary_cos": angles.cos().to(device, dtype),
            "rotary_sin": angles.sin().to(device, dtype),
        }

    def ints(values: tuple[int, ...]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    given["cache_seqlens"] = ints(call.lengths)
    if table is not None:
        given["block_table"] = table
    if call.pads:
        given["cache_leftpad"] = ints(call.pads)
    if call.rows:
        given["cache_batch_idx"] = ints(call.rows)
    return given


def places(call: Call, table: Tensor | None, b: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return in which rows or pages keys lie, and where there."""
    if table is not None:
        return table[b].long()[positions // call.page], positions % call.page
    return torch.full_like(positions, call.rows[b] if call.rows else b), positions


def turned(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Rotate ``[tokens, heads, head_dim]``, pair by pair."""
    out = x.clone()
    half = cos.shape[1]
    for j in range(half):
        at = (2 * j, 2 * j + 1) if interleaved else (j, j + half)
        a, b = x[..., at[0]], x[..., at[1]]
        c, s = cos[positions, j][:, None], sin[positions, j][:, None]
        out[..., at[0]], out[..., at[1]] = a * c - b * s, a * s + b * c
    return out


def by_hand(
    call: Call, given: dict[str, Any], options: dict[str, Any], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Compute the call sequence by sequence; return the output, LSE and caches.

    Rotated keys and queries are rounded to the dtype of the inputs, as the cache holds them, unless
    it is computed in float64.
    """
    rounded = given["q"].dtype if dtype != torch.float64 else dtype
    t = {
        n: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
        for n, x in given.items()
    }
    left, right = options.get("window_size", (-1, -1))
    right = 0 if options.get("causal", False) else right
    softcap, slopes = options.get("softcap", 0.0), options.get("alibi_slopes")
    k_cache, v_cache = t["k_cache"].clone(), t["v_cache"].clone()
    batch, queries, heads_q, _ = t["q"].shape
    out = t["q"].new_zeros((batch, queries, heads_q, v_cache.shape[-1]))
    lse = t["q"].new_full((batch, heads_q, queries), -math.inf)
    group = heads_q // call.heads_k
    table, device = given.get("block_table"), t["q"].device
    for b, length in enumerate(call.lengths):
        q = t["q"][b]
        step = torch.arange(queries, device=device)
        if call.new:
            positions = length + torch.arange(call.new, device=device)
            key = t["k"][b]
            if call.rotary:
                how = t["rotary_cos"], t["rotary_sin"]
                style = options.get("rotary_interleaved", True)
                key = turned(key, *how, positions, style).to(rounded).to(dtype)
                where = length + (step if left >= 0 or right >= 0 else 0 * step)
                q = turned(q, *how, where, style).to(rounded).to(dtype)
            k_cache[places(call, table, b, positions)] = key
            v_cache[places(call, table, b, positions)] = t["v"][b]
        pad = call.pads[b] if call.pads else 0
        where = torch.arange(pad, length + call.new, device=device)
        key = torch.arange(len(where), device=device)
        at = (step + len(where) - queries)[:, None]
        hidden = torch.zeros(queries, len(where), dtype=torch.bool, device=device)
        if left >= 0:
            hidden |= key < at - left
        if right >= 0:
            hidden |= key > at + right
        keys = k_cache[places(call, table, b, where)].repeat_interleave(group, 1)
        values = v_cache[places(call, table, b, where)].repeat_interleave(group, 1)
        scores = torch.einsum("ihd,jhd->hij", q, keys)
        scores = scores * options.get("softmax_scale", call.head_dim**-0.5)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if slopes is not None:
            slope = (slopes if slopes.ndim == 1 else slopes[b]).to(dtype)
            scores = scores - slope[:, None, None] * (at - key).abs()
        scores = scores.masked_fill(hidden, -math.inf)
        lse[b] = scores.logsumexp(-1)
        # a row that sees no key is 0
        weights = torch.exp(scores - lse[b].nan_to_num(neginf=0.0)[..., None])
        out[b] = torch.einsum("hij,jhd->ihd", weights, values)
    return {"out": out, "lse": lse, "k_cache": k_cache, "v_cache": v_cache}


def check(
    call: Call, dtype: torch.dtype, device: torch.device | str, seed: int = 0, **options: Any
) -> dict[str, Tensor]:
    """Hold a call to the loop in float64, within what it misses in fp32."""
    given = make(call, dtype, device, seed)
    want = by_hand(call, given, options, torch.float64)
    eager = by_hand(call, given, options, torch.float32)
    eager["out"] = eager["out"].to(dtype)
    out, lse = flash_attn_with_kvcache(**given, **options, return_softmax_lse=True)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    got = {"out": out, "lse": lse, "k_cache": given["k_cache"], "v_cache": given["v_cache"]}
    for name in ("out", "lse"):
        eps = torch.finfo(dtype).eps if call.rotary else None
        assert_no_worse_than_eager(name, got[name], eager[name], want[name], eps=eps)
    for name in ("k_cache", "v_cache"):
        is_key = ~want[name].isnan()
        assert torch.equal(got[name].isnan(), ~is_key), f"{name}: another slot is written"
        assert_no_worse_than_eager(
            name, got[name][is_key], eager[name].to(dtype)[is_key], want[name][is_key]
        )
    return got
