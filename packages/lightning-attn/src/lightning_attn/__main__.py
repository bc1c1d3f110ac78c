"""``python -m lightning_attn [check]``: versions, tiles, and a check of the kernels here.

Without a GPU the kernels run in Triton's interpreter, in a child process, because Triton decides at
import whether to interpret.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from attn_common import Platform, detect
from torch import Tensor

from . import __version__, lightning_attn_decode, lightning_attn_func, lightning_attn_varlen_func
from ._linear.reference import (
    lightning_attention_decode_reference,
    lightning_attention_reference,
    lightning_attention_varlen_reference,
)
from ._linear.shipped import MODELS, calls_of
from ._linear.tiles import decode_tile, takes_hopper_walk, walk_tile
from ._linked.host.selfcheck import judge, print_versions, run_command, short_name


def describe(platform: Platform) -> None:
    """Print versions and the tile of every shape class on a platform."""
    print_versions(__version__)
    print(f"platform {platform}; {_kernels_of(platform)}")
    for dtype in ("bf16", "fp16", "fp32"):
        for d in (64, 128, 256):
            t = walk_tile(platform, d, d, dtype)
            print(
                f"  {dtype}, d to {d}: {t.chunk} tokens x {t.block_e} columns of the state, "
                f"{t.num_warps} warps, {t.num_stages} stages, segments of {t.segment}"
            )
    columns = ", ".join(f"{decode_tile(platform, d, d).block_e} (d {d})" for d in (64, 128, 256))
    print(f"  decoding, columns of the state: {columns}")


def _kernels_of(platform: Platform) -> str:
    """Return a text about the kernels that run on a platform."""
    if not takes_hopper_walk(platform, 128, 128, "bf16"):
        return "every feature runs on the portable Triton kernels"
    return (
        "bf16 with d from 48 to 128 and e from 48 runs on the Gluon kernel for Hopper;\n"
        "the rest on the portable Triton kernels, whose tiles follow"
    )


def check(device: torch.device) -> bool:
    """Compare the kernels with the float64 reference; print a line per case."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    good = True
    is_hopper = takes_hopper_walk(detect(device), 64, 80, "bf16")
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        # a tail after whole chunks, unequal dimensions, a head without decay
        tokens, d, e = (200, 64, 80) if is_hopper and dtype == torch.bfloat16 else (37, 32, 48)
        inputs = [draw(1, tokens, 2, d, dtype=dtype), draw(1, tokens, 2, d, dtype=dtype)]
        inputs += [draw(1, tokens, 2, e, dtype=dtype), torch.tensor([0.0, 0.3], device=device)]
        state = draw(1, 2, d, e)
        for schedule in ("sequential", "parallel"):
            good &= _compare(
                f"{schedule}, forward and backward",
                lightning_attn_func,
                lightning_attention_reference,
                [*inputs, state],
                {"schedule": schedule},
            )
    packed = [t[0] if t.ndim == 4 else t for t in inputs]
    starts = torch.tensor([0, 17, 17, 34], dtype=torch.int32, device=device)
    good &= _compare(
        "packed, forward and backward",
        lightning_attn_varlen_func,
        lightning_attention_varlen_reference,
        [*packed, draw(3, 2, 32, 48)],
        {"cu_seqlens": starts},
    )
    return good & _check_decode(draw, device)


def _check_decode(draw: Callable[..., Tensor], device: torch.device) -> bool:
    """Decode some tokens in place, and compare with the reference."""
    q, k, v, cache = draw(3, 2, 2, 32), draw(3, 2, 2, 32), draw(3, 2, 2, 48), draw(4, 2, 32, 48)
    decay, slots = torch.tensor([0.0, 0.3], device=device), torch.tensor([3, -1, 0], device=device)
    results = []
    calls: list[tuple[Callable[..., Tensor], torch.dtype]] = [
        (lightning_attn_decode, torch.float32),
        (lightning_attention_decode_reference, torch.float32),
        (lightning_attention_decode_reference, torch.float64),
    ]
    for function, dtype in calls:
        mine = cache.to(dtype, copy=True)
        given = (t.to(dtype) for t in (q, k, v))
        results.append([function(*given, mine, decay, slots), mine])
    return judge("decoding in place, float32", torch.float32, *results)


def _compare(
    name: str,
    function: Callable[..., Any],
    reference: Callable[..., Any],
    tensors: list[Tensor],
    options: dict[str, object],
) -> bool:
    """Compare outputs, states and all gradients."""
    dtype = tensors[0].dtype

    def run(call: Callable[..., Any], wide: bool) -> list[Tensor]:
        *leaves, state = ((t.double() if wide else t).detach().requires_grad_() for t in tensors)
        rest = {n: o for n, o in options.items() if n != "schedule" or call is function}
        out, final = call(*leaves, initial_state=state, output_final_state=True, **rest)
        grads = torch.autograd.grad((out.sum(), final.sum()), [*leaves, state])
        return [out.detach(), final.detach(), *grads]

    title = f"{name}, {short_name(dtype)}"
    return judge(title, dtype, run(function, False), run(reference, False), run(reference, True))


if __name__ == "__main__":
    sys.exit(run_command(sys.argv[1:], describe, check, (calls_of, MODELS)))
