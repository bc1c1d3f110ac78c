"""What must not be read may hold anything, and what is returned is all written."""

from __future__ import annotations

import pytest
import torch
from blocksparse_attn import BlockSparseLayout
from blocksparse_attn._attention.reference import visible_keys

from .._linked.budget import assert_same
from .._linked.fences import run_fenced
from .._linked.tiers import INTERPRETED
from .._linked.views import VIEWS
from .._numerics import Packed, Shape, assert_alike, make_case, make_packed, paged, run

POISON = [float("nan"), float("-inf")]
poisons = pytest.mark.parametrize("poison", POISON, ids=str)


def poisoned(case, name, rows, poison):
    t = case.inputs[name].clone()
    t[(slice(None), rows) if t.ndim == 4 else rows] = poison
    return case.with_inputs(**{name: t})


def unseen_by_all(case, seqlen_q, seqlen_k):
    """Keys that no query of any head sees."""
    layout = case.options["layout"]
    causal = case.options.get("causal", True)
    visible = visible_keys(layout.to_dense(), layout.block_size, seqlen_q, seqlen_k, causal)
    return ~visible.flatten(0, 1).any(0)


@pytest.mark.eager
def test_empty_tensors_start_as_nan():
    assert torch.empty(5).isnan().all()


# a wide key block that only the first of a tile's narrow rows of blocks keeps, and the like
TRAPS = {
    (16, 16): [[1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0], [1, 0, 0, 1]],
    (16, 64): [[1], [0], [0], [0]],
    (16, 32): [[1, 0], [0, 0], [0, 1], [0, 0]],
    (64, 16): [[0, 1, 0, 0]],
    (32, 16): [[1, 1, 0, 0], [0, 0, 0, 0]],
}


@poisons
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("seqlens", [(64, 64), (50, 50), (20, 60), (3, 58)], ids=str)
@pytest.mark.parametrize("block", TRAPS, ids=str)
def test_keys_that_nobody_sees(block, seqlens, causal, poison, device):
    layout = BlockSparseLayout.from_dense(torch.tensor(TRAPS[block], dtype=torch.bool), block)
    case = make_case(Shape(1, *seqlens, 1, 1, 16), torch.float32, device, causal=causal)
    case = case.with_options(layout=layout.to(device))
    unseen = unseen_by_all(case, *seqlens)
    # blocks of 16 x 64 and 16 x 32 have keys that only a diagonal hides
    assert unseen.any() or (not causal and block[1] > block[0])
    want = run(case)
    assert not want["dk"][:, unseen].any()
    bad = poisoned(poisoned(case, "k", unseen, poison), "v", unseen, poison)
    assert_same(run(bad), want)


@poisons
@pytest.mark.parametrize("heads", [(2, 1), (3, 1)], ids=str)
@pytest.mark.parametrize("seqlen_q", [2, 33])
def test_keys_that_no_head_sees(seqlen_q, heads, poison, device):
    case = make_case(Shape(1, seqlen_q, 48, *heads, 16), torch.float32, device)
    kept = torch.zeros(heads[0], 3, 3, dtype=torch.bool)
    kept[0, 2, 0] = kept[1, 2, 2] = kept[1, 1, 1] = True
    case = case.with_options(layout=BlockSparseLayout.from_dense(kept, 16).to(device))
    unseen = unseen_by_all(case, seqlen_q, 48)
    bad = poisoned(poisoned(case, "k", unseen, poison), "v", unseen, poison)
    assert_same(run(bad), run(case))


@pytest.mark.eager
@poisons
def test_padding_after_the_last_sequence(poison, device):
    shape = Packed((18, 5), (33, 20), 2, 1, 16, padding=4)
    bad = case = make_packed(shape, torch.float32, device)
    for name, rows in (("q", slice(23, None)), ("k", slice(53, None)), ("v", slice(53, None))):
        bad = poisoned(bad, name, rows, poison)
    assert_same(run(bad), run(case))


@poisons
def test_other_sequences_of_the_batch(poison, device):
    case = make_packed(Packed((18, 7, 5), (33, 9, 20), 2, 1, 16), torch.float32, device, "all")
    want = run(case)
    bad = case
    for name, rows in (("q", slice(18, 25)), ("k", slice(33, 42)), ("v", slice(33, 42))):
        bad = poisoned(bad, name, rows, poison)
    got = run(bad)
    for name, (begin, end) in {"out": (18, 25), "dq": (18, 25), "dk": (33, 42)}.items():
        for rows in (slice(0, begin), slice(end, None)):
            assert torch.equal(got[name][rows], want[name][rows]), name
    assert got["out"][18:25].isnan().any()


@pytest.mark.parametrize("shape", [Shape(2, 17, 20, 2, 1, 24), Shape(1, 3, 7, 1, 1, 1)], ids=str)
def test_memory_around_the_inputs(shape, device):
    """Every input is a window into NaN: past its rows, heads, and head dimension."""
    case = make_case(shape, torch.float32, device)
    inside = {name: VIEWS["inside"](t) for name, t in case.inputs.items()}
    assert_same(run(case.with_inputs(**inside)), run(case))


@pytest.mark.eager
@pytest.mark.parametrize("pattern", ["none", "random"])
@pytest.mark.parametrize("lengths", [(40, 17), (5, 0), (17, 0), (0, 17)], ids=str)
def test_rows_without_a_key_are_written(lengths, pattern, device):
    case = make_case(Shape(2, *lengths, 2, 1, 16), torch.float32, device, pattern)
    for name, value in run(case).items():
        assert not value.isnan().any(), name


def with_empty_rows(kind, device):
    """Rows that see nothing, in one tile, or in one block, with rows that do."""
    case = make_case(Shape(1, 40, 33, 2, 1, 16), torch.float32, device)
    if kind == "between":
        kept, block = torch.ones(2, 3, 3, dtype=torch.bool), 16
        kept[:, 1] = False
    else:  # above the first key of the one block that is kept
        kept, block = torch.tensor([[[False, True, False]]]), (64, 16)
    return case.with_options(layout=BlockSparseLayout.from_dense(kept, block).to(device))


@pytest.mark.eager
@pytest.mark.parametrize("what", ["dout", "dlse"])
@pytest.mark.parametrize("kind", ["between", "above"])
def test_gradients_that_arrive_at_rows_without_keys(kind, what, device):
    """Merging of LSEs sends NaN there by itself: the derivative of inf - inf."""
    case = with_empty_rows(kind, device)
    leaves = [case.inputs[name].clone().requires_grad_() for name in "qkv"]
    out, lse = case.function(*leaves, **case.options, return_lse=True)
    empty = lse == float("-inf")
    assert empty.any()
    dout, dlse = torch.ones_like(out), torch.ones_like(lse)
    want = torch.autograd.grad((out, lse), leaves, (dout, dlse), retain_graph=True)
    if what == "dout":
        dout[empty.transpose(1, 2)] = float("nan")
    else:
        dlse[empty] = float("nan")
    got = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g, w)


@pytest.mark.eager
@pytest.mark.parametrize("kind", ["between", "above"])
def test_queries_that_see_nothing_may_be_nan(kind, device):
    case = with_empty_rows(kind, device)
    want = run(case)
    q = case.inputs["q"].clone()
    q[(want["lse"] == float("-inf")).transpose(1, 2)] = float("nan")
    assert_same(run(case.with_inputs(q=q)), want)


@pytest.mark.parametrize("page_size", [3, 16])
def test_unused_slots_of_pages(page_size, device):
    """``paged`` leaves NaN in every slot that holds no key, and numbers of no page in the table."""
    case = make_packed(Packed((1, 9), (19, 40), 2, 1, 16), torch.float32, device, "all")
    assert_same(run(paged(case, page_size), grad=False), run(case, grad=False))


@poisons
def test_pages_that_nobody_sees(poison, device):
    case = make_packed(Packed((1, 4), (48, 64), 1, 1, 16), torch.float32, device, "local", (16, 16))
    kept = torch.eye(4, dtype=torch.bool)
    case = case.with_options(layout=BlockSparseLayout.from_dense(kept, 16).to(device))
    want = run(case, grad=False)
    bad = poisoned(poisoned(case, "k", slice(0, 32), poison), "v", slice(0, 32), poison)
    assert_same(run(paged(bad, 16), grad=False), want)


@pytest.mark.skipif(not INTERPRETED, reason="needs memory that faults on a CPU")
def test_no_read_beyond_a_tensor():
    code = """
import torch
from blocksparse_attn import BlockSparseLayout, blocksparse_attn_func, blocksparse_attn_varlen_func
kept = torch.rand(2, 3, 3, generator=torch.Generator().manual_seed(0)) < 0.7
layout = BlockSparseLayout.from_dense(kept | torch.eye(3, dtype=torch.bool), 16)
def attend(function, lengths, d, *places, **options):
    tokens_q, tokens_k = lengths
    inputs = [torch.randn(*n, d) for n in ((*tokens_q, 2), (*tokens_k, 1), (*tokens_k, 1))]
    inputs = [fenced(x).requires_grad_() for x in inputs]
    out, lse = function(*inputs, *places, layout, **options, return_lse=True)
    assert out.isfinite().all()
    above = [fenced(torch.randn(x.shape)) for x in (out, lse)]
    assert all(x.isfinite().all() for x in torch.autograd.grad((out, lse), inputs, above))
starts = [fenced(torch.tensor(x, dtype=torch.int32)) for x in ((0, 18, 19, 20), (0, 30, 33, 36))]
for d in (16, 24):
    attend(blocksparse_attn_func, ((1, 36), (1, 36)), d)
    attend(blocksparse_attn_func, ((1, 20), (1, 36)), d, causal=False, align="top-left")
    attend(blocksparse_attn_varlen_func, ((20,), (36,)), d, *starts, 18, 30)
    q, k = fenced(torch.randn(20, 2, d)), fenced(torch.randn(36, 1, d))
    places = *starts, 18, 30, layout
    assert blocksparse_attn_varlen_func(q, k, k, *places, num_splits=2).isfinite().all()
    out = blocksparse_attn_func(q[None, :1], k[None], k[None], layout, num_splits=2)
    assert out.isfinite().all()
# heads that do not fill a tile, and padding
layout = BlockSparseLayout.from_dense(torch.ones(3, 1, 1, dtype=torch.bool), 16)
q, k = fenced(torch.randn(8, 3, 16)), fenced(torch.randn(8, 1, 16))
starts = fenced(torch.tensor([2, 3, 6], dtype=torch.int32))
out = blocksparse_attn_varlen_func(q, k, k, starts, starts, 3, 3, layout)
assert not out[:2].any() and not out[6:].any() and out.isfinite().all()
"""
    run_fenced(code, __file__)


@pytest.mark.device
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block", [(64, 64), (16, 64), (128, 16)], ids=str)
def test_poison_at_length(block, dtype, device):
    for seqlens in ((700, 700), (200, 900), (1, 2000)):
        case = make_case(Shape(1, *seqlens, 4, 2, 128), dtype, device, "local", block)
        unseen = unseen_by_all(case, *seqlens)
        want = run(case)
        for poison in POISON:
            bad = poisoned(poisoned(case, "k", unseen, poison), "v", unseen, poison)
            assert_alike(run(bad).values(), want.values())
