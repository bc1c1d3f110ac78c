"""Lengths, pages, layouts, features and strides drawn together.

A few examples each by default, the same in every run; ``PREFIX_PREFILL_EXAMPLES=100`` on a GPU.
The batches of an example share what kernels are compiled for. A failure prints the smallest example
found and the line that reproduces it.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from .._linked.budget import DTYPES, assert_same
from .._linked.views import VIEWS
from .._numerics import (
    FEATURES,
    PACKED,
    Problem,
    check,
    check_bounds,
    compatible,
    make_case,
    run,
)
from ._property import BATCHES, apart, bounded

# an interpreted case of more tiles than this takes seconds; a GPU does not mind
QUERIES = st.sampled_from([0, 1, 1, 2, 3, 7, 15, 16, 17, 20])
CONTEXTS = st.sampled_from([0, 1, 2, 15, 16, 17, 31, 33])
HEADS = st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1), (4, 2), (20, 1)])
PAGES = st.sampled_from([1, 2, 3, 8, 13, 16, 32, 48])
WINDOWS = st.tuples(*[st.one_of(st.just(-1), st.integers(0, 40))] * 2)
# drawn with its numbers below, so not by name
NAMES = [name for name in FEATURES if not name.startswith("window")]


@st.composite
def batches(draw: st.DrawFn) -> tuple[tuple[int, int], ...]:
    """Lengths of the sequences of a batch: queries and keys."""
    drawn = [(draw(QUERIES), draw(CONTEXTS)) for _ in range(draw(st.integers(0, 4)))]
    if drawn and draw(st.booleans()):
        # fewer keys than queries
        drawn[0] = drawn[0][0], -draw(st.integers(0, 20))
    return tuple((q, max(0, q + context)) for q, context in drawn)


@st.composite
def problems(draw: st.DrawFn) -> list[Problem]:
    """Batches over caches of one kind."""
    dense = draw(st.booleans())
    rest = (
        *draw(HEADS),
        draw(st.sampled_from([8, 16, 24, 48])),
        draw(PAGES),
        draw(st.sampled_from(["nhd", PACKED])),
        dense,
        draw(st.sampled_from([0, 0, 1, 20])),
        draw(st.sampled_from([None, None, 8, 16, 40])),
    )
    found = [draw(batches()) for _ in range(BATCHES)]
    if dense:  # new keys are as many as queries
        found = [tuple((q, max(q, keys)) for q, keys in lengths) for lengths in found]
    return [Problem(lengths, *rest) for lengths in found]


@st.composite
def features(draw: st.DrawFn) -> tuple[str, ...]:
    chosen: list[str] = []
    for name in draw(st.permutations(NAMES))[: draw(st.integers(0, 4))]:
        if compatible([*chosen, name]):
            chosen.append(name)
    return tuple(chosen)


@bounded
@given(
    several=problems(),
    dtype=st.sampled_from(DTYPES),
    names=features(),
    window=WINDOWS,
    fp8=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_problem(several, dtype, names, window, fp8, seed, device):
    cache = torch.float8_e5m2 if fp8 and device.type == "cpu" else None
    for problem in several:
        case = make_case(problem, dtype, device, names, seed, cache)
        case = case.with_options(window_size=window)
        check_bounds(case, apart(check, case))


@pytest.mark.eager
@bounded
@given(data=st.data(), several=problems(), names=features(), window=WINDOWS)
def test_any_strides(data, several, names, window, device):
    case = make_case(several[0], torch.float32, device, names).with_options(window_size=window)
    views = {
        name: VIEWS[data.draw(st.sampled_from(sorted(VIEWS)), label=name)](t)
        for name, t in case.inputs.items()
    }
    assert_same(apart(run, case.with_inputs(**views)), apart(run, case))
