"""Limits of scans, statistics, bits, registers, cores, and of functions that return tiles.

Each case cites the documentation page on which the limit rests; the error carries it, too.
"""

from __future__ import annotations

import numpy as np
import pytest

from .._limits import Limits
from .._nki import hbm, nisa, nl, psum, run, sbuf, zeros

limit = Limits()
LNC = "nki/get-started/about/lnc"


def ints(*shape, dtype="int32"):
    return zeros(shape, dtype)


# scans, statistics, sorts


@limit(
    "nki.isa.tensor_tensor_scan",
    "nisa.tensor_tensor_scan: initial must be a number or a tile, got 0",
)
def a_scan_from_a_string():
    x = zeros((8, 8))
    nisa.tensor_tensor_scan(sbuf((8, 8)), x, x, "0", nl.multiply, nl.add)


@limit("nki.isa.bn_stats", "nisa.bn_stats: data may have at most 512 elements a partition, got 513")
def statistics_of_more_than_512():
    nisa.bn_stats(sbuf((8, 6)), zeros((8, 513)))


@limit("nki.isa.bn_stats", "nisa.bn_stats: dst must have 8 partitions of 6 elements, got (8, 2)")
def statistics_of_two_numbers():
    nisa.bn_stats(sbuf((8, 2)), zeros((8, 8)))


@limit("nki.isa.bn_aggr", "nisa.bn_aggr: data must have threes of elements, got 8")
def statistics_that_are_no_threes():
    nisa.bn_aggr(sbuf((8, 2)), zeros((8, 8)))


@limit("nki.isa.bn_aggr", "nisa.bn_aggr: dst must have 8 partitions of 2 elements, got (8, 6)")
def a_mean_of_six_numbers():
    nisa.bn_aggr(sbuf((8, 6)), zeros((8, 6)))


@limit("nki.isa.max8", "nisa.max8: src must have 8 to 16384 elements, got 7")
def the_largest_eight_of_seven():
    nisa.max8(sbuf((8, 8)), zeros((8, 7)))


@limit("nki.isa.max8", "nisa.max8: dst must have 8 partitions of 8 elements, got (8, 9)")
def the_largest_nine():
    nisa.max8(sbuf((8, 9)), zeros((8, 16)))


@limit("nki.isa.nc_n_gather", "nisa.nc_n_gather: indices must be uint32, got int32")
def a_gather_by_signed_indices():
    nisa.nc_n_gather(sbuf((8, 4)), zeros((8, 8)), ints(8, 4))


@limit("nki.isa.nc_n_gather", "nisa.nc_n_gather: dst must be float32, got bfloat16")
def a_gather_that_converts():
    nisa.nc_n_gather(sbuf((8, 4), "bfloat16"), zeros((8, 8)), ints(8, 4, dtype="uint32"))


@limit("nki.isa.nc_n_gather", "nisa.nc_n_gather: an index must be below 8, got 8", of_values=True)
def a_gather_past_the_end():
    index = sbuf((8, 4), "uint32")
    nisa.memset(index, 8)
    nisa.nc_n_gather(sbuf((8, 4)), zeros((8, 8)), index)


@limit("nki.isa.nc_find_index8", "nisa.nc_find_index8: data must have 8 to 16384 elements, got 7")
def a_search_in_seven():
    nisa.nc_find_index8(sbuf((8, 8), "uint32"), zeros((8, 7)), zeros((8, 8)))


@limit(
    "nki.isa.nc_find_index8",
    "nisa.nc_find_index8: vals must have 8 partitions of 8 elements, got (8, 7)",
)
def a_search_for_seven():
    nisa.nc_find_index8(sbuf((8, 8), "uint32"), zeros((8, 9)), zeros((8, 7)))


@limit(
    "nki.isa.nc_match_replace8",
    "nisa.nc_match_replace8: dst_idx must be uint16 or uint32, got int32",
)
def places_with_a_sign():
    x = zeros((8, 8))
    nisa.nc_match_replace8(sbuf((8, 8)), x, x, 0.0, sbuf((8, 8), "int32"))


@limit("nki.isa.nc_match_replace8", "nisa.nc_match_replace8: imm must be a number, got a")
def a_letter_in_place_of_values():
    nisa.nc_match_replace8(sbuf((8, 8)), zeros((8, 8)), zeros((8, 8)), "a")


def nonzero(dst=((8, 9), "int32"), src="float32", **options):
    nisa.nonzero_with_count(sbuf(*dst), zeros((8, 8), src), **options)


COUNT = "nki.isa.nonzero_with_count"


@limit(COUNT, "nisa.nonzero_with_count: target must be trn2 or newer, got trn1", "trn1")
def a_count_on_gen2():
    nonzero()


@limit(COUNT, "nisa.nonzero_with_count: src must be float32 or int32, got bfloat16")
def a_count_of_16_bits():
    nonzero(src="bfloat16")


@limit(COUNT, "nisa.nonzero_with_count: dst must be int32, got float32")
def a_count_in_floats():
    nonzero(dst=((8, 9), "float32"))


@limit(COUNT, "nisa.nonzero_with_count: dst must have 8 partitions of 9 elements, got (8, 8)")
def a_count_without_room():
    nonzero(dst=((8, 8), "int32"))


@limit(COUNT, "nisa.nonzero_with_count: padding_val must be an integer, got 0.5")
def a_padding_of_a_half():
    nonzero(padding_val=0.5)


@limit(
    "nki.isa.nc_stream_shuffle",
    "nisa.nc_stream_shuffle: shuffle_mask must be 32 numbers below 32, or 255, got [32]",
)
def a_shuffle_of_one_row():
    nisa.nc_stream_shuffle(sbuf((32, 4)), zeros((32, 4)), [32])


@limit(
    "nki.isa.nc_stream_shuffle",
    "nisa.nc_stream_shuffle: shuffle_mask must name one of 8 partitions, got 9",
    of_values=True,
)
def a_shuffle_from_a_partition_that_is_not_there():
    nisa.nc_stream_shuffle(sbuf((8, 4)), zeros((8, 4)), [9] * 32)


@limit(
    "nki.isa.nc_stream_shuffle",
    "nisa.nc_stream_shuffle: dst must have 4 elements a partition, as src, got 8",
)
def a_shuffle_into_longer_rows():
    nisa.nc_stream_shuffle(sbuf((32, 8)), zeros((32, 4)), [0] * 32)


@limit(
    "nki.isa.nc_stream_shuffle",
    "nisa.nc_stream_shuffle: src must start at a multiple of 64, where 64 partitions are active, "
    "got 32",
)
def a_shuffle_of_64_rows_from_32():
    nisa.nc_stream_shuffle(sbuf((64, 4)), zeros((64, 4))[32:33, :], [0] * 32)


@limit("nki.isa.nc_stream_shuffle", "nisa.nc_stream_shuffle: dst must be float32, got bfloat16")
def a_shuffle_that_converts():
    nisa.nc_stream_shuffle(sbuf((32, 4), "bfloat16"), zeros((32, 4)), [0] * 32)


@limit(
    "nki.isa.tensor_partition_reduce",
    "nisa.tensor_partition_reduce: op must be one of add, maximum, bitwise_or, bitwise_and, got "
    "multiply",
)
def a_product_over_partitions():
    nisa.tensor_partition_reduce(sbuf((1, 8)), nl.multiply, zeros((8, 8)))


@limit(
    "nki.isa.tensor_partition_reduce",
    "nisa.tensor_partition_reduce: dst must have 1 partition of 8 elements, got (8, 8)",
)
def a_sum_over_partitions_to_all_of_them():
    nisa.tensor_partition_reduce(sbuf((8, 8)), nl.add, zeros((8, 8)))


# bits


@limit(
    "nki.isa.tensor_scalar, bitvec",
    "nisa.tensor_scalar: data and dst must be integers, got ['int32', 'float32']",
)
def bits_of_floats():
    nisa.tensor_scalar(sbuf((8, 8), "int32"), zeros((8, 8)), nl.bitwise_and, 1)


@limit(
    "nki.isa.tensor_scalar, bitvec",
    "nisa.tensor_scalar: engine must be vector for bits, got scalar",
)
def bits_on_scalar():
    x = ints(8, 8)
    nisa.tensor_scalar(x, x, nl.bitwise_and, 1, engine=nisa.engine.scalar)


@limit(
    "nki.isa.tensor_scalar, bitvec",
    "nisa.tensor_scalar: op0 and op1 must both be bitwise, or neither, got ['bitwise_and', 'add']",
)
def bits_and_a_sum():
    x = ints(8, 8)
    nisa.tensor_scalar(x, x, nl.bitwise_and, 1, op1=nl.add, operand1=1)


@limit(
    "nki.isa.tensor_scalar, bitvec",
    "nisa.tensor_scalar: operand0 must be of integers for bits, got float",
)
def a_float_for_bits():
    x = ints(8, 8)
    nisa.tensor_scalar(x, x, nl.bitwise_and, 1.0)


@limit(
    "nki.isa.tensor_reduce",
    "nisa.tensor_reduce: data and dst must be integers, not negated, got ['float32', 'float32']",
)
def a_reduction_of_bits_of_floats():
    nisa.tensor_reduce(sbuf((8, 1)), nl.bitwise_or, zeros((8, 8)), axis=1)


# FP8 in pairs of rows


@limit(
    "nki.isa.nc_matmul, performance mode",
    "nisa.nc_matmul: stationary must be [partitions, 2, free] in FP8 for double_row, got bfloat16 "
    "(8, 2, 8)",
)
def pairs_of_rows_in_16_bits():
    x = zeros((8, 2, 8), "bfloat16")
    nisa.nc_matmul(psum((8, 8)), x, x, perf_mode=nisa.matmul_perf_mode.double_row)


@limit(
    "nki.isa.nc_matmul, performance mode",
    "nisa.nc_matmul: perf_mode needs trn2 or newer, got trn1",
    "trn1",
)
def pairs_of_rows_on_gen2():
    x = zeros((8, 2, 8), "float8_e4m3")
    nisa.nc_matmul(psum((8, 8)), x, x, perf_mode=nisa.matmul_perf_mode.double_row)


# registers


@limit("nki.isa.register_move", "nisa.register_move: dst must be a register, got int")
def a_number_for_a_register():
    nisa.register_move(1, 2)


@limit("nki.isa.register_move", "nisa.register_move: imm must be an integer of 32 bits, got 1.5")
def a_fraction_in_a_register():
    nisa.register_alloc(1.5)


@limit("nki.isa.register_load", "nisa.register_load: src must be (1, 1), got (2, 1)")
def two_numbers_for_a_register():
    nisa.register_alloc(ints(2, 1))


@limit(
    "nki.isa.VirtualRegister", "nisa.register_move: dst must not be the counter of a loop, got 0"
)
def a_counter_that_is_set():
    for i in nl.dynamic_range(2):
        nisa.register_move(i, 5)


@limit("nki.language.dynamic_range", "nl.dynamic_range: step must be an integer from 1, got 0")
def a_loop_that_stands_still():
    nl.dynamic_range(0, 4, 0)


# two programs


@limit("nki.isa.core_barrier", "nisa.core_barrier: the kernel must run as kernel[2], got 1")
def a_barrier_of_one_program():
    nisa.core_barrier(hbm((4, 4)), (0, 1))


@limit("nki.isa.core_barrier", "nisa.core_barrier: cores must be (0, 1), got (0,)", programs=2)
def a_barrier_of_one_core():
    nisa.core_barrier(hbm((4, 4)), (0,))


@limit(
    LNC,
    "nisa.core_barrier: the other program must call it, too, got a program that ended",
    programs=2,
)
def a_barrier_that_one_program_reaches():
    out = hbm((4, 4))
    if nl.program_id(0) == 0:
        nisa.core_barrier(out, (0, 1))


@limit(
    LNC,
    "kernel[2]: dynamic control flow must be the same in both programs: [2], got [3]",
    programs=2,
    strict=True,
)
def a_loop_that_one_program_runs_longer():
    for _ in nl.dynamic_range(nisa.register_alloc(2 + nl.program_id(0))):
        pass


@limit("nki.isa.sendrecv", "nisa.sendrecv: dst must be float32, got bfloat16", programs=2)
def a_message_that_converts():
    nisa.sendrecv(zeros((4, 4)), sbuf((4, 4), "bfloat16"), 1, 1, 0)


@limit(
    "nki.isa.sendrecv",
    "nisa.sendrecv: send_to_rank must be 1, the other program, got 0",
    programs=2,
)
def a_message_to_itself():
    nisa.sendrecv(zeros((4, 4)), sbuf((4, 4)), nl.program_id(0), 1 - nl.program_id(0), 0)


# functions that return tiles


@limit("nki.language.add", "nl.add: x must be a tile, got 1.0")
def a_sum_of_numbers():
    nl.add(1.0, 2.0)


@limit("nki.language.exp", "nl.exp: y must be left out, got 2.0")
def an_exponential_of_two():
    nl.exp(zeros((4, 4)), 2.0)


@limit(
    "nki.language.add",
    "nl.add: y must have x's shape, (4, 4); operands do not broadcast, got (4, 1)",
)
def a_sum_that_broadcasts():
    nl.add(zeros((4, 4)), zeros((4, 1)))


@pytest.mark.parametrize("name", limit.names())
def test_limit(name):
    limit.check(name)


@pytest.mark.parametrize("name", limit.names(of_values=False))
def test_limit_without_computing(name):
    limit.check_without_computing(name)


def test_a_program_that_fails_ends_the_other():
    def body():
        if nl.program_id(0) == 0:
            raise KeyError("here")
        nisa.core_barrier(hbm((4, 4)), (0, 1))

    with pytest.raises(KeyError, match="here"):
        run(body, programs=2)


def test_integers_do_not_hide_in_numbers():
    """A NumPy integer is one, too."""
    assert run(lambda: nisa.register_alloc(np.int32(3)).value) == 3


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("bfloat16", "bfloat16", "bfloat16"),
        ("bfloat16", "float16", "float32"),
        ("bfloat16", "float32", "float32"),
        ("float8_e4m3", "float16", "float16"),
        ("int8", "int32", "int32"),
        ("int32", "bfloat16", "bfloat16"),
    ],
)
def test_a_result_has_the_widest_dtype(first, second, expected):
    assert run(lambda: nl.add(zeros((4, 4), first), zeros((4, 4), second)).dtype) == expected
