"""Helpers of planning tests that other tests use too."""

from __future__ import annotations

import torch
from blocksparse_attn._layout.kept_lists import make_lists

from ._definition import defined_lists


def assert_planned_alike(layout, *specs, device, rule=None):
    crow, col = layout._crow.to(device), layout._col.to(device)
    for spec in specs:
        arguments = crow, col, layout.num_cols, layout.block_size, spec, rule
        made, want = make_lists(*arguments), defined_lists(*arguments)
        assert type(made) is type(want)
        for name, mine, eager in zip(want._fields, made, want, strict=True):
            assert mine.dtype == eager.dtype, name
            assert torch.equal(mine, eager), (spec, name, mine, eager)
