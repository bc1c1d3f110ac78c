"""Packed sequences: mixtures, padding, pages, splits."""

from __future__ import annotations

import pytest
import torch
from blocksparse_attn import blocksparse_attn_func, blocksparse_attn_varlen_func

from .._linked.budget import DTYPES, assert_same, offsets
from .._numerics import Packed, check, make_packed, paged, pairs, run

# prefill, a chunk, decode, several drafts, nothing
MIXTURES = [
    Packed((33, 1, 9), (33, 40, 20), 2, 1, 16),
    Packed((0, 17, 3), (5, 0, 35), 2, 2, 16, padding=3),
    Packed((1, 1, 1), (40, 1, 17), 4, 1, 24, padding=2),
    Packed((8, 9), (50, 50), 3, 1, 16, 24),
    Packed((), (), 2, 1, 16, padding=4),
]
LARGE = [
    Packed((1000, 1, 300, 1, 8), (1000, 4000, 2000, 17, 900), 8, 2, 128),
    Packed((1,) * 40, tuple(range(100, 4100, 100)), 8, 2, 128),
    Packed((1, 5, 8, 2), (3000, 5, 1000, 200), 16, 1, 64, padding=7),
    Packed((500, 0, 129, 128), (500, 30, 257, 4096), 6, 2, 80, padding=3),
]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", MIXTURES, ids=str)
def test_matches_reference(shape, causal, device):
    check(make_packed(shape, torch.float32, device, causal=causal))


@pytest.mark.parametrize("shape", MIXTURES[:2], ids=str)
def test_blocks_that_are_not_square(shape, device):
    check(make_packed(shape, torch.float32, device, "local", (64, 16), shared=True, spare=1))


@pytest.mark.device
@pytest.mark.parametrize(
    ("shape", "block", "dtype", "shared"),
    pairs(LARGE, [(64, 64), (128, 32), (16, 16)], DTYPES, [False, True]),
    ids=str,
)
def test_matches_reference_at_length(shape, block, shared, dtype, device):
    check(make_packed(shape, dtype, device, "local", block, shared=shared))


@pytest.mark.eager
@pytest.mark.parametrize("shape", MIXTURES[:4], ids=str)
def test_packed_is_bitwise_the_fixed_form(shape, device):
    case = make_packed(shape, torch.float32, device)
    out, lse = case(num_splits=1)
    q_start = k_start = 0
    for seqlen_q, seqlen_k in zip(shape.lengths_q, shape.lengths_k, strict=True):
        rows, keys = slice(q_start, q_start + seqlen_q), slice(k_start, k_start + seqlen_k)
        q_start, k_start = rows.stop, keys.stop
        alone = blocksparse_attn_func(
            case.inputs["q"][None, rows],
            case.inputs["k"][None, keys],
            case.inputs["v"][None, keys],
            case.options["layout"],
            num_splits=1,
            return_lse=True,
        )
        assert torch.equal(out[rows], alone[0][0])
        assert torch.equal(lse[:, rows], alone[1][0])


@pytest.mark.eager
@pytest.mark.parametrize("front", [0, 3])
@pytest.mark.parametrize("lengths", [(20, 1), (1, 2), (2,)], ids=str)
def test_padding_gives_nothing(lengths, front, device):
    case = make_packed(Packed(lengths, lengths, 2, 1, 16, padding=9), torch.float32, device)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        case.options[name] = case.options[name] + front
    got = run(case)
    used = torch.zeros(got["out"].shape[0], dtype=torch.bool)
    used[front : front + sum(lengths)] = True
    assert not got["out"][~used].any()
    assert (got["lse"][:, ~used] == float("-inf")).all()
    assert not got["dq"][~used].any()
    assert not got["dk"][~used].any()
    check(case)


def test_padding_of_more_heads_than_a_tile_holds(device):
    """Of one group of keys, in a call of short sequences alone."""
    case = make_packed(Packed((1, 2), (1, 2), 17, 1, 16, padding=3), torch.float32, device)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        case.options[name] = case.options[name] + 2
    got = run(case, grad=False)
    for rows in (slice(0, 2), slice(5, None)):
        assert got["out"][rows].eq(0).all()
        assert got["lse"][:, rows].eq(float("-inf")).all()


@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_pages(page_size, index, device):
    case = make_packed(MIXTURES[0], torch.float32, device, "local")
    want = run(case, grad=False)
    got = paged(case, page_size)
    got.options["block_table"] = got.options["block_table"].to(index)
    assert_same(run(got, grad=False), want)


@pytest.mark.eager
def test_pages_match_reference(device):
    case = make_packed(Packed((9, 1), (21, 33), 4, 2, 16), torch.float16, device, "local")
    check(paged(case, 16), grad=False)


@pytest.mark.device
@pytest.mark.parametrize(
    ("shape", "page_size", "dtype"), pairs(LARGE, [16, 48, 256], DTYPES), ids=str
)
def test_pages_at_length(shape, page_size, dtype, device):
    case = make_packed(shape, dtype, device, "local", (64, 64))
    assert_same(run(paged(case, page_size), grad=False), run(case, grad=False))


@pytest.mark.parametrize("splits", [2, 3, 7])
@pytest.mark.parametrize("shared", [False, True], ids=["per_head", "shared"])
def test_splits_of_a_decode(splits, shared, device):
    shape = Packed((1, 3, 0), (150, 40, 9), 2, 1, 16, 24, padding=2)
    case = make_packed(shape, torch.float32, device, "all" if shared else "local", shared=shared)
    check(case.with_options(num_splits=splits), grad=False)


def test_splits_of_rows_that_see_no_key(device):
    shape = Packed((1, 3), (40, 17), 2, 1, 16)
    case = make_packed(shape, torch.float32, device, "none", num_splits=2)
    assert check(case, grad=False)["out"].eq(0).all()


@pytest.mark.device
@pytest.mark.parametrize(("shape", "splits", "dtype"), pairs(LARGE, [1, 2, 5, 64], DTYPES), ids=str)
def test_splits_at_length(shape, splits, dtype, device):
    case = make_packed(shape, dtype, device, "local", (64, 64))
    check(case.with_options(num_splits=splits), grad=False)


def test_more_sequences_than_one_search_step(device):
    lengths = (0,) * 127 + (2, 0, 17)
    case = make_packed(Packed(lengths, lengths, 1, 1, 16), torch.float32, device)
    check(case, grad=False)


@pytest.mark.eager
def test_bounds_of_lengths_may_be_generous(device):
    case = make_packed(MIXTURES[0], torch.float32, device, spare=8)
    got = case(max_seqlen_q=100, max_seqlen_k=150)
    for mine, want in zip(got, case(), strict=True):
        assert torch.equal(mine, want)


@pytest.mark.eager
def test_a_sequence_of_another_batch_changes_no_bit(device):
    shape = Packed((20, 1, 5), (33, 40, 20), 2, 1, 16)
    case = make_packed(shape, torch.float32, device, spare=2, num_splits=2)
    out, lse = case()
    one = blocksparse_attn_varlen_func(
        case.inputs["q"][20:21],
        case.inputs["k"][33:73],
        case.inputs["v"][33:73],
        offsets([1], device),
        offsets([40], device),
        1,
        40,
        case.options["layout"],
        num_splits=2,
        return_lse=True,
    )
    assert torch.equal(one[0], out[20:21])
    assert torch.equal(one[1], lse[:, 20:21])
