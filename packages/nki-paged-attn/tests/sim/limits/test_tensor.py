"""Limits of TensorE.

Each case cites the documentation page on which the limit rests; the error carries it, too.
"""

from __future__ import annotations

import pytest

from .._limits import Limits, matmul
from .._nki import nisa, nl, psum, sbuf, zeros

limit = Limits()

# TensorE


@limit(
    "nki.isa.nc_matmul, tile size",
    "nisa.nc_matmul: moving may have a free size of at most 512 on trn2, got 513",
)
def a_moving_operand_of_more_than_512():
    matmul(n=513)


@limit(
    "nki.isa.nc_matmul, tile size",
    "nisa.nc_matmul: moving may have a free size of at most 512 on trn1, got 513",
    "trn1",
)
def a_moving_operand_of_more_than_512_on_gen2():
    matmul(n=513)


@limit(
    "nki.isa.nc_matmul, tile size",
    "nisa.nc_matmul: moving may have a free size of at most 4096 on trn3, got 4097",
    "trn3",
)
def a_moving_operand_of_more_than_4096_on_gen4():
    dst = psum((8, 1)).ap([[1, 8], [0, 4097]])
    nisa.nc_matmul(dst, zeros((8, 8)), zeros((8, 4097)))


@limit(
    "nki.isa.nc_matmul, tile size",
    "nisa.nc_matmul: stationary may have a free size of at most 128, got 129",
)
def a_stationary_operand_of_more_than_128():
    matmul(m=129, dst=psum((128, 8)))


@limit(
    "nki.isa.nc_matmul, data types",
    "nisa.nc_matmul: stationary and moving must both be float32 if one is, got float32 and "
    "bfloat16",
)
def fp32_with_bf16():
    matmul(dtypes=("float32", "bfloat16"))


@limit(
    "nki.isa.nc_matmul, data types",
    "nisa.nc_matmul: stationary must be one of bfloat16, float16, float32, float8_e4m3, "
    "float8_e5m2 on trn2, got int32",
)
def operands_of_integers():
    matmul(dtypes=("int32", "int32"))


@limit(
    "nki.isa.nc_matmul, data types",
    "nisa.nc_matmul: stationary must be one of bfloat16, float16, float32, float8_e4m3, "
    "float8_e5m2 on trn2, got float8_e4m3fn",
)
def ocp_fp8_before_gen4():
    matmul(dtypes=("float8_e4m3fn", "bfloat16"))


@limit(
    "nki.isa.nc_matmul, data types",
    "nisa.nc_matmul: stationary and moving must not mix the two forms of e4m3, got "
    "float8_e4m3fn and float8_e4m3",
    "trn3",
)
def both_forms_of_fp8():
    matmul(dtypes=("float8_e4m3fn", "float8_e4m3"))


@limit("nki.isa.nc_matmul, memory types", "nisa.nc_matmul: dst must be in PSUM, got sbuf")
def a_product_into_sbuf():
    matmul(dst=sbuf((8, 8)))


@limit("nki.isa.nc_matmul, data types", "nisa.nc_matmul: dst must be float32 on trn2, got bfloat16")
def a_product_in_bf16():
    matmul(dst=psum((8, 8), "bfloat16"))


@limit("nki.isa.nc_matmul, memory types", "nisa.nc_matmul: stationary must be in SBUF, got psum")
def a_stationary_operand_in_psum():
    nisa.nc_matmul(psum((8, 8)), zeros((8, 8), buffer="psum"), zeros((8, 8)))


@limit("nki.isa.nc_matmul, memory types", "nisa.nc_matmul: moving must be in SBUF, got psum")
def a_moving_operand_in_psum():
    nisa.nc_matmul(psum((8, 8)), zeros((8, 8)), zeros((8, 8), buffer="psum"))


@limit(
    "nki.isa.nc_matmul, layout",
    "nisa.nc_matmul: stationary and moving must have the same partitions, the contraction, "
    "got 8 and 7",
)
def contractions_that_differ():
    nisa.nc_matmul(psum((8, 8)), zeros((8, 8)), zeros((7, 8)))


@limit("nki.isa.nc_matmul, layout", "nisa.nc_matmul: dst must be (8, 8), got (8, 9)")
def a_product_of_another_shape():
    matmul(dst=psum((8, 9)))


@limit(
    "nki.isa.nc_matmul, tiling mode",
    "nisa.nc_matmul: tile_position and tile_size must both be set, to two numbers each, got "
    "((0, 0), ())",
)
def a_tile_position_without_a_size():
    matmul(tile_position=(0, 0))


@limit(
    "nki.isa.nc_matmul, tiling mode",
    "nisa.nc_matmul: tile_size must be two of 128, 64 on trn1, got (32, 128)",
    "trn1",
)
def row_tiles_of_32_on_gen2():
    matmul(tile_position=(0, 0), tile_size=(32, 128))


@limit(
    "nki.isa.nc_matmul, tiling mode",
    "nisa.nc_matmul: tile_position must be multiples of 64 and 128 below 128, got (32, 0)",
)
def a_tile_position_inside_a_tile():
    matmul(tile_position=(32, 0), tile_size=(64, 128))


@limit(
    "nki.isa.nc_matmul, tiling mode",
    "nisa.nc_matmul: stationary may have at most 32 partitions in this tile, got 33",
)
def an_operand_larger_than_its_tile():
    matmul(k=33, tile_position=(0, 0), tile_size=(32, 128))


@limit(
    "nki.isa.nc_matmul, tiling mode",
    "nisa.nc_matmul: stationary may have a free size of at most 32 in this tile, got 33",
)
def an_operand_wider_than_its_tile():
    matmul(m=33, tile_position=(0, 32), tile_size=(128, 32))


@limit(
    "nki.isa.nc_matmul, tiling mode",
    "nisa.nc_matmul: tile_size must have 128 columns with double_row, got (128, 64)",
)
def columns_with_double_rows():
    x = zeros((8, 2, 8), "float8_e4m3")
    mode = nisa.matmul_perf_mode.double_row
    nisa.nc_matmul(psum((8, 8)), x, x, perf_mode=mode, tile_position=(0, 0), tile_size=(128, 64))


@limit(
    "nki.isa.nc_matmul, transpose mode",
    "nisa.nc_matmul: moving must be the identity, (8, 8), got (8, 4)",
)
def a_transpose_with_a_part_of_the_identity():
    matmul(n=4, is_transpose=True)


@limit(
    "nki.isa.nc_matmul, transpose mode",
    "nisa.nc_matmul: moving must be the identity, got another matrix",
    of_values=True,
)
def a_transpose_without_the_identity():
    matmul(is_transpose=True)


@limit("nki.isa.nc_matmul, transpose mode", "nisa.nc_matmul: dst must be bfloat16, got float32")
def a_transpose_that_converts():
    one = nl.shared_identity_matrix(8, "bfloat16")
    nisa.nc_matmul(psum((8, 4)), zeros((8, 4), "bfloat16"), one, is_transpose=True)


@limit("nki.isa.nc_matmul, transpose mode", "nisa.nc_matmul: dst must be (4, 8), got (8, 8)")
def a_transpose_into_a_tile_of_another_shape():
    one = nl.shared_identity_matrix(8, "float32")
    nisa.nc_matmul(psum((8, 8)), zeros((8, 4)), one, is_transpose=True)


@limit(
    "nki.isa.nc_matmul, accumulation",
    "nisa.nc_matmul: dst must hold what a matmul wrote before accumulate=True adds to it, "
    "got unwritten PSUM",
)
def accumulation_on_nothing():
    matmul(accumulate=True)


@limit(
    "nki.isa.nc_matmul, accumulation",
    "nisa.nc_matmul: dst must hold what a matmul wrote before accumulate=True adds to it, "
    "got PSUM that another engine wrote",
)
def accumulation_on_a_memset():
    matmul(dst=zeros((8, 8), buffer="psum"), accumulate=True)


@limit(
    "nki.isa.nc_transpose, data types",
    "nisa.nc_transpose: dst must have data's dtype, bfloat16, got float32",
)
def a_transpose_to_another_dtype():
    nisa.nc_transpose(psum((8, 8)), zeros((8, 8), "bfloat16"), engine=nisa.engine.tensor)


@limit(
    "nki.isa.nc_transpose, tile size",
    "nisa.nc_transpose: data may be at most 128 x 128, got (8, 129)",
)
def a_transpose_of_129_columns():
    nisa.nc_transpose(psum((128, 8)), zeros((8, 129)), engine=nisa.engine.tensor)


@limit(
    "nki.isa.nc_transpose, tile size", "nisa.nc_transpose: data may be at most 32 x 32, got (8, 33)"
)
def a_transpose_of_33_columns_on_vector():
    nisa.nc_transpose(sbuf((33, 8)), zeros((8, 33)), engine=nisa.engine.vector)


@limit("nki.isa.nc_transpose, memory types", "nisa.nc_transpose: dst must be in PSUM, got sbuf")
def a_transpose_on_tensor_into_sbuf():
    nisa.nc_transpose(sbuf((8, 8)), zeros((8, 8)), engine=nisa.engine.tensor)


@limit("nki.isa.nc_transpose, memory types", "nisa.nc_transpose: data must be in SBUF, got psum")
def a_transpose_on_tensor_from_psum():
    data = zeros((8, 8), buffer="psum")
    nisa.nc_transpose(psum((8, 8)), data, engine=nisa.engine.tensor)


@limit("nki.isa.nc_transpose, layout", "nisa.nc_transpose: dst must be (8, 4), got (4, 8)")
def a_transpose_of_another_shape():
    nisa.nc_transpose(psum((4, 8)), zeros((4, 8)), engine=nisa.engine.tensor)


@limit("nki.isa.nc_transpose", "nisa.nc_transpose: engine must be tensor or vector, got scalar")
def a_transpose_on_scalar():
    nisa.nc_transpose(psum((4, 8)), zeros((8, 4)), engine=nisa.engine.scalar)


@pytest.mark.parametrize("name", limit.names())
def test_limit(name):
    limit.check(name)


@pytest.mark.parametrize("name", limit.names(of_values=False))
def test_limit_without_computing(name):
    limit.check_without_computing(name)
