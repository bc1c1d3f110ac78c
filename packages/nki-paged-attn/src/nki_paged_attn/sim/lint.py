"""The subset of Python that every front end of NKI from 0.3 to 0.7 accepts.

The front ends of 0.3 to 0.6 parse a kernel's source and support a part of Python; 0.7 and later
support all of it (pages ``nki/migration`` and the announcement of the specialisation change).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

# nl functions that return tiles; as tokens, without a call, they are accepted
VALUE_STYLE = {
    "add",
    "subtract",
    "multiply",
    "divide",
    "maximum",
    "minimum",
    "exp",
    "log",
    "sqrt",
    "rsqrt",
    "max",
    "min",
    "sum",
    "mean",
    "matmul",
    "load",
    "store",
    "copy",
    "where",
    "zeros",
    "ones",
    "full",
    "transpose",
    "softmax",
    "tanh",
    "reciprocal",
}


def lint(source: str) -> list[str]:
    """Return what some front end refuses in a kernel's source, one line each."""
    tree = ast.parse(source)
    found = [*_nodes(tree), *_decorators(tree)]
    return [f"line {line}: {text}" for line, text in sorted(found)]


def _nodes(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Compare(ops=ops) if any(isinstance(o, (ast.Is, ast.IsNot)) for o in ops):
                yield node.lineno, "uses is"
            case ast.FunctionDef(args=arguments) if arguments.kwonlyargs:
                yield node.lineno, "has keyword-only arguments"
            case ast.Attribute(value=ast.Name(id="np" | "numpy")):
                yield node.lineno, f"uses np.{node.attr}"
            case ast.Call(keywords=keywords) if any(k.arg == "mask" for k in keywords):
                yield node.lineno, "passes mask="
            case ast.Call(func=ast.Attribute(attr="pop"), args=[ast.Constant(value=int()), *_]):
                yield node.lineno, "pops by an index, which a front end may ignore"
            case ast.Attribute(attr="arange" | "mgrid" | "par_dim"):
                yield node.lineno, f"uses {node.attr}"
            case ast.Try() | ast.With() | ast.Lambda() | ast.GeneratorExp() | ast.ClassDef():
                yield node.lineno, f"uses {type(node).__name__.lower()}"
            case ast.Yield() | ast.YieldFrom() | ast.Await() | ast.Global() | ast.Nonlocal():
                yield node.lineno, f"uses {type(node).__name__.lower()}"
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="nl"), attr=name)) if (
                name in VALUE_STYLE
            ):
                yield node.lineno, f"calls nl.{name} for its value"


def _decorators(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Only kernels, which nothing in the file calls, may be decorated."""
    called = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.decorator_list and node.name in called:
            yield node.lineno, f"decorates the helper {node.name}"
