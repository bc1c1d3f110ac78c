"""``python -m prefix_prefill [check]``: versions, tiles, and a check of this machine's kernels.

Without a GPU the kernels run in Triton's interpreter, in a child process, because Triton decides at
its import whether to interpret.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from attn_common import Platform
from torch import Tensor

from . import __version__, paged_attn_func, reshape_and_cache, shared_prefix_attn_func
from ._linked.host.models import MODELS
from ._linked.host.selfcheck import judge, print_versions, run_command, short_name
from ._paged.reference import paged_attention_reference
from ._paged.shipped import calls_of
from ._paged.tiles import HOPPER, long_tile, short_tile, short_tokens

PAGE = 7
# (queries, keys): a chunk, decoding, verification of drafts, a whole prompt
LENGTHS = ((19, 40), (1, 33), (3, 21), (5, 5))


def describe(platform: Platform) -> None:
    """Print versions and the tiles of every shape class on a platform."""
    print_versions(__version__)
    print(f"platform {platform}; {_kernels_of(platform)}")
    group = 4
    for dtype in (torch.bfloat16, torch.float32):
        for head_dim in (64, 128, 256):
            choice = (platform, head_dim, dtype.itemsize)
            tiles = {
                f"to {short_tokens(group)} queries": short_tile(*choice, group),
                "more": long_tile(*choice),
            }
            shown = "; ".join(
                f"{name}: {t.block_m} rows x {t.block_n} keys, {t.num_warps} warps, "
                f"{t.num_stages} stages"
                for name, t in tiles.items()
            )
            name = str(dtype).removeprefix("torch.")
            print(f"  {name}, head_dim to {head_dim}, {group} heads a group, {shown}")


def _kernels_of(platform: Platform) -> str:
    """Return a sentence about the kernels that run on a platform."""
    if not (platform.is_hopper and HOPPER):
        return "every feature runs on the portable Triton kernels"
    return (
        "sequences of more than a few fp16 or bf16 queries run on the Gluon kernels for Hopper, "
        "where an NHD cache\nholds that dtype, FP8, int8 or int4, with new keys in it or beside "
        "it; all else on the portable Triton\nkernels, whose tiles follow"
    )


class _Problem:
    """A cache with pages in random order, and the other arguments of the functions."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        packed: bool,
        page: int = PAGE,
        head_dim: int = 24,
        head_dim_v: int | None = None,
        kv_dtype: str | None = None,
    ) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.device = device
        heads_k = 2
        tokens = sum(queries for queries, _ in LENGTHS)
        counts = [-(-keys // page) for _, keys in LENGTHS]
        pages = torch.randperm(sum(counts) + 2, generator=self.generator)
        table = torch.zeros((len(LENGTHS), max(counts)), dtype=torch.int32)
        for b, count in enumerate(counts):
            table[b, :count] = pages[sum(counts[:b]) : sum(counts[: b + 1])]
        ends = [sum(queries for queries, _ in LENGTHS[:b]) for b in range(len(LENGTHS) + 1)]
        shape = (len(pages), page, heads_k)
        widths = {"k": head_dim, "v": head_dim_v or head_dim}
        k, v = (torch.zeros(*shape, n) for n in widths.values())
        if packed:
            x = 16 // dtype.itemsize
            k = k.view(*shape, -1, x).permute(0, 2, 3, 1, 4).contiguous()
            v = v.permute(0, 2, 3, 1).contiguous()
        self.k_cache, self.v_cache = k.to(device, dtype), v.to(device, dtype)
        self.scales: dict[str, Any] = {}
        if kv_dtype is not None:
            stored, size = (torch.int8, 1) if kv_dtype == "int8" else (torch.uint8, 2)
            self.k_cache, self.v_cache = (
                torch.zeros(*shape, n // size, dtype=stored, device=device) for n in widths.values()
            )
            self.scales = {"kv_dtype": kv_dtype}
            for name in ("k_scale_cache", "v_scale_cache"):
                self.scales[name] = torch.zeros(shape, dtype=torch.float16, device=device)
        # write every slot with the kernel
        slots = torch.randperm(len(pages) * page, generator=self.generator).to(device)
        new = [self.draw(len(slots), heads_k, n).to(dtype) for n in widths.values()]
        reshape_and_cache(new[0], new[1], self.k_cache, self.v_cache, slots, **self.scales)
        self.q = self.draw(tokens, 4, head_dim).to(dtype)
        self.new = {name: self.draw(tokens, heads_k, n).to(dtype) for name, n in widths.items()}
        self.rest: dict[str, Any] = {
            "block_table": table.to(device),
            "cu_seqlens_q": torch.tensor(ends, dtype=torch.int32, device=device),
            "seqlens_k": torch.tensor([k for _, k in LENGTHS], dtype=torch.int32, device=device),
            "max_seqlen_q": max(queries for queries, _ in LENGTHS),
            "max_seqlen_k": max(keys for _, keys in LENGTHS),
        }

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device)


def check(device: torch.device) -> bool:
    """Compare the kernels with the float64 reference; print a line per case."""
    good = True
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for packed in (False, True):
            p = _Problem(device, dtype, packed)
            layout = "packed" if packed else "NHD"
            cases: dict[str, dict[str, Any]] = {
                f"{layout} cache, causal": {},
                f"{layout} cache and new keys, window, sinks": {
                    **p.new,
                    "window_size": (9, 0),
                    "sinks": p.draw(4),
                },
                f"{layout} cache, softcap, ALiBi, three splits": {
                    "softcap": 5.0,
                    "alibi_slopes": p.draw(4).abs(),
                    "num_splits": 3,
                },
            }
            for name, options in cases.items():
                good &= _compare(name, p, options)
    # caches that TMA can read
    p = _Problem(device, torch.bfloat16, False, page=16, head_dim=64)
    good &= _compare("NHD cache, pages of 16 slots", p, {"sinks": p.draw(4)})
    good &= _compare("NHD cache, pages of 16 slots, new keys", p, p.new)
    for kv_dtype in ("int8", "int4"):
        p = _Problem(device, torch.bfloat16, False, head_dim=64, kv_dtype=kv_dtype)
        good &= _compare(f"{kv_dtype} cache", p, p.scales)
        good &= _compare(f"{kv_dtype} cache and new keys", p, {**p.new, **p.scales})
    for packed in (False, True):
        p = _Problem(device, torch.float32, packed, head_dim=16, head_dim_v=40)
        name = f"{'packed' if packed else 'NHD'} cache, values wider than keys, new keys, splits"
        good &= _compare(name, p, {**p.new, "num_splits": 3})
    p = _Problem(device, torch.float32, False)
    shared: dict[str, Any] = {
        "shared_pages": p.rest["block_table"][0, :2].clone(),
        "shared_len": 2 * PAGE,
    }
    out = shared_prefix_attn_func(p.q, p.k_cache, p.v_cache, **p.rest, **shared)
    table = p.rest["block_table"]
    whole = {
        **p.rest,
        "block_table": torch.cat([shared["shared_pages"].expand(len(LENGTHS), -1), table], 1),
        "seqlens_k": p.rest["seqlens_k"] + 2 * PAGE,
        "max_seqlen_k": p.rest["max_seqlen_k"] + 2 * PAGE,
    }
    return good & _judge("shared prefix, float32", out, p, whole, {})


def _compare(name: str, p: _Problem, options: dict[str, Any]) -> bool:
    out = paged_attn_func(p.q, p.k_cache, p.v_cache, **p.rest, **options)
    if not isinstance(out, Tensor):
        raise TypeError(f"out must be a torch.Tensor, got {type(out).__name__}")
    name = f"{name}, {short_name(p.q.dtype)}"
    return _judge(name, out, p, p.rest, options)


def _judge(name: str, got: Any, p: _Problem, rest: dict[str, Any], options: dict[str, Any]) -> bool:
    def reference(dtype: torch.dtype) -> Any:
        wide = {n: x.to(dtype) if n in ("k", "v") else x for n, x in options.items()}
        q = p.q.to(dtype)
        k_cache, v_cache = (x if p.scales else x.to(dtype) for x in (p.k_cache, p.v_cache))
        return paged_attention_reference(q, k_cache, v_cache, **rest, **wide)

    dtype = p.q.dtype
    return judge(name, dtype, [got], [reference(dtype)], [reference(torch.float64)])


if __name__ == "__main__":
    sys.exit(run_command(sys.argv[1:], describe, check, (calls_of, MODELS)))
