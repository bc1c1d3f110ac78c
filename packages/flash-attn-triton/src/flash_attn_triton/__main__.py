"""``python -m flash_attn_triton [check | compile]``: versions, tiles, and a check of the kernels.

On a machine without a GPU the kernels run in Triton's interpreter, in a child process, because
Triton decides at import time whether to interpret.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from attn_common import Platform
from torch import Tensor

from . import __version__, flash_attn_func, flash_attn_varlen_func
from ._dense import tiles as dense_tiles
from ._dense.hopper_tiles import (
    forward_panels,
    hopper_backward_tile,
    hopper_panel_tile,
    hopper_tile,
)
from ._dense.shipped import calls_of
from ._dense.tiles import backward_dkdv_tile, backward_dq_tile, forward_tile
from ._linked.host.models import MODELS
from ._linked.host.selfcheck import check_gradients, print_versions, run_command, short_name
from ._reference.reference import attention_reference, varlen_attention_reference

# on Hopper: calls that run the portable kernels, and why; docs/how-it-works.md has the same list
PORTABLE = (
    (
        "fp32",
        "accurate products are three of TF32, whose operands wgmma does not transpose",
    ),
    (
        "forward, head dims of q and v to 32; backward, head dim of q or of v to 32",
        "half of a tile or more would be padding",
    ),
    (
        "FP8, head dim of q to 16",
        "one product in FP8 sums 32 columns",
    ),
    (
        "FP8, fixed lengths, to 128 queries on fewer than 2048 keys",
        "transposing the values first would take longer than it saves",
    ),
    (
        "forward, out_dtype other than the dtype of q (in FP8, than fp16 and bf16)",
        "the output leaves by TMA in the layout of q, so in its dtype",
    ),
    (
        "forward, softmax_scale negative, 0, or below fp32's least normal number",
        "it is folded into the exponential, where only a positive one commutes with the maximum",
    ),
    (
        "forward and backward, spans",
        "the Hopper kernels know windows alone",
    ),
    (
        "forward, dropout with a window that ends on the left",
        "keys ahead of all windows are left out, and draws count from the first key",
    ),
    (
        "forward and backward, bias with a window that ends on the left",
        "tiles begin at any key there, and TMA copies from multiples of 16 bytes",
    ),
    (
        "forward and backward, bias with one number for all keys",
        "it has no tiles, and moves the LSE alone",
    ),
    (
        "forward, bias with softmax_scale below 2^-10",
        "the bias is divided by it, and the quotient needs room in fp32",
    ),
    (
        "FP8, bias",
        "a tile of a bias in fp32, 96 KiB, does not fit beside keys and values of head dim 128",
    ),
    (
        "gradient of a bias that has no row per query, is expanded, or is not of the dtype of q; "
        "of packed calls, with softcap, with a head dim above 128, to sum over 4 GiB of scores",
        "it is summed from the gradients of all scores, which these calls have no memory or form "
        "for",
    ),
    (
        "backward, fixed lengths to 128, head dims to 64, no tensor but q, k and v, no dropout",
        "one launch makes all gradients, which takes less time",
    ),
    (
        "backward, fixed lengths, below 32 queries; head dims to 64 without softcap, dropout and "
        "bias, below 64",
        "most of a tile, and of its sums of dq in fp32, would be padding",
    ),
    (
        "backward of trees, deterministic",
        "the kernel for Hopper adds to dq in no fixed order",
    ),
)


def describe(platform: Platform) -> None:
    """Print versions, the kernel of each kind of call, and the tiles."""
    print_versions(__version__)
    if platform.is_hopper and dense_tiles.HOPPER:
        print(f"platform {platform}; the Gluon kernels for Hopper serve fp16, bf16 and FP8:")
        _print_hopper_tiles()
        print("the portable Triton kernels serve:")
        for calls, reason in PORTABLE:
            print(f"  {calls}: {reason}")
        print("with these tiles:")
    else:
        print(f"platform {platform}; every feature runs on the portable Triton kernels:")
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


def _print_hopper_tiles() -> None:
    """Print the tiles of plain calls; a softcap, dropout and a bias have other tiles."""
    for head_dim in (64, 80, 96, 128, 160, 192, 256):
        panels = forward_panels(head_dim, head_dim, 2, False)
        full, causal = (
            hopper_panel_tile(panels) if panels.is_cut else hopper_tile(head_dim, is_causal)
            for is_causal in (False, True)
        )
        back = hopper_backward_tile(head_dim, can_part=True)
        print(
            f"  bfloat16, head_dim to {head_dim}: forward {full.block_m} queries x {full.block_n} "
            f"keys, causal {causal.block_m} x {causal.block_n}; backward {back.block_m} x "
            f"{back.block_n}{', dv apart' if back.is_apart else ''}"
        )


def check(device: torch.device) -> bool:
    """Compare the kernels with the float64 reference; print a line per case."""
    # GQA, more keys than queries, partial last tiles, unequal head dimensions
    good = _check(device, 33, 50, (24, 40))
    if device.type == "cuda":  # runs the Hopper kernels, in both passes, over several tiles
        good &= _check(device, 300, 450, (80, 64))
    return good


def _check(device: torch.device, seqlen_q: int, seqlen_k: int, head_dims: tuple[int, int]) -> bool:
    generator = torch.Generator().manual_seed(0)
    head_dim, head_dim_v = head_dims

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    def inputs(dtype: torch.dtype) -> list[Tensor]:
        shapes = (
            (2, seqlen_q, 4, head_dim),
            (2, seqlen_k, 2, head_dim),
            (2, seqlen_k, 2, head_dim_v),
        )
        return [draw(*shape, dtype=dtype) for shape in shapes]

    def bias(dtype: torch.dtype) -> dict[str, object]:
        return {"bias": draw(1, 4, seqlen_q, seqlen_k, dtype=dtype)}

    cases: dict[str, Callable[[torch.dtype], tuple[list[Tensor], dict[str, object]]]] = {
        "full": lambda dtype: (inputs(dtype), {}),
        "causal": lambda dtype: (inputs(dtype), {"causal": True}),
        "window, softcap": lambda dtype: (inputs(dtype), {"window_size": (9, 3), "softcap": 5.0}),
        "ALiBi, sinks": lambda dtype: (
            inputs(dtype),
            {"causal": True, "alibi_slopes": draw(4).abs(), "sinks": draw(4)},
        ),
        "bias": lambda dtype: (inputs(dtype), bias(dtype)),
    }
    good = True
    for name, build in cases.items():
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            tensors, options = build(dtype)
            dout = draw(2, seqlen_q, 4, head_dim_v, dtype=dtype)
            good &= check_gradients(
                f"{name}, {seqlen_q} x {seqlen_k}",
                flash_attn_func,
                attention_reference,
                tensors,
                options,
                dout,
            )
    ends = [0, seqlen_q // 2, seqlen_q // 2, seqlen_k]
    lengths = torch.tensor(ends, dtype=torch.int32, device=device)
    packed = {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths, "causal": True}
    packed |= {"max_seqlen_q": seqlen_k, "max_seqlen_k": seqlen_k}
    dtype = torch.float32 if head_dim < 32 else torch.bfloat16
    tensors = [draw(seqlen_k, heads, head_dim, dtype=dtype) for heads in (4, 2, 2)]
    return good & check_gradients(
        f"packed, {seqlen_k} tokens",
        flash_attn_varlen_func,
        varlen_attention_reference,
        tensors,
        packed,
        draw(seqlen_k, 4, head_dim, dtype=dtype),
    )


if __name__ == "__main__":
    sys.exit(run_command(sys.argv[1:], describe, check, (calls_of, MODELS)))
