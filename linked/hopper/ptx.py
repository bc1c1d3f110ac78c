"""Arithmetic of the softmax in assembly, where the compilers make more of it than there is."""

from .compat import gl, gluon

# how much larger than its pivot a base-2 logit may be. The pivot is a maximum, but seldom the last
# one: what was summed up needs a new factor only where the exponentials would become large
SLACK = gl.constexpr(8.0)


@gluon.jit
def hide_unless(s, low, high):
    """Return ``s`` where ``low <= high``, and minus infinity elsewhere.

    A comparison and what depends on it, one after the other: where all comparisons come first, the
    assembler runs out of predicates and keeps them as bits, at five instructions a number.
    """
    return gl.inline_asm_elementwise(
        """
        {
            .reg .pred visible;
            setp.le.s32 visible, $2, $3;
            selp.f32 $0, $1, 0fFF800000, visible;
        }
        """,
        "=f,f,r,r", [s, low, high], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def in_pairs(p):
    """Return probabilities two to a register: from loop to loop they are carried one by one."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [p], dtype=p.dtype, is_pure=True, pack=2
    )


@gluon.constexpr_function
def _numbers_in_shrink(width):
    """How many numbers of a thread are looked at together, of rows so wide."""
    return min(width // 2, 64)


@gluon.constexpr_function
def _text_of_shrink(count):
    """Multiply so many numbers, of two rows, unless a warp's factors are all 1."""
    lines = [
        ".reg .pred here, there;",
        f"setp.neu.f32 here, ${2 * count}, 0f3F800000;",
        f"setp.neu.f32 there, ${2 * count + 2}, 0f3F800000;",
        "or.pred here, here, there;",
        "vote.sync.any.pred here, here, -1;",
        "@!here bra DONE;",
        *[f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count)],
        "DONE:",
    ]
    return "{" + " ".join(lines) + "}"


@gluon.constexpr_function
def _operands_of_shrink(count):
    # numbers stay in their registers
    return ",".join(["=&f"] * count + [str(i) for i in range(count)] + ["f"] * count)


@gluon.jit
def shrink(o, alpha):
    """Multiply rows with factors that are mostly 1: no warp does it for nothing."""
    COUNT: gl.constexpr = _numbers_in_shrink(o.shape[1])
    TEXT: gl.constexpr = _text_of_shrink(COUNT)
    OPERANDS: gl.constexpr = _operands_of_shrink(COUNT)
    return gl.inline_asm_elementwise(
        TEXT, OPERANDS, [o, alpha], dtype=gl.float32, is_pure=True, pack=COUNT
    )
