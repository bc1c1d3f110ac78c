"""Attention as vllm-neuron calls it: separate caches, -1 for unused blocks, tensors of the device.

A step has two halves. ``prepare`` runs once on the host, from the scheduler's lengths and block
tables, and puts a small table on the device. ``paged_attention`` runs in each layer, on device
tensors only: it writes the new tokens into the caches and attends to them there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from .._paged import devices
from .._paged.call import Batch, Options
from .._paged.checks import (
    FP8,
    check_apart,
    check_block_size,
    check_count,
    check_flag,
    check_head_dim,
    check_heads,
    check_lengths,
    check_number,
    check_packing,
    check_scales,
    check_sinks,
    check_table,
    check_target,
    check_window,
    check_writes,
    largest_of,
)
from .._paged.forms import Buckets, check_buckets
from ..sim.arrays import check_no_gradient, to_array

DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
CACHE_DTYPES = (*DTYPES, *(getattr(torch, name) for name in FP8 if hasattr(torch, name)))


@dataclass(frozen=True)
class Step:
    """A step's batch, prepared for all layers of one kind.

    Attributes:
        batch: lengths and block numbers, on the host.
        heads, head_dim: of the queries.
        blocks: shape of each cache, ``[blocks, kv_heads, block_size, head_dim]``.
        dtype: of the queries and the new tokens.
        prepared: the form and its table; None on the CPU, where PyTorch computes.
    """

    batch: Batch
    options: Options
    heads: int
    head_dim: int
    blocks: tuple[int, int, int, int]
    dtype: torch.dtype
    prepared: devices.Prepared | None

    @property
    def keys(self) -> tuple[int, ...]:
        """Shape of the key cache."""
        if not self.options.is_packed:
            return self.blocks
        blocks, kv_heads, block_size, head_dim = self.blocks
        return blocks, kv_heads, block_size // 2, head_dim, 2

    def check(
        self,
        query: torch.Tensor,
        new: dict[str, torch.Tensor],
        caches: dict[str, torch.Tensor],
        slot_mapping: torch.Tensor,
    ) -> None:
        """Check a layer's tensors against the step; on a device only shapes and dtypes."""
        tokens, kv_heads = self.batch.tokens, self.blocks[1]
        shapes: dict[str, tuple[torch.Tensor, tuple[int, ...]]] = {
            "query": (query, (tokens, self.heads, self.head_dim)),
            **{name: (x, (tokens, kv_heads, self.head_dim)) for name, x in new.items()},
            "k_cache": (caches["k_cache"], self.keys),
            "v_cache": (caches["v_cache"], self.blocks),
            "slot_mapping": (slot_mapping, (tokens,)),
        }
        for name, (x, shape) in shapes.items():
            if not isinstance(x, torch.Tensor):
                raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
            if tuple(x.shape) != shape:
                raise ValueError(f"{name} must be {[*shape]} in this step, got {[*x.shape]}")
            if x.device != query.device:
                raise ValueError(f"{name} must be on {query.device}, got {x.device}")
        for name, x in {"query": query, **new}.items():
            if x.dtype != self.dtype:
                raise TypeError(f"{name} must be {self.dtype} in this step, got {x.dtype}")
        for name, x in caches.items():
            check_no_gradient(name, x)
        first = next(iter(caches.values())).dtype
        for name, x in caches.items():
            if x.dtype not in CACHE_DTYPES or x.dtype != first:
                names = ", ".join(str(dtype) for dtype in CACHE_DTYPES)
                raise TypeError(f"{name} must be one of {names}, the same in both, got {x.dtype}")
        if self.options.is_packed and first.itemsize > 1:
            raise TypeError(f"k_cache must be in FP8 for packed_keys, got {first}")
        if slot_mapping.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"slot_mapping must be int32 or int64, got {slot_mapping.dtype}")
        room = self.blocks[0] * self.blocks[2]
        if slot_mapping.device.type == "cpu" and (slot_mapping >= room).any():
            raise ValueError(f"slot_mapping must be below {room}, got {int(slot_mapping.max())}")
        if slot_mapping.device.type == "cpu":
            slots = [slot for slot in slot_mapping.tolist() if slot >= 0]
            if len(set(slots)) < len(slots):
                several = next(slot for slot in slots if slots.count(slot) > 1)
                raise ValueError(
                    f"slot_mapping must give each token its own slot, got {several} for several"
                )


def prepare(
    query_lens: Any,
    seq_lens: Any,
    block_tables: Any,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    num_blocks: int,
    tokens: int,
    dtype: torch.dtype,
    device: torch.device | str,
    scale: float | None = None,
    window: int | None = None,
    sinks: Any = None,
    softcap: float | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    buckets: Buckets | None = None,
    packed_keys: bool = False,
    fused_write: bool = False,
    target: str | None = None,
    return_lse: bool = False,
) -> Step:
    """Plan a step on the host; only its table crosses to the device.

    Args:
        query_lens: new tokens of each sequence, ``[batch]``, on the host.
        seq_lens: all tokens of each sequence, new ones included, ``[batch]``, on the host.
        block_tables: ``[batch, max_blocks]`` on the host, -1 for unused blocks.
        heads, kv_heads, head_dim: of this rank's share of the model.
        block_size, num_blocks: of the caches.
        tokens: rows of the packed queries, padding included; results of padding are 0.
        dtype: of the queries.
        device: of the queries.
        scale, window, sinks, softcap, buckets: as in ``nki_paged_attn``.
        k_scale, v_scale: factors of cached keys and values, a number or ``[kv_heads]``: new tokens
            are divided by them when they are written, and cached ones multiplied when they are
            read. A model of vllm-neuron multiplies by its ``k_scale`` when it writes: give the
            reciprocal of that here.
        packed_keys: whether the key cache is ``[blocks, kv_heads, block_size // 2, head_dim, 2]``,
            in FP8.
        fused_write: whether the kernel writes new tokens, into the slots that follow from lengths
            and tables. It then reads new tokens unrounded, not from the cache, and no sequence may
            have in its context a token that another one writes in the same step.
        target: the generation for which FP8 is written, as in ``nki_paged_attn``.
        return_lse: whether the step's calls also return the LSE.

    Raises:
        TypeError: an argument of a wrong type.
        ValueError: a size, length or block number out of range, or a tensor that is not on the
            host.
        NotImplementedError: ``fused_write`` with ``packed_keys``.
    """
    check_heads(heads, kv_heads)
    check_head_dim(head_dim)
    check_block_size(block_size)
    check_count("num_blocks", num_blocks)
    check_flag("fused_write", fused_write)
    if dtype not in DTYPES:
        raise TypeError(f"dtype must be one of {', '.join(DTYPES.values())}, got {dtype}")
    queries, keys = check_lengths(query_lens, seq_lens, tokens, "seq_lens")
    if (keys < queries).any():
        row = int(np.flatnonzero(keys < queries)[0])
        raise ValueError(
            f"seq_lens[{row}] must count the {queries[row]} new tokens, got {keys[row]}"
        )
    table = check_table(block_tables, keys, block_size, num_blocks, "block_tables")
    if fused_write and packed_keys:
        raise NotImplementedError("fused_write writes whole tokens, got packed_keys")
    contexts = keys - queries
    if fused_write:
        check_writes(queries, contexts, table, block_size, "block_tables")
    batch = Batch(queries, contexts, table, tokens, check_window(window), is_cached=True)
    options = Options(
        scale=head_dim**-0.5 if scale is None else check_number("scale", scale),
        softcap=0.0 if softcap is None else check_number("softcap", softcap, positive=True),
        sinks=check_sinks(sinks, heads),
        k_scales=check_scales("k_scale", k_scale, kv_heads),
        v_scales=check_scales("v_scale", v_scale, kv_heads),
        has_lse=check_flag("return_lse", return_lse),
        dtype=DTYPES[dtype],
        is_packed=check_packing(packed_keys, FP8[0], block_size),
        target=check_target(target),
    )
    where, sizes = torch.device(device), check_buckets(buckets)
    # also on the CPU, so that a call that runs there runs on a device
    sizes.find(len(queries), tokens, int((contexts if fused_write else keys).max(initial=0)))
    prepared = None
    if where.type in devices.TORCH_DEVICES:
        neuron = devices.TorchDevice(where)
        page = block_size, head_dim
        own = replace(batch, is_cached=not fused_write, writes=fused_write)
        packed = own.pack(block_size)
        prepared = devices.prepare(neuron, packed, options, sizes, heads, page)
    elif where.type != "cpu":
        raise ValueError(f"device must be Neuron's or the CPU, got {where}")
    blocks = (num_blocks, kv_heads, block_size, head_dim)
    return Step(batch, options, heads, head_dim, blocks, dtype, prepared)


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    step: Step,
) -> Any:
    """Write new tokens into the caches, and attend to the cached tokens of a step's sequences.

    Args:
        query: ``[tokens, heads, head_dim]``.
        key, value: of the new tokens, ``[tokens, kv_heads, head_dim]``.
        k_cache, v_cache: ``[blocks, kv_heads, block_size, head_dim]``, changed in place; ``step``
            has whether keys are packed.
        slot_mapping: ``block * block_size + offset`` of each new token, -1 for padding,
            ``[tokens]``.
        step: the result of ``prepare``.

    Returns:
        out like query, or ``(out, lse)`` if ``prepare`` was told ``return_lse=True``: natural
        logarithms of the denominators, fp32 ``[heads, tokens]``; of padding the head's sink, or
        -inf. Every tensor stays on its device.

    Raises:
        TypeError: a dtype other than the step's, or no tensor.
        ValueError: a shape or device other than the step's; on the CPU also a slot past the end
            or of two tokens, or a cache that shares memory.
    """
    if not isinstance(step, Step):
        raise TypeError(f"step must be what prepare returns, got {type(step).__name__}")
    new = {"key": key, "value": value}
    step.check(query, new, {"k_cache": k_cache, "v_cache": v_cache}, slot_mapping)
    if query.device.type == "cpu":
        given = {"query": query, **new, "k_cache": k_cache, "v_cache": v_cache}
        arrays = {name: to_array(name, x) for name, x in given.items()}
        for name in ("k_cache", "v_cache"):
            check_apart(name, arrays.pop(name), **arrays)
    prepared = step.prepared
    device = devices.TorchDevice(query.device)
    if prepared is None or not prepared.form.writes:
        options = step.options
        write_cache(key, k_cache, slot_mapping, options.k_scales, options.target)
        write_cache(value, v_cache, slot_mapping, options.v_scales, options.target)
    if prepared is None:
        out, lse = torch_attention(query, k_cache, v_cache, step)
        return (out, lse) if step.options.has_lse else out
    if prepared.form.writes:
        new_k, new_v = (device.by_head(x, prepared.order) for x in (key, value))
    else:
        shape = (k_cache.shape[1], prepared.form.places, k_cache.shape[3])
        new_k = new_v = device.zeros(shape, query)
    out, lse = devices.launch_prepared(device, query, (new_k, new_v), (k_cache, v_cache), prepared)
    return out if lse is None else (out, lse)


def write_cache(
    x: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: tuple[float, ...] = (1.0,),
    target: str | None = None,
) -> None:
    """Write tokens into their slots; negative slots are skipped, without waiting for the device.

    Tokens are divided by the cache's scales, and in FP8 limited to the target's largest number. A
    token without a slot repeats the write of a token with one, so that nothing waits for the host.
    """
    if not len(x):
        return
    valid = slot_mapping >= 0
    some = valid.any()
    order = torch.where(valid, torch.arange(len(x), device=x.device), valid.int().argmax())
    slots = slot_mapping[order].clamp_min(0).long()
    block, offset = slots // cache.shape[2], slots % cache.shape[2]
    new = x[order]
    if any(s != 1.0 for s in scales):
        # the host's numbers one by one: a tensor would have to cross to the device
        heads = [new[:, n].float() / s for n, s in enumerate(scales)]
        new = torch.stack(heads, dim=1)
    if cache.dtype.itemsize == 1:
        most = largest_of(str(cache.dtype).removeprefix("torch."), check_target(target))
        new = new.float().clamp(-most, most)
    # indexed as bits, because some dtypes have no indexing kernels
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[cache.dtype.itemsize]
    stored = cache.view(bits)
    rows = new.to(cache.dtype).view(bits)
    place: tuple[Any, ...]
    if cache.ndim == 5:
        # two tokens interleaved
        block, offset = slots // (2 * cache.shape[2]), slots % (2 * cache.shape[2])
        place = block, slice(None), offset // 2, slice(None), offset % 2
    else:
        place = block, slice(None), offset
    stored[place] = torch.where(some, rows, stored[place])


def torch_attention(
    query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, step: Step
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a step in PyTorch, in fp32, without a device: out, and the LSE."""
    batch, options = step.batch, step.options
    if options.is_packed:
        k_cache = k_cache.transpose(3, 4).flatten(2, 3)
    group = step.heads // k_cache.shape[1]
    out = torch.zeros_like(query)
    none = np.full(step.heads, -np.inf, np.float32) if options.sinks is None else options.sinks
    lse = torch.as_tensor(none)[:, None].repeat(1, len(query)).float()
    k_scale, v_scale = (
        torch.tensor(s)[:, None, None] for s in (options.k_scales, options.v_scales)
    )
    first = 0
    for row, (count, context) in enumerate(
        zip(batch.query_lens.tolist(), batch.context_lens.tolist(), strict=True)
    ):
        keys = context + count
        blocks = torch.as_tensor(batch.table[row, : -(-keys // k_cache.shape[2])])
        # [kv_heads, keys, head_dim]
        k, v = (
            x[blocks].float().transpose(0, 1).flatten(1, 2)[:, :keys] * scale
            for x, scale in ((k_cache, k_scale), (v_cache, v_scale))
        )
        q = query[first : first + count].float().transpose(0, 1)
        scores = options.scale * (q @ k.repeat_interleave(group, 0).transpose(1, 2))
        if options.softcap:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        place = torch.arange(context, keys)[:, None]
        j = torch.arange(keys)
        seen = (j <= place) & (j > place - (batch.window or keys))
        scores = scores.masked_fill(~seen, float("-inf"))
        if options.sinks is not None:
            sink = torch.as_tensor(options.sinks)[:, None, None].expand(-1, count, 1)
            scores = torch.cat([scores, sink], dim=-1)
        lse[:, first : first + count] = scores.logsumexp(dim=-1)
        weights = scores.softmax(dim=-1)[..., :keys]
        clean = v.masked_fill(~seen.any(0)[:, None], 0.0)
        result = weights @ clean.repeat_interleave(group, 0)
        out[first : first + count] = result.transpose(0, 1).to(query.dtype)
        first += count
    return out, lse
