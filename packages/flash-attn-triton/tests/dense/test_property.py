"""Shapes, features and strides drawn together.

25 examples each by default, the same in every run; on a GPU, where lengths and head dims cross its
kernels' tiles, 500 in all: ``FLASH_ATTN_TRITON_EXAMPLES=12`` in each of eleven processes, as most
examples are compiled. A failure prints the smallest example found and the line that reproduces it.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from .._linked.budget import DTYPES, assert_same
from .._linked.tiers import HAS_GPU
from .._linked.views import VIEWS
from .._numerics import (
    FEATURES,
    Case,
    Packed,
    Shape,
    check,
    check_bounds,
    compatible,
    make_case,
    make_packed,
    run,
)
from ..tree import _trees

EXAMPLES = int(os.environ.get("FLASH_ATTN_TRITON_EXAMPLES", "25"))
# a merge sees the same examples every time; a number asked for draws anew
DERANDOMIZE = "FLASH_ATTN_TRITON_EXAMPLES" not in os.environ

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
SHORT, NARROW = [0, 1, 2, 3, 15, 16, 17, 20, 31, 33], [1, 7, 8, 16, 24, 33, 48, 80]
LENGTHS = st.sampled_from([0, 1, 17, 63, 64, 65, 128, 130, 200, 257, 333] if HAS_GPU else SHORT)
HEADS = st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1)])
HEAD_DIMS = st.sampled_from([7, 33, 48, 64, 80, 96, 128, 192, 256] if HAS_GPU else NARROW)
DTYPE = st.sampled_from(DTYPES)
WINDOWS = st.tuples(*[st.one_of(st.just(-1), st.integers(0, 250 if HAS_GPU else 40))] * 2)
# drawn with its numbers below, so not by name
NAMES = [name for name in FEATURES if not name.startswith("window")]


def apart(function, *arguments, **options):
    """Call in a new thread.

    Under Hypothesis the call stack is so deep that interpreted kernels cross the end of one of
    Python's stack chunks, which then is mapped and unmapped at every call.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *arguments, **options).result()


@st.composite
def features(draw: st.DrawFn) -> tuple[str, ...]:
    chosen: list[str] = []
    for name in draw(st.permutations(NAMES))[: draw(st.integers(0, 4))]:
        if compatible([*chosen, name]):
            chosen.append(name)
    return tuple(chosen)


@st.composite
def fixed(draw: st.DrawFn) -> Shape:
    heads = draw(HEADS)
    lengths = draw(LENGTHS), draw(LENGTHS)
    dv = draw(st.one_of(st.none(), HEAD_DIMS))
    return Shape(draw(st.integers(0, 2)), *lengths, *heads, draw(HEAD_DIMS), dv)


@st.composite
def packed(draw: st.DrawFn) -> Packed:
    batch = draw(st.integers(0, 3))
    lengths = [tuple(draw(LENGTHS) for _ in range(batch)) for _ in range(2)]
    dv = draw(st.one_of(st.none(), HEAD_DIMS))
    padding = draw(st.sampled_from([0, 0, 1, 20]))
    return Packed(*lengths, *draw(HEADS), draw(HEAD_DIMS), dv, padding)


@st.composite
def options(draw: st.DrawFn) -> dict[str, object]:
    """Return options that are no features: they change which kernels run, or nothing."""
    return {"window_size": draw(WINDOWS), "deterministic": draw(st.booleans())}


def beside(case: Case, **more: object) -> Case:
    """Return a case with further options, but for a window where spans are the mask."""
    if "spans" in case.options:
        more.pop("window_size")
    return case.with_options(**more)


# whether the portable kernels of a GPU that has others run as well; they are built, too
PORTABLE = st.booleans() if HAS_GPU else st.just(True)


@bounded
@given(
    shape=fixed(),
    dtype=DTYPE,
    names=features(),
    more=options(),
    seed=st.integers(0, 2**32),
    portable=PORTABLE,
)
def test_fixed_length(shape, dtype, names, more, seed, portable, device):
    case = beside(make_case(shape, dtype, device, names, seed), **more)
    check_bounds(case, apart(check, case, portable=portable))


@bounded
@given(
    data=st.data(),
    shape=packed(),
    dtype=DTYPE,
    names=features(),
    more=options(),
    portable=PORTABLE,
)
def test_packed(data, shape, dtype, names, more, portable, device):
    case = beside(make_packed(shape, dtype, device, names), **more)
    if data.draw(st.booleans(), label="seqused_k"):
        used = [data.draw(st.integers(0, n), label="used") for n in shape.lengths_k]
        used_k = torch.tensor(used, dtype=torch.int32, device=device)
        case = case.with_options(seqused_k=used_k)
    apart(check, case, portable=portable)


@st.composite
def trees(draw: st.DrawFn) -> _trees.Tree:
    segments = draw(st.integers(1, 5))
    lengths = tuple(draw(LENGTHS) for _ in range(segments))
    parents = tuple(draw(st.integers(-1, i - 1)) for i in range(segments))
    padding = draw(st.sampled_from([0, 0, 1, 20]))
    return _trees.Tree(lengths, parents, *draw(HEADS), draw(HEAD_DIMS), None, padding)


TREE_FEATURES = [(), ("softcap",), ("sinks",), ("softcap", "sinks"), ("scale_zero",)]


# a tree is several sequences, and its gradients three walks
@settings(bounded, max_examples=max(1, EXAMPLES // 2))
@given(
    tree=trees(),
    dtype=DTYPE,
    names=st.sampled_from(TREE_FEATURES),
    deterministic=st.booleans(),
)
def test_tree(tree, dtype, names, deterministic, device):
    case = _trees.make(tree, dtype, device, names)
    apart(_trees.check, case.with_options(deterministic=deterministic))


@pytest.mark.eager
@bounded
@given(data=st.data(), shape=fixed(), dtype=DTYPE, names=features(), window=WINDOWS)
def test_strides(data, shape, dtype, names, window, device):
    case = beside(make_case(shape, dtype, device, names), window_size=window)
    # else the sums of dq differ in their last bits, on a GPU
    case = case.with_options(deterministic=True)
    views = {
        name: VIEWS[data.draw(st.sampled_from(sorted(VIEWS)), label=name)](t)
        for name, t in case.inputs.items()
    }
    grad = data.draw(st.booleans(), label="grad")
    got = apart(run, case.with_inputs(**views), grad=grad)
    assert_same(got, apart(run, case, grad=grad))
