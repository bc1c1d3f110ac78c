"""``python -m blocksparse_attn [check]``: versions, tiles, and a check of this machine's kernels.

Without a GPU the kernels run in Triton's interpreter, in a child process, because Triton decides at
its import whether to interpret.
"""

from __future__ import annotations

import sys

import torch
from attn_common import Platform
from torch import Tensor

from . import BlockSparseLayout, __version__, blocksparse_attn_func, blocksparse_attn_varlen_func
from ._attention.reference import (
    blocksparse_attention_reference,
    blocksparse_varlen_attention_reference,
)
from ._attention.tiles import (
    BACKWARD_STAGES,
    SHORT_ROWS,
    SHORT_ROWS_FAST,
    HopperTile,
    Shape,
    backward_dkdv_tile,
    backward_dq_shape,
    hopper_dq_tile,
    hopper_shape,
    short_shape,
    suits_hopper,
    suits_hopper_backward,
    tall_shape,
)
from ._linked.host.selfcheck import check_gradients, print_versions, run_command, short_name


def describe(platform: Platform) -> None:
    """Print versions, and the tiles of typical shape classes on a platform."""
    print_versions(__version__)
    print(f"platform {platform}")
    for dtype in (torch.bfloat16, torch.float32):
        for head_dim in (64, 128, 256):
            name = f"{short_name(dtype)}, head_dim to {head_dim}, blocks of 64"
            print(f"  {name}, 4 heads a group")
            choice = (platform, head_dim, dtype.itemsize, 64, 4)
            if suits_hopper(platform, head_dim, dtype.itemsize, 64, 64, True):
                for kind, is_shared in (("one pattern", True), ("a pattern for each", False)):
                    shape = hopper_shape(head_dim, 64, 4, is_shared)
                    print(f"    kernel for Hopper, {kind}: {_shown(shape)}")
            for kind, shape in (
                ("one pattern for all heads", tall_shape(*choice, True, True)),
                ("a pattern for each", tall_shape(*choice, False, True)),
                ("a pattern for each, rows unlike", tall_shape(*choice, False, False)),
                ("a few queries", short_shape(*choice, False)),
                ("dq", backward_dq_shape(*choice, False, True)),
            ):
                print(f"    {kind}: {_shown(shape)}")
            if suits_hopper_backward(platform, head_dim, dtype.itemsize):
                print(f"    backward for Hopper: 64 queries x 128 keys, {BACKWARD_STAGES} stages")
                dq = hopper_dq_tile(head_dim)
                usual, fast = SHORT_ROWS, SHORT_ROWS_FAST
                short = (
                    f"up to {usual.grouped} keys a row ({fast.grouped} where memory is fast), "
                    f"{usual.alone} ({fast.alone}) without groups of heads"
                )
                where = (
                    f"where gradients repeat, and of {short}"
                    if head_dim > 64
                    else "where gradients repeat"
                )
                print(
                    f"    dq alone, {where}: {dq.block_m} queries x {dq.block_n} keys, "
                    f"{dq.stages_k} stages of keys, {dq.stages_v} of values"
                )
            tile = backward_dkdv_tile(platform, head_dim, dtype.itemsize, 64)
            print(f"    dk, dv: {tile.block_n} keys x {tile.block_m} queries")
    print("  portable kernels serve layouts with a token rule, and keys in pages")


def _shown(shape: Shape) -> str:
    tile = shape.tile
    shown = f"{shape.positions} positions of {shape.heads} heads x {tile.block_n} keys"
    if isinstance(tile, HopperTile):
        return f"{shown}, {tile.stages_k} stages of keys, {tile.stages_v} of values"
    return f"{shown}, {tile.num_warps} warps, {tile.num_stages} stages"


def check(device: torch.device) -> bool:
    """Compare the kernels with the float64 reference, and print a line per case."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    any_blocks = torch.rand(4, 4, 2, generator=generator) < 0.6
    layouts = {
        "local and strided": BlockSparseLayout.local_strided(4, 64, 16, 1, 3, device=device),
        "one pattern for all heads": BlockSparseLayout.local_strided(
            4, 64, 16, 1, 3, True, device=device
        ),
        "any blocks, 16 x 32": BlockSparseLayout.from_dense(any_blocks, (16, 32)).to(device),
    }
    good = True
    for name, layout in layouts.items():
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            # GQA, a later chunk, lengths that end within a block, unequal head dimensions
            shapes = ((1, 20, 4, 24), (1, 50, 2, 24), (1, 50, 2, 40))
            tensors = [draw(*shape, dtype=dtype) for shape in shapes]
            dout = draw(1, 20, 4, 40, dtype=dtype)
            good &= check_gradients(
                name,
                blocksparse_attn_func,
                blocksparse_attention_reference,
                tensors,
                {"layout": layout},
                dout,
            )
    packed = {
        "cu_seqlens_q": torch.tensor([0, 17, 18, 20], dtype=torch.int32, device=device),
        "cu_seqlens_k": torch.tensor([0, 17, 60, 80], dtype=torch.int32, device=device),
        "max_seqlen_q": 17,
        "max_seqlen_k": 43,
        "layout": layouts["local and strided"],
        "num_splits": 2,
    }
    tensors = [draw(tokens, heads, 32) for tokens, heads in ((20, 4), (80, 2), (80, 2))]
    return good & check_gradients(
        "packed: prefill, decode, drafts",
        blocksparse_attn_varlen_func,
        blocksparse_varlen_attention_reference,
        tensors,
        packed,
        draw(20, 4, 32),
    )


if __name__ == "__main__":
    sys.exit(run_command(sys.argv[1:], describe, check))
