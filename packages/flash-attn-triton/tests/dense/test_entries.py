"""Kernels that are written as functions of structures, see ``launch/entries.py``."""

from __future__ import annotations

import inspect
import traceback
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from flash_attn_triton._linked.launch.entries import Constant, Foreign, Number, Pointer, entry, flat
from flash_attn_triton._linked.portable.primitives import pointer_to
from flash_attn_triton._linked.portable.strides import Strides
from triton.errors import TritonError


class Tensors(NamedTuple):
    x_ptr: Foreign
    bias_ptr: Foreign
    out_ptr: Pointer


class Numbers(NamedTuple):
    count: Number
    scale: Number
    x: Strides


class Options(NamedTuple):
    BLOCK: Constant
    NEGATE: Constant


@entry(triton.jit)
def scaled_kernel(tensors: Tensors, numbers: Numbers, first: Number, OPTIONS: Options):
    """``out = scale * x + bias`` from ``first`` on."""
    if first >= numbers.count:
        return
    at = first + tl.arange(0, OPTIONS.BLOCK)  # [BLOCK]
    inside = at < numbers.count
    x = tl.load(pointer_to(tensors.x_ptr, numbers.x, 0, at, 0), mask=inside)
    x *= -numbers.scale if OPTIONS.NEGATE else numbers.scale
    if tensors.bias_ptr is not None:
        x += tl.load(tensors.bias_ptr + at, mask=inside)
    tl.store(tensors.out_ptr + at, x, mask=inside)


@entry(triton.jit)
def failing_kernel(x_ptr: Pointer, BLOCK: tl.constexpr):
    """Fail in the interpreter."""
    tl.static_assert(BLOCK > 16)  # this line


@pytest.mark.eager
def test_a_kernel_has_a_parameter_for_each_field():
    parameters = list(inspect.signature(scaled_kernel.fn).parameters)
    numbers = ["count", "scale", "x_batch", "x_token", "x_head", "first"]
    assert parameters == ["x_ptr", "bias_ptr", "out_ptr", *numbers, "BLOCK", "NEGATE"]
    assert scaled_kernel.fn.__doc__ == "``out = scale * x + bias`` from ``first`` on."


@pytest.mark.eager
@pytest.mark.skipif(not hasattr(scaled_kernel, "params"), reason="the interpreter specialises none")
def test_triton_specialises_only_pointers_to_own_memory():
    specialised = {
        p.name
        for p in scaled_kernel.params
        if not (p.do_not_specialize or p.do_not_specialize_on_alignment or p.is_constexpr)
    }
    assert specialised == {"out_ptr"}


@pytest.mark.eager
def test_structures_are_passed_field_by_field():
    numbers = Numbers(5, 2.0, Strides(7, 3, 1))
    assert flat(numbers, 4, Options(8, True)) == (5, 2.0, 7, 3, 1, 4, 8, True)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("negate", [False, True])
def test_a_kernel_reads_the_fields_it_names(device, has_bias, negate):
    x = torch.randn(12, 2, device=device)
    bias = torch.randn(12, device=device) if has_bias else None
    out = torch.full((16,), 9.0, device=device)
    numbers = Numbers(12, 0.5, Strides(100, 2, 100))
    scaled_kernel[(1,)](*flat(Tensors(x, bias, out), numbers, 3), BLOCK=16, NEGATE=negate)
    expected = (-0.5 if negate else 0.5) * x[3:, 0] + (0 if bias is None else bias[3:])
    torch.testing.assert_close(out[3:12], expected)
    assert (out[:3] == 9).all()
    assert (out[12:] == 9).all()
    scaled_kernel[(1,)](*flat(Tensors(x, bias, out), numbers, 12), BLOCK=16, NEGATE=negate)


def test_lines_of_the_body_keep_their_numbers(device):
    with pytest.raises(TritonError) as raised:
        failing_kernel[(1,)](torch.zeros(16, device=device), BLOCK=16)
    told = f"{raised.value}" + "".join(traceback.format_exception(raised.value))
    source, first = inspect.getsourcelines(failing_kernel.fn)
    line = first + next(n for n, text in enumerate(source) if "# this line" in text)
    assert "# this line" in Path(__file__).read_text().splitlines()[line - 1]
    assert f"line {line}" in told or f"at {line - first + 1}:" in told


class Untyped(NamedTuple):
    x_ptr: int


class Twin(NamedTuple):
    """Holds another structure named ``Numbers``, which this module has too."""

    numbers: NamedTuple("Numbers", [("count", Number)])  # type: ignore[valid-type]


def without_docstring(tensors: Tensors):
    tl.store(tensors.out_ptr, 1.0)


def of_other_types(tensors: Untyped):
    """Its field has no type of entries."""


def of_twins(twin: Twin, numbers: Numbers):
    """Its structures have one name."""


@pytest.mark.eager
@pytest.mark.parametrize(
    ("function", "told"),
    [
        (without_docstring, "without_docstring must have a docstring"),
        (of_other_types, "of_other_types: x_ptr must have a type of entries, got <class 'int'>"),
        (of_twins, "of_twins: two things are named Numbers"),
    ],
)
def test_a_kernel_that_cannot_be_made_is_refused(function, told):
    with pytest.raises(TypeError, match=told):
        entry(triton.jit)(function)
