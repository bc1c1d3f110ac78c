"""What this package builds ahead of time: configurations, and the launchers on meta tensors."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch

from .._numerics import only_portable


@dataclass(frozen=True)
class Config:
    """What a build depends on; sizes of tensors are those of a typical call."""

    head_dim: int
    dtype: str = "bfloat16"
    cache: str = ""  # dtype of the cache, if another
    page: int = 16
    packed: bool = False  # layout of the cache
    dense: bool = False  # new keys and values beside the cache
    group: int = 4
    rich: bool = False  # every feature at once
    tree: bool = False
    splits: int = 1
    invariant: bool = False
    dropin: bool = False  # one query has its key in the cache, and padding is not written
    head_dim_v: int = 0  # 0: that of keys
    of_vllm: bool = False  # the format of a cache with a scale of each token

    def __str__(self) -> str:
        kind = f"d{self.head_dim}-" + (f"v{self.head_dim_v}-" if self.head_dim_v else "")
        kind += f"{self.dtype}-{self.cache or 'same'}-p{self.page}-g{self.group}"
        flags = ("packed", "dense", "rich", "tree", "invariant", "dropin", "of_vllm")
        kind += "".join(f"-{flag}" for flag in flags if getattr(self, flag))
        return kind + ("-split" if self.splits > 1 else "")

    @property
    def widths(self) -> tuple[int, int]:
        """The head dimensions of keys and of values."""
        return self.head_dim, self.head_dim_v or self.head_dim


def meta(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype, device="meta")


def caches(config: Config, heads_k: int = 8, blocks: int = 100) -> list[torch.Tensor]:
    if config.of_vllm:  # scales lie between keys and values, so rows begin at multiples of 8 bytes
        whole = meta(blocks, heads_k, config.page, sum(config.widths) + 8, dtype=torch.uint8)
        whole, of_byte = whole.transpose(1, 2), 2 if config.cache == "uint8" else 1
        d, dv = (n // of_byte for n in config.widths)
        parts = whole[..., :d], whole[..., d + 4 : d + dv + 4]
        return [x.view(getattr(torch, config.cache)) for x in parts]
    dtype = getattr(torch, config.cache or config.dtype)
    (d, dv), page = config.widths, config.page
    if dtype == torch.uint8:  # two numbers of 4 bits a byte
        d, dv = d // 2, dv // 2
    if not config.packed:
        return [meta(blocks, page, heads_k, n, dtype=dtype) for n in (d, dv)]
    x = 16 // dtype.itemsize
    return [
        meta(blocks, heads_k, d // x, page, x, dtype=dtype),
        meta(blocks, heads_k, dv, page, dtype=dtype),
    ]


def scale_caches(config: Config, heads_k: int = 8, blocks: int = 100) -> list[Any]:
    """Return scales of each token, where the cache holds integers."""
    if config.cache not in ("int8", "uint8") and not config.of_vllm:
        return [None, None]
    dtype = torch.float32 if config.of_vllm else torch.float16
    return [meta(blocks, config.page, heads_k, dtype=dtype) for _ in range(2)]


def launch_attention(
    config: Config, tokens: int = 2048, batch: int = 4, max_q: int = 512, hopper: bool = False
) -> None:
    """Run the launcher of attention on meta tensors; ``max_q`` of 1 leaves the long tile out.

    ``hopper``: with the kernel for Hopper, where that serves the call.
    """
    from prefix_prefill._paged.launch import launch_attention as launch

    heads_k = 8
    heads_q = heads_k * config.group
    dtype = getattr(torch, config.dtype)
    fp8 = dtype.itemsize == 1
    d, dv = config.widths
    wide = torch.bfloat16 if fp8 else dtype
    new: list[Any] = [None, None]
    if config.dense:
        new = [meta(tokens, heads_k, n, dtype=wide) for n in (d, dv)]
    q = meta(tokens, heads_q, d, dtype=dtype)
    out = meta(tokens, heads_q, dv, dtype=wide)
    int32 = torch.int32
    scales: list[Any] = [None] * 3
    by_token = scale_caches(config, heads_k)
    if (config.cache or fp8) and by_token[0] is None:
        # of each head, or of each sequence too
        of_queries, of_keys = (
            (meta(heads_k), meta(heads_k)) if fp8 else (None, meta(batch, heads_k))
        )
        scales = [of_queries, of_keys, meta(heads_k)]
    rich = config.rich
    with contextlib.nullcontext() if hopper else only_portable():
        launch(
            q,
            *caches(config, heads_k),
            *new,
            meta(batch, 64, dtype=int32),
            meta(batch + 1, dtype=int32),
            meta(batch, dtype=int32),
            meta(batch, heads_q) if rich and not config.invariant else None,
            meta(heads_q) if rich else None,
            *scales,
            *by_token,
            None,
            None,
            meta(tokens, dtype=torch.int64) if config.tree else None,
            out,
            meta(heads_q, tokens) if rich else None,
            max_q,
            8192,
            d**-0.5,
            500 if rich else -1,
            -1 if config.tree else 0,
            30.0 if rich else 0.0,
            config.splits,
            False,
            False,
            config.dropin,
            not config.dropin,
            False,
            config.invariant,
            False,
            config.of_vllm and config.cache == "uint8",
        )


def launch_decode(config: Config, batch: int = 64) -> None:
    """Run it on sequences of one query each."""
    launch_attention(config, batch, batch, 1)


def launch_cache(config: Config, tokens: int = 1024) -> None:
    """Run the launcher that writes into a cache on meta tensors."""
    from prefix_prefill._cache.kernels.launch import launch_reshape_and_cache as launch

    new = [meta(tokens, 8, n, dtype=getattr(torch, config.dtype)) for n in config.widths]
    by_token = scale_caches(config)
    scales = [meta(1), meta(1)] if config.cache and by_token[0] is None else [None, None]
    launch(
        *new, *caches(config), meta(tokens, dtype=torch.int64), *scales, *by_token, config.of_vllm
    )


def launch_merge(config: Config, tokens: int = 1024) -> None:
    """Run the launcher that merges two results on meta tensors."""
    from prefix_prefill._paged.launch import launch_merge as launch

    parts = [meta(tokens, 32, config.head_dim) for _ in range(2)]
    lses = [meta(32, tokens) for _ in range(2)]
    out = meta(tokens, 32, config.head_dim, dtype=getattr(torch, config.dtype))
    launch(parts[0], lses[0], parts[1], lses[1], None, out, lses[0])


def launch_append(config: Config, batch: int = 16, new: int = 4) -> None:
    """Run the launcher that appends to a cache, with rotary embeddings; ``packed``: by halves."""
    from prefix_prefill._kvcache.kernels.launch import launch_append as launch

    dtype, d = getattr(torch, config.dtype), config.head_dim
    q = meta(batch * new, 8 * config.group, d, dtype=dtype)
    k, v = (meta(batch * new, 8, n, dtype=dtype) for n in config.widths)
    cos, sin = (meta(8192, d // 2, dtype=dtype) for _ in "cs")
    rotated = torch.empty_like(q)
    lengths, table = meta(batch, dtype=torch.int32), meta(batch, 64, dtype=torch.int32)
    cache = caches(Config(d, config.dtype, config.cache, head_dim_v=config.head_dim_v))
    scales = scale_caches(config)
    tail = cos, sin, rotated, *scales, not config.packed, True
    launch(q, k, v, *cache, lengths, None, table, *tail)


def launch_rows(config: Config, batch: int = 16, queries: int = 1) -> None:
    """Run the launcher that attends to a cache of rows, as many as there are sequences."""
    from prefix_prefill._kvcache.kernels.launch import launch_attend as launch

    dtype, d = getattr(torch, config.dtype), config.head_dim
    q = meta(batch * queries, 8 * config.group, d, dtype=dtype)
    k_cache, v_cache = (meta(batch, 5000, 8, n, dtype=dtype) for n in config.widths)
    lengths = meta(batch, dtype=torch.int32)
    with only_portable():
        launch(
            q,
            k_cache,
            v_cache,
            lengths,
            None,
            lengths,
            None,
            None,
            None,
            None,
            meta(*q.shape[:2], config.widths[1], dtype=dtype),
            None,
            0,
            d**-0.5,
            -1,
            0,
            0.0,
            config.splits,
        )


def launch_mla(
    config: Config, tokens: int = 64, batch: int = 64, max_q: int = 1, hopper: bool = False
) -> None:
    """Run the launcher of multi-head latent attention on meta tensors; ``group`` heads."""
    from prefix_prefill._mla.call import MlaOptions, MlaTensors
    from prefix_prefill._mla.launch import launch_mla as launch

    dtype, int32 = getattr(torch, config.dtype), torch.int32
    q = meta(tokens, config.group, config.head_dim, dtype=dtype)
    cache = meta(
        100, config.page, config.head_dim, dtype=getattr(torch, config.cache or config.dtype)
    )
    small = [meta(batch, 64, dtype=int32), meta(batch + 1, dtype=int32), meta(batch, dtype=int32)]
    out = meta(tokens, config.group, config.head_dim - 64, dtype=dtype)
    lse, descale = meta(config.group, tokens), meta(1) if config.cache else None
    x = MlaTensors(q, cache, *small, None, descale, out, lse)
    with contextlib.nullcontext() if hopper else only_portable():
        launch(x, max_q, 8192, MlaOptions(0.1, True, config.splits))


def launch_mla_write(config: Config, tokens: int = 1024) -> None:
    """Run the launcher that writes into a cache of latent vectors on meta tensors."""
    from prefix_prefill._mla.call import MlaWriteTensors
    from prefix_prefill._mla.launch import launch_mla_write as launch

    dtype = getattr(torch, config.dtype)
    new = [meta(tokens, d, dtype=dtype) for d in (config.head_dim - 64, 64)]
    cache = meta(
        100, config.page, config.head_dim, dtype=getattr(torch, config.cache or config.dtype)
    )
    scale = meta(1) if config.cache else None
    launch(MlaWriteTensors(*new, cache, meta(tokens, dtype=torch.int64), scale))
