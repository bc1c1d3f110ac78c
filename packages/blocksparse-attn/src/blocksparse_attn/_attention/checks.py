"""Argument checks of the public functions.

Except for ``check_values``, they read types, shapes, dtypes, strides and devices, never tensor
data: so they neither wait for the device nor break a graph capture.
"""

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from attn_common import cdiv
from torch import Tensor

from .._layout.checks import check_indices, is_top_left
from .._linked.host import arguments
from .._linked.host.arguments import (
    FLOAT_DTYPES,
    check_device,
    check_flag,
    check_floats,
    check_groups,
    check_kinds,
    check_offset_values,
    check_scale,
    check_tensor,
    check_width,
    is_int,
    is_symbol,
    kind,
    shown,
    warn_of_heads_first,
)
from ..layout import BlockSparseLayout
from .call import Bounds, Options, Tensors

MAX_HEAD_DIM = 256
MAX_SPLITS = 128

_FORMS = {
    4: ("[batch, seqlen_q, heads_q, head_dim]", "[batch, seqlen_k, heads_k, head_dim]"),
    3: ("[tokens_q, heads_q, head_dim]", "[tokens_k, heads_k, head_dim]"),
}
# for dimensions of the other function: what to do
_OTHERS = {
    (4, 3): "; packed sequences go to blocksparse_attn_varlen_func, one sequence is q[None]",
    (3, 4): "; sequences of one length go to blocksparse_attn_func",
}
_PAGED_FORM = "[pages, page_size, heads_k, head_dim]"
_VARLEN = "use blocksparse_attn_varlen_func"
# arguments of other attention functions, and what to use here instead
_ELSEWHERE = {
    "attn_mask": "use a layout: BlockSparseLayout.from_dense takes a mask of blocks",
    "block_mask": "use layout; integrations.flex_attention.from_block_mask converts one",
    "block_size": "the layout has it",
    "block_table": _VARLEN,
    "block_tables": "use block_table of blocksparse_attn_varlen_func",
    "cache_seqlens": "use cu_seqlens_k: with a block_table its differences alone count",
    "cu_seqlens_k": _VARLEN,
    "cu_seqlens_q": _VARLEN,
    "is_causal": "use causal",
    "pack_gqa": "leave it out: it changes no result",
    "page_table": "use block_table of blocksparse_attn_varlen_func",
    "return_softmax_lse": "use return_lse",
    "scale": "use softmax_scale",
    "sm_scale": "use softmax_scale",
    "sparse_layout": "use layout, a BlockSparseLayout",
    "window_size": "use a layout: BlockSparseLayout.local_strided keeps local blocks",
}


def refuse_unknown(names: Iterable[str], function: Callable[..., Any]) -> NoReturn:
    """Raise for unknown keyword arguments, and name the ones to use instead."""
    arguments.refuse_unknown(names, _ELSEWHERE, function)


def check_qkv(q: Tensor, k: Tensor, v: Tensor, ndim: int, paged: bool = False) -> None:
    """Check q, k and v: 4 dimensions if all sequences have one length, 3 if packed."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
    if q.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"q must be torch.float16, torch.bfloat16 or torch.float32, got {q.dtype}; "
            "the reference takes torch.float64"
        )
    check_kinds(q, k, v)
    _check_forms(q, k, v, ndim, paged)
    for name, x in (("q", q), ("v", v)):
        if not 1 <= x.shape[-1] <= MAX_HEAD_DIM:
            raise ValueError(
                f"head_dim of {name} must be from 1 to {MAX_HEAD_DIM}, got {x.shape[-1]}"
            )
    _check_heads(q, k)
    if ndim == 4:
        warn_of_heads_first(q, k)


def check_reference(q: Tensor, k: Tensor, v: Tensor, ndim: int, paged: bool = False) -> None:
    """Check q, k and v of the reference: any float dtype, any head dimension."""
    check_floats(q, k, v)
    check_width(q, k=k, v=v)
    _check_forms(q, k, v, ndim, paged)
    _check_heads(q, k)


def check_dimensions(q: Tensor, k: Tensor, paged: bool) -> None:
    """Check how many dimensions packed queries and keys have."""
    form_q, form_k = _FORMS[3]
    forms = ("q", q, 3, form_q), ("k", k, 3 + paged, _PAGED_FORM if paged else form_k)
    for name, x, ndim, form in forms:
        if x.ndim != ndim:
            raise ValueError(f"{name} must be {form}, got {list(x.shape)}")


def check_values(x: Tensors, bounds: Bounds) -> None:
    """Check the values of offsets and page numbers; this waits for a GPU."""
    if x.cu_seqlens_q is None or x.cu_seqlens_k is None:
        return
    longest_q, longest_k = bounds
    starts_q, starts = x.cu_seqlens_q.tolist(), x.cu_seqlens_k.tolist()
    check_offset_values("cu_seqlens_q", starts_q, x.q.shape[0], "max_seqlen_q", longest_q)
    tokens = x.k.shape[0] if x.block_table is None else max(starts)
    check_offset_values("cu_seqlens_k", starts, tokens, "max_seqlen_k", longest_k)
    if x.block_table is None:
        return
    pages, page_size = x.k.shape[:2]
    for b, row in enumerate(x.block_table.tolist()):
        used = -(-(starts[b + 1] - starts[b]) // page_size)
        for i, page in enumerate(row[:used]):
            if not 0 <= page < pages:
                raise ValueError(
                    f"block_table[{b}, {i}] must be from 0 to {pages - 1}, a page, got {page}"
                )


def check_block_table(q: Tensor, k: Tensor, v: Tensor, batch: int, block_table: Tensor) -> None:
    """Check ``block_table``, except the number of pages."""
    check_indices("block_table", block_table)
    check_device("block_table", block_table, q)
    if block_table.ndim != 2 or block_table.shape[0] != batch:
        raise ValueError(
            f"block_table must be [batch, max_pages] with batch {batch}, "
            f"got {list(block_table.shape)}"
        )
    page = k.shape[1]
    if page < 1:
        raise ValueError(f"page_size of k must be at least 1, got {page}")
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise NotImplementedError(
            "block_table has no gradient: q, k and v must not require one with paged keys and "
            "values, got requires_grad=True; train on packed k and v, without block_table"
        )


def check_is_layout(layout: Any) -> None:
    if not isinstance(layout, BlockSparseLayout):
        hint = ""
        if isinstance(layout, torch.Tensor):
            hint = "; BlockSparseLayout.from_dense(mask, block_size) makes one of a mask of blocks"
        raise TypeError(f"layout must be a BlockSparseLayout, got {kind(layout)}{hint}")


def check_layout(layout: BlockSparseLayout, q: Tensor, k: Tensor, batch: int) -> None:
    """Check that a layout fits the heads, sequences and device of a call."""
    check_is_layout(layout)
    if layout.device != q.device:
        raise ValueError(
            f"layout must be on the device of q, {q.device}, got {layout.device}; "
            "layout.to(device) moves it"
        )
    heads_q, heads_k, heads = q.shape[-2], k.shape[-2], layout.num_heads
    # not ``in``: under torch.compile, ``in`` does not find a number in a tuple of symbols
    if heads != 1 and heads != heads_q and heads != heads_k:
        raise ValueError(
            f"heads of layout must be 1 or those of q, {heads_q}, or of k, {heads_k}, got {heads}"
        )
    if layout.batch is not None and layout.batch != batch:
        raise ValueError(f"batch of layout must be that of q, {batch}, got {layout.batch}")
    rule = layout._rule
    if rule is not None and rule.shape[0] != 1 and rule.shape[0] != batch:
        raise ValueError(
            f"batch of the layout's token_rule must be 1 or that of q, {batch}, got {len(rule)}"
        )
    layout._check_values()


def check_cover(
    num_rows: int,
    side: int,
    k: Tensor,
    bounds: Bounds,
    top_left: bool,
    block_table: Tensor | None = None,
) -> None:
    """Check that the layout's rows cover all positions of queries, and the pages all keys.

    A trace checks no symbols: the operators check the numbers.
    """
    longest_q, longest_k = bounds
    what, needed = ("queries", longest_q) if top_left else ("keys", longest_k)
    if not is_symbol(needed) and needed > num_rows * side:
        raise ValueError(
            f"layout must cover the {what}, {needed}, with its rows, got {num_rows} "
            f"rows of {side}: {cdiv(needed, side)} are needed"
        )
    if block_table is not None:
        check_pages(k, longest_k, block_table)


def check_pages(k: Tensor, max_seqlen_k: int, block_table: Tensor) -> None:
    """Check that ``block_table`` has enough pages for the longest sequence."""
    if not is_symbol(max_seqlen_k) and block_table.shape[1] * k.shape[1] < max_seqlen_k:
        raise ValueError(
            f"block_table must hold max_seqlen_k, {max_seqlen_k}, in pages of {k.shape[1]}, "
            f"got {block_table.shape[1]} pages"
        )


def check_options(
    q: Tensor,
    softmax_scale: float | None,
    causal: bool,
    num_splits: int,
    return_lse: bool,
    align: str,
) -> Options:
    """Check the arguments that are not tensors; return them as the operators take them."""
    check_flag("causal", causal)
    check_flag("return_lse", return_lse)
    if not is_int(num_splits):
        raise TypeError(f"num_splits must be an int, got {kind(num_splits)}")
    if not 0 <= num_splits <= MAX_SPLITS:
        raise ValueError(f"num_splits must be from 0 to {MAX_SPLITS}, got {shown(num_splits)}")
    top_left = is_top_left(align)
    if softmax_scale is None:
        return Options(float(q.shape[-1] ** -0.5), bool(causal), num_splits, top_left)
    return Options(check_scale("softmax_scale", softmax_scale), bool(causal), num_splits, top_left)


def _check_forms(q: Tensor, k: Tensor, v: Tensor, ndim: int, paged: bool) -> None:
    form_q, form_k = _FORMS[ndim]
    ndim_k, form_k = (4, _PAGED_FORM) if paged else (ndim, form_k)
    for name, x, want, form in (
        ("q", q, ndim, form_q),
        ("k", k, ndim_k, form_k),
        ("v", v, ndim_k, form_k),
    ):
        if x.ndim != want:
            hint = _OTHERS.get((want, x.ndim), "") if name == "q" else ""
            raise ValueError(f"{name} must be {form}, got {list(x.shape)}{hint}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"head_dim of k must be that of q, {q.shape[-1]}, got {k.shape[-1]}")
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(
            f"v must have the shape of k but for head_dim, {list(k.shape[:-1])}, "
            f"got {list(v.shape[:-1])}"
        )


def _check_heads(q: Tensor, k: Tensor) -> None:
    if q.ndim == 4 and k.shape[0] != q.shape[0]:
        raise ValueError(f"batch of k must be that of q, {q.shape[0]}, got {k.shape[0]}")
    check_groups(q.shape[-2], k.shape[-2])
