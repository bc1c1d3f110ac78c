"""The structures that launches of both invariant kernels pass, filled from a call."""

from __future__ import annotations

import torch

from ..host.arguments import FP32_TINY, MAX_WINDOW
from ..host.tiles import padded_head_dim
from ..launch.kernels import Kernel
from ..launch.runtime import Launch, row_bytes, token_strides
from ..portable.strides import Strides
from .arguments import (
    LseStrides,
    MergeNumbers,
    MergeTile,
    Options,
    RowStrides,
    Scores,
    TableStrides,
)
from .call import Call, KeyForm

invariant_merge_kernel = Kernel(__package__, ".kernels", "invariant_merge_kernel")


def options_of(x: Call, scores: Scores, keys: KeyForm, piece: int = 0) -> Options:
    """Return the options of calls of a form."""
    return Options(
        GROUP=x.q.shape[-2] // keys.heads_k,
        HAS_LEFT=scores.window_left >= 0,
        HAS_RIGHT=scores.window_right >= 0,
        HAS_SOFTCAP=scores.softcap != 0.0,
        # a factor 0 would turn a hidden score, -inf, into NaN
        FOLD=scores.softcap == 0.0 and scores.scale >= FP32_TINY,
        DESCALE_NDIM=keys.descale_ndim,
        PAGE=keys.page,
        K_RUN=keys.k_run,
        K_BYTES=keys.k_bytes,
        V_BYTES=keys.v_bytes,
        ROW_BYTES=row_bytes(x.q),
        DECODE_FROM_CACHE=keys.decode_from_cache,
        PIECE=piece,
    )


def clamped(scores: Scores) -> Scores:
    """Return scores with windows whose sums with lengths fit 32 bits."""
    left, right = min(scores.window_left, MAX_WINDOW), min(scores.window_right, MAX_WINDOW)
    return scores._replace(window_left=left, window_right=right)


def new_strides(x: torch.Tensor | None) -> RowStrides:
    """Return the strides of new keys or values; zeros without them."""
    return RowStrides(0, 0) if x is None else RowStrides(*x.stride()[:2])


def table_strides(x: Call) -> TableStrides:
    """Return the strides of a call's page table; zeros without one."""
    table = x.block_table
    return TableStrides(0, 0) if table is None else TableStrides(*table.stride())


def merge_launch(head_dim_v: int, rows: int) -> Launch:
    """Return the launch that merges sums of segments, with so many rows per program."""
    tile = MergeTile(head_dim_v, padded_head_dim(head_dim_v), rows)
    kind = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}
    return Launch(invariant_merge_kernel, {"TILE": tile, **kind})


def merge_numbers(x: Call, batch: int, parts: int) -> MergeNumbers:
    """Return the numbers of a merge of a call's segments; log-sum-exps have no gaps."""
    tokens_q, heads_q = x.q.shape[-3:-1]
    per_sequence = heads_q * tokens_q
    is_packed = x.cu_seqlens_q is not None
    return MergeNumbers(
        batch=batch,
        heads_q=heads_q,
        tokens_q=tokens_q,
        rows=(1 if is_packed else batch) * per_sequence,
        parts=parts,
        out=Strides(*token_strides(x.out)),
        lse=LseStrides(0 if is_packed else per_sequence, tokens_q),
    )
