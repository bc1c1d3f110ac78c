"""Calls of which one argument is wrong: they work all the same, or say which argument it is."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from inspect import Parameter, signature
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

WRONG = (
    [],
    [1],
    {},
    "x",
    b"x",
    3,
    -1,
    2.5,
    True,
    2**63,
    10**5000,
    -(10**5000),
    float("nan"),
    (1, 2),
    (2**63, 2**63),
    {1: 2},
    object(),
    complex(1, 2),
    np.zeros(3),
    torch.float16,
    torch.tensor(3),
    torch.zeros(3),
    torch.zeros(0),
    torch.nested.nested_tensor([torch.zeros(4, 2, 16), torch.zeros(3, 2, 16)], layout=torch.jagged),
)
ERRORS = TypeError, ValueError, NotImplementedError


def wrong_values(right: Any) -> Iterator[Any]:
    """Yield values that are, or may be, wrong for an argument."""
    yield None
    yield from WRONG
    if isinstance(right, Tensor):
        yield from (
            right.tolist(),
            right.double() if right.is_floating_point() else right.float(),
            right[None],
            right.flatten() if right.ndim != 1 else right[:, None],
            right.to("meta"),
            right.bool(),
            right.to(torch.complex64),
            right.to_sparse(),
            right[:0],
            right[..., :0],
        )


def arguments_of(function: Callable[..., Any]) -> list[str]:
    """Return the names of a function's arguments."""
    variadic = Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL
    return [p.name for p in signature(function).parameters.values() if p.kind not in variadic]


def check_wrong_calls(function: Callable[..., Any], given: dict[str, Any], name: str) -> None:
    """Replace one argument of a right call by each wrong value.

    What raises is one of three errors that begins with the name of an argument of the function, for
    another argument may be what no longer fits, or has this argument's name; and it has changed no
    tensor.
    """
    known = re.compile(rf"({'|'.join(arguments_of(function))})\b|.*\b{name}\b")
    before = {key: x.clone() for key, x in given.items() if isinstance(x, Tensor)}
    for value in wrong_values(given.get(name)):
        fresh = {key: before[key].clone() if key in before else x for key, x in given.items()}
        try:
            function(**{**fresh, name: value})
        except ERRORS as error:
            if not known.match(str(error)):
                pytest.fail(f"{name}={type(value).__name__}: no argument is named in: {error}")
            changed = [key for key, x in before.items() if not torch.equal(fresh[key], x)]
            assert not changed, (name, type(value).__name__, changed)
