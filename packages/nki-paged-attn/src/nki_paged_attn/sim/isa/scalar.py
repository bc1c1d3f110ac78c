"""ScalarE: activation functions with a scale, a bias and an optional sum."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..calls import named
from ..dtypes import to_fp32
from ..errors import require
from ..memory.access import (
    check_enum,
    check_same_size,
    check_tile,
    check_vector,
    read,
    read_raw,
    scalar_or_vector,
    write,
)
from ..memory.machine import machine
from ..memory.tensor import NkiTensor
from ..ops import ACTIVATION_PAGE, activate, need_op
from ..trace import Instruction
from .engines import strided
from .enums import reduce_cmd as Command

PAGE = "nki.isa.activation"


@named("nisa")
def activation(
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    bias: Any = None,
    scale: Any = 1.0,
    reduce_op: Any = None,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: Command = Command.idle,
    name: str | None = None,
) -> None:
    """``dst = op(data * scale + bias)`` in fp32; its sum may go to the reduce registers."""
    _activate("nisa.activation", dst, op, data, bias, scale, reduce_op, reduce_res, reduce_cmd)


@named("nisa")
def activation_reduce(
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    reduce_op: Any,
    reduce_res: NkiTensor,
    bias: Any = None,
    scale: Any = 1.0,
    name: str | None = None,
) -> None:
    """``activation`` that resets the registers, sums, and overwrites ``reduce_res``."""
    call = "nisa.activation_reduce"
    require(
        reduce_res is not None,
        call,
        "reduce_res",
        "must be a tile",
        None,
        "nki.isa.activation_reduce",
    )
    _activate(call, dst, op, data, bias, scale, reduce_op, reduce_res, Command.reset_reduce)


def _activate(
    call: str,
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    bias: Any,
    scale: Any,
    reduce_op: Any,
    reduce_res: NkiTensor | None,
    command: Command,
) -> None:
    target = machine().target
    command = check_enum(call, "reduce_cmd", command, Command)
    check_tile(call, "dst", dst)
    check_tile(call, "data", data)
    check_same_size(call, "dst", dst, data)
    require(
        need_op(call, "op", op).unary is not None,
        call,
        "op",
        "must be an activation function",
        op.name,
        ACTIVATION_PAGE,
    )
    factor, read_scale = scalar_or_vector(call, "scale", scale, data)
    addend: Any = None
    reads = [data, *read_scale]
    if isinstance(bias, NkiTensor):
        check_vector(call, "bias", bias, data.shape[0])
        raw = read_raw(call, "bias", bias)
        if raw is not None:
            addend = to_fp32(raw).reshape((data.shape[0],) + (1,) * (data.ndim - 1))
        reads.append(bias)
    elif bias is not None:
        addend, _ = scalar_or_vector(call, "bias", bias, data)
        require(
            target.has_constant_bias,
            call,
            "bias",
            f"must be a (partitions, 1) tile on {target.name}",
            bias,
            f"{PAGE}, layout",
        )
    sums = command in (Command.reduce, Command.reset_reduce)
    require(
        command != Command.load_reduce,
        call,
        "reduce_cmd",
        "must not be load_reduce",
        command.name,
        PAGE,
    )
    if sums:
        reduction = need_op(call, "reduce_op", reduce_op).name
        require(reduction == "add", call, "reduce_op", "must be nl.add", reduction, PAGE)
    if reduce_res is not None:
        check_vector(call, "reduce_res", reduce_res, data.shape[0])

    x = read(call, "data", data)
    value = None
    registers = machine().scalar_registers[data.start_partition :][: data.shape[0]]
    if command in (Command.reset, Command.reset_reduce):
        registers[:] = 0
    if x is not None:
        with np.errstate(all="ignore"):
            value = x if isinstance(scale, float) and scale == 1.0 else x * factor
            if addend is not None:
                value = value + addend
            value = activate(call, op, value)
            if sums:
                # the sum is of fp32 results, before they are rounded to dst
                registers += value.reshape(data.shape[0], -1).sum(axis=1, dtype=np.float32)
    write(call, dst, value)
    writes = [dst.region()]
    if reduce_res is not None:
        write(call, reduce_res, registers.copy() if x is not None else None)
        writes.append(reduce_res.region())
    form = frozenset({"readout"}) if reduce_res is not None else frozenset()
    machine().log(
        Instruction(
            "activation",
            "scalar",
            data.free_size,
            form=form | strided(dst, data),
            reads=tuple(r.region() for r in reads),
            writes=tuple(writes),
        )
    )
