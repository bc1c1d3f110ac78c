"""The operators' schemas, fakes and CPU kernels, and the autograd functions.

Importing this module imports torch, but neither triton nor the kernels. CUDA and HIP tensors run
the Triton kernels. CPU tensors run the eager code of :mod:`.eager`, or, in a process started with
``TRITON_INTERPRET=1``, the Triton kernels in the interpreter.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from attn_common import detect
from torch import Tensor

from .._layout.kept_lists import (
    NAMESPACE,
    is_capturing,
    make_lists,
    spec_of,
    walks_lists,
)
from .._layout.lists import by_sequence, empty_lists
from .._linked.host.internals import is_transformed, refuse_tangents
from .._linked.host.operators import (
    differentiable,
    may_skip_operator,
    no_second_derivative,
    register,
    without_repeats,
)
from ..layout import BlockSparseLayout
from .call import Bounds, Checked, Common, ListForm, Options, Pattern, Tensors, Walks
from .checks import check_values
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

_LAYOUT = "Tensor crow, Tensor col, SymInt cols, int block_q, int block_k, bool rows_alike"
_COMMON = (
    f"{_LAYOUT}, SymInt max_row, SymInt max_seqlen_q, SymInt max_seqlen_k, float softmax_scale, "
    "bool causal, int num_splits, bool top_left, Tensor? rule"
)
# index of the first list in the forward operator's arguments: after the tensors without the rule
_LISTS = len(Tensors._fields) - 1
# out, lse, dout, dlse
Results = tuple[Tensor, Tensor, Tensor, Tensor | None]


def _made_of(crow: Tensor, col: Tensor, *rest: Any) -> tuple[Any, ...]:
    """Return the arguments of ``make_lists`` from those of the operator ``plan``."""
    cols, block_q, block_k, rows_alike, group, head_dim, itemsize, causal, kind, rule = rest
    # int() and bool() turn symbols into numbers
    form = ListForm(int(group), int(head_dim), itemsize, causal)
    heads, rows = crow.shape[-2], crow.shape[-1] - 1
    pattern = Pattern(bool(heads == 1), rows, int(cols), block_q, block_k, rows_alike, max_row=0)
    spec = spec_of(kind, detect(crow.device), pattern, form)
    return crow.flatten(0, -2), col.flatten(0, -2), cols, (block_q, block_k), spec, rule


def _plan(*arguments: Any) -> list[Tensor]:
    return list(make_lists(*_made_of(*arguments)))


def _plan_fake(*arguments: Any) -> list[Tensor]:
    return list(empty_lists(*_made_of(*arguments)[:-1]))


# ---- attention


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse_shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    return out, q.new_empty(lse_shape, dtype=torch.float32)


def _backward_fake(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Grads:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _split_forward(arguments: tuple[Any, ...]) -> tuple[Tensors, Walks, Common]:
    """Return the forward operator's arguments as structures."""
    call = Common(*arguments[-len(Common._fields) :])
    tensors, walks = (*arguments[:_LISTS], call.rule), arguments[_LISTS : -len(call)]
    return Tensors(*tensors), Walks(*(tuple(walk or ()) for walk in walks)), call


def _forward_triton(*arguments: Any) -> tuple[Tensor, Tensor]:
    from .launch import launch_forward

    return launch_forward(*_split_forward(arguments))


def _forward_eager(*arguments: Any) -> tuple[Tensor, Tensor]:
    x, _, call = _split_forward(arguments)
    return attention_forward(x, call)


def _check_values(x: Tensors, bounds: Bounds) -> None:
    """Check the values of offsets and pages on the CPU; a trace never calls this."""
    if x.cu_seqlens_q is not None and x.cu_seqlens_k is not None:
        check_values(x.q, x.k, x.cu_seqlens_q, x.cu_seqlens_k, *bounds, x.block_table)


def _check_forward(*arguments: Any) -> None:
    x, _, call = _split_forward(arguments)
    _check_values(x, call.bounds)


def _split_backward(arguments: tuple[Any, ...]) -> tuple[Tensors, Walks, Common, Results]:
    """Return the backward operator's arguments as structures."""
    call = Common(*arguments[-len(Common._fields) :])
    dout, q, k, v, out, lse, dlse, starts_q, starts_k, *lists = arguments[: -len(call)]
    walks = Walks((), (), *(tuple(walk or ()) for walk in lists))
    x = Tensors(q, k, v, starts_q, starts_k, None, call.rule)
    return x, walks, call, (out, lse, dout, dlse)


def _backward_triton(*arguments: Any) -> Grads:
    from .launch import launch_backward

    x, walks, call, results = _split_backward(arguments)
    if not (walks.by_key or walks.pairs):
        # the graph was exported without gradients
        walks = walks._replace(by_query=_made(x, call, "dq"), by_key=_made(x, call, "dkdv"))
    return launch_backward(x, walks, call, *results)


def _made(x: Tensors, call: Common, kind: str) -> tuple[Tensor, ...]:
    """Make lists that are missing from a call."""
    return tuple(_plan(*call[:6], *_form_of_lists(x, call.causal), kind, call.rule))


def _form_of_lists(x: Tensors, causal: bool) -> ListForm:
    group = x.q.shape[-2] // x.k.shape[-2]
    return ListForm(group, max(x.q.shape[-1], x.v.shape[-1]), x.q.element_size(), causal)


def _backward_eager(*arguments: Any) -> Grads:
    x, _, call, (_, lse, dout, dlse) = _split_backward(arguments)
    return attention_backward(x, call, dout, lse, dlse)


plan = register(
    f"{NAMESPACE}::plan",
    f"({_LAYOUT}, SymInt group, SymInt head_dim, int itemsize, bool causal, str kind, "
    "Tensor? rule) -> Tensor[]",
    fake=_plan_fake,
    kernels=_plan,
    eager=_plan,
)
forward = register(
    f"{NAMESPACE}::forward",
    "(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? block_table, Tensor[]? tall, Tensor[]? short, Tensor[]? by_query, Tensor[]? by_key, "
    f"Tensor[]? pairs, {_COMMON}) -> (Tensor out, Tensor lse)",
    fake=_forward_fake,
    kernels=_forward_triton,
    eager=_forward_eager,
    check=_check_forward,
)
backward = register(
    f"{NAMESPACE}::backward",
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor[]? by_query, Tensor[]? by_key, "
    f"Tensor[]? pairs, {_COMMON}) -> (Tensor dq, Tensor dk, Tensor dv)",
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
    is_tall = bounds.seqlen_q > SHORT
    is_short = not is_tall or x.cu_seqlens_q is not None
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
    return Walks(
        layout._lists.of(tall, *kind) if is_tall else (),
        layout._lists.of("short", *kind) if is_short else (),
        layout._lists.of("dq", *kind) if is_portable else (),
        layout._lists.of("dkdv", *kind) if is_portable else (),
        sum((layout._lists.of(name, *kind) for name in named), ()),
    )


def _operands(walks: Sequence[Sequence[Tensor]]) -> list[list[Tensor] | None]:
    """Return lists as the operators take them: AOTInductor needs None for an empty list."""
    return [list(walk) or None for walk in walks]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save what the derivative of the forward operator needs."""
    x, walks, call = _split_forward(inputs)
    lists = [one for walk in walks[2:] for one in walk]
    ctx.save_for_backward(*x[:5], *output, call.rule, call.crow, call.col, *lists)
    ctx.counts = tuple(map(len, walks[2:]))
    ctx.call = call[2:-1]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    """Return the gradients of the forward operator's arguments."""
    *tensors, out, lse, rule, crow, col = ctx.saved_tensors[:10]
    lists = list(ctx.saved_tensors[10:])
    walks = [[lists.pop(0) for _ in range(count)] for count in ctx.counts]
    arguments: tuple[Any, ...] = crow, col, *ctx.call, rule
    call = Common(*arguments)
    grads = _run_backward(Tensors(*tensors), walks, call, out, lse, dout, dlse)
    # an operator's derivative returns a list for a list of tensors, a function's returns None
    needs = ctx.needs_input_grad[3:]
    return *grads, *([None] * len(one) if isinstance(one, (list, tuple)) else None for one in needs)


def _run_backward(
    x: Tensors,
    walks: Sequence[Sequence[Tensor]],
    call: Common,
    out: Tensor,
    lse: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
) -> Grads:
    """Return the gradients from the backward operator; a second derivative raises."""
    if dout is None:
        dout = torch.zeros_like(out)
    results = out, lse, dlse
    return _call_backward(dout, *x[:3], *results, *x[3:5], *_operands(walks), *call)  # type: ignore[no-any-return]


_call_forward = differentiable(forward, _differentiate, _keep)
_call_backward = differentiable(backward, no_second_derivative("blocksparse_attention_reference"))


def _call_of(x: Tensors, layout: BlockSparseLayout, bounds: Bounds, options: Options) -> Common:
    """Return the operators' last arguments."""
    batch = layout._pattern.batch
    crow, col = (by_sequence(x, batch) for x in (layout._crow, layout._col))
    arguments: tuple[Any, ...] = crow, col, *layout._pattern[2:7], *bounds, *options, x.rule
    return Common(*arguments)


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
            grads = known.plan.backward(x, known.walks, out, lse, dout, dlse)
        else:
            call = _call_of(x, layout, ctx.bounds, known.options)
            grads = _run_backward(x, known.walks[2:], call, out, lse, dout, dlse)
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
        return _call_forward(*x[:_LISTS], *_operands(walks), *call)  # type: ignore[no-any-return]
    if x.q.is_cpu:
        _check_values(x, bounds)
    if _needs_grad(x):
        return _Planned.apply(x.q, x.k, x.v, x, layout, bounds, known)  # type: ignore[no-any-return, no-untyped-call]
    return plan.forward(x, walks, bounds)
