"""What GPUs run besides attention, where sequences are cut across ranks; see ``_sharded.py``."""

from __future__ import annotations

from attn_common import cdiv
from torch import Tensor

from .._configs import padded_head_dim
from .._linked.host.forms import Memory
from .launch.runtime import Launch
from .sharded_merge import merge_kernel
from .structures import MergeNumbers, MergeTensors, MergeTile

# rows of one head per program
ROWS = 32

_launches: Memory[Launch] = Memory()


def merge(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge results over other keys into ``out`` and ``lse``, in fp32, in one pass.

    Args:
        out: ``[rows, heads, d]`` or ``[batch, rows, heads, d]``, of any float dtype; unit stride in
            the last dimension.
        lse: fp32 ``[heads, rows]`` or ``[batch, heads, rows]``; unit stride in the last dimension.
            -inf where no key was seen.
        part_out: shape of ``out``, any float dtype.
        part_lse: shape of ``lse``.
    """
    if out.ndim == 3:
        out, lse = out.unsqueeze(0), lse.unsqueeze(0)
    batch, rows, heads, head_dim = out.shape
    part_out, part_lse = part_out.contiguous(), part_lse.contiguous()
    key = out.dtype, part_out.dtype, head_dim, out.device
    launch = _launches.get(key)
    if launch is None:
        tile = MergeTile(head_dim, padded_head_dim(head_dim), ROWS)
        launch = _launches.keep(key, Launch(merge_kernel, {**tile._asdict(), "num_warps": 4}))
    blocks = cdiv(rows, ROWS)
    numbers = MergeNumbers(rows, heads, blocks, *out.stride()[:3], *lse.stride()[:2])
    launch(batch * heads * blocks, MergeTensors(out, lse, part_out, part_lse), numbers)
