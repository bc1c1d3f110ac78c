"""Operators for a GPU refuse tensors of several devices: kernels take addresses.

PyTorch runs them if a single tensor is on a GPU. So do these tests, without a GPU.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

PACKAGES = ("flash_attn_triton", "blocksparse_attn", "lightning_attn", "prefix_prefill")
DISTRIBUTED = ("flash_attn_triton", "lightning_attn")
ON_GPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
# tensors that the host reads
ON_HOST = {"lengths"}
# by the type of an argument; what is optional is not given
VALUES = {"int": 1, "float": 1.0, "bool": False, "str": ""}
LISTS = {"List[int]", "List[bool]", "List[str]"}


def operators() -> list[Any]:
    for package in PACKAGES:
        importlib.import_module(package)
    for package in DISTRIBUTED:
        importlib.import_module(f"{package}.distributed")
    names = sorted(name.split("::") for name in torch._C._dispatch_get_all_op_names())
    return [
        getattr(getattr(torch.ops, package), name).default
        for package, name in names
        if package in PACKAGES
    ]


def arguments_of(operator: Any) -> list[Any]:
    """Return an argument of each type, tensors on a CPU but the last one.

    Optional tensors are given to an operator that takes one tensor otherwise.
    """
    here, away = (torch.zeros(1, device=device) for device in ("cpu", "meta"))
    arguments: list[Any] = []
    kinds = [str(argument.type) for argument in operator._schema.arguments]
    tensors = {"Tensor", "Optional[Tensor]"} if kinds.count("Tensor") == 1 else {"Tensor"}
    for kind in kinds:
        if kind in tensors:
            arguments.append(here)
        elif kind == "List[Tensor]":
            arguments.append([here])
        else:
            arguments.append([] if kind in LISTS else VALUES.get(kind))
    names = [argument.name for argument in operator._schema.arguments]
    last = max(
        i for i, x in enumerate(arguments) if (x is here or x == [here]) and names[i] not in ON_HOST
    )
    arguments[last] = [away] if isinstance(arguments[last], list) else away
    return arguments


def test_every_package_has_operators():
    assert {str(operator).split(".")[0] for operator in operators()} == set(PACKAGES)


def takes_several_tensors(operator: Any) -> bool:
    kinds = [str(argument.type) for argument in operator._schema.arguments]
    return sum("Tensor" in kind for kind in kinds) > 1 or "List[Tensor]" in kinds


@pytest.mark.parametrize("operator", [x for x in operators() if takes_several_tensors(x)], ids=str)
def test_tensors_of_several_devices(operator):
    with pytest.raises(ValueError, match=r"^tensors must be on one device, got cpu, meta$"):
        operator.redispatch(ON_GPU, *arguments_of(operator))


def reads_on_the_host(operator: Any) -> bool:
    return any(argument.name in ON_HOST for argument in operator._schema.arguments)


@pytest.mark.parametrize("operator", [x for x in operators() if reads_on_the_host(x)], ids=str)
def test_the_host_reads_tensors_of_its_own(operator):
    arguments = [
        torch.zeros(1, device="cpu" if argument.name in ON_HOST else "meta")
        if "Tensor" in str(argument.type)
        else ([] if str(argument.type) in LISTS else VALUES.get(str(argument.type)))
        for argument in operator._schema.arguments
    ]
    # beyond the comparison of devices: these are no numbers of a call
    with pytest.raises((TypeError, RuntimeError, AttributeError, ValueError)) as found:
        operator.redispatch(ON_GPU, *arguments)
    assert "one device" not in str(found.value)
