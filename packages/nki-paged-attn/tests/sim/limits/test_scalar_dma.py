"""Limits of ScalarE, of DMA, and of kernels as a whole.

Each case cites the documentation page on which the limit rests; the error carries it, too.
"""

from __future__ import annotations

import pytest

from .._limits import Limits
from .._nki import hbm, nisa, nl, psum, sbuf, zeros

limit = Limits()

# ScalarE


@limit(
    "nki.isa.activation, layout",
    "nisa.activation: bias must be a (partitions, 1) tile on trn1, got 1.0",
    "trn1",
)
def a_constant_bias_on_gen2():
    nisa.activation(sbuf((8, 8)), nl.exp, zeros((8, 8)), bias=1.0)


@limit("nki.isa.activation", "nisa.activation: reduce_op must be nl.add, got maximum")
def an_activation_that_keeps_a_maximum():
    nisa.activation(
        sbuf((8, 8)),
        nl.exp,
        zeros((8, 8)),
        reduce_op=nl.maximum,
        reduce_res=sbuf((8, 1)),
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )


@limit("nki.isa.activation", "nisa.activation: reduce_cmd must not be load_reduce, got load_reduce")
def an_activation_that_loads_registers():
    x = zeros((8, 8))
    nisa.activation(sbuf((8, 8)), nl.exp, x, reduce_cmd=nisa.reduce_cmd.load_reduce)


@limit(
    "nki.api.shared, supported activation functions",
    "nisa.activation: op must be an activation function, got add",
)
def an_operator_as_an_activation():
    nisa.activation(sbuf((8, 8)), nl.add, zeros((8, 8)))


@limit(
    "nki.api.shared, supported activation functions",
    "nisa.activation: data must lie in [5.42101e-20, 1.84467e+19] for log, got [0.]",
    of_values=True,
)
def a_logarithm_of_zero():
    nisa.activation(sbuf((8, 8)), nl.log, zeros((8, 8)))


@limit(
    "nki.api.shared, supported activation functions",
    "nisa.activation: data must lie in [2.27374e-13, 4.39805e+12] for reciprocal, got [0.]",
    of_values=True,
)
def a_reciprocal_of_zero():
    nisa.activation(sbuf((8, 8)), nl.reciprocal, zeros((8, 8)))


@limit(
    "nki.api.shared, supported activation functions",
    "nisa.activation: data must lie in [0, 3.14159] for sin, got [4.]",
    of_values=True,
)
def a_sine_beyond_pi():
    nisa.activation(sbuf((8, 8)), nl.sin, zeros((8, 8)), bias=4.0)


@limit("nki.isa.activation, data types", "nisa.activation: scale must be float32, got bfloat16")
def a_scale_in_bf16():
    nisa.activation(sbuf((8, 8)), nl.exp, zeros((8, 8)), scale=zeros((8, 1), "bfloat16"))


# DMA


@limit(
    "nki.isa.dma_copy, memory types",
    "nisa.dma_copy: src must be in SBUF or PRIVATE_HBM or SHARED_HBM, got psum",
)
def a_dma_from_psum():
    nisa.dma_copy(hbm((8, 8)), zeros((8, 8), buffer="psum"))


@limit(
    "nki.isa.dma_copy, memory types",
    "nisa.dma_copy: dst must be in SBUF or PRIVATE_HBM or SHARED_HBM, got psum",
)
def a_dma_into_psum():
    nisa.dma_copy(psum((8, 8)), hbm((8, 8)))


@limit("nki.isa.dma_copy", "nisa.dma_copy: dst must have src's 64 elements, got 72")
def a_dma_of_another_size():
    nisa.dma_copy(sbuf((8, 9)), hbm((8, 8)))


@limit("nki.isa.dma_copy", "nisa.dma_copy: dge_mode may be hwdge from trn2 on, got trn1", "trn1")
def hwdge_on_gen2():
    nisa.dma_copy(sbuf((8, 8)), hbm((8, 8)), dge_mode=nisa.dge_mode.hwdge)


@limit(
    "nki.isa.dma_copy",
    "nisa.dma_copy: dst must have src's dtype for hwdge, got bfloat16 and float32",
)
def hwdge_that_converts():
    nisa.dma_copy(sbuf((8, 8), "bfloat16"), hbm((8, 8)), dge_mode=nisa.dge_mode.hwdge)


@limit("nki.isa.dma_copy", "nisa.dma_copy: dge_mode must be swdge for a vector_offset, got hwdge")
def a_gather_by_hwdge():
    x = hbm((8, 8)).vector_select(0, zeros((8, 1), "int32"))
    nisa.dma_copy(sbuf((8, 8)), x, dge_mode=nisa.dge_mode.hwdge)


@limit("nki.isa.dma_copy", "nisa.dma_copy: engine must be sync or scalar, with hwdge, got sync")
def a_dma_engine_without_hwdge():
    nisa.dma_copy(sbuf((8, 8)), hbm((8, 8)), engine=nisa.engine.sync)


@limit("nki.isa.dma_copy", "nisa.dma_copy: priority is for trn3 or newer, got 1")
def a_priority_before_gen4():
    nisa.dma_copy(sbuf((8, 8)), hbm((8, 8)), priority=1)


@limit("nki.isa.dma_copy", "nisa.dma_copy: priority must be from 0 to 3, got 4", "trn3")
def a_priority_of_4():
    nisa.dma_copy(sbuf((8, 8)), hbm((8, 8)), priority=4)


@limit("nki.isa.dma_copy", "nisa.dma_copy: dst and src must not both be indirect, got both")
def a_gather_into_a_scatter():
    i = zeros((8, 1), "int32")
    nisa.dma_copy(hbm((8, 8)).vector_select(0, i), hbm((8, 8)).vector_select(0, i))


@limit("nki.isa.dma_copy, indirect", "nisa.memset: dst must not be indirect, got indirect")
def an_indirect_tile_for_an_engine():
    i = zeros((1, 1), "int32")
    nisa.memset(sbuf((8, 8)).ap([[8, 8], [1, 1]], scalar_offset=i, indirect_dim=1), 0.0)


@limit(
    "nki.isa.dma_transpose", "nisa.dma_transpose: dst must have src's dtype, bfloat16, got float32"
)
def a_dma_transpose_to_another_dtype():
    nisa.dma_transpose(sbuf((8, 8)), hbm((8, 8), "bfloat16"))


@limit(
    "nki.isa.dma_transpose",
    "nisa.dma_transpose: dst must be (4, 8), the transposed source, got (4, 8, 1)",
)
def a_dma_transpose_of_another_rank():
    nisa.dma_transpose(sbuf((4, 8, 1)), hbm((8, 4)))


@limit(
    "nki.isa.dma_transpose", "nisa.dma_transpose: axes must be (1, 0) for 2 dimensions, got (0, 1)"
)
def a_dma_transpose_that_transposes_nothing():
    nisa.dma_transpose(sbuf((8, 4)), hbm((8, 4)), axes=(0, 1))


@limit("nki.isa.dma_transpose", "nisa.dma_transpose: src must have 2, 3 or 4 dimensions, got 5")
def a_dma_transpose_of_five_dimensions():
    nisa.dma_transpose(sbuf((8, 1, 1, 1, 1)), hbm((1, 1, 1, 1, 8)))


@limit(
    "nki.isa.dma_transpose, indirect",
    "nisa.dma_transpose: src must have a dtype of 2 bytes, got float32",
)
def an_indirect_transpose_of_fp32():
    i = zeros((16, 1), "uint32")
    nisa.dma_transpose(sbuf((8, 16)), hbm((16, 8)).vector_select(0, i))


@limit(
    "nki.isa.dma_transpose, indirect",
    "nisa.dma_transpose: src must have 16 to 128 rows, in multiples of 16, got 8",
)
def an_indirect_transpose_of_8_rows():
    i = zeros((8, 1), "uint32")
    nisa.dma_transpose(sbuf((8, 8), "bfloat16"), hbm((16, 8), "bfloat16").vector_select(0, i))


@limit(
    "nki.isa.dma_transpose, indirect", "nisa.dma_transpose: the indices must be uint32, got int32"
)
def an_indirect_transpose_by_int32():
    i = zeros((16, 1), "int32")
    nisa.dma_transpose(sbuf((8, 16), "bfloat16"), hbm((16, 8), "bfloat16").vector_select(0, i))


@limit(
    "nki.isa.dma_transpose, indirect",
    "nisa.dma_transpose: src may be indirect from trn2 on, got trn1",
    "trn1",
)
def an_indirect_transpose_on_gen2():
    src = hbm((16, 8), "bfloat16").ap([[8, 16], [1, 8]], scalar_offset=zeros((1, 1), "uint32"))
    nisa.dma_transpose(sbuf((8, 16), "bfloat16"), src)


@limit(
    "nki.isa.dma_transpose",
    "nisa.dma_transpose: src must have 16 rows and 128 columns for hwdge, got (8, 128)",
)
def a_transpose_by_hwdge_of_8_rows():
    nisa.dma_transpose(
        sbuf((128, 8), "bfloat16"), hbm((8, 128), "bfloat16"), dge_mode=nisa.dge_mode.hwdge
    )


@limit(
    "nki.isa.dma_copy, oob_mode",
    "nisa.dma_copy: an index must be from 0 to 7; oob_mode.error raises, got [8]",
)
def an_index_out_of_bounds():
    i = zeros((8, 1), "int32")
    nisa.memset(i, 8)
    nisa.dma_copy(sbuf((8, 8)), hbm((8, 8)).vector_select(0, i))


@limit(
    "nki.isa.dma_copy, indirect",
    "nisa.dma_copy: dst and src must have the same 8 rows, got 4",
)
def a_gather_into_other_rows():
    i = zeros((8, 1), "int32")
    nisa.dma_copy(sbuf((4, 16)), hbm((8, 8)).vector_select(0, i))


@limit("nki.isa.dma_copy", "nisa.dma_copy: shared_hbm must stay within its 64 elements, got 71")
def an_index_that_leads_past_the_end():
    i = zeros((1, 1), "int32")
    nisa.memset(i, 7)
    nisa.dma_copy(sbuf((1, 8)), hbm((8, 8)).ap([[8, 1], [1, 8]], offset=8, vector_offset=i))


@limit(
    "nki.isa.dma_transpose",
    "nisa.dma_transpose: dst must not be indirect, got sbuf: float32 (8, 8) in sbuf",
)
def a_dma_transpose_to_places_of_run_time():
    i = zeros((1, 1), "int32")
    dst = sbuf((8, 16)).ap([[16, 8], [1, 8]], scalar_offset=i, indirect_dim=1)
    nisa.dma_transpose(dst, hbm((8, 8)))


@limit(
    "nki.isa.dma_transpose, direct",
    "nisa.dma_transpose: dge_mode must be hwdge or unknown unless src is indirect, got swdge",
)
def a_direct_transpose_by_software():
    nisa.dma_transpose(sbuf((8, 8)), hbm((8, 8)), dge_mode=nisa.dge_mode.swdge)


@limit(
    "nki.isa.dma_transpose, direct",
    "nisa.dma_transpose: dge_mode may be hwdge from trn2 on, got trn1",
    "trn1",
)
def a_transpose_by_hwdge_on_gen2():
    nisa.dma_transpose(
        sbuf((128, 16), "bfloat16"), hbm((16, 128), "bfloat16"), dge_mode=nisa.dge_mode.hwdge
    )


@limit(
    "nki.isa.dma_transpose, direct",
    "nisa.dma_transpose: src must have a dtype of 2 bytes for hwdge, got float32",
)
def a_transpose_by_hwdge_of_fp32():
    nisa.dma_transpose(sbuf((128, 16)), hbm((16, 128)), dge_mode=nisa.dge_mode.hwdge)


@limit(
    "nki.isa.dma_transpose, direct",
    "nisa.dma_transpose: src must have 16 rows and 128 columns for hwdge, got (16, 64)",
)
def a_transpose_by_hwdge_of_64_columns():
    nisa.dma_transpose(
        sbuf((64, 16), "bfloat16"), hbm((16, 64), "bfloat16"), dge_mode=nisa.dge_mode.hwdge
    )


@limit("nki.isa.dma_transpose, indirect", "nisa.dma_transpose: dge_mode must be swdge, got hwdge")
def an_indirect_transpose_by_hwdge():
    i = zeros((16, 1), "uint32")
    src = hbm((16, 8), "bfloat16").vector_select(0, i)
    nisa.dma_transpose(sbuf((8, 16), "bfloat16"), src, dge_mode=nisa.dge_mode.hwdge)


@limit(
    "nki.isa.dma_transpose, indirect",
    "nisa.dma_transpose: an index must be below 8, got [8]",
)
def an_indirect_transpose_of_rows_that_are_not_there():
    i = zeros((16, 1), "uint32")
    nisa.memset(i, 8)
    src = hbm((8, 8), "bfloat16").vector_select(0, i)
    nisa.dma_transpose(sbuf((8, 16), "bfloat16"), src)


@limit(
    "nki.isa.dma_transpose, indirect",
    "nisa.dma_transpose: shared_hbm must stay within its 64 elements, got 71",
)
def an_indirect_transpose_past_the_end():
    i = zeros((16, 1), "uint32")
    nisa.memset(i, 7)
    src = hbm((8, 8), "bfloat16").ap([[8, 16], [1, 8]], offset=8, vector_offset=i)
    nisa.dma_transpose(sbuf((8, 16), "bfloat16"), src)


@limit("nki/get-started/about/lnc", "nl.program_id: axis must be 0, got 1")
def a_grid_of_two_dimensions():
    nl.program_id(1)


@limit(
    "nki/migration, outputs",
    "nki.jit: the output private_hbm must be in shared_hbm, got private_hbm",
)
def an_output_in_private_hbm():
    return nl.ndarray((8, 8), nl.float32, buffer=nl.private_hbm)


@pytest.mark.parametrize("name", limit.names())
def test_limit(name):
    limit.check(name)


@pytest.mark.parametrize("name", limit.names(of_values=False))
def test_limit_without_computing(name):
    limit.check_without_computing(name)
