"""The operators as PyTorch sees them: schemas, fakes, autograd, tracing, imports."""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from blocksparse_attn import BlockSparseLayout, blocksparse_attn_func, blocksparse_attn_varlen_func
from blocksparse_attn._attention import ops
from blocksparse_attn._attention.call import Blocks, Bounds, Common, ListForm, Options
from blocksparse_attn._linked.host.forms import interpreted
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import opcheck

from .._linked.budget import Maker
from .._numerics import Packed, Shape, make_case, make_packed, paged
from ._operators import compiled, traced_alike

__all__ = ["compiled"]  # fixtures

SHAPE = Shape(2, 9, 13, 4, 2, 16, 8)
PACKED = Packed((5, 0, 9), (6, 3, 9), 4, 2, 16, padding=2)
CASES = [
    pytest.param(lambda device: make_case(SHAPE, torch.float32, device), id="fixed"),
    pytest.param(
        lambda device: make_case(SHAPE, torch.float32, device, shared=True), id="fixed-shared"
    ),
    pytest.param(lambda device: make_packed(PACKED, torch.float32, device), id="packed"),
    pytest.param(lambda device: paged(make_packed(PACKED, torch.float32, device), 4), id="paged"),
]
LISTS = ("tall", "short", "dq", "dkdv")


def arguments_of(case: Any, top_left: bool = False) -> tuple[Any, ...]:
    """Tensors, pages, lists, and the last arguments of the operators."""
    given = {**case.inputs, **case.options}
    q, k, v, layout = given["q"], given["k"], given["v"], given["layout"]
    widest = max(q.shape[-1], v.shape[-1])
    kind = ListForm(q.shape[-2] // k.shape[-2], widest, q.element_size(), True)
    on_gpu = q.is_cuda or interpreted()
    lists = [list(layout._lists.of(one, kind)) if on_gpu else [] for one in LISTS]
    tensors = q, k, v, given.get("cu_seqlens_q"), given.get("cu_seqlens_k")
    longest = given.get("max_seqlen_q", q.shape[-3]), given.get("max_seqlen_k", k.shape[-3])
    shape = layout.num_cols, *layout.block_size, layout.rows_alike
    blocks, options = Blocks(layout._crow, layout._col, *shape), Options(0.25, True, 2, top_left)
    call = Common(blocks, layout.max_row, Bounds(*longest), options, None)
    return tensors, given.get("block_table"), lists, call


def forward_arguments(case: Any) -> tuple[Any, ...]:
    tensors, table, lists, call = arguments_of(case)
    tall = lists[0] if call.bounds.max_seqlen_q > 8 else []
    short = lists[1] if tensors[3] is not None or call.bounds.max_seqlen_q <= 8 else []
    return *tensors, table, tall, short, *lists[2:], [], *call.arguments


@pytest.mark.eager
@pytest.mark.parametrize("make", CASES)
def test_forward_passes_opcheck(make, device):
    arguments = forward_arguments(make(device))
    opcheck(ops.forward, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.eager
@pytest.mark.parametrize("dlse", [False, True])
@pytest.mark.parametrize("make", CASES[:3])
def test_backward_passes_opcheck(make, dlse, device):
    case = make(device)
    tensors, _, lists, call = arguments_of(case, top_left=True)
    q, k, v, *cu = tensors
    out, lse = ops.forward(*forward_arguments(case))
    arguments = (
        torch.ones_like(out),
        q,
        k,
        v,
        out,
        lse,
        torch.ones_like(lse) if dlse else None,
        *cu,
        *lists[2:],
        [],
        *call.arguments,
    )
    opcheck(ops.backward, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("make", CASES[:3])
def test_the_backward_makes_lists_that_it_is_not_given(make, device):
    """A graph that was exported without gradients has none."""
    case = make(device)
    tensors, _, lists, call = arguments_of(case, top_left=True)
    q, k, v, *cu = tensors
    out, lse = ops.forward(*forward_arguments(case))
    of_call = torch.ones_like(out), q, k, v, out, lse, None, *cu
    want = ops.backward(*of_call, *lists[2:], [], *call.arguments)
    got = ops.backward(*of_call, [], [], [], *call.arguments)
    for mine, other in zip(got, want, strict=True):
        assert other.any()
        assert torch.equal(mine, other)


@pytest.mark.parametrize("kind", LISTS)
@pytest.mark.parametrize("shared", [False, True])
def test_plan_passes_opcheck(shared, kind, device):
    case = make_case(Shape(1, 20, 40, 4, 2, 16), torch.float32, device, shared=shared)
    layout = case.options["layout"]
    arguments = (
        layout._crow,
        layout._col,
        layout.num_cols,
        16,
        16,
        False,
        2,
        16,
        4,
        True,
        kind,
        None,
    )
    opcheck(ops.plan, arguments, test_utils=("test_schema", "test_faketensor"))
    made = ops.plan(*arguments)
    for mine, kept in zip(made, layout._lists.of(kind, ListForm(2, 16, 4, True)), strict=True):
        assert torch.equal(mine, kept)


@pytest.mark.eager
@pytest.mark.parametrize("make", CASES)
def test_fakes_say_what_comes(make, device):
    case = make(device)
    real = case()
    on_meta = {
        name: value.to("meta") if isinstance(value, (Tensor, BlockSparseLayout)) else value
        for name, value in {**case.inputs, **case.options}.items()
    }
    fake = case.function(**on_meta, return_lse=True)
    for got, want in zip(fake, real, strict=True):
        assert got.shape == want.shape
        assert got.dtype == want.dtype
        assert got.stride() == want.stride()
        assert want.is_contiguous()


@pytest.mark.eager
@pytest.mark.parametrize("wanted", ["q", "k", "v"])
def test_gradients_come_only_where_they_are_asked_for(wanted, device):
    case = make_case(SHAPE, torch.float32, device)
    inputs = {n: t.clone().requires_grad_(n == wanted) for n, t in case.inputs.items()}
    blocksparse_attn_func(**inputs, **case.options).sum().backward()
    for name, tensor in inputs.items():
        assert (tensor.grad is not None) == (name == wanted)


@pytest.mark.eager
def test_one_tensor_may_be_all_three(device):
    x = make_case(SHAPE, torch.float32, device).inputs["k"].requires_grad_()
    layout = BlockSparseLayout.local_strided(2, 16, 16, device=device)
    (grad,) = torch.autograd.grad(blocksparse_attn_func(x, x, x, layout).sin().sum(), x)
    parts = [x.detach().clone().requires_grad_() for _ in range(3)]
    out = blocksparse_attn_func(*parts, layout)
    torch.testing.assert_close(grad, sum(torch.autograd.grad(out.sin().sum(), parts)))


@pytest.mark.eager
def test_a_second_derivative_is_refused(device):
    case = make_case(SHAPE, torch.float32, device)
    leaves = [t.requires_grad_() for t in case.inputs.values()]
    out = blocksparse_attn_func(*leaves, **case.options)
    (grad,) = torch.autograd.grad(out.sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError):
        grad.sum().backward()


@pytest.mark.eager
def test_works_below_a_dispatch_mode(device):
    from torch.utils.flop_counter import FlopCounterMode

    case = make_case(SHAPE, torch.float32, device)
    leaves = [t.requires_grad_() for t in case.inputs.values()]

    def grads() -> tuple[Tensor, ...]:
        return torch.autograd.grad(blocksparse_attn_func(*leaves, **case.options).sum(), leaves)

    with FlopCounterMode(display=False):
        got = grads()
    for mine, want in zip(got, grads(), strict=True):
        torch.testing.assert_close(mine, want)


@pytest.mark.eager
@pytest.mark.parametrize("requires_grad", [False, True])
def test_forward_mode_raises(requires_grad, device):
    x = torch.randn(1, 2, 1, 4, device=device, requires_grad=requires_grad)
    layout = BlockSparseLayout.local_strided(1, 16, 16, device=device)
    with pytest.raises(NotImplementedError, match="forward-mode differentiation"):
        torch.func.jvp(lambda q: blocksparse_attn_func(q, q, q, layout), (x,), (x,))
    with forward_ad.dual_level():
        blocksparse_attn_func(x, x, x, layout)


def loss_of(out: Tensor, lse: Tensor) -> Tensor:
    return out.sin().sum() + lse.masked_fill(lse == -math.inf, 0.0).sin().sum()


@traced_alike
@pytest.mark.eager
def test_fixed_form_compiles_once_for_all_lengths(device, compiled):
    layout = BlockSparseLayout.local_strided(6, 64, 16, 1, 3, device=device)

    def function(q, k, v):
        return loss_of(*blocksparse_attn_func(q, k, v, layout, return_lse=True))

    fast = compiled(function)
    for batch, seqlen_q, seqlen_k in ((3, 10, 12), (5, 9, 30), (4, 30, 11)):
        shape = Shape(batch, seqlen_q, seqlen_k, 6, 2, 16)
        case = make_case(shape, torch.float32, device)
        inputs = [[t.clone().requires_grad_() for t in case.inputs.values()] for _ in range(2)]
        with torch._dynamo.config.patch(error_on_recompile=batch != 3):
            losses = fast(*inputs[0]), function(*inputs[1])
        torch.testing.assert_close(*losses)
        grads = (torch.autograd.grad(x, y) for x, y in zip(losses, inputs, strict=True))
        for got, want in zip(*grads, strict=True):
            torch.testing.assert_close(got, want)


@traced_alike
@pytest.mark.eager
def test_packed_form_compiles_once_for_all_lengths(device, compiled):
    def function(q, k, v, cu_seqlens, max_seqlen, layout):
        return loss_of(
            *blocksparse_attn_varlen_func(
                q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, layout, return_lse=True
            )
        )

    fast = compiled(function)
    layout = BlockSparseLayout.local_strided(6, 64, 16, 1, 3, device=device)
    for lengths in ((5, 10, 2), (9, 3, 4, 10), (20, 7)):
        case = make_packed(Packed(lengths, lengths, 6, 2, 16), torch.float32, device)
        inputs = [[t.clone().requires_grad_() for t in case.inputs.values()] for _ in range(2)]
        rest = case.options["cu_seqlens_q"], max(lengths), layout
        with torch._dynamo.config.patch(error_on_recompile=lengths != (5, 10, 2)):
            losses = fast(*inputs[0], *rest), function(*inputs[1], *rest)
        grads = (torch.autograd.grad(x, y) for x, y in zip(losses, inputs, strict=True))
        for got, want in zip(*grads, strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("planned", [False, True])
def test_a_kernels_lists_compile(planned, device, compiled):
    """What a GPU needs beyond the eager path: lists, made within the graph or before."""
    layout = BlockSparseLayout.local_strided(2, 32, 16, 1, 3, device=device)
    fast = compiled(lambda q, k, v: blocksparse_attn_func(q, k, v, layout))
    m = Maker(device, torch.float32)
    leaves = [m.randn(1, 20, 2, 16).requires_grad_() for _ in range(3)]
    if planned:
        assert layout.prepare(2, 2, 16, torch.float32, backward=True) is layout
    got = fast(*leaves)
    assert bool(layout._lists.known) == planned
    grads = torch.autograd.grad(got.sin().sum(), leaves)
    want = blocksparse_attn_func(*leaves, layout)
    assert torch.equal(got, want)
    for mine, exact in zip(grads, torch.autograd.grad(want.sin().sum(), leaves), strict=True):
        assert torch.equal(mine, exact)


@pytest.mark.eager
def test_wrong_calls_fail_under_compile_too(device, compiled):
    layout = BlockSparseLayout.local_strided(4, 16, 16, device=device)
    fast = compiled(lambda q, k: blocksparse_attn_func(q, k, k, layout))
    q = torch.zeros(2, 5, 4, 16, device=device)
    with pytest.raises(Exception, match="heads_q must be a positive multiple of heads_k"):
        fast(q, q[:, :, :3])


def in_a_fresh_process(code: str) -> None:
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert not done.returncode, done.stderr


@pytest.mark.eager
@pytest.mark.once
def test_import_needs_neither_triton_nor_numpy_nor_matplotlib():
    in_a_fresh_process(
        """
        import os, sys, warnings
        os.environ.pop("TRITON_INTERPRET", None)
        sys.modules["triton"] = sys.modules["matplotlib"] = None
        before = dict(os.environ)
        import blocksparse_attn, torch
        layout = blocksparse_attn.BlockSparseLayout.local_strided(2, 64, 16)
        q = torch.randn(1, 20, 2, 8, requires_grad=True)
        blocksparse_attn.blocksparse_attn_func(q, q, q, layout).sum().backward()
        assert q.grad is not None
        hash(layout), repr(layout)
        assert dict(os.environ) == before
        assert "blocksparse_attn.integrations.flex_attention" not in sys.modules
        """
    )


@pytest.mark.eager
def test_everything_public_is_there():
    import blocksparse_attn

    for name in blocksparse_attn.__all__:
        assert getattr(blocksparse_attn, name).__doc__, name
