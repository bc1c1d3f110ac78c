"""The cases of multi-head latent attention, and what they are held to."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from attn_common import detect
from prefix_prefill import mla_attention_reference, mla_attn_func
from prefix_prefill._linked.host.forms import interpreted
from torch import Tensor

from .._linked import numerics
from .._linked.bounds import attention_bounds
from .._linked.budget import Maker, assert_no_worse_than_eager, offsets
from .._linked.rounding import Bounded, assert_within
from .._numerics import in_one, only_portable

NAN = float("nan")


class Problem(NamedTuple):
    """Sequences with (queries, keys), and a cache; ``padding`` tokens follow the last sequence."""

    lengths: tuple[tuple[int, int], ...]
    heads: int = 16
    page: int = 16
    head_dim: int = 576
    head_dim_v: int = 512
    padding: int = 0

    def __str__(self) -> str:
        text = "_".join(f"{q}of{k}" for q, k in self.lengths) or "none"
        text += f"-h{self.heads}-p{self.page}-d{self.head_dim}:{self.head_dim_v}"
        return text + (f"-pad{self.padding}" if self.padding else "")

    @property
    def tokens(self) -> int:
        return sum(q for q, _ in self.lengths) + self.padding


class Case(numerics.Case):
    """Arguments of one call: what holds values, and everything else."""

    def __call__(self, **changes: Any) -> dict[str, Tensor]:
        """Call the function under test."""
        arguments = {**self.inputs, **self.options, "return_lse": True, **changes}
        out, lse = mla_attn_func(**arguments)
        return {"out": out, "lse": lse}


def make_case(
    problem: Problem,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int = 0,
    **options: Any,
) -> Case:
    """Draw a case; slots without a key are NaN, and entries without a page are out of range."""
    m = Maker(device, dtype, seed)
    page = problem.page
    counts = [-(-keys // page) for _, keys in problem.lengths]
    blocks = sum(counts) + 1
    pages = torch.randperm(blocks, generator=m.generator)
    table = torch.full((len(counts), max([1, *counts])), 2**30, dtype=torch.int32)
    cache = torch.full((blocks, page, problem.head_dim), NAN, dtype=dtype, device=device)
    for b, (_, keys) in enumerate(problem.lengths):
        mine = pages[sum(counts[:b]) : sum(counts[: b + 1])]
        table[b, : counts[b]] = mine
        key = torch.arange(keys)
        where = mine[key // page].to(device), (key % page).to(device)
        cache[where] = m.randn(keys, problem.head_dim)
    lengths = [keys for _, keys in problem.lengths]
    q = m.randn(problem.tokens, problem.heads, problem.head_dim)
    given = {
        "block_table": table.to(device),
        "cu_seqlens_q": offsets([queries for queries, _ in problem.lengths], device),
        "seqlens_k": torch.tensor(lengths, dtype=torch.int32, device=device),
        "max_seqlen_q": max([0, *(queries for queries, _ in problem.lengths)]),
        "max_seqlen_k": max([0, *lengths]),
        "head_dim_v": problem.head_dim_v,
        # of products of as many numbers, and far enough from even weights
        "softmax_scale": 2.0 * problem.head_dim**-0.5,
        **options,
    }
    return Case({"q": q, "kv_cache": cache}, given)


def reference(case: Case, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Compute a case by the definition, in its own dtype or in another one."""
    inputs = case.inputs if dtype is None else {n: t.to(dtype) for n, t in case.inputs.items()}
    options = {n: x for n, x in case.options.items() if n != "out"}
    if dtype is not None:
        for name in ("q_descale", "kv_descale"):
            if options.get(name) is not None:
                options[name] = options[name].to(dtype)
    out, lse = mla_attention_reference(**inputs, **options, return_lse=True)
    return {"out": out, "lse": lse}


def check(case: Case, **changes: Any) -> dict[str, Tensor]:
    """Hold a call to the definition in float64, within what eager code misses.

    On Hopper the portable kernel is held to the same.
    """
    results = [case(**changes)]
    eager, oracle = reference(case), reference(case, torch.float64)
    dtype = case.inputs["q"].dtype
    if detect(case.inputs["q"].device).is_hopper:
        with only_portable():
            results.append(case(**changes))
    # of FP8 the results have 16 bits, or what is multiplied with the weights has
    eps = torch.finfo(torch.bfloat16 if dtype.itemsize == 1 else dtype).eps
    for got in results:
        for name, x in got.items():
            assert_no_worse_than_eager(name, x, eager[name], oracle[name], eps=eps)
        assert_within(got, bounds_of(case))
    return results[0]


def bounds_of(case: Case) -> dict[str, Bounded]:
    """Return the a-priori bounds of a case, one sequence after the other."""
    (q, cache), options = case.inputs.values(), {"causal": True, **case.options}
    starts, lengths = (options[n].tolist() for n in ("cu_seqlens_q", "seqlens_k"))
    width, page = options["head_dim_v"], cache.shape[1]
    given = {"causal": options["causal"], "q_descale": options.get("q_descale")}
    given["k_descale"] = given["v_descale"] = options.get("kv_descale")
    given["softmax_scale"] = options["softmax_scale"]
    given["truncates"] = interpreted() and q.device.type == "cpu"
    # what is multiplied has 16 bits or more, and so have weights
    wide = [x.dtype for x in (q, cache) if x.element_size() > 1]
    if cache.element_size() == 1:
        given["cache"] = cache.dtype
    found = []
    for b, keys in enumerate(lengths):
        rows = slice(starts[b], starts[b + 1])
        pages = options["block_table"][b, : -(-keys // page)].long()
        k = cache[pages].flatten(0, 1)[None, :keys, None].double()
        one = q[rows][None].to(wide[0] if wide else torch.bfloat16)
        found.append(attention_bounds(one, k, k[..., :width], **given))
    return in_one(q, found, width)
