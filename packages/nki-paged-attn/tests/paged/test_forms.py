"""Forms: what is compiled follows from the bucket, and results follow from the sequence."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from nki_paged_attn import Bucket, Buckets, cost, count_instructions, estimate_cost, trace_form
from nki_paged_attn._paged.call import Batch, Options
from nki_paged_attn._paged.forms import BLOCK_TILES, BLOCKS, Form
from nki_paged_attn._paged.launch import find_form, form_tables, static_arguments
from nki_paged_attn._paged.sequences import NOWHERE, cover, cut_blocks
from nki_paged_attn.estimate import sequential_table

from .._cases import BF16, F32, make_case

MIXED = ([20, 1, 0, 70, 1, 3], [100, 300, 5, 3, 0, 4500])
SHAPE = {"heads": 8, "kv_heads": 1, "head_dim": 128, "block_size": 32}
TIGHT = Buckets(batch=np.int64(6), tokens=95, context=4500)
WIDE = Buckets(batch=40, tokens=700, context=40_000)


def options_of(kv_heads=1):
    return Options.plain(1.0, kv_heads, "bfloat16")


def compiled(queries, contexts, buckets=None):
    """Return what a device compiles a call for: shapes of tensors, and arguments."""
    queries, contexts = np.array(queries), np.array(contexts)
    table = sequential_table(contexts, 32)
    batch = Batch(queries, contexts, table, int(queries.sum()), None).pack(32)
    form = find_form(batch, buckets or Buckets(), 8, 1, 32, 128)
    tables, new = form_tables(batch, form, options_of())
    shapes = form.bucket.tokens, len(new), tables.table.shape, tables.numbers.shape
    return shapes, tuple(static_arguments(form, options_of()).items())


def same(a, b):
    for got, expected in zip(a, b, strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("options", [{}, {"window": 60}, {"k_scale": 0.5, "v_scale": 3.0}], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_bits_do_not_depend_on_the_bucket(dtype, options, monkeypatch):
    """Nor, in a larger one, on the programs that share it."""
    case = make_case(*MIXED, head_dim=16, dtype=dtype, **options)
    expected = case.run(buckets=TIGHT)
    same(case.run(), expected)
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    same(case.run(buckets=WIDE), expected)


def test_a_long_sequence_is_its_parts_whatever_else_runs(monkeypatch):
    """Parts of 4096 keys, alone and with others, on one and on two programs."""
    case = make_case([1, 1, 2], [9000, 12_289, 7100], heads=2, head_dim=8, block_size=64)
    out, lse = case.check()
    for i in range(3):
        first = sum(case.query_lens[:i])
        own = slice(first, first + case.query_lens[i])
        alone = type(case)(
            case.q[own],
            case.k[own],
            case.v[own],
            case.kv_cache,
            case.block_table[i : i + 1],
            [case.query_lens[i]],
            [case.context_lens[i]],
        )
        same(alone.run(), (out[own], lse[:, own]))
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    same(case.run(), (out, lse))


def test_more_parts_than_a_merge_loads_at_once(monkeypatch):
    """66 parts of 4096 keys: the maximum of all comes before the sums of each 64."""
    case = make_case([1], [266_000], heads=1, kv_heads=1, head_dim=4, block_size=256)
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    expected = case.check()
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    same(case.run(), expected)
    # a score of 200 in the first part, whose exponential is no fp32 number
    cache = case.kv_cache.copy()
    cache[0, case.block_table[0, 0], 0, 0] = 400 * case.q[0, 0] / (case.q[0, 0] ** 2).sum()
    dataclasses.replace(case, kv_cache=cache).check()


def test_a_form_of_half_a_million_keys_fits():
    """Its table, too: a row for each part, and one for their merge."""
    shape = SHAPE | {"heads": 64, "head_dim": 64}
    assert count_instructions(Bucket(1, 8, 2**19), **shape) < 30_000
    assert Form(Bucket(8, 8, 2**22), 8, 1, 32, 2).table_size < 2**26


@pytest.mark.parametrize("block_size", [32, 33])
@pytest.mark.parametrize("count", [1, 2, 9, 16])
def test_every_length_around_a_part_has_a_table(count, block_size):
    """Of new tokens that are cached and of others, with windows that begin in a part."""
    for end in range(4096 - 2, 4096 + 2 * count + 9):
        for is_cached, window in ((True, None), (True, 5000), (False, None), (False, 4100)):
            queries, contexts = np.array([count]), np.array([end - count])
            table = sequential_table([end], block_size)
            batch = Batch(queries, contexts, table, count, window, is_cached).pack(block_size)
            form = find_form(batch, Buckets(1, count, end), 4, 1, block_size, 64)
            found, _ = form_tables(batch, form, options_of())
            assert 0 < found.used <= form.table_size


@pytest.mark.parametrize("is_cached", [True, False])
def test_no_block_is_without_tokens(is_cached):
    """1135 tokens are 1024, 111 in a block of 128, and none in what tiles of 42 are rounded to."""
    queries, contexts = np.array([1135]), np.array([0])
    table = sequential_table([1135], 16)
    batch = Batch(queries, contexts, table, 1135, 2, is_cached=is_cached).pack(16)
    form = find_form(batch, Buckets(), 3, 1, 16, 128)
    found, _ = form_tables(batch, form, options_of())
    bounds = found.table[: 2 * form.programs * len(form.loops)].reshape(form.programs, -1, 2)
    for own in bounds:
        for (first, end), loop in zip(own, form.loops, strict=True):
            if loop.spec[0] == BLOCKS:
                rows = found.table[first:end].reshape(-1, 128, loop.width)
                columns = loop.spec[1] // loop.spec[2]
                assert (rows[:, :, :columns] < NOWHERE).any(axis=(1, 2)).all()


def test_rows_of_a_part_see_different_keys():
    """A window that begins, and keys that end, in parts which would not mask or in later rounds."""
    make_case([3], [9000], heads=2, head_dim=8, block_size=64, window=4993).check()
    make_case([310], [70], heads=5, kv_heads=1, head_dim=8).check()


def test_programs_share_the_work():
    batch = [1] * 8 + [4096], [500] * 8 + [0]
    one, two = (cost(trace_form(*batch, **SHAPE, programs=n, samples=2)) for n in (1, 2))
    assert two.cycles["tensor"] <= 0.6 * one.cycles["tensor"]


SINK = np.array([1.5], np.float32)


@pytest.mark.parametrize(
    ("queries", "heads", "options"),
    [
        (1, 2, {}),
        (40, 2, {"window": 5000}),
        (70, 1, {"sinks": SINK}),
        (70, 1, {"sinks": -np.inf * SINK, "window": 4500, "dtype": BF16}),
        (90, 1, {"k_scale": 0.5, "v_scale": 2.0}),
        (300, 3, {"kv_heads": 3, "softcap": 2.0}),
        (700, 1, {}),
    ],
    ids=["decode", "rows", "tile", "window", "scales", "three heads", "prompt"],
)
def test_one_sequence_is_two_programs_work(queries, heads, options, monkeypatch):
    """Of one KV head or three: its keys, or its tiles, are cut, and one program cuts them alike."""
    shape = {"kv_heads": 1, "head_dim": 8, "block_size": 64} | options
    case = make_case([queries], [9000 if queries < 200 else 700], heads=heads, **shape)
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    expected = case.check()
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    same(case.run(), expected)
    same(case.run(buckets=WIDE), expected)


def test_tiles_of_one_head_and_128_tokens(monkeypatch):
    """Several of these for each head, and more chunks of the diagonal than a product has."""
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    sinks = np.linspace(-1, 2, 4)
    make_case([1030, 300], [40, 2200], head_dim=8, block_size=64, sinks=sinks).check()


def test_halves_of_a_tile_leave_rows_that_see_one_of_them():
    """With a window, the first rows see nothing of the second half, or the last of the first."""
    shape = {"heads": 1, "kv_heads": 1, "head_dim": 8, "block_size": 64}
    for window in (100, 4300, 4900):
        make_case([120], [8200], window=window, extra=3, **shape).check()


@pytest.mark.parametrize(
    ("queries", "context", "share"),
    [(1, 32768, 0.7), (8, 8192, 0.7), (12, 32768, 0.55), (512, 32768, 0.55), (1024, 0, 0.7)],
)
def test_two_programs_take_less_time_for_one_sequence(queries, context, share):
    one, two = (
        cost(trace_form([queries], [context], **SHAPE, programs=n, samples=2)) for n in (1, 2)
    )
    assert two.makespan <= share * one.makespan


def test_dma_takes_transposes_from_the_tensor_engine():
    """A third of its cycles, for as many bytes more between tiles as probabilities have."""
    tensor, dma = (estimate_cost([2048], [8192], **SHAPE, transposes=x) for x in ("tensor", "dma"))
    assert dma.cycles["tensor"] <= 0.8 * tensor.cycles["tensor"]
    assert dma.dma_bytes >= tensor.dma_bytes + 2 * 8 * 2048 * 8192


def test_one_form_serves_256_steps_of_32_decodes():
    contexts = np.random.default_rng(0).integers(1, 8000, 32)
    assert len({compiled([1] * 32, contexts + step)[0] for step in range(0, 256, 51)}) == 1
    assert len({compiled([1] * 32, contexts + step)[1] for step in (0, 255)}) == 1


def test_four_forms_serve_200_random_batches():
    """Eight sequences each, prompts of up to 512 tokens among decodes."""
    rng = np.random.default_rng(1)
    found = set()
    for _ in range(200):
        queries = np.where(rng.random(8) < 0.5, 1, rng.integers(1, 513, 8))
        needed = 8, int(queries.sum()), int(rng.integers(0, 4097, 8).max())
        found.add(Buckets().find(*needed))
    assert len(found) <= 4
    engine = Buckets(batch=8, tokens=[8, 4096], context=4096)
    assert len({engine.find(8, int(n), 100) for n in rng.integers(8, 4097, 200)}) == 1
    # and what is compiled follows from the bucket alone
    small, large = ([300] + [1] * 7, [0] * 8), ([40] * 8, [4000] * 8)
    assert compiled(*small) == compiled(*large)


def test_the_program_of_a_form_does_not_depend_on_the_batch():
    """Traced as a compiler does, each body once: the same calls on the same shapes."""
    logs = []
    for batch in (([300] + [1] * 7, [0] * 8), ([40] * 8, [4000] * 8)):
        log = trace_form(*batch, **SHAPE, samples=0)
        logs.append([(i.op, i.engine, i.elements, i.stationary, i.form) for i in log.instructions])
    assert logs[0] == logs[1]


def test_a_form_for_a_prefill_of_32k_has_below_20000_instructions():
    assert count_instructions(Bucket(8, 32768, 32768), **SHAPE) < 20_000
    many = SHAPE | {"heads": 32, "kv_heads": 32}
    assert count_instructions(Bucket(8, 8192, 4096), **many) < 20_000


def test_a_form_takes_little_longer_than_a_kernel_for_the_lengths():
    """By the cost model, of a prompt: its loops are barriers, and its blocks load keys again."""
    # of a kernel that was compiled for the lengths: benchmarks/NOTES.md
    unrolled = 349.8
    form = cost(trace_form([2048], [0], **SHAPE, samples=2)).makespan / 1e3
    assert form <= 1.1 * unrolled


@pytest.mark.parametrize(
    "batch",
    [([1] * 16, [1500] * 16), ([512, 1, 1], [100, 3000, 40])],
    ids=["decodes", "mixed"],
)
def test_a_bucket_that_is_half_empty_costs_next_to_nothing(batch):
    queries, contexts = batch
    tight = Buckets(len(queries), sum(queries), max(contexts))
    double = Buckets(2 * len(queries), 2 * sum(queries), 2 * max(contexts))
    few, many = (cost(trace_form(*batch, **SHAPE, buckets=b, samples=2)) for b in (tight, double))
    assert few.cycles["tensor"] <= many.cycles["tensor"] <= 1.01 * few.cycles["tensor"]
    assert few.dma_bytes <= many.dma_bytes <= 1.01 * few.dma_bytes
    assert many.times["dma"] <= 1.01 * few.times["dma"]


@pytest.mark.parametrize(
    "batch", [([1600], [0]), ([70, 1, 1], [2500, 4500, 200])], ids=["prefill", "mixed"]
)
def test_estimates_of_two_iterations_are_those_of_all(batch):
    every = cost(trace_form(*batch, **SHAPE))
    some = estimate_cost(*batch, **SHAPE)
    assert some.instructions == pytest.approx(every.instructions, rel=0.02)
    for engine in ("tensor", "vector", "scalar"):
        assert some.cycles[engine] == pytest.approx(every.cycles[engine], rel=0.02)
    assert some.dma_bytes == pytest.approx(every.dma_bytes, rel=0.02)
    assert some.makespan == pytest.approx(every.makespan, rel=0.05)


@pytest.mark.parametrize(
    ("buckets", "error", "text"),
    [
        (Buckets(batch=2), ValueError, r"buckets.batch must hold the call's 3, got at most 2; "
         r"Bucket\(batch=4, tokens=512, context=4096\) would hold it"),
        (Buckets(tokens=[4, 8]), ValueError, "buckets.tokens must hold the call's 9, got at most"),
        (Buckets(context=16), ValueError, "buckets.context must hold the call's 30, got at most"),
        ((8, 8, 8), TypeError, "buckets must be Buckets or None, got tuple"),
    ],
)  # fmt: skip
def test_a_batch_that_no_bucket_holds(buckets, error, text):
    with pytest.raises(error, match=text):
        make_case([5, 1, 3], [20, 30, 0]).run(buckets=buckets)


@pytest.mark.parametrize(
    ("sizes", "error", "text"),
    [
        ({"batch": 0}, ValueError, "buckets.batch must be at least 1, got 0"),
        ({"tokens": []}, ValueError, "buckets.tokens must have a size, got none"),
        ({"context": [1.5]}, TypeError, "buckets.context must be an integer, got float"),
        ({"context": 1.5}, TypeError, "buckets.context must be an integer, got float"),
        ({"tokens": "512"}, TypeError, "buckets.tokens must be an integer, got str"),
    ],
)
def test_buckets_check_what_they_are_given(sizes, error, text):
    with pytest.raises(error, match=text):
        Buckets(**sizes)


@pytest.mark.parametrize(
    ("sizes", "error", "text"),
    [
        ((1.5, 0, 0), TypeError, "batch must be an integer, got float"),
        ((1, "8", 0), TypeError, "tokens must be an integer, got str"),
        ((1, 8, -1), ValueError, "context must be at least 0, got -1"),
    ],
)
def test_a_bucket_is_found_for_counts(sizes, error, text):
    with pytest.raises(error, match=text):
        Buckets().find(*sizes)


@pytest.mark.parametrize("bucket", [8, None, (8, 512)])
def test_a_bucket_to_count_has_three_sizes(bucket):
    with pytest.raises(TypeError, match=r"bucket must be Bucket\(batch, tokens, context\), got"):
        count_instructions(bucket, **SHAPE)


@pytest.mark.parametrize(
    ("samples", "error", "text"),
    [
        (-1, ValueError, "samples must be at least 0, got -1"),
        (1.5, TypeError, "samples must be an integer, got float"),
    ],
)
def test_samples_are_a_number_of_iterations(samples, error, text):
    with pytest.raises(error, match=text):
        trace_form([1], [5], **SHAPE, samples=samples)


@pytest.mark.parametrize(
    ("tiles", "expected"),
    [(1, [1]), (2, [1, 1]), (3, [1, 1, 1]), (5, [2, 2, 1]), (64, [32, 32]), (96, [64, 32])],
)
def test_a_sequence_of_one_block_gets_two(tiles, expected):
    assert cut_blocks(tiles, BLOCK_TILES, True) == expected
    assert cut_blocks(tiles, BLOCK_TILES, False) == cover(tiles, BLOCK_TILES)


@pytest.mark.parametrize("tiles", [1, 2, 3, 7, 38, 63, 64, 65, 100, 512])
def test_blocks_cover_tiles_with_little_to_spare(tiles):
    found = cover(tiles, BLOCK_TILES)
    assert tiles <= sum(found) <= 1.2 * tiles
    assert found == sorted(found, reverse=True)
