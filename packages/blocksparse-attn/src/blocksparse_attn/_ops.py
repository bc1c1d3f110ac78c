"""Operator schemas, their fakes and their CPU kernels, and the autograd function over them.

Importing this module imports torch, but neither triton nor the kernels. CUDA and HIP tensors run
the Triton kernels. CPU tensors run the eager code of :mod:`.reference`, or, in a process started
with ``TRITON_INTERPRET=1``, the Triton kernels in the interpreter.
"""

from collections.abc import Sequence
from typing import Any

import torch
from attn_common import cdiv, detect
from torch import Tensor

from ._call import Bounds, Checked, Options, Pattern, Tensors, Walks
from ._checks import check_values
from ._configs import SHORT, may_end_early, takes_hopper_backward, walks_whole_blocks
from ._eager import Grads, attention_backward, attention_forward
from ._kept_lists import NAMESPACE, lists_for, make_lists, spec_of, walks_lists
from ._linked.host.internals import refuse_tangents
from ._linked.host.operators import (
    may_skip_operator,
    no_second_derivative,
    register,
    without_repeats,
)
from ._lists import ListSpec
from ._pairs import sizes_of
from ._pieces import SIDE, piece_of
from .layout import BlockSparseLayout

__all__ = ["attention", "backward", "checked", "forward", "plan"]

_LAYOUT = "Tensor crow, Tensor col, SymInt cols, int block_q, int block_k, bool rows_alike"
_OPTIONS = "SymInt max_seqlen_q, SymInt max_seqlen_k, float softmax_scale, bool causal"


def _spec(
    crow: Tensor,
    block_q: int,
    block_k: int,
    rows_alike: bool,
    group: int,
    head_dim: int,
    itemsize: int,
    causal: bool,
    kind: str,
) -> ListSpec:
    platform = detect(crow.device)
    is_shared = bool(crow.shape[-2] == 1)
    return spec_of(
        kind,
        platform,
        int(head_dim),
        itemsize,
        block_q,
        block_k,
        int(group),
        is_shared,
        rows_alike,
        causal,
    )


def _plan(
    crow: Tensor, col: Tensor, cols: int, block_q: int, block_k: int, rows_alike: bool, *rest: Any
) -> list[Tensor]:
    spec = _spec(crow, block_q, block_k, rows_alike, *rest)
    crow, col = crow.flatten(0, -2), col.flatten(0, -2)
    return list(make_lists(crow, col, cols, (block_q, block_k), spec))


def _plan_fake(
    crow: Tensor, col: Tensor, cols: int, block_q: int, block_k: int, rows_alike: bool, *rest: Any
) -> list[Tensor]:
    spec = _spec(crow, block_q, block_k, rows_alike, *rest)
    crow, col = crow.flatten(0, -2), col.flatten(0, -2)
    if spec.paired:
        return _pairs_fake(crow, col, cols, (block_q, block_k), spec)
    heads, rows = crow.shape[0], crow.shape[1] - 1
    blocks, side = (cols, block_k) if spec.by_key else (rows, block_q)
    lists = cdiv(heads, spec.group) * (1 if spec.by_key else cdiv(spec.group, spec.pack))
    owners = lists * max(cdiv(blocks, max(spec.span // side, 1)), 1)
    bound = col.shape[0] * col.shape[1] + 1
    return [
        crow.new_empty((owners + 1,), dtype=torch.int64),
        crow.new_empty((owners,), dtype=torch.int64),
        crow.new_empty((bound,), dtype=torch.int32),
        crow.new_empty((bound,), dtype=torch.int32),
    ]


def _pairs_fake(
    crow: Tensor, col: Tensor, cols: int, block_size: tuple[int, int], spec: ListSpec
) -> list[Tensor]:
    heads, nnz = col.shape
    pieces, programs, entries = sizes_of(heads, nnz, cols, block_size, spec.group, spec.pack)
    return [
        crow.new_empty((4 * programs + 1,), dtype=torch.int64),
        crow.new_empty((pieces,), dtype=torch.int64),
        crow.new_empty((entries + 1,), dtype=torch.int32),
        crow.new_empty((programs, 1 + 2 * SIDE // piece_of(block_size)), dtype=torch.int32),
        crow.new_empty((1,), dtype=torch.int32),
        crow.new_empty((entries + 1,), dtype=torch.int32),
    ]


# ---- attention


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse_shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    return out, q.new_empty(lse_shape, dtype=torch.float32)


def _backward_fake(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Grads:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _forward_triton(*arguments: Any) -> tuple[Tensor, Tensor]:
    from ._kernels.plans import launch_forward

    result: tuple[Tensor, Tensor] = launch_forward(*arguments)  # type: ignore[no-untyped-call]
    return result


def _backward_triton(*arguments: Any) -> Grads:
    from ._kernels.plans import launch_backward

    result: Grads = launch_backward(*arguments)  # type: ignore[no-untyped-call]
    return result


def _check_values(x: Tensors, bounds: Bounds) -> None:
    """Check what packed tensors on the CPU hold; a trace does not come here."""
    if x.cu_seqlens_q is not None and x.cu_seqlens_k is not None:
        check_values(x.q, x.k, x.cu_seqlens_q, x.cu_seqlens_k, *bounds, x.block_table)


def _check_forward(*arguments: Any) -> None:
    *rest, max_seqlen_q, max_seqlen_k, _, _, _, _ = arguments
    _check_values(Tensors(*rest[: len(Tensors._fields)]), Bounds(max_seqlen_q, max_seqlen_k))


def _forward_eager(
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
    top_left: bool,
) -> tuple[Tensor, Tensor]:
    return attention_forward(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        block_table,
        crow,
        col,
        cols,
        (block_q, block_k),
        softmax_scale,
        causal,
        top_left,
    )


def _backward_eager(
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
    pairs: Sequence[Tensor],
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
    top_left: bool,
) -> Grads:
    return attention_backward(
        dout,
        q,
        k,
        v,
        lse,
        dlse,
        cu_seqlens_q,
        cu_seqlens_k,
        crow,
        col,
        cols,
        (block_q, block_k),
        softmax_scale,
        causal,
        top_left,
    )


plan = register(
    f"{NAMESPACE}::plan",
    f"({_LAYOUT}, SymInt group, SymInt head_dim, int itemsize, bool causal, str kind) -> Tensor[]",
    fake=_plan_fake,
    kernels=_plan,
    eager=_plan,
)
forward = register(
    f"{NAMESPACE}::forward",
    "(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    f"Tensor? block_table, Tensor[] tall, Tensor[] short, {_LAYOUT}, SymInt max_row, {_OPTIONS}, "
    "int num_splits, bool top_left) -> (Tensor out, Tensor lse)",
    fake=_forward_fake,
    kernels=_forward_triton,
    eager=_forward_eager,
    check=_check_forward,
)
backward = register(
    f"{NAMESPACE}::backward",
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor[] by_query, Tensor[] by_key, "
    f"Tensor[] pairs, {_LAYOUT}, {_OPTIONS}, bool top_left) -> (Tensor dq, Tensor dk, Tensor dv)",
    fake=_backward_fake,
    kernels=_backward_triton,
    eager=_backward_eager,
)
torch.library.register_autograd(
    backward.name(), no_second_derivative("blocksparse_attention_reference")
)


def checked(
    x: Tensors, layout: BlockSparseLayout, bounds: Bounds, options: Options, planned: bool
) -> Checked:
    """Return what serves calls of this form: lists, and if asked for how to launch them."""
    walks = _walks(x, layout, bounds, options)
    if not (planned and walks_lists(x.q.device)):
        return Checked(options, walks)
    from ._kernels.form import is_served_as_is
    from ._kernels.plans import Plan

    if not is_served_as_is(x):  # copies come first
        return Checked(options, walks)
    return Checked(options, walks, Plan(x, layout._pattern, options, is_kept=True))


def _walks(x: Tensors, layout: BlockSparseLayout, bounds: Bounds, options: Options) -> Walks:
    """Return the lists that a call's kernels walk."""
    if not walks_lists(x.q.device):
        return Walks()
    group = x.q.shape[-2] // x.k.shape[-2]
    kind = group, max(x.q.shape[-1], x.v.shape[-1]), x.q.element_size(), options.causal
    tall = "tall" if walks_whole_blocks(x, options) else "portable"
    is_tall = bounds.seqlen_q > SHORT
    is_short = not is_tall or x.cu_seqlens_q is not None
    may_pair = _needs_grad(x) and not may_end_early(options.causal, options.top_left)
    has_pairs = may_pair and takes_hopper_backward(x, layout._pattern)
    # which kernels serve a packed call depends on its lengths
    is_portable = _needs_grad(x) and (not has_pairs or x.cu_seqlens_q is not None)
    return Walks(
        lists_for(layout, tall, *kind) if is_tall else (),
        lists_for(layout, "short", *kind) if is_short else (),
        lists_for(layout, "dq", *kind) if is_portable else (),
        lists_for(layout, "dkdv", *kind) if is_portable else (),
        lists_for(layout, "pairs", *kind) if has_pairs else (),
    )


class _BlockSparseAttention(torch.autograd.Function):
    """The forward pass, with the backward pass as its derivative: planned, or by operators."""

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
        pattern: Pattern,
        bounds: Bounds,
        options: Options,
        planned: tuple[Any, Walks] | None,
        counts: tuple[int, ...],
        *lists: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Take what is planned, or else the lists one by one, and how many belong together."""
        if planned is None:
            tall, short, *others = _parted(lists, counts)
            out, lse = forward(
                q,
                k,
                v,
                cu_seqlens_q,
                cu_seqlens_k,
                None,
                tall,
                short,
                crow,
                col,
                *pattern[2:7],
                *bounds,
                *options,
            )
        else:
            others = []
            plan, walks = planned
            out, lse = plan.forward(Tensors(q, k, v, cu_seqlens_q, cu_seqlens_k), walks, bounds)
        ctx.save_for_backward(
            q,
            k,
            v,
            out,
            lse,
            cu_seqlens_q,
            cu_seqlens_k,
            crow,
            col,
            *(one for walk in others for one in walk),
        )
        ctx.counts = tuple(map(len, others))
        ctx.pattern, ctx.bounds, ctx.options, ctx.planned = pattern, bounds, options, planned
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, crow, col, *lists = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        walked = _parted(tuple(lists), ctx.counts)
        nothing = (None,) * (len(ctx.needs_input_grad) - 3)
        if ctx.planned is not None:
            x = Tensors(q, k, v, cu_seqlens_q, cu_seqlens_k)
            plan, walks = ctx.planned
            if may_skip_operator(dout, dlse) and plan.fits(x):
                return *plan.backward(x, walks, out, lse, dout, dlse), *nothing
            walked = [list(walk) for walk in walks[2:]]
        dq, dk, dv = backward(
            dout,
            q,
            k,
            v,
            out,
            lse,
            dlse,
            cu_seqlens_q,
            cu_seqlens_k,
            *walked,
            crow,
            col,
            *ctx.pattern[2:6],
            *ctx.bounds,
            *ctx.options[:2],
            ctx.options.top_left,
        )
        return dq, dk, dv, *nothing


def _parted(lists: tuple[Tensor, ...], counts: tuple[int, ...]) -> list[list[Tensor]]:
    parts, start = [], 0
    for count in counts:
        parts.append(list(lists[start : start + count]))
        start += count
    return parts


def _needs_grad(x: Tensors) -> bool:
    return torch.is_grad_enabled() and (x.q.requires_grad or x.k.requires_grad or x.v.requires_grad)


def attention(
    x: Tensors, layout: BlockSparseLayout, bounds: Bounds, known: Checked
) -> tuple[Tensor, Tensor]:
    """Compute ``(out, lse)``, through the autograd function where a gradient is asked for."""
    refuse_tangents(x)
    walks, options, plan = known.walks, known.options, known.plan
    crow, col = map(layout._by_sequence, (layout._crow, layout._col))
    pattern = layout._pattern
    if plan is not None and x.q.is_cpu:
        _check_values(x, bounds)
    if _needs_grad(x):
        if plan is not None:
            return _BlockSparseAttention.apply(  # type: ignore[no-any-return, no-untyped-call]
                *x[:5], crow, col, pattern, bounds, options, (plan, walks), ()
            )
        if torch.compiler.is_compiling():
            x = without_repeats(x)
            # passes whose tiles agree share their lists
            by_query = tuple(one.view_as(one) for one in walks.by_query)
            walks = walks._replace(by_query=by_query)
        counts = tuple(map(len, walks))
        lists = (one for walk in walks for one in walk)
        return _BlockSparseAttention.apply(  # type: ignore[no-any-return, no-untyped-call]
            *x[:5], crow, col, pattern, bounds, options, None, counts, *lists
        )
    if plan is not None:
        return plan.forward(x, walks, bounds)
    return forward(  # type: ignore[no-any-return]
        *x, list(walks.tall), list(walks.short), crow, col, *pattern[2:7], *bounds, *options
    )
