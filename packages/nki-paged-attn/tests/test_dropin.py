"""The old functions: layouts, masks, tables, the cache, and their messages."""

from __future__ import annotations

import sys

import ml_dtypes
import numpy as np
import pytest
from nki_paged_attn import (
    flash_attn_varlen_nkifunc,
    flash_paged_attention,
    load_block_tables,
    paged_attention,
    paged_attention_reference,
    reorder_context_mask,
    reshape_and_cache,
    transform_block_tables_for_indirect_load,
)
from nki_paged_attn._paged.masks import column_order, pack_mask
from nki_paged_attn.cache import pack_keys, unpack_keys
from nki_paged_attn.sim import targets

from . import _vllm
from ._cases import BF16

SMALL = (1, 3, 16, 512, 4, 2, 16, False)


def f(*shape):
    return np.zeros(shape, np.float32)


@pytest.fixture(autouse=True)
def on_our_simulator(monkeypatch):
    monkeypatch.setenv("NKI_PAGED_ATTN_BACKEND", "sim")


@pytest.fixture(scope="module")
def call():
    return _vllm.draw(SMALL)


def exact(call, **options):
    return paged_attention_reference(*call.packed, **options)[0].transpose(1, 0, 2)[None]


def test_the_kernels_own_call_with_a_grid(call):
    got = flash_paged_attention[1, 2](*call.arguments, 0.5, False, 512)
    np.testing.assert_allclose(got[:, :, : call.tokens], exact(call, scale=0.5), atol=1e-5)


def test_a_scale_of_zero_is_not_replaced(call):
    got = flash_paged_attention(
        *call.arguments, softmax_scale=0.0, mixed_precision=False, LARGE_TILE_SZ=512
    )
    np.testing.assert_allclose(got[:, :, : call.tokens], exact(call, scale=0.0), atol=1e-5)


def test_debug_tensors_are_not_offered(call):
    with pytest.raises(NotImplementedError, match="return_debug_tensors"):
        flash_paged_attention(*call.arguments, return_debug_tensors=True)


def test_a_batch_without_any_context(call):
    """The old kernel added a key of logit 0 to it."""
    query, key, value, cache = call.arguments[:4]
    tokens = 20
    q, k, v = query[..., :tokens], key[..., :tokens], value[:, :, :tokens]
    mask = np.tri(tokens, dtype=np.int32)
    got = flash_attn_varlen_nkifunc(
        q, k, v, cache, np.zeros(0, np.int32), mask, mixed_precision=False
    )
    packed = (q[0].transpose(2, 0, 1), k[0].transpose(2, 0, 1), v[0].transpose(1, 0, 2), cache)
    expected, _ = paged_attention_reference(*packed, np.zeros((1, 0), int), [tokens], [0])
    np.testing.assert_allclose(got[0].transpose(1, 0, 2), expected, atol=1e-5)


def test_a_batch_without_any_query(call):
    query, key, value, cache, table, mask = call.arguments
    context = mask.shape[1] - mask.shape[0]
    got = flash_attn_varlen_nkifunc(
        query[..., :0],
        key[..., :0],
        value[:, :, :0],
        cache,
        table,
        mask[:0, :context],
        **call.options,
    )
    assert got.shape == (1, 4, 0, 16)


def test_a_sequence_does_not_depend_on_its_neighbours(call):
    """Not where its rows begin, and not what else the mask holds; bit for bit."""
    query, key, value, cache, _, _ = call.arguments
    results = []
    for before in (0, 1, 3, 8):
        size = before + 20
        mask = np.zeros((size, size), np.int32)
        mask[:before, :before] = np.tri(before)
        mask[before:, before:] = np.tri(20)
        rows = np.r_[20 : 20 + before, 0:20]
        got = flash_attn_varlen_nkifunc(
            query[..., rows],
            key[..., rows],
            value[:, :, rows],
            cache,
            np.zeros(0, np.int32),
            mask,
            mixed_precision=False,
        )
        results.append(got[:, :, before:])
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


def test_rows_in_any_order(call):
    """Sequences whose rows do not lie together share the place of their keys."""
    query, key, value, cache, table, mask = call.arguments
    expected = flash_attn_varlen_nkifunc(query, key, value, cache, table, mask, **call.options)
    order = np.random.default_rng(1).permutation(query.shape[3])
    got = flash_attn_varlen_nkifunc(
        query[..., order], key, value, cache, table, mask[order], **call.options
    )
    np.testing.assert_allclose(got, expected[:, :, order], atol=1e-5)


def test_torch_tensors_come_back_as_torch_tensors(call):
    torch = pytest.importorskip("torch")
    tensors = [torch.from_numpy(x) for x in call.arguments]
    got = flash_attn_varlen_nkifunc(*tensors, **call.options)
    assert isinstance(got, torch.Tensor)
    np.testing.assert_array_equal(
        got.numpy(), flash_attn_varlen_nkifunc(*call.arguments, **call.options)
    )
    low = [x.to(torch.bfloat16) if x.is_floating_point() else x for x in tensors]
    assert flash_attn_varlen_nkifunc(*low, **call.options).dtype == torch.bfloat16
    assert "torch" in sys.modules


def test_bf16_arrays(call):
    low = [x.astype(BF16) if x.dtype == np.float32 else x for x in call.arguments]
    got = flash_attn_varlen_nkifunc(*low, **call.options)
    assert got.dtype == BF16
    np.testing.assert_allclose(got[:, :, : call.tokens].astype(float), exact(call), atol=2e-2)


def test_a_mask_in_which_a_row_has_a_gap_is_refused(call):
    *rest, mask = call.arguments
    mask = mask.copy()
    order = np.flatnonzero(mask[0, : mask.shape[1] - mask.shape[0]])
    mask[0, order[len(order) // 2]] = 0
    with pytest.raises(NotImplementedError, match="row 0 has a gap"):
        flash_attn_varlen_nkifunc(*rest, mask, **call.options)


def test_windows_and_ragged_rows_of_a_mask(call):
    """Any mask of ranges: here each row sees the last 40 keys."""
    query, key, value, cache, table, _ = call.arguments
    lens, contexts = call.packed[5:]
    counts = -(-contexts // 16)
    columns, padded = len(table) * 16, query.shape[3]
    mask = np.zeros((padded, columns + padded), np.int32)
    row, block = 0, 0
    for count, context, n in zip(lens, contexts, counts, strict=True):
        for i in range(count):
            for j in range(max(0, context + i - 39), context + i + 1):
                column = block * 16 + j if j < context else columns + row + j - context
                mask[row + i, column] = 1
        row, block = row + count, block + n
    mask = reorder_context_mask(mask, 512, 16)
    got = flash_attn_varlen_nkifunc(query, key, value, cache, table, mask, **call.options)
    np.testing.assert_allclose(got[:, :, : call.tokens], exact(call, window=40), atol=1e-5)


def test_a_mask_falls_into_its_sequences(call):
    """So that none is multiplied with another's keys; rows that see nothing stay together.

    They are the sequences that ``paged_attention`` runs, whose bits they have.
    """
    *_, mask = call.arguments
    context = mask.shape[1] - mask.shape[0]
    plain = np.empty(mask.shape, bool)
    plain[:, column_order(512, 16, context)] = mask[:, :context] != 0
    plain[:, context:] = mask[:, context:] != 0
    found = pack_mask(plain, context, call.arguments[4], 16).sequences
    lens = call.packed[5].tolist()
    assert [x.count for x in found] == [*lens, len(mask) - sum(lens)]
    assert [x.is_causal for x in found] == [True] * len(lens) + [False]
    got = flash_attn_varlen_nkifunc(*call.arguments, **call.options)[0].transpose(1, 0, 2)
    np.testing.assert_array_equal(got[: call.tokens], paged_attention(*call.packed))


def of_ranges(cached, new, columns, tokens):
    """Return a mask, before it is reordered, of the ranges that each row sees."""
    mask = np.zeros((len(cached), columns + tokens), np.int32)
    for row, own, others in zip(mask, cached, new, strict=True):
        row[slice(*own)] = 1
        row[columns + others[0] : columns + others[1]] = 1
    return mask


RANGES = {
    "cached alone": ([(0, 100), (10, 90), (50, 51)], [(0, 0)] * 3),
    "new alone, out of order": ([(0, 0)] * 4, [(0, 9), (0, 200), (3, 4), (150, 200)]),
    "keys after their own": ([(5, 70)] * 6, [(2, 40)] * 6),
    "keys that do not meet": ([(0, 60), (0, 50), (7, 60)], [(4, 20), (5, 9), (0, 20)]),
    "a row with many of both": ([(3, 1900)], [(1, 200)]),
    "rows of many tiles": ([(0, 1000)] * 150, [(0, 1 + i % 7) for i in range(150)]),
    "a hole between sequences": ([(0, 40), (0, 0), (0, 40)], [(0, 1), (0, 0), (0, 3)]),
    "rows that end early": ([(0, 6000), (0, 200), (0, 6000)], [(0, 0)] * 3),
    "rows that begin late": ([(0, 6000), (100, 6000)], [(0, 0)] * 2),
    "many rows of which one begins early": ([(0, 6000), *[(5990, 6000)] * 80], [(0, 0)] * 81),
    "cached keys to different ones": ([(0, 60), (0, 50)], [(0, 20)] * 2),
    "new keys from different ones on": ([(0, 60)] * 2, [(0, 20), (5, 20)]),
    "more places than tokens": ([(0, 40)] * 20, [(10 * i, 200) for i in range(20)]),
    "neighbours with other keys": (
        [(64 * i, 64 * i + 40) for i in range(9)],
        [(20 * i, 20 * i + 1 + i) for i in range(9)],
    ),
}


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("name", RANGES)
def test_any_ranges(name, kv_heads):
    """Of cached and of new tokens one each, whatever rows they are."""
    cached, new = RANGES[name]
    heads, head_dim, size, columns, tokens = 2 * kv_heads, 16, 16, 6144, 200
    rng = np.random.default_rng(len(name))
    q = rng.uniform(-1, 1, (len(cached), heads, head_dim)).astype(np.float32)
    k, v = rng.uniform(-1, 1, (2, tokens, kv_heads, head_dim)).astype(np.float32)
    cache = rng.uniform(-1, 1, (2, 400, kv_heads, size, head_dim)).astype(np.float32)
    table = rng.permutation(400)[: columns // size]
    mask = of_ranges(cached, new, columns, tokens)
    order = column_order(512, size, columns)
    got = flash_attn_varlen_nkifunc(
        q.transpose(1, 2, 0)[None],
        k.transpose(1, 2, 0)[None],
        v.transpose(1, 0, 2)[None],
        cache,
        table,
        np.concatenate([mask[:, order], mask[:, columns:]], axis=1),
        LARGE_TILE_SZ=512,
        mixed_precision=False,
    )
    flat = cache[:, table].transpose(0, 1, 3, 2, 4).reshape(2, columns, kv_heads, head_dim)
    keys, values = (np.concatenate(x).astype(float) for x in ((flat[0], k), (flat[1], v)))
    for head in range(heads):
        scores = q[:, head].astype(float) @ keys[:, head // 2].T / np.sqrt(head_dim)
        weights = np.where(mask, np.exp(scores), 0)
        total = weights.sum(axis=1, keepdims=True)
        exact = weights @ values[:, head // 2] / np.where(total, total, 1)
        np.testing.assert_allclose(got[0, head], exact, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({1: np.zeros((1, 2, 16, 8))}, TypeError, "key must have the dtype of query, float32"),
        ({2: np.zeros((1, 2, 8, 16))}, TypeError, "value must have the dtype of query, float32"),
        ({3: np.zeros((2, 4, 2, 16, 16), int)}, TypeError, "kv_cache must be one of float16"),
        ({4: np.zeros(4)}, TypeError, "block_table must be of integers, got float64"),
        ({0: np.zeros((2, 4, 16, 8), np.float32)}, ValueError, r"query must be \[1, heads"),
        ({0: np.zeros((1, 4, 16, 8))}, TypeError, "query must be one of float16"),
        ({1: np.zeros((1, 2, 8, 8), np.float32)}, ValueError, r"key must be \[1, kv_heads, 16"),
        ({2: np.zeros((1, 2, 8, 8), np.float32)}, ValueError, r"value must be \[1, 2,"),
        ({3: np.zeros((2, 4, 3, 16, 16), np.float32)}, ValueError, r"kv_cache must be \[2, blocks"),
        ({4: np.zeros((4, 4), np.int32)}, ValueError, r"block_table must be \[active_blocks\]"),
        ({5: np.zeros((4, 4), np.int32)}, ValueError, "attn_mask must be"),
    ],
)
def test_messages(call, change, error, text):
    arguments = [change.get(i, x) for i, x in enumerate(call.arguments)]
    with pytest.raises(error, match=text):
        flash_attn_varlen_nkifunc(*arguments, **call.options)


@pytest.mark.parametrize(
    ("options", "text"),
    [({"n_kv_head": 3}, "n_kv_head must be key's 2"), ({"head_size": 8}, "head_size must be")],
)
def test_numbers_that_disagree(call, options, text):
    with pytest.raises(ValueError, match=text):
        flash_attn_varlen_nkifunc(*call.arguments, **call.options, **options)


def test_precision_is_mixed_or_not(call):
    options = call.options | {"mixed_precision": "no"}
    with pytest.raises(TypeError, match="mixed_precision must be True or False, got 'no'"):
        flash_attn_varlen_nkifunc(*call.arguments, **options)


def test_heads_that_do_not_divide(call):
    query, *rest = call.arguments
    with pytest.raises(ValueError, match="heads must be 1 to 128 times kv_heads, 2, got 3"):
        flash_attn_varlen_nkifunc(query[:, :3], *rest, **call.options)


def test_a_mask_of_something_else(call):
    *rest, mask = call.arguments
    with pytest.raises(TypeError, match="attn_mask must be of booleans or numbers, got complex"):
        flash_attn_varlen_nkifunc(*rest, mask.astype(complex), **call.options)


@pytest.mark.parametrize(
    ("size", "error", "text"),
    [
        (0, ValueError, "LARGE_TILE_SZ must be at least 1, got 0"),
        (512.0, TypeError, "LARGE_TILE_SZ must be an integer, got float"),
        (500, ValueError, "LARGE_TILE_SZ must be a multiple of block_size, 16, and of 128"),
        (64, ValueError, "LARGE_TILE_SZ must be a multiple of block_size, 16, and of 128"),
    ],
)
def test_sizes_of_a_large_tile(call, size, error, text):
    with pytest.raises(error, match=text):
        flash_attn_varlen_nkifunc(*call.arguments, LARGE_TILE_SZ=size)
    with pytest.raises(error, match=text):
        reorder_context_mask(call.arguments[5], size, 16)
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        reorder_context_mask(call.arguments[5], 512, 0)


def test_an_active_block_that_is_not_there(call):
    *rest, table, mask = call.arguments
    table = table.copy()
    table[0] = 10**6
    with pytest.raises(ValueError, match=r"block_table\[0\] must be from 0 to"):
        flash_attn_varlen_nkifunc(*rest, table, mask, **call.options)


# masks and tables


@pytest.mark.parametrize(("large", "block"), [(512, 1), (2048, 32), (8192, 256), (1024, 8)])
def test_reordered_columns_hold_the_tokens_that_they_should(large, block):
    rows, context = 3, 2 * large
    tokens = large // max(128, large // block)
    mask = np.arange(context + rows) + np.zeros((rows, 1), int)
    got = reorder_context_mask(mask, large, block)
    if tokens == 1:
        np.testing.assert_array_equal(got, mask)
        return
    for load, t, p in [
        (0, 0, 0),
        (0, 1, 5),
        (1, tokens - 1, 127),
        (context // tokens // 128 - 1, 0, 9),
    ]:
        assert got[0, load * 128 * tokens + t * 128 + p] == (load * 128 + p) * tokens + t
    np.testing.assert_array_equal(got[:, context:], mask[:, context:])


def test_reordering_refuses_other_shapes():
    with pytest.raises(ValueError, match=r"mask must be \[seq_q"):
        reorder_context_mask(np.zeros((4, 3)), 512, 32)
    with pytest.raises(ValueError, match="multiple of LARGE_TILE_SZ, 2048"):
        reorder_context_mask(np.zeros((4, 1004)), 2048, 32)


@pytest.mark.parametrize(
    ("tiles", "blocks"),
    [(1, 1), (13, 16), (17, 128), (35, 512), (128, 128), (130, 64), (280, 256), (315, 1)],
)
@pytest.mark.parametrize(("heads", "head"), [(1, 0), (3, 1)])
def test_block_tables(tiles, blocks, heads, head):
    """Exact, also for rows past 2**24."""
    ids = np.random.default_rng(0).integers(0, 100_000, tiles * blocks).astype(np.int32)
    ids[0] = 99_999
    tiling = max(1, 128 // blocks)
    table = load_block_tables(ids, tiles, blocks)
    groups = -(-tiles // 128)
    assert table.shape == (groups, 128, blocks)
    got = transform_block_tables_for_indirect_load(table, tiling, heads, head)
    assert got.dtype == np.int32
    assert got.shape == (blocks * tiling // 128, 128, groups * 128)
    for tile, block, piece in [(0, 0, 0), (tiles - 1, blocks - 1, tiling - 1), (tiles // 2, 0, 0)]:
        row = block * tiling + piece
        expected = (int(ids[tile * blocks + block]) * heads + head) * tiling + piece
        assert got[row // 128, row % 128, tile] == expected
    if groups * 128 > tiles:
        assert (got[0, :, tiles:] == head * tiling + np.arange(128)[:, None] % tiling).all()


def test_block_tables_of_no_tiles():
    table = load_block_tables(np.zeros(0, np.int32), 0, 128)
    assert transform_block_tables_for_indirect_load(table, 1, 3, 1).shape == (1, 128, 0)


def test_a_cache_without_blocks_is_packed():
    cache = np.zeros((0, 2, 4, 8), np.float16)
    assert pack_keys(cache).shape == unpack_keys(cache).shape == cache.shape
    new = np.zeros((1, 2, 8), np.float16)
    stored = np.stack([cache, cache]).astype(ml_dtypes.float8_e4m3)
    reshape_and_cache(new, new, stored, np.array([-1]), packed_keys=True)


def test_block_tables_refuse_other_shapes():
    with pytest.raises(ValueError, match=r"block_tables must be \[6\]"):
        load_block_tables(np.zeros(5, np.int32), 2, 3)
    with pytest.raises(ValueError, match=r"block_tables must be \[groups, 128"):
        transform_block_tables_for_indirect_load(np.zeros((1, 5, 2), np.int32), 1, 1, 0)
    with pytest.raises(ValueError, match="must be a multiple of 128"):
        transform_block_tables_for_indirect_load(np.zeros((1, 128, 3), np.int32), 2, 1, 0)
    with pytest.raises(ValueError, match=r"must be below 2\*\*31"):
        transform_block_tables_for_indirect_load(np.full((1, 128, 1), 2**30, np.int32), 128, 1, 0)
    table = np.zeros((1, 128, 128), np.int32)
    with pytest.raises(ValueError, match="head_id must be from 0 to 2, got 3"):
        transform_block_tables_for_indirect_load(table, 1, 3, 3)
    with pytest.raises(TypeError, match="head_id must be an integer, got str"):
        transform_block_tables_for_indirect_load(table, 1, 3, "0")
    with pytest.raises(TypeError, match="num_tiles must be an integer, got str"):
        load_block_tables(np.zeros(6, np.int32), "2", 3)
    with pytest.raises(ValueError, match="num_blocks_per_tile must be at least 1, got -3"):
        load_block_tables(np.zeros(6, np.int32), 2, -3)
    with pytest.raises(ValueError, match="num_head must be at least 1, got 0"):
        transform_block_tables_for_indirect_load(table, 1, 0, 0)
    with pytest.raises(ValueError, match="block_size_tiling_factor must be at least 1, got 0"):
        transform_block_tables_for_indirect_load(table, 0, 1, 0)
    for call, rest in (
        (load_block_tables, (2, 3)),
        (transform_block_tables_for_indirect_load, (1, 1, 0)),
    ):
        shape = (6,) if call is load_block_tables else (1, 128, 128)
        with pytest.raises(TypeError, match="block_tables must be of integers, got float64"):
            call(np.zeros(shape), *rest)


# the cache


@pytest.mark.parametrize(
    ("tokens", "heads", "dim", "blocks", "size"),
    [
        (32, 12, 64, 4, 128),
        (1, 12, 64, 4, 128),
        (64, 16, 96, 8, 256),
        (48, 32, 128, 16, 512),
        (1024, 8, 32, 32, 32),
        (16, 64, 256, 4, 64),
        (4, 2, 16, 2, 16),
        (1, 1, 8, 1, 8),
    ],
)
def test_reshape_and_cache(tokens, heads, dim, blocks, size):
    rng = np.random.default_rng(42)
    key, value = rng.standard_normal((2, tokens, heads, dim)).astype(np.float32)
    cache = np.full((2, blocks, heads, size, dim), 7, np.float32)
    slots = rng.permutation(blocks * size)[:tokens]
    slots[0] = -1 if tokens > 4 else slots[0]
    reshape_and_cache(key, value, cache, slots)
    flat = cache.transpose(0, 1, 3, 2, 4).reshape(2, -1, heads, dim)
    kept = slots >= 0
    np.testing.assert_array_equal(flat[0, slots[kept]], key[kept])
    np.testing.assert_array_equal(flat[1, slots[kept]], value[kept])
    untouched = np.setdiff1d(np.arange(blocks * size), slots[kept])
    assert (flat[:, untouched] == 7).all()


LARGEST = {
    ("float8_e4m3", "trn2"): 240.0,
    ("float8_e4m3", "trn3"): 240.0,
    ("float8_e4m3fn", "trn1"): 240.0,
    ("float8_e4m3fn", "trn2"): 240.0,
    ("float8_e4m3fn", "trn3"): 448.0,
    ("float8_e4m3fn", None): 240.0,
    ("float8_e5m2", "trn2"): 57344.0,
}


@pytest.mark.parametrize(("name", "target"), LARGEST)
def test_a_cache_in_fp8_ends_where_its_target_does(name, target):
    """Also the forms whose next number after the largest is NaN."""
    dtype, most = np.dtype(getattr(ml_dtypes, name)), LARGEST[name, target]
    cache = np.zeros((2, 1, 1, 1, 5), dtype)
    x = np.array([[[1e30, -1e30, np.inf, np.nan, 0.5]]], np.float32)
    reshape_and_cache(x, x, cache, np.array([0]), target=target)
    for half in cache:
        stored = half[0, 0, 0].astype(np.float32)
        np.testing.assert_array_equal(stored, [most, -most, most, np.nan, 0.5])
    if target != "trn3":
        # what engines up to trn2 read
        read = cache.view(ml_dtypes.float8_e4m3 if "e4m3" in name else dtype)
        assert np.isfinite(read[..., [0, 1, 2, 4]].astype(np.float32)).all()


def test_the_device_says_for_which_target_fp8_is_written(tmp_path, monkeypatch):
    x = np.full((1, 1, 1), 1e30, np.float32)

    def largest():
        cache = np.zeros((2, 1, 1, 1, 1), ml_dtypes.float8_e4m3fn)
        reshape_and_cache(x, x, cache, np.array([0]))
        return float(cache[0, 0, 0, 0, 0])

    product = tmp_path / "product_name"
    monkeypatch.setattr(targets, "PRODUCT", product)
    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE", raising=False)
    found = [largest()]
    for name in ("trn3.48xlarge\n", "trn2.3xlarge\n", "m7i.large\n"):
        product.write_text(name)
        found.append(largest())
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "gen4")
    assert [*found, largest()] == [240, 448, 240, 240, 448]


def test_the_cache_of_torch_changes_in_place():
    torch = pytest.importorskip("torch")
    cache = torch.zeros(2, 2, 1, 4, 8)
    ones = torch.ones(1, 1, 8)
    reshape_and_cache(ones, 2 * ones, cache, torch.tensor([5]))
    assert (cache[0, 1, 0, 1] == 1).all()
    assert (cache[1, 1, 0, 1] == 2).all()
    assert cache.sum() == 24


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"key": f(2, 8)}, ValueError, r"key must be \[tokens"),
        ({"key": np.zeros((2, 1, 8))}, TypeError, "key must be one of float16, bfloat16, float32"),
        ({"value": f(2, 1, 4)}, ValueError, "value must have the shape of key"),
        ({"value": np.zeros((2, 1, 8))}, TypeError, "value must have the dtype of key, float32"),
        ({"kv_cache": f(2, 4, 2, 4, 8)}, ValueError, "kv_cache must be"),
        ({"kv_cache": np.zeros((2, 4, 1, 4, 8), int)}, TypeError, "kv_cache must be one of float"),
        ({"kv_cache": f(2, 4, 1, 0, 8)}, ValueError, "block_size must be at least 1, got 0"),
        (
            {"kv_cache": np.broadcast_to(f(8), (2, 4, 1, 4, 8))},
            ValueError,
            "kv_cache must be writable, got a read-only array",
        ),
        ({"target": "trn9"}, ValueError, "target must be one of trn1, .*, got 'trn9'"),
        ({"target": 2}, TypeError, "target must be a string or None, got int"),
        ({"slot_mapping": np.zeros(3, int)}, ValueError, r"slot_mapping must be \[2\]"),
        ({"slot_mapping": np.zeros(2)}, TypeError, "slot_mapping must be of integers"),
        ({"slot_mapping": np.array([0, 16])}, ValueError, "slot_mapping must be below 16, got 16"),
        # as a signed number it would be -1, which is padding
        (
            {"slot_mapping": np.array([0, 2**64 - 1], np.uint64)},
            ValueError,
            "slot_mapping must be below 16, got 18446744073709551615",
        ),
    ],
)
def test_messages_of_the_cache(change, error, text):
    arguments = {
        "key": f(2, 1, 8),
        "value": f(2, 1, 8),
        "kv_cache": f(2, 4, 1, 4, 8),
        "slot_mapping": np.array([0, 1]),
    }
    with pytest.raises(error, match=text):
        reshape_and_cache(**arguments | change)


def test_reshape_and_cache_packs_keys():
    dtype, rng = np.dtype(ml_dtypes.float8_e4m3), np.random.default_rng(0)
    x, y = rng.standard_normal((2, 5, 2, 8)).astype(np.float32)
    slots = np.array([3, 8, -1, 13, 2])
    plain, packed = (np.zeros((2, 4, 2, 4, 8), dtype) for _ in range(2))
    reshape_and_cache(x, y, plain, slots)
    reshape_and_cache(x, y, packed, slots, packed_keys=True)
    np.testing.assert_array_equal(unpack_keys(packed[0]), plain[0])
    np.testing.assert_array_equal(packed[1], plain[1])
    with pytest.raises(ValueError, match="kv_cache must be contiguous for packed_keys"):
        reshape_and_cache(x, y, packed[..., ::2, :], slots // 4, packed_keys=True)
