"""Lengths are what ``operator.index`` takes, and one compiled graph serves all of them."""

from __future__ import annotations

import flash_attn_triton as package
import numpy as np
import pytest
import torch

from ._linked.lengths import check_flags, check_lengths, check_one_graph

pytestmark = pytest.mark.eager

X = torch.randn(9, 2, 16)
STARTS = torch.tensor([0, 4, 9], dtype=torch.int32)
ROOTS = torch.tensor([-1, 0], dtype=torch.int32)


def varlen(function=package.flash_attn_varlen_func, **options):
    given = {"max_seqlen_q": 5, "max_seqlen_k": 5} | options
    return function(X, X, X, STARTS, STARTS, **given)


def validated(max_seqlen_q=5, max_seqlen_k=5):
    package.validate_varlen(X, X, STARTS, STARTS, max_seqlen_q, max_seqlen_k)
    return X


def valid_tree(max_seqlen):
    package.validate_tree(X, STARTS, ROOTS, max_seqlen)
    return X


CALLS = {
    "varlen": lambda name, n: varlen(**{name: n}),
    "bias": lambda name, n: varlen(**{name: n}, bias=torch.ones(1, 1, 5, 5)),
    "reference": lambda name, n: varlen(package.varlen_attention_reference, **{name: n}),
    "kvpacked": lambda name, n: package.flash_attn_varlen_kvpacked_func(
        X, torch.stack([X, X], 1), STARTS, STARTS, **{"max_seqlen_q": 5, "max_seqlen_k": 5, name: n}
    ),
    "validate": lambda name, n: validated(**{name: n}),
}


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_length_is_what_index_takes(call, name):
    check_lengths(lambda n: call(name, n), name, 5)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda n: package.flash_attn_tree_func(X, X, X, STARTS, ROOTS, n), "max_seqlen"),
        (lambda n: package.tree_attention_reference(X, X, X, STARTS, ROOTS, n), "max_seqlen"),
        (valid_tree, "max_seqlen"),
        (
            lambda n: package.triton_attention(X, X, X, None, STARTS, STARTS, n, 5)[0],
            "max_seqlens_q",
        ),
    ],
)
def test_so_is_that_of_the_other_functions(call, name):
    check_lengths(call, name, 5)


@pytest.mark.parametrize("name", ["causal", "deterministic", "invariant"])
def test_a_flag_may_be_numpys(name):
    check_flags(lambda flag: varlen(**{name: flag}), name)
    x = X[None]
    check_flags(lambda flag: package.flash_attn_func(x, x, x, **{name: flag}), name)


def test_a_flag_of_numpy_has_the_results_of_a_bool():
    x = X[None].requires_grad_()
    out, lse = package.flash_attn_func(x, x, x, return_lse=np.True_, causal=np.True_)
    out.sum().backward()
    assert lse.shape == (1, 2, 9)


@pytest.mark.parametrize("options", [{}, {"bias": torch.ones(1, 1, 1, 1)}, {"grad": True}])
def test_one_graph_serves_all_lengths(options):
    x = X.clone().requires_grad_(options.pop("grad", False))

    def call(starts, n):
        return package.flash_attn_varlen_func(x, x, x, starts, starts, n, n, causal=True, **options)

    check_one_graph(call, 9)


def test_one_graph_serves_all_trees():
    root = torch.tensor([-1], dtype=torch.int32)
    check_one_graph(lambda s, n: package.flash_attn_tree_func(X, X, X, s, root, n), 9)
