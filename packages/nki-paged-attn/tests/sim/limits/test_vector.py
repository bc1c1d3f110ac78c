"""Limits of VectorE and GpSimd.

Each case cites the documentation page on which the limit rests; the error carries it, too.
"""

from __future__ import annotations

import pytest

from .._limits import Limits, range_select
from .._nki import nisa, nl, psum, sbuf, zeros

limit = Limits()

# VectorE and GpSimd


@limit(
    "nki.isa.tensor_tensor, memory types",
    "nisa.tensor_tensor: data1 and data2 must not both be in PSUM, got psum and psum",
)
def two_inputs_in_psum():
    x, y = zeros((8, 8), buffer="psum"), zeros((8, 8), buffer="psum")
    nisa.tensor_tensor(sbuf((8, 8)), x, y, nl.add)


@limit(
    "nki.isa.tensor_tensor, tile size",
    "nisa.tensor_tensor: data2 must have 8 partitions of 8 elements, got 8 of 1",
)
def inputs_of_different_sizes():
    nisa.tensor_tensor(sbuf((8, 8)), zeros((8, 8)), zeros((8, 1)), nl.add)


@limit(
    "nki.isa.tensor_tensor",
    "nisa.tensor_tensor: data1, data2 and dst must be integers for bitwise_and, got "
    "['float32', 'float32', 'float32']",
)
def bits_of_floats():
    nisa.tensor_tensor(sbuf((8, 8)), zeros((8, 8)), zeros((8, 8)), nl.bitwise_and)


@limit(
    "nki.api.shared",
    "nisa.tensor_tensor: op must be an arithmetic operator of two operands, got exp",
)
def an_activation_as_an_operator():
    nisa.tensor_tensor(sbuf((8, 8)), zeros((8, 8)), zeros((8, 8)), nl.exp)


@limit(
    "nki/guides/architecture, engines of a NeuronCore",
    "nisa.tensor_tensor: data1 must be in SBUF for GpSimd, got psum",
)
def gpsimd_with_psum():
    x = zeros((8, 8), buffer="psum")
    nisa.tensor_tensor(sbuf((8, 8)), x, zeros((8, 8)), nl.add, engine=nisa.engine.gpsimd)


@limit("nki.isa.tensor_tensor", "nisa.tensor_tensor: engine must be vector or gpsimd, got scalar")
def tensor_tensor_on_scalar():
    x = zeros((8, 8))
    nisa.tensor_tensor(sbuf((8, 8)), x, x, nl.add, engine=nisa.engine.scalar)


@limit(
    "nki.isa.tensor_scalar, data types",
    "nisa.tensor_scalar: operand0 must be float32, got bfloat16",
)
def a_vector_operand_in_bf16():
    nisa.tensor_scalar(sbuf((8, 8)), zeros((8, 8)), nl.add, zeros((8, 1), "bfloat16"))


@limit("nki.isa.tensor_scalar", "nisa.tensor_scalar: operand0 must be (8, 1), got (8, 2)")
def a_vector_operand_of_two_columns():
    nisa.tensor_scalar(sbuf((8, 8)), zeros((8, 8)), nl.add, zeros((8, 2)))


@limit(
    "nki.isa.tensor_scalar",
    "nisa.tensor_scalar: op0 and op1 must be multiply and add, multiply, or add on ScalarE, "
    "from gen3 on, got ['maximum']",
)
def a_maximum_on_scalar():
    nisa.tensor_scalar(sbuf((8, 8)), zeros((8, 8)), nl.maximum, 0.0, engine=nisa.engine.scalar)


@limit(
    "nki.isa.tensor_scalar", "nisa.tensor_scalar: engine may be gpsimd for rsqrt alone, got ['add']"
)
def a_sum_on_gpsimd():
    nisa.tensor_scalar(sbuf((8, 8)), zeros((8, 8)), nl.add, 0.0, engine=nisa.engine.gpsimd)


@limit(
    "nki.isa.scalar_tensor_tensor, memory",
    "nisa.scalar_tensor_tensor: data and operand1 must not both be in PSUM, got psum and psum",
)
def two_tiles_in_psum():
    x, y = zeros((8, 8), buffer="psum"), zeros((8, 8), buffer="psum")
    nisa.scalar_tensor_tensor(sbuf((8, 8)), x, nl.add, 1.0, nl.add, y)


@limit("nki.isa.tensor_reduce", "nisa.tensor_reduce: axis must not be 0, the partitions, got 0")
def a_reduction_over_partitions():
    nisa.tensor_reduce(sbuf((1, 8)), nl.add, zeros((8, 8)), axis=0)


@limit("nki.isa.tensor_reduce", "nisa.tensor_reduce: axis must be the last dimensions of 3, got 1")
def a_reduction_of_a_dimension_in_the_middle():
    nisa.tensor_reduce(sbuf((8, 4)), nl.add, zeros((8, 2, 4)), axis=1)


@limit("nki.api.shared", "nisa.tensor_reduce: op must be one that reduces, got less")
def a_reduction_by_comparison():
    nisa.tensor_reduce(sbuf((8, 1)), nl.less, zeros((8, 8)), axis=1)


@limit(
    "nki.isa.tensor_reduce",
    "nisa.tensor_reduce: dst must have 8 partitions of 1 elements, got (8, 2)",
)
def a_reduction_into_another_shape():
    nisa.tensor_reduce(sbuf((8, 2)), nl.add, zeros((8, 8)), axis=1)


@limit(
    "nki.isa.tensor_copy",
    "nisa.tensor_copy: engine must not be scalar on trn1; use activation with nl.copy, got scalar",
    "trn1",
)
def a_copy_on_scalar_of_gen2():
    nisa.tensor_copy(sbuf((8, 8)), zeros((8, 8)), engine=nisa.engine.scalar)


@limit(
    "nki/guides/architecture, engines of a NeuronCore",
    "nisa.tensor_copy: src must be in SBUF for GpSimd, got psum",
)
def a_copy_from_psum_on_gpsimd():
    nisa.tensor_copy(sbuf((8, 8)), zeros((8, 8), buffer="psum"), engine=nisa.engine.gpsimd)


@limit("nki/migration, memset", "nisa.memset: value must be an int for int32, got 0.5")
def a_fraction_into_integers():
    nisa.memset(sbuf((8, 8), "int32"), 0.5)


@limit(
    "nki.isa.tensor_copy_predicated",
    "nisa.tensor_copy_predicated: predicate must be uint8, uint16 or uint32, got float32",
)
def a_predicate_of_floats():
    nisa.tensor_copy_predicated(zeros((8, 8)), zeros((8, 8)), zeros((8, 8)))


@limit(
    "nki.isa.tensor_copy_predicated",
    "nisa.tensor_copy_predicated: src must have dst's dtype, float32, got bfloat16",
)
def a_predicated_copy_that_converts():
    p = zeros((8, 8), "uint8")
    nisa.tensor_copy_predicated(zeros((8, 8)), zeros((8, 8), "bfloat16"), p)


@limit(
    "nki.isa.tensor_copy_predicated",
    "nisa.tensor_copy_predicated: src and predicate must not both be in PSUM, got psum and psum",
)
def source_and_predicate_in_psum():
    x, p = zeros((8, 8), buffer="psum"), zeros((8, 8), "uint8", "psum")
    nisa.tensor_copy_predicated(zeros((8, 8)), x, p)


@limit(
    "nki.isa.select_reduce",
    "nisa.select_reduce: predicate must be int8, uint8, int16 or uint16, got uint32",
)
def a_selection_by_32_bits():
    nisa.select_reduce(sbuf((8, 8)), zeros((8, 8), "uint32"), zeros((8, 8)), 0.0)


@limit("nki.isa.select_reduce", "nisa.select_reduce: on_true must be of floats, got int16")
def a_selection_of_integers():
    x = zeros((8, 8), "int16")
    nisa.select_reduce(sbuf((8, 8)), zeros((8, 8), "uint8"), x, 0.0)


@limit("nki.isa.range_select", "nisa.range_select: target must be trn2 or newer, got trn1", "trn1")
def range_select_on_gen2():
    range_select()


@limit(
    "nki.isa.range_select", "nisa.range_select: on_false_value must be -3.4028235e+38, got -9984.0"
)
def range_select_with_another_fill():
    range_select(on_false_value=-9984.0)


@limit(
    "nki.isa.range_select",
    "nisa.range_select: comp_op0 must be one of equal, less, less_equal, greater, "
    "greater_equal, got not_equal",
)
def range_select_by_inequality():
    range_select(comp_op0=nl.not_equal)


@limit("nki.isa.range_select", "nisa.range_select: bound0 must be float32, got bfloat16")
def range_select_with_bounds_in_bf16():
    range_select(bound0=zeros((8, 1), "bfloat16"))


@limit(
    "nki.isa.range_select",
    "nisa.range_select: range_start must be from 0, and plus the free size stay within 2**24, "
    "got 16777216",
)
def range_select_past_2_to_the_24():
    range_select(range_start=2**24)


@limit("nki.isa.range_select", "nisa.range_select: reduce_op must be nl.maximum, got add")
def range_select_with_a_sum():
    range_select(reduce_op=nl.add)


@limit(
    "nki.isa.range_select, accumulator",
    "nisa.range_select: reduce_cmd may be reduce only in a chain that began with "
    "reset_reduce, got registers in an unknown state",
)
def a_chain_without_a_beginning():
    range_select(reduce_cmd=nisa.reduce_cmd.reduce)


@limit(
    "nki.isa.range_select, accumulator",
    "nisa.range_select: reduce_cmd may be reduce only in a chain that began with "
    "reset_reduce, got registers in an unknown state",
)
def a_chain_that_an_idle_instruction_broke():
    range_select(reduce_cmd=nisa.reduce_cmd.reset_reduce)
    nisa.select_reduce(sbuf((8, 8)), zeros((8, 8), "uint8"), zeros((8, 8)), 0.0)
    range_select(reduce_cmd=nisa.reduce_cmd.reduce)


@limit("nki.isa.exponential", "nisa.exponential: target must be trn3 or newer, got trn2")
def exponential_before_gen4():
    nisa.exponential(sbuf((8, 8)), zeros((8, 8)))


@limit("nki.isa.iota", "nisa.iota: pattern must have 8 elements, got 9")
def an_iota_of_another_size():
    nisa.iota(sbuf((8, 8)), [[1, 9]])


@limit("nki.isa.iota, memory types", "nisa.iota: dst must be in SBUF, got psum")
def an_iota_into_psum():
    nisa.iota(psum((8, 8)), [[1, 8]])


@limit(
    "nki.isa.affine_select, memory types",
    "nisa.affine_select: on_true_tile must be in SBUF, got psum",
)
def an_affine_select_from_psum():
    nisa.affine_select(sbuf((8, 8)), [[1, 8]], 1, zeros((8, 8), buffer="psum"), 0.0)


@limit("nki.isa.affine_select", "nisa.affine_select: cmp_op must be a comparison, got add")
def an_affine_select_by_a_sum():
    nisa.affine_select(sbuf((8, 8)), [[1, 8]], 1, zeros((8, 8)), 0.0, cmp_op=nl.add)


@limit(
    "nki.isa.tensor_scalar_reduce",
    "nisa.tensor_scalar_reduce: reduce_op must be add, multiply, maximum or minimum, got less",
)
def a_scalar_reduction_by_comparison():
    x = zeros((8, 8))
    nisa.tensor_scalar_reduce(sbuf((8, 8)), x, nl.add, 0.0, nl.less, sbuf((8, 1)))


@limit("nki.isa.tensor_scalar", "nisa.tensor_scalar: operand1 must be None or 0 for abs, got 2.0")
def an_operand_for_a_magnitude():
    nisa.tensor_scalar(sbuf((8, 8)), zeros((8, 8)), nl.add, 1.0, op1=nl.abs, operand1=2.0)


@pytest.mark.parametrize("name", limit.names())
def test_limit(name):
    limit.check(name)


@pytest.mark.parametrize("name", limit.names(of_values=False))
def test_limit_without_computing(name):
    limit.check_without_computing(name)
