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


@pytest.mark.parametrize("window", [2**31, 2**63, 2**100])
def test_a_window_longer_than_any_sequence_hides_nothing(window):
    case, windowed = make_case([3], [5]), make_case([3], [5], window=window)
    for got, expected in zip(windowed.run(), case.run(), strict=True):
        np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(windowed.oracle()[0], case.oracle()[0])
