"""Device functions of the portable kernels, shared by several packages.

Scores are in base 2 ("logits" are natural scores times log2(e)) because the hardware exponential is
``exp2``.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
INF = tl.constexpr(float("inf"))
NEG_INF = tl.constexpr(float("-inf"))


@triton.jit
def pointer_to(ptr, strides, batch, token, head):
    """Return the pointer to a row; indices are as wide as their offsets need."""
    return ptr + batch * strides.batch + token * strides.token + head * strides.head


@triton.constexpr_function
def is_sanitized():
    """Return whether builds are for FpSan, which understands Triton's arithmetic but no PTX."""
    # imported here: of global names, the tests' interpreters know only Triton's language
    from triton import knobs

    return "fpsan" in knobs.compilation.instrumentation_mode


@triton.jit
def dot(a, b, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """Matrix product with fp32 accumulation."""
    if UPCAST:  # interpreted dots of bf16 work on raw bits
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def dot_add(acc, a, b, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """Return ``acc + a @ b``, with ``a`` rounded to ``b``'s dtype as the tensor cores need it."""
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    else:
        a = a.to(b.dtype)
    if b.dtype.primitive_bitwidth == 8:
        # Hopper adds FP8 products with about 14 bits: add short sums of them in fp32
        return tl.dot(a, b, acc, input_precision=PRECISION, max_num_imprecise_acc=32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def settle(acc, SETTLE: tl.constexpr):
    """Use an accumulator, at no cost, so that Hopper waits for its products here.

    If products are in flight over the loop's back edge, the next step moves their registers, and
    ptxas then serialises all products of the kernel (its remark C7515).
    """
    if SETTLE:
        acc = tl.inline_asm_elementwise("", "=f,0", [acc], dtype=tl.float32, is_pure=True, pack=1)
    return acc


@triton.jit
def tanh(x):
    """Hyperbolic tangent, to fp32 accuracy and without overflow."""
    # 1 - exp cancels near 0, where the Taylor polynomial takes over
    square = x * x
    poly = 62.0 / 2835.0 + square * (-1382.0 / 155925.0)
    poly = 2.0 / 15.0 + square * (-17.0 / 315.0 + square * poly)
    near = x + x * square * (-1.0 / 3.0 + square * poly)
    decay = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    far = (1.0 - decay) / (1.0 + decay)
    far = tl.where(x < 0, -far, far)
    return tl.where(tl.abs(x) < 0.35, near, far)
