"""Which plan serves a call: that of the kernels for Hopper, or the portable one."""

from __future__ import annotations

import torch

from .._call import Options, Tensors
from .._configs import takes_hopper_forward
from .common import readable
from .forward import ForwardPlan
from .launch.runtime import first_columns


def plan_forward(
    x: Tensors,
    options: Options,
    out_dtype: torch.dtype,
    deterministic: bool = False,
    is_kept: bool = False,
) -> ForwardPlan:
    """Return the plan of a call, or if it ``is_kept`` of all calls of its form.

    Their tensors are as ``readable`` leaves them.
    """
    if takes_hopper_forward(x, options, out_dtype):
        from .hopper.forward_plan import HopperForwardPlan

        return HopperForwardPlan(x, options, out_dtype, deterministic, is_kept)
    return ForwardPlan(x, options, out_dtype, deterministic)  # type: ignore[no-untyped-call]


def launch_forward(*arguments):
    """Run the forward operator on checked inputs; see ``_ops.py`` for its schema."""
    *tensors, _, _, scale, left, right, softcap, dropout_p, out_dtype = arguments
    x = Tensors(*tensors)
    width = x.v.shape[-1]
    x = readable(x)
    out_dtype = out_dtype or (torch.bfloat16 if x.q.element_size() == 1 else x.q.dtype)
    plan = plan_forward(x, Options(scale, left, right, softcap, dropout_p), out_dtype)
    out, lse = plan.forward(x)
    return first_columns(out, width), lse
