"""Points 8 to 11 that the simulator is accepted by, each under its number."""

from __future__ import annotations

import numpy as np
import pytest
from nki_paged_attn.sim import NkiValidationError, UnwrittenError

from ._limits import matmul
from ._nki import draw, hbm, loaded, nisa, nl, psum, run, sbuf, stored, zeros


def psum_zeros(*shape):
    return zeros(shape, buffer="psum")


@pytest.mark.parametrize(
    ("body", "text", "targets"),
    [
        (lambda: sbuf((129, 1)), "at most 128 partitions, got 129", "123"),
        (lambda: matmul(n=513), "free size of at most 512 on trn., got 513", "12"),
        (lambda: matmul(m=129, dst=psum((128, 8))), "at most 128, got 129", "123"),
        (
            lambda: matmul(dtypes=("float32", "bfloat16")),
            "must both be float32 if one is, got float32 and bfloat16",
            "123",
        ),
        (lambda: matmul(dst=sbuf((8, 8))), "dst must be in PSUM, got sbuf", "123"),
        (
            lambda: matmul(dst=psum((8, 8), "bfloat16")),
            "dst must be float32 on trn., got bfloat16",
            "12",
        ),
        (lambda: matmul(dst=psum((8, 8), "float16")), "dst must be float32.*got float16", "123"),
        (
            lambda: nisa.nc_matmul(psum((8, 8)), psum_zeros(8, 8), zeros((8, 8))),
            "stationary must be in SBUF, got psum",
            "123",
        ),
        (
            lambda: nisa.nc_matmul(psum((8, 8)), zeros((8, 8)), psum_zeros(8, 8)),
            "moving must be in SBUF, got psum",
            "123",
        ),
        (
            lambda: nisa.tensor_tensor(sbuf((8, 8)), psum_zeros(8, 8), psum_zeros(8, 8), nl.add),
            "data1 and data2 must not both be in PSUM",
            "123",
        ),
        (
            lambda: nisa.dma_copy(hbm((8, 8)), psum_zeros(8, 8)),
            "src must be in SBUF or .*HBM, got psum",
            "123",
        ),
        (
            lambda: nisa.dma_copy(psum((8, 8)), hbm((8, 8))),
            "dst must be in SBUF or .*HBM, got psum",
            "123",
        ),
        (
            lambda: nisa.dma_transpose(sbuf((4, 8, 1)), hbm((8, 4))),
            r"dst must be \(4, 8\), the transposed source, got \(4, 8, 1\)",
            "123",
        ),
        (
            lambda: nisa.dma_transpose(sbuf((4, 8)), hbm((8, 4), "bfloat16")),
            "dst must have src's dtype, bfloat16, got float32",
            "123",
        ),
        (
            lambda: nisa.tensor_reduce(sbuf((1, 8)), nl.add, zeros((8, 8)), axis=0),
            "axis must not be 0, the partitions",
            "123",
        ),
        (
            lambda: [sbuf((1, 1024)) for _ in range(65)],
            "bytes of each partition of SBUF are live at once",
            "123",
        ),
        (lambda: [psum((1, 1)) for _ in range(9)], "at most 8 banks .* live at once, got 9", "123"),
    ],
)
def test_08_what_the_hardware_refuses(body, text, targets):
    """On each generation that refuses it."""
    for generation in targets:
        with pytest.raises(NkiValidationError, match=text):
            run(body, target=f"trn{generation}")


def chain(x, modes, before=None):
    """Multiply into one place of PSUM by some modes of accumulation."""
    tile, out = loaded(x), psum((4, 4))
    if before is not None:
        nisa.memset(out, before)
    for mode in modes:
        nisa.nc_matmul(out, tile, tile, accumulate=mode)
    return stored(out)


@pytest.mark.parametrize(
    ("modes", "products"),
    [((False,), 1), ((False, False), 1), ((False, True), 2), ((None, None), 2), ((None, False), 1)],
)
def test_09_false_overwrites_true_adds_and_none_infers(modes, products):
    a = draw(4, 4)
    got = run(lambda x: chain(x, modes), a)
    np.testing.assert_allclose(got, products * (a.T @ a), rtol=1e-6)


@pytest.mark.parametrize("target", ["trn1", "trn2"])
def test_09_adding_to_what_no_product_wrote_raises(target):
    with pytest.raises(NkiValidationError, match="adds to it, got unwritten PSUM"):
        run(lambda x: chain(x, (True,)), draw(4, 4), target=target)
    with pytest.raises(NkiValidationError, match="got PSUM that another engine wrote"):
        run(lambda x: chain(x, (True,), before=0.0), draw(4, 4), target=target)


def test_09_none_overwrites_a_memset():
    a = draw(4, 4)
    np.testing.assert_allclose(run(lambda x: chain(x, (None,), 5.0), a), a.T @ a, rtol=1e-6)


def test_09_reduce_registers():
    """``activation_reduce`` overwrites; registers stay over idle, and reset_reduce resets them."""
    a, command = draw(4, 6), nisa.reduce_cmd

    def body(x):
        tile, out, once = loaded(x), sbuf((4, 6)), sbuf((4, 1))
        nisa.memset(once, 99.0)
        for _ in range(2):
            nisa.activation_reduce(out, nl.copy, tile, nl.add, once)
        sums = [stored(once)]
        for c in (command.reset_reduce, command.reduce, command.idle, command.reset_reduce):
            kept = sbuf((4, 1))
            nisa.activation(out, nl.copy, tile, reduce_op=nl.add, reduce_res=kept, reduce_cmd=c)
            sums.append(stored(kept))
        return sums

    for got, times in zip(run(body, a), (1, 1, 2, 2, 1), strict=True):
        np.testing.assert_allclose(got[:, 0], times * a.sum(axis=1), rtol=1e-5, atol=1e-6)


def gather(x, i, mode):
    tile = sbuf((3, 5))
    nisa.memset(tile, -1.0)
    nisa.dma_copy(tile, x.vector_select(0, loaded(i)), oob_mode=mode)
    return stored(tile)


def test_10_an_index_out_of_range():
    a, index = draw(6, 5), np.array([[3], [6], [0]], np.int32)
    with pytest.raises(NkiValidationError, match=r"an index must be from 0 to 5; .*, got \[6\]"):
        run(lambda x, i: gather(x, i, nisa.oob_mode.error), a, index)
    got = run(lambda x, i: gather(x, i, nisa.oob_mode.skip), a, index)
    np.testing.assert_array_equal(got, [a[3], [-1.0] * 5, a[0]])


def test_10_the_pitch_is_that_of_indirect_dim():
    a, index = draw(4, 3, 5), np.array([[2], [1]], np.int32)

    def body(x, i):
        rows, results = loaded(i), []
        for dim in (0, 1):
            tile = sbuf((2, 5))
            view = x.ap([[999, 2], [1, 5]], vector_offset=rows, indirect_dim=dim)
            nisa.dma_copy(tile, view)
            results.append(stored(tile))
        return results

    by_first, by_second = run(body, a, index)
    np.testing.assert_array_equal(by_first, a[[2, 1], 0])
    np.testing.assert_array_equal(by_second, a[0, [2, 1]])


def test_10_both_offsets_at_once():
    def body():
        i = zeros((1, 1), "int32")
        hbm((8, 4)).ap([[4, 1], [1, 4]], scalar_offset=i, vector_offset=i)

    with pytest.raises(NkiValidationError, match="are mutually exclusive, got both"):
        run(body)


def test_11_unwritten_memory_poisons_and_strict_mode_names_it():
    def body():
        results = []
        for dtype in ("float32", "bfloat16", "int32", "uint8"):
            out = sbuf((2, 2), dtype)
            nisa.tensor_copy(out, sbuf((2, 2), dtype, name="forgotten"))
            results.append(stored(out))
        return results

    floats, narrow, integers, small = run(body)
    assert np.isnan(floats).all()
    assert np.isnan(narrow.astype(np.float32)).all()
    assert (integers == 4).all()
    assert (small == 4).all()
    with pytest.raises(UnwrittenError, match="src forgotten must be written before it is read"):
        run(body, strict=True)


def test_11_poison_reaches_what_is_computed_with_it():
    def body():
        tile = sbuf((2, 2))
        nisa.memset(tile[:, 0:1], 1.0)
        out = sbuf((2, 2))
        nisa.tensor_scalar(out, tile, nl.add, 1.0)
        return stored(out)

    np.testing.assert_array_equal(run(body), [[2.0, np.nan]] * 2)
