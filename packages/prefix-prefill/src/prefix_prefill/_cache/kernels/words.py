"""Words of a cache: several numbers of 8 or 4 bits, which are read at once.

A word of 16 bits holds two numbers of 8 bits or four of 4 bits. Tiles of words go through shared
memory to registers as tiles of bf16 do. There each word becomes one number in every *slice*: slice
t holds the numbers t, t + SLICES, ... of all vectors. A product with vectors is the sum of the
products with their slices. The slices of an output are joined once, at the end.
"""

import triton
import triton.language as tl

# Two words in one register become two numbers of each slice. An unsigned integer becomes the low
# bits of the mantissa of a large power of two (128 in bf16, 1024 in fp16), which is then subtracted
# with the offset that made the integer unsigned. bf16 has no room for 8 bits, so the sign is
# handled separately. fp16 has room for 4 bits that are 4 bits higher, 16 times the number.
_INT4_BF16 = tl.constexpr("""{
    .reg .b32 x, one, bias;
    mov.b32 one, 0x3f803f80;
    mov.b32 bias, 0xc308c308;
    lop3.b32 x, $4, 0x000f000f, 0x43084308, 0x6a;
    fma.rn.bf16x2 $0, x, one, bias;
    shr.u32 x, $4, 4;
    lop3.b32 x, x, 0x000f000f, 0x43084308, 0x6a;
    fma.rn.bf16x2 $1, x, one, bias;
    shr.u32 x, $4, 8;
    lop3.b32 x, x, 0x000f000f, 0x43084308, 0x6a;
    fma.rn.bf16x2 $2, x, one, bias;
    shr.u32 x, $4, 12;
    lop3.b32 x, x, 0x000f000f, 0x43084308, 0x6a;
    fma.rn.bf16x2 $3, x, one, bias;
}""")
_INT4_FP16 = tl.constexpr("""{
    .reg .b32 x, y, bias, sixteenth, high_bias;
    mov.b32 bias, 0x64086408;
    mov.b32 sixteenth, 0x2c002c00;
    mov.b32 high_bias, 0xd480d480;
    lop3.b32 x, $4, 0x000f000f, bias, 0x6a;
    sub.rn.f16x2 $0, x, bias;
    lop3.b32 x, $4, 0x00f000f0, 0x64806480, 0x6a;
    fma.rn.f16x2 $1, x, sixteenth, high_bias;
    shr.u32 y, $4, 8;
    lop3.b32 x, y, 0x000f000f, bias, 0x6a;
    sub.rn.f16x2 $2, x, bias;
    lop3.b32 x, y, 0x00f000f0, 0x64806480, 0x6a;
    fma.rn.f16x2 $3, x, sixteenth, high_bias;
}""")
_INT8_BF16 = tl.constexpr("""{
    .reg .b32 x, number, sign, minus;
    mov.b32 minus, 0xbf80bf80;
    lop3.b32 number, $2, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 sign, $2, 0x00800080, 0x43004300, 0xea;
    fma.rn.bf16x2 $0, sign, minus, number;
    shr.u32 x, $2, 8;
    lop3.b32 number, x, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 sign, x, 0x00800080, 0x43004300, 0xea;
    fma.rn.bf16x2 $1, sign, minus, number;
}""")
_INT8_FP16 = tl.constexpr("""{
    .reg .b32 x, bias;
    mov.b32 bias, 0x64806480;
    lop3.b32 x, $2, 0x00ff00ff, bias, 0x6a;
    sub.rn.f16x2 $0, x, bias;
    shr.u32 x, $2, 8;
    lop3.b32 x, x, 0x00ff00ff, bias, 0x6a;
    sub.rn.f16x2 $1, x, bias;
}""")
# FP8: two numbers at once to fp16, which holds all of them; bf16 would take three times as long
_E4M3_FP16 = tl.constexpr("""{
    .reg .b32 x;
    .reg .b16 lo, hi;
    prmt.b32 x, $2, 0, 0x3120;
    mov.b32 {lo, hi}, x;
    cvt.rn.f16x2.e4m3x2 $0, lo;
    cvt.rn.f16x2.e4m3x2 $1, hi;
}""")
_E5M2_FP16 = tl.constexpr("""{
    prmt.b32 $0, $2, 0, 0x2404;
    prmt.b32 $1, $2, 0, 0x3414;
}""")


@triton.jit
def _two_of_fp16(words, PTX: tl.constexpr):
    return tl.inline_asm_elementwise(
        PTX,
        "=&r,=&r,r",
        [words],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _two_of_bf16(words, PTX: tl.constexpr):
    return tl.inline_asm_elementwise(
        PTX,
        "=&r,=&r,r",
        [words],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _four_of_fp16(words, PTX: tl.constexpr):
    return tl.inline_asm_elementwise(
        PTX,
        "=&r,=&r,=&r,=&r,r",
        [words],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _four_of_bf16(words, PTX: tl.constexpr):
    return tl.inline_asm_elementwise(
        PTX,
        "=&r,=&r,=&r,=&r,r",
        [words],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _by_ptx(words, WIDE: tl.constexpr, STORED: tl.constexpr):
    """Return the slices of words of 16 bits; a register holds two words."""
    if tl.float16 == WIDE:
        if tl.uint8 == STORED:
            slices = _four_of_fp16(words, _INT4_FP16)
        elif tl.int8 == STORED:
            slices = _two_of_fp16(words, _INT8_FP16)
        else:
            slices = _two_of_fp16(words, _E4M3_FP16 if tl.float8e4nv == STORED else _E5M2_FP16)
    elif tl.uint8 == STORED:
        slices = _four_of_bf16(words, _INT4_BF16)
    else:
        slices = _two_of_bf16(words, _INT8_BF16)
    return slices


@triton.jit
def _slice(words, index: tl.constexpr, STORED: tl.constexpr, WIDE: tl.constexpr):
    """Return one slice of words of any size."""
    if tl.uint8 == STORED:
        number = ((words.to(tl.int32) >> (4 * index)) & 15 ^ 8) - 8
    else:
        number = (words.to(tl.int32) >> (8 * index)).to(tl.uint8).to(STORED, bitcast=True)
    return number.to(tl.float32).to(WIDE)


@triton.jit
def slices_of(
    words,
    WIDE: tl.constexpr,
    STORED: tl.constexpr,
    SLICES: tl.constexpr,
    PTX: tl.constexpr,
):
    """Return the slices of a tile of words as a tuple, each shaped like it, of dtype ``WIDE``.

    ``STORED`` is the dtype of the cache: FP8, int8, or uint8 for two int4 per byte. The conversion
    is exact.
    """
    if PTX and words.dtype == tl.int16 and tl.float32 != WIDE:
        slices = _by_ptx(words, WIDE, STORED)
    elif SLICES == 2:
        slices = _slice(words, 0, STORED, WIDE), _slice(words, 1, STORED, WIDE)
    else:
        slices = (
            _slice(words, 0, STORED, WIDE),
            _slice(words, 1, STORED, WIDE),
            _slice(words, 2, STORED, WIDE),
            _slice(words, 3, STORED, WIDE),
        )
    return slices


@triton.jit
def joined(slices):
    """Interleave slices to the tile that they are slices of."""
    if len(slices) == 1:
        whole = slices[0]
    elif len(slices) == 2:
        whole = tl.interleave(slices[0], slices[1])
    else:
        even = tl.interleave(slices[0], slices[2])
        whole = tl.interleave(even, tl.interleave(slices[1], slices[3]))
    return whole
