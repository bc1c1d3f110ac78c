"""Arguments of another type, patterns that leave a tensor, and programs that go apart.

Each case cites the documentation page on which the limit rests; the error carries it, too.
"""

from __future__ import annotations

import gc
import sys

import numpy as np
import pytest
from nki_paged_attn.sim import Kernel, NkiValidationError, NotModelledError

from .._limits import Limits, range_select
from .._nki import hbm, loaded, nisa, nl, run, sbuf, zeros

limit = Limits()
LNC = "nki/get-started/about/lnc"
PAIRS = "must be of pairs of integers, stride and count, got"


# shapes and views


@limit("nki.language.ndarray", "nl.ndarray: shape must be a tuple of integers, got (4, 2.5)")
def a_size_that_is_no_integer():
    sbuf((4, 2.5))


@limit("nki.language.ndarray", "nl.ndarray: shape must be a tuple of integers, got (4, True)")
def a_size_that_is_a_boolean():
    sbuf((4, True))


@limit(
    "nki.language.ds", "nl.ds: start and size must be integers, got DynamicSlice(start='0', size=2)"
)
def a_slice_from_a_string():
    zeros((4, 4))[:, nl.ds("0", 2)]


@limit("nki.tensor", "slice: its bounds must be integers, got (0, 2.5, 1)")
def a_slice_to_half_an_element():
    zeros((4, 4))[:, 0:2.5]


@limit("nki.tensor", "slice: its bounds must be integers, got ('a', 4, 1)")
def a_slice_from_a_letter():
    zeros((4, 4))[:, "a":]


@limit("nki.tensor", "select: private_hbm needs an integer from 0 to 3 in dimension 0, got 1.0")
def an_element_by_a_float():
    nl.ndarray((4, 4), nl.float32, buffer=nl.private_hbm).select(0, 1.0)


@limit("nki.tensor", "broadcast: size must be an integer from 1, got 0")
def a_dimension_that_is_repeated_no_time():
    zeros((4, 1)).broadcast(1, 0)


@limit("nki.tensor", "flatten_dims: end_dim must be an integer from 1 to 2, got 0")
def dimensions_that_are_merged_backwards():
    zeros((4, 2, 2)).flatten_dims(1, 0)


@limit("nki.tensor", "flatten_dims: end_dim must be an integer from 1 to 2, got a")
def dimensions_that_are_merged_up_to_a_letter():
    zeros((4, 2, 2)).flatten_dims(1, "a")


@limit("nki.tensor", "reshape: shape must be a tuple of integers from 1, got (4, 4.0)")
def a_shape_with_a_float():
    zeros((4, 4)).reshape((4, 4.0))


@limit("nki.tensor", "reshape: shape must be a tuple of integers from 1, got 16")
def a_shape_that_is_a_number():
    zeros((4, 4)).reshape(16)


@limit("nki.tensor", "reshape_dim: shape must be a tuple of integers from 1, or -1, got 4")
def a_dimension_that_is_split_by_a_number():
    zeros((4, 4)).reshape_dim(1, 4)


@limit("nki.tensor", "reshape_dim: shape must be a tuple of integers from 1, or -1, got (0, -1)")
def a_dimension_that_is_split_in_none():
    zeros((4, 4)).reshape_dim(1, (0, -1))


# access patterns


@limit("nki.tensor", f"ap: pattern {PAIRS} [4, 4]")
def a_pattern_without_pairs():
    hbm((4, 4)).ap([4, 4])


@limit("nki.tensor", f"ap: pattern {PAIRS} [[4, 4], [1, 2.5]]")
def a_pattern_of_half_an_element():
    hbm((4, 4)).ap([[4, 4], [1, 2.5]])


@limit("nki.tensor", "ap: offset must be an integer, got 0.5")
def a_pattern_from_half_an_element_on():
    hbm((4, 4)).ap([[4, 4], [1, 4]], offset=0.5)


@limit("nki.tensor", "ap: shared_hbm must stay within its 16 elements, got -3 to 12")
def a_pattern_that_begins_before_its_tensor():
    hbm((4, 4)).ap([[4, 4], [-1, 4]])


@limit("nki.tensor", "ap: sbuf must stay within the 4 elements of a partition, got -3")
def a_pattern_that_begins_before_its_partition():
    zeros((4, 4))[1:, :].ap([[4, 2], [-1, 4]])


@limit(
    "nki.isa.dma_copy, indirect addressing",
    "ap: indirect_dim must be an integer from 0 to 1, got 0.0",
)
def an_indirect_dimension_that_is_a_float():
    register = nisa.register_alloc(0)
    hbm((4, 4)).ap([[4, 4], [1, 4]], scalar_offset=register, indirect_dim=0.0)


@limit("nki.isa.iota", f"nisa.iota: pattern {PAIRS} [[0.5, 4]]")
def indices_in_half_steps():
    nisa.iota(sbuf((4, 4), "int32"), [[0.5, 4]])


@limit("nki.isa.iota", "nisa.iota: pattern must have counts of at least 1, got [[1, -2], [1, -2]]")
def indices_of_negative_counts():
    nisa.iota(sbuf((4, 4), "int32"), [[1, -2], [1, -2]])


@limit("nki.isa.iota", "nisa.iota: offset must be an integer, got a")
def indices_from_a_letter():
    nisa.iota(sbuf((4, 4), "int32"), [[1, 4]], offset="a")


@limit("nki.isa.iota", "nisa.iota: its numbers must fit int32, got 0 to 3298534883328")
def indices_beyond_32_bits():
    nisa.iota(sbuf((4, 4), "int32"), [[2**40, 4]])


# instructions


@limit(
    "nki.isa.range_select",
    "nisa.range_select: range_start must be from 0, and plus the free size stay within 2**24, "
    "got -1",
)
def a_range_from_before_0():
    range_select(range_start=-1)


@limit(
    "nki.isa.tensor_copy_predicated",
    "nisa.tensor_copy_predicated: src must be a number or a tile, got NoneType",
)
def a_copy_of_nothing():
    nisa.tensor_copy_predicated(zeros((4, 4)), None, zeros((4, 4), "uint8"))


@limit(
    "nki.isa.tensor_reduce",
    "nisa.tensor_reduce: axis must be a number or a tuple of numbers, got True",
)
def a_reduction_over_true():
    nisa.tensor_reduce(sbuf((4, 1)), nl.add, zeros((4, 4)), True)


@limit(
    "nki.isa.nc_matmul, tiling mode",
    "nisa.nc_matmul: tile_position and tile_size must both be set, to two numbers each, got (3, 3)",
)
def a_tile_at_a_number():
    x = zeros((8, 8))
    dst = nl.ndarray((8, 8), nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst, x, x, tile_position=3, tile_size=3)


@limit("nki.language.fori_loop", "nl.fori_loop: body_fun must be a function, got None")
def a_loop_of_nothing():
    nl.fori_loop(0, 2, None)


# functions that return tiles


@limit("nki.language.load", "nl.load: src must be a tensor, got ndarray")
def a_load_of_an_array():
    nl.load(np.zeros((4, 4), np.float32))


@limit("nki.language.full", "nl.full: fill_value must be a number, got str")
def a_tile_of_letters():
    nl.full((4, 4), "a", nl.float32)


@limit("nki.language.load_transpose2d", "nl.load_transpose2d: src must have 2 dimensions, got 3")
def a_load_that_transposes_three_dimensions():
    nl.load_transpose2d(hbm((2, 3, 4)))


@limit(
    "nki.language.floor",
    "nl.floor: x must be below 2**31 in magnitude, got [4.2949673e+09]",
    of_values=True,
)
def a_number_beyond_integers():
    nl.floor(nl.full((1, 1), 2.0**32, nl.float32))


@limit("nki.language.broadcast_to", "nl.broadcast_to: shape must have 2 dimensions, got (4, 4, 2)")
def a_broadcast_to_more_dimensions():
    nl.broadcast_to(zeros((4, 4)), (4, 4, 2))


@limit(
    "nki.language.shared_identity_matrix",
    "nl.shared_identity_matrix: n must be an integer from 1, got 0",
)
def an_identity_of_nothing():
    nl.shared_identity_matrix(0)


# kernels and programs


@limit("nki.jit", "nki.jit: the output must be a tensor or a tuple, got dict")
def results_by_name():
    return {"out": hbm((4, 4))}


@limit(LNC, "nisa.memset: dst sbuf must be a tensor of this program and run, got one of another")
def a_tile_of_another_run():
    kept = []
    run(lambda: kept.append(sbuf((4, 4))))
    nisa.memset(kept[0], 0.0)


@limit(
    LNC,
    "nisa.memset: dst sbuf must be a tensor of this program and run, got one of another",
    programs=2,
)
def a_tile_of_the_other_program():
    if not SHARED:
        SHARED.append(sbuf((4, 4)))
    try:
        nisa.memset(SHARED[0], 0.0)
    finally:
        if nl.program_id(0) == 1:
            SHARED.clear()


SHARED = []


@limit(
    LNC,
    "nisa.sendrecv: the other program must come to pipe 1, got pipe 0",
    programs=2,
)
def messages_on_two_pipes():
    i = nl.program_id(0)
    nisa.sendrecv(zeros((4, 4)), sbuf((4, 4)), 1 - i, 1 - i, i)


@limit(
    LNC,
    "nisa.core_barrier: the other program must come to a barrier on b, got a barrier on a",
    programs=2,
)
def barriers_on_two_tensors():
    tensors = hbm((4, 4), name="a"), hbm((4, 4), name="b")
    nisa.core_barrier(tensors[nl.program_id(0)], (0, 1))


@pytest.mark.parametrize("name", limit.names())
def test_limit(name):
    limit.check(name)


@pytest.mark.parametrize("name", limit.names(of_values=False))
def test_limit_without_computing(name):
    limit.check_without_computing(name)


@pytest.mark.parametrize("grid", [True, 2.0, "2", None])
def test_a_grid_is_one_or_two(grid):
    with pytest.raises(NkiValidationError, match="the grid must be 1 or 2 programs, got"):
        Kernel(lambda: None)[grid]


@pytest.mark.parametrize("index", [np.array([1, 2]), True, [1, 2], None], ids=str)
def test_an_index_is_an_integer_or_a_slice(index):
    with pytest.raises(NotModelledError, match="an index of type"):
        run(lambda: zeros((4, 4))[index])


def test_strides_may_be_negative_within_a_tensor():
    x = np.arange(16, dtype=np.float32).reshape(4, 4)

    def body(x):
        out = hbm((4, 4))
        nisa.dma_copy(out, loaded(x.ap([[4, 4], [-1, 4]], offset=3)))
        return out

    np.testing.assert_array_equal(run(body, x), x[:, ::-1])


def test_a_quotient_by_0_is_infinite():
    def body():
        tile = zeros((4, 4))
        nisa.memset(tile, 1.0)
        out = hbm((4, 4))
        nisa.dma_copy(out, nl.divide(tile, 0))
        return out

    assert np.isposinf(run(body)).all()


def test_a_tensor_that_cannot_be_made_leaves_no_trace(monkeypatch):
    failed = []
    monkeypatch.setattr(sys, "unraisablehook", failed.append)
    with pytest.raises(TypeError, match="dtype must be one that NKI has"):
        run(lambda: sbuf((4, 4), "float64"))
    gc.collect()
    assert not failed
