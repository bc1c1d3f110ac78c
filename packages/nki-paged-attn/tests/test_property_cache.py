"""Caches in other dtypes and forms, drawn together: scales, packed keys, writes by the kernel.

Four examples by default, the same each time; ``NKI_PAGED_ATTN_EXAMPLES=300`` for a long run.
"""

from __future__ import annotations

import os
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from nki_paged_attn import Buckets
from nki_paged_attn.cache import pack_keys

from ._cases import BF16, F16, F32
from ._writes import expected_cache, make

E4M3, E4M3FN, E5M2 = (
    np.dtype(x) for x in (ml_dtypes.float8_e4m3, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
)
EXAMPLES = int(os.environ.get("NKI_PAGED_ATTN_EXAMPLES", "4"))

bounded = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
QUERIES = st.one_of(st.sampled_from([0, 1, 1, 2]), st.integers(0, 150))
CONTEXTS = st.one_of(st.sampled_from([0, 1, 128, 1030]), st.integers(0, 1300))


@st.composite
def batches(draw):
    """Return a batch with blocks for its new tokens, and the slots of those."""
    count = draw(st.integers(1, 3))
    heads, kv_heads = draw(st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1), (8, 1)]))
    options = {}
    if draw(st.booleans()):
        options["window"] = draw(st.integers(1, 400))
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([0.5, 3.0]))
    if draw(st.booleans()):
        options["sinks"] = np.linspace(-2, 2, heads).astype(np.float32)
    if draw(st.booleans()):
        for name in ("k_scale", "v_scale"):
            options[name] = 2.0 ** draw(st.integers(-3, 3))
    dtype = draw(st.sampled_from([F32, BF16, F16]))
    # what products are of holds these exactly
    stored = [None, E4M3, E4M3FN, E5M2] + ([BF16, F16] if dtype == F32 else [])
    return make(
        [draw(QUERIES) for _ in range(count)],
        [draw(CONTEXTS) for _ in range(count)],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([1, 8, 40, 128, 192])),
        block_size=2 * draw(st.integers(1, 35)),
        dtype=dtype,
        cache_dtype=draw(st.sampled_from(stored)),
        seed=draw(st.integers(0, 2**16)),
        **options,
    )


@bounded
@given(
    batch=batches(),
    target=st.sampled_from(["trn2", "trn3"]),
    programs=st.sampled_from(["1", "2"]),
    factor=st.sampled_from([0, 1, 3]),
    turns=st.sampled_from(["tensor", "dma"]),
)
def test_every_way_to_keep_a_cache_gives_the_same(batch, target, programs, factor, turns):
    case, slots = batch
    sizes = len(case.query_lens), max(1, len(case.q)), max(1, *case.context_lens)
    buckets = Buckets(*(factor * n for n in sizes)) if factor else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", target)
        patch.setenv("NEURON_LOGICAL_NC_CONFIG", programs)
        expected = case.check()
        how = {"buckets": buckets}
        if case.q.dtype != F32:
            how["transposes"] = turns
        cache = case.kv_cache.copy()
        ways = {"as it is": case.run(**how)}
        ways["written"] = replace(case, kv_cache=cache).run(write_cache=True, **how)
        if case.kv_cache.dtype.itemsize == 1:
            packed = np.stack([pack_keys(case.kv_cache[0]), case.kv_cache[1]])
            ways["packed"] = replace(case, kv_cache=packed).run(packed_keys=True, **how)
    for got in ways.values():
        for found, exact in zip(got, expected, strict=True):
            np.testing.assert_array_equal(found, exact)
    np.testing.assert_array_equal(
        cache.astype(np.float32), expected_cache(case, slots).astype(np.float32)
    )
