"""The operators as PyTorch sees them: schemas, fakes, autograd, tracing, imports."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import warnings

import pytest
import torch
from lightning_attn import (
    lightning_attention,
    lightning_attn_decode,
    lightning_attn_func,
    lightning_attn_varlen_func,
)
from lightning_attn._linear import ops
from torch.autograd import forward_ad
from torch.library import opcheck
from torch.overrides import TorchFunctionMode

from .._linked.budget import Maker, assert_same, offsets
from .._numerics import MEDIUM, PACKED_MEDIUM, Packed, Shape, make_case, make_packed, run

pytestmark = pytest.mark.eager
SHAPE = Shape(2, 9, 2, 16, 32)
CHECKS = ("test_schema", "test_faketensor")
traced_alike = pytest.mark.skipif(
    ops.interpreted(), reason="tracing sees the operators alone, and the interpreter is slow"
)


def arguments(packed, device, dtype=torch.float32):
    """Return ``(dout, q, k, v, decay, cu_seqlens, initial_state)``."""
    if packed:
        case = make_packed(Packed((5, 0, 7), 2, 16, 32, padding=2), dtype, device)
    else:
        case = make_case(SHAPE, dtype, device)
    q, k, v, decay, state = case.inputs.values()
    return torch.ones_like(v), q, k, v, decay, case.options.get("cu_seqlens"), state


class Watcher(TorchFunctionMode):
    """See every call of PyTorch, and change none: calls then go through the operators."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("packed", [False, True], ids=["fixed", "packed"])
def test_operators_pass_opcheck(packed, device):
    dout, q, k, v, decay, starts, state = arguments(packed, device)
    calls = [(ops.forward, (q, k, v, decay, starts, state, 0.5, "auto", True))]
    calls += [(ops.forward, (q, k, v, decay, starts, None, 0.5, "parallel", False))]
    calls += [(ops.read_gradient, (dout, k, v, decay, starts, state, 0.5, "auto"))]
    calls += [(ops.write_gradients, (dout, q, k, v, decay, starts, state, 0.5, "auto", True))]
    calls += [(ops.write_gradients, (dout, q, k, v, decay, starts, None, 0.5, "auto", False))]
    calls += [(ops.decay_gradient, (dout, q, k, v, decay, starts, state, state, 0.5))]
    if packed:
        cache, out = state.clone(), torch.zeros_like(v)
        slots = torch.tensor([2, -1, 0], device=device)
        flags = torch.tensor([True, False, True], device=device)
        rest = (out, q, k, v, decay, starts, cache, slots, flags, 0.5, "auto")
        calls += [(ops.forward_cached, rest)]
    else:
        calls += [(ops.forward_with_states, (q, k, v, decay, state, 0.5, 4))]
        calls += [(ops.final_state, (k, v, decay, state, 0.5, False, "auto"))]
        out, slots = torch.zeros_like(v[:, :3]), torch.tensor([1, 0], device=device)
        after = torch.zeros(2, 3, 2, 16, 32, device=device)
        few = (q[:, :3], k[:, :3], v[:, :3])
        calls += [(ops.decode, (out, *few, state.clone(), decay, slots, None, 0.5))]
        calls += [(ops.decode, (out, *few, state.clone(), decay, slots, after, 0.5))]
    for operator, given in calls:
        opcheck(operator, given, test_utils=CHECKS)


@pytest.mark.parametrize("schedule", ["sequential", "parallel"])
@pytest.mark.parametrize(("make", "shape"), [(make_case, MEDIUM), (make_packed, PACKED_MEDIUM)])
def test_operators_and_what_goes_past_them_agree(make, shape, schedule, device):
    case = make(shape, torch.float32, device).on(schedule)
    past = [run(case), run(case)]  # the second call finds what the first one learned
    with Watcher():
        through = run(case)
    for results in past:
        assert_same(results, through)


def test_memory_of_forms_tells_calls_apart(device):
    base = make_case(MEDIUM, torch.float32, device)
    short = {name: base.inputs[name][:, :20] for name in "qkv"}
    q, state = base.inputs["q"], base.inputs["initial_state"]
    calls = [
        base,
        base.with_options(scale=1.0),
        base.on("parallel"),
        base.with_inputs(**short),
        base.with_inputs(q=q.transpose(1, 2).contiguous().transpose(1, 2)),
        base.with_inputs(initial_state=state.mT.contiguous().mT),
        base.with_inputs(decay=base.inputs["decay"].view(-1, 1, 1)),
        make_case(MEDIUM, torch.float32, device, state=False),
        make_case(MEDIUM, torch.float16, device),
        make_packed(PACKED_MEDIUM, torch.float32, device),
        make_packed(Packed((9, 1, 7, 2), 2, 16, 16), torch.float32, device),
    ]
    first = [run(call, grad=False) for call in calls]
    with Watcher():
        through = [run(call, grad=False) for call in calls]
    for call, before, want in zip(calls, first, through, strict=True):
        assert_same(before, want)
        assert_same(run(call, grad=False), want)


def test_steps_and_caches_past_the_operators_agree(device):
    m = Maker(device, torch.float32)
    q, k, v = (m.randn(3, 2, 2, n) for n in (16, 16, 32))
    decay, cache = m.uniform(2, low=0.1, high=1.0), m.randn(5, 2, 16, 32)
    turned = m.randn(5, 2, 32, 16).mT
    slots = torch.tensor([4, -1, 0], device=device)
    after = torch.zeros(3, 2, 2, 16, 32, device=device)
    starts = offsets((2, 2, 2), device)

    def results():
        found = []
        for states in (cache.clone(), turned.clone()):
            for out in (None, torch.zeros_like(v)):
                found.append(lightning_attn_decode(q, k, v, states, decay, slots, out=out))
            lightning_attn_decode(q, k, v, states, decay, slots, states_out=after)
            flat = (t.flatten(0, 1) for t in (q, k, v))
            packed, _ = lightning_attn_varlen_func(
                *flat, decay, starts, state_cache=states, state_indices=slots
            )
            found += [after.clone(), packed, states]
        return dict(enumerate(found))

    past = [results(), results()]
    with Watcher():
        through = results()
    for found in past:
        assert_same(found, through)


def test_equal_options_of_another_type_are_refused_after_a_good_call(device):
    inputs = make_case(MEDIUM, torch.float32, device).inputs
    lightning_attn_func(**inputs, scale=1.0, output_final_state=True)
    with pytest.raises(TypeError, match="scale must be a float, got bool"):
        lightning_attn_func(**inputs, scale=True, output_final_state=True)
    with pytest.raises(TypeError, match="output_final_state must be a bool, got int"):
        lightning_attn_func(**inputs, scale=1.0, output_final_state=1)


def test_packed_tensors_of_different_lengths_are_refused_after_a_good_call(device):
    case = make_packed(PACKED_MEDIUM, torch.float32, device)
    run(case, grad=False)
    with pytest.raises(ValueError, match="k must have the shape of q"):
        run(case.with_inputs(k=case.inputs["k"][:-1]), grad=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_fakes_say_what_comes(dtype, device):
    dout, q, k, v, decay, _, state = arguments(False, device, dtype)

    def calls(move):
        q_, k_, v_, decay_, state_, dout_ = (move(t) for t in (q, k, v, decay, state, dout))
        yield from lightning_attn_func(
            q_, k_, v_, decay_, initial_state=state_, output_final_state=True
        )
        turned = (t.transpose(1, 2) for t in (q_, k_, v_))
        yield from lightning_attention(*turned, decay_, 4, state_)
        yield ops.read_gradient(dout_, k_, v_, decay_, None, state_, 0.5, "auto")
        yield from ops.write_gradients(dout_, q_, k_, v_, decay_, None, state_, 0.5, "auto", True)
        yield ops.decay_gradient(dout_, q_, k_, v_, decay_, None, state_, state_, 0.5)
        yield ops.final_state(k_, v_, decay_, state_, 0.5, True, "auto")

    real, fake = calls(lambda t: t), calls(lambda t: t.to("meta"))
    for got, want in zip(fake, real, strict=True):
        assert got.shape == want.shape
        assert got.dtype == want.dtype
        assert got.stride() == want.stride()


def test_one_tensor_may_be_all_three(device):
    x = make_case(MEDIUM, torch.float32, device).inputs["k"].requires_grad_()
    decay = torch.full((2,), 0.1, device=device)
    (grad,) = torch.autograd.grad(lightning_attn_func(x, x, x, decay)[0].sin().sum(), x)
    parts = [x.detach().clone().requires_grad_() for _ in range(3)]
    out, _ = lightning_attn_func(*parts, decay)
    torch.testing.assert_close(grad, sum(torch.autograd.grad(out.sin().sum(), parts)))


def test_a_second_derivative_is_refused(device):
    x = make_case(SHAPE, torch.float32, device).inputs["k"].requires_grad_()
    out, _ = lightning_attn_func(x, x, x, torch.zeros(2, device=device))
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        grad.sum().backward()


def test_works_below_a_dispatch_mode(device):
    from torch.utils.flop_counter import FlopCounterMode

    x = make_case(SHAPE, torch.float32, device).inputs["k"].requires_grad_()
    decay = torch.zeros(2, device=device)
    with FlopCounterMode(display=False):
        got = torch.autograd.grad(lightning_attn_func(x, x, x, decay)[0].sum(), x)
    want = torch.autograd.grad(lightning_attn_func(x, x, x, decay)[0].sum(), x)
    torch.testing.assert_close(got, want)


def test_autocast_does_not_round_the_state(device):
    case = make_case(MEDIUM, torch.float32, device)
    leaves = {n: t.requires_grad_() for n, t in case.inputs.items()}

    def run():
        out, state = lightning_attn_func(**leaves, output_final_state=True)
        loss = out.float().sum() + state.sum()
        return out, state, *torch.autograd.grad(loss, list(leaves.values()))

    want = run()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        got = run()
    for mine, other in zip(got, want, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("wrt", ["q", "decay", "initial_state"])
def test_forward_mode_raises(wrt, device):
    case = make_case(SHAPE, torch.float32, device)
    x = case.inputs[wrt]
    with forward_ad.dual_level():
        dual = {**case.inputs, wrt: forward_ad.make_dual(x, x)}
        with pytest.raises(NotImplementedError, match="forward-mode"):
            lightning_attn_func(**dual)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda x: lightning_attn_func(**{**case.inputs, wrt: x})[0], (x,), (x,))


@pytest.fixture
def compiled():
    """A compiler that refuses graph breaks."""
    # else the limit on recompilation is shared between tests
    torch.compiler.reset()

    def compile(function):
        return torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")

    with warnings.catch_warnings():
        # dynamo makes an instance of an autograd function, against PyTorch's own advice
        warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
        yield compile
    torch.compiler.reset()


@traced_alike
def test_the_fixed_form_compiles_once_for_all_lengths(device, compiled):
    def function(q, k, v, decay, state):
        out, final = lightning_attn_func(
            q, k, v, decay.view(-1, 1, 1), scale=0.5, initial_state=state, output_final_state=True
        )
        return out.sin().sum() + final.sin().sum()

    fast = compiled(function)
    for batch, seqlen in ((3, 10), (5, 7), (4, 30)):
        case = make_case(Shape(batch, seqlen, 2, 16, 32), torch.float32, device)
        inputs = [[t.clone().requires_grad_() for t in case.inputs.values()] for _ in range(2)]
        with torch._dynamo.config.patch(error_on_recompile=batch != 3):
            losses = fast(*inputs[0]), function(*inputs[1])
        torch.testing.assert_close(*losses)
        grads = (torch.autograd.grad(x, y) for x, y in zip(losses, inputs, strict=True))
        for got, want in zip(*grads, strict=True):
            torch.testing.assert_close(got, want)


@traced_alike
def test_the_packed_form_compiles_once_for_all_lengths(device, compiled):
    def function(q, k, v, decay, starts):
        out, final = lightning_attn_varlen_func(q, k, v, decay, starts, output_final_state=True)
        return out.sin().sum() + final.sin().sum()

    fast = compiled(function)
    for lengths in ((5, 6, 2), (9, 3, 4, 10), (20, 7)):
        case = make_packed(Packed(lengths, 2, 16, 32), torch.float32, device, state=False)
        starts = case.options["cu_seqlens"]
        inputs = [[t.clone().requires_grad_() for t in case.inputs.values()] for _ in range(2)]
        with torch._dynamo.config.patch(error_on_recompile=lengths != (5, 6, 2)):
            losses = fast(*inputs[0], starts), function(*inputs[1], starts)
        grads = (torch.autograd.grad(x, y) for x, y in zip(losses, inputs, strict=True))
        for got, want in zip(*grads, strict=True):
            torch.testing.assert_close(got, want)


@traced_alike
def test_caches_and_decoding_compile(device, compiled):
    m = Maker(device, torch.float32)
    q, k, v = (m.randn(12, 2, 16) for _ in range(3))
    starts, decay = offsets([5, 7], device), m.uniform(2, low=0.1, high=1.0)
    slots = torch.tensor([3, 0], device=device)
    few = [m.randn(2, 1, 2, 16) for _ in range(3)]

    def step(cache):
        out, _ = lightning_attn_varlen_func(
            q, k, v, decay, starts, state_cache=cache, state_indices=slots
        )
        return out, lightning_attn_decode(*few, cache, decay, slots)

    first = m.randn(4, 2, 16, 16)
    caches = first.clone(), first.clone()
    got, want = compiled(step)(caches[0]), step(caches[1])
    for mine, other in zip((*got, caches[0]), (*want, caches[1]), strict=True):
        torch.testing.assert_close(mine, other)


@traced_alike
def test_drop_ins_compile(device, compiled):
    case = make_case(SHAPE, torch.float32, device)
    q, k, v = (case.inputs[name].transpose(1, 2) for name in "qkv")
    fast = compiled(lambda *given: lightning_attention(*given, 4))
    for got, want in zip(
        fast(q, k, v, case.inputs["decay"]),
        lightning_attention(q, k, v, case.inputs["decay"], 4),
        strict=True,
    ):
        torch.testing.assert_close(got, want)


def test_wrong_calls_fail_under_compile_too(device, compiled):
    fast = compiled(lambda q, decay: lightning_attn_func(q, q, q, decay)[0])
    q = torch.zeros(2, 5, 4, 16, device=device)
    # PyTorch 2.11 shows the parts of a message
    with pytest.raises(Exception, match=r"must be \[heads\], \[heads, 1, 1\] or"):
        fast(q, torch.zeros(3, device=device))


def in_a_fresh_process(code: str) -> None:
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert not done.returncode, done.stderr


@pytest.mark.once
def test_import_needs_no_triton():
    in_a_fresh_process(
        """
        import os, sys
        os.environ.pop("TRITON_INTERPRET", None)
        sys.modules["triton"] = None
        before = dict(os.environ)
        import lightning_attn, torch
        q = torch.randn(1, 5, 2, 16, requires_grad=True)
        decay = lightning_attn.build_slopes(2)
        lightning_attn.lightning_attn_func(q, q, q, decay)[0].sum().backward()
        assert q.grad is not None
        assert "lightning_attn._linear.launch" not in sys.modules
        assert "lightning_attn.distributed" not in sys.modules
        assert not torch.cuda.is_initialized()
        assert dict(os.environ) == before
        """
    )


@pytest.mark.once
def test_the_interpreter_is_asked_for_by_triton_s_variable():
    in_a_fresh_process(
        """
        import os
        from lightning_attn._linear import ops
        for value, expected in (("1", True), ("true", True), ("0", False)):
            os.environ["TRITON_INTERPRET"] = value
            ops.interpreted.cache_clear()
            assert ops.interpreted() is expected, value
        """
    )


def test_schedules_reach_the_operators(device, monkeypatch):
    seen = []
    monkeypatch.setattr(ops, "attention", lambda *given: seen.append(given) or (None, None))
    case = make_case(SHAPE, torch.float32, device)
    packed = make_packed(PACKED_MEDIUM, torch.float32, device)
    for schedule in ("auto", "sequential", "parallel"):
        lightning_attn_func(**case.inputs, schedule=schedule)
        lightning_attn_varlen_func(
            **packed.inputs, cu_seqlens=packed.options["cu_seqlens"], schedule=schedule
        )
        assert [known.options.schedule for _, known in seen[-2:]] == [schedule] * 2
