"""Helpers of quantised tests that other tests use too."""

from __future__ import annotations

import torch
from prefix_prefill._paged.reference import quantised

LARGEST = {"int8": 127, "int4": 7}


def quantise(case, kind, scale_dtype=torch.float16):
    """Return a case with its cache in codes. Slots that hold no key have a scale that is NaN."""
    inputs, stored = dict(case.inputs), {"kv_dtype": kind}
    for x in "kv":
        cache = inputs.pop(f"{x}_cache")
        codes, scales = quantised(cache.float(), LARGEST[kind], scale_dtype)
        stored[f"{x}_cache"] = codes
        # beside the queries, so that the reference takes them in its dtype, and moves them
        inputs[f"{x}_scale_cache"] = scales
    return type(case)(inputs, {**case.options, **stored})
