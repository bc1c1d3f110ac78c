"""Limits of VectorE and GpSimd.

Each case cites the documentation page on which the limit rests; the error carries it, too.
"""

from __future__ import annotations

import pytest

from ._limits import Limits, range_select
from ._nki import nisa, nl, psum, sbuf, zeros

limit = Limits()

# VectorE and GpSimd


@limit("nki.isa.tensor_tensor, memory types", "nisa.tensor_tensor", "must not both be in PSUM")
def two_inputs_in_psum():
    x, y = zeros((8, 8), buffer="psum"), zeros((8, 8), buffer="psum")
    nisa.tensor_tensor(sbuf((8, 8)), x, y, nl.add)


@limit("nki.isa.tensor_tensor, tile size", "nisa.tensor_tensor", "must have 8 partitions of 8")
def inputs_of_different_sizes():
    nisa.tensor_tensor(sbuf((8, 8)), zeros((8, 8)), zeros((8, 1)), nl.add)


@limit("nki.isa.tensor_tensor", "nisa.tensor_tensor", "must be integers")
def bits_of_floats():
    nisa.tensor_tensor(sbuf((8, 8)), zeros((8, 8)), zeros((8, 8)), nl.bitwise_and)


@limit("nki.api.shared", "nisa.tensor_tensor", "arithmetic operator of two operands")
def an_activation_as_an_operator():
    nisa.tensor_tensor(sbuf((8, 8)), zeros((8, 8)), zeros((8, 8)), nl.exp)


@limit("engines of a NeuronCore", "nisa.tensor_tensor", "must be in SBUF for GpSimd")
def gpsimd_with_psum():
    x = zeros((8, 8), buffer="psum")
    nisa.tensor_tensor(sbuf((8, 8)), x, zeros((8, 8)), nl.add, engine=nisa.engine.gpsimd)


@limit("nki.isa.tensor_tensor", "nisa.tensor_tensor", "must be vector or gpsimd")
def tensor_tensor_on_scalar():
    x = zeros((8, 8))
    nisa.tensor_tensor(sbuf((8, 8)), x, x, nl.add, engine=nisa.engine.scalar)


@limit("nki.isa.tensor_scalar, data types", "nisa.tensor_scalar", "must be float32")
def a_vector_operand_in_bf16():
    nisa.tensor_scalar(sbuf((8, 8)), zeros((8, 8)), nl.add, zeros((8, 1), "bfloat16"))


@limit("nki.isa.tensor_scalar", "nisa.tensor_scalar", "must be (8, 1)")
def a_vector_operand_of_two_columns():
    nisa.tensor_scalar(sbuf((8, 8)), zeros((8, 8)), nl.add, zeros((8, 2)))


@limit("nki.isa.tensor_scalar", "nisa.tensor_scalar", "on ScalarE, from gen3 on")
def a_maximum_on_scalar():
    nisa.tensor_scalar(sbuf((8, 8)), zeros((8, 8)), nl.maximum, 0.0, engine=nisa.engine.scalar)


@limit("nki.isa.tensor_scalar", "nisa.tensor_scalar", "gpsimd for rsqrt only")
def a_sum_on_gpsimd():
    nisa.tensor_scalar(sbuf((8, 8)), zeros((8, 8)), nl.add, 0.0, engine=nisa.engine.gpsimd)


@limit("nki.isa.scalar_tensor_tensor, memory", "nisa.scalar_tensor_tensor", "both be in PSUM")
def two_tiles_in_psum():
    x, y = zeros((8, 8), buffer="psum"), zeros((8, 8), buffer="psum")
    nisa.scalar_tensor_tensor(sbuf((8, 8)), x, nl.add, 1.0, nl.add, y)


@limit("nki.isa.tensor_reduce", "nisa.tensor_reduce", "must not be 0, the partitions")
def a_reduction_over_partitions():
    nisa.tensor_reduce(sbuf((1, 8)), nl.add, zeros((8, 8)), axis=0)


@limit("nki.isa.tensor_reduce", "nisa.tensor_reduce", "must be the last dimensions")
def a_reduction_of_a_dimension_in_the_middle():
    nisa.tensor_reduce(sbuf((8, 4)), nl.add, zeros((8, 2, 4)), axis=1)


@limit("nki.api.shared", "nisa.tensor_reduce", "must be one that reduces")
def a_reduction_by_comparison():
    nisa.tensor_reduce(sbuf((8, 1)), nl.less, zeros((8, 8)), axis=1)


@limit("nki.isa.tensor_reduce", "nisa.tensor_reduce", "8 partitions of 1 elements")
def a_reduction_into_another_shape():
    nisa.tensor_reduce(sbuf((8, 2)), nl.add, zeros((8, 8)), axis=1)


@limit("nki.isa.tensor_copy", "nisa.tensor_copy", "must not be scalar on trn1", "trn1")
def a_copy_on_scalar_of_gen2():
    nisa.tensor_copy(sbuf((8, 8)), zeros((8, 8)), engine=nisa.engine.scalar)


@limit("engines of a NeuronCore", "nisa.tensor_copy", "must be in SBUF for GpSimd")
def a_copy_from_psum_on_gpsimd():
    nisa.tensor_copy(sbuf((8, 8)), zeros((8, 8), buffer="psum"), engine=nisa.engine.gpsimd)


@limit("nki.isa.memset", "nisa.memset", "must be an integer for int32")
def a_fraction_into_integers():
    nisa.memset(sbuf((8, 8), "int32"), 0.5)


@limit("nki.isa.tensor_copy_predicated", "nisa.tensor_copy_predicated", "uint8, uint16 or uint32")
def a_predicate_of_floats():
    nisa.tensor_copy_predicated(zeros((8, 8)), zeros((8, 8)), zeros((8, 8)))


@limit("nki.isa.tensor_copy_predicated", "nisa.tensor_copy_predicated", "must have dst's dtype")
def a_predicated_copy_that_converts():
    p = zeros((8, 8), "uint8")
    nisa.tensor_copy_predicated(zeros((8, 8)), zeros((8, 8), "bfloat16"), p)


@limit("nki.isa.tensor_copy_predicated", "nisa.tensor_copy_predicated", "both be in PSUM")
def source_and_predicate_in_psum():
    x, p = zeros((8, 8), buffer="psum"), zeros((8, 8), "uint8", "psum")
    nisa.tensor_copy_predicated(zeros((8, 8)), x, p)


@limit("nki.isa.select_reduce", "nisa.select_reduce", "int8, uint8, int16 or uint16")
def a_selection_by_32_bits():
    nisa.select_reduce(sbuf((8, 8)), zeros((8, 8), "uint32"), zeros((8, 8)), 0.0)


@limit("nki.isa.select_reduce", "nisa.select_reduce", "must not be int32")
def a_selection_of_integers():
    x = zeros((8, 8), "int32")
    nisa.select_reduce(sbuf((8, 8)), zeros((8, 8), "uint8"), x, 0.0)


@limit("nki.isa.range_select", "nisa.range_select", "must be trn2 or newer", "trn1")
def range_select_on_gen2():
    range_select()


@limit("nki.isa.range_select", "nisa.range_select", "must be -3.4028235e+38")
def range_select_with_another_fill():
    range_select(on_false_value=-9984.0)


@limit("nki.isa.range_select", "nisa.range_select", "must be one of equal, less")
def range_select_by_inequality():
    range_select(comp_op0=nl.not_equal)


@limit("nki.isa.range_select", "nisa.range_select", "must be float32")
def range_select_with_bounds_in_bf16():
    range_select(bound0=zeros((8, 1), "bfloat16"))


@limit("nki.isa.range_select", "nisa.range_select", "must stay within 2**24")
def range_select_past_2_to_the_24():
    range_select(range_start=2**24)


@limit("nki.isa.range_select", "nisa.range_select", "must be nl.maximum")
def range_select_with_a_sum():
    range_select(reduce_op=nl.add)


@limit(
    "nki.isa.range_select, accumulator",
    "nisa.range_select",
    "chain that began with",
    of_values=True,
)
def a_chain_without_a_beginning():
    range_select(reduce_cmd=nisa.reduce_cmd.reduce)


@limit(
    "nki.isa.range_select, accumulator",
    "nisa.range_select",
    "chain that began with",
    of_values=True,
)
def a_chain_that_an_idle_instruction_broke():
    range_select(reduce_cmd=nisa.reduce_cmd.reset_reduce)
    nisa.select_reduce(sbuf((8, 8)), zeros((8, 8), "uint8"), zeros((8, 8)), 0.0)
    range_select(reduce_cmd=nisa.reduce_cmd.reduce)


@limit("nki.isa.exponential", "nisa.exponential", "must be trn3 or newer")
def exponential_before_gen4():
    nisa.exponential(sbuf((8, 8)), zeros((8, 8)))


@limit("nki.isa.iota", "nisa.iota", "must have 8 elements")
def an_iota_of_another_size():
    nisa.iota(sbuf((8, 8)), [[1, 9]])


@limit("nki.isa.iota, memory types", "nisa.iota", "must be in SBUF")
def an_iota_into_psum():
    nisa.iota(psum((8, 8)), [[1, 8]])


@limit("nki.isa.affine_select, memory types", "nisa.affine_select", "must be in SBUF")
def an_affine_select_from_psum():
    nisa.affine_select(sbuf((8, 8)), [[1, 8]], 1, zeros((8, 8), buffer="psum"), 0.0)


@limit("nki.isa.affine_select", "nisa.affine_select", "must be a comparison")
def an_affine_select_by_a_sum():
    nisa.affine_select(sbuf((8, 8)), [[1, 8]], 1, zeros((8, 8)), 0.0, cmp_op=nl.add)


@limit("nki.isa.tensor_scalar_reduce", "nisa.tensor_scalar_reduce", "must be add, multiply")
def a_scalar_reduction_by_comparison():
    x = zeros((8, 8))
    nisa.tensor_scalar_reduce(sbuf((8, 8)), x, nl.add, 0.0, nl.less, sbuf((8, 1)))


@pytest.mark.parametrize("name", limit.names())
def test_limit(name):
    limit.check(name)


@pytest.mark.parametrize("name", limit.names(of_values=False))
def test_limit_without_computing(name):
    limit.check_without_computing(name)
