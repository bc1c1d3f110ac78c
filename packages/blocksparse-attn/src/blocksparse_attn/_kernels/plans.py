"""Which plan serves a call: that of the kernel for Hopper, or the portable one."""

from __future__ import annotations

from .._call import Bounds, Options, Pattern, Tensors, Walks
from .._configs import takes_hopper_forward
from .common import readable
from .forward import ForwardPlan
from .launch.runtime import first_columns


def plan_forward(
    x: Tensors, pattern: Pattern, options: Options, is_kept: bool = False
) -> ForwardPlan:
    """Return the plan of a call, or if it ``is_kept`` of all calls of its form.

    Their tensors are as ``readable`` leaves them.
    """
    if takes_hopper_forward(x, pattern, options):
        from .hopper.forward_plan import HopperForwardPlan

        return HopperForwardPlan(x, pattern, options, is_kept)
    return ForwardPlan(x, pattern, options)  # type: ignore[no-untyped-call]


def launch_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, block_table, tall, short, crow, col, cols, block_q,
    block_k, rows_alike, max_row, max_seqlen_q, max_seqlen_k, softmax_scale, causal, num_splits,
):  # fmt: skip
    """Run the forward operator on checked inputs; see ``_ops.py`` for its schema."""
    x = readable(Tensors(q, k, v, cu_seqlens_q, cu_seqlens_k, block_table))
    pattern = Pattern(
        crow.shape[0] == 1, crow.shape[1] - 1, cols, block_q, block_k, rows_alike, max_row
    )
    plan = plan_forward(x, pattern, Options(softmax_scale, causal, num_splits))
    out, lse = plan.forward(x, Walks(tuple(tall), tuple(short)), Bounds(max_seqlen_q, max_seqlen_k))
    return first_columns(out, v.shape[-1]), lse
