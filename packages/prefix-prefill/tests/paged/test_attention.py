"""Results against the float64 reference, on a GPU or in the interpreter."""

from __future__ import annotations

import itertools

import pytest
import torch
from attn_common import detect, fp8_dtype

from .._linked.budget import DTYPES, assert_same
from .._numerics import (
    DENSE_SMALL,
    FEATURES,
    LARGE,
    MEDIUM,
    MEDIUM_DENSE,
    PACKED,
    PACKED_SMALL,
    SMALL,
    Problem,
    check,
    compatible,
    make_case,
    run,
)

PAIRS = [pair for pair in itertools.combinations(FEATURES, 2) if compatible(pair)]


@pytest.mark.parametrize("problem", [*SMALL, *PACKED_SMALL, *DENSE_SMALL], ids=str)
def test_matches_reference(problem, device):
    check(make_case(problem, torch.float32, device))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("problem", [MEDIUM, DENSE_SMALL[2]], ids=str)
def test_half_precision(problem, dtype, device):
    check(make_case(problem, dtype, device))


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("problem", [MEDIUM, MEDIUM_DENSE], ids=["cached", "dense"])
def test_features(problem, feature, device):
    check(make_case(problem, torch.float32, device, [feature]))


# a third of the pairs in each form of the keys; a GPU tries all
@pytest.mark.parametrize("number", range(0, len(PAIRS), 3), ids=lambda i: "+".join(PAIRS[i]))
def test_pairs_of_features(number, device):
    problem = MEDIUM._replace(lengths=((9, 20), (1, 19)))
    check(make_case(problem, torch.float32, device, PAIRS[number]))


@pytest.mark.parametrize("number", range(1, len(PAIRS), 3), ids=lambda i: "+".join(PAIRS[i]))
def test_pairs_of_features_with_new_keys(number, device):
    problem = MEDIUM_DENSE._replace(lengths=((9, 20), (1, 19)))
    check(make_case(problem, torch.float32, device, PAIRS[number]))


@pytest.mark.device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("features", [(), ("window",), ("softcap", "alibi", "sinks")], ids=str)
@pytest.mark.parametrize("problem", LARGE, ids=str)
def test_large(problem, features, dtype, device):
    check(make_case(problem, dtype, device, features))


# every pair in every dtype and in every form of the keys, but not in all combinations of the two:
# each of them is a build of its own, and building takes the time
@pytest.mark.device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("number", range(len(PAIRS)), ids=lambda i: "+".join(PAIRS[i]))
def test_all_pairs(number, dtype, device):
    forms = (MEDIUM, MEDIUM_DENSE, PACKED_SMALL[0])
    problem = forms[(number + DTYPES.index(dtype)) % len(forms)]
    check(make_case(problem, dtype, device, PAIRS[number]))


# windows that begin, and end, inside a tile, on its edge, and one beside it
@pytest.mark.parametrize("left", [15, 16, 17, 33, 40])
def test_windows_at_tile_edges(left, device):
    problem = Problem(((20, 70), (1, 49)), 2, 1, 16, page=16)
    check(make_case(problem, torch.float32, device).with_options(window_size=(left, 0)))


@pytest.mark.parametrize("context", [15, 16, 17])
def test_contexts_at_tile_edges(context, device):
    problem = Problem(((17, 17 + context), (1, 1 + context)), 2, 1, 16, page=16, dense=True)
    check(make_case(problem, torch.float32, device))


@pytest.mark.parametrize("page", [1, 2, 15, 16, 17, 32, 48, 1040])
def test_page_sizes(page, device):
    problem = Problem(((5, 37),), 2, 1, 16, page=page)
    want = run(make_case(problem._replace(page=64), torch.float32, device, ["unsplit"]))
    got = check(make_case(problem, torch.float32, device, ["unsplit"]))
    # pages are a matter of where keys lie: not one bit of the result
    assert_same(got, want)


# slots of a page that follow each other in a tile: none, some, all
@pytest.mark.parametrize("page", [1, 4, 8, 16, 24, 32])
@pytest.mark.parametrize("widths", [(16, None), (40, 72)], ids=str)
def test_a_packed_cache_is_read_as_it_lies(page, widths, device):
    head_dim, head_dim_v = widths
    problem = Problem(((1, 70), (1, 5), (2, 45)), 4, 1, head_dim, page, PACKED)
    problem = problem._replace(head_dim_v=head_dim_v)
    check(make_case(problem, torch.float16, device))
    check(make_case(problem, torch.bfloat16, device, ["window", "split"]))


WIDE = [
    (Problem(((5, 40), (1, 33)), 2, 1, 512, page=16), torch.bfloat16, None, ("window", "sinks")),
    (Problem(((17, 20), (1, 17)), 2, 1, 264, page=7, dense=True), torch.float16, None, ("split",)),
    (Problem(((3, 20), (1, 17)), 2, 1, 320, layout=PACKED), torch.float32, None, ("softcap",)),
    (Problem(((18, 20), (1, 17)), 2, 1, 384), torch.bfloat16, torch.float8_e4m3fn, ()),
]


@pytest.mark.eager
@pytest.mark.parametrize(("problem", "dtype", "cache", "features"), WIDE, ids=str)
def test_head_dims_above_256(problem, dtype, cache, features, device):
    if cache is not None:
        platform = detect(device)
        if not platform.supports_fp8:
            pytest.skip(f"{platform} has no FP8")
        cache = getattr(torch, fp8_dtype(platform))
    check(make_case(problem, dtype, device, features, cache_dtype=cache))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_page_numbers_of_both_widths(index_dtype, device):
    case = make_case(MEDIUM, torch.float32, device)
    table = case.options["block_table"].to(index_dtype)
    assert_same(run(case.with_options(block_table=table)), run(case))


@pytest.mark.parametrize("queries", [3, 4, 5, 8, 9])
def test_queries_at_the_edge_of_the_short_tile(queries, device):
    problem = Problem(((queries, 30), (queries, queries)), 4, 1, 16)
    check(make_case(problem, torch.float32, device))


@pytest.mark.eager
@pytest.mark.parametrize("magnitude", [1e5, -1e5])
def test_extreme_logits(magnitude, device):
    case = make_case(MEDIUM_DENSE, torch.float32, device)
    case = case.with_options(softmax_scale=magnitude)
    got = check(case)
    assert got["out"].isfinite().all()
    assert got["lse"].isfinite().all()


# scores below any big negative number that could stand for "hidden"
def test_a_hidden_key_is_hidden_from_very_negative_scores(device):
    problem = Problem(((5, 40),), 2, 1, 16, dense=False)
    case = make_case(problem, torch.float32, device, ["window"])
    q, k = case.inputs["q"].abs() + 1, -case.inputs["k_cache"].abs() - 1
    check(case.with_inputs(q=q * 30, k_cache=k * 30).with_options(softmax_scale=10.0))


@pytest.mark.eager
@pytest.mark.parametrize("layout", ["nhd", PACKED])
def test_out_is_written_where_it_is_given(layout, device):
    case = make_case(MEDIUM._replace(layout=layout), torch.float32, device)
    want = run(case)["out"]
    frame = torch.full((want.shape[0] + 2, want.shape[1], want.shape[2] * 2), 7.0, device=device)
    out = frame[1:-1, :, ::2]
    got = case(out=out)["out"]
    assert got is out
    assert torch.equal(out, want)
    assert (frame[:, :, 1::2] == 7.0).all()
    assert (frame[[0, -1]] == 7.0).all()


@pytest.mark.eager
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_out_may_be_of_another_dtype(dtype, device):
    case = make_case(MEDIUM, torch.float16, device)
    out = torch.empty(case.inputs["q"].shape, dtype=dtype, device=device)
    want = run(case)["out"].float()
    torch.testing.assert_close(case(out=out)["out"].float(), want, rtol=2e-3, atol=2e-3)
