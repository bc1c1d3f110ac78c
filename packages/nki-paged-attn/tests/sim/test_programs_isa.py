"""Programs of the tutorials and of the pages of single instructions; what is refused of them."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from nki_paged_attn.sim import NotModelledError, load

from ._nki import draw, hbm, loaded, nisa, nl, psum, run, sbuf, stored, zeros
from ._programs import Programs

program = Programs()
TUTORIALS = "nki/guides/tutorials"
MATMUL = f"{TUTORIALS}/matrix_multiplication"
LHS_T, RHS = draw(256, 128), draw(256, 1024, seed=1)
X, Y = draw(64, 96), draw(64, 96, seed=1)
ROW = draw(1, 96, seed=2)
INTEGERS = np.random.default_rng(0).integers(0, 2**16, (16, 8)).astype(np.int32)


def product(a, b):
    return a.T @ b


# matrix multiplication


@program(f"{MATMUL}, basic", LHS_T[:128, :64], RHS[:128, :512], expected=product)
def matmul_basic(a, b):
    out = psum((64, 512))
    nisa.nc_matmul(dst=out, stationary=loaded(a), moving=loaded(b))
    return stored(out)


def multiply(out, a, b, held=None):
    """Multiply tiles of 128 x 128 by 128 x 512, kept in ``held`` if it is a dictionary."""
    for m in range(0, a.shape[1], 128):
        for n in range(0, b.shape[1], 512):
            total = psum((128, 512))
            for k in range(0, a.shape[0], 128):
                nisa.nc_matmul(total, tile(a, k, m, 128, held), tile(b, k, n, 512, held))
            nisa.dma_copy(out[m : m + 128, n : n + 512], copied(total))


def tile(x, row, column, width, held):
    name = f"{x.name} {row} {column}"
    if held is None or name not in held:
        found = loaded(x[row : row + 128, column : column + width])
        if held is None:
            return found
        held[name] = found
    return held[name]


def copied(x):
    out = sbuf(x.shape)
    nisa.tensor_copy(dst=out, src=x)
    return out


@program(f"{MATMUL}, tiling", LHS_T, RHS, expected=product)
def matmul_tiled(a, b):
    out = hbm((128, 1024))
    multiply(out, a, b)
    return out


@program(f"{MATMUL}, removing redundant loads", LHS_T, RHS, expected=product)
def matmul_with_loads_hoisted(a, b):
    out = hbm((128, 1024))
    multiply(out, a, b, held={})
    return out


@program(f"{MATMUL}, blocking M and N", LHS_T, RHS, expected=product)
def matmul_blocked_by_columns(a, b):
    out = hbm((128, 1024))
    for n in nl.affine_range(2):
        block = slice(512 * n, 512 * n + 512)
        multiply(out[:, block], a, b[:, block], held={})
    return out


@program(f"{MATMUL}, blocking M, N and K", LHS_T, RHS, expected=product)
def matmul_blocked_in_all(a, b):
    total = zeros((128, 1024))
    for k in nl.sequential_range(0, 256, 128):
        for n in range(0, 1024, 512):
            part = psum((128, 512))
            nisa.nc_matmul(part, loaded(a[k : k + 128]), loaded(b[k : k + 128, n : n + 512]))
            block = total[:, n : n + 512]
            nisa.tensor_tensor(block, block, part, nl.add)
    return stored(total)


# other tutorials


@program(f"{TUTORIALS}/transpose2d", X, expected=lambda x: x.reshape(64, 8, 12).swapaxes(1, 2))
def transpose_2d(x):
    t, out = loaded(x).reshape((64, 8, 12)), sbuf((64, 12, 8))
    for i in range(8):
        nisa.tensor_copy(dst=out[:, :, i], src=t[:, i, :])
    return stored(out)


@program(
    f"{TUTORIALS}/average_pool2d", X, expected=lambda x: x.reshape(64, 4, 2, 6, 2).mean((2, 4))
)
def average_pool_2d(x):
    windows = loaded(x).reshape((64, 4, 2, 12)).reshape_dim(3, (6, 2)).permute((0, 1, 3, 2, 4))
    out = sbuf((64, 4, 6))
    for row in range(4):
        nisa.tensor_reduce(out[:, row], nl.add, windows[:, row], axis=(2, 3))
    nisa.tensor_scalar(out, out, nl.multiply, 0.25)
    return stored(out)


def scanned(x, y):
    state, out = np.zeros(len(x)), []
    for a, b in zip(x.T, y.T, strict=True):
        state = a * state + b
        out.append(state)
    return np.stack(out, axis=1)


@program(f"{TUTORIALS}/fused_mamba", X, Y, expected=scanned)
def state_space_scan(x, y):
    """In two pieces: the second begins with the last state of the first."""
    a, b, out = loaded(x), loaded(y), sbuf((64, 96))
    first, second = slice(0, 40), slice(40, 96)
    nisa.tensor_tensor_scan(out[:, first], a[:, first], b[:, first], 0.0, nl.multiply, nl.add)
    nisa.tensor_tensor_scan(
        out[:, second], a[:, second], b[:, second], out[:, 39], nl.multiply, nl.add
    )
    return stored(out)


@program(f"{TUTORIALS}/spmd_tensor_addition", X, Y, expected=np.add, programs=2)
def addition_by_two_programs(x, y):
    rows = slice(32 * nl.program_id(0), 32 * nl.program_id(0) + 32)
    out, total = hbm(x.shape), sbuf((32, 96))
    nisa.tensor_tensor(total, loaded(x[rows]), loaded(y[rows]), nl.add)
    nisa.dma_copy(out[rows], total)
    return out


@program(
    f"{TUTORIALS}/rmsnorm",
    X,
    ROW,
    expected=lambda x, w: x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-5) * w,
)
def rms_norm(x, w):
    t, weight = loaded(x), sbuf((64, 96))
    nisa.dma_copy(weight, w.ap([[0, 64], [1, 96]]))
    mean = nl.mean(nl.square(t), axis=1)
    nisa.tensor_scalar(mean, mean, nl.add, 1e-5, op1=nl.rsqrt, operand1=0.0)
    nisa.scalar_tensor_tensor(t, t, nl.multiply, mean, nl.multiply, weight)
    return stored(t)


@program(
    f"{TUTORIALS}/layernorm",
    X,
    expected=lambda x: (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True),
)
def layer_norm(x):
    t, parts, found = loaded(x), sbuf((64, 2, 6)), sbuf((64, 2))
    for i in range(2):
        nisa.bn_stats(parts[:, i], t[:, 48 * i : 48 * i + 48])
    nisa.bn_aggr(found, parts)
    inverse = sbuf((64, 1))
    nisa.tensor_scalar(inverse, found[:, 1], nl.rsqrt, 0.0, engine=nisa.engine.gpsimd)
    nisa.tensor_scalar(t, t, nl.subtract, found[:, 0], op1=nl.multiply, operand1=inverse)
    return stored(t)


def softmax(x):
    e = np.exp(x - x.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


@program(f"{TUTORIALS}/softmax", X, expected=softmax)
def softmax_by_values(x):
    t = nl.load(x)
    top = nl.broadcast_to(nl.max(t, axis=1, keepdims=True), t.shape)
    powers = nl.exp(nl.subtract(t, top))
    total = nl.broadcast_to(nl.sum(powers, axis=1, keepdims=True), t.shape)
    out = hbm(x.shape)
    nl.store(out, nl.divide(powers, total))
    return out


def attention(q, k, v):
    s = q.T @ k / 8
    return softmax(np.where(np.tril(np.ones_like(s)) > 0, s, -np.inf)) @ v


@program(
    f"{TUTORIALS}/kernel-optimization",
    X[:, :32],
    Y[:, :32],
    draw(32, 16, seed=3),
    expected=attention,
)
def causal_attention(q, k, v):
    scores, turned, out = psum((32, 32)), psum((32, 32)), psum((32, 16))
    nisa.nc_matmul(scores, loaded(q), loaded(k))
    p, top, total = copied(scores), sbuf((32, 1)), sbuf((32, 1))
    nisa.affine_select(p, [[-1, 32]], 1, p, -3e38, cmp_op=nl.greater_equal)
    nisa.tensor_reduce(top, nl.maximum, p, axis=1, negate=True)
    nisa.tensor_scalar(top, top, nl.multiply, 0.125)
    nisa.activation_reduce(p, nl.exp, p, nl.add, total, bias=top, scale=0.125)
    nisa.nc_transpose(turned, p, engine=nisa.engine.tensor)
    nisa.nc_matmul(out, copied(turned), loaded(v))
    nisa.reciprocal(total, total)
    result = sbuf((32, 16))
    nisa.tensor_scalar(result, out, nl.multiply, total)
    return stored(result)


# pages of single instructions


@program(
    "nki.isa.nc_matmul, performance mode",
    X[:, :32],
    Y[:, :48],
    expected=lambda a, b: fp8(a).T @ fp8(b),
)
def double_rows(a, b):
    tiles = []
    for x in (a, b):
        t = sbuf((32, 2, x.shape[1]), "float8_e4m3")
        nisa.dma_copy(t[:, 0], x[:32])
        nisa.dma_copy(t[:, 1], x[32:])
        tiles.append(t)
    out = psum((32, 48))
    nisa.nc_matmul(out, *tiles, perf_mode=nisa.matmul_perf_mode.double_row)
    return stored(out)


def fp8(x):
    return x.astype(ml_dtypes.float8_e4m3).astype(np.float32)


@program("nki.isa.nc_transpose", X[:32, :32], expected=lambda x: x.T)
def transpose_on_vector(x):
    out = sbuf((32, 32))
    nisa.nc_transpose(out, loaded(x), engine=nisa.engine.vector)
    return stored(out)


@program("nki.language.shared_identity_matrix", X, expected=lambda x: x.T)
def transpose_by_the_identity(x):
    """AWS's library uses it as a tile of SBUF."""
    one, out = nl.shared_identity_matrix(64, dtype=nl.float32), psum((96, 64))
    assert one.buffer == nl.sbuf
    nisa.nc_matmul(out, stationary=loaded(x), moving=one)
    return stored(out)


@program("nki.isa.activation", X, expected=lambda x: 1 / (1 + np.exp(-(0.5 * x + 1))))
def activation_with_a_scale_and_a_bias(x):
    t = loaded(x)
    nisa.activation(t, nl.sigmoid, t, bias=nl.full((64, 1), 1.0, nl.float32), scale=0.5)
    return stored(t)


@program("nki.isa.tensor_partition_reduce", X, expected=lambda x: x.sum(0, keepdims=True))
def sum_over_partitions(x):
    out = sbuf((1, 96))
    nisa.tensor_partition_reduce(out, nl.add, loaded(x))
    return stored(out)


@program("nki.isa.tensor_scalar, bitvec", INTEGERS, expected=lambda x: (x & 255) << 8)
def bits(x):
    t = loaded(x)
    nisa.tensor_scalar(t, t, nl.bitwise_and, 255, op1=nl.left_shift, operand1=8)
    return stored(t)


@program(
    "nki.isa.tensor_reduce, bitwise",
    INTEGERS,
    expected=lambda x: np.bitwise_or.reduce(x, axis=1, keepdims=True),
)
def union_of_bits(x):
    out = sbuf((16, 1), "int32")
    nisa.tensor_reduce(out, nl.bitwise_or, loaded(x), axis=1)
    return stored(out)


@program("nki.isa.tensor_scalar_reduce", X, expected=lambda x: (3 - x).sum(1, keepdims=True))
def reversed_operand_and_sum(x):
    t, total = loaded(x), sbuf((64, 1))
    nisa.tensor_scalar_reduce(t, t, nl.subtract, 3.0, nl.add, total, reverse0=True)
    return stored(total)


@program("nki.isa.max8", X, expected=lambda x: -np.sort(-x, axis=1)[:, :8])
def largest_eight(x):
    out = sbuf((64, 8))
    nisa.max8(out, loaded(x))
    return stored(out)


# the example of nc_match_replace8: values that occur more than once
SEARCHED = np.array([[1, 2, 3, 4, 8, 8, 8, 8, 8, 8, 8]], np.float32)
WANTED = np.array([[3, 8, 8, 8, 8, 8, 8, 8]], np.float32)


@program(
    "nki.isa.nc_find_index8",
    SEARCHED,
    WANTED,
    expected=lambda x, v: np.array([[2, 4, 5, 6, 7, 8, 9, 10]]),
)
def places_of_values(x, v):
    out = sbuf((1, 8), "uint32")
    nisa.nc_find_index8(out, loaded(x), loaded(v))
    return stored(out)


@program(
    "nki.isa.nc_find_index8", SEARCHED, WANTED + 90, expected=lambda x, v: np.full((1, 8), 65535)
)
def places_of_what_is_not_there(x, v):
    out = sbuf((1, 8), "uint16")
    nisa.nc_find_index8(out, loaded(x), loaded(v))
    return stored(out)


@program(
    "nki.isa.nc_match_replace8",
    SEARCHED,
    WANTED,
    expected=lambda x, v: (
        np.array([[1, 2, -1, 4] + [-1] * 7]),
        np.array([[2, 10, 9, 8, 7, 6, 5, 4]]),
    ),
)
def values_replaced(x, v):
    out, places = sbuf(x.shape), sbuf((1, 8), "uint32")
    nisa.nc_match_replace8(out, loaded(x), loaded(v), -1.0, places)
    return stored(out), stored(places)


@program(
    "nki.isa.nonzero_with_count",
    np.array([[0, 1, 1, 0, 0, 1, 0, 0]], np.float32),
    expected=lambda x: np.array([[17, 18, 21, -1, -1, -1, -1, -1, 3]]),
)
def elements_that_are_not_0(x):
    """The example of the page; the partitions between every 16th keep what they hold."""
    rows, out = zeros((32, 8)), zeros((32, 9), "int32")
    nisa.dma_copy(rows[16:17, :], x)
    nisa.nonzero_with_count(out, rows, index_offset=16)
    assert not out.array()[1:16].any()
    return stored(out[16:17, :])


@program(
    "nki.isa.nc_n_gather",
    X[:16],
    (INTEGERS % 96).astype(np.uint32),
    expected=lambda x, i: np.take_along_axis(x, i.astype(int), 1),
)
def gather_within_partitions(x, i):
    out = sbuf(i.shape)
    nisa.nc_n_gather(out, loaded(x), loaded(i))
    return stored(out)


@program("nki.isa.dge_mode", X, expected=lambda x: np.exp(x).sum(axis=1, keepdims=True))
def numbers_for_members_of_enumerations(x):
    """AWS's library keeps ``_DGE_MODE_NONE = 3`` and its like."""
    tile, total = sbuf(x.shape), sbuf((64, 1))
    nisa.dma_copy(tile, x, dge_mode=3, oob_mode=0)
    command = nisa.reduce_cmd.reset_reduce.value
    nisa.activation(tile, nl.exp, tile, reduce_op=nl.add, reduce_res=total, reduce_cmd=command)
    nisa.tensor_copy(tile, tile, engine=nisa.engine.gpsimd.value)
    return stored(total)


@program(
    "nki.isa.tensor_scalar",
    X,
    expected=lambda x: (np.square(np.maximum(x, 0)), np.abs(x).max(axis=1, keepdims=True)),
)
def operators_without_a_second_operand(x):
    """AWS's quantization takes the largest magnitude of a row so."""
    tile, out, top = loaded(x), sbuf(x.shape), sbuf((64, 1))
    nisa.tensor_scalar(out, tile, nl.relu, None, op1=nl.square, operand1=None)
    kept = sbuf(x.shape)
    nisa.tensor_scalar_reduce(kept, tile, nl.abs, 0.0, nl.maximum, top)
    return stored(out), stored(top)


@program(
    "nki.language.NkiTensor, ap with a dtype",
    X,
    expected=lambda x: x.view(ml_dtypes.bfloat16)[:, 1::2].astype(np.float32),
)
def the_upper_halves_of_floats(x):
    """Strides and offsets count elements of the new dtype."""
    out = sbuf(x.shape)
    nisa.tensor_copy(out, loaded(x).ap([[192, 64], [2, 96]], offset=1, dtype=nl.bfloat16))
    return stored(out)


@program("nki.isa.memset", X, expected=lambda x: x + 3)
def an_int_in_a_tile_of_floats(x):
    tile = sbuf(x.shape)
    nisa.memset(tile, 3)
    nisa.tensor_tensor(tile, tile, loaded(x), nl.add)
    return stored(tile)


@program("nki.language.load_transpose2d", X, expected=lambda x: x.T)
def a_load_that_transposes(x):
    return stored(nl.load_transpose2d(x))


@program("nki.isa.nc_matmul, tiling mode", X, expected=lambda x: x.T @ x)
def columns_of_the_array_by_tiles(x):
    tile, out = loaded(x), sbuf((96, 96))
    for column in (0, 32, 64):
        part = psum((32, 96))
        place = {"tile_position": (0, column), "tile_size": (128, 32)}
        nisa.nc_matmul(part, tile[:, column : column + 32], tile, **place)
        nisa.tensor_copy(out[column : column + 32, :], part)
    return stored(out)


def with_nan(x):
    x = x.copy()
    x[3, 5] = np.nan
    return x


@program("nki.isa.nc_matmul, transpose mode", with_nan(X), expected=lambda x: x.T)
def a_product_that_transposes(x):
    """Bit by bit: NaN does not spread to its neighbours."""
    out = psum((96, 64))
    one = nl.shared_identity_matrix(64, nl.float32)
    nisa.nc_matmul(out, loaded(x), one, is_transpose=True)
    return stored(out)


@program("nki.language.broadcast_to", X, expected=lambda x: np.broadcast_to(x[3:4, :4], (70, 4)))
def a_row_repeated_over_partitions(x):
    return stored(nl.broadcast_to(nl.load(x[3:4, :4]), (70, 4)))


@program("nki.isa.tensor_reduce", X, expected=lambda x: x.reshape(64, 4, 3, 4, 2).max((2, 4)))
def the_largest_of_windows(x):
    """Four free dimensions, as AWS's pools have."""
    windows = loaded(x).ap([[96, 64], [24, 4], [2, 4], [8, 3], [1, 2]])
    return stored(nl.max(windows, axis=[3, 4]))


def one(function, x):
    return stored(function(nl.load(x)))


HALVES = np.arange(-48, 48, dtype=np.float32).reshape(8, 12) / 2
FUNCTIONS = {
    "sin": (9 * X, np.sin),
    "cos": (9 * X, np.cos),
    "tan": (np.clip(X, -1.4, 1.4), np.tan),
    "floor": (HALVES, np.floor),
    "ceil": (HALVES, np.ceil),
    "trunc": (HALVES, np.trunc),
    "logical_not": (HALVES, lambda x: x == 0),
    "erf_dx": (X, lambda x: 2 / np.sqrt(np.pi) * np.exp(-(x**2))),
    "silu_dx": (X, lambda x: slope_of(lambda y: y / (1 + np.exp(-y)), x)),
    "gelu_apprx_sigmoid_dx": (X, lambda x: slope_of(lambda y: y / (1 + np.exp(-1.702 * y)), x)),
    "gelu_dx": (X, lambda x: slope_of(lambda y: y * (1 + ERF(y / np.sqrt(2))) / 2, x)),
    "softmax": (X, lambda x: np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)),
}
ERF = np.vectorize(math.erf)


def slope_of(function, x, step=1e-4):
    x = x.astype(np.float64)
    return (function(x + step) - function(x - step)) / (2 * step)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_a_tile(name):
    x, expected = FUNCTIONS[name]
    got = run(lambda t: one(getattr(nl, name), t), x, strict=True)
    np.testing.assert_allclose(got, expected(x.astype(np.float64)), rtol=3e-5, atol=3e-5)


@program("nki.language.power", np.abs(X), expected=lambda x: x**1.5 + x**x)
def powers(x):
    tile = loaded(x)
    out = nl.power(tile, 1.5)
    nisa.tensor_tensor(out, out, nl.power(tile, tile), nl.add)
    return stored(out)


def softmax_of_rows(x):
    e = np.exp(x.reshape(64, 2, 48))
    return (e / e.sum(axis=2, keepdims=True)).reshape(64, 96)


@program("nki.language.softmax", X, expected=softmax_of_rows)
def softmax_over_two_dimensions(x):
    tile = loaded(x).reshape((64, 2, 4, 12))
    return stored(nl.softmax(tile, axis=[2, 3]).reshape((64, 96)))


@program("nki.language.ndarray, assignment", X, expected=lambda x: np.hstack([x[:, 1:], 0 * x]))
def assignments(x):
    tile, out = sbuf((64, 96)), hbm((64, 191))
    with nl.no_reorder():
        tile[...] = loaded(x)
        out[:, 0:95] = tile[:, 1:96]
        tile[:, 0:96] = 0
        out[:, 95:191] = tile
    return out


@program("nki.isa.nc_stream_shuffle", X, expected=lambda x: np.concatenate([x[31::-1], x[:31:-1]]))
def rows_in_reverse(x):
    out = zeros((64, 96))
    nisa.nc_stream_shuffle(out, loaded(x), list(range(31, -1, -1)))
    return stored(out)


@program("nki.isa.nc_stream_shuffle", X, expected=lambda x: np.repeat(x[5:6], 32, axis=0))
def a_row_to_all_partitions(x):
    """AWS's library broadcasts so: one partition is read, 32 are written."""
    out, rows = sbuf((32, 96)), loaded(x[5:6, :])
    nisa.nc_stream_shuffle(out, rows[0:1, :], [0] * 32)
    return stored(out)


@program("nki.language.where", X, Y, expected=lambda x, y: np.where(x > y, x, 0))
def where_one_is_larger(x, y):
    a, b = nl.load(x), nl.load(y)
    return stored(nl.where(nl.greater(a, b), a, 0.0))


@program("nki.language.matmul", X, Y[:, :32], expected=lambda x, y: -(x.T @ y))
def matmul_by_values(x, y):
    return stored(nl.negative(copied(nl.matmul(nl.load(x), nl.load(y), transpose_x=True))))


@pytest.mark.parametrize("name", program.cases)
def test_program(name):
    program.check(name)


REFUSED = {
    "nki/deep-dives/mxfp-matmul": (lambda: nisa.quantize_mx(), "nki.isa.quantize_mx"),
    "nki.isa.dropout": (lambda: nisa.dropout(), "nki.isa.dropout"),
}


@pytest.mark.parametrize("page", REFUSED)
def test_a_refusal_names_its_page(page):
    body, name = REFUSED[page]
    with pytest.raises(NotModelledError, match=rf"(?m)\[{name}\]$"):
        run(body)


def test_modules_that_are_not_modelled_are_refused(tmp_path):
    (tmp_path / "a.py").write_text("import nki.compiler as ncc\n")
    with pytest.raises(ImportError, match=r"\[nki.compiler\]$"):
        load(tmp_path / "a.py")


def test_kernels_of_the_old_namespace_are_told_what_to_change(tmp_path):
    (tmp_path / "a.py").write_text("import neuronxcc.nki as nki\n")
    with pytest.raises(ImportError, match=r"import nki, nki.isa .* \[nki/migration\]$"):
        load(tmp_path / "a.py")


def test_annotations_of_arguments(tmp_path):
    (tmp_path / "a.py").write_text(
        "import nki\nimport nki.typing as nt\nimport nki.language as nl\n"
        "from nki.typing import mutable_tensor\n"
        "@nki.jit\ndef double(x: nt.tensor[(2, 4), nl.float32], y: mutable_tensor):\n"
        "    nl.store(y, nl.multiply(nl.load(x), 2.0))\n    return y\n"
    )
    x, y = np.ones((2, 4), np.float32), np.zeros((2, 4), np.float32)
    assert (load(tmp_path / "a.py").double(x, y) == 2).all()
    assert (y == 2).all()
