"""Lengths are what ``operator.index`` takes, and one compiled graph serves all of them."""

from __future__ import annotations

import prefix_prefill as package
import pytest
import torch

from ._linked.lengths import check_flags, check_lengths, check_one_graph

pytestmark = pytest.mark.eager

Q = torch.randn(9, 2, 16)
CACHE = torch.randn(3, 16, 2, 16)
PAGES = torch.tensor([[2], [0]], dtype=torch.int32)
STARTS = torch.tensor([0, 4, 9], dtype=torch.int32)
LENGTHS = torch.tensor([7, 8], dtype=torch.int32)
TABLE = PAGES, STARTS, LENGTHS


def paged(function=package.paged_attn_func, **options):
    given = {"max_seqlen_q": 5, "max_seqlen_k": 8} | options
    return function(Q, CACHE, CACHE, *TABLE, **given)


def shared(**options):
    lengths = {"shared_len": 8, "max_seqlen_q": 5, "max_seqlen_k": 8} | options
    table = dict(zip(("block_table", "cu_seqlens_q", "seqlens_k"), TABLE, strict=True))
    return package.shared_prefix_attn_func(
        Q, CACHE, CACHE, shared_pages=PAGES[0], **table, **lengths
    )


def mla(function=package.mla_attn_func, **options):
    given = {"max_seqlen_q": 5, "max_seqlen_k": 8} | options
    return function(Q, CACHE[:, :, 0], *TABLE, head_dim_v=16, **given)


def validated(**options):
    paged(package.validate_paged, **options)
    return Q


def context(**options):
    out = torch.zeros_like(Q)
    given = {"max_seq_len": 8, "max_input_len": 5} | options
    package.context_attention_fwd(
        Q, None, None, out, "auto", CACHE, CACHE, *TABLE, k_scale=None, v_scale=None, **given
    )
    return out


def decode(**options):
    out = torch.zeros_like(Q)
    given = {"max_seq_len": 8, "max_query_len": 5} | options
    package.chunked_prefill_paged_decode(
        Q, None, None, out, "auto", CACHE, CACHE, *TABLE, k_scale=None, v_scale=None, **given
    )
    return out


def rows(**options):
    given = {"cache_seqlens": 3} | options
    return package.flash_attn_with_kvcache(Q[None, :1], CACHE[:1], CACHE[:1], **given)


CALLS = {
    "paged": paged,
    "reference": lambda **x: paged(package.paged_attention_reference, **x),
    "shared": shared,
    "mla": mla,
    "mla reference": lambda **x: mla(package.mla_attention_reference, **x),
    "validate": validated,
}


@pytest.mark.parametrize(("name", "length"), [("max_seqlen_q", 5), ("max_seqlen_k", 8)])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_length_is_what_index_takes(call, name, length):
    check_lengths(lambda n: call(**{name: n}), name, length)


@pytest.mark.parametrize(
    ("call", "name", "length"),
    [
        (shared, "shared_len", 8),
        (context, "max_input_len", 5),
        (context, "max_seq_len", 8),
        (decode, "max_query_len", 5),
        (decode, "max_seq_len", 8),
    ],
)
def test_so_is_that_of_the_other_functions(call, name, length):
    check_lengths(lambda n: call(**{name: n}), name, length)


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (paged, ("causal", "invariant")),
        (mla, ("causal",)),
        (shared, ("causal",)),
        (rows, ("causal", "rotary_interleaved", "invariant")),
        (context, ("causal", "skip_decode", "invariant")),
    ],
)
def test_a_flag_may_be_numpys(call, names):
    for name in names:
        check_flags(lambda flag, name=name: call(**{name: flag}), name)


def served(function, *caches, **options):
    """A call with one sequence, whose page is the last."""

    def call(starts, n):
        lengths = starts.diff() + 3
        given = PAGES[:1], starts, lengths, n, n + 3
        return function(Q, *caches, *given, **options)

    return call


@pytest.mark.parametrize(
    "call",
    [
        served(package.paged_attn_func, CACHE, CACHE),
        served(
            package.paged_attn_func,
            CACHE,
            CACHE,
            tree_mask=torch.ones(9, dtype=torch.int64) * 0,
        ),
        served(package.mla_attn_func, CACHE[:, :, 0].contiguous(), head_dim_v=16),
    ],
)
def test_one_graph_serves_all_lengths(call):
    check_one_graph(call, 9)


def test_one_graph_serves_all_shared_lengths():
    def call(starts, n):
        given = PAGES[1], n, PAGES[:1], starts, starts.diff() + 3, n, n + 3
        return package.shared_prefix_attn_func(Q, CACHE, CACHE, *given)

    check_one_graph(call, 9)


def test_one_graph_serves_all_lengths_of_a_cache():
    def call(starts, n):
        del starts
        return rows(cache_seqlens=n)

    check_one_graph(call, 9)
