"""Classes of kernels, and annotations of their arguments."""

from __future__ import annotations

from typing import Any


class NKIObject:
    """Base of classes that a kernel uses; equal if their fields are.

    Fields are what a class annotates, and what it gives a value that is no function.
    """

    def __init_subclass__(cls) -> None:
        # before dataclass, which takes fields by their annotations alone
        own = vars(cls).get("__annotations__", {})
        cls.__annotations__ = own | {
            n: Any for n, x in vars(cls).items() if n not in own and _is_field(n, x)
        }

    def __init__(self, *values: Any, **named: Any) -> None:
        fields: list[str] = []
        for base in reversed(type(self).__mro__):
            fields += [n for n in vars(base).get("__annotations__", {}) if n not in fields]
        given = dict(zip(fields, values, strict=False)) | named
        if len(values) > len(fields) or set(given) - set(fields):
            raise TypeError(f"{type(self).__name__} has the fields {', '.join(fields)}")
        for field in fields:
            setattr(self, field, given.get(field, getattr(type(self), field, None)))
        self.__post_init__()

    def __post_init__(self) -> None:
        """Run after the fields are set."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    __hash__ = object.__hash__


def _is_field(name: str, x: Any) -> bool:
    """Say whether a member of a class is a field: not private, no function or class."""
    return not (name.startswith("_") or isinstance(x, type) or hasattr(type(x), "__get__"))


class MemoryRegion:
    """The memories, by name."""

    sbuf = "sbuf"
    psum = "psum"
    private_hbm = "private_hbm"
    shared_hbm = "shared_hbm"


class tensor:
    """An annotation of an argument: ``tensor[shape, dtype]``; nothing is checked."""

    def __class_getitem__(cls, item: Any) -> type[tensor]:
        return cls


class mutable_tensor(tensor):
    """An annotation of an argument that the kernel writes."""
