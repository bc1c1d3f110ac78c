"""The parameters of each kernel are the fields of the structures that its launch passes."""

from __future__ import annotations

import inspect

import pytest
from attn_common import has_gluon
from blocksparse_attn._kernels import structures as s
from blocksparse_attn._kernels.backward_dkdv import _dkdv_kernel
from blocksparse_attn._kernels.backward_dq import _dq_kernel
from blocksparse_attn._kernels.backward_rows import _row_kernel
from blocksparse_attn._kernels.forward import _forward_kernel
from blocksparse_attn._kernels.merge import _merge_kernel

pytestmark = pytest.mark.eager

FORWARD = s.ForwardTensors, s.ForwardNumbers, s.Options, s.QueryOptions, s.ForwardOptions
PORTABLE = [
    (_forward_kernel, (*FORWARD, s.TileOptions)),
    (_merge_kernel, (s.MergeTensors, s.MergeNumbers, s.MergeOptions, s.TileOptions)),
    (_row_kernel, (s.RowTensors, s.RowNumbers, s.RowOptions)),
    (_dkdv_kernel, (s.KeyTensors, s.GradientNumbers, s.Options, s.KeyTileOptions)),
    (_dq_kernel, (s.QueryTensors, s.GradientNumbers, s.Options, s.QueryOptions, s.TileOptions)),
]


def assert_parameters(kernel, structures):
    """Hold the names of a kernel's parameters, compiled or interpreted, to those of fields."""
    names = [name for structure in structures for name in structure._fields]
    assert list(inspect.signature(kernel.fn).parameters) == names


@pytest.mark.parametrize(
    ("kernel", "structures"), PORTABLE, ids=[kernel.fn.__name__ for kernel, _ in PORTABLE]
)
def test_portable(kernel, structures):
    assert_parameters(kernel, structures)


@pytest.mark.skipif(not has_gluon(), reason="Triton without Gluon")
def test_hopper():
    from blocksparse_attn._kernels.hopper import round_structures as r
    from blocksparse_attn._kernels.hopper import structures as h
    from blocksparse_attn._kernels.hopper.backward import hopper_backward_kernel
    from blocksparse_attn._kernels.hopper.backward_round import prepare_kernel, round_kernel
    from blocksparse_attn._kernels.hopper.forward import hopper_forward_kernel
    from blocksparse_attn._kernels.hopper.row_gradients import hopper_dq_kernel

    for kernel, structures in (
        (
            hopper_forward_kernel,
            (h.ForwardTensors, h.ForwardNumbers, h.ForwardOptions, h.ForwardTile),
        ),
        (hopper_dq_kernel, (h.DqTensors, h.ForwardNumbers, h.ForwardOptions, h.ForwardTile)),
        (
            hopper_backward_kernel,
            (h.BackwardTensors, h.BackwardNumbers, h.BackwardOptions, h.BackwardTile),
        ),
        (prepare_kernel, (r.PrepareTensors, r.PrepareNumbers, r.PrepareOptions)),
        (round_kernel, (r.RoundTensors, r.RoundNumbers, r.RoundOptions)),
    ):
        assert_parameters(kernel, structures)


def test_the_numbers_of_rows_have_the_same_names_ahead_of_both_backwards():
    """One device function reads them in two kernels."""
    from blocksparse_attn._kernels.hopper import round_structures as r

    for one, other in (
        (s.RowTensors, r.PrepareTensors),
        (s.RowNumbers, r.PrepareNumbers),
        (s.RowOptions, r.PrepareOptions),
    ):
        assert set(one._fields) <= set(other._fields)
