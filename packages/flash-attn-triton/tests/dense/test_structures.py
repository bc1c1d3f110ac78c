"""The parameters of each kernel are the fields of the structures that its launch passes."""

from __future__ import annotations

import inspect

import pytest
from attn_common import has_gluon
from flash_attn_triton._dense.portable import structures as s
from flash_attn_triton._dense.portable.backward_dkdv import dkdv_kernel
from flash_attn_triton._dense.portable.backward_dq import dq_kernel
from flash_attn_triton._dense.portable.backward_rows import row_kernel
from flash_attn_triton._dense.portable.backward_short import short_kernel
from flash_attn_triton._dense.portable.bias_gradient import bias_gradient_kernel
from flash_attn_triton._dense.portable.forward import forward_kernel
from flash_attn_triton._linked.invariant import kernels as invariant
from flash_attn_triton._linked.invariant import structures as i
from flash_attn_triton._parallel.kernels.merge import merge_kernel
from flash_attn_triton._parallel.kernels.wait import wait_kernel

pytestmark = pytest.mark.eager

GRADIENT_NUMBERS = (s.Scalars, s.Counts, s.GradientStrides, s.Strides)
BIAS_NUMBERS = (s.Scalars, s.BiasCounts, s.GradientStrides, s.Strides)
PORTABLE = [
    (forward_kernel, (s.ForwardTensors, s.Scalars, s.Counts, s.Strides, s.ForwardOptions, s.Tile)),
    (row_kernel, (s.RowTensors, s.RowCounts, s.GradientStrides, s.SumCounts, s.RowTile)),
    (
        dkdv_kernel,
        (s.Inputs, "dk_ptr", "dv_ptr", s.Extras, *GRADIENT_NUMBERS, s.Options, s.Tile, "SETTLE"),
    ),
    (dq_kernel, (s.Inputs, "dq_ptr", s.Extras, *GRADIENT_NUMBERS, s.Options, s.Tile)),
    (short_kernel, (s.ShortTensors, s.ShortNumbers, s.Options, s.Tile, "SETTLE")),
    (merge_kernel, (s.MergeTensors, s.MergeNumbers, s.MergeTile)),
    (wait_kernel, ("x_ptr", "nanoseconds")),
    (bias_gradient_kernel, (s.Inputs, "dbias_ptr", s.Extras, *BIAS_NUMBERS, s.Options, s.Tile)),
    (invariant.invariant_kernel, (i.Tensors, i.Numbers, i.Options, i.Tile)),
    (invariant.invariant_merge_kernel, (i.MergeTensors, i.MergeNumbers, i.MergeTile)),
]


def fields(parts):
    """Return the names of parameters in order."""
    return [name for part in parts for name in ([part] if isinstance(part, str) else part._fields)]


def parameters(kernel):
    """Return those of a kernel, compiled or interpreted."""
    return list(inspect.signature(kernel.fn).parameters)


@pytest.mark.parametrize(("kernel", "parts"), PORTABLE, ids=lambda x: getattr(x, "__name__", ""))
def test_portable_kernels_take_what_is_passed(kernel, parts):
    assert parameters(kernel) == fields(parts)


@pytest.mark.skipif(not has_gluon(), reason="this Triton has no Gluon")
def test_kernels_for_hopper_take_what_is_passed():
    from flash_attn_triton._dense.hopper import bias_launch
    from flash_attn_triton._dense.hopper import parameters as p
    from flash_attn_triton._dense.hopper.backward import launch as backward_launch
    from flash_attn_triton._dense.hopper.backward import structures as b
    from flash_attn_triton._dense.hopper.forward import launch as forward_launch
    from flash_attn_triton._dense.hopper.forward import structures

    launched = [
        (
            forward_launch.forward_kernel,
            (p.ForwardTensors, p.ForwardNumbers, structures.Options, structures.Tile),
        ),
        (backward_launch.backward_kernel, (b.Maps, b.Tensors, b.Numbers, b.Options, b.Tile)),
        (
            backward_launch.round_dq_kernel,
            (p.RoundingTensors, p.RoundingNumbers, p.RoundingConstants),
        ),
        (
            bias_launch.sum_bias_kernel,
            (p.BiasSumTensors, p.BiasSumNumbers, p.BiasSumConstants),
        ),
        (forward_launch.transpose_values, (p.ValuesTensors, p.ValuesNumbers, p.ValuesConstants)),
    ]
    for kernel, parts in launched:
        assert parameters(kernel) == fields(parts), kernel.__name__


def test_every_kernel_that_a_plan_launches_is_compared():
    from flash_attn_triton._dense import launch as dense_launch
    from flash_attn_triton._dense.portable import backward_launch
    from flash_attn_triton._linked.invariant import plans as invariant_plans
    from flash_attn_triton._parallel.kernels import launch as parallel_launch

    compared = {kernel.__name__ for kernel, _ in PORTABLE}
    modules = dense_launch, backward_launch, parallel_launch, invariant_plans
    launched = {n for m in modules for n in vars(m) if n.endswith("_kernel")}
    assert launched == compared
