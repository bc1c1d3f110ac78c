"""Calls that write new keys and values into the cache."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from nki_paged_attn import Buckets, paged_attention, reshape_and_cache
from numpy.lib.stride_tricks import as_strided

from ._cases import BF16, F16, make_case
from ._writes import expected_cache, make

E4M3, E4M3FN = (np.dtype(x) for x in (ml_dtypes.float8_e4m3, ml_dtypes.float8_e4m3fn))

SLOT = np.array([0])


@pytest.mark.parametrize("programs", ["1", "2"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": BF16, "extra": 2},
        {"dtype": F16, "cache_dtype": BF16, "block_size": 3},
        {"dtype": BF16, "cache_dtype": E4M3, "k_scale": 2.0**-12, "v_scale": 2.0},
        {"dtype": BF16, "cache_dtype": E4M3FN, "k_scale": np.array([0.5, 4.0])},
        {"heads": 2, "kv_heads": 1, "head_dim": 192},
    ],
    ids=["fp32", "bf16", "other dtype", "saturates", "scales", "large head"],
)
def test_new_tokens_are_written(options, programs, monkeypatch):
    """And nothing else; the results are those of a call that does not write."""
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", programs)
    case, slots = make(**options)
    expected = case.run()
    cache = case.kv_cache.copy()
    for got, exact in zip(
        replace(case, kv_cache=cache).run(write_cache=True), expected, strict=True
    ):
        np.testing.assert_array_equal(got, exact)
    np.testing.assert_array_equal(
        cache.astype(np.float32), expected_cache(case, slots).astype(np.float32)
    )


@pytest.mark.parametrize(("target", "most"), [("trn2", 240.0), ("trn3", 448.0), (None, 240.0)])
def test_the_kernel_and_the_host_end_where_the_target_does(target, most, monkeypatch):
    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE", raising=False)
    case, slots = make([20, 1], [100, 3], cache_dtype=E4M3FN)
    large = replace(case, k=1000 * case.k, v=1000 * case.v, kv_cache=case.kv_cache.copy())
    large.run(write_cache=True, target=target)
    cache = case.kv_cache.copy()
    reshape_and_cache(large.k[: len(slots)], large.v[: len(slots)], cache, slots, target=target)
    assert (large.kv_cache.view(np.uint8) == cache.view(np.uint8)).all()
    assert np.abs(cache.astype(np.float32)).max() == most


def test_any_bucket_and_any_strides():
    case, slots = make()
    cache = np.asfortranarray(case.kv_cache)
    replace(case, kv_cache=cache).run(write_cache=True, buckets=Buckets(9, 700, 3000))
    np.testing.assert_array_equal(cache, expected_cache(case, slots))


def test_the_next_step_reads_what_was_written():
    case, _ = make([5, 1], [20, 130])
    cache = case.kv_cache.copy()
    replace(case, kv_cache=cache).run(write_cache=True)
    after = replace(
        make_case([1, 1], [25, 131], seed=5), kv_cache=cache, block_table=case.block_table
    )
    whole = replace(after, kv_cache=expected_cache(case, make([5, 1], [20, 130])[1]))
    np.testing.assert_array_equal(after.run()[0], whole.run()[0])


def test_blocks_that_two_sequences_write_or_read_are_refused():
    case, _ = make([5, 1], [20, 32])
    table = case.block_table.copy()
    table[1, 2] = table[0, 1]
    with pytest.raises(ValueError, match="block_table must give new tokens blocks of their own"):
        replace(case, block_table=table).run(write_cache=True)
    table = case.block_table.copy()
    table[1, 1] = table[0, 1]
    with pytest.raises(ValueError, match="block_table must give no context what the call writes"):
        replace(case, block_table=table).run(write_cache=True)
    # its own context
    own = case.block_table.copy()
    own[0, 1] = own[0, 0]
    with pytest.raises(
        ValueError, match=r"what the call writes, got block \d in sequences 0 and 0"
    ):
        replace(case, block_table=own).run(write_cache=True)
    # a prefix that both have, and neither writes
    table[1, 1] = case.block_table[1, 1]
    table[1, 0] = table[0, 0]
    shared = replace(case, block_table=table, kv_cache=case.kv_cache.copy())
    np.testing.assert_array_equal(shared.run(write_cache=True)[0], shared.run()[0])


def test_what_cannot_be_written():
    case, _ = make([5], [20])
    cache = case.kv_cache.copy()
    cache.flags.writeable = False
    with pytest.raises(ValueError, match="kv_cache must be writable for write_cache"):
        replace(case, kv_cache=cache).run(write_cache=True)
    with pytest.raises(TypeError, match="write_cache must be True or False, got 1"):
        case.run(write_cache=1)
    packed = replace(case, kv_cache=case.kv_cache.astype(E4M3))
    with pytest.raises(
        NotImplementedError, match="write_cache writes whole tokens, got packed_keys"
    ):
        packed.run(write_cache=True, packed_keys=True)
    with pytest.raises(ValueError, match="block_table must have 2 columns"):
        paged_attention(*case.tensors[:4], case.block_table[:, :1], [5], [16], write_cache=True)


def test_a_cache_that_shares_memory_is_not_written():
    case, _ = make([5], [20])
    cache = case.kv_cache.copy()
    within = cache.reshape(-1)[: case.q.size].reshape(case.q.shape)
    with pytest.raises(ValueError, match="kv_cache must not share memory with q, for it is"):
        replace(case, kv_cache=cache, q=within).run(write_cache=True)
    np.testing.assert_array_equal(cache, case.kv_cache)
    new = np.ones((1, 1, 8), np.float32)
    memory = np.zeros(400, np.float32)
    shape = (2, 3, 1, 4, 8)
    for strides in ((0, 32, 32, 8, 1), (92, 32, 32, 8, 1), (96, 30, 30, 8, 1)):
        wrong = as_strided(memory, shape, tuple(4 * s for s in strides))
        with pytest.raises(ValueError, match="kv_cache must not overlap itself, for it is written"):
            reshape_and_cache(new, new, wrong, np.array([0]))
    with pytest.raises(ValueError, match="kv_cache must not share memory with value, for it is"):
        reshape_and_cache(new, memory[:8].reshape(new.shape), memory[:192].reshape(shape), SLOT)
    assert not memory.any()
    # keys and values side by side
    right = as_strided(memory, shape, tuple(4 * s for s in (8, 64, 64, 16, 1)))
    reshape_and_cache(new, 2 * new, right, SLOT)
    np.testing.assert_array_equal(memory[:17], [1.0] * 8 + [2.0] * 8 + [0.0])


def test_a_cache_that_requires_a_gradient_is_not_written():
    torch = pytest.importorskip("torch")
    case, _ = make([5], [20])
    cache = torch.from_numpy(case.kv_cache.copy()).requires_grad_()
    message = "kv_cache must not require a gradient, for it is written; got requires_grad=True"
    with pytest.raises(NotImplementedError, match=message):
        paged_attention(case.q, case.k, case.v, cache, *case.tensors[4:], write_cache=True)
    with pytest.raises(NotImplementedError, match=message):
        reshape_and_cache(case.k[:1], case.v[:1], cache, SLOT)
    np.testing.assert_array_equal(cache.detach().numpy(), case.kv_cache)
