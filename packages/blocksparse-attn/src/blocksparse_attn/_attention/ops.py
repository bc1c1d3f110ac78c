"""The operators' schemas, fakes and CPU kernels, and the autograd functions.

Importing this module imports torch, but neither triton nor the kernels. CUDA and HIP tensors run
the Triton kernels. CPU tensors run the eager code of :mod:`.eager`, or, in a process started with
``TRITON_INTERPRET=1``, the Triton kernels in the interpreter.
"""

from collections.abc import Hashable
from itertools import islice
from typing import Any

import torch
from attn_common import detect
from torch import Tensor

from .._layout.checks import check_csr_values
from .._layout.kept_lists import (
    NAMESPACE,
    is_capturing,
    make_lists,
    spec_of,
    walks_lists,
)
from .._layout.lists import by_sequence, empty_lists
from .._linked.host.arguments import is_symbol
from .._linked.host.internals import is_transformed, refuse_tangents
from .._linked.host.operators import (
    differentiable,
    may_skip_operator,
    no_second_derivative,
    register,
    schema_of,
    structured,
    without_repeats,
)
from ..layout import BlockSparseLayout
from .call import (
    BackwardCall,
    BackwardWalks,
    Blocks,
    Bounds,
    Checked,
    Common,
    ForwardCall,
    ListForm,
    Options,
    Pattern,
    PlanCall,
    Tensors,
    Walks,
)
from .checks import check_cover, check_values
from .eager import Grads, attention_backward, attention_forward
from .tiles import (
    SHORT,
    has_short_rows,
    may_end_early,
    takes_hopper_backward,
    takes_hopper_forward,
    walks_whole_blocks,
)

__all__ = ["attention", "backward", "checked", "forward", "plan"]


def _made_of(call: PlanCall) -> Any:
    """Return the arguments of ``empty_lists``."""
    (crow, col, cols, block_q, block_k, rows_alike), form = call.blocks, call.form
    # int() and bool() turn symbols into numbers
    form = form._replace(group=int(form.group), head_dim=int(form.head_dim))
    heads, rows = crow.shape[-2], crow.shape[-1] - 1
    pattern = Pattern(bool(heads == 1), rows, int(cols), block_q, block_k, rows_alike, max_row=0)
    spec = spec_of(call.kind, detect(crow.device), pattern, form)
    return crow.flatten(0, -2), col.flatten(0, -2), cols, (block_q, block_k), spec


def _plan(*arguments: Any) -> list[Tensor]:
    call = structured(PlanCall, arguments)
    made_of = *_made_of(call), call.rule
    return list(make_lists(*made_of))


def _plan_fake(*arguments: Any) -> list[Tensor]:
    return list(empty_lists(*_made_of(structured(PlanCall, arguments))))


# ---- attention


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse_shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    return out, q.new_empty(lse_shape, dtype=torch.float32)


def _backward_fake(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Grads:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _forward_triton(*arguments: Any) -> tuple[Tensor, Tensor]:
    from .launch import launch_forward

    return launch_forward(_covered(arguments))


def _forward_eager(*arguments: Any) -> tuple[Tensor, Tensor]:
    call = structured(ForwardCall, arguments)
    return attention_forward(call.tensors, call.common)


def _check_forward(*arguments: Any) -> None:
    call = _covered(arguments)
    check_csr_values(*call.common.blocks[:3])
    check_values(call.tensors, call.common.bounds)


def _covered(arguments: Any) -> ForwardCall:
    """Return a call, whose lengths may have been symbols where it was traced."""
    call = structured(ForwardCall, arguments)
    x, common = call.tensors, call.common
    rows = common.pattern.rows, common.blocks.block_q
    check_cover(*rows, x.k, common.bounds, common.options.top_left, x.block_table)
    return call


def _backward_triton(*arguments: Any) -> Grads:
    from .launch import launch_backward

    call = structured(BackwardCall, arguments)
    if not (call.walks.by_key or call.walks.pairs):
        # the graph was exported without gradients
        call = call._replace(walks=BackwardWalks(_made(call, "dq"), _made(call, "dkdv")))
    return launch_backward(call)


def _made(call: BackwardCall, kind: str) -> list[Tensor]:
    """Make lists that are missing from a call."""
    common = call.common
    form = _form_of_lists(call.tensors, common.options.causal)
    return _plan(*common.blocks, *form, kind, common.rule)


def _form_of_lists(x: Tensors, causal: bool) -> ListForm:
    group = x.q.shape[-2] // x.k.shape[-2]
    return ListForm(group, max(x.q.shape[-1], x.v.shape[-1]), x.q.element_size(), causal)


def _backward_eager(*arguments: Any) -> Grads:
    call = structured(BackwardCall, arguments)
    return attention_backward(call.tensors, call.common, call.dout, call.lse, call.dlse)


plan = register(
    f"{NAMESPACE}::plan",
    f"({schema_of(PlanCall)}) -> Tensor[]",
    fake=_plan_fake,
    kernels=_plan,
    eager=_plan,
    check=lambda *x: check_csr_values(*structured(PlanCall, x).blocks[:3]),
)
forward = register(
    f"{NAMESPACE}::forward",
    f"({schema_of(ForwardCall)}) -> (Tensor out, Tensor lse)",
    fake=_forward_fake,
    kernels=_forward_triton,
    eager=_forward_eager,
    check=_check_forward,
)
backward = register(
    f"{NAMESPACE}::backward",
    f"({schema_of(BackwardCall)}) -> (Tensor dq, Tensor dk, Tensor dv)",
    fake=_backward_fake,
    kernels=_backward_triton,
    eager=_backward_eager,
)


def checked(
    x: Tensors,
    layout: BlockSparseLayout,
    bounds: Bounds,
    options: Options,
    form: Hashable | None,
    repeats: bool,
) -> Checked:
    """Return what all calls of a signature share, and keep it with the layout.

    ``form`` is the signature; if it is None, there is no plan and nothing is kept. ``repeats`` asks
    for gradients that repeat bit for bit.
    """
    layout = layout._for_heads(x.q.shape[-2])
    plan = None
    walks = _walks(x, layout, bounds, options, repeats)
    if form is None:
        return Checked(options, walks)
    if walks_lists(x.q.device):
        from .launch import Plan
        from .portable.form import is_served_as_is

        if is_served_as_is(x):  # other tensors have to be copied first, by the operator
            plan = Plan(x, layout._pattern, options, is_kept=True)
    known = Checked(options, walks, plan)
    return known if is_capturing(x.q.device) else layout._calls.keep(form, known)


def _walks(
    x: Tensors, layout: BlockSparseLayout, bounds: Bounds, options: Options, repeats: bool
) -> Walks:
    """Return the lists that a call's kernels walk."""
    if not walks_lists(x.q.device):
        return Walks()
    kind = _form_of_lists(x, options.causal)
    tall = "tall" if walks_whole_blocks(x, options) else "portable"
    is_packed = x.cu_seqlens_q is not None
    # with both lists the operator serves whatever a symbol turns out to be
    is_tall = (is_packed and is_symbol(bounds.max_seqlen_q)) or bounds.max_seqlen_q > SHORT
    is_short = not is_tall or is_packed
    may_pair = _needs_grad(x) and not may_end_early(options.causal, options.top_left)
    pattern = layout._pattern
    has_pairs = may_pair and takes_hopper_backward(x, pattern)
    # a dq launch of its own walks the forward's lists
    form = layout._col.shape[1], x.q.shape[-1], x.q.shape[-2] // x.k.shape[-2], x.q.device
    by_rows = has_pairs and (repeats or has_short_rows(pattern, *form))
    by_rows = by_rows and takes_hopper_forward(x, pattern, options)
    has_pairs = by_rows if repeats else has_pairs
    # the lengths of a packed call decide which backward runs, so it needs the lists of both
    is_portable = _needs_grad(x) and (not has_pairs or x.cu_seqlens_q is not None)
    named = ("pairs", "tall") if by_rows else ("pairs",) if has_pairs else ()
    backward = BackwardWalks(
        layout._lists.of("dq", kind) if is_portable else None,
        layout._lists.of("dkdv", kind) if is_portable else None,
        sum((layout._lists.of(name, kind) for name in named), ()) or None,
    )
    return Walks(
        layout._lists.of(tall, kind) if is_tall else None,
        layout._lists.of("short", kind) if is_short else None,
        backward,
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save what the derivative of the forward operator needs."""
    call = structured(ForwardCall, inputs)
    x, (crow, col, *_), rule = call.tensors, call.common.blocks, call.common.rule
    walks = [walk or () for walk in call.walks.backward]
    lists = [one for walk in walks for one in walk]
    offsets = x.cu_seqlens_q, x.cu_seqlens_k
    ctx.save_for_backward(x.q, x.k, x.v, *offsets, *output, rule, crow, col, *lists)
    ctx.counts = tuple(map(len, walks))
    blocks: Any = call.common.blocks
    ctx.common = call.common._replace(blocks=blocks._replace(crow=None, col=None), rule=None)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    """Return the gradients of the forward operator's arguments."""
    q, k, v, starts_q, starts_k, out, lse, rule, crow, col, *lists = ctx.saved_tensors
    rest = iter(lists)
    walks = BackwardWalks(*(list(islice(rest, count)) or None for count in ctx.counts))
    blocks = ctx.common.blocks._replace(crow=crow, col=col)
    common = ctx.common._replace(blocks=blocks, rule=rule)
    x = Tensors(q, k, v, starts_q, starts_k)
    grads = _run_backward(x, walks, common, out, lse, dout, dlse)
    # an operator's derivative returns a list for a list of tensors, a function's returns None
    _, _, _, *needs = ctx.needs_input_grad
    return *grads, *([None] * len(one) if isinstance(one, (list, tuple)) else None for one in needs)


def _run_backward(
    x: Tensors,
    walks: BackwardWalks,
    common: Common,
    out: Tensor,
    lse: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
) -> Grads:
    """Return the gradients from the backward operator; a second derivative raises."""
    if dout is None:
        dout = torch.zeros_like(out)
    offsets = x.cu_seqlens_q, x.cu_seqlens_k
    results = out, lse, dlse
    grads: Grads = _call_backward(
        dout, x.q, x.k, x.v, *results, *offsets, *walks, *common.arguments
    )
    return grads


_call_forward = differentiable(forward, _differentiate, _keep)
_call_backward = differentiable(backward, no_second_derivative("blocksparse_attention_reference"))


def _call_of(x: Tensors, layout: BlockSparseLayout, bounds: Bounds, options: Options) -> Common:
    """Return the operators' last arguments."""
    pattern = layout._pattern
    crow, col = (by_sequence(x, pattern.batch) for x in (layout._crow, layout._col))
    sizes = pattern.cols, pattern.block_q, pattern.block_k
    blocks = Blocks(crow, col, *sizes, pattern.rows_alike)
    return Common(blocks, pattern.max_row, bounds, options, x.rule)


class _Planned(torch.autograd.Function):
    """Both passes of a call that is launched without the operators."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        x: Tensors,
        layout: BlockSparseLayout,
        bounds: Bounds,
        known: Checked,
    ) -> tuple[Tensor, Tensor]:
        """Take q, k and v for autograd, and ``x``, all tensors of the call."""
        out, lse = known.plan.forward(x, known.walks, bounds)  # type: ignore[union-attr]
        ctx.save_for_backward(*x, out, lse)
        ctx.layout, ctx.bounds, ctx.known = layout, bounds, known
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        *tensors, out, lse = ctx.saved_tensors
        x, known, layout = Tensors(*tensors), ctx.known, ctx.layout
        if may_skip_operator(dout, dlse) and known.plan.fits(x):
            if dout is None:
                dout = torch.zeros_like(out)
            grads = known.plan.backward(x, known.walks.backward, out, lse, dout, dlse)
        else:
            call = _call_of(x, layout, ctx.bounds, known.options)
            grads = _run_backward(x, known.walks.backward, call, out, lse, dout, dlse)
        return *grads, None, None, None, None


def _needs_grad(x: Tensors) -> bool:
    return torch.is_grad_enabled() and (x.q.requires_grad or x.k.requires_grad or x.v.requires_grad)


def attention(
    x: Tensors, layout: BlockSparseLayout, bounds: Bounds, known: Checked
) -> tuple[Tensor, Tensor]:
    """Compute ``(out, lse)``, through the autograd function if a gradient is needed."""
    refuse_tangents(x)
    walks, options, plan = known.walks, known.options, known.plan
    if plan is None:
        if is_transformed() and torch.compiler.is_compiling():
            x = without_repeats(x)
        call = _call_of(x, layout, bounds, options)
        *tensors, _ = x  # the rule is last
        lists = walks.tall, walks.short, *walks.backward
        return _call_forward(*tensors, *lists, *call.arguments)  # type: ignore[no-any-return]
    if x.q.is_cpu:
        check_values(x, bounds)
    if _needs_grad(x):
        return _Planned.apply(x.q, x.k, x.v, x, layout, bounds, known)  # type: ignore[no-any-return, no-untyped-call]
    return plan.forward(x, walks, bounds)
