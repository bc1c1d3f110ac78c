"""The forward kernel for Hopper on small blocks, odd groups of heads and odd head dimensions."""

from __future__ import annotations

import math

import pytest
import torch
from blocksparse_attn import BlockSparseLayout
from blocksparse_attn._attention.reference import visible_keys

from ..._linked.budget import assert_same
from ..._numerics import Packed, Shape, make_case, make_packed, run
from ._hopper import served

pytestmark = pytest.mark.device


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("form", ["fixed", "packed"])
@pytest.mark.parametrize("block", [(16, 16), (32, 16), (128, 16)], ids=str)
def test_steps_of_eight_blocks(block, form, causal, head_dim, device):
    """Key blocks of 16: of a step some are missing, some end the sequence, some nobody sees."""
    pattern, options = "random", {"causal": causal, "spare": 2}
    if form == "fixed":
        shape = Shape(2, 333, 611, 4, 2, head_dim)
        served(make_case(shape, torch.bfloat16, device, pattern, block, shared=True, **options))
        served(make_case(shape, torch.bfloat16, device, pattern, block, **options))
        return
    lengths = (77, 0, 300, 5, 20, 100), (77, 40, 555, 200, 2000, 10)
    packed = Packed(*lengths, 4, 2, head_dim, padding=3)
    served(make_packed(packed, torch.bfloat16, device, pattern, block, **options))


@pytest.mark.parametrize("shared", [False, True], ids=["per_head", "shared"])
@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (6, 1), (12, 2), (5, 5)], ids=str)
def test_groups(heads, shared, device):
    """Pairs of heads, where there are pairs; none holds heads of two groups."""
    shape = Shape(2, 200, 300, *heads, 64)
    served(make_case(shape, torch.bfloat16, device, "random", (32, 32), shared=shared))


@pytest.mark.parametrize("dims", [(33, 33), (63, 1), (70, 50), (127, 121), (1, 65)], ids=str)
@pytest.mark.parametrize("form", ["fixed", "packed"])
def test_rows_that_are_widened(form, dims, device):
    """Head dimensions of which a row is no whole number of accesses."""
    if form == "fixed":
        shape = Shape(2, 150, 222, 2, 1, *dims)
        served(make_case(shape, torch.float16, device, "local", (64, 64)))
        return
    packed = Packed((150, 9), (222, 9), 2, 1, *dims)
    served(make_packed(packed, torch.float16, device, "local", (64, 64)))


@pytest.mark.parametrize("shared", [False, True], ids=["per_head", "shared"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("block", [(16, 16), (128, 16), (32, 32)], ids=str)
def test_small_blocks_that_nobody_sees(block, causal, shared, device):
    """NaN between the blocks of a step, and in what only rows ahead of the chunk keep."""
    rows, cols = (-(-980 // side) for side in block)
    generator = torch.Generator().manual_seed(0)
    kept = torch.rand(1 if shared else 4, rows, cols, generator=generator) < 0.4
    kept[..., 1::3] = False
    first_row = 580 // block[0]
    kept[:, first_row - 1, 3] = True
    kept[:, first_row:, 3] = False
    layout = BlockSparseLayout.from_dense(kept, block).to(device)
    case = make_case(Shape(1, 400, 980, 4, 2, 128), torch.bfloat16, device, causal=causal)
    case = case.with_options(layout=layout)
    unseen = ~visible_keys(layout.to_dense(), block, 400, 980, causal).flatten(0, 1).any(0)
    assert unseen[block[1] : 2 * block[1]].all()
    assert unseen[3 * block[1] : 4 * block[1]].all()
    want = served(case)
    bad = {name: t.clone() for name, t in case.inputs.items()}
    for name in "kv":
        bad[name][:, unseen] = math.nan
    assert_same(run(case.with_inputs(**bad), grad=False), want)
