"""``python -m flash_attn_triton [check]``: versions, tiles, and a check of the kernels here.

On a machine without a GPU the kernels run in Triton's interpreter, in a child process, because
Triton decides at its import whether to interpret.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from attn_common import Platform, has_gluon
from torch import Tensor

from . import __version__, flash_attn_func, flash_attn_varlen_func
from ._configs import HOPPER, backward_dkdv_tile, backward_dq_tile, forward_tile
from ._linked.host.selfcheck import check_gradients, print_versions, run_command, short_name
from .reference import attention_reference, varlen_attention_reference


def describe(platform: Platform) -> None:
    """Print versions and the tile of every shape class on a platform."""
    print_versions(__version__)
    print(f"platform {platform}; {_kernels_of(platform)}")
    for dtype in (torch.bfloat16, torch.float32):
        for head_dim in (64, 128, 256):
            choice = (platform, head_dim, dtype.itemsize)
            tiles = {
                "forward": forward_tile(*choice),
                "dk, dv": backward_dkdv_tile(*choice),
                "dq": backward_dq_tile(*choice),
            }
            shown = "; ".join(
                f"{name} {t.block_m} queries x {t.block_n} keys, {t.num_warps} warps, "
                f"{t.num_stages} stages"
                for name, t in tiles.items()
            )
            print(f"  {short_name(dtype)}, head_dim to {head_dim}: {shown}")


def _kernels_of(platform: Platform) -> str:
    """Say which kernels run here."""
    if not (platform.is_hopper and HOPPER and has_gluon()):
        return "every feature runs on the portable Triton kernels"
    return (
        "fp16, bf16 and FP8 run on the Gluon kernels for Hopper, but for head dims to 32, (in FP8) "
        "above 128,\nsome biases and (with deterministic) the gradients over trees; those and the "
        "rest on the portable\nTriton kernels, whose tiles follow"
    )


def check(device: torch.device) -> bool:
    """Compare the kernels with the float64 reference; print a line per case."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    def inputs(dtype: torch.dtype) -> list[Tensor]:
        # GQA, more keys than queries, tails behind every tile, unequal head dimensions
        shapes = ((2, 33, 4, 24), (2, 50, 2, 24), (2, 50, 2, 40))
        return [draw(*shape, dtype=dtype) for shape in shapes]

    cases: dict[str, Callable[[torch.dtype], tuple[list[Tensor], dict[str, object]]]] = {
        "full": lambda dtype: (inputs(dtype), {}),
        "causal": lambda dtype: (inputs(dtype), {"causal": True}),
        "window, softcap": lambda dtype: (inputs(dtype), {"window_size": (9, 3), "softcap": 5.0}),
        "ALiBi, sinks": lambda dtype: (
            inputs(dtype),
            {"causal": True, "alibi_slopes": draw(4).abs(), "sinks": draw(4)},
        ),
        "bias": lambda dtype: (inputs(dtype), {"bias": draw(1, 4, 33, 50, dtype=dtype)}),
    }
    good = True
    for name, build in cases.items():
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            tensors, options = build(dtype)
            dout = draw(2, 33, 4, 40, dtype=dtype)
            good &= check_gradients(
                name, flash_attn_func, attention_reference, tensors, options, dout
            )
    lengths = torch.tensor([0, 17, 17, 50], dtype=torch.int32, device=device)
    packed = {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths, "causal": True}
    packed |= {"max_seqlen_q": 33, "max_seqlen_k": 33}
    tensors = [draw(50, heads, 32) for heads in (4, 2, 2)]
    return good & check_gradients(
        "packed",
        flash_attn_varlen_func,
        varlen_attention_reference,
        tensors,
        packed,
        draw(50, 4, 32),
    )


if __name__ == "__main__":
    sys.exit(run_command(sys.argv[1:], describe, check))
