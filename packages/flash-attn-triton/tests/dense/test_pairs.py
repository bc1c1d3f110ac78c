"""Every option with every other on a GPU, on shapes that cross the tiles of its kernels.

Gradients included, of fixed lengths and packed, with grouped heads. What the kernels for Hopper do
not serve goes to the portable ones, as in any call.
"""

from __future__ import annotations

import itertools
import os

import pytest
import torch

from .._numerics import Packed, Shape, check, compatible, make_case, make_packed

# on lengths of hundreds, masks that end inside a tile, and hide whole ones
WINDOWS = {
    "causal": {"causal": True},
    "window": {"window_size": (150, 40)},
    "window_left": {"window_size": (130, -1)},
    "window_right": {"window_size": (-1, 70)},
}
PLAIN = ["softcap", "alibi", "alibi_batch", "bias", "bias_fp32", "bias_keys", "sinks", "dropout"]
OPTIONS = [*WINDOWS, *PLAIN, "deterministic"]
HEAD_DIMS = [(64, None), (96, None), (128, None), (192, 128), (256, None)]
LENGTHS = [(300, 432), (432, 301), (129, 700)]
IN_ALL = os.environ.get("FLASH_ATTN_TRITON_FULL") == "1"


def pairs(*more: str) -> list[tuple[str, str]]:
    """Return the options that may come together, as pairs."""
    found = [
        pair
        for pair in itertools.combinations([*OPTIONS, *more], 2)
        if not set(pair) <= set(WINDOWS) and compatible(features(pair))
    ]
    # a window beside the diagonal is a mask of its own
    return [*found, ("causal", "window_left")]


def features(pair):
    """Return what of a pair is made for the shape."""
    return [name for name in pair if name in PLAIN]


def along(cases: list, *axes: list) -> list:
    """Return each case with one value of every axis in turn; the whole product on request."""
    if IN_ALL:
        return list(itertools.product(cases, *axes))
    return [(one, *(axis[i % len(axis)] for axis in axes)) for i, one in enumerate(cases)]


def with_options(case, pair):
    """Set what is no feature of the small shapes."""
    for name in pair:
        case = case.with_options(**WINDOWS.get(name, {}))
    return case.with_options(deterministic="deterministic" in pair)


@pytest.mark.device
@pytest.mark.parametrize(("pair", "dims", "lengths"), along(pairs(), HEAD_DIMS, LENGTHS), ids=str)
def test_fixed_length(pair, dims, lengths, device):
    shape = Shape(2, *lengths, 4, 2, *dims)
    case = make_case(shape, torch.bfloat16, device, features(pair))
    check(with_options(case, pair), portable=False)


@pytest.mark.device
@pytest.mark.parametrize(("pair", "dims"), along(pairs("seqused_k"), HEAD_DIMS[::-1]), ids=str)
def test_packed(pair, dims, device):
    shape = Packed((128, 1, 300, 0, 190), (128, 9, 333, 5, 700), 4, 2, *dims, padding=40)
    case = with_options(make_packed(shape, torch.bfloat16, device, features(pair)), pair)
    if "seqused_k" in pair:
        used = torch.tensor([100, 9, 0, 0, 650], dtype=torch.int32, device=device)
        case = case.with_options(seqused_k=used)
    check(case, portable=False)
