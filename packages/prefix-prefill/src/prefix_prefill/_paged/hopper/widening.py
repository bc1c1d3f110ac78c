"""Conversion of FP8, int8 and int4 in words of 32 bits to fp16 or bf16, exactly, in PTX.

``prmt`` places two bytes of a word in the low bytes of two halves. A byte of int4 holds two
numbers, the first in its low bits. An unsigned integer becomes the low bits of the mantissa of a
large power of two (128 in bf16, 1024 in fp16), which is then subtracted with the offset that made
the integer unsigned. bf16 has no room for 8 bits, so the sign is handled separately.
"""

from ..._linked.hopper.compat import gl, gluon

_BYTES = (0x4140, 0x4342)  # prmt selectors: bytes 0 and 1, 2 and 3; the other operand above them


def _of_fp8(stored: str, to_bf16: bool) -> str:
    lines = [".reg .b16 lo, hi;", "mov.b32 {lo, hi}, $2;"]
    if to_bf16:
        lines += [".reg .b16 a, b;", ".reg .b32 x;", ".reg .f32 f, g;"]
    for out, half in (("$0", "lo"), ("$1", "hi")):
        lines.append(f"cvt.rn.f16x2.{stored}x2 {'x' if to_bf16 else out}, {half};")
        if to_bf16:
            lines += ["mov.b32 {a, b}, x;", "cvt.f32.f16 f, a;", "cvt.f32.f16 g, b;"]
            lines.append(f"cvt.rn.bf16x2.f32 {out}, g, f;")
    return "{" + " ".join(lines) + "}"


def _of_int8(to_bf16: bool) -> str:
    lines = [".reg .b32 x, y, z, c;"]
    lines += ["mov.b32 c, 0xbf80bf80;"] if to_bf16 else ["mov.b32 c, 0x64806480;"]
    lines += [] if to_bf16 else ["xor.b32 y, $2, 0x80808080;"]
    for out, places in zip(("$0", "$1"), _BYTES, strict=True):
        if to_bf16:
            lines += [
                f"prmt.b32 x, $2, 0, {places:#x};",
                "lop3.b32 y, x, 0x007f007f, 0x43004300, 0xea;",
                "lop3.b32 z, x, 0x00800080, 0x43004300, 0xea;",
                f"fma.rn.bf16x2 {out}, z, c, y;",
            ]
        else:
            lines += [f"prmt.b32 x, y, 0x64646464, {places:#x};", f"sub.rn.f16x2 {out}, x, c;"]
    return "{" + " ".join(lines) + "}"


def _of_int4(to_bf16: bool) -> str:
    kind, base = ("bf16x2", "0x43084308") if to_bf16 else ("f16x2", "0x64086408")
    one, minus = ("0x3f803f80", "0xc308c308") if to_bf16 else ("0x3c003c00", "0xe408e408")
    lines = [".reg .b32 x, y, one, minus;", "shr.u32 y, $4, 4;"]
    lines += [f"mov.b32 one, {one};", f"mov.b32 minus, {minus};"]
    for place in range(4):
        # the byte of $4 or of y in which the number has the low bits
        lines += [
            f"prmt.b32 x, $4, y, {place | (4 + place) << 8:#x};",
            f"lop3.b32 x, x, 0x000f000f, {base}, 0x6a;",
            f"fma.rn.{kind} ${place}, x, one, minus;",
        ]
    return "{" + " ".join(lines) + "}"


_E4M3_BF16 = gl.constexpr(_of_fp8("e4m3", True))
_E4M3_FP16 = gl.constexpr(_of_fp8("e4m3", False))
_E5M2_BF16 = gl.constexpr(_of_fp8("e5m2", True))
_E5M2_FP16 = gl.constexpr(_of_fp8("e5m2", False))
_INT8_BF16 = gl.constexpr(_of_int8(True))
_INT8_FP16 = gl.constexpr(_of_int8(False))
_INT4_BF16 = gl.constexpr(_of_int4(True))
_INT4_FP16 = gl.constexpr(_of_int4(False))


@gluon.jit
def _by_fours(words, PTX: gl.constexpr, BF16: gl.constexpr):
    if BF16:
        numbers = gl.inline_asm_elementwise(
            PTX, "=&r,=&r,r,r,r,r", [words], dtype=gl.bfloat16, is_pure=True, pack=4
        )
    else:
        numbers = gl.inline_asm_elementwise(
            PTX, "=&r,=&r,r,r,r,r", [words], dtype=gl.float16, is_pure=True, pack=4
        )
    return numbers


@gluon.jit
def _by_eights(words, PTX: gl.constexpr, BF16: gl.constexpr):
    OPERANDS: gl.constexpr = "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r"
    if BF16:
        numbers = gl.inline_asm_elementwise(
            PTX, OPERANDS, [words], dtype=gl.bfloat16, is_pure=True, pack=8
        )
    else:
        numbers = gl.inline_asm_elementwise(
            PTX, OPERANDS, [words], dtype=gl.float16, is_pure=True, pack=8
        )
    return numbers


@gluon.jit
def widened(words, STORED: gl.constexpr, DTYPE: gl.constexpr):
    """Return the numbers in ``words``, ``[keys, 4 * words]``, or ``[keys, 8 * words]`` of int4.

    ``STORED`` is the dtype of the cache: FP8, int8, or uint8 for two int4 per byte.
    """
    BF16: gl.constexpr = gl.bfloat16 == DTYPE
    KEYS: gl.constexpr = words.shape[0]
    WORDS: gl.constexpr = words.shape[1]
    # repeat each word once per number, where the number goes
    pairs = gl.join(words, words)
    fours = gl.join(pairs, pairs)
    if gl.uint8 == STORED:
        words = gl.reshape(gl.join(fours, fours), [KEYS, 8 * WORDS])
        numbers = _by_eights(words, _INT4_BF16 if BF16 else _INT4_FP16, BF16)
    else:
        words = gl.reshape(fours, [KEYS, 4 * WORDS])
        if gl.int8 == STORED:
            numbers = _by_fours(words, _INT8_BF16 if BF16 else _INT8_FP16, BF16)
        elif gl.float8e5 == STORED:
            numbers = _by_fours(words, _E5M2_BF16 if BF16 else _E5M2_FP16, BF16)
        else:
            numbers = _by_fours(words, _E4M3_BF16 if BF16 else _E4M3_FP16, BF16)
    return numbers
