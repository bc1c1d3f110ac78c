"""Launcher of writes into a cache: what calls with one signature share on the host."""

from __future__ import annotations

from typing import Any

from attn_common import cdiv, detect, fp8_info

from ..._linked.host.forms import Memory
from ..._linked.host.operators import structured
from ..._linked.launch.entries import flat
from ..._linked.launch.kernels import Kernel
from ..._linked.launch.runtime import MAX_COUNTS, Launch, aligned, is_aligned, row_bytes
from ..._paged.call import WriteCall, WriteTensors
from ..layout import INT_MAX
from .addressing import CacheForm, one_form, row_strides, strides_of
from .arguments import Numbers, Options, SlotStrides

reshape_and_cache_kernel = Kernel(__package__, ".write", "reshape_and_cache_kernel")

# tokens of one head that a program writes
BLOCK_T = 16


def launch_reshape_and_cache(*arguments: Any) -> None:
    """Run the operator that writes into a cache on checked inputs; see ``ops.py``."""
    x, per_token_head = structured(WriteCall, arguments)
    tokens = x.slot_mapping.shape[0]
    x = x._replace(k=aligned(x.k[:tokens]), v=aligned(x.v[:tokens]))
    WritePlan(x, per_token_head).run(x)


def write_plan_of(x: WriteTensors, per_token_head: bool) -> WritePlan | None:
    """Return a launcher for writes like ``x``, or None if tensors have to be copied first."""
    fits = is_aligned(x.k) and is_aligned(x.v)
    return WritePlan(x, per_token_head) if fits else None


class WritePlan:
    """Launcher of the writes with one signature; it depends on no data and on no token count."""

    def __init__(self, x: WriteTensors, per_token_head: bool) -> None:
        """Prepare writes like ``x``, whose ``k`` and ``v`` are aligned (see ``aligned``)."""
        self._heads_k = x.k.shape[1]
        cache = CacheForm(x.k_cache, x.v_cache)
        is_fp8 = x.k_cache.dtype.is_floating_point and x.k_cache.element_size() == 1
        scales = x.k_scale, x.v_scale
        self._per_head = any(s is not None and s.numel() != 1 for s in scales)
        platform = detect(x.k.device)
        overlap = platform.is_hopper or platform.is_blackwell
        self._form = Numbers(
            tokens=0,
            slots=x.k_cache.shape[0] * cache.page,
            slot_mapping=x.slot_mapping.stride(0),
            k=row_strides(x.k),
            v=row_strides(x.v),
            k_cache=cache.k,
            v_cache=cache.v,
            k_scales=strides_of(SlotStrides, x.k_scale_cache),
            v_scales=strides_of(SlotStrides, x.v_scale_cache),
        )
        # by token count
        self._numbers: Memory[tuple[int, ...]] = Memory(MAX_COUNTS)
        key, value = cache.vectors(x.k, x.v)
        asked = Options(
            KEY=key,
            VALUE=value,
            HEADS=self._heads_k,
            ROW_BYTES=min(row_bytes(x.k), row_bytes(x.v)),
            INT_MAX=INT_MAX.get(x.k_cache.dtype, 0),
            BLOCK_T=BLOCK_T,
            PAGE=cache.page,
            SCALE_PER_HEAD=self._per_head,
            FP8_MAX=fp8_info(x.k_cache.dtype).max if is_fp8 else 0.0,
            OVERLAP=overlap,
            PER_TOKEN_HEAD=per_token_head,
        )
        constants = {"OPTIONS": asked, "num_warps": 4, "num_stages": 1}
        if overlap:
            constants["launch_pdl"] = True
        self._write = Launch(reshape_and_cache_kernel, constants)

    def run(self, x: WriteTensors) -> None:
        """Launch one write."""
        tokens = x.slot_mapping.shape[0]
        if x.k_scale is not None or x.v_scale is not None:
            shape = (self._heads_k,) if self._per_head else ()
            k_scale, v_scale = one_form(shape, x.k_scale, x.v_scale)
            x = x._replace(k_scale=k_scale, v_scale=v_scale)
        numbers = self._numbers.get(tokens) or self._count(tokens)
        # WriteTensors has the fields of Tensors
        self._write(2 * cdiv(tokens, BLOCK_T) * self._heads_k, x, numbers)

    def _count(self, tokens: int) -> tuple[int, ...]:
        return self._numbers.keep(tokens, flat(self._form._replace(tokens=tokens)))
