"""What the engines compute: fp32 inside, rounding at the end, registers that last."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from ._nki import draw, loaded, nisa, nl, psum, run, sbuf, stored, zeros

BF16 = np.dtype(ml_dtypes.bfloat16)


def test_matmul_contracts_over_partitions():
    a, b = draw(7, 5), draw(7, 9, seed=1)

    def body(x, y):
        out = psum((5, 9))
        nisa.nc_matmul(out, loaded(x), loaded(y))
        return stored(out)

    np.testing.assert_allclose(run(body, a, b), a.T @ b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("modes", "factor"),
    [
        # one product each; what is there in the end, in products
        ((False, False), 1),
        ((False, True), 2),
        ((None,), 1),
        ((None, None), 2),
        ((None, True, None), 3),
        ((False, None), 2),
        ((None, False), 1),
    ],
)
def test_accumulate(modes, factor):
    """Point 9: False overwrites, None infers: the first write overwrites, later ones add."""
    a = draw(4, 4)

    def body(x):
        tile, out = loaded(x), psum((4, 4))
        for mode in modes:
            nisa.nc_matmul(out, tile, tile, accumulate=mode)
        return stored(out)

    np.testing.assert_allclose(run(body, a), factor * (a.T @ a), rtol=1e-6)


def test_inferred_accumulation_overwrites_what_a_memset_wrote():
    a = draw(4, 4)

    def body(x):
        tile, out = loaded(x), psum((4, 4))
        nisa.memset(out, 5.0)
        nisa.nc_matmul(out, tile, tile)
        return stored(out)

    np.testing.assert_allclose(run(body, a), a.T @ a, rtol=1e-6)


def test_inferred_accumulation_goes_by_place():
    a = draw(4, 4)

    def body(x):
        tile, out = loaded(x), psum((4, 8))
        nisa.nc_matmul(out[:, :4], tile, tile)
        nisa.nc_matmul(out, tile, tile.expand_dim(1).broadcast(1, 2))
        return stored(out)

    product = a.T @ a
    expected = np.concatenate([2 * product, product], axis=1)
    np.testing.assert_allclose(run(body, a), expected, rtol=1e-6)


def test_products_of_bf16_are_exact_and_sums_in_fp32():
    a = draw(128, 3, dtype=BF16)
    out = run(lambda x: product(x), a)
    exact = a.astype(np.float64).T @ a.astype(np.float64)
    assert abs(out - exact).max() < 1e-4 < abs(out.astype(BF16).astype(np.float64) - exact).max()


def product(x):
    tile, out = loaded(x), psum((x.shape[1], x.shape[1]))
    nisa.nc_matmul(out, tile, tile)
    return stored(out)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("engine", ["tensor", "vector"])
def test_transpose(dtype, engine):
    a = draw(32, 2, 8, dtype=dtype)

    def body(x):
        out = psum((16, 32), x.dtype)
        nisa.nc_transpose(out, loaded(x), engine=nisa.engine[engine])
        return stored(out)

    np.testing.assert_array_equal(run(body, a), a.reshape(32, 16).T)


@pytest.mark.parametrize(("target", "spreads"), [("trn1", True), ("trn2", False), ("trn3", False)])
def test_nan_in_a_transpose(target, spreads):
    """Bit-accurate from gen3 on; before, NaN reaches its row by the product with the identity."""
    a = draw(4, 4)
    a[1, 2] = np.nan

    def body(x):
        out = psum((4, 4))
        nisa.nc_transpose(out, loaded(x), engine=nisa.engine.tensor)
        return stored(out)

    got = run(body, a, target=target)
    assert np.isnan(got).sum() == (4 if spreads else 1)


def test_activation_scales_then_adds_then_applies():
    a, bias = draw(8, 6), draw(8, 1, seed=1)

    def body(x, b):
        out = sbuf((8, 6))
        nisa.activation(out, nl.exp, loaded(x), bias=loaded(b), scale=0.5)
        return stored(out)

    np.testing.assert_allclose(run(body, a, bias), np.exp(a * 0.5 + bias), rtol=1e-6)


def test_activation_reduce_overwrites_and_sums_before_rounding():
    """Point 9; the sum is of the fp32 results, whatever dst is."""
    a = draw(8, 100)

    def body(x):
        tile, out, total = loaded(x), sbuf((8, 100), "bfloat16"), sbuf((8, 1))
        for _ in range(2):
            nisa.activation_reduce(out, nl.exp, tile, nl.add, total)
        return stored(total), stored(out)

    total, out = run(body, a)
    np.testing.assert_allclose(total[:, 0], np.exp(a).sum(axis=1), rtol=1e-6)
    np.testing.assert_array_equal(out, np.exp(a).astype(BF16))


def test_activation_registers_last_until_they_are_reset():
    """Point 9: reduce adds on, idle leaves them, reset_reduce begins anew."""
    a = draw(8, 10)
    command = nisa.reduce_cmd

    def body(x):
        tile, out = loaded(x), sbuf((8, 10))
        results = []
        for c in (command.reset_reduce, command.idle, command.reduce, command.reset_reduce):
            total = sbuf((8, 1))
            nisa.activation(out, nl.copy, tile, reduce_op=nl.add, reduce_res=total, reduce_cmd=c)
            results.append(stored(total))
        return results

    sums = a.sum(axis=1, keepdims=True)
    for got, factor in zip(run(body, a), (1, 1, 2, 1), strict=True):
        np.testing.assert_allclose(got, factor * sums, rtol=1e-5, atol=1e-5)


def test_tensor_scalar_orders_and_reverses():
    a = draw(4, 5)

    def body(x):
        tile, out = loaded(x), sbuf((4, 5))
        nisa.tensor_scalar(out, tile, nl.subtract, 1.0, True, nl.multiply, 3.0)
        return stored(out)

    np.testing.assert_allclose(run(body, a), (1 - a) * 3, rtol=1e-6)


def test_scalar_tensor_tensor():
    a, b, c = draw(4, 5), draw(4, 1, seed=1), draw(4, 5, seed=2)

    def body(x, y, z):
        out = sbuf((4, 5))
        nisa.scalar_tensor_tensor(out, loaded(x), nl.multiply, loaded(y), nl.subtract, loaded(z))
        return stored(out)

    np.testing.assert_allclose(run(body, a, b, c), a * b - c, rtol=1e-5, atol=1e-6)


def test_integers_of_32_bits_add_exactly_on_gpsimd_and_round_on_vector():
    a = np.full((2, 2), 2**24 + 1, np.int32)

    def body(x):
        tile = loaded(x)
        results = []
        for engine in (nisa.engine.unknown, nisa.engine.vector):
            out = sbuf((2, 2), "int32")
            nisa.tensor_tensor(out, tile, tile, nl.add, engine=engine)
            results.append(stored(out))
        return results

    exact, rounded = run(body, a)
    assert (exact == 2**25 + 2).all()
    assert (rounded == 2**25).all()


def test_a_scalar_times_an_int32_tile_is_fp32_arithmetic():
    a = np.full((2, 2), 2**24 + 1, np.int32)

    def body(x):
        out = sbuf((2, 2), "int32")
        nisa.tensor_scalar(out, loaded(x), nl.multiply, 1.0)
        return stored(out)

    assert (run(body, a) == 2**24).all()


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (2.5, "int32", 2),
        (3.5, "int32", 4),
        (-1.0, "uint8", 0),
        (300.0, "uint8", 255),
        (3e9, "int32", 2**31 - 1),
        (1 + 2**-9, "bfloat16", 1.0),
        (1 + 3 * 2**-9, "bfloat16", 1.0078125),
    ],
)
def test_results_round_to_the_nearest_even_and_integers_saturate(value, dtype, expected):
    def body(x):
        out = sbuf((1, 1), dtype)
        nisa.tensor_copy(out, loaded(x))
        return stored(out)

    assert run(body, np.full((1, 1), value, np.float32))[0, 0] == expected


def test_reductions():
    a = draw(4, 3, 5)

    def body(x):
        tile, top, total = loaded(x), sbuf((4, 3)), sbuf((4, 1))
        nisa.tensor_reduce(top, nl.maximum, tile, axis=2, negate=True)
        nisa.tensor_reduce(total, nl.add, tile, axis=(1, 2))
        return stored(top), stored(total)

    top, total = run(body, a)
    np.testing.assert_array_equal(top, -a.max(axis=2))
    np.testing.assert_allclose(total[:, 0], a.sum(axis=(1, 2)), rtol=1e-5)


def test_range_select_keeps_a_range_of_each_row_and_its_maximum():
    a = draw(3, 8)
    low, high = np.array([[2], [0], [5]], np.float32), np.array([[5], [9], [5]], np.float32)

    def body(x, b0, b1):
        out, top = sbuf((3, 8)), sbuf((3, 1))
        nisa.range_select(
            out,
            loaded(x),
            nl.greater_equal,
            nl.less,
            loaded(b0),
            loaded(b1),
            reduce_res=top,
            range_start=1,
        )
        return stored(out), stored(top)

    out, top = run(body, a, low, high)
    index = 1 + np.arange(8)
    expected = np.where((index >= low) & (index < high), a, np.finfo(np.float32).min)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(top[:, 0], expected.max(axis=1))


def test_vector_registers_continue_a_chain():
    a = draw(3, 8)

    def body(x):
        tile, p = loaded(x), zeros((3, 4), "uint8")
        nisa.memset(p, 1)
        top = sbuf((3, 1))
        for part, command in ((0, "reset_reduce"), (4, "reduce")):
            nisa.select_reduce(
                sbuf((3, 4)),
                p,
                tile[:, part : part + 4],
                -1.0,
                reduce_res=top,
                reduce_cmd=nisa.reduce_cmd[command],
            )
        return stored(top)

    np.testing.assert_array_equal(run(body, a)[:, 0], a.max(axis=1))


def test_predicated_copy_leaves_the_rest():
    a, p = draw(2, 4), np.array([[1, 0, 2, 0]] * 2, np.uint8)

    def body(x, y):
        out = zeros((2, 4))
        nisa.tensor_copy_predicated(out, loaded(x), loaded(y))
        return stored(out)

    np.testing.assert_array_equal(run(body, a, p), np.where(p, a, 0))


def test_iota_and_affine_select():
    def body():
        index, kept = sbuf((3, 2, 2), "int32"), sbuf((3, 3))
        nisa.iota(index, [[10, 2], [1, 2]], offset=5, channel_multiplier=100)
        ones = zeros((3, 3))
        nisa.memset(ones, 1.0)
        nisa.affine_select(kept, [[-1, 3]], 1, ones, 0.0, cmp_op=nl.greater_equal)
        return stored(index), stored(kept)

    index, kept = run(body)
    assert index.reshape(3, 4).tolist() == [
        [5, 6, 15, 16],
        [105, 106, 115, 116],
        [205, 206, 215, 216],
    ]
    np.testing.assert_array_equal(kept, np.tril(np.ones((3, 3))))


def test_exponential_sums_on_gen4():
    a = draw(3, 8)

    def body(x):
        out, total = sbuf((3, 8)), sbuf((3, 1))
        nisa.exponential(
            out,
            loaded(x),
            max_value=1.0,
            reduce_res=total,
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )
        return stored(out), stored(total)

    out, total = run(body, a, target="trn3")
    np.testing.assert_allclose(out, np.exp(a - 1), rtol=1e-6)
    np.testing.assert_allclose(total[:, 0], np.exp(a - 1).sum(axis=1), rtol=1e-6)


def test_tensor_scalar_reduce_and_reciprocal():
    a = np.abs(draw(3, 8)) + 1

    def body(x):
        out, total = sbuf((3, 8)), sbuf((3, 1))
        nisa.tensor_scalar_reduce(out, loaded(x), nl.multiply, 2.0, nl.add, total)
        nisa.reciprocal(out, out)
        return stored(out), stored(total)

    out, total = run(body, a)
    np.testing.assert_allclose(out, 1 / (2 * a), rtol=1e-6)
    np.testing.assert_allclose(total[:, 0], (2 * a).sum(axis=1), rtol=1e-6)
