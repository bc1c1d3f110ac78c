"""Layouts, shapes and strides drawn together.

25 examples each by default, the same in every run. On a GPU, ``BLOCKSPARSE_ATTN_EXAMPLES=500`` in
processes that differ in ``--hypothesis-seed`` and in ``BLOCKSPARSE_ATTN_FORMS``, a number that
chooses what is compiled. A failure prints the smallest example found and the line that reproduces
it.
"""

from __future__ import annotations

import copy
import os
import random
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch
from blocksparse_attn import BlockSparseLayout
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from .._linked.budget import DTYPES, assert_same
from .._linked.tiers import HAS_GPU
from .._linked.views import VIEWS
from .._numerics import (
    BLOCKS,
    Packed,
    Shape,
    assert_alike,
    check,
    check_bounds,
    make_case,
    make_packed,
    only_portable,
    paged,
    run,
)

EXAMPLES = int(os.environ.get("BLOCKSPARSE_ATTN_EXAMPLES", "25"))
# a merge sees the same examples every time; a number asked for draws anew
DERANDOMIZE = "BLOCKSPARSE_ATTN_EXAMPLES" not in os.environ
FORMS = int(os.environ.get("BLOCKSPARSE_ATTN_FORMS", "0"))
FORMS_AT_ONCE = 2

bounded = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=DERANDOMIZE,
    print_blob=True,
    database=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    # the fixtures of each function are constant: a filled torch.empty, and seeds
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

# an interpreted case of more tiles than this takes seconds; a GPU does not mind
FAR = [64, 100, 127, 128, 129, 300, 513] if HAS_GPU else []
LENGTHS = st.sampled_from([0, 1, 2, 3, 8, 9, 15, 16, 17, 20, 31, 33, *FAR])
KEYS = st.sampled_from([0, 1, 2, 15, 16, 17, 31, 33, 50, *FAR])


class Form(NamedTuple):
    """What kernels are compiled for."""

    heads: tuple[int, int]
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    block: tuple[int, int]
    shared: bool
    alike: bool
    causal: bool


HEAD_DIMS = (1, 7, 8, 16, 24, 33, 48, *((64, 100, 128) if HAS_GPU else ()))
CHOICES = Form(
    heads=((1, 1), (2, 1), (2, 2), (3, 1)),
    head_dim=HEAD_DIMS,
    head_dim_v=HEAD_DIMS,
    dtype=DTYPES,
    block=tuple(BLOCKS),
    shared=(False, True),
    alike=(False, True),
    causal=(True, False),
)


def forms() -> st.SearchStrategy[Form]:
    """Any form; on a GPU, which compiles each for seconds, a few that a number chooses."""
    if not HAS_GPU:
        return st.builds(Form, *map(st.sampled_from, CHOICES))
    chosen = random.Random(FORMS)
    return st.sampled_from([Form(*map(chosen.choice, CHOICES)) for _ in range(FORMS_AT_ONCE)])


def apart(function, *arguments, **options):
    """Call in a new thread.

    Under Hypothesis the call stack is so deep that interpreted kernels cross the end of one of
    Python's stack chunks, which then is mapped and unmapped at every call.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *arguments, **options).result()


@st.composite
def layouts(draw: st.DrawFn, form: Form, seqlen: int) -> BlockSparseLayout:
    """Any layout: empty rows, columns in any order and twice, more or fewer columns than keys."""
    block, heads = form.block, 1 if form.shared else form.heads[0]
    rows = -(-seqlen // block[0]) + draw(st.integers(0, 2))
    cols = max(-(-seqlen // block[1]) + draw(st.integers(-1, 2)), 0)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    share = draw(st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0]))
    kept = torch.rand(heads, rows, cols, generator=generator) < share
    tidy = BlockSparseLayout.from_dense(kept, block)
    crow, col = tidy.crow, tidy.col
    for head in range(heads):
        for row in range(rows):
            begin, end = crow[head, row : row + 2].tolist()
            order = torch.randperm(end - begin, generator=generator)
            col[head, begin:end] = col[head, begin:end][order]
    if draw(st.booleans()) and col.shape[1] > 1:
        col[:, 1] = torch.where(crow[:, min(1, rows)] > 1, col[:, 0], col[:, 1])
    return BlockSparseLayout(crow, col, block, num_cols=cols, rows_alike=form.alike)


@bounded
@given(data=st.data(), form=forms(), batch=st.integers(0, 2))
def test_fixed_length(data, form, batch, device):
    shape = Shape(batch, data.draw(LENGTHS), data.draw(KEYS), *form.heads, *form[1:3])
    layout = data.draw(layouts(form, shape.seqlen_k)).to(device)
    splits = data.draw(st.sampled_from([0, 1, 3]))
    seed = data.draw(st.integers(0, 2**32))
    case = make_case(shape, form.dtype, device, seed=seed, causal=form.causal)
    case = case.with_options(layout=layout, num_splits=splits)
    check_bounds(case, apart(check, case))


@bounded
@given(data=st.data(), form=forms(), batch=st.integers(0, 3))
def test_packed(data, form, batch, device):
    lengths_q = tuple(data.draw(LENGTHS) for _ in range(batch))
    lengths_k = tuple(data.draw(KEYS) for _ in range(batch))
    is_self = data.draw(st.booleans(), label="self-attention")
    if is_self:
        lengths_q = lengths_k
    padding = data.draw(st.sampled_from([0, 0, 1, 20]))
    shape = Packed(lengths_q, lengths_k, *form.heads, *form[1:3], padding)
    layout = data.draw(layouts(form, max(lengths_k, default=0))).to(device)
    splits = data.draw(st.sampled_from([0, 1, 3]))
    case = make_packed(shape, form.dtype, device, causal=form.causal)
    case = case.with_options(layout=layout, num_splits=splits)
    if is_self:
        # one tensor for both, as the backward for Hopper wants them
        case = case.with_options(cu_seqlens_k=case.options["cu_seqlens_q"])
    apart(check, case)
    page = data.draw(st.sampled_from([None, 1, 7, 16]))
    if page is not None:
        got = apart(run, paged(case, page), grad=False)
        # keys in pages are the portable kernel's in any case
        with only_portable():
            afresh = case.with_options(layout=copy.copy(layout))
            assert_same(got, apart(run, afresh, grad=False))


@pytest.mark.eager
@bounded
@given(data=st.data(), form=forms())
def test_strides(data, form, device):
    shape = Shape(1, data.draw(LENGTHS), data.draw(KEYS), *form.heads, form.head_dim)
    case = make_case(shape, form.dtype, device, block=form.block, shared=form.shared)
    views = {
        name: VIEWS[data.draw(st.sampled_from(sorted(VIEWS)), label=name)](t)
        for name, t in case.inputs.items()
    }
    grad = data.draw(st.booleans(), label="grad")
    got, want = apart(run, case.with_inputs(**views), grad=grad), apart(run, case, grad=grad)
    if device.type == "cuda":
        # the backward for Hopper adds in any order
        assert_alike(got.values(), want.values())
    else:
        assert_same(got, want)
