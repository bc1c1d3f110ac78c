"""Kernels have few parameters and open with their formula; calls go a short way."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import lightning_attn
import pytest
import torch
from lightning_attn import lightning_attn_decode, lightning_attn_func
from lightning_attn._linear import ops
from lightning_attn._linear.call import StepTensors

from .._numerics import MEDIUM, make_case

FOLDER = Path(lightning_attn.__file__).parent
# of a device function below an entry
MOST_PARAMETERS = 12


def jit_functions():
    """Yield ``(file, function, whether it is a kernel)``."""
    for path in sorted(FOLDER.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                decorators = [ast.unparse(d) for d in node.decorator_list]
                if any("jit" in d for d in decorators):
                    yield path, node, any("entry" in d for d in decorators)


@pytest.mark.eager
def test_device_functions_have_few_parameters():
    entries = [(path.name, node.name) for path, node, is_entry in jit_functions() if is_entry]
    assert len(entries) == 6, entries
    for path, node, is_entry in jit_functions():
        if not is_entry:
            assert len(node.args.args) <= MOST_PARAMETERS, f"{path.name}: {node.name}"


@pytest.mark.eager
def test_entries_open_with_their_formula():
    for path, node, is_entry in jit_functions():
        if is_entry:
            first = (ast.get_docstring(node) or "").splitlines()[0]
            assert first.startswith("``"), f"{path.name}: {node.name}"
            assert " = " in first, f"{path.name}: {node.name}"


@pytest.mark.eager
def test_a_decoding_step_launches_its_tensors_as_they_are():
    pytest.importorskip("triton")
    from lightning_attn._linear.portable.arguments import DecodeTensors

    assert DecodeTensors._fields == tuple(f"{name}_ptr" for name in StepTensors._fields)


class Frames:
    """The package's frames between a public function and each launch."""

    def __init__(self, monkeypatch):
        from lightning_attn._linked.launch.runtime import Launch

        self.counts = []
        real = Launch.__call__

        def launch(*arguments):
            frame, count = sys._getframe(1), 1  # the launch itself is one
            while frame is not None:
                file = frame.f_code.co_filename
                count += str(FOLDER) in file
                frame = frame.f_back
            self.counts.append(count)
            real(*arguments)

        monkeypatch.setattr(Launch, "__call__", launch)


planned = pytest.mark.skipif(not ops.interpreted(), reason="calls on a CPU launch nothing")


@planned
@pytest.mark.parametrize("schedule", ["sequential", "parallel"])
@pytest.mark.parametrize("gradients", [False, True], ids=["inference", "training"])
def test_a_warm_call_takes_five_frames(gradients, schedule, monkeypatch):
    case = make_case(MEDIUM, torch.float32, "cpu").on(schedule)
    inputs = {name: t.clone().requires_grad_(gradients) for name, t in case.inputs.items()}
    case.function(**inputs, **case.options)
    frames = Frames(monkeypatch)
    case.function(**inputs, **case.options)
    assert len(frames.counts) == (1 if schedule == "sequential" else 3)
    assert max(frames.counts) <= 5


@planned
def test_a_warm_decoding_step_takes_five_frames(monkeypatch):
    x = torch.ones(1, 1, 1, 16)
    given = x, x, x, torch.zeros(2, 1, 16, 16), torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    lightning_attn_decode(*given)
    frames = Frames(monkeypatch)
    lightning_attn_decode(*given)
    assert len(frames.counts) == 1
    assert max(frames.counts) <= 5


@planned
@pytest.mark.parametrize("schedule", ["sequential", "parallel"])
def test_a_backward_pass_is_planned_once(schedule, monkeypatch):
    """The second one makes no plan and asks no operator, and gives the same bits."""
    from lightning_attn._linear import launch as linear_launch
    from lightning_attn._linear.portable import walk_launch

    case = make_case(MEDIUM, torch.float32, "cpu").on(schedule)

    def gradients():
        leaves = {name: t.clone().requires_grad_() for name, t in case.inputs.items()}
        out, state = lightning_attn_func(**leaves, **case.options, output_final_state=True)
        douts = torch.ones_like(out), torch.ones_like(state)
        return torch.autograd.grad((out, state), list(leaves.values()), douts)

    first = gradients()

    def refuse(*_given, **_options):
        raise AssertionError("planned again")

    for place, name in (
        (walk_launch.Walk, "__init__"),
        (linear_launch.DecayGradientPlan, "__init__"),
        (ops, "read_gradient"),
        (ops, "write_gradients"),
        (ops, "decay_gradient"),
    ):
        monkeypatch.setattr(place, name, refuse)
    for got, want in zip(gradients(), first, strict=True):
        assert torch.equal(got, want)


@planned
def test_tensors_that_were_put_away_may_come_back_elsewhere():
    """A backward pass is planned for tensors as they lay; others go through the operators."""
    case = make_case(MEDIUM, torch.float32, "cpu").on("sequential")

    def gradients(unpack):
        leaves = {name: t.clone().requires_grad_() for name, t in case.inputs.items()}
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            out, _ = lightning_attn_func(**leaves, **case.options)
        return torch.autograd.grad(out.sum(), list(leaves.values()))

    def elsewhere(t):
        if t.ndim != 4:
            return t
        return t.transpose(1, 2).contiguous().transpose(1, 2)

    for got, want in zip(gradients(elsewhere), gradients(lambda t: t), strict=True):
        assert torch.equal(got, want)
