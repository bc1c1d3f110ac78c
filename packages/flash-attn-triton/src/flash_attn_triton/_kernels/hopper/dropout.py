"""Dropout on a warpgroup's accumulators; ``philox.py`` says what an element draws.

Four elements share a draw: two rows eight apart and two columns eight apart. In an accumulator of
wgmma they are one thread's, whether its rows are queries or keys, so that nothing is drawn twice.
"""

from ..structures import DropoutKey
from ._linked.compat import gl, gluon
from ._linked.ptx import drop_below

MULTIPLIER_2 = gl.constexpr(0xD256D193)
MULTIPLIERS_4 = gl.constexpr((0xD2511F53, 0xCD9E8D57))
# as signed numbers of 32 bits
KEY_STEPS = gl.constexpr((0x9E3779B9 - 2**32, 0xBB67AE85 - 2**32))
ROUNDS = gl.constexpr(7)


@gluon.jit
def _multiply(word, MULTIPLIER: gl.constexpr):
    """Return the high and the low 32 bits of the product of unsigned numbers: one instruction."""
    product = (word.to(gl.int64) & 0xFFFFFFFF) * MULTIPLIER
    return (product >> 32).to(gl.int32), product.to(gl.int32)


@gluon.jit
def dropout_key(rng_state_ptr, plane):
    """Return the key of head ``plane = sequence * heads_q + head``, by Philox 4x32."""
    seed = gl.load(rng_state_ptr)
    k0, k1 = seed.to(gl.int32), (seed >> 32).to(gl.int32)
    c0, c1, c2, c3 = plane, gl.load(rng_state_ptr + 1).to(gl.int32), plane * 0, plane * 0
    for _ in gl.static_range(ROUNDS):
        high_a, low_a = _multiply(c0, MULTIPLIERS_4[0])
        high_b, low_b = _multiply(c2, MULTIPLIERS_4[1])
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0 += KEY_STEPS[0]
        k1 += KEY_STEPS[1]
    return DropoutKey(c0, c1, c2)


@gluon.jit
def _in_fours(x):
    """Split ``[M, N]`` by bit 3 of rows and of columns: four of ``[M // 16, 8, N // 16, 8]``."""
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    x = gl.permute(gl.reshape(x, [M // 16, 2, 8, N // 16, 2, 8]), (0, 2, 3, 5, 1, 4))
    left, right = gl.split(x)  # by columns
    upper_left, lower_left = gl.split(left)
    upper_right, lower_right = gl.split(right)
    return upper_left, upper_right, lower_left, lower_right


@gluon.jit
def _together(upper_left, upper_right, lower_left, lower_right, layout: gl.constexpr):
    """Undo ``_in_fours``."""
    x = gl.join(gl.join(upper_left, lower_left), gl.join(upper_right, lower_right))
    M: gl.constexpr = x.shape[0] * 16
    N: gl.constexpr = x.shape[2] * 16
    x = gl.reshape(gl.permute(x, (0, 4, 1, 2, 5, 3)), [M, N])
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def _place(index):
    """Return which group a row or a column belongs to."""
    return index >> 4 << 3 | index & 7


@gluon.jit
def drop(p, rows, cols, key, threshold):
    """Return ``p``, [rows, cols], with 0 where dropout drops.

    Rows and columns begin at multiples of 16, counted within the sequence.
    """
    S: gl.constexpr = p.type.layout
    zeros = gl.zeros(p.shape, gl.int32, S)
    c0, _, _, _ = _in_fours((_place(rows) ^ key.row)[:, None] + zeros)
    c1, _, _, _ = _in_fours((_place(cols) ^ key.col)[None, :] + zeros)
    word = key.word
    for _ in gl.static_range(ROUNDS):
        high, low = _multiply(c0, MULTIPLIER_2)
        c0, c1 = high ^ word ^ c1, low
        word += KEY_STEPS[0]
    upper_left, upper_right, lower_left, lower_right = _in_fours(p)
    # a draw is the upper half of a word: the lower half below it changes no comparison
    threshold = threshold << 16
    upper_left = drop_below(upper_left, c0 << 16, threshold)
    upper_right = drop_below(upper_right, c0, threshold)
    lower_left = drop_below(lower_left, c1 << 16, threshold)
    lower_right = drop_below(lower_right, c1, threshold)
    return _together(upper_left, upper_right, lower_left, lower_right, S)
