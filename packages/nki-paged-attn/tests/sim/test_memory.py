"""Memory: poison, strict reads, capacity by liveness, views, indirect DMA, two programs."""

from __future__ import annotations

import numpy as np
import pytest
from nki_paged_attn.sim import NkiValidationError, UnwrittenError, simulate

from ._nki import draw, hbm, loaded, nisa, nl, psum, run, sbuf, stored, zeros


@pytest.mark.parametrize(
    ("target", "nbytes"), [("trn1", 180_224), ("trn2", 212_984), ("trn3", 245_752)]
)
def test_a_partition_of_sbuf_has_room_for_so_much(target, nbytes):
    def body(*more):
        kept = [sbuf((1, n)) for n in (nbytes // 8, nbytes // 8, *more)]
        assert len(kept) == 2 + len(more)

    run(body, target=target)
    with pytest.raises(NkiValidationError, match=f"at most {nbytes} bytes of each partition"):
        run(lambda: body(1), target=target)


def test_unwritten_memory_is_nan_or_4():
    """Point 11: what nothing wrote poisons the result."""

    def body():
        return stored(sbuf((2, 2))), stored(sbuf((2, 2), "int32")), stored(psum((2, 2), "bfloat16"))

    floats, integers, narrow = run(body)
    assert np.isnan(floats).all()
    assert (integers == 4).all()
    assert np.isnan(narrow.astype(np.float32)).all()


def test_strict_mode_names_the_unwritten_tensor():
    """Point 11."""

    def body():
        half = sbuf((2, 4), name="half")
        nisa.memset(half[:, :2], 0.0)
        out = sbuf((2, 4), name="copy")
        nisa.tensor_copy(out, half)

    with pytest.raises(UnwrittenError, match="half must be written before it is read, got 4"):
        run(body, strict=True)
    run(body)


def test_strict_mode_wants_outputs_whole():
    def body():
        out = hbm((2, 2), name="result")
        nisa.dma_copy(out[:1, :], zeros((1, 2)))
        return out

    with pytest.raises(NkiValidationError, match="the output result must be written as a whole"):
        run(body, strict=True)


@pytest.mark.parametrize("wide", ["float32", "int32"])
def test_strict_mode_is_exact_through_views_of_other_dtypes(wide):
    """A view in 16 bits of half a row marks that half, no more."""

    def half(columns):
        tile = sbuf((2, 4), wide, name="tile")
        nisa.memset(tile.view("bfloat16")[:, :columns], 0.0)
        return tile

    def read(columns):
        def body():
            nisa.tensor_copy(sbuf((2, 2), wide), half(columns)[:, :2])

        return body

    run(read(4), strict=True)
    run(read(8), strict=True)
    with pytest.raises(UnwrittenError, match=r"tile must be written .*, got 2 unwritten"):
        run(read(3), strict=True)

    def other_half():
        nisa.tensor_copy(sbuf((2, 2), wide), half(4)[:, 2:])

    with pytest.raises(UnwrittenError, match="got 4 unwritten"):
        run(other_half, strict=True)


def test_strict_mode_is_exact_through_wider_views():
    def body():
        tile = sbuf((2, 8), "uint8", name="tile")
        nisa.memset(tile[:, :4], 0)
        nisa.tensor_copy(sbuf((2, 1), "int32"), tile.view("int32")[:, :1])
        nisa.tensor_copy(sbuf((2, 2), "int32"), tile.view("int32"))

    with pytest.raises(UnwrittenError, match=r"tile must be written .*, got 2 unwritten"):
        run(body, strict=True)


def test_strict_mode_knows_which_rows_a_gather_reads():
    index = np.array([[1], [0]], np.int32)

    def body(i, first=0):
        source = hbm((3, 4), name="source")
        nisa.dma_copy(source[first : first + 2, :], zeros((2, 4)))
        tile = sbuf((2, 4))
        nisa.dma_copy(tile, source.vector_select(0, loaded(i)))

    run(body, index, strict=True)
    with pytest.raises(UnwrittenError, match=r"source must be written .*, got 4 unwritten"):
        run(lambda i: body(i, first=1), index, strict=True)


def test_strict_mode_knows_which_rows_a_skipping_scatter_writes():
    index = np.array([[2], [9]], np.int32)

    def body(i, row):
        out = hbm((3, 4), name="out")
        tile = sbuf((2, 4))
        nisa.memset(tile[:1], 0.0)
        nisa.dma_copy(out.vector_select(0, loaded(i)), tile, oob_mode=nisa.oob_mode.skip)
        loaded(out[row : row + 1, :])

    run(lambda i: body(i, 2), index, strict=True)
    with pytest.raises(UnwrittenError, match="out must be written"):
        run(lambda i: body(i, 0), index, strict=True)


def test_memory_that_nothing_refers_to_is_free_again():
    def body():
        for _ in range(100):
            zeros((128, 8 * 512), buffer="psum")
            zeros((128, 30_000))
        return stored(zeros((1, 1)))

    kernel = simulate(body)
    kernel()
    assert kernel.trace.psum_peak == 8
    # a tile of 120,000 bytes goes before the next comes
    assert kernel.trace.sbuf_peak == 120_000


def test_views_share_memory():
    a = draw(4, 6)

    def body(x):
        tile = loaded(x)
        nisa.memset(tile[:, 1:3], 7.0)
        parts = tile.reshape_dim(1, (3, 2)).permute((0, 2, 1))
        out = sbuf((4, 2, 3))
        nisa.tensor_copy(out, parts)
        return stored(out)

    a_after = a.copy()
    a_after[:, 1:3] = 7
    np.testing.assert_array_equal(run(body, a), a_after.reshape(4, 3, 2).transpose(0, 2, 1))


def test_steps_ellipses_and_dynamic_slices():
    a = draw(4, 3, 8)

    def body(x):
        tile = loaded(x)
        return (
            stored(tile[..., 1:8:3]),
            stored(tile[:, 1, nl.ds(2, 4)]),
            stored(tile[1:2]),
            stored(tile.flatten_dims(1, 2).ap([[24, 4], [2, 5]], offset=3)),
        )

    first, second, third, fourth = run(body, a)
    np.testing.assert_array_equal(first, a[..., 1:8:3])
    np.testing.assert_array_equal(second, a[:, 1, 2:6])
    np.testing.assert_array_equal(third, a[1:2])
    np.testing.assert_array_equal(fourth, a.reshape(4, 24)[:, 3:13:2])


def test_views_of_other_dtypes_keep_the_bits():
    a = draw(2, 4)
    got = run(lambda x: stored(loaded(x).view("uint32")), a)
    np.testing.assert_array_equal(got, a.view(np.uint32))


def test_inputs_that_a_kernel_writes_change_in_place():
    a = np.zeros((2, 4), np.float32)
    strided = np.zeros((2, 8), np.float32)[:, ::2]

    def body(x):
        tile = zeros((2, 4))
        nisa.memset(tile, 3.0)
        nisa.dma_copy(x, tile)

    run(body, a)
    run(body, strided)
    assert (a == 3).all()
    assert (strided == 3).all()


def test_an_input_that_is_given_twice_is_one_tensor():
    for a in (np.zeros((2, 4), np.float32), np.zeros((2, 8), np.float32)[:, ::2]):

        def body(x, y):
            tile = zeros((2, 4))
            nisa.memset(tile, 3.0)
            nisa.dma_copy(x, tile)
            return stored(loaded(y))

        assert (run(body, a, a) == 3).all()
        assert (a == 3).all()


def test_constants_are_read():
    a = draw(2, 4)
    a.flags.writeable = False
    for x in (a, np.asfortranarray(a)):
        x.flags.writeable = False
        np.testing.assert_array_equal(run(lambda t: stored(loaded(t)), x), a)


def test_copies_of_inputs_that_are_not_written_do_not_come_back():
    """Two views of one array, of which the kernel writes one."""
    base = np.zeros((4, 8), np.float32)
    first, second = base[:, ::2], base[::-1, ::2]

    def body(x, y):
        tile = zeros((4, 4))
        nisa.memset(tile, 3.0)
        nisa.dma_copy(x, tile)
        loaded(y)

    run(body, first, second)
    assert (first == 3).all()


# indirect DMA


def gather(x, i, mode, rows=4):
    tile = sbuf((rows, x.shape[1]))
    nisa.memset(tile, -1.0)
    nisa.dma_copy(tile, x.vector_select(0, loaded(i)), oob_mode=mode)
    return stored(tile)


def test_gather_takes_a_row_for_each_partition():
    a, index = draw(6, 5), np.array([[3], [0], [5], [3]], np.int32)
    got = run(lambda x, i: gather(x, i, nisa.oob_mode.error), a, index)
    np.testing.assert_array_equal(got, a[index[:, 0]])


@pytest.mark.parametrize("wrong", [6, -1, 2**30])
def test_an_index_out_of_bounds_raises_or_leaves_its_row(wrong):
    """Point 10."""
    a, index = draw(6, 5), np.array([[3], [wrong], [5], [3]], np.int32)
    with pytest.raises(NkiValidationError, match=r"must be from 0 to 5; oob_mode.error raises"):
        run(lambda x, i: gather(x, i, nisa.oob_mode.error), a, index)
    got = run(lambda x, i: gather(x, i, nisa.oob_mode.skip), a, index)
    np.testing.assert_array_equal(got[[0, 2, 3]], a[[3, 5, 3]])
    assert (got[1] == -1).all()


def test_the_pitch_of_an_index_is_that_of_its_dimension():
    """Point 10: not the first stride of the pattern."""
    a, index = draw(4, 3, 5), np.array([[2], [1]], np.int32)

    def body(x, i):
        tile = sbuf((2, 5))
        view = x.ap([[999, 2], [1, 5]], vector_offset=loaded(i), indirect_dim=1)
        nisa.dma_copy(tile, view)
        return stored(tile)

    np.testing.assert_array_equal(run(body, a, index), a.reshape(12, 5)[[2, 1]])


def test_scatter_and_scalar_offsets():
    a, index = draw(2, 5), np.array([[3], [1]], np.int32)

    def body(x, i):
        rows, out = loaded(i), hbm((4, 5))
        nisa.dma_copy(out, zeros((4, 5)))
        nisa.dma_copy(out.vector_select(0, rows), loaded(x))
        second, one = sbuf((2, 5)), zeros((1, 1), "int32")
        nisa.memset(one, 1)
        # both rows from the second index on
        nisa.dma_copy(second, out.ap([[5, 2], [1, 5]], scalar_offset=one, indirect_dim=0))
        return out, stored(second)

    out, second = run(body, a, index)
    np.testing.assert_array_equal(out[[3, 1]], a)
    assert (out[[0, 2]] == 0).all()
    np.testing.assert_array_equal(second, out[1:3])


def test_an_index_within_bounds_may_not_lead_past_the_end():
    a, index = draw(4, 5), np.array([[3]], np.int32)

    def body(x, i):
        view = x.ap([[5, 1], [1, 5]], offset=5, vector_offset=loaded(i), indirect_dim=0)
        nisa.dma_copy(sbuf((1, 5)), view)

    with pytest.raises(NkiValidationError, match="must stay within its 20 elements"):
        run(body, a, index)


def test_dma_converts_through_fp32():
    a = draw(2, 4)

    def body(x):
        tile = sbuf((2, 4), "bfloat16")
        nisa.dma_copy(tile, x)
        return stored(tile)

    got = run(body, a)
    np.testing.assert_array_equal(got, a.astype(got.dtype))


def test_dma_transposes():
    a, index = draw(16, 8).astype(np.float16), np.arange(16, dtype=np.uint32)[::-1, None].copy()

    def body(x, i):
        direct, gathered = sbuf((8, 16), x.dtype), sbuf((8, 16), x.dtype)
        nisa.dma_transpose(direct, x)
        nisa.dma_transpose(gathered, x.vector_select(0, loaded(i)), axes=(1, 0))
        return stored(direct), stored(gathered)

    direct, gathered = run(body, a, index)
    np.testing.assert_array_equal(direct, a.T)
    np.testing.assert_array_equal(gathered, a[::-1].T)


def test_dma_begins_at_any_partition():
    a = draw(3, 4)

    def body(x):
        tile = zeros((8, 4))
        nisa.dma_copy(tile[5:8], x)
        out = hbm((8, 4))
        nisa.dma_copy(out[:2], tile[6:8])
        nisa.dma_copy(out[2:], tile[:6])
        return out

    got = run(body, a)
    np.testing.assert_array_equal(got[:2], a[1:])
    np.testing.assert_array_equal(got[-1], a[0])
    assert (got[2:-1] == 0).all()


# two programs


def test_programs_of_a_logical_core_share_their_output():
    def body():
        out = hbm((2, 4))
        tile = zeros((1, 4))
        nisa.memset(tile, nl.program_id(0) + 1.0)
        nisa.dma_copy(out[nl.program_id(0) : nl.program_id(0) + 1, :], tile)
        assert (nl.num_programs(0), nl.program_ndim()) == (2, 1)
        return out

    np.testing.assert_array_equal(run(body, programs=2), [[1] * 4, [2] * 4])


def test_programs_may_not_write_the_same_place():
    def body():
        out, tile = hbm((2, 4), name="shared"), zeros((1, 4))
        nisa.memset(tile, float(nl.program_id(0)))
        nisa.dma_copy(out[0:1, :], tile)
        return out

    with pytest.raises(NkiValidationError, match="shared: programs of a logical core must write"):
        run(body, programs=2)


@pytest.mark.parametrize("execute", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_programs_may_write_apart_through_views_of_other_dtypes(dtype, execute):
    def body():
        out = hbm((2, 4), name="shared").view(dtype)
        row = out[nl.program_id(0) : nl.program_id(0) + 1, :]
        nisa.dma_copy(row, zeros((1, row.shape[1]), dtype))

    run(body, programs=2, execute=execute)


def test_programs_may_read_the_same_inputs():
    def body(x):
        out = hbm((2, 4))
        rows = zeros((2, 1), "int32")
        tile = sbuf((2, 4))
        nisa.dma_copy(tile, x.vector_select(0, rows))
        own = slice(nl.program_id(0), nl.program_id(0) + 1)
        nisa.dma_copy(out[own, :], loaded(x)[own, :])
        return out

    a = draw(2, 4)
    np.testing.assert_array_equal(run(body, a, programs=2), a)


def test_programs_must_allocate_the_same_outputs():
    def body():
        return hbm((2, 4 + nl.program_id(0)))

    with pytest.raises(NkiValidationError, match="must be the same in both programs"):
        run(body, programs=2)
