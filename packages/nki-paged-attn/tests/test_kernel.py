"""The kernel against float64, feature by feature and in pairs, on every generation."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from nki_paged_attn import Bucket, build_plan, count_instructions, trace_plan
from nki_paged_attn.cache import pack_keys
from nki_paged_attn.sim import NkiValidationError

from ._cases import BF16, F16, F32, assert_within, make_case

MIXED = ([20, 1, 0, 70, 1], [100, 300, 5, 3, 0])
SINKS = np.linspace(-2, 3, 4).astype(np.float32)
FEATURES = {
    "window": {"window": 37},
    "narrow window": {"window": 3},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": SINKS},
    "scale": {"scale": 2.5},
    "negative scale": {"scale": -0.7},
    "cache scales": {"k_scale": [0.5, 2.0], "v_scale": 1.5},
}


@pytest.fixture
def target(monkeypatch):
    """Set the generation to simulate."""
    return lambda name: monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", name)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=lambda d: d.name)
@pytest.mark.parametrize("name", FEATURES)
def test_each_feature(name, dtype):
    options = dict(FEATURES[name])
    if "k_scale" in options:
        options["k_scale"] = np.array(options["k_scale"])
        case = make_case(*MIXED, dtype=dtype)
        out, _ = case.run(**options)
        exact, _ = case.with_options(**options).oracle()
        assert_within(out, exact, exact.astype(dtype).astype(float) * (1 + 2**-9), dtype)
        return
    make_case(*MIXED, dtype=dtype, **options).check()


@pytest.mark.parametrize(("a", "b"), list(itertools.combinations(list(FEATURES)[:6], 2)))
def test_features_in_pairs(a, b):
    options = FEATURES[a] | FEATURES[b]
    make_case([9, 1, 40], [60, 90, 3], seed=1, **options).check()


@pytest.mark.parametrize("name", ["trn2", "trn3"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=lambda d: d.name)
def test_generations(name, dtype, target):
    target(name)
    make_case(*MIXED, dtype=dtype, window=50, sinks=SINKS).check()


def test_generations_agree_to_the_bit(target):
    results = []
    for name in ("trn2", "trn3"):
        target(name)
        results.append(make_case(*MIXED, window=50).run())
    for got, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_gen2_has_no_gathers(target):
    """The documents give them from trn2 on."""
    target("trn1")
    with pytest.raises(NkiValidationError, match="vector_offset needs trn2 or newer, got trn1"):
        make_case([3], [5]).run()


@pytest.mark.parametrize("group", [5, 7])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=lambda d: d.name)
def test_tiles_of_odd_rows(group, dtype):
    """Transposes of probabilities stay in a bank of PSUM, and begin at multiples of 4 bytes."""
    make_case([100, 1], [40, 600], heads=group, kv_heads=1, head_dim=16, dtype=dtype).check()


@pytest.mark.parametrize("name", ["trn2", "trn3"])
def test_generations_mask_sections_beyond_the_first(name, target):
    """With windows that begin, and rows that end, in the second and third of a source."""
    target(name)
    make_case([70, 1], [2300, 2300], heads=2, kv_heads=1, head_dim=8, window=500).check()
    make_case([200], [300], block_size=1, head_dim=8, window=150).check()


@pytest.mark.parametrize("head_dim", [1, 7, 8, 16, 32, 48, 64, 80, 96, 127, 128])
def test_head_dims(head_dim):
    make_case([17, 1], [40, 33], head_dim=head_dim).check()


@pytest.mark.parametrize("head_dim", [129, 192, 256])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=lambda d: d.name)
def test_head_dims_of_two_pieces(head_dim, dtype):
    """Prefill and decode, sections of 1024 keys, chunks and merges; every feature together."""
    shape = {"head_dim": head_dim, "block_size": 64, "heads": 2, "kv_heads": 1, "dtype": dtype}
    make_case([17, 1, 70], [40, 5000, 1100], **shape).check()
    case = make_case(
        [17, 1, 70], [40, 700, 1100], window=300, softcap=3.0, sinks=SINKS[:2], **shape
    )
    case.with_options(k_scale=0.5, v_scale=2.0).check()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads", [1, 8, 64, 128])
def test_forms_of_large_heads_fit(heads, dtype):
    shape = {"heads": heads, "kv_heads": 1, "head_dim": 256, "block_size": 32, "dtype": dtype}
    assert count_instructions(Bucket(8, 4096, 32768), **shape) < 20_000


def test_a_plan_of_large_heads_fits():
    """Of a prompt."""
    plan = build_plan([4096], [0], np.zeros((1, 0)), 32, heads=8, kv_heads=1)
    assert trace_plan(plan, head_dim=256, blocks=1).sbuf_peak <= 212_984


def test_rows_of_one_token_that_do_not_fit_the_partitions():
    """More query heads than 64 for a KV head, on more keys than a bank holds scores of."""
    make_case([1, 1], [1500, 40], heads=96, kv_heads=1, head_dim=8).check()


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 7, 16, 24, 32, 48, 64, 128, 256])
def test_block_sizes(block_size):
    make_case([17, 1], [40, 600], block_size=block_size).check()


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (8, 1), (6, 2), (96, 1), (128, 1)])
def test_groups(heads, kv_heads):
    """MHA, GQA and MQA; 96 and 128 rows of one token are too many for keys on the partitions."""
    make_case([5, 1], [40, 150], heads=heads, kv_heads=kv_heads, head_dim=16).check()


@pytest.mark.parametrize("context", [0, 1, 127, 128, 129, 511, 1023, 1024, 1025, 2100])
def test_contexts_at_the_edges_of_sections(context):
    make_case([1, 66], [context, context], head_dim=16, heads=2).check()


@pytest.mark.parametrize("queries", [1, 31, 32, 33, 63, 64, 65, 128, 129])
def test_queries_at_the_edges_of_tiles(queries):
    make_case([queries], [77], head_dim=16, heads=2, kv_heads=1).check()


@pytest.mark.parametrize("kind", ["float8_e4m3", "float8_e4m3fn", "float8_e5m2"])
def test_fp8_cache(kind):
    import ml_dtypes

    dtype = np.dtype(getattr(ml_dtypes, kind))
    case = make_case(*MIXED, dtype=BF16, cache_dtype=dtype)
    case.check()
    scaled, _ = case.run(k_scale=2.0, v_scale=0.25)
    exact, _ = case.with_options(k_scale=2.0, v_scale=0.25).oracle()
    assert_within(scaled, exact, exact * (1 + 2**-8), BF16)


PACKED = [
    {"queries": [20, 1, 0, 70, 1, 3], "contexts": [100, 300, 5, 3, 0, 1500]},
    {"queries": [70, 1, 1, 3], "contexts": [1101, 1300, 17, 33], "block_size": 2, "window": 700},
    {"queries": [70, 1, 1, 3], "contexts": [1101, 1300, 17, 33], "block_size": 6, "head_dim": 192},
    {"queries": [70, 1], "contexts": [4500, 9000], "heads": 2, "kv_heads": 1, "k_scale": 0.5},
]


@pytest.mark.parametrize("kind", ["float8_e4m3", "float8_e5m2"])
@pytest.mark.parametrize("shape", PACKED, ids=["mixed", "window", "large heads", "long"])
def test_packed_keys_give_the_bits_of_plain_ones(kind, shape, monkeypatch):
    """AWS's layout of FP8 keys: two tokens interleaved."""
    import ml_dtypes

    shape = dict(shape)
    batch = shape.pop("queries"), shape.pop("contexts")
    case = make_case(*batch, dtype=BF16, cache_dtype=np.dtype(getattr(ml_dtypes, kind)), **shape)
    expected = case.run()
    cache = np.stack([pack_keys(case.kv_cache[0]), case.kv_cache[1]])
    packed = replace(case, kv_cache=cache).with_options(packed_keys=True)
    for got, exact in zip(packed.oracle(), case.oracle(), strict=True):
        np.testing.assert_array_equal(got, exact)
    for programs in ("1", "2"):
        monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", programs)
        for got, plain in zip(packed.run(), expected, strict=True):
            np.testing.assert_array_equal(got, plain)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=lambda d: d.name)
@pytest.mark.parametrize("shape", [{}, {"block_size": 1}, {"window": 700, "softcap": 2.0}], ids=str)
def test_dma_turns_probabilities_to_the_same_bits(dtype, shape):
    """Of wide sections, of chunks, and of the diagonal."""
    case = make_case([150, 1, 70], [1100, 40, 2300], head_dim=16, dtype=dtype, **shape)
    for got, expected in zip(case.run(transposes="dma"), case.run(), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_a_scale_of_zero_is_one():
    case = make_case([5, 1], [20, 30], scale=0.0)
    out, lse = case.check()
    counts = np.concatenate([20 + np.arange(1, 6), [31]])
    np.testing.assert_allclose(lse[0], np.log(counts), rtol=1e-6)
    assert out.any()


@pytest.mark.parametrize("scale", [1e-30, -1e-30, 1e-12, 2.0**-39])
def test_tiny_scales(scale):
    make_case([5, 1, 90], [20, 30, 3], scale=scale).check()


@pytest.mark.parametrize("softcap", [1e-30, 1e-3, 1e4])
def test_softcaps(softcap):
    make_case([5, 1, 90], [20, 30, 3], softcap=softcap).check()


def test_sinks_of_minus_infinity_are_none():
    sinks = np.full(4, -np.inf, np.float32)
    case = make_case([5, 1, 90], [20, 30, 3], extra=2)
    out, lse = case.run(sinks=sinks)
    plain_out, plain_lse = case.run()
    np.testing.assert_allclose(out, plain_out, rtol=1e-6)
    np.testing.assert_allclose(lse, plain_lse, rtol=1e-6)


def test_a_row_without_a_key_has_its_sink_as_lse():
    case = make_case([3], [0], extra=2, sinks=SINKS)
    out, lse = case.run()
    assert (out[3:] == 0).all()
    np.testing.assert_allclose(lse[:, 3:], np.tile(SINKS[:, None], 2))


def test_long_sequences_stream_their_keys():
    """More sections than stay in SBUF, under a prompt and under a single token."""
    make_case([70, 1], [9500, 9000], heads=2, kv_heads=1, head_dim=8, block_size=64).check()


def test_many_tiles_against_many_sections():
    """Two blocks of tiles: each reads the keys again."""
    make_case([300], [2500], heads=2, kv_heads=1, head_dim=8, window=900).check()


def test_any_strides():
    case = make_case([5, 1], [20, 30])
    wide = np.zeros((*case.q.shape[:2], 64), F32)[..., ::2]
    wide[...] = case.q
    cache = np.asfortranarray(case.kv_cache)
    moved = type(case)(wide, case.k, case.v, cache, *case.tensors[4:])
    for got, expected in zip(moved.run(), case.run(), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_without_lse_the_output_is_the_same():
    case = make_case(*MIXED)
    np.testing.assert_array_equal(case.run(return_lse=False), case.run()[0])


def test_repeats_to_the_bit():
    case = make_case(*MIXED, dtype=BF16)
    np.testing.assert_array_equal(case.run()[0], case.run()[0])


def sequence_of(case, i):
    """Return a sequence of a batch as a batch of its own, and its rows."""
    count, first = case.query_lens[i], sum(case.query_lens[:i])
    own = slice(first, first + count)
    alone = type(case)(
        case.q[own],
        case.k[own],
        case.v[own],
        case.kv_cache,
        case.block_table[i : i + 1],
        [count],
        [case.context_lens[i]],
        case.options,
    )
    return alone, own


def assert_independent(case):
    """Every sequence gives the same bits alone as in its batch."""
    out, lse = case.run()
    for i in range(len(case.query_lens)):
        alone, own = sequence_of(case, i)
        alone_out, alone_lse = alone.run()
        np.testing.assert_array_equal(alone_out, out[own])
        np.testing.assert_array_equal(alone_lse, lse[:, own])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=lambda d: d.name)
def test_a_sequence_does_not_depend_on_its_batch(dtype):
    assert_independent(make_case(*MIXED, dtype=dtype))
    assert_independent(make_case(*MIXED, dtype=dtype, window=37, sinks=SINKS))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=lambda d: d.name)
@pytest.mark.parametrize("before", range(1, 9))
def test_a_sequence_does_not_depend_on_where_it_begins(before, dtype):
    """So many new tokens before it, and long enough that its keys share partitions."""
    case = make_case([before, 200, 9, 70], [3, 20, 40, 1100], heads=2, dtype=dtype)
    assert_independent(case)
