"""The two main public functions: check the arguments, then call the operator."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor

from ._attention import checks, ops, tiles
from ._attention.call import Bounds, Tensors
from ._attention.tiles import SHORT
from ._layout.checks import is_top_left
from ._layout.kept_lists import stream_of
from ._linked.host import arguments
from ._linked.host.arguments import as_int32, check_flag
from ._linked.host.forms import form_of
from ._linked.host.results import returns_lse
from .layout import BlockSparseLayout


@returns_lse
def blocksparse_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockSparseLayout,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    num_splits: int = 0,
    return_lse: bool = False,
    align: str = "bottom-right",
    deterministic: bool = False,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention over the kept blocks of a layout, forward and backward.

    Query i stands at the position ``i' = i + seqlen_k - seqlen_q``. It sees key j iff the layout
    keeps the block ``(i' // block_size[0], j // block_size[1])`` of its head and, with ``causal``,
    ``j <= i'``. The output is the softmax of ``softmax_scale * q_i . k_j`` over the keys that it
    sees, times ``v_j``. In both passes the work is proportional to the kept blocks (FlashAttention:
    Dao et al. 2022, Dao 2023).

    Args:
        q: queries, ``[batch, seqlen_q, heads_q, head_dim]``; fp16, bf16 or fp32. ``head_dim`` is
            from 1 to 256. All strides are supported.
        k: keys, ``[batch, seqlen_k, heads_k, head_dim]``, dtype of ``q``. ``heads_q`` is a multiple
            of ``heads_k``: query head h reads KV head ``h // (heads_q // heads_k)``.
        v: values, ``[batch, seqlen_k, heads_k, head_dim_v]``, dtype of ``q``; ``head_dim_v`` is
            from 1 to 256.
        layout: the kept blocks, on the device of ``q``, with ``heads_q``, ``heads_k`` or 1 heads.
            Its rows must cover ``seqlen_k`` positions.
        softmax_scale: factor of the scores, any number that is finite in fp32.
            Default: ``head_dim ** -0.5``.
        causal: hide keys after the query's position. Default: True.
        num_splits: number of programs over which the keys of a few queries (at most 8 per
            sequence) are split. 0 decides by the load; with any fixed number, the result of a
            sequence does not depend on its batch. Default: 0.
        return_lse: return ``(out, lse)``. Default: False.
        align: position of the queries. "bottom-right": the last query at the last key. "top-left":
            query i at the position ``i' = i``, for cross attention and other layouts whose rows and
            columns are not of one sequence; the rows of the layout must then cover ``seqlen_q``
            positions. Default: "bottom-right".
        deterministic: make gradients repeat bit for bit. On Hopper they may otherwise be summed in
            the order in which programs arrive; elsewhere they always repeat.
            ``torch.use_deterministic_algorithms(True)`` has the same effect. Default: False.

    Returns:
        ``out``, ``[batch, seqlen_q, heads_q, head_dim_v]``; or ``(out, lse)``, where ``lse`` is the
        natural logarithm of the denominator, fp32 ``[batch, heads_q, seqlen_q]``, differentiable. A
        query that sees no key has output 0 and lse -inf.

    Raises:
        TypeError: if an argument has a wrong type or dtype.
        ValueError: if a shape, a device or a range is wrong.
        NotImplementedError: on forward-mode differentiation.
    """
    if unknown:
        checks.refuse_unknown(unknown, blocksparse_attn_func)
    checks.check_is_layout(layout)
    must_repeat = deterministic, tiles.repeats()
    form = form_of(
        (q, k, v),
        (),
        (softmax_scale, causal, num_splits, return_lse, align, must_repeat, stream_of(q)),
        packed=False,
    )
    x = Tensors(q, k, v, rule=layout._rule)
    known = None if form is None else layout._calls.get(form)
    if known is None:
        checks.check_qkv(q, k, v, 4)
        is_causal = layout._causal_of(causal)
        options = checks.check_options(q, softmax_scale, is_causal, num_splits, return_lse, align)
        check_flag("deterministic", deterministic)
        checks.check_layout(layout, q, k, q.shape[0])
    bounds = Bounds(q.shape[1], k.shape[1])
    if known is None:
        rows = layout.num_rows, layout.block_size[0]
        checks.check_cover(*rows, k, bounds, options.top_left)
        known = ops.checked(x, layout, bounds, options, form, any(must_repeat))
    out, lse = ops.attention(x, layout._for_heads(q.shape[-2]), bounds, known)
    return (out, lse) if return_lse else out


@returns_lse
def blocksparse_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    layout: BlockSparseLayout,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    num_splits: int = 0,
    return_lse: bool = False,
    block_table: Tensor | None = None,
    align: str = "bottom-right",
    deterministic: bool = False,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """Block-sparse attention over packed sequences: prefill, chunks and decode in one batch.

    The formula, and the arguments that are not listed here, are those of
    :func:`blocksparse_attn_func`, with the lengths of each sequence as ``seqlen_q`` and
    ``seqlen_k``.

    Args:
        q: queries, ``[tokens_q, heads_q, head_dim]``: sequence b is the rows
            ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1] - 1``. Rows of no sequence are padding:
            their output is 0, their lse -inf and their gradient 0.
        k: keys, ``[tokens_k, heads_k, head_dim]``; paged ``[pages, page_size, heads_k, head_dim]``.
        v: values, ``[tokens_k, heads_k, head_dim_v]``; paged
            ``[pages, page_size, heads_k, head_dim_v]``.
        cu_seqlens_q: offsets of the sequences in ``q``, int32 ``[batch + 1]``, contiguous; int64 is
            converted. On a GPU the caller must ensure that its values are right: the host does not
            read them. :func:`validate_varlen` checks them.
        cu_seqlens_k: offsets of the sequences in ``k``, in the same form; with a ``block_table``
            only their differences matter.
        max_seqlen_q: upper bound of the number of queries per sequence: an int, or what
            ``operator.index`` takes, such as a tensor without dimensions, which waits for a GPU.
        max_seqlen_k: upper bound of the number of keys per sequence; the layout's rows must cover
            it.
        layout: the kept blocks; its rows are positions within a sequence.
        block_table: page numbers of each sequence, int32 or int64 ``[batch, max_pages]``: key j is
            in page ``block_table[b, j // page_size]``, at ``j % page_size``. Not differentiable.
            Default: None (``k`` and ``v`` are packed).

    Returns:
        ``out``, ``[tokens_q, heads_q, head_dim_v]``; or ``(out, lse)`` with ``lse`` fp32
        ``[heads_q, tokens_q]``.

    Raises:
        TypeError: if an argument has a wrong type or dtype.
        ValueError: if a shape, a device or a range is wrong.
        NotImplementedError: on a gradient with ``block_table``; on forward-mode differentiation.
    """
    if unknown:
        checks.refuse_unknown(unknown, blocksparse_attn_varlen_func)
    cu_seqlens_q, cu_seqlens_k = as_int32(cu_seqlens_q), as_int32(cu_seqlens_k)
    checks.check_is_layout(layout)
    max_seqlen_q = arguments.as_length("max_seqlen_q", max_seqlen_q)
    max_seqlen_k = arguments.as_length("max_seqlen_k", max_seqlen_k)
    bounds = Bounds(max_seqlen_q, max_seqlen_k)
    # the tiles depend on max_seqlen_q only up to SHORT + 1
    longest = SHORT + 1
    if not arguments.is_symbol(max_seqlen_q):
        longest = min(longest, max_seqlen_q)
    must_repeat = deterministic, tiles.repeats()
    form = form_of(
        (q, k, v),
        (cu_seqlens_q, cu_seqlens_k, block_table),
        (softmax_scale, causal, num_splits, return_lse, align, must_repeat, stream_of(q), longest),
        packed=True,
    )
    if form is not None and k.shape[:1] != v.shape[:1]:
        form = None
    x = Tensors(q, k, v, cu_seqlens_q, cu_seqlens_k, block_table, layout._rule)
    known = None if form is None else layout._calls.get(form)
    if known is None:
        if block_table is not None:
            arguments.check_tensor("block_table", block_table)
        checks.check_qkv(q, k, v, 3, paged=block_table is not None)
        is_causal = layout._causal_of(causal)
        options = checks.check_options(q, softmax_scale, is_causal, num_splits, return_lse, align)
        check_flag("deterministic", deterministic)
        batch = arguments.check_cu_seqlens(cu_seqlens_q, cu_seqlens_k, q)
        if block_table is not None:
            checks.check_block_table(q, k, v, batch, block_table)
        checks.check_layout(layout, q, k, batch)
    top_left = is_top_left(align)
    rows = layout.num_rows, layout.block_size[0]
    checks.check_cover(*rows, k, bounds, top_left, block_table)
    if known is None:
        known = ops.checked(x, layout, bounds, options, form, any(must_repeat))
    out, lse = ops.attention(x, layout._for_heads(q.shape[-2]), bounds, known)
    return (out, lse) if return_lse else out
