"""The points that this kernel and its simulator are accepted by, each under its number.

Points 1 to 7, 13, and what of 11 is the kernel's are here; 8 to 11 are in sim/test_acceptance.py,
12 in _kernels/test_one_source.py, 14 in sim/test_cost.py, 15 in _paged/test_backends.py.
"""

from __future__ import annotations

import numpy as np
import pytest
from nki_paged_attn import (
    Buckets,
    flash_attn_varlen_nkifunc,
    paged_attention,
    paged_attention_reference,
)

from . import _vllm
from ._cases import BF16, make_case, poisoned


@pytest.fixture(autouse=True)
def on_our_simulator(monkeypatch):
    monkeypatch.setenv("NKI_PAGED_ATTN_BACKEND", "sim")


@pytest.mark.parametrize("setting", _vllm.SETTINGS, ids=str)
def test_01_the_twelve_settings_of_the_old_tests(setting):
    """At 1e-2 as they were, and at 1e-5 where products are in fp32; through the drop-in."""
    call = _vllm.draw(setting)
    exact, _ = paged_attention_reference(*call.packed)
    got = flash_attn_varlen_nkifunc(*call.arguments, **call.options)[0].transpose(1, 0, 2)
    np.testing.assert_allclose(got[: call.tokens], exact, atol=1e-2, rtol=0)
    assert (got[call.tokens :] == 0).all()
    if setting[-1]:
        # point 2: what bf16 products allow
        np.testing.assert_allclose(got[: call.tokens], exact, atol=4e-3, rtol=0)
    else:
        np.testing.assert_allclose(got[: call.tokens], exact, atol=1e-5, rtol=0)


@pytest.mark.parametrize("setting", [s for s in _vllm.SETTINGS if s[-1] and s[5] == 16], ids=str)
def test_01_a_bf16_setting_in_fp32(setting):
    """The others, which take a minute, are in test_property.py for long runs."""
    call = _vllm.draw(setting)
    exact, _ = paged_attention_reference(*call.packed)
    got = paged_attention(*call.packed)
    np.testing.assert_allclose(got, exact, atol=1e-5, rtol=0)


def test_02_bf16_products_of_fp32_queries_are_not_rounded_to_bf16_again():
    call = _vllm.draw(_vllm.SETTINGS[3])
    got = flash_attn_varlen_nkifunc(*call.arguments, **call.options)
    assert got.dtype == np.float32
    seen = got[:, :, : call.tokens]
    assert (seen.astype(BF16).astype(np.float32) != seen).mean() > 0.9
    out = make_case([5], [40], dtype=BF16).run()[0]
    assert out.dtype == BF16


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_03_rows_without_a_key_are_zero_and_poison_stays_where_it_is(value):
    case = poisoned(make_case([5, 0, 80], [40, 7, 33], extra=3), value)
    out, lse = case.run()
    assert (out[-3:] == 0).all()
    assert np.isneginf(lse[:, -3:]).all()
    assert np.isfinite(out).all()
    case.check()
    # through the mask, with a row that sees nothing among those that do, and a poisoned pad block 0
    call = _vllm.draw((1, 2, 16, 512, 2, 2, 16, False))
    query, key, val, cache, table, mask = call.arguments
    used = set(table[: int(-(-call.packed[6] // 16).sum())].tolist())
    free = [b for b in range(cache.shape[1]) if b not in used]
    cache = cache.copy()
    cache[:, free] = value
    table = np.where(table == 0, free[0], table) if 0 not in used else table
    mask = mask.copy()
    mask[3] = 0
    got = flash_attn_varlen_nkifunc(query, key, val, cache, table, mask, **call.options)
    assert (got[0, :, 3] == 0).all()
    assert np.isfinite(got).all()


@pytest.mark.parametrize(
    ("queries", "contexts"),
    [
        ([20, 3], [0, 0]),
        ([1, 1, 1, 1], [5, 0, 300, 128]),
        ([77], [1000]),
        ([9, 0, 9], [30, 20, 0]),
        ([127, 129], [100, 1025]),
        ([], []),
        ([0, 0], [5, 0]),
    ],
    ids=str,
)
def test_04_every_kind_of_batch(queries, contexts):
    make_case(queries, contexts, head_dim=16).check()


@pytest.mark.parametrize("factor", [1e5, 1e4])
def test_05_logits_of_a_large_magnitude(factor):
    """All logits below the finite fill of the old kernel."""
    case = make_case([40, 1], [70, 90])
    q, k = np.abs(case.q), -np.abs(case.k)
    cache = case.kv_cache.copy()
    cache[0] = -np.abs(cache[0])
    case = type(case)(q, k, case.v, cache, *case.tensors[4:], {"scale": factor})
    _, lse = case.check()
    assert lse.max() < -9984


def test_06_physical_places_do_not_matter():
    case = make_case([40, 1, 1], [70, 90, 600], dtype=BF16)
    expected, expected_lse = case.run()
    order = np.random.default_rng(5).permutation(case.kv_cache.shape[1])
    cache = np.empty_like(case.kv_cache)
    cache[:, order] = case.kv_cache
    table = np.where(case.block_table >= 0, order[case.block_table], -1)
    moved = type(case)(case.q, case.k, case.v, cache, table, *case.tensors[5:])
    for other in (moved, poisoned(case, np.nan), poisoned(moved, np.inf)):
        out, lse = other.run()
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(lse, expected_lse)


@pytest.mark.parametrize("head_dim", [8, 16, 32, 48, 64, 80, 96, 128])
@pytest.mark.parametrize("group", [1, 2, 4])
def test_07_heads_and_head_sizes_with_every_feature(head_dim, group):
    sinks = np.linspace(-1, 1, 4).astype(np.float32)
    case = make_case(
        [33, 1],
        [50, 70],
        kv_heads=4 // group,
        head_dim=head_dim,
        sinks=sinks,
        softcap=3.0,
        window=20,
    )
    case.check()


@pytest.mark.parametrize("block_size", [1, 4, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("window", [None, 3, 200])
def test_07_block_sizes_and_windows(block_size, window):
    make_case([33, 1], [500, 700], block_size=block_size, head_dim=16, window=window).check()


@pytest.mark.parametrize("target", ["trn2", "trn3"])
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BF16], ids=str)
def test_11_the_kernel_reads_nothing_that_was_not_written(target, dtype, monkeypatch):
    from nki_paged_attn import simulate
    from nki_paged_attn._paged import backends

    def run(backend, arguments):
        return simulate(backends.simulated_kernel(), target, strict=True)(**arguments)

    monkeypatch.setattr(backends, "run", run)
    # a strict run refuses two programs of which one has more to do
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    sinks = np.zeros(4, np.float32)
    case = make_case([20, 1, 70], [100, 300, 3], dtype=dtype, extra=2, window=90, sinks=sinks)
    # rows of a bucket that are no query's are not written, so that there may be none
    case.check(buckets=Buckets(tokens=93))


@pytest.mark.parametrize("programs", [2])
@pytest.mark.parametrize("kv_heads", [1, 2, 3])
def test_13_two_programs_give_the_same_bits(programs, kv_heads, monkeypatch):
    """The simulator refuses two programs that write one place."""
    case = make_case([20, 1, 70, 1], [100, 300, 3, 40], heads=6, kv_heads=kv_heads, dtype=BF16)
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    one = case.run()
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", str(programs))
    for got, expected in zip(case.run(), one, strict=True):
        np.testing.assert_array_equal(got, expected)
