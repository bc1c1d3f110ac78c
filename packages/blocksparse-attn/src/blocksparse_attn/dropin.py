"""Drop-ins: functions with the names and signatures that inference engines use."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from attn_common import cdiv
from torch import Tensor, nn

from ._layout.checks import check_block_size, check_csr, check_indices
from ._linked.host import arguments
from .api import blocksparse_attn_varlen_func
from .layout import BlockSparseLayout

# argument names of the checks: names in these functions
_NAMES = {
    "softmax_scale": "sm_scale",
    "max_seqlen_q": "max_seqlen",
    "max_seqlen_k": "max_seqlen",
    "layout": "sparse_layout",
}
_PATTERN = {"num_heads": "n_heads", "head_range": "active_head_range"}
# layouts of tensors that are still alive and unchanged
_known: dict[tuple[Any, ...], tuple[Any, Any, tuple[int, int], BlockSparseLayout]] = {}


def blocksparse_flash_attn_varlen_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_k: Tensor,
    cu_seqlens_q: Tensor | None,
    sm_scale: float | None,
    sparse_layout: tuple[Tensor, Tensor],
    *,
    block_size: int = 64,
    q_block_size: int | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Causal block-sparse attention over packed sequences, with the engines' signature.

    Args:
        q: queries, ``[tokens_q, heads_q, head_dim]``; fp16, bf16 or fp32.
        k: keys, ``[tokens_k, heads_k, head_dim]``, dtype of ``q``.
        v: values, ``[tokens_k, heads_k, head_dim_v]``, dtype of ``q``.
        cu_seqlens_k: offsets of the sequences in ``k``, int32 or int64 ``[batch + 1]``.
        cu_seqlens_q: offsets of the sequences in ``q``. None means one query per sequence if there
            are as many queries as sequences, and ``cu_seqlens_k`` if there are as many queries as
            keys.
        sm_scale: factor of the scores; None means ``head_dim ** -0.5``.
        sparse_layout: ``(crow, col)``, ``[heads, rows + 1]`` and ``[heads, nnz]`` per query head.
            The layout and its lists are kept while both tensors live and are not written to.
            Nothing is kept for tensors made under ``torch.inference_mode``, as writes to them
            cannot be detected.
        block_size: tokens per block of keys. Default: 64.
        q_block_size: tokens per block of queries. Default: None (``block_size``).
        max_seqlen: upper bound of the number of keys per sequence. Default: None (the positions
            that the layout covers).

    Returns:
        ``[tokens_q, heads_q, head_dim_v]``.
    """
    for name, x in (("q", q), ("k", k), ("cu_seqlens_k", cu_seqlens_k)):
        arguments.check_tensor(name, x)
    if not isinstance(sparse_layout, (tuple, list)) or len(sparse_layout) != 2:
        raise TypeError(f"sparse_layout must be (crow, col), got {type(sparse_layout).__name__}")
    block_q = block_size if q_block_size is None else q_block_size
    side_k, _ = check_block_size(block_size)
    side_q, _ = check_block_size(block_q, "q_block_size")
    layout = _layout_of(*sparse_layout, (side_q, side_k))
    if max_seqlen is None:
        max_seqlen = layout.num_rows * layout.block_size[0]
    max_seqlen = arguments.as_length("max_seqlen", max_seqlen)
    return _attend(q, k, v, cu_seqlens_k, cu_seqlens_q, sm_scale, layout, max_seqlen)


class LocalStridedBlockSparseAttn(nn.Module):
    """Attention of Phi-3-small over packed sequences: local blocks and vertical strides.

    Args:
        n_heads: query heads of the model.
        max_seqlen: length of the longest sequence.
        local_blocks: width of the band in blocks.
        vert_stride: distance of the columns in blocks.
        block_size: tokens per block.
        device: device of the layout. Default: the current GPU if there is one, else the CPU.
        dtype: accepted for compatibility and ignored.
        homo_head: use the same columns for every head. Default: False.
        active_head_range: ``(first, last + 1)``: the heads of this rank. Default: None (all).
        q_block_size: tokens per block of queries. Default: None (``block_size``).
        use_spda: accepted for compatibility and ignored. Default: None.
    """

    def __init__(
        self,
        n_heads: int,
        max_seqlen: int,
        local_blocks: int,
        vert_stride: int,
        block_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        homo_head: bool = False,
        active_head_range: tuple[int, int] | None = None,
        q_block_size: int | None = None,
        use_spda: bool | None = None,
    ) -> None:
        super().__init__()
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        max_seqlen = arguments.as_length("max_seqlen", max_seqlen)
        self.n_heads, self.max_seqlen, self.block_size = n_heads, max_seqlen, block_size
        self.q_block_size = block_size if q_block_size is None else q_block_size
        self.local_blocks, self.vert_stride = local_blocks, vert_stride
        self.homo_head, self.active_head_range = homo_head, active_head_range
        self.head_sliding_step = get_head_sliding_step(n_heads, vert_stride, homo_head)
        check_block_size(self.q_block_size, "q_block_size")
        try:
            self.layout = BlockSparseLayout.local_strided(
                n_heads,
                max_seqlen,
                (self.q_block_size, block_size),
                local_blocks,
                vert_stride,
                homo_head,
                active_head_range,
                device=device,
            )
        except arguments.ERRORS as error:
            raise arguments.renamed(error, _PATTERN) from error

    @property
    def sparse_layout(self) -> tuple[Tensor, Tensor]:
        """Copies of ``(crow, col)``."""
        return self.layout.crow, self.layout.col

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_k: Tensor,
        cu_seqlens_q: Tensor | None = None,
        sm_scale: float | None = None,
    ) -> Tensor:
        """Attend; the arguments are those of :func:`blocksparse_flash_attn_varlen_fwd`."""
        if self.layout.device != q.device:
            self.layout = self.layout.to(q.device)
        lengths = cu_seqlens_k, cu_seqlens_q
        return _attend(q, k, v, *lengths, sm_scale, self.layout, self.max_seqlen)


def get_head_sliding_step(n_heads: int, vert_stride: int, homo_head: bool = False) -> int:
    """Return the shift of the columns, in blocks, from one head to the next."""
    arguments.check_count("n_heads", n_heads)
    arguments.check_count("vert_stride", vert_stride)
    arguments.check_flag("homo_head", homo_head)
    return 0 if homo_head else max(1, vert_stride // n_heads)


def get_sparse_attn_mask(
    n_heads: int,
    q_len: int,
    max_seqlen: int,
    dtype: torch.dtype,
    device: torch.device | str,
    block_size: int = 64,
    local_blocks: int = 4,
    vert_stride: int = 4,
    homo_head: bool = True,
    return_dense: bool = False,
    dense_mask_type: str = "binary",
) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor | None]:
    """Return the local and strided pattern of the last ``q_len`` queries, in three formats.

    Args:
        n_heads: query heads.
        q_len: number of queries, the last ones.
        max_seqlen: number of keys.
        dtype: dtype of the masks.
        device: device of the results.
        block_size: tokens per block. Default: 64.
        local_blocks: width of the band in blocks. Default: 4.
        vert_stride: distance of the columns in blocks. Default: 4.
        homo_head: use the same columns for every head. Default: True.
        return_dense: return the mask of tokens too; a mask of ``max_seqlen`` squared tokens is made
            for it. Default: False.
        dense_mask_type: "binary" (1: kept, 0: not kept) or "bias" (0: kept, -inf: not kept).
            Default: "binary".

    Returns:
        ``((crow, col), block_mask, dense)``: row pointers and columns of the query blocks per head,
        int64; the mask of all blocks, ``[heads, blocks, blocks]``, or ``[blocks, blocks]`` for
        ``homo_head``; and None, or the mask of tokens, ``[heads, q_len, max_seqlen]``. Every call
        returns new tensors.
    """
    arguments.check_choice("dense_mask_type", dense_mask_type, ("binary", "bias"))
    max_seqlen = arguments.as_length("max_seqlen", max_seqlen)
    q_len = arguments.as_length("q_len", q_len)
    try:
        layout = BlockSparseLayout.local_strided(
            n_heads, max_seqlen, block_size, local_blocks, vert_stride, homo_head, device=device
        )
    except arguments.ERRORS as error:
        raise arguments.renamed(error, _PATTERN) from error
    if q_len > max_seqlen:
        raise ValueError(f"q_len must be at most max_seqlen, {max_seqlen}, got {q_len}")
    kept = layout.to_dense()
    rows = kept[:, kept.shape[1] - cdiv(q_len, block_size) :]
    queries = BlockSparseLayout.from_dense(rows, block_size)
    crow, col = queries.crow.long(), queries.col.long()
    block_mask = (kept[0] if homo_head else kept).to(dtype)
    if not return_dense:
        return (crow, col), block_mask, None
    position = torch.arange(max_seqlen, device=kept.device)
    block = position // block_size
    last = position[max_seqlen - q_len :, None]
    mask = kept[:, last // block_size, block] & (position <= last)
    if dense_mask_type == "bias":
        bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
        return (crow, col), block_mask, bias.masked_fill_(~mask, float("-inf"))
    return (crow, col), block_mask, mask.to(dtype)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_k: Tensor,
    cu_seqlens_q: Tensor | None,
    sm_scale: float | None,
    layout: BlockSparseLayout,
    max_seqlen: int,
) -> Tensor:
    starts_q, longest_q = _queries(q, k, cu_seqlens_k, cu_seqlens_q, max_seqlen)
    offsets = _offsets(starts_q, cu_seqlens_k)
    try:
        result: Any = blocksparse_attn_varlen_func(
            q, k, v, *offsets, longest_q, max_seqlen, layout, softmax_scale=sm_scale
        )
    except arguments.ERRORS as error:
        raise arguments.renamed(error, _NAMES) from error
    return result  # type: ignore[no-any-return]


def _queries(
    q: Tensor, k: Tensor, cu_seqlens_k: Tensor, cu_seqlens_q: Tensor | None, max_seqlen: int
) -> tuple[Tensor, int]:
    """Return the offsets of the queries, and an upper bound of their lengths."""
    if cu_seqlens_q is not None:
        return cu_seqlens_q, max_seqlen
    batch = cu_seqlens_k.shape[0] - 1
    if q.shape[0] == batch:
        return torch.arange(batch + 1, dtype=torch.int32, device=q.device), 1
    if q.shape[0] != k.shape[0]:
        raise ValueError(
            "cu_seqlens_q must be given unless there are as many queries as sequences, "
            f"{batch}, or as keys, {k.shape[0]}, got None and {q.shape[0]} queries"
        )
    return cu_seqlens_k, max_seqlen


def _offsets(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> tuple[Tensor, Tensor]:
    """Return both offsets as contiguous int32; if they are one tensor, the results are one too."""
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_indices(name, x)
    starts_k = arguments.as_int32(cu_seqlens_k).contiguous()
    if cu_seqlens_q is cu_seqlens_k:
        return starts_k, starts_k
    return arguments.as_int32(cu_seqlens_q).contiguous(), starts_k


def _layout_of(crow: Tensor, col: Tensor, block_size: tuple[int, int]) -> BlockSparseLayout:
    """Return the layout of two tensors, cached while the tensors live and do not change."""
    try:
        check_csr(crow, col, (2,))
    except arguments.ERRORS as error:
        names = {"crow": "sparse_layout[0]", "col": "sparse_layout[1]"}
        raise arguments.renamed(error, names) from error
    one = crow.stride(0) == 0 and col.stride(0) == 0
    parts = (crow[:1], col[:1]) if one else (crow, col)
    # tensors of inference mode have no version, so writes to them cannot be detected
    if torch.compiler.is_compiling() or crow.is_inference() or col.is_inference():
        return BlockSparseLayout(*parts, block_size)
    key = id(crow), id(col), block_size
    versions = crow._version, col._version
    found = _known.get(key)
    if found is not None and found[0]() is crow and found[1]() is col and found[2] == versions:
        return found[3]

    def forget(_: Any) -> None:
        _known.pop(key, None)

    layout = BlockSparseLayout(*parts, block_size)
    _known[key] = (weakref.ref(crow, forget), weakref.ref(col, forget), versions, layout)
    return layout
