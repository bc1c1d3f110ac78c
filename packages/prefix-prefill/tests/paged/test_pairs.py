"""Formats of caches, pages, groups, windows, sinks, softcaps and trees: every value beside every
value of the others, in as few calls as there are pairs of formats and pages.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from attn_common import detect, fp8_dtype

from .._linked.tiers import INTERPRETED
from .._numerics import NHD, PACKED, Problem, check, make_case
from ._quantised import quantise
from ._tree import rows_of, trees

AXES = {
    "format": ("same", "packed", "fp8", "int8", "int4"),
    "page": (1, 16, 48, 64, 544),
    "heads": ((2, 2), (4, 2), (5, 1)),
    "window": (False, True),
    "sinks": (False, True),
    "softcap": (False, True),
    "tree": (False, True),
}
# one whose draw leaves no pair out
SEED = 828


def rows() -> list[tuple]:
    draw = random.Random(SEED)
    formats, pages, *rest = AXES.values()
    return [
        (formats[i % 5], pages[i // 5], *(values[draw.randrange(len(values))] for values in rest))
        for i in range(25)
    ]


ROWS = rows()


@pytest.mark.eager
def test_no_pair_is_left_out():
    columns = range(len(AXES))
    values = list(AXES.values())
    for a, b in itertools.combinations(columns, 2):
        met = {(row[a], row[b]) for row in ROWS}
        assert met == set(itertools.product(values[a], values[b])), (a, b)


# a third in the interpreter, of every format and page
@pytest.mark.eager
@pytest.mark.parametrize("row", ROWS[::3] if INTERPRETED else ROWS, ids=str)
def test_pairs(row, device):
    stored, page, heads, window, sinks, softcap, tree = row
    layout = PACKED if stored == "packed" else NHD
    problem = Problem(((9, 21), (1, 13), (0, 4)), *heads, 16, page, layout, padding=2)
    named = {"window": window, "sinks": sinks, "softcap": softcap}
    fp8 = None
    if stored == "fp8":
        platform = detect(device)
        if device.type != "cpu" and not platform.supports_fp8:
            pytest.skip(f"{platform} has no FP8")
        fp8 = torch.float8_e5m2 if device.type == "cpu" else getattr(torch, fp8_dtype(platform))
    features = [name for name, asked in named.items() if asked]
    case = make_case(problem, torch.bfloat16, device, features, cache_dtype=fp8)
    if stored in ("int8", "int4"):
        case = quantise(case, stored)
    if tree:
        case = case.with_options(tree_mask=rows_of(trees(problem), problem.padding, device))
    check(case)
