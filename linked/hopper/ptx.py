"""Inline PTX where Triton or ptxas emit extra instructions."""

from .compat import gl, gluon, is_sanitized

# How much larger than its pivot a base-2 logit may be. The pivot is an earlier maximum; sums are
# rescaled only where exponentials would become large.
SLACK = gl.constexpr(8.0)


@gluon.jit
def hide_unless(s, low, high):
    """Return ``s`` where ``low <= high``, and -inf elsewhere.

    Each comparison is followed by its select. If all comparisons came first, ptxas would run out of
    predicates and keep them as bits, at five instructions per number.
    """
    if is_sanitized():
        s = gl.where(low <= high, s, float("-inf"))
    else:
        s = gl.inline_asm_elementwise(
            """
            {
                .reg .pred visible;
                setp.le.s32 visible, $2, $3;
                selp.f32 $0, $1, 0fFF800000, visible;
            }
            """,
            "=f,f,r,r",
            [s, low, high],
            dtype=gl.float32,
            is_pure=True,
            pack=1,
        )
    return s


@gluon.jit
def drop_below(p, draw, threshold):
    """Return ``p`` where ``draw >= threshold`` (unsigned), else 0; see ``hide_unless``."""
    return gl.inline_asm_elementwise(
        """
        {
            .reg .pred kept;
            setp.ge.u32 kept, $2, $3;
            selp.f32 $0, $1, 0f00000000, kept;
        }
        """,
        "=f,f,r,r",
        [p, draw, threshold],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def in_pairs(p):
    """Return probabilities packed two to a register; otherwise loops carry one per register."""
    if not is_sanitized():
        p = gl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [p], dtype=p.dtype, is_pure=True, pack=2
        )
    return p


@gluon.constexpr_function
def _numbers_in_shrink(width):
    """Return how many numbers of a thread are tested together, for rows of ``width`` columns."""
    return min(width // 2, 64)


@gluon.constexpr_function
def _text_of_shrink(count):
    """Return PTX: multiply ``count`` numbers of two rows unless all factors of a warp are 1."""
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
    """Multiply the rows of ``o`` by factors that are mostly 1; a warp skips this if all are 1."""
    COUNT: gl.constexpr = _numbers_in_shrink(o.shape[1])
    TEXT: gl.constexpr = _text_of_shrink(COUNT)
    OPERANDS: gl.constexpr = _operands_of_shrink(COUNT)
    if is_sanitized():
        o = o * alpha
    else:
        o = gl.inline_asm_elementwise(
            TEXT, OPERANDS, [o, alpha], dtype=gl.float32, is_pure=True, pack=COUNT
        )
    return o
