"""Limits of how calls are written: tensors, numbers and enumerations where they belong.

Each case cites the documentation page on which the limit rests; the error carries it, too.
"""

from __future__ import annotations

import numpy as np
import pytest

from .._limits import Limits, range_select
from .._nki import hbm, nisa, nl, psum, sbuf, zeros

limit = Limits()


def index(rows=8, dtype="int32"):
    return zeros((rows, 1), dtype)


# operands


@limit("nki.tensor", "nisa.tensor_copy: src must be a tensor, got 1.0")
def a_number_for_a_tensor():
    nisa.tensor_copy(sbuf((8, 8)), 1.0)


@limit("nki.api.shared", "nisa.tensor_tensor: op must be an operator of nl, got add")
def a_string_for_an_operator():
    nisa.tensor_tensor(sbuf((8, 8)), zeros((8, 8)), zeros((8, 8)), "add")


@limit(
    "nki.isa.tensor_scalar, data types",
    "nisa.tensor_scalar: operand0 must be a number or a (partitions, 1) tile, got str",
)
def a_string_for_a_number():
    nisa.tensor_scalar(sbuf((8, 8)), zeros((8, 8)), nl.add, "1")


@limit("nki.isa.engine", "nisa.memset: engine must be one of nisa.engine, got 'vector'")
def a_string_for_an_engine():
    nisa.memset(sbuf((8, 8)), 0.0, engine="vector")


@limit("nki.isa.engine", "nisa.nc_transpose: engine must be one of nisa.engine, got 'tensor'")
def a_string_for_the_engine_of_a_transpose():
    nisa.nc_transpose(psum((8, 8)), zeros((8, 8)), engine="tensor")


@limit("nki.isa.reduce_cmd", "nisa.activation: reduce_cmd must be one of nisa.reduce_cmd, got 9")
def a_number_for_a_command():
    nisa.activation(sbuf((8, 8)), nl.exp, zeros((8, 8)), reduce_cmd=9)


@limit("nki.isa.oob_mode", "nisa.dma_copy: oob_mode must be one of nisa.oob_mode, got 9")
def a_number_for_a_mode():
    nisa.dma_copy(sbuf((8, 8)), hbm((8, 8)), oob_mode=9)


@limit(
    "nki.isa.matmul_perf_mode",
    "nisa.nc_matmul: perf_mode must be one of nisa.matmul_perf_mode, got 'double_row'",
)
def a_string_for_a_perf_mode():
    nisa.nc_matmul(psum((8, 8)), zeros((8, 8)), zeros((8, 8)), perf_mode="double_row")


@limit("nki.isa.tensor_tensor", "nisa.tensor_tensor: engine must be vector, got gpsimd")
def bits_on_gpsimd():
    x = zeros((8, 8), "int32")
    nisa.tensor_tensor(sbuf((8, 8), "int32"), x, x, nl.bitwise_and, engine=nisa.engine.gpsimd)


@limit("nki/guides/architecture, engines", "nisa.memset: dst must be in SBUF for GpSimd, got psum")
def a_memset_of_psum_on_gpsimd():
    nisa.memset(psum((8, 8)), 0.0, engine=nisa.engine.gpsimd)


@limit("nki/migration, memset", "nisa.memset: value must be an int for int32, got 1.0")
def a_float_into_integers():
    nisa.memset(sbuf((8, 8), "int32"), 1.0)


@limit("nki/migration, memset", "nisa.memset: value must be a number for bfloat16, got '0'")
def a_string_into_floats():
    nisa.memset(sbuf((8, 8), "bfloat16"), "0")


@limit("nki.isa.memset", "nisa.memset: value must be from 0 to 255 for uint8, got 300")
def a_constant_that_does_not_fit():
    nisa.memset(sbuf((8, 8), "uint8"), 300)


@limit(
    "nki.isa.activation, data types",
    "nisa.activation: bias must be a number or a (partitions, 1) tile, got str",
)
def a_string_for_a_bias():
    nisa.activation(sbuf((8, 8)), nl.exp, zeros((8, 8)), bias="1")


@limit("nki.isa.nc_matmul", "nisa.nc_matmul: accumulate must be True, False or None, got 'add'")
def a_string_for_an_accumulation():
    nisa.nc_matmul(psum((8, 8)), zeros((8, 8)), zeros((8, 8)), accumulate="add")


@limit("nki.isa.nc_matmul", "nisa.nc_matmul: accumulate must be True, False or None, got 0")
def a_number_for_an_accumulation():
    nisa.nc_matmul(psum((8, 8)), zeros((8, 8)), zeros((8, 8)), accumulate=0)


@limit(
    "nki.isa.nc_matmul",
    f"nisa.nc_matmul: accumulate must be True, False or None, got {np.False_!r}",
)
def a_boolean_of_numpy_for_an_accumulation():
    nisa.nc_matmul(psum((8, 8)), zeros((8, 8)), zeros((8, 8)), accumulate=np.False_)


# arguments that a call does not have


@limit(
    "nki/migration",
    "nisa.tensor_copy: dtype is of neuronxcc.nki; the dtype of dst decides, got 'float32'",
)
def a_dtype_of_a_copy():
    nisa.tensor_copy(sbuf((8, 8)), zeros((8, 8)), dtype=nl.float32)


@limit("nki/migration", "nisa.memset: mask is of neuronxcc.nki; slice the operands, got None")
def a_mask():
    nisa.memset(sbuf((8, 8)), 0.0, mask=None)


@limit("nki.isa.memset", "nisa.memset: colour must be one of engine, name, got 1")
def an_argument_that_nobody_knows():
    nisa.memset(sbuf((8, 8)), 0.0, colour=1)


@limit(
    "nki.isa.memset",
    "nisa.memset: dst must be one of engine, name, got sbuf: float32 (8, 8) in sbuf",
)
def an_argument_given_twice():
    nisa.memset(sbuf((8, 8)), 0.0, dst=sbuf((8, 8)))


@limit("nki.isa.reciprocal", "nisa.reciprocal: arguments may be 3 at most, got 4")
def arguments_beyond_the_last():
    nisa.reciprocal(sbuf((8, 8)), zeros((8, 8)), "name", 1)


@limit("nki.isa.tensor_copy", "nisa.tensor_copy: src must be given, got nothing")
def a_copy_that_returns_a_tile():
    nisa.tensor_copy(zeros((8, 8)))


@limit("nki.language.ndarray", "nl.ndarray: shape must be a tuple of integers, got 8")
def a_number_for_a_shape():
    nl.ndarray(8, nl.float32)


@limit("nki.isa.iota", "nisa.iota: pattern must be of pairs of integers, stride and count, got 8")
def a_number_for_a_pattern():
    nisa.iota(sbuf((8, 8)), 8)


# destinations and patterns


@limit("nki.tensor", "nisa.memset: dst must not write an element twice, got [[1, 8], [0, 8]]")
def a_destination_that_repeats():
    nisa.memset(sbuf((8, 1)).broadcast(1, 8), 0.0)


@limit(
    "nki.tensor",
    "nisa.tensor_copy: src must take partitions one after the other, without holes, got every 2",
)
def every_second_partition():
    nisa.tensor_copy(sbuf((4, 8)), zeros((8, 8))[0:8:2])


@limit(
    "nki.tensor",
    "nisa.dma_copy: dst must take partitions one after the other, without holes, got every 2",
)
def every_second_partition_by_dma():
    nisa.dma_copy(zeros((8, 8))[0:8:2], hbm((4, 8)))


@limit(
    "nki/guides/architecture",
    "nisa.dma_copy: dst must have 2 to 5 dimensions, the partition first, got (1, 1, 1, 1, 1, 1)",
)
def a_dma_of_six_dimensions_from_an_inner_partition():
    tile = sbuf((8, 1, 1, 1, 1, 1))[5:6]
    nisa.dma_copy(tile, hbm((1, 1)))


@limit("nki.tensor", "vector_select: dim must be 0, got 1")
def indices_of_an_inner_dimension():
    hbm((8, 8)).vector_select(1, index())


@limit("nki.tensor", "vector_select: vector_offset must be a tensor, got 3")
def an_index_that_is_a_number():
    hbm((8, 8)).vector_select(0, 3)


@limit("nki.tensor", "ap: pattern needs counts from 1, got (8, 0)")
def an_access_pattern_of_nothing():
    hbm((8, 8)).ap([[8, 8], [1, 0]])


@limit("nki.isa.dma_copy, indirect", "ap: indirect_dim must be an integer from 0 to 1, got 2")
def indices_of_a_dimension_that_is_not_there():
    hbm((8, 8)).ap([[8, 8], [1, 8]], vector_offset=index(), indirect_dim=2)


@limit("nki.isa.dma_copy, indirect", "ap: scalar_offset must be (1, 1), got (8, 1)")
def a_scalar_offset_of_eight():
    hbm((8, 8)).ap([[8, 1], [1, 8]], scalar_offset=index())


@limit("nki.tensor", "slice: dim must be an integer from 0 to 1, got 2")
def a_slice_of_a_dimension_that_is_not_there():
    sbuf((8, 8)).slice(2, 0, 1)


@limit("nki.tensor", "squeeze_dim: sbuf must have one element in dimension 1, got 8")
def a_dimension_of_eight_removed():
    sbuf((8, 8)).squeeze_dim(1)


@limit(
    "nki.tensor",
    "view: sbuf must be direct, with a contiguous last dimension, got [[8, 8], [2, 4]]",
)
def a_view_of_every_second_element():
    sbuf((8, 8))[:, ::2].view("int32")


# reductions


@limit("nki.isa.activation_reduce", "nisa.activation_reduce: reduce_res must be a tile, got None")
def an_activation_that_reduces_to_nothing():
    nisa.activation_reduce(sbuf((8, 8)), nl.exp, zeros((8, 8)), nl.add, None)


@limit(
    "nki.isa.tensor_reduce",
    "nisa.tensor_reduce: axis must be a number or a tuple of numbers, got None",
)
def a_reduction_without_an_axis():
    nisa.tensor_reduce(sbuf((8, 1)), nl.add, zeros((8, 8)), axis=None)


@limit(
    "nki.isa.select_reduce, accumulator",
    "nisa.select_reduce: reduce_res must be left out with reduce_cmd.idle, after which registers "
    "hold anything, got sbuf",
)
def a_result_of_registers_that_idle():
    p = zeros((8, 8), "uint8")
    nisa.select_reduce(sbuf((8, 8)), p, zeros((8, 8)), 0.0, reduce_res=sbuf((8, 1)))


@limit(
    "nki.isa.range_select, accumulator",
    "nisa.range_select: reduce_cmd must be idle, reset_reduce, reduce, got load_reduce",
)
def a_range_that_loads_registers():
    range_select(reduce_cmd=nisa.reduce_cmd.load_reduce)


@limit(
    "nki.isa.exponential, accumulator",
    "nisa.exponential: reduce_cmd must be idle, reset_reduce, reduce, load_reduce, got reset",
    "trn3",
)
def an_exponential_that_only_resets():
    nisa.exponential(sbuf((8, 8)), zeros((8, 8)), reduce_cmd=nisa.reduce_cmd.reset)


@limit("nki.isa.range_select", "nisa.range_select: on_true_tile must be of floats, got int32")
def a_range_of_integers():
    bound = zeros((8, 1))
    x = zeros((8, 8), "int32")
    nisa.range_select(sbuf((8, 8)), x, nl.less, nl.less, bound, bound)


@limit("nki.isa.select_reduce", "nisa.select_reduce: reduce_op must be nl.maximum, got add")
def a_selection_with_a_sum():
    p = zeros((8, 8), "uint8")
    nisa.select_reduce(sbuf((8, 8)), p, zeros((8, 8)), 0.0, reduce_op=nl.add)


@limit("nki.isa.select_reduce", "nisa.select_reduce: reduce_res must be of floats, got int32")
def a_selection_whose_maximum_is_an_integer():
    p, command = zeros((8, 8), "uint8"), nisa.reduce_cmd.reset_reduce
    nisa.select_reduce(
        sbuf((8, 8)), p, zeros((8, 8)), 0.0, reduce_res=sbuf((8, 1), "int32"), reduce_cmd=command
    )


@limit("nki.isa.iota", "nisa.iota: pattern must have 1 to 4 dimensions, got []")
def an_iota_without_a_pattern():
    nisa.iota(sbuf((8, 1)), [])


@limit(
    "nki.api.shared",
    "nisa.tensor_scalar: op1 must be an arithmetic operator of two operands, got exp",
)
def an_activation_as_a_second_operator():
    nisa.tensor_scalar(sbuf((8, 8)), zeros((8, 8)), nl.add, 1.0, op1=nl.exp, operand1=1.0)


@limit(
    "nki.api.shared",
    "nisa.tensor_scalar_reduce: op0 must be an arithmetic operator of two operands, got exp",
)
def an_activation_before_a_reduction():
    nisa.tensor_scalar_reduce(sbuf((8, 8)), zeros((8, 8)), nl.exp, 1.0, nl.add, sbuf((8, 1)))


@pytest.mark.parametrize("name", limit.names())
def test_limit(name):
    limit.check(name)


@pytest.mark.parametrize("name", limit.names(of_values=False))
def test_limit_without_computing(name):
    limit.check_without_computing(name)
