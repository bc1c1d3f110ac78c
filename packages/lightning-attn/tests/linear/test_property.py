"""Shapes, splits, decays and strides drawn together.

8 examples each by default, the same in every run; ``LIGHTNING_ATTN_EXAMPLES=500`` on a GPU. A
failure prints the smallest example found and the line that reproduces it.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from .._linked.budget import DTYPES, assert_same
from .._linked.views import VIEWS
from .._numerics import (
    DECAYS,
    SCHEDULES,
    Packed,
    Shape,
    check,
    check_bounds,
    make_case,
    make_packed,
    run,
)
from ._law import in_pieces, judge

EXAMPLES = int(os.environ.get("LIGHTNING_ATTN_EXAMPLES", "8"))
# a merge sees the same examples every time; a number asked for draws anew
DERANDOMIZE = "LIGHTNING_ATTN_EXAMPLES" not in os.environ

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

# an interpreted case of more chunks than this takes seconds; a GPU's chunks are longer
LONG = [63, 64, 65, 130, 193] if torch.cuda.is_available() else []
LENGTHS = st.sampled_from([0, 1, 2, 15, 16, 17, 31, 33, 47, *LONG])
# on either side of what the kernel for Hopper takes
DIMS = st.sampled_from([(16, 32), (48, 80)])
WIDE = st.sampled_from([16, 32, 48, 80, 112])
SHAPES = st.builds(
    Shape, st.integers(0, 2), LENGTHS, st.integers(1, 2), WIDE, st.sampled_from([16, 32, 48])
)
DTYPE = st.sampled_from(DTYPES)
DECAY = st.sampled_from(sorted(DECAYS))
SCHEDULE = st.sampled_from(["auto", *SCHEDULES])
SCALE = st.sampled_from([0.0, 1.0, -0.3, 5.0])


def apart(function, *arguments, **options):
    """Call in a new thread.

    Under Hypothesis the call stack is so deep that interpreted kernels cross the end of one of
    Python's stack chunks, which then is mapped and unmapped at every call.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *arguments, **options).result()


@bounded
@given(
    shape=SHAPES,
    dtype=DTYPE,
    decay=DECAY,
    schedule=SCHEDULE,
    scale=SCALE,
    state=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_fixed_length(shape, dtype, decay, schedule, scale, state, seed, device):
    case = make_case(shape, dtype, device, decay, state=state, scale=scale, seed=seed)
    check_bounds(case, apart(check, case.on(schedule)))


@bounded
@given(data=st.data(), dtype=DTYPE, decay=DECAY, schedule=SCHEDULE)
def test_packed(data, dtype, decay, schedule, device):
    lengths = data.draw(st.lists(LENGTHS, max_size=3), label="lengths")
    padding, ahead = data.draw(st.tuples(*[st.sampled_from([0, 0, 3, 20])] * 2), label="padding")
    dims = data.draw(DIMS, label="dims")
    shape = Packed(tuple(lengths), data.draw(st.integers(1, 2)), *dims, padding, ahead)
    apart(check, make_packed(shape, dtype, device, decay).on(schedule))


@pytest.mark.eager
@bounded
@given(data=st.data(), dtype=DTYPE, decay=DECAY, schedule=SCHEDULE)
def test_any_split_gives_the_whole(data, dtype, decay, schedule, device):
    tokens = data.draw(st.integers(2, max([40, *LONG])), label="tokens")
    cuts = data.draw(st.sets(st.integers(1, tokens - 1), max_size=3), label="cuts")
    dims = data.draw(DIMS, label="dims")
    case = make_case(Shape(1, tokens, 2, *dims), dtype, device, decay)
    pieces = list(zip([0, *sorted(cuts)], [*sorted(cuts), tokens], strict=True))
    apart(lambda: judge(case, *in_pieces(case, pieces, schedule)))


@pytest.mark.eager
@bounded
@given(data=st.data(), shape=SHAPES, dtype=DTYPE, schedule=SCHEDULE)
def test_strides(data, shape, dtype, schedule, device):
    case = make_case(shape, dtype, device).on(schedule)
    views = {
        name: VIEWS[data.draw(st.sampled_from(sorted(VIEWS)), label=name)](t)
        for name, t in case.inputs.items()
    }
    grad = data.draw(st.booleans(), label="grad")
    got = apart(run, case.with_inputs(**views), grad=grad)
    assert_same(got, apart(run, case, grad=grad))
