"""The plan for FP8 on Hopper of the arguments of the public functions."""

from __future__ import annotations

import torch
from flash_attn_triton._dense.call import Options, Tensors
from flash_attn_triton._dense.hopper.forward.launch import HopperForward
from flash_attn_triton._dense.launch import PortableForward
from flash_attn_triton._dense.portable.form import Form, readable
from flash_attn_triton._dense.tiles import takes_hopper_forward

from ..._numerics import Case

HOPPER = "nvidia:sm_90"
E4M3 = torch.float8_e4m3fn


def plan(case: Case, out_dtype: torch.dtype = torch.bfloat16) -> tuple[HopperForward, Tensors]:
    """Return the plan of a case that the kernel takes, and its tensors."""
    options = dict(case.options)
    for name in ("max_seqlen_q", "max_seqlen_k"):
        options.pop(name, None)
    left, right = options.pop("window_size", (-1, -1))
    if options.pop("causal", False):
        right = 0
    scale = options.pop("softmax_scale", case.inputs["q"].shape[-1] ** -0.5)
    numbers = Options(scale, left, right, options.pop("softcap", 0.0), 0.0)
    x = readable(Tensors(**case.inputs, **options))
    assert takes_hopper_forward(x, numbers, out_dtype)
    form = Form(x, numbers)
    portable = PortableForward(form, x, out_dtype)
    return HopperForward(form, x, out_dtype, portable, is_kept=x.q.is_cuda), x


def launch(case: Case) -> dict[str, torch.Tensor]:
    """Launch the kernel with the arguments of the public functions."""
    made, x = plan(case)
    return dict(zip(("out", "lse"), made(x), strict=True))
