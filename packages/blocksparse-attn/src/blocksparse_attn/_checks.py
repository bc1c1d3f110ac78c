"""Argument checks of the public functions: what is wrong, what was expected, what came.

They look at types, shapes, dtypes, strides and devices alone, never at tensor data, so that they
neither wait for the device nor break a graph capture.
"""

import math
from typing import Any

import torch
from torch import Tensor

from .layout import BlockSparseLayout

MAX_HEAD_DIM = 256
MAX_SPLITS = 128

FLOAT_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32))
_DEVICES = ("cpu", "cuda", "meta")
_FORMS = {
    4: ("[batch, seqlen_q, heads_q, head_dim]", "[batch, seqlen_k, heads_k, head_dim]"),
    3: ("[tokens_q, heads_q, head_dim]", "[tokens_k, heads_k, head_dim]"),
}
_PAGED_FORM = "[pages, page_size, heads_k, head_dim]"
# the kernels compute in fp32, and in base 2
_FACTOR_MAX = torch.finfo(torch.float32).max / math.log2(math.e)
_INT32_MAX = 2**31 - 1


def check_qkv(q: Tensor, k: Tensor, v: Tensor, ndim: int, paged: bool = False) -> None:
    """Check the three main tensors: 4 dimensions for sequences of one length, 3 packed."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
    if q.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"q must be torch.float16, torch.bfloat16 or torch.float32, got {q.dtype}; "
            "the reference takes torch.float64"
        )
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise TypeError(f"{name} must have the dtype of q, {q.dtype}, got {x.dtype}")
        check_device(name, x, q)
    if q.device.type not in _DEVICES:
        raise NotImplementedError(f"q must be on a CPU or a CUDA or HIP device, got {q.device}")
    _check_forms(q, k, v, ndim, paged)
    for name, x in (("q", q), ("v", v)):
        if not 1 <= x.shape[-1] <= MAX_HEAD_DIM:
            raise ValueError(
                f"head_dim of {name} must be from 1 to {MAX_HEAD_DIM}, got {x.shape[-1]}"
            )
    _check_heads(q, k, v)


def check_reference(q: Tensor, k: Tensor, v: Tensor, ndim: int, paged: bool = False) -> None:
    """Check the main tensors of the reference: any float dtypes, any head dimension."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if not x.dtype.is_floating_point:
            raise TypeError(f"{name} must be of a float dtype, got {x.dtype}")
    _check_forms(q, k, v, ndim, paged)
    _check_heads(q, k, v)


def check_packed(
    q: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int
) -> int:
    """Check what says where sequences begin and end; return their number."""
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_tensor(name, x)
        if x.dtype != torch.int32:
            raise TypeError(f"{name} must be torch.int32, got {x.dtype}")
        check_device(name, x, q)
        if x.ndim != 1 or x.shape[0] < 1:
            raise ValueError(f"{name} must be [batch + 1], got {list(x.shape)}")
        if not x.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got stride {x.stride(0)}")
    batch: int = cu_seqlens_q.shape[0] - 1
    if cu_seqlens_k.shape[0] != batch + 1:
        raise ValueError(
            f"cu_seqlens_k must be as long as cu_seqlens_q, [{batch + 1}], "
            f"got {list(cu_seqlens_k.shape)}"
        )
    check_length("max_seqlen_q", max_seqlen_q)
    check_length("max_seqlen_k", max_seqlen_k)
    return batch


def check_block_table(
    q: Tensor, k: Tensor, v: Tensor, batch: int, max_seqlen_k: int, block_table: Tensor
) -> None:
    """Check the pages of each sequence."""
    check_tensor("block_table", block_table)
    if block_table.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"block_table must be torch.int32 or torch.int64, got {block_table.dtype}")
    check_device("block_table", block_table, q)
    if block_table.ndim != 2 or block_table.shape[0] != batch:
        raise ValueError(
            f"block_table must be [batch, max_pages] with batch {batch}, "
            f"got {list(block_table.shape)}"
        )
    page = k.shape[1]
    if page < 1:
        raise ValueError(f"page_size of k must be at least 1, got {page}")
    if block_table.shape[1] * page < max_seqlen_k:
        raise ValueError(
            f"block_table must hold max_seqlen_k, {max_seqlen_k}, in pages of {page}, "
            f"got {block_table.shape[1]} pages"
        )
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise NotImplementedError(
            "block_table has no gradient: q, k and v must not require one with paged keys and "
            "values, got requires_grad=True"
        )


def check_layout(layout: BlockSparseLayout, q: Tensor, max_seqlen_k: int) -> None:
    """Check that a layout serves these heads and lengths, on this device."""
    if not isinstance(layout, BlockSparseLayout):
        raise TypeError(f"layout must be a BlockSparseLayout, got {type(layout).__name__}")
    if layout.device != q.device:
        raise ValueError(
            f"layout must be on the device of q, {q.device}, got {layout.device}; "
            "layout.to(device) moves it"
        )
    heads_q = q.shape[-2]
    if layout.num_heads not in (1, heads_q):
        raise ValueError(
            f"heads of layout must be 1 or those of q, {heads_q}, got {layout.num_heads}"
        )
    covered = layout.num_rows * layout.block_size[0]
    if max_seqlen_k > covered:
        raise ValueError(
            f"layout must cover the keys, {max_seqlen_k}, with its rows, got {layout.num_rows} "
            f"rows of {layout.block_size[0]}"
        )


def check_options(
    q: Tensor, softmax_scale: float | None, causal: bool, num_splits: int, return_lse: bool
) -> float:
    """Check what is not a tensor; return the scale."""
    for name, flag in (("causal", causal), ("return_lse", return_lse)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be a bool, got {type(flag).__name__}")
    if not isinstance(num_splits, int) or isinstance(num_splits, bool):
        raise TypeError(f"num_splits must be an int, got {type(num_splits).__name__}")
    if not 0 <= num_splits <= MAX_SPLITS:
        raise ValueError(f"num_splits must be from 0 to {MAX_SPLITS}, got {num_splits}")
    if softmax_scale is None:
        return float(q.shape[-1] ** -0.5)
    return check_scale("softmax_scale", softmax_scale)


def check_scale(name: str, scale: Any) -> float:
    """Check a factor of the scores; return it as a float."""
    if isinstance(scale, bool) or not isinstance(scale, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{name} must be a float, got {type(scale).__name__}")
    if not -math.inf < scale < math.inf:
        raise ValueError(f"{name} must be finite, got {scale}")
    if not -_FACTOR_MAX <= scale <= _FACTOR_MAX:
        raise ValueError(
            f"{name} must be from -{_FACTOR_MAX:.3g} to {_FACTOR_MAX:.3g}, for fp32, got {scale}"
        )
    return float(scale) if scale.__class__ is int else scale  # type: ignore[return-value]


def check_length(name: str, length: Any) -> None:
    """Check the bound of a length."""
    if not isinstance(length, (int, torch.SymInt)) or isinstance(length, bool):
        raise TypeError(f"{name} must be an int, got {type(length).__name__}")
    if not 0 <= length <= _INT32_MAX:
        raise ValueError(f"{name} must be from 0 to {_INT32_MAX}, got {length}")


def check_tensor(name: str, x: Any) -> None:
    """Check that an argument is a tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")


def check_device(name: str, x: Tensor, q: Tensor) -> None:
    """Check that a tensor is where the queries are."""
    if x.device != q.device:
        raise ValueError(f"{name} must be on the device of q, {q.device}, got {x.device}")


def _check_forms(q: Tensor, k: Tensor, v: Tensor, ndim: int, paged: bool) -> None:
    form_q, form_k = _FORMS[ndim]
    ndim_k, form_k = (4, _PAGED_FORM) if paged else (ndim, form_k)
    for name, x, want, form in (("q", q, ndim, form_q), ("k", k, ndim_k, form_k),
                                ("v", v, ndim_k, form_k)):  # fmt: skip
        if x.ndim != want:
            raise ValueError(f"{name} must be {form}, got {list(x.shape)}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"head_dim of k must be that of q, {q.shape[-1]}, got {k.shape[-1]}")
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(
            f"v must have the shape of k but for head_dim, {list(k.shape[:-1])}, "
            f"got {list(v.shape[:-1])}"
        )


def _check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.ndim == 4 and k.shape[0] != q.shape[0]:
        raise ValueError(f"batch of k must be that of q, {q.shape[0]}, got {k.shape[0]}")
    heads_q, heads_k = q.shape[-2], k.shape[-2]
    if heads_k < 1 or heads_q < 1 or heads_q % heads_k != 0:
        raise ValueError(
            f"heads_q must be a positive multiple of heads_k, got heads_q {heads_q} and "
            f"heads_k {heads_k}"
        )
