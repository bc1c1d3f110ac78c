"""Operator schemas, their fakes and their CPU kernels, and the autograd function over them.

Importing this module imports torch, but neither triton nor the kernels. CUDA and HIP tensors run
the Triton kernels. CPU tensors run the eager code of :mod:`.reference`, or, in a process started
with ``TRITON_INTERPRET=1``, the Triton kernels in the interpreter.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch
from attn_common import cdiv, detect
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from ._configs import SHORT
from ._eager import Grads, attention_backward, attention_forward
from ._lists import Lists, ListSpec, key_lists, query_lists
from ._plans import spec_of
from .layout import BlockSparseLayout

_LAYOUT = "Tensor crow, Tensor col, SymInt cols, int block_q, int block_k, bool rows_alike"
_OPTIONS = "SymInt max_seqlen_q, SymInt max_seqlen_k, float softmax_scale, bool causal"

torch.library.define(
    "blocksparse_attn::plan",
    f"({_LAYOUT}, SymInt group, SymInt head_dim, int itemsize, bool causal, str kind) "
    "-> (Tensor begin, Tensor whole, Tensor items, Tensor members)",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.define(
    "blocksparse_attn::forward",
    "(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    f"Tensor? block_table, Tensor[] tall, Tensor[] short, {_LAYOUT}, SymInt max_row, {_OPTIONS}, "
    "int num_splits) -> (Tensor out, Tensor lse)",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.define(
    "blocksparse_attn::backward",
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor[] by_query, Tensor[] by_key, "
    f"{_LAYOUT}, {_OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv)",
    tags=torch.Tag.pt2_compliant_tag,
)


# Triton decides at its import; dynamo traces a constant, and no cached function
_INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on")


def interpreted() -> bool:
    """Return whether this process interprets Triton kernels."""
    return _INTERPRETED


def walks_lists(device: torch.device) -> bool:
    """Return whether attention on a device runs kernels, which walk lists."""
    return device.type == "cuda" or (device.type == "cpu" and _INTERPRETED)


# ---- plans


def _spec(
    crow: Tensor,
    block_q: int,
    rows_alike: bool,
    group: int,
    head_dim: int,
    itemsize: int,
    causal: bool,
    kind: str,
) -> ListSpec:
    platform = detect(crow.device)
    is_shared = bool(crow.shape[0] == 1)
    return spec_of(
        kind, platform, int(head_dim), itemsize, block_q, int(group), is_shared, rows_alike, causal
    )


def _plan(
    crow: Tensor, col: Tensor, cols: int, block_q: int, block_k: int, rows_alike: bool, *rest: Any
) -> Lists:
    spec = _spec(crow, block_q, rows_alike, *rest)
    return _lists(crow, col, cols, (block_q, block_k), spec)


def _lists(
    crow: Tensor, col: Tensor, cols: int, block_size: tuple[int, int], spec: ListSpec
) -> Lists:
    if spec.by_key:
        return key_lists(crow, col, cols, block_size, spec.span, spec.group, spec.causal)
    return query_lists(crow, col, cols, block_size, spec.span, spec.group, spec.pack, spec.causal)


def _plan_fake(
    crow: Tensor, col: Tensor, cols: int, block_q: int, block_k: int, rows_alike: bool, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    spec = _spec(crow, block_q, rows_alike, *rest)
    heads, rows = crow.shape[0], crow.shape[1] - 1
    blocks, side = (cols, block_k) if spec.by_key else (rows, block_q)
    lists = cdiv(heads, spec.group) * (1 if spec.by_key else cdiv(spec.group, spec.pack))
    owners = lists * max(cdiv(blocks, max(spec.span // side, 1)), 1)
    bound = col.shape[0] * col.shape[1] + 1
    return (
        crow.new_empty((owners + 1,), dtype=torch.int64),
        crow.new_empty((owners,), dtype=torch.int64),
        crow.new_empty((bound,), dtype=torch.int32),
        crow.new_empty((bound,), dtype=torch.int32),
    )


def lists_for(
    layout: BlockSparseLayout, kind: str, group: int, head_dim: int, itemsize: int, causal: bool
) -> tuple[Tensor, ...]:
    """Return the lists that a kernel walks; made at the first call, and kept with the layout."""
    key = (kind, group, head_dim, itemsize, causal)
    plans = layout._plans
    if key in plans:
        return plans[key]
    rest = layout._block_size[0], layout._rows_alike, *key[1:], kind
    if torch.compiler.is_compiling():
        # tracing must not keep what it makes
        result: tuple[Tensor, ...] = torch.ops.blocksparse_attn.plan.default(
            layout._crow, layout._col, layout._num_cols, *layout._block_size, layout._rows_alike,
            *key[1:], kind,
        )  # fmt: skip
        return result
    spec = _spec(layout._crow, *rest)
    if spec not in plans:
        plans[spec] = _lists(
            layout._crow, layout._col, layout._num_cols, layout._block_size, spec
        )  # fmt: skip
    plans[key] = plans[spec]
    return plans[key]


# ---- attention


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse_shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    return out, q.new_empty(lse_shape, dtype=torch.float32)


def _backward_fake(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Grads:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _forward_triton(*arguments: Any) -> tuple[Tensor, Tensor]:
    from ._kernels.forward import launch_forward

    result: tuple[Tensor, Tensor] = launch_forward(*arguments)  # type: ignore[no-untyped-call]
    return result


def _backward_triton(*arguments: Any) -> Grads:
    from ._kernels.backward import launch_backward

    result: Grads = launch_backward(*arguments)  # type: ignore[no-untyped-call]
    return result


def _forward_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    block_table: Tensor | None,
    tall: Sequence[Tensor],
    short: Sequence[Tensor],
    crow: Tensor,
    col: Tensor,
    cols: int,
    block_q: int,
    block_k: int,
    rows_alike: bool,
    max_row: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    num_splits: int,
) -> tuple[Tensor, Tensor]:
    if interpreted():
        return _forward_triton(
            q, k, v, cu_seqlens_q, cu_seqlens_k, block_table, tall, short, crow, col, cols,
            block_q, block_k, rows_alike, max_row, max_seqlen_q, max_seqlen_k, softmax_scale,
            causal, num_splits,
        )  # fmt: skip
    return attention_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, block_table, crow, col, cols, (block_q, block_k),
        softmax_scale, causal,
    )  # fmt: skip


def _backward_cpu(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    by_query: Sequence[Tensor],
    by_key: Sequence[Tensor],
    crow: Tensor,
    col: Tensor,
    cols: int,
    block_q: int,
    block_k: int,
    rows_alike: bool,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
) -> Grads:
    if interpreted():
        return _backward_triton(
            dout, q, k, v, out, lse, dlse, cu_seqlens_q, cu_seqlens_k, by_query, by_key, crow, col,
            cols, block_q, block_k, rows_alike, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
        )  # fmt: skip
    return attention_backward(
        dout, q, k, v, lse, dlse, cu_seqlens_q, cu_seqlens_k, crow, col, cols, (block_q, block_k),
        softmax_scale, causal,
    )  # fmt: skip


torch.library.register_fake("blocksparse_attn::plan", _plan_fake)
torch.library.register_fake("blocksparse_attn::forward", _forward_fake)
torch.library.register_fake("blocksparse_attn::backward", _backward_fake)
torch.library.impl("blocksparse_attn::plan", "cuda", _plan)
torch.library.impl("blocksparse_attn::plan", "cpu", _plan)
torch.library.impl("blocksparse_attn::forward", "cuda", _forward_triton)
torch.library.impl("blocksparse_attn::backward", "cuda", _backward_triton)
torch.library.impl("blocksparse_attn::forward", "cpu", _forward_cpu)
torch.library.impl("blocksparse_attn::backward", "cpu", _backward_cpu)

plan = torch.ops.blocksparse_attn.plan.default
forward = torch.ops.blocksparse_attn.forward.default
backward = torch.ops.blocksparse_attn.backward.default


class _BlockSparseAttention(torch.autograd.Function):
    """The forward operator, with the backward operator as its derivative."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        crow: Tensor,
        col: Tensor,
        shape: tuple[Any, ...],
        options: tuple[Any, ...],
        max_row: int,
        num_splits: int,
        counts: tuple[int, ...],
        *lists: Tensor,
    ) -> tuple[Tensor, Tensor]:
        tall, short, by_query, by_key = _parted(lists, counts)
        out, lse = forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, None, tall, short, crow, col, *shape, max_row,
            *options, num_splits,
        )  # fmt: skip
        ctx.save_for_backward(
            q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, crow, col, *by_query, *by_key
        )
        ctx.shape, ctx.options = shape, options
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, crow, col, *lists = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        by_query, by_key = lists[: len(lists) // 2], lists[len(lists) // 2 :]
        dq, dk, dv = backward(
            dout, q, k, v, out, lse, dlse, cu_seqlens_q, cu_seqlens_k, by_query, by_key, crow, col,
            *ctx.shape, *ctx.options,
        )  # fmt: skip
        return dq, dk, dv, *[None] * (len(ctx.needs_input_grad) - 3)


def _parted(lists: tuple[Tensor, ...], counts: tuple[int, ...]) -> list[list[Tensor]]:
    parts, start = [], 0
    for count in counts:
        parts.append(list(lists[start : start + count]))
        start += count
    return parts


def _has_tangent(x: Tensor) -> bool:
    """Say whether a tensor has a tangent, at any level of torch.func's transforms."""
    functorch = torch._C._functorch
    unpack_dual: Any = forward_ad.unpack_dual
    while True:
        # unpacking has no batching rule
        batched = functorch.is_batchedtensor(x)
        if not batched and unpack_dual(x).tangent is not None:
            return True
        if not (batched or functorch.is_gradtrackingtensor(x)):
            return False
        x = functorch.get_unwrapped(x)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    block_table: Tensor | None,
    layout: BlockSparseLayout,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    num_splits: int,
) -> tuple[Tensor, Tensor]:
    """Call the forward operator, through the autograd function where a gradient is asked for."""
    if forward_ad._current_level >= 0:
        # an operator without a formula for them would drop the tangents in silence
        for x in (q, k, v):
            if _has_tangent(x):
                raise NotImplementedError(
                    "forward-mode differentiation (torch.func.jvp, jacfwd, forward_ad) is not "
                    "offered, got an input with a tangent"
                )
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    tall: tuple[Tensor, ...] = ()
    short: tuple[Tensor, ...] = ()
    by_query: tuple[Tensor, ...] = ()
    by_key: tuple[Tensor, ...] = ()
    if walks_lists(q.device):
        group = q.shape[-2] // k.shape[-2]
        kind = group, max(q.shape[-1], v.shape[-1]), q.element_size(), causal
        if max_seqlen_q > SHORT:
            tall = lists_for(layout, "tall", *kind)
        if max_seqlen_q <= SHORT or cu_seqlens_q is not None:
            short = lists_for(layout, "short", *kind)
        if needs_grad:
            by_query = lists_for(layout, "dq", *kind)
            by_key = lists_for(layout, "dkdv", *kind)
    crow, col = layout._crow, layout._col
    shape = (layout._num_cols, *layout._block_size, layout._rows_alike)
    options = max_seqlen_q, max_seqlen_k, softmax_scale, causal
    if needs_grad:
        if torch.compiler.is_compiling():
            # dynamo refuses one tensor as two inputs of an autograd function
            k = k.view_as(k) if k is q else k
            v = v.view_as(v) if v is q or v is k else v
            if cu_seqlens_q is not None and cu_seqlens_q is cu_seqlens_k:
                cu_seqlens_k = cu_seqlens_k.view_as(cu_seqlens_k)
            # passes whose tiles agree share their lists
            by_query = tuple(x.view_as(x) for x in by_query)
        counts = len(tall), len(short), len(by_query), len(by_key)
        result: tuple[Tensor, Tensor] = _BlockSparseAttention.apply(  # type: ignore[no-untyped-call]
            q, k, v, cu_seqlens_q, cu_seqlens_k, crow, col, shape, options, layout._max_row,
            num_splits, counts, *tall, *short, *by_query, *by_key,
        )  # fmt: skip
        return result
    return forward(  # type: ignore[no-any-return]
        q, k, v, cu_seqlens_q, cu_seqlens_k, block_table, list(tall), list(short), crow, col,
        *shape, layout._max_row, *options, num_splits,
    )  # fmt: skip
