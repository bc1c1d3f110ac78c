"""Make small mistakes in the source of kernels: one operator, number, mask or barrier at a time."""

from __future__ import annotations

import ast
import itertools
import random
import re
from collections.abc import Iterable, Iterator, Sequence
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
Node = ast.expr | ast.stmt


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


class _Finder:
    """Collects the mutations of one device function."""

    def __init__(self, file: str, function: str, source: bytes) -> None:
        self.file, self.function, self.source = file, function, source
        self.lines = source.split(b"\n")
        self.starts = [0, *itertools.accumulate(len(line) + 1 for line in self.lines)]
        self.found: list[Mutation] = []

    def span(self, node: Node) -> tuple[int, int]:
        end_line, end = node.end_lineno or node.lineno, node.end_col_offset or 0
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[end_line - 1] + end

    def text(self, node: Node) -> str:
        begin, end = self.span(node)
        return self.source[begin:end].decode()

    def add(self, kind: str, node: Node, span: tuple[int, int], wrong: str) -> None:
        begin, end = span
        line = self.source.count(b"\n", 0, begin) + 1
        text = self.lines[line - 1].decode().strip()
        right = " ".join(self.source[begin:end].decode().split())
        place = (self.file, self.function, kind, line, text, begin, end)
        self.found.append(Mutation(*place, right, wrong, self.span(node)))

    def between(
        self, kind: str, node: Node, left: Node, right: Node, words: dict[str, str]
    ) -> None:
        """Replace the operator that stands between two operands, parentheses aside."""
        begin, end = self.span(left)[1], self.span(right)[0]
        between = re.sub(rb"#[^\n]*", lambda m: b" " * len(m[0]), self.source[begin:end])
        operator = re.search(rb"is\s+not|[^\s()\\]+", between)
        if operator is not None and (wrong := words.get(" ".join(operator[0].decode().split()))):
            self.add(kind, node, (begin + operator.start(), begin + operator.end()), wrong)

    def walk(self, node: ast.AST) -> None:
        """Add the mutations of a node, and of what is below it but for hints."""
        below: Iterable[ast.AST] = ast.iter_child_nodes(node)
        match node:
            case ast.BinOp():
                self.between("operator", node, node.left, node.right, OPERATORS)
            case ast.Compare():
                for left, right in itertools.pairwise([node.left, *node.comparators]):
                    self.between("comparison", node, left, right, COMPARISONS)
            case ast.BoolOp(values=[left, right, *_]):
                self.between("condition", node, left, right, {"and": "or", "or": "and"})
            case ast.UnaryOp(op=ast.Not() | ast.USub()):
                self.add("condition", node, self.span(node), self.text(node.operand))
            case (
                ast.If(test=ast.Name() | ast.Attribute() as test)
                | ast.IfExp(test=ast.Name() | ast.Attribute() as test)
            ):
                self.add("condition", test, self.span(test), f"not {self.text(test)}")
            case ast.Constant(value=bool(value)):
                self.add("constant", node, self.span(node), str(not value))
            case ast.Constant(value=int(value)):
                self.add("constant", node, self.span(node), str(value + 1))
            case ast.Constant(value=float(value)):
                self.add("constant", node, self.span(node), str(2 * value or 1.0))
            case ast.Call():
                if _is_hint(node):
                    return
                self.call(node)
                given = (k.value for k in node.keywords if k.arg not in HINT_ARGUMENTS)
                below = [node.func, *node.args, *given]
            case ast.Expr(value=ast.Constant()):
                return  # a docstring
            case ast.Expr(value=ast.Call(func=function)) if _name(function) not in HINTS:
                self.add("dropped", node, self.span(node), "pass")
            case ast.Assign(value=value):
                stored = {x.id for target in node.targets for x in _names(target)}
                # a wait, a mask, a correction
                if stored and stored <= {x.id for x in _names(value)} and not _is_hint(value):
                    self.add("dropped", node, self.span(node), "pass")
                below = [value]
            case ast.AugAssign(value=value):
                self.add("dropped", node, self.span(node), "pass")
                below = [value]
            case ast.AnnAssign(value=value):
                below = [value] if value else []
        for child in below:
            self.walk(child)

    def call(self, node: ast.Call) -> None:
        name = _name(node.func)
        if name in NAMES:
            end = self.span(node.func)[1]
            self.add("function", node, (end - len(name), end), NAMES[name])
        if name == "where" and len(node.args) == 3:
            first, second = node.args[1:]
            begin, end = self.span(first)[0], self.span(second)[1]
            if self.source[begin:end].count(b"(") == self.source[begin:end].count(b")"):
                swapped = f"{self.text(second)}, {self.text(first)}"
                self.add("function", node, (begin, end), swapped)
        for keyword in node.keywords:
            if keyword.arg == "mask":
                value = keyword.value
                self.add("mask", node, self.span(value), f"({self.text(value)}) | True")


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _names(node: ast.AST) -> Iterator[ast.Name]:
    return (x for x in ast.walk(node) if isinstance(x, ast.Name))


def _is_hint(node: ast.AST) -> bool:
    name = _name(node.func) if isinstance(node, ast.Call) else ""
    return name in HINTS or bool(LAYOUT.search(name))


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
                finder.walk(statement)
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
