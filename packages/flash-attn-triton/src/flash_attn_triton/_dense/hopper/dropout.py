"""Dropout on a warpgroup's accumulators; ``_reference/philox.py`` defines each element's draw.

Four elements share a draw: two rows eight apart and two columns eight apart. In a wgmma accumulator
one thread holds all four, whether rows are queries or keys, so nothing is drawn twice.

The forward sets dropped probabilities to 0. The backward needs the kept probabilities for dv, and
all probabilities for the gradients of the scores. It marks dropped ones by a negative sign.
"""

from ..._linked.hopper.compat import gl, gluon
from ..._linked.hopper.ptx import drop_below
from ..portable.structures import DropoutKey

MULTIPLIER_2 = gl.constexpr(0xD256D193)
MULTIPLIERS_4 = gl.constexpr((0xD2511F53, 0xCD9E8D57))
# as signed numbers of 32 bits
KEY_STEPS = gl.constexpr((0x9E3779B9 - 2**32, 0xBB67AE85 - 2**32))
ROUNDS = gl.constexpr(7)


@gluon.jit
def _multiply(word, MULTIPLIER: gl.constexpr):
    """Return the high and the low 32 bits of an unsigned product, in one instruction."""
    product = (word.to(gl.int64) & 0xFFFFFFFF) * MULTIPLIER
    return (product >> 32).to(gl.int32), product.to(gl.int32)


@gluon.jit
def _next(key, STEP: gl.constexpr):
    """Return the key of the next round; it wraps on purpose: TRITON_DEBUG=1 must not check it."""
    return gl.add(key, STEP, sanitize_overflow=False)


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
        k0, k1 = _next(k0, KEY_STEPS[0]), _next(k1, KEY_STEPS[1])
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
    """Return the group that a row or a column belongs to."""
    return index >> 4 << 3 | index & 7


@gluon.jit
def _draw(c0, c1, word):
    """Return the two words of Philox 2x32."""
    for _ in gl.static_range(ROUNDS):
        high, low = _multiply(c0, MULTIPLIER_2)
        c0, c1 = high ^ word ^ c1, low
        word = _next(word, KEY_STEPS[0])
    return c0, c1


@gluon.jit
def drop(p, rows, cols, key, threshold):
    """Return ``p``, [rows, cols], with 0 where dropout drops.

    Rows and columns begin at multiples of 16, counted within the sequence.
    """
    S: gl.constexpr = p.type.layout
    zeros = gl.zeros(p.shape, gl.int32, S)
    c0, _, _, _ = _in_fours((_place(rows) ^ key.row)[:, None] + zeros)
    c1, _, _, _ = _in_fours((_place(cols) ^ key.col)[None, :] + zeros)
    c0, c1 = _draw(c0, c1, key.word)
    upper_left, upper_right, lower_left, lower_right = _in_fours(p)
    # a draw is the upper half of a word; the lower half changes no comparison
    threshold = threshold << 16
    upper_left = drop_below(upper_left, c0 << 16, threshold)
    upper_right = drop_below(upper_right, c0, threshold)
    lower_left = drop_below(lower_left, c1 << 16, threshold)
    lower_right = drop_below(lower_right, c1, threshold)
    return _together(upper_left, upper_right, lower_left, lower_right, S)


@gluon.jit
def negate_dropped(
    p, cols, rows, key, threshold, APART_COLS: gl.constexpr, APART_ROWS: gl.constexpr
):
    """Return ``p`` (``>= 0``, transposed: [cols, rows]), negated where dropout drops.

    ``rows`` are queries and ``cols`` keys, counted within the sequence. They begin at multiples of
    16, unless they are ``APART``: then a thread draws up to four times as often.
    """
    S: gl.constexpr = p.type.layout
    zeros = gl.zeros(p.shape, gl.int32, S)
    left, right, _, _ = _in_fours((_place(rows) ^ key.row)[None, :] + zeros)
    upper, _, lower, _ = _in_fours((_place(cols) ^ key.col)[:, None] + zeros)
    parts = _in_fours(p)
    threshold = threshold << 16
    if APART_COLS or APART_ROWS:
        row, _, _, _ = _in_fours(rows[None, :] + zeros)
        col, _, _, _ = _in_fours(cols[:, None] + zeros)
        is_low = row & 8 == 0
        shift = 16 - (col & 8) * 2
        over = _draws_of_rows(left, right, is_low, upper, key.word, APART_ROWS)
        below = over
        if APART_COLS:
            below = _draws_of_rows(left, right, is_low, lower, key.word, APART_ROWS)
        # a draw is the upper half of a word; the lower half changes no comparison
        parts = (
            _negate_below(parts[0], over[0] << shift, threshold),
            _negate_below(parts[1], over[1] << shift, threshold),
            _negate_below(parts[2], below[0] << 16 - shift, threshold),
            _negate_below(parts[3], below[1] << 16 - shift, threshold),
        )
    else:
        parts = _negate_four(parts, left, upper, key.word, threshold)
    return _together(parts[0], parts[1], parts[2], parts[3], S)


@gluon.jit
def _draws_of_rows(left, right, is_low, col, word, APART: gl.constexpr):
    """Return the words of two rows eight apart, for columns with the counter ``col``.

    ``left`` and ``right`` are the rows' counters. ``is_low``: the left row is the first of its
    group, which is always so if rows begin at multiples of 16 (not ``APART``).
    """
    low, high = _draw(left, col, word)
    if APART:
        next_low, next_high = _draw(right, col, word)
        low, high = gl.where(is_low, low, high), gl.where(is_low, next_high, next_low)
    return low, high


@gluon.jit
def _negate_below(p, draw, threshold):
    """Return ``p`` where ``draw >= threshold``, as unsigned numbers, and ``-p`` elsewhere.

    Each comparison is followed by its select, as in ``hide_unless``.
    """
    return gl.inline_asm_elementwise(
        """
        {
            .reg .pred kept;
            .reg .f32 negative;
            setp.ge.u32 kept, $2, $3;
            neg.f32 negative, $1;
            selp.f32 $0, $1, negative, kept;
        }
        """,
        "=f,f,r,r",
        [p, draw, threshold],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.constexpr_function
def _text_of_four(rounds, multiplier, step):
    """Return PTX for ``_draw`` and for ``_negate_below`` of the four numbers that share a draw."""
    lines = [
        ".reg .b32 low, high, product, key, draw;",
        ".reg .b64 wide;",
        ".reg .pred kept;",
        ".reg .f32 negative;",
        "mov.b32 low, $8; mov.b32 high, $9; mov.b32 key, $10;",
    ]
    for _ in range(rounds):
        lines += [
            f"mul.wide.u32 wide, low, {multiplier};",
            "mov.b64 {product, low}, wide;",
            "lop3.b32 low, low, key, high, 0x96;",
            "mov.b32 high, product;",
            f"add.s32 key, key, {step};",
        ]
    for number, draw in enumerate(("low", "high") * 2):
        # the first two draws are the lower halves of the words; below an upper half bits are idle
        shifted = f"shl.b32 draw, {draw}, 16;" if number < 2 else f"mov.b32 draw, {draw};"
        lines += [
            shifted,
            "setp.ge.u32 kept, draw, $11;",
            f"neg.f32 negative, ${4 + number};",
            f"selp.f32 ${number}, ${4 + number}, negative, kept;",
        ]
    return "{" + " ".join(lines) + "}"


@gluon.jit
def _negate_four(parts, c0, c1, word, threshold):
    """Draw for four numbers and negate the dropped ones, in fewer registers than draws up front."""
    TEXT: gl.constexpr = _text_of_four(ROUNDS, MULTIPLIER_2, KEY_STEPS[0])
    return gl.inline_asm_elementwise(
        TEXT,
        "=&f,=&f,=&f,=&f,f,f,f,f,r,r,r,r",
        [parts[0], parts[1], parts[2], parts[3], c0, c1, word, threshold],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def round_kept(p, dtype: gl.constexpr):
    """Round the probabilities of ``negate_dropped``; the conversion turns negative ones into 0."""
    if dtype == gl.bfloat16:
        text: gl.constexpr = "cvt.rn.relu.bf16x2.f32 $0, $2, $1;"
        kept = gl.inline_asm_elementwise(
            text, "=r,f,f", [p], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        text: gl.constexpr = "cvt.rn.relu.f16x2.f32 $0, $2, $1;"
        kept = gl.inline_asm_elementwise(
            text, "=r,f,f", [p], dtype=gl.float16, is_pure=True, pack=2
        )
    return kept


@gluon.jit
def gradient_of_kept(p, kept, dropped):
    """Return ``|p| * kept``, or ``|p| * dropped`` where dropout drops."""
    return gl.inline_asm_elementwise(
        """
        {
            .reg .pred negative;
            .reg .f32 size, factor;
            setp.lt.f32 negative, $1, 0f00000000;
            selp.f32 factor, $3, $2, negative;
            abs.f32 size, $1;
            mul.f32 $0, size, factor;
        }
        """,
        "=f,f,f,f",
        [p, kept, dropped],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )
