"""Limits of memory and of views of it.

Each case cites the documentation page on which the limit rests; the error carries it, too.
"""

from __future__ import annotations

import pytest

from .._limits import ARCH, Limits
from .._nki import hbm, nisa, nl, psum, sbuf, zeros

limit = Limits()

# memory


@limit(f"{ARCH}, memory", "nl.ndarray: sbuf may have at most 128 partitions, got 129")
def more_than_128_partitions():
    sbuf((129, 1))


@limit(
    f"{ARCH}, memory",
    "nl.ndarray: sbuf must fit: at most 212984 bytes of each partition of SBUF are live at "
    "once, got 245760",
)
def sbuf_over_its_capacity():
    return [sbuf((1, 1024), "float32") for _ in range(60)]


@limit(
    f"{ARCH}, memory",
    "nl.ndarray: sbuf must fit: at most 180224 bytes of each partition of SBUF are live at "
    "once, got 180225",
    "trn1",
)
def sbuf_of_gen2():
    sbuf((128, 180225), "uint8")


@limit(
    f"{ARCH}, memory",
    "nl.ndarray: sbuf must fit: at most 212984 bytes of each partition of SBUF are live at "
    "once, got 212985",
)
def sbuf_of_gen3():
    sbuf((128, 212985), "uint8")


@limit(
    f"{ARCH}, memory",
    "nl.ndarray: sbuf must fit: at most 245752 bytes of each partition of SBUF are live at "
    "once, got 245753",
    "trn3",
)
def sbuf_of_gen4():
    sbuf((128, 245753), "uint8")


@limit(
    f"{ARCH}, memory",
    "nl.ndarray: psum must fit: at most 8 banks of 2048 bytes of PSUM are live at once, got 9",
)
def more_than_8_banks_of_psum():
    return [psum((1, 1)) for _ in range(9)]


@limit(
    f"{ARCH}, memory",
    "nl.ndarray: psum must fit: at most 8 banks of 2048 bytes of PSUM are live at once, got 9",
)
def a_tile_of_more_than_8_banks():
    psum((128, 8 * 512 + 1))


@limit(
    "nki.language.ndarray",
    "nl.ndarray: buffer must be one of ('sbuf', 'psum', 'private_hbm', 'shared_hbm'), got dram",
)
def an_unknown_buffer():
    nl.ndarray((1, 1), nl.float32, buffer="dram")


@limit(
    "nki.language.ndarray",
    "nl.ndarray: shape must have sizes from 1, and on the chip 2 dimensions or more, got (128,)",
)
def one_dimension_on_the_chip():
    sbuf((128,))


@limit(
    f"{ARCH}, start partition",
    "nisa.memset: dst of 96 partitions must start at a multiple of 128, got 32",
)
def more_than_64_partitions_that_start_inside():
    nisa.memset(sbuf((128, 4))[32:128, :], 0.0)


@limit(
    f"{ARCH}, start partition",
    "nisa.memset: dst of 40 partitions must start at a multiple of 64, got 32",
)
def more_than_32_partitions_that_start_at_32():
    nisa.memset(sbuf((128, 4))[32:72, :], 0.0)


@limit(
    f"{ARCH}, start partition",
    "nisa.memset: dst of 4 partitions must start at a multiple of 32, got 16",
)
def few_partitions_that_start_at_16():
    nisa.memset(sbuf((128, 4))[16:20, :], 0.0)


@limit(
    ARCH,
    "nisa.memset: dst may have at most 65535 elements in a free dimension, got 65536",
)
def more_elements_than_a_size_holds():
    nisa.memset(sbuf((1, 65536), "uint8"), 0)


@limit(
    ARCH,
    "nisa.memset: dst must have 2 to 5 dimensions, the partition first, got (1, 1, 1, 1, 1, 1)",
)
def a_tile_of_six_dimensions():
    nisa.memset(sbuf((1, 1, 1, 1, 1, 1)), 0.0)


@limit(
    "nki/deep-dives/nki-aps, hardware capability",
    "nisa.memset: dst may have at most 3 free dimensions, got 4",
)
def four_free_dimensions():
    nisa.memset(sbuf((1, 4, 4, 4, 4))[:, ::2, ::2, ::2, ::2], 0.0)


@limit(
    "nki.isa.nc_transpose, memory types",
    "nisa.nc_transpose: dst must lie in a single PSUM bank of 2048 bytes, got bytes 2000 to 2400",
)
def a_transpose_across_a_bank():
    turned = psum((8, 8, 100))
    nisa.nc_transpose(turned[:, 5, :], zeros((100, 8)), engine=nisa.engine.tensor)


@limit(
    "nki.isa.nc_matmul, memory types",
    "nisa.nc_matmul: dst must lie in a single PSUM bank of 2048 bytes, got bytes 1024 to 3072",
)
def a_product_across_a_bank():
    nisa.nc_matmul(psum((8, 1024))[:, 256:768], zeros((8, 8)), zeros((8, 512)))


@limit(
    "nki.language.tile_size, psum_min_align",
    "nisa.nc_transpose: dst must start at a multiple of 4 bytes of PSUM, got 30",
)
def a_transpose_to_an_odd_address():
    turned = psum((8, 2, 15), "bfloat16")
    nisa.nc_transpose(turned[:, 1, :], zeros((15, 8), "bfloat16"), engine=nisa.engine.tensor)


@limit(
    "nki/deep-dives/nki-dge, mode selection summary",
    "ap: vector_offset needs trn2 or newer, got trn1",
    "trn1",
)
def a_gather_on_gen2():
    hbm((8, 4)).vector_select(0, zeros((4, 1), "int32"))


# views


@limit(
    "nki.tensor",
    "slice: sbuf needs 0 <= start < end <= 4 and step >= 1 in dimension 1, got (2, 5, 1)",
)
def a_slice_past_the_end():
    sbuf((4, 4))[:, 2:5]


@limit(
    "nki.tensor",
    "slice: sbuf needs 0 <= start < end <= 4 and step >= 1 in dimension 1, got (2, 2, 1)",
)
def an_empty_slice():
    sbuf((4, 4))[:, 2:2]


@limit("nki.tensor", "select: dim must not be the partition dimension, got 0")
def one_partition_without_its_dimension():
    sbuf((4, 4)).select(0, 0)


@limit("nki.tensor", "select: sbuf needs an integer from 0 to 3 in dimension 1, got 4")
def an_index_past_the_end():
    sbuf((4, 4, 4))[:, 4]


@limit(
    "nki.tensor",
    "slice: sbuf needs 0 <= start < end <= 4 and step >= 1 in dimension 1, got (4, 5, 1)",
)
def an_index_past_the_end_of_what_stays():
    sbuf((4, 4))[:, 4]


@limit("nki.tensor", "rearrange: src_pattern must have 2 dimensions, got ('p',)")
def a_pattern_of_fewer_dimensions():
    sbuf((4, 4)).rearrange(("p",), ("p",))


@limit("nki.tensor", "rearrange: dst_pattern must have the names p, f, got ('p', 'g')")
def a_pattern_with_another_name():
    sbuf((4, 4)).rearrange(("p", "f"), ("p", "g"))


@limit("nki.tensor", "select: shared_hbm must not be indirect already, got an indirect view")
def an_indirect_view_selected_from():
    i = zeros((1, 1), "int32")
    hbm((4, 4, 4)).select(0, i).select(1, i)


@limit("nki.tensor", "nl.ds: the index must be (1, 1), got (4, 1)")
def a_slice_from_four_indices():
    hbm((4, 4))[nl.ds(zeros((4, 1), "int32"), 2)]


@limit(
    "nki.isa.dma_copy, indirect",
    "ap: the offset must be a tile, or for scalar_offset a register, got int",
)
def an_offset_that_is_a_number():
    hbm((4, 4)).ap([[4, 1]], scalar_offset=2)


# addresses


@limit(
    "nki.language.ndarray, address",
    "nl.ndarray: address must be (partition, byte) of a tensor on the chip, got (0, 0)",
)
def an_address_of_hbm():
    nl.ndarray((4, 4), nl.float32, buffer=nl.shared_hbm, address=(0, 0))


@limit(
    "nki.language.ndarray, address", "nl.ndarray: address must leave 8 partitions of 128, got 124"
)
def an_address_past_the_last_partition():
    nl.ndarray((8, 4), nl.float32, address=(124, 0))


@limit(
    "nki.language.ndarray, address", "nl.ndarray: address must leave 16 bytes of 212984, got 212976"
)
def an_address_past_the_end():
    nl.ndarray((8, 4), nl.float32, address=(0, 212976))


@limit("nki/migration", "nl.ndarray: address must begin a bank of PSUM, a multiple of 2048, got 64")
def an_address_within_a_bank():
    nl.ndarray((8, 4), nl.float32, buffer=nl.psum, address=(0, 64))


@limit(
    "nki.language.ndarray, address",
    "nisa.tensor_copy: src first must still hold what was written to its address, got what second "
    "wrote there",
    of_values=True,
)
def a_read_of_what_another_overwrote():
    first = nl.ndarray((8, 4), nl.float32, address=(0, 0), name="first")
    second = nl.ndarray((8, 4), nl.float32, address=(0, 8), name="second")
    nisa.memset(first, 0.0)
    nisa.memset(second, 0.0)
    nisa.tensor_copy(sbuf((8, 2)), first[:, 2:])


@limit("nki.tensor", "NkiTensor[]: sbuf takes at most 2 indices, got 3")
def too_many_indices():
    sbuf((4, 4))[:, :, 0]


@limit("nki.tensor", "permute: dims must keep the partition first, got (1, 0)")
def a_permutation_that_moves_partitions():
    sbuf((4, 4)).permute((1, 0))


@limit("nki.tensor", "permute: dims must be a permutation of 2 dimensions, got (0, 0)")
def no_permutation():
    sbuf((4, 4)).permute((0, 0))


@limit("nki.tensor", "broadcast: sbuf must have one element in dimension 1, got 4")
def a_broadcast_of_several_elements():
    sbuf((4, 4)).broadcast(1, 8)


@limit("nki.tensor", "broadcast: dim must not be the partition dimension, got 0")
def a_broadcast_over_partitions():
    sbuf((1, 4)).broadcast(0, 8)


@limit("nki.tensor", "reshape: sbuf must keep its 16 elements, got (4, 5)")
def a_reshape_to_another_size():
    sbuf((4, 4)).reshape((4, 5))


@limit("nki.tensor", "reshape: sbuf must keep its 4 partitions, got (2, 8)")
def a_reshape_over_partitions():
    sbuf((4, 4)).reshape((2, 8))


@limit("nki.tensor", "reshape: sbuf must be contiguous, got [[16, 4], [4, 4], [1, 2]]")
def a_reshape_of_a_part():
    sbuf((4, 4, 4))[:, :, :2].reshape((4, 8))


@limit(
    "nki.tensor",
    "flatten_dims: sbuf must be contiguous over these dimensions, got [[16, 4], [4, 4], [1, 2]]",
)
def dimensions_that_do_not_merge():
    sbuf((4, 4, 4))[:, :, :2].flatten_dims(1, 2)


@limit("nki.tensor", "reshape_dim: shape must have 6 elements, got (4, 2)")
def a_dimension_split_to_another_size():
    sbuf((4, 6)).reshape_dim(1, (4, 2))


@limit("nki.tensor", "expand_dim: dim must not be the partition dimension, got 0")
def a_dimension_before_the_partitions():
    sbuf((4, 4)).expand_dim(0)


@limit("nki.tensor", "view: sbuf must divide into elements of 4 bytes, got (4, 3)")
def a_view_that_does_not_divide():
    sbuf((4, 3), "bfloat16").view("float32")


@limit("nki.tensor", "ap: sbuf must step over partitions by 4 elements, without holes, got 8")
def an_access_pattern_that_skips_partitions():
    sbuf((8, 4)).ap([[8, 4], [1, 4]])


@limit("nki.tensor", "ap: sbuf must stay within the 4 elements of a partition, got 7")
def an_access_pattern_over_the_end_of_a_partition():
    sbuf((8, 4)).ap([[4, 4], [1, 8]])


@limit("nki.tensor", "ap: shared_hbm must stay within its 32 elements, got 0 to 32")
def an_access_pattern_past_the_end():
    hbm((8, 4)).ap([[8, 4], [1, 9]])


@limit("nki.tensor", "ap: pattern may have 1 to 5 dimensions, got 6")
def an_access_pattern_of_six_dimensions():
    hbm((8, 4)).ap([[1, 1]] * 6)


@limit(
    "nki.isa.dma_copy, indirect",
    "ap: scalar_offset and vector_offset are mutually exclusive, got both",
)
def both_offsets_at_once():
    i = zeros((1, 1), "int32")
    hbm((8, 4)).ap([[4, 1], [1, 4]], scalar_offset=i, vector_offset=i)


@limit(
    "nki/deep-dives/nki-aps",
    "ap: shared_hbm must not be indirect already, because a pattern is over the storage itself, "
    "got an indirect view",
)
def an_indirect_view_made_indirect_again():
    i = zeros((4, 1), "int32")
    hbm((8, 4)).vector_select(0, i).ap([[4, 4], [1, 4]], vector_offset=i)


@limit(
    "nki/deep-dives/nki-aps",
    "ap: shared_hbm must not be indirect already, because a pattern is over the storage itself, "
    "got an indirect view",
)
def an_indirect_view_made_direct_again():
    i = zeros((4, 1), "int32")
    hbm((8, 4)).vector_select(0, i).ap([[4, 4], [1, 4]])


@limit("nki.isa.dma_copy, indirect", "ap: the offset must be int32 or uint32, got float32")
def an_index_of_floats():
    hbm((8, 4)).ap([[4, 4], [1, 4]], vector_offset=zeros((4, 1)))


@limit(
    "nki.isa.dma_copy, indirect",
    "ap: vector_offset must be (4, 1), an index for each partition, got (3, 1)",
)
def an_index_for_too_few_partitions():
    hbm((8, 4)).ap([[4, 4], [1, 4]], vector_offset=zeros((3, 1), "int32"))


@limit("nki.isa.dma_copy, indirect", "ap: sbuf must be in HBM for a vector_offset, got sbuf")
def a_vector_offset_into_sbuf():
    sbuf((8, 4)).ap([[4, 4], [1, 4]], vector_offset=zeros((4, 1), "int32"))


@limit("nki.isa.dma_copy, indirect", "ap: the offset must be in SBUF, got shared_hbm")
def an_index_in_hbm():
    hbm((8, 4)).ap([[4, 4], [1, 4]], vector_offset=hbm((4, 1), "int32"))


@pytest.mark.parametrize("name", limit.names())
def test_limit(name):
    limit.check(name)


@pytest.mark.parametrize("name", limit.names(of_values=False))
def test_limit_without_computing(name):
    limit.check_without_computing(name)
