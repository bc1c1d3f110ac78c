"""Trees over new tokens: against explicit masks in float64, and what they leave alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from prefix_prefill import paged_attention_reference, paged_attn_func, validate_paged
from torch import Tensor

from .._linked.budget import DTYPES, assert_no_worse_than_eager, assert_same
from .._numerics import NAN, PACKED, Case, Problem, make_case
from ._tree import rows_of, trees

# sequences of both tiles, trees that cross tiles of keys, one of as many tokens as there are bits
TREES = Problem(((9, 40), (1, 21), (20, 20), (3, 9)), 4, 2, 16, page=7, padding=2)
WIDE = Problem(((5, 9), (64, 77)), 4, 2, 16, page=7)


def seen_by_hand(tree: Tensor, queries: int, keys: int, start: int, left: int) -> Tensor:
    """Return what each query sees, one bit after the other."""
    seen = torch.zeros(queries, keys, dtype=torch.bool)
    for i in range(queries):
        for j in range(keys):
            new = j - (keys - queries)
            bit = new < 0 or bool(int(tree[start + i]) >> new & 1)
            seen[i, j] = bit and (left < 0 or j >= i + keys - queries - left)
    return seen.to(tree.device)


def by_hand(problem: Problem, case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """Compute attention under explicit masks, from keys that are gathered one by one."""
    t = {name: x.to(dtype) for name, x in case.inputs.items()}
    left = case.options.get("window_size", (-1, -1))[0]
    softcap = case.options.get("softcap", 0.0)
    out = torch.zeros_like(t["q"])
    lse = t["q"].new_full((problem.heads_q, problem.tokens), -math.inf)
    group, start = problem.heads_q // problem.heads_k, 0
    for b, (queries, keys) in enumerate(problem.lengths):
        rows = slice(start, start + queries)
        cached = problem.cached(b)
        both = []
        for name in ("k", "v"):
            cache = t[f"{name}_cache"]
            if problem.layout == PACKED:
                order = (0, 3, 1, 2, 4) if name == "k" else (0, 3, 1, 2)
                cache = cache.permute(order)
                cache = cache.flatten(3) if name == "k" else cache
            index = torch.arange(cached, device=cache.device)
            pages = case.options["block_table"][b].long()[index // problem.page]
            x = cache[pages, index % problem.page]
            if problem.dense:
                x = torch.cat([x, t[name][rows]])
            both.append(x)
        seen = seen_by_hand(case.options["tree_mask"], queries, keys, start, left)
        unseen = ~seen.any(0)[:, None, None]
        k, v = (x.masked_fill(unseen, 0.0).repeat_interleave(group, 1) for x in both)
        scores = torch.einsum("ihd,jhd->hij", t["q"][rows], k) * problem.head_dim**-0.5
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~seen, -math.inf)
        if "sinks" in t:
            sink = t["sinks"][:, None, None].expand(-1, queries, 1)
            scores = torch.cat([scores, sink], -1)
            v = torch.cat([v, torch.zeros_like(v[:1])])
        total = scores.logsumexp(-1)
        weights = torch.exp(scores - total.nan_to_num(neginf=0.0)[..., None])
        out[rows], lse[:, rows] = torch.einsum("hij,jhd->ihd", weights, v), total
        start += queries
    return {"out": out, "lse": lse}


def check(problem: Problem, case: Case) -> dict[str, Tensor]:
    """Hold a call to explicit masks."""
    got, want = case(), by_hand(problem, case, torch.float64)
    eager = by_hand(problem, case, torch.float32)
    eager["out"] = eager["out"].to(got["out"].dtype)
    for name, value in got.items():
        assert_no_worse_than_eager(name, value, eager[name], want[name])
    return got


def make(problem: Problem, dtype: torch.dtype, device: Any, *features: str, seed: int = 0) -> Case:
    case = make_case(problem, dtype, device, features, seed)
    rows = rows_of(trees(problem, seed), problem.padding, device)
    return case.with_options(tree_mask=rows)


@pytest.mark.eager
@pytest.mark.parametrize(
    ("feature", "dense"),
    [(None, False), ("window", False), ("window", True), ("sinks", True), ("split", True)],
)
def test_matches_explicit_masks(feature, dense, device):
    problem = TREES._replace(dense=dense)
    check(problem, make(problem, torch.float32, device, *([feature] if feature else [])))


@pytest.mark.eager
def test_as_many_tokens_as_bits(device):
    check(WIDE, make(WIDE, torch.float32, device, "window"))


@pytest.mark.eager
@pytest.mark.parametrize("layout", ["nhd", PACKED])
def test_half_precision_and_layouts(layout, device):
    problem = TREES._replace(layout=layout, lengths=TREES.lengths[:3])
    check(problem, make(problem, torch.bfloat16, device))


@pytest.mark.eager
def test_a_chain_is_the_causal_mask(device):
    problem = TREES._replace(dense=True)
    case = make_case(problem, torch.float32, device, ("sinks",))
    rows = rows_of([[*range(-1, n - 1)] for n in problem.queries], problem.padding, device)
    want = case()
    for name, value in case(tree_mask=rows).items():
        torch.testing.assert_close(value, want[name], rtol=1e-5, atol=1e-5)


@pytest.mark.eager
def test_later_tokens_may_be_seen_and_own_ones_not(device):
    """The bits say it all: also of what the diagonal hides, and of rows that see nothing."""
    problem = Problem(((4, 4), (5, 12)), 2, 1, 16, page=5)
    case = make_case(problem, torch.float32, device)
    rows = torch.tensor([8, 0, 9, 7, 31, 16, 0, 2, 1], device=device)
    got = check(problem, case.with_options(tree_mask=rows))
    assert not got["out"][1].any()
    assert (got["lse"][:, 1] == -math.inf).all()


@pytest.mark.eager
def test_more_new_tokens_than_keys(device):
    """The first keys of the sequence do not exist; bits count new tokens all the same."""
    problem = Problem(((20, 17), (3, 2)), 2, 1, 16)
    check(problem, make(problem, torch.float32, device))


@pytest.mark.eager
@pytest.mark.parametrize("dense", [False, True])
def test_a_token_that_nobody_sees_may_hold_anything(dense, device):
    problem = Problem(((20, 45), (3, 9)), 4, 2, 16, page=7, dense=dense)
    case = make(problem, torch.float32, device)
    # no token sees number 2 and 11 of the first sequence
    rows = case.options["tree_mask"] & ~(1 << 2 | 1 << 11)
    case = case.with_options(tree_mask=rows)
    want = case()
    inputs = {}
    for name in ("k", "v"):
        if dense:
            inputs[name] = case.inputs[name].clone()
            inputs[name][[2, 11]] = NAN
        else:
            inputs[f"{name}_cache"] = case.inputs[f"{name}_cache"].clone()
            for key in (25 + 2, 25 + 11):
                page = case.options["block_table"][0, key // 7]
                inputs[f"{name}_cache"][page, key % 7] = math.inf
    assert_same(case.with_inputs(**inputs)(), want)


@pytest.mark.eager
def test_a_token_ahead_of_the_windows_of_all_that_see_it(device):
    problem = Problem(((20, 45),), 2, 1, 16, page=7)
    case = make_case(problem, torch.float32, device)
    # number 4 is on the path of those from 10 on, whose windows begin behind it
    rows = torch.tensor([1 << i | (1 << 4 if i >= 10 else 0) for i in range(20)], device=device)
    rows[4] = 1
    case = case.with_options(tree_mask=rows, window_size=(5, 0))
    want = case()
    caches = {name: case.inputs[name].clone() for name in ("k_cache", "v_cache")}
    page, slot = case.options["block_table"][0, 29 // 7], 29 % 7
    for cache in caches.values():
        cache[page, slot] = NAN
    assert_same(case.with_inputs(**caches)(), want)


@pytest.mark.eager
def test_a_sequence_does_not_depend_on_its_batch(device):
    problem = WIDE
    case = make(problem, torch.bfloat16, device).with_options(num_splits=1)
    want = case()
    start, end = 5, 69  # of the second
    options = {
        "block_table": case.options["block_table"][1:],
        "cu_seqlens_q": torch.tensor([0, 64], dtype=torch.int32, device=device),
        "seqlens_k": case.options["seqlens_k"][1:],
        "tree_mask": case.options["tree_mask"].repeat_interleave(2)[::2][start:end],
    }
    got = case.with_inputs(q=case.inputs["q"][start:end]).with_options(**options)()
    assert torch.equal(got["out"], want["out"][start:end])
    assert torch.equal(got["lse"], want["lse"][:, start:end])


@pytest.mark.eager
def test_the_reference_takes_trees(device):
    case = make(TREES, torch.float32, device)
    inputs = {name: x.double() for name, x in case.inputs.items()}
    out, lse = paged_attention_reference(**inputs, **case.options, return_lse=True)
    want = by_hand(TREES, case, torch.float64)
    torch.testing.assert_close(out, want["out"])
    torch.testing.assert_close(lse, want["lse"])


@pytest.mark.eager
@pytest.mark.parametrize("bit", [9, 63])
def test_bits_beyond_a_sequence_are_named(bit, device):
    case = make(TREES, torch.float32, "cpu")
    rows = case.options["tree_mask"].clone()
    rows[4] |= 1 << bit if bit < 63 else -(1 << 63)
    wrong = {**case.inputs, **case.options, "tree_mask": rows}
    message = rf"tree_mask\[4\] must have bits below 9, the new tokens of sequence 0, got bit {bit}"
    with pytest.raises(ValueError, match=message):
        paged_attn_func(**wrong)
    on_device = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in wrong.items()}
    with pytest.raises(ValueError, match=message):
        validate_paged(**on_device)
    validate_paged(**{**on_device, "tree_mask": case.options["tree_mask"].to(device)})


def test_more_tokens_than_bits():
    problem = Problem(((65, 70),), 2, 1, 16)
    case = make_case(problem, torch.float32, "cpu").with_options(max_seqlen_q=64)
    rows = torch.ones(65, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"cu_seqlens_q\[1\] must be at most max_seqlen_q, 64"):
        case(tree_mask=rows)
    for _ in range(2):  # of a form that is known, too
        with pytest.raises(ValueError, match="max_seqlen_q must be at most 64, the bits of tree_m"):
            case(tree_mask=rows, max_seqlen_q=65)


@pytest.mark.device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("heads", [(32, 8, 128), (16, 16, 64), (8, 1, 256)])
def test_large(heads, dense, dtype, device):
    lengths = ((64, 3000), (1, 5000), (7, 1500), (64, 64), (16, 900))
    problem = Problem(lengths, *heads, dense=dense)
    for features in ((), ("window",), ("sinks", "split")):
        check(problem, make(problem, dtype, device, *features))


@pytest.mark.device
def test_a_graph_replays_with_another_tree(device):
    problem = Problem(((16, 300), (16, 40)), 8, 2, 64)
    static = make(problem, torch.bfloat16, device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        static()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = static()
    static.options["tree_mask"].copy_(rows_of(trees(problem, 7), 0, device))
    graph.replay()
    assert_same(results, static())
