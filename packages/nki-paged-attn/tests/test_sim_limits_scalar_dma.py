"""Limits of ScalarE, of DMA, and of kernels as a whole.

Each case cites the documentation page on which the limit rests; the error carries it, too.
"""

from __future__ import annotations

import pytest

from ._limits import Limits
from ._nki import hbm, nisa, nl, psum, sbuf, zeros

limit = Limits()

# ScalarE


@limit("nki.isa.activation, layout", "nisa.activation", "bias must be a", "trn1")
def a_constant_bias_on_gen2():
    nisa.activation(sbuf((8, 8)), nl.exp, zeros((8, 8)), bias=1.0)


@limit("nki.isa.activation", "nisa.activation", "must be nl.add")
def an_activation_that_keeps_a_maximum():
    nisa.activation(
        sbuf((8, 8)), nl.exp, zeros((8, 8)), reduce_op=nl.maximum, reduce_res=sbuf((8, 1)),
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )  # fmt: skip


@limit("nki.isa.activation", "nisa.activation", "must not be load_reduce")
def an_activation_that_loads_registers():
    x = zeros((8, 8))
    nisa.activation(sbuf((8, 8)), nl.exp, x, reduce_cmd=nisa.reduce_cmd.load_reduce)


@limit("supported activation functions", "nisa.activation", "must be an activation function")
def an_operator_as_an_activation():
    nisa.activation(sbuf((8, 8)), nl.add, zeros((8, 8)))


@limit(
    "supported activation functions",
    "nisa.activation",
    "[5.42101e-20, 1.84467e+19] for log",
    of_values=True,
)
def a_logarithm_of_zero():
    nisa.activation(sbuf((8, 8)), nl.log, zeros((8, 8)))


@limit("supported activation functions", "nisa.activation", "for reciprocal", of_values=True)
def a_reciprocal_of_zero():
    nisa.activation(sbuf((8, 8)), nl.reciprocal, zeros((8, 8)))


@limit("supported activation functions", "nisa.activation", "for sin", of_values=True)
def a_sine_beyond_pi():
    nisa.activation(sbuf((8, 8)), nl.sin, zeros((8, 8)), bias=4.0)


@limit("nki.isa.activation, data types", "nisa.activation", "scale must be float32")
def a_scale_in_bf16():
    nisa.activation(sbuf((8, 8)), nl.exp, zeros((8, 8)), scale=zeros((8, 1), "bfloat16"))


# DMA


@limit("nki.isa.dma_copy, memory types", "nisa.dma_copy", "src must be in SBUF")
def a_dma_from_psum():
    nisa.dma_copy(hbm((8, 8)), zeros((8, 8), buffer="psum"))


@limit("nki.isa.dma_copy, memory types", "nisa.dma_copy", "dst must be in SBUF")
def a_dma_into_psum():
    nisa.dma_copy(psum((8, 8)), hbm((8, 8)))


@limit("nki.isa.dma_copy", "nisa.dma_copy", "must have src's 64 elements")
def a_dma_of_another_size():
    nisa.dma_copy(sbuf((8, 9)), hbm((8, 8)))


@limit("nki.isa.dma_copy", "nisa.dma_copy", "from trn2 on", "trn1")
def hwdge_on_gen2():
    nisa.dma_copy(sbuf((8, 8)), hbm((8, 8)), dge_mode=nisa.dge_mode.hwdge)


@limit("nki.isa.dma_copy", "nisa.dma_copy", "must have src's dtype for hwdge")
def hwdge_that_converts():
    nisa.dma_copy(sbuf((8, 8), "bfloat16"), hbm((8, 8)), dge_mode=nisa.dge_mode.hwdge)


@limit("nki.isa.dma_copy", "nisa.dma_copy", "must be swdge for a vector_offset")
def a_gather_by_hwdge():
    x = hbm((8, 8)).vector_select(0, zeros((8, 1), "int32"))
    nisa.dma_copy(sbuf((8, 8)), x, dge_mode=nisa.dge_mode.hwdge)


@limit("nki.isa.dma_copy", "nisa.dma_copy", "sync or scalar, with hwdge")
def a_dma_engine_without_hwdge():
    nisa.dma_copy(sbuf((8, 8)), hbm((8, 8)), engine=nisa.engine.sync)


@limit("nki.isa.dma_copy", "nisa.dma_copy", "is for trn3 or newer")
def a_priority_before_gen4():
    nisa.dma_copy(sbuf((8, 8)), hbm((8, 8)), priority=1)


@limit("nki.isa.dma_copy", "nisa.dma_copy", "from 0 to 3", "trn3")
def a_priority_of_4():
    nisa.dma_copy(sbuf((8, 8)), hbm((8, 8)), priority=4)


@limit("nki.isa.dma_copy", "nisa.dma_copy", "must not both be indirect")
def a_gather_into_a_scatter():
    i = zeros((8, 1), "int32")
    nisa.dma_copy(hbm((8, 8)).vector_select(0, i), hbm((8, 8)).vector_select(0, i))


@limit("nki.isa.dma_copy, indirect", "nisa.memset", "must not be indirect")
def an_indirect_tile_for_an_engine():
    i = zeros((1, 1), "int32")
    nisa.memset(sbuf((8, 8)).ap([[8, 8], [1, 1]], scalar_offset=i, indirect_dim=1), 0)


@limit("nki.isa.dma_transpose", "nisa.dma_transpose", "must have src's dtype")
def a_dma_transpose_to_another_dtype():
    nisa.dma_transpose(sbuf((8, 8)), hbm((8, 8), "bfloat16"))


@limit("nki.isa.dma_transpose", "nisa.dma_transpose", "must be (4, 8), the transposed source")
def a_dma_transpose_of_another_rank():
    nisa.dma_transpose(sbuf((4, 8, 1)), hbm((8, 4)))


@limit("nki.isa.dma_transpose", "nisa.dma_transpose", "must be (1, 0) for 2 dimensions")
def a_dma_transpose_that_transposes_nothing():
    nisa.dma_transpose(sbuf((8, 4)), hbm((8, 4)), axes=(0, 1))


@limit("nki.isa.dma_transpose", "nisa.dma_transpose", "2, 3 or 4 dimensions")
def a_dma_transpose_of_five_dimensions():
    nisa.dma_transpose(sbuf((8, 1, 1, 1, 1)), hbm((1, 1, 1, 1, 8)))


@limit("nki.isa.dma_transpose, indirect", "nisa.dma_transpose", "must have a dtype of 2 bytes")
def an_indirect_transpose_of_fp32():
    i = zeros((16, 1), "uint32")
    nisa.dma_transpose(sbuf((8, 16)), hbm((16, 8)).vector_select(0, i))


@limit("nki.isa.dma_transpose, indirect", "nisa.dma_transpose", "in multiples of 16")
def an_indirect_transpose_of_8_rows():
    i = zeros((8, 1), "uint32")
    nisa.dma_transpose(sbuf((8, 8), "bfloat16"), hbm((16, 8), "bfloat16").vector_select(0, i))


@limit("nki.isa.dma_transpose, indirect", "nisa.dma_transpose", "must be uint32")
def an_indirect_transpose_by_int32():
    i = zeros((16, 1), "int32")
    nisa.dma_transpose(sbuf((8, 16), "bfloat16"), hbm((16, 8), "bfloat16").vector_select(0, i))


@limit("nki.isa.dma_transpose, indirect", "nisa.dma_transpose", "from trn2 on", "trn1")
def an_indirect_transpose_on_gen2():
    i = zeros((16, 1), "uint32")
    nisa.dma_transpose(sbuf((8, 16), "bfloat16"), hbm((16, 8), "bfloat16").vector_select(0, i))


@limit("nki.isa.dma_transpose", "nisa.dma_transpose", "16 rows, columns in multiples of 128")
def a_transpose_by_hwdge_of_8_rows():
    nisa.dma_transpose(
        sbuf((128, 8), "bfloat16"), hbm((8, 128), "bfloat16"), dge_mode=nisa.dge_mode.hwdge
    )


@limit("nki/get-started/about/lnc", "nl.program_id", "axis must be 0")
def a_grid_of_two_dimensions():
    nl.program_id(1)


@limit("nki/migration, outputs", "nki.jit", "must be in shared_hbm")
def an_output_in_private_hbm():
    return nl.ndarray((8, 8), nl.float32, buffer=nl.private_hbm)


@pytest.mark.parametrize("name", limit.names())
def test_limit(name):
    limit.check(name)


@pytest.mark.parametrize("name", limit.names(of_values=False))
def test_limit_without_computing(name):
    limit.check_without_computing(name)
