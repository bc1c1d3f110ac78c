"""Make small mistakes in the source of kernels: one operator, number, mask or barrier at a time."""

from __future__ import annotations

import ast
import itertools
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

OPERATORS = {
    "+": "-", "-": "+", "*": "+", "/": "*", "//": "*", "%": "//",
    "&": "|", "|": "&", "^": "|", "<<": ">>", ">>": "<<",
}  # fmt: skip
COMPARISONS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==",
    "is": "is not", "is not": "is",
}  # fmt: skip
NAMES = {"maximum": "minimum", "minimum": "maximum", "max": "min", "min": "max"}
# what the compiler is told, and no result shows
HINTS = {"static_assert", "assume", "multiple_of", "max_contiguous", "max_constancy"}
HINT_ARGUMENTS = {
    "cache_modifier", "eviction_policy", "flatten", "input_precision", "layout", "num_stages",
    "num_warps", "scope", "sem", "volatile", "warp_specialize",
}  # fmt: skip
LAYOUT = re.compile("layout", re.IGNORECASE)


@dataclass(frozen=True)
class Mutation:
    """One mistake: bytes ``[begin, end)`` of a file become ``wrong``.

    ``probe`` is the span of the whole expression or statement, which ``probed`` replaces by what
    raises, to see whether the place is run at all.
    """

    file: str
    function: str
    kind: str
    line: int
    text: str
    begin: int
    end: int
    right: str
    wrong: str
    probe: tuple[int, int]

    @property
    def name(self) -> str:
        """What it is, whatever stands above it in the file."""
        return f"{self.file} {self.function}: {self.right} -> {self.wrong} in {self.text}"

    def applied(self, source: bytes) -> bytes:
        return source[: self.begin] + self.wrong.encode() + source[self.end :]

    def probed(self, source: bytes) -> bytes:
        begin, end = self.probe
        return source[:begin] + b"(_this_place_is_run_)" + source[end:]


class _Finder(ast.NodeVisitor):
    """Collects the mutations of one device function."""

    def __init__(self, file: str, function: str, source: bytes) -> None:
        self.file, self.function, self.source = file, function, source
        self.lines = source.split(b"\n")
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line) + 1)
        self.found: list[Mutation] = []

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        end_line, end = node.end_lineno or node.lineno, node.end_col_offset or 0
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[end_line - 1] + end

    def text(self, node: ast.expr | ast.stmt) -> str:
        begin, end = self.span(node)
        return self.source[begin:end].decode()

    def add(self, kind: str, node: ast.expr | ast.stmt, begin: int, end: int, wrong: str) -> None:
        right = self.source[begin:end].decode()
        line = self.source.count(b"\n", 0, begin) + 1
        text = self.lines[line - 1].decode().strip()
        place = (self.file, self.function, kind, line, text, begin, end)
        one_line = " ".join(right.split())
        self.found.append(Mutation(*place, one_line, wrong, self.span(node)))

    def between(
        self, kind: str, node: ast.expr, left: ast.expr, right: ast.expr, words: dict[str, str]
    ) -> None:
        """Replace the operator that stands between two operands, parentheses aside."""
        begin, end = self.span(left)[1], self.span(right)[0]
        between = re.sub(rb"#[^\n]*", lambda m: b" " * len(m[0]), self.source[begin:end])
        operator = re.search(rb"is\s+not|[^\s()\\]+", between)
        if operator is not None and (wrong := words.get(" ".join(operator[0].decode().split()))):
            self.add(kind, node, begin + operator.start(), begin + operator.end(), wrong)

    # ---- expressions

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self.between("operator", node, node.left, node.right, OPERATORS)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, right in zip([node.left, *node.comparators], node.comparators, strict=False):
            self.between("comparison", node, left, right, COMPARISONS)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        left, right = node.values[:2]
        self.between("condition", node, left, right, {"and": "or", "or": "and"})
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub):
            begin, end = self.span(node)
            self.add("condition", node, begin, end, self.text(node.operand))
        self.generic_visit(node)

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        if isinstance(node.test, ast.Name | ast.Attribute):
            self.add("condition", node.test, *self.span(node.test), f"not {self.text(node.test)}")
        self.generic_visit(node)

    visit_IfExp = visit_If

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            wrong = str(not value)
        elif isinstance(value, int):
            wrong = str(value + 1)
        elif isinstance(value, float):
            wrong = str(2 * value or 1.0)
        else:
            return
        self.add("constant", node, *self.span(node), wrong)

    def visit_Call(self, node: ast.Call) -> None:
        name = _name(node.func)
        if name in HINTS or LAYOUT.search(name):
            return
        if name in NAMES:
            end = self.span(node.func)[1]
            self.add("function", node, end - len(name), end, NAMES[name])
        if name == "where" and len(node.args) == 3:
            first, second = node.args[1:]
            begin, end = self.span(first)[0], self.span(second)[1]
            swapped = f"{self.text(second)}, {self.text(first)}"
            if self.source[begin:end].count(b"(") == self.source[begin:end].count(b")"):
                self.add("function", node, begin, end, swapped)
        for keyword in node.keywords:
            if keyword.arg == "mask":
                value = keyword.value
                self.add("mask", node, *self.span(value), f"({self.text(value)}) | True")
        self.visit(node.func)
        for argument in node.args:
            self.visit(argument)
        for keyword in node.keywords:
            if keyword.arg not in HINT_ARGUMENTS:
                self.visit(keyword.value)

    # ---- statements

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return  # a docstring
        if isinstance(node.value, ast.Call) and _name(node.value.func) not in HINTS:
            self.add("dropped", node, *self.span(node), "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        stored = {x.id for t in node.targets for x in ast.walk(t) if isinstance(x, ast.Name)}
        loaded = {x.id for x in ast.walk(node.value) if isinstance(x, ast.Name)}
        is_hint = isinstance(node.value, ast.Call) and (
            _name(node.value.func) in HINTS or LAYOUT.search(_name(node.value.func))
        )
        if stored and stored <= loaded and not is_hint:  # a wait, a mask, a correction
            self.add("dropped", node, *self.span(node), "pass")
        self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.add("dropped", node, *self.span(node), "pass")
        self.visit(node.value)


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _is_device_function(node: ast.FunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def mutations_of(path: Path, file: str, *, every_function: bool = False) -> list[Mutation]:
    """Return all mutations of a file's device functions, or of every function, in their order."""
    source = path.read_bytes()
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and (every_function or _is_device_function(node)):
            finder = _Finder(file, node.name, source)
            for statement in node.body:
                finder.visit(statement)
            found += finder.found
    return found


def sample(found: Sequence[Mutation], seed: int) -> Iterator[Mutation]:
    """Return mutations in a random order that takes one of each file in turn."""
    draw = random.Random(seed)
    files: dict[str, list[Mutation]] = {}
    for mutation in draw.sample(found, len(found)):
        files.setdefault(mutation.file, []).append(mutation)
    rounds = itertools.zip_longest(*files.values())
    return (mutation for each in rounds for mutation in each if mutation)
