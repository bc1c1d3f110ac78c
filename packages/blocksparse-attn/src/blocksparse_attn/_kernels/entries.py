"""Kernels with flat parameters, made of functions that take structures."""

import ast
import inspect
import linecache
from collections.abc import Callable
from typing import Any


def entry(jit: Any, tensors: Any, numbers: Any, *constants: Any) -> Callable[[Any], Any]:
    """Make a kernel of a function of structures, whose parameters are the structures' fields.

    Triton compiles a kernel anew for values of numbers within a structure, whatever it is told. So
    the kernel takes the fields one by one, and first of all makes the structures of them::

        @entry(triton.jit, Tensors, Numbers, Options)
        def double(tensors, numbers, OPTIONS: tl.constexpr):
            ...

    is the same as::

        @triton.jit(
            do_not_specialize=Numbers._fields, do_not_specialize_on_alignment=Tensors._fields
        )
        def double(x_ptr, count, BLOCK: tl.constexpr):
            tensors = Tensors(x_ptr)
            numbers = Numbers(count)
            OPTIONS: tl.constexpr = Options(BLOCK)
            ...

    Hence a constant must not be given the name of a field a second time.

    Args:
        jit: what makes kernels: ``triton.jit``.
        tensors: the structure of the pointers.
        numbers: that of the numbers.
        constants: those of the constants.
    """

    def make(function: Any) -> Any:
        lines = inspect.getsource(function).splitlines(keepends=True)
        tree: Any = ast.parse("".join(lines)).body[0]
        parameters, made = [], []
        for argument, structure in zip(tree.args.args, (tensors, numbers, *constants), strict=True):
            kind = f": {ast.unparse(argument.annotation)}" if argument.annotation else ""
            parameters += [field + kind for field in structure._fields]
            fields = ", ".join(structure._fields)
            made.append(f"    {argument.arg}{kind} = {structure.__name__}({fields})\n")
        head = f"def {tree.name}({', '.join(parameters)}):\n"
        lines = [head, *made, *lines[tree.body[0].lineno - 1 :]]
        # where Triton looks for a function's source
        path = f"<entry {function.__module__}.{tree.name}>"
        linecache.cache[path] = sum(map(len, lines)), None, lines, path
        exec(compile("".join(lines), path, "exec"), function.__globals__)
        kernel = jit(
            do_not_specialize=numbers._fields, do_not_specialize_on_alignment=tensors._fields
        )
        return kernel(function.__globals__[tree.name])

    return make
