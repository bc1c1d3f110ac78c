"""Helpers of dropin tests that other tests use too."""

from __future__ import annotations

import pytest
import torch
from prefix_prefill import chunked_prefill_paged_decode, context_attention_fwd

from ._linked.budget import assert_no_worse_than_eager
from ._numerics import Case, Problem, run_eager, run_oracle

BOTH = pytest.mark.parametrize(
    "function", [context_attention_fwd, chunked_prefill_paged_decode], ids=lambda f: f.__name__
)


LENGTHS = ((17, 36), (1, 21), (3, 9), (1, 1))


def with_newest_in_cache(case: Case, problem: Problem) -> Case:
    """Write the key and value of every sequence of one query into the cache, as an engine has."""
    caches = {name: case.inputs[name].clone() for name in ("k_cache", "v_cache")}
    at = 0
    for b, (queries, keys) in enumerate(problem.lengths):
        if queries == 1:
            page = case.options["block_table"][b, (keys - 1) // problem.page]
            slot = (keys - 1) % problem.page
            k, v = (case.inputs[name][at].to(caches[f"{name}_cache"].dtype) for name in "kv")
            if caches["k_cache"].ndim == 5:
                x = caches["k_cache"].shape[4]
                caches["k_cache"][page, :, :, slot] = k.unflatten(1, (-1, x))
                caches["v_cache"][page, :, :, slot] = v
            else:
                caches["k_cache"][page, slot], caches["v_cache"][page, slot] = k, v
        at += queries
    return case.with_inputs(**caches)


def own_pages(case: Case, problem: Problem) -> Case:
    """Give every sequence pages for its new tokens, too: a table of a fresh, larger cache."""
    counts = [-(-keys // problem.page) for _, keys in problem.lengths]
    table = case.options["block_table"]
    k, v = case.inputs["k_cache"], case.inputs["v_cache"]
    extra = sum(counts)
    grown = {}
    for name, cache in (("k_cache", k), ("v_cache", v)):
        more = torch.full((extra, *cache.shape[1:]), float("nan"), device=cache.device)
        wide = torch.cat([cache.float(), more]).to(cache.dtype)
        grown[name] = wide
    new = torch.zeros((len(counts), max(counts)), dtype=torch.int32, device=table.device)
    free = k.shape[0]
    for b, count in enumerate(counts):
        cached = -(-problem.cached(b) // problem.page)
        new[b, :cached] = table[b, :cached]
        for i in range(cached, count):
            new[b, i] = free
            free += 1
    return case.with_inputs(**grown).with_options(block_table=new)


def call(function, case, out, *, kv="auto", out_scale=None, **options):
    """Call a drop-in with the arguments of a case, in the engines' order."""
    given = {**case.inputs, **case.options}
    names = ("q", "k", "v")
    tensors = [given.get(name) for name in names]
    scale = torch.ones(1, device=given["q"].device)
    scales = given.get("k_descale", scale), given.get("v_descale", scale)
    if out_scale is not None:
        name = "fp8_out_scale" if function is context_attention_fwd else "output_scale"
        options[name] = out_scale
    for name in ("alibi_slopes", "sinks"):
        if name in given:
            options[name] = given[name]
    if given.get("softmax_scale") is not None:
        options["sm_scale"] = given["softmax_scale"]
    return function(
        *tensors,
        out,
        kv,
        given["k_cache"],
        given["v_cache"],
        given["block_table"],
        given["cu_seqlens_q"],
        given["seqlens_k"],
        given["max_seqlen_k"],
        given["max_seqlen_q"],
        *scales,
        **options,
    )


def run_dropin(function, case, **options):
    q, v_cache = case.inputs["q"], case.inputs["v_cache"]
    width = v_cache.shape[2 if case.inputs["k_cache"].ndim == 5 else 3]
    out = q.new_full((*q.shape[:2], width), float("nan"))
    assert call(function, case, out, **options) is None
    return out


def judge(function, case, problem, **options):
    """Hold a drop-in to the budget of the same case."""
    if function is chunked_prefill_paged_decode and "k" in case.inputs:
        case = with_newest_in_cache(own_pages(case, problem), problem)
    got = run_dropin(function, case, **options)
    oracle = run_oracle(case)
    eager = run_eager(case, oracle)
    if case.inputs["k_cache"].element_size() == 1 and function is chunked_prefill_paged_decode:
        # a decoded sequence reads its newest key as the cache holds it, so it is quantised
        single = [q == 1 for q, _ in problem.lengths for _ in range(q)]
        rows = ~torch.tensor(single, device=got.device)
        got, eager["out"], oracle["out"] = got[rows], eager["out"][rows], oracle["out"][rows]
    assert_no_worse_than_eager("out", got, eager["out"], oracle["out"])
    return case
