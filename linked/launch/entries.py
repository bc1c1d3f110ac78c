"""Kernels whose parameters are declared once, as the fields of structures.

A kernel is written as a function of structures::

    class Tensors(NamedTuple):
        x_ptr: Foreign
        out_ptr: Pointer

    class Numbers(NamedTuple):
        tokens: Number

    class Tile(NamedTuple):
        BLOCK: Constant

    @entry(triton.jit)
    def double_kernel(tensors: Tensors, numbers: Numbers, TILE: Tile):
        ...

Triton specialises a kernel on integers and on the alignment of pointers, unless a parameter is
listed; it would specialise on every field of a structure. So ``entry`` gives Triton
``double_kernel(x_ptr, out_ptr, tokens, BLOCK)``, which packs its parameters into the structures
first. A launch passes the fields in order.
"""

from __future__ import annotations

import ast
import inspect
import linecache
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

# a tensor that the package allocated: it begins at a multiple of 16 bytes
Pointer = Annotated[Any, "specialised"]
# a tensor that may begin anywhere
Foreign = Annotated[Any, "do_not_specialize_on_alignment"]
# a tensor map of Hopper
Map = Annotated[Any, "specialised"]
# an int or a float, which later calls change
Number = Annotated[Any, "do_not_specialize"]
# a value that is compiled in
Constant = Annotated[Any, "constexpr"]


def entry(jit: Callable[..., Any]) -> Callable[[Callable[..., None]], Any]:
    """Return a decorator that makes a kernel of a function of structures.

    Args:
        jit: ``triton.jit`` or ``gluon.jit``.

    Each parameter of the function is annotated with a structure, or with one of the types above.
    Fields of a structure are annotated with these types or with structures, whose fields get the
    outer field's name before theirs. A structure of constants holds nothing else. The function has
    a docstring, and its module ``from __future__ import annotations``.

    Raises:
        TypeError: on a field or parameter of another type, on two structures of one name, and on a
            function without a docstring, when the kernel is declared.
    """

    # imported here: the host's modules share the types above, and go without Triton
    from triton.language import constexpr

    def make(function: Callable[..., None]) -> Any:
        parameters: list[str] = []
        wishes = "do_not_specialize", "do_not_specialize_on_alignment"
        listed: dict[str, list[str]] = {wish: [] for wish in wishes}
        names = function.__globals__
        # the module of the kernel need not import what only the packing names
        names["constexpr"] = constexpr

        def unpack(name: str, kind: Any, prefix: str = "") -> str:
            """Add the parameters of a kind; return the expression that packs them."""
            if hasattr(kind, "_fields"):
                if names.setdefault(kind.__name__, kind) is not kind:
                    raise TypeError(f"{function.__name__}: two things are named {kind.__name__}")
                inner = [
                    unpack(prefix + field, hint, f"{prefix}{field}_")
                    for field, hint in get_type_hints(kind, include_extras=True).items()
                ]
                return f"{kind.__name__}({', '.join(inner)})"
            if kind is constexpr or kind == Constant:
                parameters.append(f"{name}: constexpr")
            elif kind in (Pointer, Foreign, Map, Number):
                parameters.append(name)
                listed.get(kind.__metadata__[0], []).append(name)
            else:
                raise TypeError(
                    f"{function.__name__}: {name} must have a type of entries, got {kind}"
                )
            return name

        packing = []
        for name, kind in get_type_hints(function, include_extras=True).items():
            packed = unpack(name, kind)
            if packed != name:
                packing.append(f"{name}{': constexpr' if name.isupper() else ''} = {packed}")
        return jit(**listed)(_with_parameters(function, parameters, packing))

    return make


def _with_parameters(
    function: Callable[..., None], parameters: list[str], packing: list[str]
) -> Callable[..., None]:
    """Return a function with other parameters, and with statements in place of its docstring.

    Triton reads source from the cache of lines. There the module gets a second entry, under another
    spelling of its path, in which every other line stands where it does in the file.
    """
    file = Path(function.__code__.co_filename)
    path = f"{file.parent}/./{file.name}"
    written, _ = inspect.findsource(function)
    # with the kernels of the module that were made before
    lines = list(linecache.cache[path][2] if path in linecache.cache else written)
    first = function.__code__.co_firstlineno - 1
    block = inspect.getblock(written[first:])
    node: Any = ast.parse("".join(block)).body[0]
    if ast.get_docstring(node) is None:  # its place is taken
        raise TypeError(f"{node.name} must have a docstring")
    docstring = node.body[0]
    begin, inner, end = (first + n for n in (node.lineno, docstring.lineno, docstring.end_lineno))
    lines[begin - 1 : end] = ["\n"] * (end - begin + 1)
    lines[begin - 1] = f"def {node.name}({', '.join(parameters)}):\n"
    lines[inner - 1] = f"    {'; '.join(packing) or 'pass'}\n"
    linecache.cache[path] = len(lines), None, lines, path
    made: dict[str, Any] = {}
    source = "\n" * (begin - 1) + "".join(lines[begin - 1 : first + len(block)])
    exec(compile(source, path, "exec"), function.__globals__, made)
    rewritten: Callable[..., None] = made[node.name]
    rewritten.__doc__ = function.__doc__
    return rewritten


def flat(*structures: Any) -> tuple[Any, ...]:
    """Return the fields of structures, and of the structures in them, in order."""
    fields: list[Any] = []
    for x in structures:
        fields += flat(*x) if isinstance(x, tuple) else (x,)
    return tuple(fields)
