"""NaN and Inf in what nobody sees change no bit; what somebody sees is computed with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ._cases import BF16, F32, make_case, poisoned, unused_slots

VALUES = [np.nan, np.inf, -np.inf]


@pytest.mark.parametrize("target", ["trn2", "trn3"])
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_slots_that_no_context_reaches(value, dtype, target, monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", target)
    case = make_case([70, 1, 5], [100, 33, 0], dtype=dtype)
    for got, expected in zip(poisoned(case, value).run(), case.run(), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("window", [None, 77])
def test_tokens_that_a_gather_loads_beside_those_that_are_seen(window):
    """Partitions of several tokens, inside of which a context ends or a window begins."""
    case = make_case([66, 1, 40], [301, 1503, 1001], head_dim=8, window=window)
    slots = unused_slots(case)
    for row, context in zip(case.block_table, case.context_lens, strict=True):
        for position in range(max(0, context - (window or context) + 1) if window else 0):
            slots[row[position // 16], position % 16] = True
    for got, expected in zip(poisoned(case, np.nan, slots).run(), case.run(), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("window", [1, 5, 40])
def test_keys_before_the_first_window(value, window):
    case = make_case([70, 1, 5], [100, 33, 50], window=window)
    slots = unused_slots(case)
    for row, context in zip(case.block_table, case.context_lens, strict=True):
        for position in range(max(0, context - window + 1)):
            slots[row[position // 16], position % 16] = True
    for got, expected in zip(poisoned(case, value, slots).run(), case.run(), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("value", VALUES)
def test_new_tokens_of_other_sequences_and_of_none(value):
    """Neighbours in the packed batch share rows that a gather loads."""
    case = make_case([3, 6, 170], [20, 0, 3], extra=4)
    expected = case.run()
    for first, end in ((0, 3), (3, 9), (179, 183)):
        k, v = case.k.copy(), case.v.copy()
        k[first:end] = v[first:end] = value
        out, lse = replace(case, k=k, v=v).run()
        others = np.r_[0:first, end : len(out)]
        np.testing.assert_array_equal(out[others], expected[0][others])
        np.testing.assert_array_equal(lse[:, others], expected[1][:, others])


def test_queries_of_another_sequence():
    case = make_case([3, 5, 70], [20, 0, 3])
    expected = case.run()[0]
    q = case.q.copy()
    q[3:8] = np.nan
    out = replace(case, q=q).run()[0]
    np.testing.assert_array_equal(out[:3], expected[:3])
    np.testing.assert_array_equal(out[8:], expected[8:])


@pytest.mark.parametrize("target", ["trn2", "trn3"])
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("queries", [[1], [5], [40]], ids=str)
def test_a_query_spoils_its_own_row_alone(queries, value, target, monkeypatch):
    """With keys on the partitions and with queries; from trn2 on, where transposes are exact."""
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", target)
    case = make_case(queries, [300], heads=8)
    expected, expected_lse = case.run()
    q = case.q.copy()
    q[-1, 2] = value
    out, lse = replace(case, q=q).run()
    assert np.isnan(out[-1, 2]).all()
    others = np.ones(out.shape[:2], bool)
    others[-1, 2] = False
    np.testing.assert_array_equal(out[others], expected[others])
    np.testing.assert_array_equal(lse.T[others], expected_lse.T[others])


def test_what_a_sequence_sees_is_computed_with():
    case = make_case([3, 5], [20, 30])
    cache = case.kv_cache.copy()
    cache[:, case.block_table[0, 0], :, 3] = np.nan
    out = replace(case, kv_cache=cache).run()[0]
    assert np.isnan(out[:3]).all()
    assert np.isfinite(out[3:]).all()


def test_entries_of_the_table_past_a_context_are_not_read():
    case = make_case([3, 5], [20, 70])
    table = case.block_table.copy()
    assert (table[0, 2:] == -1).all()
    table[0, 2:] = 10**6
    np.testing.assert_array_equal(replace(case, block_table=table).run()[0], case.run()[0])
