"""Options at the end of their ranges."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ._cases import make_case


@pytest.mark.parametrize(("scale", "softcap"), [(1e30, 1e-10), (1e38, 0.1)])
def test_a_ratio_of_scale_and_softcap_beyond_fp32(scale, softcap):
    """A row of zeros has scores of 0, which the ratio must not make NaN."""
    case = make_case([3], [5], scale=scale, softcap=softcap)
    q = case.q.copy()
    q[0] = 0
    case = dataclasses.replace(case, q=q)
    got, _ = case.run()
    exact, _ = case.oracle()
    np.testing.assert_allclose(got, exact, atol=1e-6)


@pytest.mark.parametrize(
    ("scale", "k_scale", "size"), [(1e-13, 1e12, 1.0), (1e-13, [1.0, 1e12], 1.0), (5e-13, 1.0, 6e4)]
)
def test_fp16_queries_and_a_tiny_scale(scale, k_scale, size):
    """The scale times a query is 0 in fp16, but the scores are not."""
    case = make_case([5, 1], [20, 30], dtype=np.float16, scale=scale, k_scale=k_scale, head_dim=128)
    tensors = {"q": case.q, "k": case.k, "kv_cache": case.kv_cache}
    dataclasses.replace(case, **{n: (x * np.float16(size)) for n, x in tensors.items()}).check()


def test_fp16_queries_and_scales_of_heads_far_apart():
    """One head's scale asks for queries so small that fp16 would lose those of the other."""
    case = make_case([5, 1], [20, 30], dtype=np.float16, scale=1e-6, k_scale=[1e-12, 1e7])
    with pytest.raises(ValueError, match="k_scale of heads, and 1 for new keys, must be within"):
        case.run()
    inputs = {"dtype": np.float16, "k_scale": [1e-4, 1e7], "head_dim": 128}
    make_case([5, 1], [20, 30], scale=1e-10, **inputs).check()


@pytest.mark.parametrize(("scale", "softcap"), [(3e38, None), (-3e38, None), (3e38, 5.0)])
def test_a_scale_of_the_cache_beyond_fp32(scale, softcap):
    case = make_case([3], [5], scale=scale, k_scale=2.0, softcap=softcap)
    if softcap:
        np.testing.assert_allclose(case.run()[0], case.oracle()[0], atol=1e-6)
        return
    with pytest.raises(ValueError, match="scale times k_scale must be finite in fp32, got 6e\\+38"):
        case.run()


@pytest.mark.parametrize("window", [2**31, 2**63, 2**100])
def test_a_window_longer_than_any_sequence_hides_nothing(window):
    case, windowed = make_case([3], [5]), make_case([3], [5], window=window)
    for got, expected in zip(windowed.run(), case.run(), strict=True):
        np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(windowed.oracle()[0], case.oracle()[0])
