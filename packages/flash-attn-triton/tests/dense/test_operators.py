"""The operators as PyTorch sees them: schemas, fakes, autograd, imports."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from flash_attn_triton import attention_reference, flash_attn_func, flash_attn_varlen_func
from flash_attn_triton._dense import ops
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import opcheck

from .._linked.budget import Maker, assert_same
from .._numerics import Packed, Shape, make_case, make_packed, run
from ._operators import RICH, Watcher, backward_arguments, operator_arguments

SHAPE = Shape(2, 9, 13, 4, 2, 16, 8)
PACKED = Packed((5, 0, 7), (6, 3, 7), 4, 2, 16, padding=2)


SPANS = ("spans_two", "softcap", "sinks", "dropout")
CASES = [
    pytest.param(make_case, SHAPE, (), id="fixed"),
    pytest.param(make_case, SHAPE, RICH, id="fixed-rich"),
    pytest.param(make_packed, PACKED, (), id="packed"),
    pytest.param(make_packed, PACKED, RICH, id="packed-rich"),
    pytest.param(make_case, SHAPE, SPANS, id="fixed-spans"),
    pytest.param(make_packed, PACKED, SPANS, id="packed-spans"),
]


@pytest.mark.eager
@pytest.mark.parametrize(("make", "shape", "features"), CASES)
def test_forward_passes_opcheck(make, shape, features, device):
    arguments = operator_arguments(make(shape, torch.float32, device, features))
    opcheck(ops.forward, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.eager
@pytest.mark.parametrize("dlse", [False, True])
@pytest.mark.parametrize(("make", "shape", "features"), CASES)
def test_backward_passes_opcheck(make, shape, features, dlse, device):
    case = make(shape, torch.float32, device, features)
    needs_dbias = "bias" in features
    arguments = backward_arguments(case, dlse=dlse, needs_dbias=needs_dbias)
    opcheck(ops.backward, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.eager
@pytest.mark.parametrize("out_dtype", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("make", "shape", "features"), CASES)
def test_fakes_say_what_comes(make, shape, features, out_dtype, device):
    case = make(shape, torch.float16, device, features).with_options(out_dtype=out_dtype)
    if "bias" in features:
        case.inputs["bias"] = case.inputs["bias"].half()
    real = case()
    on_meta = {
        name: value.to("meta") if isinstance(value, Tensor) else value
        for name, value in {**case.inputs, **case.options}.items()
    }
    fake = case.function(**on_meta, return_lse=True)
    for got, want in zip(fake, real, strict=True):
        assert got.shape == want.shape
        assert got.dtype == want.dtype
        assert got.stride() == want.stride()
        assert want.is_contiguous()


@pytest.mark.eager
@pytest.mark.parametrize("wanted", ["q", "k", "v", "bias", "sinks"])
def test_gradients_come_only_where_they_are_asked_for(wanted, device):
    case = make_case(SHAPE, torch.float32, device, ["bias", "sinks"])
    inputs = {n: t.clone().requires_grad_(n == wanted) for n, t in case.inputs.items()}
    flash_attn_func(**inputs).sum().backward()
    for name, tensor in inputs.items():
        assert (tensor.grad is not None) == (name == wanted)


@pytest.mark.eager
def test_bias_gradient_is_not_computed_for_nothing(device, monkeypatch):
    seen = []
    operator = ops._call_backward

    def backward(*arguments):
        seen.append(arguments[-1])
        return operator(*arguments)

    monkeypatch.setattr(ops, "_call_backward", backward)
    case = make_case(SHAPE, torch.float32, device, ["bias"])
    for needs in (False, True):
        inputs = {n: t.clone().requires_grad_(n != "bias" or needs) for n, t in case.inputs.items()}
        with Watcher():
            flash_attn_func(**inputs).sum().backward()
    assert seen == [False, True]


@pytest.mark.eager
@pytest.mark.parametrize(("make", "shape", "features"), CASES)
def test_operators_and_what_goes_past_them_agree(make, shape, features, device):
    case = make(shape, torch.float32, device, features)
    past = [run(case), run(case)]  # the second call finds what the first one learned
    with Watcher():
        through = run(case)
    for results in past:
        assert_same(results, through)


@pytest.mark.eager
def test_memory_of_forms_tells_calls_apart(device):
    base = make_case(SHAPE, torch.float16, device)
    calls = [
        base,
        base.with_options(causal=True),
        base.with_options(window_size=(3, 2)),
        base.with_options(softmax_scale=0.5),
        base.with_options(softcap=1.0),
        base.with_options(out_dtype=torch.float32),
        base.with_inputs(k=base.inputs["k"][:, :5], v=base.inputs["v"][:, :5]),
        base.with_inputs(q=base.inputs["q"][:, :, :2]),
        base.with_inputs(q=base.inputs["q"].transpose(1, 2).contiguous().transpose(1, 2)),
        make_case(SHAPE, torch.float16, device, ["sinks"]),
        make_case(SHAPE, torch.float16, device, ["alibi"]),
        make_case(SHAPE, torch.float16, device, ["alibi_batch"]),
        make_case(SHAPE, torch.float32, device),
    ]
    first = [run(call, grad=False) for call in calls]
    with Watcher():
        through = [run(call, grad=False) for call in calls]
    for call, before, want in zip(calls, first, through, strict=True):
        assert_same(before, want)
        assert_same(run(call, grad=False), want)


@pytest.mark.eager
def test_equal_options_of_another_type_are_refused_after_a_good_call(device):
    inputs = make_case(SHAPE, torch.float32, device).inputs
    flash_attn_func(**inputs, causal=True, softcap=1.0)
    with pytest.raises(TypeError, match="causal must be a bool, got int"):
        flash_attn_func(**inputs, causal=1, softcap=1.0)
    with pytest.raises(TypeError, match="softcap must be a float, got bool"):
        flash_attn_func(**inputs, causal=True, softcap=True)


@pytest.mark.eager
def test_types_within_an_option_are_told_apart(device):
    inputs = make_case(SHAPE, torch.float32, device).inputs
    flash_attn_func(**inputs, window_size=(3, 0))
    with pytest.raises(TypeError, match="window_size must be a tuple of two ints"):
        flash_attn_func(**inputs, window_size=(3.0, 0.0))
    with pytest.raises(TypeError, match="softmax_scale must be a float, got dict"):
        flash_attn_func(**inputs, softmax_scale={})


@pytest.mark.eager
def test_a_packed_form_of_one_token_does_not_serve_several(device, monkeypatch):
    """One token has no stride; three of this stride are not aligned."""
    from flash_attn_triton import api

    def call(tokens: int) -> Any:
        x = torch.arange(tokens * 25.0, device=device).view(tokens, 1, 25).half().sin()
        ends = torch.tensor([0, tokens], dtype=torch.int32, device=device)
        q, k, v = (x[..., 8 * i : 8 * i + 8] for i in range(3))
        flash_attn_varlen_func(q, k, v, ends, ends, tokens, tokens)
        return len(api._known._known)

    monkeypatch.setattr(api, "_known", type(api._known)())
    assert (call(1), call(3), call(4)) == (1, 2, 2)


@pytest.mark.eager
def test_where_offsets_begin_is_no_part_of_a_form(device, monkeypatch):
    from flash_attn_triton import api

    monkeypatch.setattr(api, "_known", type(api._known)())
    q, k, v = (torch.randn(7, 2, 16, device=device) for _ in "qkv")
    base = torch.tensor([0, 7, 0, 7, 0, 7], dtype=torch.int32, device=device)
    results = []
    for first in (0, 2, 4):
        ends = base[first : first + 2]
        results.append(flash_attn_varlen_func(q, k, v, ends, ends, 7, 7))
    assert len(api._known._known) == 1
    assert all(torch.equal(out, results[0]) for out in results)


@pytest.mark.eager
def test_gradients_come_in_batches_too(device):
    case = make_case(SHAPE, torch.float32, device, ["causal"])
    leaves = [t.clone().requires_grad_() for t in case.inputs.values()]
    out, lse = case.function(*leaves, **case.options, return_lse=True)
    m = Maker(device, torch.float32)
    douts, dlses = m.randn(2, *out.shape), m.randn(2, *lse.shape)
    batched = torch.autograd.grad(
        (out, lse), leaves, (douts, dlses), is_grads_batched=True, retain_graph=True
    )
    for i in range(2):
        one = torch.autograd.grad((out, lse), leaves, (douts[i], dlses[i]), retain_graph=True)
        for got, want in zip(batched, one, strict=True):
            assert torch.equal(got[i], want)


@pytest.mark.eager
def test_tensors_put_away_and_laid_out_otherwise_are_differentiated(device):
    case = make_case(SHAPE, torch.float32, device, ["causal", "bias"])
    want = run(case)

    def put_away(t: Tensor) -> Tensor:
        return t.detach().clone()

    def take_back(t: Tensor) -> Tensor:
        return t.transpose(0, -1).contiguous().transpose(0, -1) if t.ndim == 4 else t

    with torch.autograd.graph.saved_tensors_hooks(put_away, take_back):
        assert_same(run(case), want)


@pytest.mark.eager
def test_addresses_between_two_accesses_do_not_reach_a_plan(device):
    case = make_case(SHAPE, torch.float16, device)
    want = run(case)
    room = torch.empty(case.inputs["q"].numel() + 1, dtype=torch.float16, device=device)
    q = room[1:].view(case.inputs["q"].shape).copy_(case.inputs["q"])
    assert q.stride() == case.inputs["q"].stride()
    assert_same(run(case.with_inputs(q=q)), want)


@pytest.mark.eager
@pytest.mark.parametrize("used", ["out", "lse"])
def test_either_result_may_go_unused(used, device):
    case = make_case(SHAPE, torch.float32, device, ["sinks"])

    def grads(function: Any) -> tuple[Tensor, ...]:
        leaves = {n: t.clone().requires_grad_() for n, t in case.inputs.items()}
        out, lse = function(**leaves, return_lse=True)
        loss = (out if used == "out" else lse).sin().sum()
        return torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)

    for got, want in zip(grads(flash_attn_func), grads(case.reference), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.eager
def test_one_tensor_may_be_all_three(device):
    x = make_case(SHAPE, torch.float32, device).inputs["k"].requires_grad_()
    (grad,) = torch.autograd.grad(flash_attn_func(x, x, x, causal=True).sin().sum(), x)
    parts = [x.detach().clone().requires_grad_() for _ in range(3)]
    out = flash_attn_func(*parts, causal=True)
    torch.testing.assert_close(grad, sum(torch.autograd.grad(out.sin().sum(), parts)))


@pytest.mark.eager
def test_a_second_derivative_is_refused(device):
    x = make_case(SHAPE, torch.float32, device).inputs["k"].requires_grad_()
    out = flash_attn_func(x, x, x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        grad.sum().backward()


@pytest.mark.eager
def test_works_below_a_dispatch_mode(device):
    from torch.utils.flop_counter import FlopCounterMode

    x = make_case(SHAPE, torch.float32, device).inputs["k"].requires_grad_()
    with FlopCounterMode(display=False):
        got = torch.autograd.grad(flash_attn_func(x, x, x).sum(), x)
    torch.testing.assert_close(got, torch.autograd.grad(flash_attn_func(x, x, x).sum(), x))


@pytest.mark.eager
def test_checkpointing_recomputes_the_same_dropout(device):
    from torch.utils.checkpoint import checkpoint

    case = make_case(SHAPE, torch.float32, device, ["dropout"])

    def grads(call: Any) -> tuple[Tensor, ...]:
        torch.manual_seed(3)
        leaves = [t.clone().requires_grad_() for t in case.inputs.values()]
        return torch.autograd.grad(call(*leaves).sin().sum(), leaves)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flash_attn_func(q, k, v, 0.3)

    got = grads(lambda *leaves: checkpoint(plain, *leaves, use_reentrant=False))
    for mine, want in zip(got, grads(plain), strict=True):
        assert torch.equal(mine, want)


def with_dual_level(function: Any, x: Tensor) -> Any:
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(x, x))


@pytest.mark.eager
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(
    "differentiate",
    [
        with_dual_level,
        lambda f, x: torch.func.jvp(f, (x,), (x,)),
        lambda f, x: torch.func.jacfwd(f)(x),
        lambda f, x: torch.func.vmap(lambda y: torch.func.jvp(f, (y,), (y,)))(x[None]),
        lambda f, x: torch.func.jvp(torch.func.vmap(f), (x[None],), (x[None],)),
    ],
    ids=["dual level", "jvp", "jacfwd", "vmap of jvp", "jvp of vmap"],
)
def test_forward_mode_raises(differentiate, requires_grad, device):
    x = torch.randn(1, 2, 1, 4, device=device, requires_grad=requires_grad)
    other = x.detach()
    for function in (
        lambda q: flash_attn_func(q, other, other),
        lambda v: flash_attn_func(other, other, v),
        lambda bias: flash_attn_func(other, other, other, bias=bias[:, :1, :, :1]),
    ):
        with pytest.raises(NotImplementedError, match="forward-mode differentiation"):
            differentiate(function, x)


@pytest.mark.eager
def test_forward_mode_passes_by_what_has_no_tangent(device):
    x = torch.randn(1, 2, 1, 4, device=device)
    want = flash_attn_func(x, x, x)
    got, tangent = torch.func.jvp(lambda y: flash_attn_func(x, x, x) + y, (x,), (x,))
    assert torch.equal(got, want + x)
    assert torch.equal(tangent, x)
    with forward_ad.dual_level():
        leaf = x.clone().requires_grad_()
        flash_attn_func(leaf, leaf, leaf).sum().backward()
    assert leaf.grad is not None


def in_a_fresh_process(code: str) -> None:
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert not done.returncode, done.stderr


@pytest.mark.eager
@pytest.mark.once
def test_import_needs_neither_triton_nor_transformers():
    in_a_fresh_process(
        """
        import os, sys
        os.environ.pop("TRITON_INTERPRET", None)
        sys.modules["triton"] = sys.modules["transformers"] = None
        before = dict(os.environ)
        import flash_attn_triton, torch
        q = torch.randn(1, 5, 2, 8, requires_grad=True)
        flash_attn_triton.flash_attn_func(q, q, q, causal=True).sum().backward()
        assert q.grad is not None
        assert "flash_attn_triton._dense.launch" not in sys.modules
        assert "flash_attn_triton.integrations" not in sys.modules
        assert not torch.cuda.is_initialized()
        assert dict(os.environ) == before
        """
    )


@pytest.mark.eager
@pytest.mark.once
def test_the_interpreter_is_asked_for_by_triton_s_variable():
    in_a_fresh_process(
        """
        import os
        from flash_attn_triton._linked.host import forms
        for value, expected in (("1", True), ("true", True), ("0", False)):
            os.environ["TRITON_INTERPRET"] = value
            forms.interpreted.cache_clear()
            assert forms.interpreted() is expected, value
        """
    )


def test_backward_by_some_of_the_keys(device):
    """With the output and the LSE of all keys, the gradients of parts add up to the whole."""
    m = Maker(device, torch.float32)
    q, k, v, dout = (m.randn(1, 7, 2, 16) for _ in range(4))
    given = [x.double().requires_grad_() for x in (q, k, v)]
    sinks = m.randn(2)
    given.append(sinks.double().requires_grad_())
    out, lse = attention_reference(*given[:3], sinks=given[3], return_lse=True)
    want = torch.autograd.grad(out, given, dout.double())
    found = []
    for keys, of_sinks in ((slice(3), sinks), (slice(3, None), None)):
        own = k[:, keys].contiguous(), v[:, keys].contiguous()
        results = out.detach().float(), lse.detach().float(), None
        rest = 7, own[0].shape[1], 0.25, -1, -1, 0.0, 0.0, False, False
        found.append(
            ops.backward(dout, q, *own, *results, *(None,) * 5, of_sinks, None, None, *rest)
        )
    (dq, dk, dv, _, dsinks), (dq1, dk1, dv1, *_) = found
    got = dq + dq1, torch.cat([dk, dk1], 1), torch.cat([dv, dv1], 1), dsinks
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x.double(), y, atol=1e-5, rtol=1e-5)
