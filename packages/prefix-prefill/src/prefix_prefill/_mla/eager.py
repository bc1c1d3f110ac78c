"""The CPU implementation of multi-head latent attention: the reference, into given outputs."""

from __future__ import annotations

import torch

from .._paged.eager import ROWS
from .._paged.reference import scaled
from .call import MlaOptions, MlaTensors, MlaWriteTensors
from .reference import attend


def mla_attention(x: MlaTensors, options: MlaOptions) -> None:
    """Write the output, and the log-sum-exp in fp32."""
    with torch.no_grad():
        result, lse = attend(x, options, at_once=ROWS)
        x.out.copy_(result)
        if x.lse is not None:
            x.lse.copy_(lse)


def mla_cache_write(x: MlaWriteTensors) -> None:
    """Write tokens into their slots."""
    with torch.no_grad():
        cache = x.kv_cache
        page = cache.shape[1]
        kept = (x.slot_mapping >= 0) & (x.slot_mapping < cache.shape[0] * page)
        slots = x.slot_mapping[kept].to(torch.int64)
        count = x.slot_mapping.shape[0]
        values = torch.cat([x.kv_c[:count][kept], x.k_pe[:count][kept]], 1)
        if cache.element_size() == 1:
            limits = torch.finfo(cache.dtype)
            inverse = None if x.scale is None else 1.0 / x.scale.double()
            values = scaled(values[:, None], inverse, torch.float64)[:, 0]
            # rounded to fp32 first, as in the kernel
            values = values.float().clamp(limits.min, limits.max).to(cache.dtype)
            # indexing does not support FP8
            values, cache = values.view(torch.uint8), cache.view(torch.uint8)
        cache[slots // page, slots % page] = values
