"""Lengths are what ``operator.index`` takes, and one compiled graph serves all of them."""

from __future__ import annotations

import blocksparse_attn as package
import pytest
import torch
from blocksparse_attn import BlockSparseLayout, patterns

from ._linked.lengths import check_flags, check_lengths, check_one_graph

pytestmark = pytest.mark.eager

X = torch.randn(9, 2, 16)
STARTS = torch.tensor([0, 4, 9], dtype=torch.int32)
LAYOUT = BlockSparseLayout.from_dense(torch.ones(2, 2, dtype=torch.bool), 16)
TABLE = torch.tensor([[0], [0]], dtype=torch.int32)


def varlen(function=package.blocksparse_attn_varlen_func, **options):
    given = {"max_seqlen_q": 5, "max_seqlen_k": 5, "layout": LAYOUT} | options
    return function(X, X, X, STARTS, STARTS, **given)


def reference(**options):
    return varlen(package.blocksparse_varlen_attention_reference, **options)


def paged(**options):
    pages = X[None, :, :]
    given = {"max_seqlen_q": 5, "max_seqlen_k": 5, "layout": LAYOUT} | options
    starts = {"cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS, "block_table": TABLE}
    return package.blocksparse_attn_varlen_func(X, pages, pages, **starts, **given)


def validated(max_seqlen_q=5, max_seqlen_k=5):
    package.validate_varlen(X, X, STARTS, STARTS, max_seqlen_q, max_seqlen_k)
    return X


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
@pytest.mark.parametrize("call", [varlen, reference, paged, validated])
def test_a_length_is_what_index_takes(call, name):
    check_lengths(lambda n: call(**{name: n}), name, 5)


def dropin(n):
    parts = LAYOUT.crow.expand(2, -1), LAYOUT.col.expand(2, -1)
    return package.blocksparse_flash_attn_varlen_fwd(
        X, X, X, STARTS, STARTS, None, parts, block_size=16, max_seqlen=n
    )


MADE = {
    "local_strided": lambda n: BlockSparseLayout.local_strided(2, n, 16),
    "sliding_window": lambda n: patterns.sliding_window(n, 1, block_size=16),
    "dilated": lambda n: patterns.dilated(n, 1, 1, 16),
    "bigbird": lambda n: patterns.bigbird(2, n, 1, 1, 1, 16),
    "block_causal": lambda n: patterns.block_causal(n, 1, 16),
    "vertical_slash": lambda n: patterns.vertical_slash(n, [[0]], [[0]], 16),
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_so_is_that_of_a_pattern(make):
    check_lengths(lambda n: make(n).to_dense(), "max_seqlen", 33)


def test_so_is_that_of_the_dropin():
    check_lengths(dropin, "max_seqlen", 17)


@pytest.mark.parametrize("name", ["causal", "deterministic"])
@pytest.mark.parametrize("call", [varlen, paged])
def test_a_flag_may_be_numpys(call, name):
    check_flags(lambda flag: call(**{name: flag}), name)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("align", ["bottom-right", "top-left"])
def test_one_graph_serves_all_lengths(align, grad):
    x = X.clone().requires_grad_(grad)

    def call(starts, n):
        return package.blocksparse_attn_varlen_func(
            x, x, x, starts, starts, n, n, LAYOUT, align=align
        )

    # a graph is guarded on the lists that the layout keeps: make them first
    call(torch.tensor([0, 9], dtype=torch.int32), 9)
    check_one_graph(call, 9)


def test_a_compiled_call_still_needs_a_layout_that_covers_it():
    def call(n):
        return package.blocksparse_attn_varlen_func(X, X, X, STARTS, STARTS, n, n, LAYOUT)

    torch.compiler.reset()
    fast = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    fast(9)
    with pytest.raises(ValueError, match="layout must cover the keys, 33, with its rows, got 2"):
        fast(33)
    torch.compiler.reset()
